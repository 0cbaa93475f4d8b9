"""Triton kernel of RMSNorm and LayerNorm. Needs triton."""

import triton
import triton.language as tl

from treespec_kernels.launch.predecessors import PREFETCH, prefetch, wait_for_predecessors


@triton.jit
def _centred(b_x, m_h, HIDDEN: tl.constexpr, CENTRED: tl.constexpr):
    """Subtract the mean of a row for LayerNorm, otherwise return it unchanged; padding stays 0."""
    if CENTRED:
        b_x = tl.where(m_h, b_x - tl.sum(b_x, axis=0) / HIDDEN, 0.0)
    return b_x


# Arguments that depend on the number of rows are not specialised, so that passes share one binary and order of sums.
@triton.jit(do_not_specialize=["num_split_rows", "num_weight_rows", "num_bias_rows"])
def norm_rows(
    x,  # [rows, HIDDEN], or fp32 partials [NUM_SPLITS, num_split_rows, HIDDEN]
    weight,  # [groups, HIDDEN]; this and the next five may be None
    residual,  # [rows, HIDDEN]
    bias,  # [groups, HIDDEN]; also shift and post_weight
    shift,
    post_weight,
    scale,  # [groups] fp32
    out,  # [rows, HIDDEN]
    eps,
    num_split_rows,  # stride of the splits in rows
    num_weight_rows,  # consecutive rows that share a row of weight
    num_bias_rows,  # consecutive rows that share a row of bias
    HIDDEN: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program handles one row and keeps it in registers. All loads come first, so that they overlap."""
    i_row = tl.program_id(0)
    if weight is not None:
        BYTES: tl.constexpr = HIDDEN * weight.dtype.element_ty.primitive_bitwidth // 8
        if PDL == PREFETCH and BYTES % 16 == 0:
            if i_row % num_weight_rows == 0:  # other weights were read since this kernel last ran
                prefetch(weight + i_row // num_weight_rows * HIDDEN, BYTES)
    wait_for_predecessors(PDL)
    row = i_row.to(tl.int64)
    o_h = tl.arange(0, BLOCK_H)
    m_h = o_h < HIDDEN
    o_row = row * HIDDEN + o_h
    o_weight = i_row // num_weight_rows * HIDDEN + o_h
    if weight is not None:
        b_weight = tl.load(weight + o_weight, mask=m_h, other=0.0)
    if shift is not None:
        b_shift = tl.load(shift + o_weight, mask=m_h, other=0.0)
    if post_weight is not None:
        b_post = tl.load(post_weight + o_weight, mask=m_h, other=0.0)
    b_x = tl.load(x + o_row, mask=m_h, other=0.0).to(tl.float32)
    p_x = x + o_row
    for _ in tl.static_range(1, NUM_SPLITS):
        p_x += num_split_rows.to(tl.int64) * HIDDEN
        b_x += tl.load(p_x, mask=m_h, other=0.0)
    if bias is not None:
        b_x += tl.load(bias + i_row // num_bias_rows * HIDDEN + o_h, mask=m_h, other=0.0).to(tl.float32)
    if post_weight is not None:
        b_x = _centred(b_x, m_h, HIDDEN, CENTRED)
        post_square = tl.sum(b_x * b_x, axis=0) / HIDDEN
        b_x = b_x * tl.rsqrt(post_square + eps) * b_post.to(tl.float32)
    if residual is not None:
        b_sum = tl.load(residual + o_row, mask=m_h, other=0.0).to(tl.float32) + b_x
        if scale is not None:
            b_sum *= tl.load(scale + i_row // num_weight_rows)
        b_sum = b_sum.to(residual.dtype.element_ty)
        b_x = b_sum.to(tl.float32)
    b_out = b_x
    if weight is not None:
        b_x = _centred(b_x, m_h, HIDDEN, CENTRED)
        mean_square = tl.sum(b_x * b_x, axis=0) / HIDDEN
    # Threads that store the tensors below may differ from those that loaded them.
    tl.debug_barrier()
    if residual is not None:
        tl.store(residual + o_row, b_sum, mask=m_h)
    if weight is not None:
        b_out = b_x * tl.rsqrt(mean_square + eps) * b_weight.to(tl.float32)
    if shift is not None:
        b_out += b_shift.to(tl.float32)
    tl.store(out + o_row, b_out.to(out.dtype.element_ty), mask=m_h)
