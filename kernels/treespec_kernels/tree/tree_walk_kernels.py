"""Triton kernel of the tree walk. Needs triton."""

import triton
import triton.language as tl


@triton.jit
def walk_down(
    tree_tokens,  # [B, MAX_NODES]; also depths
    tree_depths,
    tree_ancestors,  # [B, MAX_NODES, MAX_DEPTH + 1]
    tree_sizes,  # [B]
    choices,  # [B, MAX_NODES] int32 or int64
    finite,  # [B, MAX_NODES] bool
    paths,  # [B, MAX_DEPTH + 1]; also tokens
    path_lens,  # [B]
    tokens,
    stride_choices,
    stride_finite,
    MAX_DEPTH: tl.constexpr,
    MAX_NODES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One program handles one request.

    All nodes check all edges above them at once instead of walking step by step: a node is on the path if the choice at
    the upper end of each edge is the token at its lower end. Siblings have different tokens, so at most one node per
    depth is on the path.
    """
    WIDTH: tl.constexpr = MAX_DEPTH + 1
    request = tl.program_id(0).to(tl.int64)
    size = tl.load(tree_sizes + request)
    o_n = tl.arange(0, BLOCK_N)
    m_n = (o_n < size) & (o_n < MAX_NODES)
    p_n = request * MAX_NODES + o_n
    depth = tl.load(tree_depths + p_n, mask=m_n, other=0)
    is_finite = tl.load(finite + request * stride_finite + o_n, mask=m_n, other=1)
    num_broken = tl.sum((m_n & (is_finite == 0)).to(tl.int32), axis=0)

    o_w = tl.arange(0, BLOCK_W)
    m_edge = m_n[:, None] & (o_w[None, :] < depth[:, None]) & (o_w < MAX_DEPTH)[None, :]
    p_above = tree_ancestors + request * (MAX_NODES * WIDTH)
    o_above = o_n[:, None] * WIDTH + o_w[None, :]
    above = tl.load(p_above + o_above, mask=m_edge, other=0)
    below = tl.load(p_above + o_above + 1, mask=m_edge, other=0)
    p_choices = choices + request * stride_choices
    wanted = tl.load(p_choices + above, mask=m_edge, other=0).to(tl.int32)
    token = tl.load(tree_tokens + request * MAX_NODES + below, mask=m_edge, other=0)
    num_missed = tl.sum((m_edge & (wanted != token)).to(tl.int32), axis=1)
    on_path = m_n & (num_missed + num_broken == 0)

    path_len = tl.max(tl.where(on_path, depth + 1, 0), axis=0)
    choice = tl.load(p_choices + o_n, mask=on_path, other=0)
    p_out = request * WIDTH + depth
    tl.store(paths + p_out, o_n, mask=on_path)
    tl.store(tokens + p_out, choice.to(tl.int32), mask=on_path)
    tl.store(path_lens + request, path_len)

    p_w = request * WIDTH + o_w
    m_beyond = (o_w >= path_len) & (o_w < WIDTH)
    zero = tl.zeros((BLOCK_W,), tl.int32)
    tl.store(paths + p_w, zero, mask=m_beyond)
    tl.store(tokens + p_w, zero - 1, mask=m_beyond)
