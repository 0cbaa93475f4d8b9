"""Triton kernel of the pass layout. Needs triton."""

import triton
import triton.language as tl


@triton.jit
def _segment_of(position, SHORT: tl.constexpr, LONG: tl.constexpr, LONG_FROM: tl.constexpr):
    return tl.minimum(position, LONG_FROM) // SHORT + tl.maximum(position - LONG_FROM, 0) // LONG


@triton.jit
def _start_of(segment, SHORT: tl.constexpr, LONG: tl.constexpr, LONG_FROM: tl.constexpr):
    NUM_SHORT: tl.constexpr = LONG_FROM // SHORT
    return tl.minimum(segment, NUM_SHORT) * SHORT + tl.maximum(segment - NUM_SHORT, 0) * LONG


@triton.jit
def _store_items(items, index, m_items, request, slot_row, m_lo, m_hi, key_lo, key_hi, segment, continues):
    """Write the columns ITEM_FIELDS. An item without keys gets the empty range [0, 0), which `attend_items` skips."""
    p_item = items + index.to(tl.int64) * 8
    m_keys = key_hi > key_lo
    tl.store(p_item, request, mask=m_items)
    tl.store(p_item + 1, slot_row, mask=m_items)
    tl.store(p_item + 2, m_lo, mask=m_items)
    tl.store(p_item + 3, m_hi, mask=m_items)
    tl.store(p_item + 4, tl.where(m_keys, key_lo, 0), mask=m_items)
    tl.store(p_item + 5, tl.where(m_keys, key_hi, 0), mask=m_items)
    tl.store(p_item + 6, segment, mask=m_items)
    tl.store(p_item + 7, continues, mask=m_items)


@triton.jit
def _load_rows(depths, row_slots, row, m_row, context_len, width, max_context, num_slots):
    """Return (depth, slot, exists). Padding and rows that exceed the buffers or the page table do not exist."""
    depth = tl.load(depths + row, mask=m_row, other=-1)
    row_slot = tl.load(row_slots + row, mask=m_row, other=0)
    slot = context_len + row_slot
    depth = tl.where(context_len <= max_context, depth, -1)
    exists = (depth >= 0) & (depth < width) & (row_slot >= 0) & (slot < num_slots)
    return depth, slot, exists


# Sizes of the batch and the tree are not specialised, so that all layouts share one binary.
_SIZES = (
    "num_requests num_rows width max_context num_slots num_tiles num_packed_segments num_node_segments window "
    "stride_page_table"
).split()


