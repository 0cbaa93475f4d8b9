"""Triton kernel of KV commit. Needs triton."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["max_path", "stride_page_table", "stride_paths"])
def move_path(
    kv_cache,  # [num_layers, 2, num_pages, num_kv_heads, PAGE_SIZE, HEAD_DIM], an integer type: only copied
    page_table,
    context_lens,
    paths,
    path_lens,
    max_path,
    stride_layer,
    stride_kv,
    stride_page,
    stride_head,
    stride_slot,
    stride_page_table,
    stride_paths,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program handles one (request, layer, K or V, head) and moves its path in blocks of ascending steps.

    Sources are ascending and never below their destinations, so no block overwrites a source of a later block. Within a
    block all loads precede all stores, separated by a barrier.
    """
    i_plane = tl.program_id(0).to(tl.int64)
    request = tl.program_id(1).to(tl.int64)
    layer = i_plane // (2 * NUM_KV_HEADS)
    kv = i_plane // NUM_KV_HEADS % 2
    head = i_plane % NUM_KV_HEADS
    path_len = tl.minimum(tl.load(path_lens + request), max_path)
    context_len = tl.load(context_lens + request)
    p_pages = page_table + request * stride_page_table
    o_d = tl.arange(0, BLOCK_D)
    p_plane = kv_cache + layer * stride_layer + kv * stride_kv + head * stride_head + o_d[None, :]
    for first in range(0, path_len, BLOCK_J):
        step = first + tl.arange(0, BLOCK_J)
        node = tl.load(paths + request * stride_paths + step, mask=step < path_len, other=0)
        m_j = (step < path_len) & (node != step)
        source = context_len + node
        target = context_len + step
        source_page = tl.load(p_pages + source // PAGE_SIZE, mask=m_j, other=0).to(tl.int64)
        target_page = tl.load(p_pages + target // PAGE_SIZE, mask=m_j, other=0).to(tl.int64)
        o_source = source_page * stride_page + (source % PAGE_SIZE).to(tl.int64) * stride_slot
        o_target = target_page * stride_page + (target % PAGE_SIZE).to(tl.int64) * stride_slot
        m_move = m_j[:, None] & (o_d < HEAD_DIM)[None, :]
        moved = tl.load(p_plane + o_source[:, None], mask=m_move)
        tl.debug_barrier()
        tl.store(p_plane + o_target[:, None], moved, mask=m_move)
