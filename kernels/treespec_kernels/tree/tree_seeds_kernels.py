"""Triton kernel of tree seeds. Needs triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def propose_seeds(
    seed_tokens,  # [B, SEEDS], as the next two
    seed_parents,
    seed_probs,
    places,  # [B, FRONTIER]
    cand_parents,  # [B, CANDIDATES], over all levels
    cand_slots,
    frontier,  # [B, FRONTIER]
    frontier_tokens,
    levels,  # [B]
    tokens,  # [B, FRONTIER, PROPOSALS]
    probs,
    stride_tokens_request,
    stride_tokens_node,
    stride_probs_request,
    stride_probs_node,
    SEEDS: tl.constexpr,
    FRONTIER: tl.constexpr,
    PROPOSALS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program owns one request."""
    request = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, BLOCK_S)
    m_s = o_s < SEEDS
    seed_token = tl.load(seed_tokens + request * SEEDS + o_s, mask=m_s, other=-1)
    seed_parent = tl.load(seed_parents + request * SEEDS + o_s, mask=m_s, other=-2)
    seed_prob = tl.load(seed_probs + request * SEEDS + o_s, mask=m_s, other=0.0)
    is_seed = seed_token >= 0

    # The place of each frontier node's parent: a candidate's slot counts the frontier nodes of all earlier levels.
    o_f = tl.arange(0, BLOCK_F)
    level = tl.load(levels + request) + tl.zeros_like(o_f)
    m_f = o_f < FRONTIER
    flat = tl.load(frontier + request * FRONTIER + o_f, mask=m_f, other=-1)
    token = tl.load(frontier_tokens + request * FRONTIER + o_f, mask=m_f, other=-1)
    m_node = m_f & (flat >= 0)
    m_grown = m_node & (level > 0)
    parent = tl.load(cand_parents + request * CANDIDATES + flat, mask=m_grown, other=-1)
    m_deep = m_grown & (parent >= 0)
    slot = tl.load(cand_slots + request * CANDIDATES + parent, mask=m_deep, other=0)
    i_above = tl.where(m_deep, slot - 1 - (level - 2) * FRONTIER, 0)
    above = tl.load(places + request * FRONTIER + i_above, mask=m_grown, other=-1)

    above_key = tl.where(above == SEEDS, -1, tl.where(above < 0, -3, above))
    is_same = is_seed[None, :] & (seed_parent[None, :] == above_key[:, None]) & (seed_token[None, :] == token[:, None])
    found = tl.min(tl.where(is_same, o_s[None, :], SEEDS + 1), axis=1)
    place = tl.where(m_grown & (found <= SEEDS), found, -1)
    place = tl.where(m_node & (level == 0), SEEDS, place)

    key = tl.where(place == SEEDS, -1, tl.where(place < 0, -3, place))
    is_child = is_seed[None, :] & (seed_parent[None, :] == key[:, None])
    rank = tl.cumsum(is_child.to(tl.int32), axis=1) - 1
    # The places are overwritten, perhaps by other threads than those that loaded them.
    tl.debug_barrier()
    tl.store(places + request * FRONTIER + o_f, place, mask=m_f)
    for c in tl.static_range(PROPOSALS):
        is_next = is_child & (rank == c)
        said = tl.max(tl.where(is_next, seed_token[None, :], -1), axis=1)
        prob = tl.max(tl.where(is_next, seed_prob[None, :], 0.0), axis=1)
        tl.store(tokens + request * stride_tokens_request + o_f * stride_tokens_node + c, said, mask=m_f)
        tl.store(probs + request * stride_probs_request + o_f * stride_probs_node + c, prob, mask=m_f)
