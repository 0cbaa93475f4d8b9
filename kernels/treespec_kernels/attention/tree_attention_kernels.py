"""Triton kernels of tree attention. Needs triton.

`attend_items` runs twice per layer, first over packed items and then over node items, as the *same* compiled kernel:
block sizes, warps and the shape of every dot are equal, so a position contributes the same bits when it moves from a
node item to a packed item. `combine_segments` then combines a row's segments from left to right. There are no atomics.
"""

import triton
import triton.language as tl

from treespec_kernels.launch.pointwise import soft_cap
from treespec_kernels.launch.predecessors import wait_for_predecessors
from treespec_kernels.linear.dot import dot


@triton.jit
def find_partials(
    p_item,
    first_partial,
    first_segment,
    num_segments,
    i_kv_head,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Return the indices of the partial results of the item's (row, head) pairs, and a mask of pairs that have one.

    There is none if a chain's row ends before this segment, if a row's window starts after it, or for padding.
    """
    o_m = tl.load(p_item + 2) + tl.arange(0, BLOCK_M)
    m_m = o_m < tl.load(p_item + 3)
    row = o_m // GROUP
    row_segment = tl.load(p_item + 6) - tl.load(first_segment + row, mask=m_m, other=0)
    m_partial = m_m & (row_segment >= 0) & (row_segment < tl.load(num_segments + row, mask=m_m, other=0))
    partial = (tl.load(first_partial + row, mask=m_m, other=0) + row_segment).to(tl.int64)
    return partial * NUM_HEADS + i_kv_head * GROUP + o_m % GROUP, m_partial


@triton.jit
def head_offsets(
    head,
    o_d,
    stride_plane,
    stride_head,
    HEAD_DIM: tl.constexpr,
    PART_DIM: tl.constexpr,
    PLANE_HEADS: tl.constexpr,
):
    """Return the offsets of dimensions `o_d` of a head in a layer's cache.

    Unless the cache has whole heads (PLANE_HEADS is 0), a head is several consecutive heads of PART_DIM in the cache's
    planes, of which each has PLANE_HEADS.
    """
    o_head = head * stride_head + o_d
    if PLANE_HEADS > 0:
        part = head * (HEAD_DIM // PART_DIM) + o_d // PART_DIM
        o_head = part // PLANE_HEADS * stride_plane + part % PLANE_HEADS * stride_head + o_d % PART_DIM
    return o_head


@triton.jit
def find_slots(p_ancestors, p_pages, context_len, tile, key_hi, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (page, offset) of the keys at positions tile, tile + 1, ..; arbitrary from key_hi on.

    From the root on, the slot of a position is that of the row's ancestor.
    """
    o_n = tile + tl.arange(0, BLOCK_N)
    m_n = o_n < key_hi
    depth = o_n - context_len
    node = tl.load(p_ancestors + depth, mask=m_n & (depth >= 0), other=0)
    slot = tl.where(depth >= 0, context_len + node, o_n)
    page = tl.load(p_pages + slot // PAGE_SIZE, mask=m_n, other=0)
    return page, slot % PAGE_SIZE


# Sizes of the batch and the tree are not specialised, so that all passes share one binary.
@triton.jit(do_not_specialize=["window", "stride_page_table", "stride_ancestors"])
def attend_items(
    q,  # [num_rows, num_heads, HEAD_DIM]
    k_cache,  # [num_pages, num_kv_heads, PAGE_SIZE, HEAD_DIM], or [num_planes, num_pages, PLANE_HEADS, .., PART_DIM]
    v_cache,
    partial_acc,  # [num_partials, NUM_HEADS, HEAD_DIM] fp32
    partial_max,  # [num_partials, NUM_HEADS] fp32, log2
    partial_sum,
    items,  # [capacity, 8] int32: request, slot_row, m_lo, m_hi, key_lo, key_hi, segment, continues
    first_partial,  # [num_rows] int32; also the next two
    first_segment,
    num_segments,
    page_table,
    context_lens,
    depths,
    ancestors,
    scale_log2,
    window,  # or None
    score_cap,  # soft cap in units of log2, or None
    stride_q_row,
    stride_q_head,
    stride_k_plane,  # None for whole heads
    stride_k_page,
    stride_k_head,
    stride_k_slot,
    stride_v_plane,
    stride_v_page,
    stride_v_head,
    stride_v_slot,
    stride_page_table,
    stride_ancestors,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PART_DIM: tl.constexpr,
    PLANE_HEADS: tl.constexpr,  # 0 for whole heads
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_predecessors(PDL)
    i_kv_head = tl.program_id(1).to(tl.int64)
    p_item = items + tl.program_id(0).to(tl.int64) * 8
    key_lo = tl.load(p_item + 4)
    key_hi = tl.load(p_item + 5)
    if key_lo >= key_hi:  # empty item of a device layout
        return
    request = tl.load(p_item).to(tl.int64)
    slot_row = tl.load(p_item + 1).to(tl.int64)
    m_lo = tl.load(p_item + 2)
    m_hi = tl.load(p_item + 3)
    continues = tl.load(p_item + 7)
    context_len = tl.load(context_lens + request)

    o_m = m_lo + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    m_m = o_m < m_hi
    m_d = o_d < HEAD_DIM
    row = (o_m // GROUP).to(tl.int64)
    head = i_kv_head * GROUP + o_m % GROUP
    position = context_len + tl.load(depths + row, mask=m_m, other=0)
    p_q = q + row[:, None] * stride_q_row + head[:, None] * stride_q_head + o_d[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None] & m_d[None, :], other=0.0)

    partial, m_partial = find_partials(
        p_item, first_partial, first_segment, num_segments, i_kv_head, NUM_HEADS, GROUP, BLOCK_M
    )
    m_state = m_partial & (o_m < m_lo + continues * BLOCK_M)
    b_max = tl.load(partial_max + partial, mask=m_state, other=float("-inf"))
    b_sum = tl.load(partial_sum + partial, mask=m_state, other=0.0)
    p_acc = partial_acc + partial[:, None] * HEAD_DIM + o_d[None, :]
    b_acc = tl.load(p_acc, mask=m_state[:, None] & m_d[None, :], other=0.0)
    # The threads that store the state below may differ from those that loaded it.
    tl.debug_barrier()

    p_ancestors = ancestors + slot_row * stride_ancestors
    p_pages = page_table + request * stride_page_table
    p_k_head = k_cache + head_offsets(i_kv_head, o_d, stride_k_plane, stride_k_head, HEAD_DIM, PART_DIM, PLANE_HEADS)
    p_v_head = v_cache + head_offsets(i_kv_head, o_d, stride_v_plane, stride_v_head, HEAD_DIM, PART_DIM, PLANE_HEADS)
    page, offset = find_slots(p_ancestors, p_pages, context_len, key_lo, key_hi, PAGE_SIZE, BLOCK_N)
    for tile in range(key_lo, key_hi, BLOCK_N):
        o_n = tile + tl.arange(0, BLOCK_N)  # absolute positions
        m_n = o_n < key_hi
        # Stale slots may hold NaN, and 0 * NaN is NaN, so V is masked as well as the scores.
        m_kv = m_n[:, None] & m_d[None, :]
        o_k = page.to(tl.int64) * stride_k_page + offset.to(tl.int64) * stride_k_slot
        o_v = page.to(tl.int64) * stride_v_page + offset.to(tl.int64) * stride_v_slot
        b_k = tl.load(p_k_head[None, :] + o_k[:, None], mask=m_kv, other=0.0)
        b_v = tl.load(p_v_head[None, :] + o_v[:, None], mask=m_kv, other=0.0)
        # Look up slots one tile ahead: the pipeliner does not prefetch keys whose address is loaded in the same step.
        page, offset = find_slots(p_ancestors, p_pages, context_len, tile + BLOCK_N, key_hi, PAGE_SIZE, BLOCK_N)

        m_scores = m_n[None, :] & (o_n[None, :] <= position[:, None])
        if window is not None:
            m_scores = m_scores & (o_n[None, :] > position[:, None] - window)
        b_scores = dot(b_q, tl.trans(b_k), tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32))
        b_scores *= scale_log2
        if score_cap is not None:
            b_scores = soft_cap(b_scores, score_cap)
        b_scores = tl.where(m_scores, b_scores, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_scores, axis=1))
        # -inf minus -inf is NaN, so a row without keys so far subtracts 0. A fully masked tile changes nothing.
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_weights = tl.exp2(b_scores - b_shift[:, None])
        b_decay = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_decay + tl.sum(b_weights, axis=1)
        b_acc = dot(b_weights.to(b_v.dtype), b_v, b_acc * b_decay[:, None])
        b_max = b_new_max

    # Recomputed to avoid holding the indices in registers across the loop.
    partial, m_partial = find_partials(
        p_item, first_partial, first_segment, num_segments, i_kv_head, NUM_HEADS, GROUP, BLOCK_M
    )
    tl.store(partial_max + partial, b_max, mask=m_partial)
    tl.store(partial_sum + partial, b_sum, mask=m_partial)
    p_acc = partial_acc + partial[:, None] * HEAD_DIM + tl.arange(0, BLOCK_D)[None, :]
    tl.store(p_acc, b_acc, mask=m_partial[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :])


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
    """Load (maximum, sum, accumulator) of CHUNK segments from `lo` on, of a row with `count` segments.

    Segments past the count are not read: those partials are stale or another row's, and 0 * NaN is NaN.
    """
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
    sinks,  # [NUM_HEADS] fp32 scores that weigh no value, or None
    out,  # [num_rows, NUM_HEADS, HEAD_DIM]
    stride_out_row,
    stride_out_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program handles one head of one row.

    Segments are combined in fp32 from left to right, CHUNK at a time: each chunk against the largest maximum so far,
    and within a chunk in a fixed order. Chunks are counted from the row's first segment, so a row's bits depend only on
    the number and the values of its own segments. The kernel is bound by the latency of dependent loads: one for
    `num_segments` and `first_partial`, and one per chunk.
    """
    wait_for_predecessors(PDL)
    # 64 accumulators per lane: more would spill, or wait for a chunk's first load before issuing its last.
    CHUNK: tl.constexpr = 16 if BLOCK_D <= 128 else 2048 // BLOCK_D
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    count = tl.load(num_segments + row)
    first = tl.load(first_partial + row).to(tl.int64)
    b_max = float("-inf")
    b_sum = tl.zeros([CHUNK], dtype=tl.float32)  # element i sums segments i, i + CHUNK, ..
    b_acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    # A branch separates the loads of a chunk from their uses. In a single basic block, ptxas saves registers by sinking
    # loads below the uses of other loads, and each of them adds a wait.
    s_max, s_sum, s_acc = load_segments(
        partial_acc, partial_max, partial_sum, first, 0, count, head, NUM_HEADS, HEAD_DIM, BLOCK_D, CHUNK
    )
    for next_lo in range(CHUNK, count + CHUNK, CHUNK):
        b_new_max = tl.maximum(b_max, tl.max(s_max, axis=0))
        # -inf minus -inf is NaN, so subtract 0 before the first key.
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
    if sinks is not None:
        # A sink that is far above all scores makes the total infinite, and the row 0.
        total += tl.exp2(tl.load(sinks + head) * 1.4426950408889634 - b_max)
    # A padding row of a captured graph has no partial and becomes 0 / 1. A NaN from the row's own keys stays NaN.
    b_out = b_acc / tl.where(total == 0.0, 1.0, total)
    o_d = tl.arange(0, BLOCK_D)
    p_out = out + row * stride_out_row + head * stride_out_head + o_d
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=o_d < HEAD_DIM)
