"""Triton kernel of RoPE and the KV cache write. Needs triton."""

import triton
import triton.language as tl

from treespec_kernels.attention.tree_attention_kernels import head_offsets
from treespec_kernels.launch.predecessors import wait_for_predecessors


@triton.jit
def _half(p_qkv, bias, o_bias, m_half, stride_split, NUM_SPLITS: tl.constexpr):
    """Load one half of each head in fp32: the sum of the splits in order, plus the bias."""
    b_half = tl.load(p_qkv, mask=m_half, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, NUM_SPLITS):
        p_qkv += stride_split
        b_half += tl.load(p_qkv, mask=m_half, other=0.0)
    if bias is not None:
        b_half += tl.load(bias + o_bias, mask=m_half, other=0.0).to(tl.float32)
    return b_half


@triton.jit
def _mean_square(
    p_row,
    bias,
    o_row,
    stride_split,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Return the mean square of COUNT heads of a row together, from FIRST on. Every program of the row loads them."""
    HALF: tl.constexpr = HEAD_DIM // 2
    o_d = tl.arange(0, p_row.shape[0])
    b_squares = tl.zeros([p_row.shape[0]], dtype=tl.float32)
    for i_half in range(2 * FIRST, 2 * (FIRST + COUNT)):
        o_half = i_half * HALF
        b_half = _half(p_row + o_half, bias, o_row + o_half, o_d < HALF, stride_split, NUM_SPLITS)
        b_squares += b_half * b_half
    return tl.sum(b_squares, axis=0) / (COUNT * HEAD_DIM)


# Arguments that depend on the number of rows are not specialised, so that all passes share one binary.
@triton.jit(do_not_specialize=["num_split_rows", "num_bias_rows", "num_norm_rows"])
def rotate_and_write(
    qkv,  # [rows, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM], or fp32 partials [NUM_SPLITS, num_split_rows, ..]
    bias,  # [groups, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM]; this and the next four may be None
    q_weight,  # [groups, HEAD_DIM], or [groups, NUM_HEADS * HEAD_DIM] if WIDE
    k_weight,
    rotation,  # [max_positions, 2, HEAD_DIM] fp32
    q_rotation,  # the same of Q; None: that of K
    positions,  # [rows] int32
    slots,  # [rows] int64
    # [2, num_pages, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM], planes [.., 2, num_pages, PLANE_HEADS, PAGE_SIZE, PART_DIM], or
    # None for rows without K and V
    kv_layer,
    q_out,  # [rows, NUM_HEADS, HEAD_DIM]
    eps,
    num_split_rows,  # stride of the splits in rows
    num_bias_rows,  # consecutive rows that share a row of bias
    num_norm_rows,  # consecutive rows that share a row of the norms' weights
    stride_plane,  # None for whole heads
    stride_kv,
    stride_page,
    stride_head,
    stride_slot,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PART_DIM: tl.constexpr,
    PLANE_HEADS: tl.constexpr,  # 0 for whole heads
    NUM_SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
    NORM_LAST: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program handles BLOCK_H heads of one row, of Q, K or V. The two halves of a head are separate tiles, so the
    rotation is elementwise and needs no exchange between threads."""
    wait_for_predecessors(PDL)
    HALF: tl.constexpr = HEAD_DIM // 2
    WIDTH: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    i_row = tl.program_id(0)
    row = i_row.to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_d = tl.arange(0, BLOCK_D)
    m_half = (o_h < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (o_d < HALF)[None, :]
    o_half = o_h[:, None] * HEAD_DIM + o_d[None, :]

    if kv_layer is not None:
        slot = tl.load(slots + row)
    if rotation is not None:
        position = tl.load(positions + row).to(tl.int64)
    p_qkv = qkv + row * WIDTH + o_half
    o_bias = i_row // num_bias_rows * WIDTH + o_half
    stride_split = num_split_rows.to(tl.int64) * WIDTH
    b_0 = _half(p_qkv, bias, o_bias, m_half, stride_split, NUM_SPLITS)
    b_1 = _half(p_qkv + HALF, bias, o_bias + HALF, m_half, stride_split, NUM_SPLITS)

    # V skips the rotation through a select: an angle of 0 would turn infinity into NaN (inf * sin 0).
    m_turned = (o_h < NUM_HEADS + NUM_KV_HEADS)[:, None]
    is_q = (o_h < NUM_HEADS)[:, None]
    m_normed = m_turned
    if NORM_VALUES:
        m_normed = (o_h >= 0)[:, None]
    if q_weight is not None:
        i_group = i_row // num_norm_rows
        if WIDE:
            o_q = i_group * (NUM_HEADS * HEAD_DIM) + o_half
            o_k = i_group * (NUM_KV_HEADS * HEAD_DIM) + o_half - NUM_HEADS * HEAD_DIM
        else:
            o_q = i_group * HEAD_DIM + tl.broadcast_to(o_d[None, :], (BLOCK_H, BLOCK_D))
            o_k = o_q
        p_weight = tl.where(is_q, q_weight + o_q, k_weight + o_k)
        m_weight = m_half & m_turned
        b_factor_0 = tl.load(p_weight, mask=m_weight, other=1.0).to(tl.float32)
        b_factor_1 = tl.load(p_weight + HALF, mask=m_weight, other=1.0).to(tl.float32)
        if WIDE:
            p_row = qkv + row * WIDTH + o_d
            o_row = i_row // num_bias_rows * WIDTH + o_d
            q_square = _mean_square(p_row, bias, o_row, stride_split, 0, NUM_HEADS, HEAD_DIM, NUM_SPLITS)
            k_square = _mean_square(p_row, bias, o_row, stride_split, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_SPLITS)
            b_scale = tl.rsqrt(tl.where(is_q, q_square, k_square) + eps)
        elif not NORM_LAST:
            b_scale = tl.rsqrt(tl.sum(b_0 * b_0 + b_1 * b_1, axis=1) / HEAD_DIM + eps)[:, None]
        if not NORM_LAST:
            b_0 = tl.where(m_normed, b_0 * b_scale * b_factor_0, b_0)
            b_1 = tl.where(m_normed, b_1 * b_scale * b_factor_1, b_1)
    if rotation is not None:
        # Every head loads the angles from L1; a broadcast would go through shared memory.
        o_angle = position * (2 * HEAD_DIM) + o_d[None, :]
        o_angle = tl.broadcast_to(o_angle, (BLOCK_H, BLOCK_D))
        if q_rotation is not None:
            p_cos = tl.where(is_q, q_rotation + o_angle, rotation + o_angle)
        else:
            p_cos = rotation + o_angle
        b_cos_0 = tl.load(p_cos, mask=m_half, other=0.0)
        b_cos_1 = tl.load(p_cos + HALF, mask=m_half, other=0.0)
        b_sin_0 = tl.load(p_cos + HEAD_DIM, mask=m_half, other=0.0)
        b_sin_1 = tl.load(p_cos + HEAD_DIM + HALF, mask=m_half, other=0.0)
        b_out_0 = tl.where(m_turned, b_0 * b_cos_0 + b_1 * b_sin_0, b_0)
        b_out_1 = tl.where(m_turned, b_1 * b_cos_1 + b_0 * b_sin_1, b_1)
    else:
        b_out_0 = b_0
        b_out_1 = b_1
    if q_weight is not None:
        if NORM_LAST:
            b_scale = tl.rsqrt(tl.sum(b_out_0 * b_out_0 + b_out_1 * b_out_1, axis=1) / HEAD_DIM + eps)[:, None]
            b_out_0 = tl.where(m_normed, b_out_0 * b_scale * b_factor_0, b_out_0)
            b_out_1 = tl.where(m_normed, b_out_1 * b_scale * b_factor_1, b_out_1)
    b_out_0 = b_out_0.to(q_out.dtype.element_ty)
    b_out_1 = b_out_1.to(q_out.dtype.element_ty)

    p_q = q_out + row * (NUM_HEADS * HEAD_DIM) + o_half
    tl.store(p_q, b_out_0, mask=m_half & is_q)
    tl.store(p_q + HALF, b_out_1, mask=m_half & is_q)
    if kv_layer is not None:
        o_kv_head = (o_h - NUM_HEADS).to(tl.int64)[:, None]
        o_slot = slot // PAGE_SIZE * stride_page + slot % PAGE_SIZE * stride_slot
        p_kv = kv_layer + o_slot + o_kv_head // NUM_KV_HEADS * stride_kv
        o_kv_head = o_kv_head % NUM_KV_HEADS
        m_kv = m_half & (o_h >= NUM_HEADS)[:, None]
        o_0 = head_offsets(o_kv_head, o_d[None, :], stride_plane, stride_head, HEAD_DIM, PART_DIM, PLANE_HEADS)
        o_1 = head_offsets(o_kv_head, o_d[None, :] + HALF, stride_plane, stride_head, HEAD_DIM, PART_DIM, PLANE_HEADS)
        tl.store(p_kv + o_0, b_out_0, mask=m_kv)
        tl.store(p_kv + o_1, b_out_1, mask=m_kv)
