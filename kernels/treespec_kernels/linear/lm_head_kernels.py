"""Triton kernel of the LM head. Needs triton."""

import triton
import triton.language as tl

from treespec_kernels.launch.pointwise import soft_cap
from treespec_kernels.launch.predecessors import PREFETCH, prefetch_rows, wait_for_predecessors
from treespec_kernels.linear.dot import dot


@triton.jit
def summary(values):
    """Return the maximum, its first index, and the sum of exp(v - maximum) of float32 [n, block], each [n].

    The sum uses 0 instead of an infinite maximum, since -inf - -inf is NaN.
    """
    best, index = tl.max(values, axis=1, return_indices=True, return_indices_tie_break_left=True)
    shift = tl.where((best > float("-inf")) & (best < float("inf")), best, 0.0)
    return best, index, tl.sum(tl.exp(values - shift[:, None]), axis=1)


# The number of rows is not specialised, so that all passes share one binary.
@triton.jit(do_not_specialize=["num_rows"])
def project_to_vocab(
    x,  # [groups, num_rows, HIDDEN], as one matrix of rows
    weight,  # [groups, VOCAB, HIDDEN]
    logits,  # [groups * num_rows, VOCAB]
    best_values,  # [groups * num_rows, num_programs(1)] fp32; also sums
    best_tokens,  # int32
    sums,
    logit_cap,
    num_rows,
    stride_x,
    stride_weight_group,
    stride_weight,
    stride_logits,
    VOCAB: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program handles one tile of rows and one block of tokens, over all of K.

    Tiles of rows are the fastest axis of the grid, so programs that read the same weights run together and hit L2.
    """
    i_block = tl.program_id(1)
    i_group = tl.program_id(2).to(tl.int64)
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_m = o_m < num_rows
    m_n = o_n < VOCAB
    row = i_group * num_rows + o_m
    # Tokens past the vocabulary read the last token's weights (avoiding a mask in the loop) and are not stored.
    o_weight = o_n if VOCAB % BLOCK_N == 0 else tl.minimum(o_n, VOCAB - 1)
    p_row = weight + i_group * stride_weight_group + o_weight.to(tl.int64) * stride_weight
    BYTES: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    if PDL == PREFETCH and HIDDEN * BYTES % 16 == 0:
        if tl.program_id(0) == 0:
            prefetch_rows(p_row, HIDDEN * BYTES)
    wait_for_predecessors(PDL)
    p_x = x + row[:, None] * stride_x + o_k[None, :]
    p_weight = p_row[:, None] + o_k[None, :]
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, HIDDEN, BLOCK_K):
        if HIDDEN % BLOCK_K == 0:
            b_x = tl.load(p_x + k, mask=m_m[:, None], other=0.0)
            b_weight = tl.load(p_weight + k)
        else:
            m_k = (k + o_k < HIDDEN)[None, :]
            b_x = tl.load(p_x + k, mask=m_m[:, None] & m_k, other=0.0)
            b_weight = tl.load(p_weight + k, mask=m_k, other=0.0)
        b_acc = dot(b_x, tl.trans(b_weight), b_acc)

    if logit_cap is not None:
        b_acc = soft_cap(b_acc, logit_cap)
    b_logits = b_acc.to(logits.dtype.element_ty)
    values = b_logits.to(tl.float32)
    values = tl.where(values == values, values, float("inf"))  # NaN to +inf, since comparisons would drop NaN
    values = tl.where(m_n[None, :], values, float("-inf"))
    best, index, b_sums = summary(values)
    o_stats = row * tl.num_programs(1) + i_block
    tl.store(best_values + o_stats, best, mask=m_m)
    tl.store(best_tokens + o_stats, i_block * BLOCK_N + index, mask=m_m)
    tl.store(sums + o_stats, b_sums, mask=m_m)
    tl.store(logits + row[:, None] * stride_logits + o_n[None, :], b_logits, mask=m_m[:, None] & m_n[None, :])
