"""Programmatic dependent launch (PDL): a kernel's programs start while the previous kernel still runs. Needs triton.

A PDL launch may start once every program of the previous kernel (in stream order, or along a graph edge) has called
`gdc_launch_dependents` or has exited. That kernel may still be running, and none of its writes are visible yet.
`gdc_wait` returns when the previous kernel has completed and its writes are visible. Results do not change, because:

1. Every program calls `gdc_wait` first, before any load, store, copy or exit. So all memory that it reads has been
   written (read after write), and no earlier kernel still reads or writes memory that it writes (write after read,
   write after write). This covers all memory, weights and tables included. The one exception is `prefetch`, which asks
   for weights to be in L2: it returns no data, and later loads see what is written in the meantime, since all accesses
   to global memory pass through L2.
2. Only then does it call `gdc_launch_dependents`. A dependent thus starts when all programs of this kernel have passed
   their wait, so the kernel before this one has completed. At most one earlier kernel is unfinished: the one that the
   dependent waits for. If a program exited without waiting, its kernel could complete before its predecessor, and the
   next kernel would start too early.
3. A kernel without PDL, a copy or a fill starts when everything before it has completed, as usual; by 1, the last
   kernel of a chain completes after all others. After a copy PDL has no effect: CUDA overlaps only kernels. The chain
   that `treespec autotune` checks starts after a copy.
4. `launch_options` sets the launch attribute and the wait together. The wait returns at once in a kernel that was
   launched without the attribute.

Compilers do not move accesses above the wait: it is an operation with side effects in Triton 3.9, and inline assembly
with side effects in 3.6. It must be outside of loops, since software pipelining would hoist a loop's first loads above
it. On sm_100 a block allocates its tensor memory before the wait. This cannot deadlock: dependents start once every
program of this kernel holds its own allocation, and proceed when these programs have exited. `aot/code_order.py`
checks the order in the machine code of every configuration that is compiled ahead of time.
"""

import triton
import triton.language as tl

from treespec_kernels.launch import triton_launch

PREFETCH = tl.constexpr(triton_launch.PREFETCH)
# Bytes per row: 64 KB per program of 128 rows, and 6 to 15 MB for a layer of 8B, which an H200 reads in 1.5 to 3.5 us.
PREFETCH_BYTES = tl.constexpr(512)


@triton.jit
def wait_for_predecessors(PDL: tl.constexpr):
    """Wait for the previous kernel, then let dependents start; without PDL a no-op.

    In a kernel, only `prefetch` and the computation of its addresses may precede it.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers, num_bytes):
    """Prefetch `num_bytes` from each pointer to L2, without waiting for them.

    Args:
        pointers: one pointer or a block, aligned to 16 bytes, to memory that no kernel writes.
        num_bytes: int32 of the same shape, multiples of 16.
    """
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_rows(p_rows, num_bytes):
    """Prefetch the first `PREFETCH_BYTES` of each row of a weight to L2.

    A weight's reads thus start while the previous kernel ends, and memory does not idle between layers.

    Args:
        p_rows: pointers [num_rows], as in `prefetch`.
        num_bytes: bytes that a program reads per row, a multiple of 16.
    """
    prefetch(p_rows, tl.zeros(p_rows.shape, dtype=tl.int32) + tl.minimum(num_bytes, PREFETCH_BYTES))
