"""Tree attention's last kernel: a row's segments become its output. Import this module only where triton is installed.

Segments are combined in fp32 from left to right, CHUNK at a time: against the largest maximum so far, and within a
chunk in the one order in which a block is summed. Chunks are counted from the row's own first segment, so that its bits
follow from its own segments, their number and their values, and from nothing else. No atomics.

There is almost nothing to compute; the time is that of loads which wait for one another. `num_segments` and
`first_partial` together are one such wait, and a chunk is one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treespec_kernels.launch.predecessors import wait_for_predecessors


@triton.jit
def load_segments(
    partial_acc,
    partial_max,
    partial_sum,
    first,
    lo,
    count,
    head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """(max, sum, accumulator) of segments lo, lo + 1, .. of a row that has `count`. Those beyond are as if they had
    seen no key, and not read: the partials there are another row's or stale, and 0 * NaN is NaN."""
    o_s = lo + tl.arange(0, CHUNK)
    o_d = tl.arange(0, BLOCK_D)
    m_s = o_s < count
    partial = (first + o_s) * NUM_HEADS + head
    s_max = tl.load(partial_max + partial, mask=m_s, other=float("-inf"))
    s_sum = tl.load(partial_sum + partial, mask=m_s, other=0.0)
    p_acc = partial_acc + partial[:, None] * HEAD_DIM + o_d[None, :]
    s_acc = tl.load(p_acc, mask=m_s[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0)
    return s_max, s_sum, s_acc


@triton.jit
def combine_segments(
    partial_acc,  # [num_partials, NUM_HEADS, HEAD_DIM] fp32
    partial_max,  # [num_partials, NUM_HEADS] fp32, log2
    partial_sum,
    first_partial,  # [num_rows] int32
    num_segments,
    out,  # [num_rows, NUM_HEADS, HEAD_DIM]
    stride_out_row,
    stride_out_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_predecessors(PDL)
    # 64 accumulators a lane: with more, code spills, or uses the first of a chunk before it asks for the last.
    CHUNK: tl.constexpr = 16 if BLOCK_D <= 128 else 8
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    count = tl.load(num_segments + row)
    first = tl.load(first_partial + row).to(tl.int64)
    b_max = float("-inf")
    b_sum = tl.zeros([CHUNK], dtype=tl.float32)  # of every CHUNK-th segment
    b_acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    # A branch parts the loads of a chunk from their use. Where both stand in one basic block, ptxas saves registers by
    # moving loads behind the use of others, and each that it moves is one more wait.
    s_max, s_sum, s_acc = load_segments(
        partial_acc, partial_max, partial_sum, first, 0, count, head, NUM_HEADS, HEAD_DIM, BLOCK_D, CHUNK
    )
    for next_lo in range(CHUNK, count + CHUNK, CHUNK):
        b_new_max = tl.maximum(b_max, tl.max(s_max, axis=0))
        # -inf minus -inf is NaN: where no key was seen yet, 0 is subtracted.
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_decay = tl.exp2(b_max - b_shift)
        s_decay = tl.exp2(s_max - b_shift)
        b_sum = b_sum * b_decay + s_sum * s_decay
        b_acc = b_acc * b_decay + tl.sum(s_acc * s_decay[:, None], axis=0)
        b_max = b_new_max
        if next_lo < count:
            s_max, s_sum, s_acc = load_segments(
                partial_acc, partial_max, partial_sum, first, next_lo, count, head, NUM_HEADS, HEAD_DIM, BLOCK_D, CHUNK
            )
    total = tl.sum(b_sum, axis=0)
    # A padding row of a captured graph has no partial: 0 / 1. A NaN of the row's own keys stays a NaN.
    b_out = b_acc / tl.where(total == 0.0, 1.0, total)
    o_d = tl.arange(0, BLOCK_D)
    p_out = out + row * stride_out_row + head * stride_out_head + o_d
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=o_d < HEAD_DIM)
