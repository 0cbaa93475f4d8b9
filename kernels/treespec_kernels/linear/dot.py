"""Matrix product of the kernels. Needs triton."""

from typing import Any

import triton
import triton.language as tl

from treespec_kernels.launch.triton_launch import emits_proxy_fences, is_interpreted


def lacks_proxy_fence(_semantic: Any = None) -> tl.constexpr:
    """Return whether this compiler omits the fence between copies to shared memory and wgmma instructions.

    wgmma (sm_90) reads shared memory through the async proxy, and `cp.async` writes it through the generic proxy.
    Without `fence.proxy.async` between them, a product may read old operands. Triton before 3.8 omits it in pipelined
    loops (triton #9610). Triton calls this function at compile time; it returns False in the interpreter.
    """
    options = getattr(getattr(_semantic, "builder", None), "options", None)
    return tl.constexpr(getattr(options, "arch", None) == "sm90" and not emits_proxy_fences(triton.__version__))


lacks_proxy_fence.__triton_builtin__ = True  # type: ignore[attr-defined]


_INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def dot(a, b, acc):
    """Return acc + a @ b in fp32.

    The interpreter's dot calls BLAS, which is not row-invariant, so every element is summed in the same order there.
    """
    if _INTERPRETED:
        product = a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :]
        acc += tl.sum(product, axis=1)
    else:
        if lacks_proxy_fence() and a.dtype != tl.float32:  # float32 has no wgmma
            tl.inline_asm_elementwise(
                "fence.proxy.async.shared::cta; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
            )
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc
