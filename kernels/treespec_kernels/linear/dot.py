"""Matrix product of the kernels. Needs triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, FIXED_ORDER: tl.constexpr):
    """Return acc + a @ b in fp32.

    `FIXED_ORDER` sums every element in the same order, for the interpreter, whose dot calls BLAS.
    """
    if FIXED_ORDER:
        product = a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :]
        acc += tl.sum(product, axis=1)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc
