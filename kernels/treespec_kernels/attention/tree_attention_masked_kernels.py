"""Triton kernel of masked tree attention. Needs triton."""

from __future__ import annotations

import triton
import triton.language as tl

from treespec_kernels.attention.tree_attention_kernels import attend_tile, find_partials
from treespec_kernels.launch.predecessors import wait_for_predecessors


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _bits_of_tile(low, high, first_node):
    """Return uint64 whose bit i is that of node first_node + i, from the word of first_node and the next one.

    Columns before node 0 are committed positions, and their bits are set.
    """
    shift = (tl.maximum(first_node, 0) % 64).to(tl.uint64)
    # A shift by 64 is undefined, so the high word is shifted in two steps.
    inside = (low >> shift) | ((high << 1) << (63 - shift))
    committed = tl.minimum(tl.maximum(-first_node, 0), 63).to(tl.uint64)
    one = tl.full([1], 1, dtype=tl.uint64)
    ones = tl.zeros([1], dtype=tl.uint64) - one  # Triton 3.7's interpreter cannot invert unsigned numbers
    before = tl.where(first_node <= -64, ones, (low << committed) | ((one << committed) - 1))
    return tl.where(first_node < 0, before, inside)


@triton.jit
def _from_bit(first):
    """Return uint64 with ones from bit `first` on; all ones for a negative first."""
    ones = tl.zeros([1], dtype=tl.uint64) - tl.full([1], 1, dtype=tl.uint64)
    return tl.where(first < 64, ones << tl.minimum(tl.maximum(first, 0), 63).to(tl.uint64), 0)


@triton.jit
def _load_words(p_words, word, o_m, m_hi, num_nodes):
    """Load one word of each row; 0 past the nodes of the item."""
    m_end = tl.where(word * 64 < num_nodes, m_hi, 0)
    return tl.load(p_words + word, mask=o_m < m_end, other=0).to(tl.uint64, bitcast=True)


