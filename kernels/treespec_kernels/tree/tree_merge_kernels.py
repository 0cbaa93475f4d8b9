"""Triton kernel of the tree merge. Needs triton."""

from __future__ import annotations

import triton
import triton.language as tl

from treespec_kernels.tree import device_trees
from treespec_kernels.tree import growth_limits as limits

MIN_MIXTURE, MAX_MIXTURE = tl.constexpr(limits.MIN_MIXTURE), tl.constexpr(limits.MAX_MIXTURE)
WIDE_DEPTH, NARROW_FRONTIER = tl.constexpr(limits.WIDE_DEPTH), tl.constexpr(limits.NARROW_FRONTIER)
DEEPEST, SEED_MASK = tl.constexpr(limits.DEEPEST), tl.constexpr(1 << device_trees.SEED_BIT)


@triton.jit
def shares_of(tokens, probs, weight, mask):
    """Return the shares of valid proposals, -1 elsewhere. NaN is invalid, because it fails every comparison."""
    share = weight * probs
    return tl.where(mask & (tokens >= 0) & (share >= 0) & (share < float("inf")), share, -1.0)


@triton.jit
def merge_level(
    tokens,  # [SSMS, B, FRONTIER, PROPOSALS]
    probs,  # [SSMS, B, FRONTIER, PROPOSALS] fp32
    weights,  # [B, SSMS] fp32
    end_tokens,  # [B, ENDS]
    seed_tokens,  # [B, SEEDS]; also the next three
    seed_parents,
    seed_probs,
    seed_ratios,
    cand_tokens,  # [B, MAX_DEPTH, FRONTIER * (SSMS + 1) * PROPOSALS]; also the next three
    cand_parents,
    cand_values,
    cand_masks,
    frontier,  # [B, FRONTIER]; also the next five
    frontier_tokens,
    frontier_values,
    frontier_depths,
    frontier_slots,
    frontier_seeds,
    frontier_ancestors,  # [B, FRONTIER, MAX_DEPTH + 1]
    seed_cands,  # [B, SEEDS]
    levels,  # [B]
    stride_tokens_ssm,
    stride_tokens_request,
    stride_tokens_node,
    stride_probs_ssm,
    stride_probs_request,
    stride_probs_node,
    stride_weights,
    stride_ends,
    SSMS: tl.constexpr,
    FRONTIER: tl.constexpr,
    PROPOSALS: tl.constexpr,
    ENDS: tl.constexpr,
    SEEDS: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One program handles one request.

    Every proposal is compared with the proposals at its node, one SSM after another, so that sums have a fixed order.
    """
    CANDIDATES: tl.constexpr = FRONTIER * (SSMS + 1) * PROPOSALS
    request = tl.program_id(0).to(tl.int64)
    level = tl.load(levels + request)
    if level >= MAX_DEPTH:
        return

    # Load the proposals of the SSMs, then of the seeds.
    o_p = tl.arange(0, BLOCK_P)
    m_p = o_p < CANDIDATES
    f = o_p // ((SSMS + 1) * PROPOSALS)
    i_own = o_p % ((SSMS + 1) * PROPOSALS)
    ssm = (i_own // PROPOSALS).to(tl.int64)
    c = i_own % PROPOSALS
    node = tl.load(frontier + request * FRONTIER + f, mask=m_p, other=-1)
    node_value = tl.load(frontier_values + request * FRONTIER + f, mask=m_p, other=0.0)
    node_seed = tl.load(frontier_seeds + request * FRONTIER + f, mask=m_p, other=-2)
    p_tokens = tokens + request * stride_tokens_request
    p_probs = probs + request * stride_probs_request
    is_ssm = m_p & (ssm < SSMS)
    token = tl.load(p_tokens + ssm * stride_tokens_ssm + f * stride_tokens_node + c, mask=is_ssm, other=-1)
    prob = tl.load(p_probs + ssm * stride_probs_ssm + f * stride_probs_node + c, mask=is_ssm, other=0.0)
    weight = tl.load(weights + request * stride_weights + ssm, mask=is_ssm, other=0.0)
    m_node = node >= 0
    valid = shares_of(token, prob, weight, m_node) >= 0

    o_s = tl.arange(0, BLOCK_S)
    m_s = o_s < SEEDS
    p_s = request * SEEDS + o_s
    seed_token = tl.load(seed_tokens + p_s, mask=m_s, other=-1)
    seed_parent = tl.load(seed_parents + p_s, mask=m_s, other=-3)
    is_seed = seed_token >= 0
    is_older = is_seed[None, :] & (seed_parent[None, :] == seed_parent[:, None]) & (o_s[None, :] < o_s[:, None])
    place = tl.sum(is_older.to(tl.int32), axis=1)  # index among its siblings
    is_child = is_seed[None, :] & (seed_parent[None, :] == node_seed[:, None]) & m_node[:, None]
    is_own = is_child & (place[None, :] == c[:, None]) & (m_p & (ssm == SSMS))[:, None]
    own_seed = tl.max(tl.where(is_own, seed_token[None, :], -1), axis=1)
    token = tl.where(own_seed >= 0, own_seed, token)
    valid = valid | (own_seed >= 0)
    is_named = is_child & (seed_token[None, :] == token[:, None])
    seed = tl.min(tl.where(is_named, o_s[None, :], BLOCK_S), axis=1)
    seeded = seed < BLOCK_S

    # Sum the shares of each proposal's token over the SSMs, and find proposals that repeat an earlier one.
    o_c = tl.arange(0, BLOCK_C)
    m_c = m_node[:, None] & (o_c < PROPOSALS)[None, :]
    total = tl.zeros((BLOCK_P,), tl.float32)
    proposed_by = tl.zeros((BLOCK_P,), tl.int32)
    repeats = tl.zeros((BLOCK_P,), tl.int32)
    has_mixture = tl.zeros((BLOCK_P,), tl.int32)
    for g in tl.static_range(SSMS):
        o_ssm = tl.full((), g, tl.int64)
        o_tokens = (f * stride_tokens_node)[:, None] + o_c[None, :]
        o_probs = (f * stride_probs_node)[:, None] + o_c[None, :]
        tokens_g = tl.load(p_tokens + o_ssm * stride_tokens_ssm + o_tokens, mask=m_c, other=-1)
        probs_g = tl.load(p_probs + o_ssm * stride_probs_ssm + o_probs, mask=m_c, other=0.0)
        share_g = shares_of(tokens_g, probs_g, tl.load(weights + request * stride_weights + g), m_c)
        has_mixture = tl.maximum(has_mixture, tl.max((share_g >= 0).to(tl.int32), axis=1))
        share_g = tl.where(tokens_g == token[:, None], share_g, -1.0)
        is_earlier = (share_g >= 0) & ((g * PROPOSALS + o_c)[None, :] < i_own[:, None])
        repeats = tl.maximum(repeats, tl.max(is_earlier.to(tl.int32), axis=1))
        share = tl.max(share_g, axis=1)
        total = tl.where(share >= 0, total + share, total)
        proposed_by = tl.where(share >= 0, proposed_by | (1 << g), proposed_by)
    is_candidate = valid & (repeats == 0)
    mixture = tl.minimum(total, 1.0)
    m_seed = is_candidate & seeded
    prior = tl.minimum(tl.maximum(mixture, MIN_MIXTURE), MAX_MIXTURE)
    scaled = tl.load(seed_ratios + request * SEEDS + seed, mask=m_seed, other=1.0) * prior
    posterior = tl.div_rn(scaled, scaled + (1.0 - prior))
    seed_prob = tl.load(seed_probs + request * SEEDS + seed, mask=m_seed, other=0.0)
    value = node_value * tl.where(seeded, tl.where(has_mixture > 0, posterior, seed_prob), mixture)
    proposed_by = tl.where(seeded, proposed_by | SEED_MASK, proposed_by)
    parent = tl.where(node == MAX_DEPTH * CANDIDATES, -1, node)

    # Select the best F, one after another. Keys are unique: the value's bits, which compare like the value because it
    # is not negative, then the complement of the index.
    o_e = tl.arange(0, BLOCK_E)
    ends = tl.load(end_tokens + request * stride_ends + o_e, mask=o_e < ENDS, other=-1)
    is_end = tl.max((token[:, None] == ends[None, :]).to(tl.int32), axis=1) > 0
    keys = (value.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (BLOCK_P - 1 - o_p).to(tl.int64)
    keys = tl.where(is_candidate & (is_end == 0) & (value > 0), keys, -1)
    room = tl.where(level + 1 > DEEPEST, 0, tl.where(level + 1 > WIDE_DEPTH, NARROW_FRONTIER, FRONTIER))
    o_f = tl.arange(0, BLOCK_F)
    winners = tl.full((BLOCK_F,), -1, tl.int64)
    first_slot = 1 + level * FRONTIER
    worse = keys
    for i in range(FRONTIER):
        best = tl.where(i < room, tl.max(worse, axis=0), -1)
        winners = tl.where(o_f == i, best, winners)
        worse = tl.where(worse == best, -1, worse)

    # Compute the next frontier from its candidates and the previous frontier.
    m_f = o_f < FRONTIER
    m_next = m_f & (winners >= 0)
    number = tl.where(m_next, BLOCK_P - 1 - (winners & (BLOCK_P - 1)).to(tl.int32), 0)
    i_node = number // ((SSMS + 1) * PROPOSALS)
    next_token = tl.where(m_next, tl.gather(token, number, axis=0), 0)
    next_seed = tl.gather(tl.where(seeded, seed, -2), number, axis=0)
    next_value = (winners >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    o_w = tl.arange(0, BLOCK_W)
    p_ancestors = frontier_ancestors + request * (FRONTIER * (MAX_DEPTH + 1)) + o_w[None, :]
    m_w = m_f[:, None] & (o_w <= MAX_DEPTH)[None, :]
    old = tl.load(p_ancestors + o_f[:, None] * (MAX_DEPTH + 1), mask=m_w, other=0)
    # The gather makes every thread wait for all loads before the frontier is overwritten: on AMD a barrier alone does
    # not wait for loads from global memory.
    above = tl.gather(old, tl.zeros_like(old) + i_node[:, None], axis=0)
    m_above = m_next[:, None] & (o_w <= level)[None, :]
    next_slot = tl.where(m_next, first_slot + o_f, 0)

    tl.debug_barrier()
    p_cand = (request * MAX_DEPTH + level) * CANDIDATES + o_p
    tl.store(cand_tokens + p_cand, tl.where(is_candidate, token, -1), mask=m_p)
    tl.store(cand_parents + p_cand, tl.where(is_candidate, parent, -1), mask=m_p)
    tl.store(cand_values + p_cand, tl.where(is_candidate, value, float("-inf")), mask=m_p)
    tl.store(cand_masks + p_cand, tl.where(is_candidate, proposed_by, 0), mask=m_p)
    tl.store(seed_cands + request * SEEDS + seed, level * CANDIDATES + o_p, mask=m_seed)
    p_f = request * FRONTIER + o_f
    tl.store(frontier + p_f, tl.where(m_next, level * CANDIDATES + number, -1), mask=m_f)
    tl.store(frontier_tokens + p_f, next_token, mask=m_f)
    tl.store(frontier_values + p_f, tl.where(m_next, next_value, 0.0), mask=m_f)
    tl.store(frontier_depths + p_f, tl.where(m_next, level + 1, -1), mask=m_f)
    tl.store(frontier_slots + p_f, next_slot, mask=m_f)
    tl.store(frontier_seeds + p_f, tl.where(m_next, next_seed, -2), mask=m_f)
    tl.store(p_ancestors + o_f[:, None] * (MAX_DEPTH + 1), tl.where(m_above, above, next_slot[:, None]), mask=m_w)
    tl.store(levels + request, level + 1)
