"""Triton kernel of the tree select. Needs triton."""

import triton
import triton.language as tl

from treespec_kernels.tree import device_trees

SEED_MASK = tl.constexpr(1 << device_trees.SEED_BIT)


@triton.jit
def select_nodes(
    cand_tokens,  # [B, MAX_DEPTH * CANDIDATES]; also the next three
    cand_parents,
    cand_values,
    cand_masks,
    seed_cands,  # [B, SEEDS]; also the next three
    seed_tokens,
    seed_parents,
    seed_probs,
    levels,  # [B]; also the next four
    root_tokens,
    least_values,
    max_depths,
    wanted,
    tree_tokens,  # [B, MAX_NODES]; also parents, depths, masks and values
    tree_parents,
    tree_depths,
    tree_ancestors,  # [B, MAX_NODES, MAX_DEPTH + 1]
    tree_sizes,  # [B]
    tree_masks,
    tree_values,
    CANDIDATES: tl.constexpr,
    SEEDS: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    MAX_NODES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_S: tl.constexpr,
    LOG_BLOCK_Q: tl.constexpr,
):
    """One program handles one request. It finds the smallest selected value by radix selection instead of sorting."""
    request = tl.program_id(0).to(tl.int64)
    token = tl.load(root_tokens + request)
    level = tl.load(levels + request)
    least = tl.load(least_values + request)
    is_busy = token >= 0
    deepest = tl.minimum(tl.load(max_depths + request), MAX_DEPTH)
    usable = tl.maximum(tl.minimum(level, deepest), 0) * CANDIDATES
    o_q = tl.arange(0, BLOCK_Q)
    m_q = o_q < usable
    first = request * (MAX_DEPTH * CANDIDATES)
    value = tl.load(cand_values + first + o_q, mask=m_q, other=-1.0)

    # Seeds that growth has not reached: compute value and depth from their parents', one iteration per depth. Deeper
    # seeds get a depth of MAX_DEPTH + 1, and are excluded.
    LAST: tl.constexpr = MAX_DEPTH * CANDIDATES
    o_s = tl.arange(0, BLOCK_S)
    m_s = o_s < SEEDS
    p_s = request * SEEDS + o_s
    seed_token = tl.load(seed_tokens + p_s, mask=m_s, other=-1)
    seed_parent = tl.load(seed_parents + p_s, mask=m_s, other=-1)
    seed_prob = tl.load(seed_probs + p_s, mask=m_s, other=0.0)
    reached = tl.load(seed_cands + p_s, mask=m_s, other=-1)
    is_reached = reached >= 0
    is_left = m_s & (seed_token >= 0) & (is_reached == 0)
    seed_value = tl.load(cand_values + first + reached, mask=is_reached, other=1.0)
    seed_depth = tl.where(is_reached, reached // CANDIDATES + 1, 0)
    i_above = tl.maximum(seed_parent, 0)
    for _ in range(MAX_DEPTH + 1):
        value_above = tl.where(seed_parent < 0, 1.0, tl.gather(seed_value, i_above, axis=0))
        depth_above = tl.where(seed_parent < 0, 0, tl.gather(seed_depth, i_above, axis=0))
        seed_value = tl.where(is_left, value_above * seed_prob, seed_value)
        seed_depth = tl.where(is_left, depth_above + 1, seed_depth)
    is_left = is_left & (seed_depth <= deepest)
    seed_index = tl.where(is_reached, reached, LAST + o_s)
    parent_index = tl.where(seed_parent < 0, -1, tl.gather(seed_index, i_above, axis=0))
    i_seed = tl.minimum(tl.maximum(o_q - LAST, 0), BLOCK_S - 1)
    is_extra = (o_q >= LAST) & (o_q < LAST + SEEDS)
    left_value = tl.gather(tl.where(is_left, seed_value, -1.0), i_seed, axis=0)
    value = tl.where(is_extra, left_value, value)
    is_allowed = (m_q | is_extra) & is_busy & (value >= 0) & (value >= least)

    # The bits of non-negative floats compare like the floats, and values are at most 1, so 30 bits suffice. `threshold`
    # becomes the largest number with at least `room` eligible candidates at or above it, or 0 if there are fewer
    # candidates. Each iteration determines two bits from three counts, which share one reduction.
    room = tl.maximum(tl.minimum(tl.load(wanted + request), MAX_NODES) - 1, 0).to(tl.int64)
    bits = tl.where(is_allowed, value.to(tl.int32, bitcast=True), -1)
    threshold = tl.zeros((), tl.int32)
    for i in range(15):
        step = tl.full((), 1, tl.int32) << (28 - 2 * i)
        ones = (bits >= threshold + step).to(tl.int64)
        ones += (bits >= threshold + 2 * step).to(tl.int64) << 20
        ones += (bits >= threshold + 3 * step).to(tl.int64) << 40
        counts = tl.sum(ones, axis=0)
        digit = ((counts & 0xFFFFF) >= room).to(tl.int32)
        digit += (((counts >> 20) & 0xFFFFF) >= room).to(tl.int32)
        digit += ((counts >> 40) >= room).to(tl.int32)
        threshold += digit * step

    # Select all candidates above `threshold`, then the first ones equal to it while there is room.
    above = bits > threshold
    equal = bits == threshold
    remaining = room - tl.sum(above.to(tl.int32), axis=0)
    is_taken = above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= remaining))
    node = tl.cumsum(is_taken.to(tl.int32), axis=0)  # the root is node 0
    size = tl.where(is_busy, tl.max(node, axis=0) + 1, 0)

    # The rest is per node. Node n is the first candidate with a count of n, found by binary search since counts ascend.
    # This uses only registers and shared memory, because stores to global memory may not be visible to other threads.
    o_n = tl.arange(0, BLOCK_N)
    cand = tl.zeros((BLOCK_N,), tl.int32)
    for i in tl.static_range(LOG_BLOCK_Q):
        half = BLOCK_Q >> (i + 1)
        cand += tl.where(tl.gather(node, cand + (half - 1), axis=0) < o_n, half, 0)
    is_root = (o_n == 0) & is_busy
    m_drafted = (o_n > 0) & (o_n < size)
    m_extra = m_drafted & (cand >= LAST)
    m_cand = m_drafted & (cand < LAST)
    i_seed = tl.where(m_extra, cand - LAST, 0)
    p_cand = first + cand
    cand_parent = tl.load(cand_parents + p_cand, mask=m_cand, other=-1)
    cand_parent = tl.where(m_extra, tl.gather(parent_index, i_seed, axis=0), cand_parent)
    parent = tl.where(cand_parent < 0, 0, tl.gather(node, tl.maximum(cand_parent, 0), axis=0))
    parent = tl.where(m_drafted, parent, -1)
    depth = tl.where(m_extra, tl.gather(seed_depth, i_seed, axis=0), cand // CANDIDATES + 1)
    depth = tl.where(m_drafted, depth, tl.where(is_root, 0, -1))
    m_n = o_n < MAX_NODES
    p_n = request * MAX_NODES + o_n
    node_token = tl.load(cand_tokens + p_cand, mask=m_cand, other=0)
    node_token = tl.where(m_extra, tl.gather(seed_token, i_seed, axis=0), node_token)
    mask = tl.load(cand_masks + p_cand, mask=m_cand, other=0)
    tl.store(tree_tokens + p_n, tl.where(is_root, token, node_token), mask=m_n)
    tl.store(tree_parents + p_n, parent, mask=m_n)
    tl.store(tree_depths + p_n, depth, mask=m_n)
    tl.store(tree_masks + p_n, tl.where(m_extra, SEED_MASK, mask), mask=m_n)
    node_value = tl.load(cand_values + p_cand, mask=m_cand, other=0.0)
    node_value = tl.where(m_extra, tl.gather(seed_value, i_seed, axis=0), node_value)
    tl.store(tree_values + p_n, tl.where(is_root, 1.0, node_value), mask=m_n)
    tl.store(tree_sizes + request, size)

    # Ancestors: every node moves up to its parent once per level; padding stays.
    o_w = tl.arange(0, BLOCK_W)
    up = o_n
    ancestors = tl.zeros((BLOCK_N, BLOCK_W), tl.int32) + o_n[:, None]
    for i in range(1, MAX_DEPTH + 1):
        up = tl.gather(tl.maximum(parent, 0), up, axis=0)
        ancestors = tl.where(o_w[None, :] == depth[:, None] - i, up[:, None], ancestors)
    m_w = m_n[:, None] & (o_w <= MAX_DEPTH)[None, :]
    tl.store(tree_ancestors + p_n[:, None] * (MAX_DEPTH + 1) + o_w[None, :], ancestors, mask=m_w)
