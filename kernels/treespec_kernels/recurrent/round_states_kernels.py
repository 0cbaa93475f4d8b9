"""Triton kernels of recurrent layers in passes of fixed shape. Needs triton."""

import triton
import triton.language as tl

_PLANNED = "replayed depths ancestors spreads starts ends order parents kept last taps num_requests".split()
_EXCHANGED = "kept new_inputs inputs slots replayed depths num_requests stride_slot".split()


@triton.jit(do_not_specialize=_PLANNED)
def plan_round(
    replayed,  # [num_requests] int32
    depths,  # [num_requests, NODES] int32
    ancestors,  # [num_requests, NODES, WIDTH] int32
    spreads,  # [1] int32, or None
    starts,  # `StatePaths`
    ends,
    order,
    parents,
    kept,
    last,
    taps,  # [num_requests * (WIDTH + NODES), HISTORY + 1] int64
    num_requests,
    NODES: tl.constexpr,
    WIDTH: tl.constexpr,
    HISTORY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One program plans the rows of one request."""
    KERNEL: tl.constexpr = HISTORY + 1
    request = tl.program_id(0)
    count = tl.load(replayed + request)
    first_replayed = request * WIDTH
    first = num_requests * WIDTH + request * NODES
    stored = request * (HISTORY + WIDTH)
    first_new = num_requests * (HISTORY + WIDTH) + request * NODES
    start = request * (WIDTH + NODES)
    root = tl.where(count > 0, first_replayed + count - 1, -1)
    spread = False
    if spreads is not None:
        spread = tl.load(spreads) != 0

    o_w = tl.arange(0, BLOCK_W)
    m_w = o_w < WIDTH
    tl.store(parents + first_replayed + o_w, tl.where(o_w > 0, first_replayed + o_w - 1, -1), mask=m_w)
    tl.store(kept + first_replayed + o_w, tl.full([BLOCK_W], -1, tl.int32), mask=m_w)
    tl.store(order + start + o_w, first_replayed + o_w, mask=o_w < count)
    for tap in tl.static_range(KERNEL):
        tl.store(taps + (first_replayed + o_w) * KERNEL + tap, (stored + o_w + tap).to(tl.int64), mask=m_w)

    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n < NODES
    depth = tl.load(depths + request * NODES + o_n, mask=m_n, other=-1)
    p_seen = ancestors + (request * NODES + o_n) * WIDTH
    above = tl.load(p_seen + depth - 1, mask=depth > 0, other=0)
    chained = tl.where(spread & (depth < 0) & (o_n > 0), first + o_n - 1, root)
    tl.store(parents + first + o_n, tl.where(depth > 0, first + above, chained), mask=m_n)
    m_own = m_n & ((depth >= 0) | spread)

    # The number of nodes before each one in preorder: those whose ancestors come first in lexicographic order.
    rank = tl.zeros([BLOCK_N], dtype=tl.int32)
    children = tl.zeros([BLOCK_N], dtype=tl.int32)
    for first_m in range(0, NODES, BLOCK_M):
        o_m = first_m + tl.arange(0, BLOCK_M)
        depth_m = tl.load(depths + request * NODES + o_m, mask=o_m < NODES, other=-1)
        p_seen_m = ancestors + (request * NODES + o_m) * WIDTH
        above_m = tl.load(p_seen_m + depth_m - 1, mask=depth_m > 0, other=-1)
        children += tl.sum((above_m[:, None] == o_n[None, :]).to(tl.int32), axis=0)
        is_own = (o_m < NODES) & ((depth_m >= 0) | spread)
        equal = (is_own[:, None] & m_own[None, :]).to(tl.int32)
        before = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.int32)
        for step in range(WIDTH):
            seen_m = tl.load(p_seen_m + step, mask=is_own, other=0)[:, None]
            seen_n = tl.load(p_seen + step, mask=m_own, other=0)[None, :]
            before += equal * (seen_m < seen_n).to(tl.int32)
            equal *= (seen_m == seen_n).to(tl.int32)
        rank += tl.sum(before, axis=0)
    tl.store(order + start + count + rank, first + o_n, mask=m_own)
    is_kept = m_own & (children > 1)
    tl.store(kept + first + o_n, tl.where(is_kept, first_replayed + depth, -1), mask=m_n)
    tl.store(starts + request, start)
    tl.store(ends + request, start + count + tl.sum(m_own.to(tl.int32), axis=0))
    tl.store(last + request, root)
    for tap in tl.static_range(KERNEL):
        place = depth + (tap - HISTORY)  # among a node's ancestors
        seen = tl.load(p_seen + place, mask=m_n & (depth >= 0) & (place >= 0), other=0)
        read = tl.where(place >= 0, first_new + seen, stored + HISTORY + count + place)
        read = tl.where(depth >= 0, read, first_new + o_n)
        tl.store(taps + (first + o_n) * KERNEL + tap, read.to(tl.int64), mask=m_n)


@triton.jit(do_not_specialize=_EXCHANGED)
def exchange_inputs(
    kept,  # [num_slots, places, CHANNELS], slots `stride_slot` apart
    new_inputs,  # [num_requests * NODES, CHANNELS]
    inputs,  # [num_requests * (HISTORY + WIDTH + NODES), CHANNELS]
    slots,  # [num_requests] int32
    replayed,
    depths,  # [num_requests, NODES] int32
    num_requests,
    stride_slot,
    CHANNELS: tl.constexpr,
    NODES: tl.constexpr,
    WIDTH: tl.constexpr,
    HISTORY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program exchanges BLOCK_C channels of one request."""
    request = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = (o_c < CHANNELS)[None, :]
    count = tl.load(replayed + request)
    p_kept = kept + tl.load(slots + request).to(tl.int64) * stride_slot + o_c[None, :]
    p_stored = inputs + request * (HISTORY + WIDTH) * CHANNELS + o_c[None, :]
    o_r = tl.arange(0, BLOCK_R)[:, None]
    b_stored = tl.load(p_kept + o_r * CHANNELS, mask=(o_r < HISTORY + count) & m_c, other=0.0)
    tl.store(p_stored + o_r * CHANNELS, b_stored, mask=(o_r < HISTORY + WIDTH) & m_c)
    b_last = tl.load(p_kept + (count + o_r) * CHANNELS, mask=(o_r < HISTORY) & m_c)
    is_active = tl.load(depths + request * NODES) >= 0
    tl.debug_barrier()  # all loads precede all stores
    tl.store(p_kept + o_r * CHANNELS, b_last, mask=(o_r < HISTORY) & m_c & is_active)
    p_new = new_inputs + request * NODES * CHANNELS + o_c[None, :]
    p_inputs = inputs + (num_requests * (HISTORY + WIDTH) + request * NODES) * CHANNELS + o_c[None, :]
    for first in range(0, NODES, BLOCK_R):
        node = first + o_r
        m_node = node < NODES
        depth = tl.load(depths + request * NODES + node, mask=m_node, other=-1)
        b_new = tl.load(p_new + node * CHANNELS, mask=m_node & m_c)
        tl.store(p_inputs + node * CHANNELS, b_new, mask=m_node & m_c)
        tl.store(p_kept + (HISTORY + node) * CHANNELS, b_new, mask=(depth >= 0) & is_active & m_c)


@triton.jit(do_not_specialize=["inputs", "slots", "paths", "path_lens", "num_layers", "places", "width", "history"])
def keep_path(
    inputs,  # [num_slots, num_layers, places, CHANNELS]
    slots,  # [num_requests] int32
    paths,  # [num_requests, width] int32
    path_lens,
    num_layers,
    places,
    width,
    history,
    CHANNELS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program moves BLOCK_C channels of one request's path in one layer.

    Sources are ascending and never below their destinations, and a thread moves the same channels in every step.
    """
    request = tl.program_id(0)
    layer = tl.program_id(1) // BLOCKS
    o_c = tl.program_id(1) % BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < CHANNELS
    place = (tl.load(slots + request).to(tl.int64) * num_layers + layer) * places + history
    p_row = inputs + place * CHANNELS + o_c
    for step in range(tl.load(path_lens + request)):
        node = tl.load(paths + request * width + step)
        tl.store(p_row + step * CHANNELS, tl.load(p_row + node * CHANNELS, mask=m_c), mask=m_c)