@triton.jit
def _find_pages(p_pages, tile, key_hi, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the pages of the logical slots tile, tile + 1, ..; arbitrary from key_hi on."""
    o_n = tile + tl.arange(0, BLOCK_N)
    return tl.load(p_pages + o_n // PAGE_SIZE, mask=o_n < key_hi, other=0)


# Sizes of the batch and the tree are not specialised, so that all passes share one binary.
@triton.jit(do_not_specialize=["window", "stride_page_table", "stride_words"])
def attend_masked_items(
    q,  # [num_rows, num_heads, HEAD_DIM]
    k_cache,  # [num_pages, num_kv_heads, PAGE_SIZE, HEAD_DIM]
    v_cache,
    partial_acc,  # [num_partials, NUM_HEADS, HEAD_DIM] fp32
    partial_max,  # [num_partials, NUM_HEADS] fp32, log2
    partial_sum,
    items,  # [capacity, 8] int32: request, slot_row, m_lo, m_hi, key_lo, key_hi, segment, continues
    num_items,  # [1] int32
    first_partial,  # [num_rows] int32, as the next two
    first_segment,
    num_segments,
    page_table,
    context_lens,
    depths,
    ancestor_words,  # [num_rows, words] int64
    scale_log2,
    window,
    score_cap,  # in units of log2
    stride_q_row,
    stride_q_head,
    stride_k_page,
    stride_k_head,
    stride_k_slot,
    stride_v_page,
    stride_v_head,
    stride_v_slot,
    stride_page_table,
    stride_words,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    FIXED_ORDER_DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Columns are logical slots: committed positions, then the nodes of the tree."""
    wait_for_predecessors(PDL)
    i_item = tl.program_id(0)
    i_kv_head = tl.program_id(1).to(tl.int64)
    p_item = items + i_item.to(tl.int64) * 8
    key_lo = tl.load(p_item + 4)
    key_hi = tl.load(p_item + 5)
    if (i_item >= tl.load(num_items)) | (key_lo >= key_hi):
        return
    request = tl.load(p_item).to(tl.int64)
    m_lo = tl.load(p_item + 2)
    m_hi = tl.load(p_item + 3)
    context_len = tl.load(context_lens + request)
    num_nodes = key_hi - context_len  # 0 or less for an item that ends before the root

    o_m = m_lo + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    m_m = o_m < m_hi
    m_d = o_d < HEAD_DIM
    row = (o_m // GROUP).to(tl.int64)
    head = i_kv_head * GROUP + o_m % GROUP
    window_lo = context_len + tl.load(depths + row, mask=m_m, other=0) - window
    p_q = q + row[:, None] * stride_q_row + head[:, None] * stride_q_head + o_d[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None] & m_d[None, :], other=0.0)
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)

    p_pages = page_table + request * stride_page_table
    p_k_head = k_cache + i_kv_head * stride_k_head + o_d
    p_v_head = v_cache + i_kv_head * stride_v_head + o_d
    p_words = ancestor_words + row * stride_words
    o_bit = tl.arange(0, BLOCK_N).to(tl.uint64)
    # The slot of a node that no row attends to may hold a stale NaN, and 0 * NaN is NaN, so its V is masked.
    seen_0 = tl.reduce(_load_words(p_words, 0, o_m, m_hi, num_nodes), 0, _or)
    seen_1 = tl.reduce(_load_words(p_words, 1, o_m, m_hi, num_nodes), 0, _or)
    seen_2 = tl.reduce(_load_words(p_words, 2, o_m, m_hi, num_nodes), 0, _or)
    seen_3 = tl.reduce(_load_words(p_words, 3, o_m, m_hi, num_nodes), 0, _or)
    page = _find_pages(p_pages, key_lo, key_hi, PAGE_SIZE, BLOCK_N)
    for tile in range(key_lo, key_hi, BLOCK_N):
        o_n = tile + tl.arange(0, BLOCK_N)
        m_n = o_n < key_hi
        offset = (o_n % PAGE_SIZE).to(tl.int64)
        o_k = page.to(tl.int64) * stride_k_page + offset * stride_k_slot
        o_v = page.to(tl.int64) * stride_v_page + offset * stride_v_slot
        m_kv = m_n[:, None] & m_d[None, :]
        first_node = tile - context_len
        word = tl.maximum(first_node, 0) // 64
        seen_low = tl.where(word == 0, seen_0, tl.where(word == 1, seen_1, tl.where(word == 2, seen_2, seen_3)))
        seen_high = tl.where(word == 0, seen_1, tl.where(word == 1, seen_2, seen_3))
        m_seen = (_bits_of_tile(seen_low, seen_high, first_node) >> o_bit) & 1 != 0
        b_k = tl.load(p_k_head[None, :] + o_k[:, None], mask=m_kv, other=0.0)
        b_v = tl.load(p_v_head[None, :] + o_v[:, None], mask=m_kv & m_seen[:, None], other=0.0)
        # Look up pages one tile ahead, as in `attend_items`.
        page = _find_pages(p_pages, tile + BLOCK_N, key_hi, PAGE_SIZE, BLOCK_N)

        low = _load_words(p_words, word, o_m, m_hi, num_nodes)
        words = _bits_of_tile(low, _load_words(p_words, word + 1, o_m, m_hi, num_nodes), first_node)
        if HAS_WINDOW:
            words = words & _from_bit(window_lo + 1 - tile)
        m_scores = m_m[:, None] & ((words[:, None] >> o_bit[None, :]) & 1 != 0)
        b_max, b_sum, b_acc = attend_tile(
            b_q, b_k, b_v, m_scores, scale_log2, score_cap, b_max, b_sum, b_acc, HAS_CAP, FIXED_ORDER_DOT
        )

    partial, m_partial = find_partials(
        p_item, first_partial, first_segment, num_segments, i_kv_head, NUM_HEADS, GROUP, BLOCK_M
    )
    tl.store(partial_max + partial, b_max, mask=m_partial)
    tl.store(partial_sum + partial, b_sum, mask=m_partial)
    p_acc = partial_acc + partial[:, None] * HEAD_DIM + o_d[None, :]
    tl.store(p_acc, b_acc, mask=m_partial[:, None] & m_d[None, :])
