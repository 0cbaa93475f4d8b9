"""Triton kernel of the tree root. Needs triton."""

import triton
import triton.language as tl


@triton.jit
def start_round(
    root_tokens,  # [B]
    cand_tokens,  # [B, CANDIDATES]; also the next three
    cand_parents,
    cand_values,
    cand_masks,
    frontier,  # [B, FRONTIER]; also the next five
    frontier_tokens,
    frontier_values,
    frontier_depths,
    frontier_slots,
    frontier_seeds,
    frontier_ancestors,  # [B, FRONTIER, WIDTH]
    seed_cands,  # [B, SEEDS]
    levels,  # [B]
    CANDIDATES: tl.constexpr,
    FRONTIER: tl.constexpr,
    WIDTH: tl.constexpr,
    SEEDS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program clears one block of one request's candidates; the first program also writes the frontier."""
    request = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    o_q = i_block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    m_q = o_q < CANDIDATES
    p_q = request * CANDIDATES + o_q
    none = tl.full((BLOCK_Q,), -1, tl.int32)
    tl.store(cand_tokens + p_q, none, mask=m_q)
    tl.store(cand_parents + p_q, none, mask=m_q)
    tl.store(cand_values + p_q, tl.full((BLOCK_Q,), float("-inf"), tl.float32), mask=m_q)
    tl.store(cand_masks + p_q, none + 1, mask=m_q)
    if i_block == 0:
        token = tl.load(root_tokens + request)
        o_f = tl.arange(0, BLOCK_F)
        m_f = o_f < FRONTIER
        p_f = request * FRONTIER + o_f
        is_root = (o_f == 0) & (token >= 0)
        tl.store(frontier + p_f, tl.where(is_root, CANDIDATES, -1), mask=m_f)
        tl.store(frontier_tokens + p_f, tl.where(is_root, token, 0), mask=m_f)
        tl.store(frontier_values + p_f, tl.where(is_root, 1.0, 0.0), mask=m_f)
        tl.store(frontier_depths + p_f, tl.where(is_root, 0, -1), mask=m_f)
        tl.store(frontier_slots + p_f, tl.zeros((BLOCK_F,), tl.int32), mask=m_f)
        tl.store(frontier_seeds + p_f, tl.where(is_root, -1, -2), mask=m_f)
        o_s = tl.arange(0, BLOCK_S)
        tl.store(seed_cands + request * SEEDS + o_s, tl.full((BLOCK_S,), -1, tl.int32), mask=o_s < SEEDS)
        o_w = tl.arange(0, BLOCK_W)
        m_w = m_f[:, None] & (o_w < WIDTH)[None, :]
        tl.store(
            frontier_ancestors + p_f[:, None] * WIDTH + o_w[None, :], tl.zeros((BLOCK_F, BLOCK_W), tl.int32), mask=m_w
        )
        tl.store(levels + request, 0)