@triton.jit(do_not_specialize=_SIZES)
def lay_out_pass(
    context_lens,  # [num_requests] int32
    page_table,  # [num_requests, num_slots / PAGE_SIZE] int32
    depths,  # [num_requests, num_rows] int32
    row_slots,  # [num_requests, num_rows] int32
    positions,  # [num_requests * num_rows] int32
    slots,  # [num_requests * num_rows] int64
    first_segment,  # [num_requests * num_rows] int32
    num_segments,
    packed_items,  # [num_packed_segments, num_requests, num_tiles, 8] int32
    node_items,  # [num_node_segments, num_requests * num_rows, TILES_OF_GROUP, 8] int32
    num_requests,
    num_rows,  # rows per request
    width,
    max_context,
    num_slots,
    num_tiles,  # M tiles per request
    num_packed_segments,
    num_node_segments,
    window,
    stride_page_table,
    CHAIN: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHORT: tl.constexpr,
    LONG: tl.constexpr,
    LONG_FROM: tl.constexpr,
    TILES_OF_GROUP: tl.constexpr,
    ROWS_OF_TILE: tl.constexpr,  # maximum rows per M tile, rounded up to a power of two
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """A request has one program per M tile for its packed items, then one per BLOCK_R rows for their positions, slots,
    segments and node items."""
    request = tl.program_id(0)
    i_part = tl.program_id(1)
    context_len = tl.load(context_lens + request)
    if i_part < num_tiles:
        # The packed items of one M tile, one per segment.
        first_row = request * num_rows
        first = i_part * BLOCK_M // GROUP
        m_end = tl.minimum((i_part + 1) * BLOCK_M, num_rows * GROUP)
        o_r = first + tl.arange(0, ROWS_OF_TILE)
        m_r = o_r < (m_end + GROUP - 1) // GROUP
        depth, _, exists = _load_rows(
            depths, row_slots, first_row + o_r, m_r, context_len, width, max_context, num_slots
        )
        last = tl.max(tl.where(exists, o_r, first), axis=0)
        # Tiles without rows get a start greater than any end.
        start = tl.min(tl.where(exists, tl.maximum(context_len + depth - window + 1, 0), 1 << 30), axis=0)
        if CHAIN:
            key_hi = tl.max(tl.where(exists, context_len + depth + 1, 0), axis=0)
        else:
            key_hi = context_len // BLOCK_N * BLOCK_N
        key_lo = start // BLOCK_N * BLOCK_N
        segment_of_tile = _segment_of(key_lo, SHORT, LONG, LONG_FROM)
        for k in range(0, num_packed_segments, BLOCK_S):
            o_k = k + tl.arange(0, BLOCK_S)
            segment = segment_of_tile + o_k
            lo = tl.maximum(key_lo, _start_of(segment, SHORT, LONG, LONG_FROM))
            hi = tl.minimum(key_hi, _start_of(segment + 1, SHORT, LONG, LONG_FROM))
            # M tiles of one segment are adjacent, so only the first one reads its keys from HBM, the others from L2.
            index = (o_k * num_requests + request) * num_tiles + i_part
            m_lo = first_row * GROUP + i_part * BLOCK_M
            m_hi = first_row * GROUP + m_end
            m_k = o_k < num_packed_segments
            _store_items(packed_items, index, m_k, request, first_row + last, m_lo, m_hi, lo, hi, segment, 0)
        return

    o_r = (i_part - num_tiles) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_r = o_r < num_rows
    row = request * num_rows + o_r
    depth, slot, exists = _load_rows(depths, row_slots, row, m_r, context_len, width, max_context, num_slots)
    position = context_len + depth
    page = tl.load(page_table + request.to(tl.int64) * stride_page_table + slot // PAGE_SIZE, mask=exists, other=0)
    own_slot = page.to(tl.int64) * PAGE_SIZE + slot % PAGE_SIZE
    tl.store(positions + row, tl.where(exists, position, 0), mask=m_r)
    tl.store(slots + row, tl.where(exists, own_slot, 0), mask=m_r)
    start = tl.maximum(position - window + 1, 0)
    start_segment = _segment_of(start, SHORT, LONG, LONG_FROM)
    count = _segment_of(position, SHORT, LONG, LONG_FROM) + 1 - start_segment
    tl.store(first_segment + row, start_segment, mask=m_r)
    tl.store(num_segments + row, tl.where(exists, count, 0), mask=m_r)
    if not CHAIN:
        root_tile = context_len // BLOCK_N * BLOCK_N
        key_lo = tl.maximum(root_tile, start // BLOCK_N * BLOCK_N)
        first_of_row = _segment_of(key_lo, SHORT, LONG, LONG_FROM)
        for k in range(num_node_segments):
            segment = first_of_row + k
            begin = _start_of(segment, SHORT, LONG, LONG_FROM)
            lo = tl.maximum(key_lo, begin)
            hi = tl.minimum(position + 1, _start_of(segment + 1, SHORT, LONG, LONG_FROM))
            hi = tl.where(exists, hi, 0)
            # A row whose window starts at the root's tile or later has no packed item to continue.
            continues = ((lo > begin) & (start < root_tile)).to(tl.int32)
            for tile in tl.static_range(TILES_OF_GROUP):
                index = (k * num_requests * num_rows + row) * TILES_OF_GROUP + tile
                m_lo = row * GROUP + tile * BLOCK_M
                m_hi = tl.minimum(m_lo + BLOCK_M, (row + 1) * GROUP)
                _store_items(node_items, index, m_r, request, row, m_lo, m_hi, lo, hi, segment, continues)
