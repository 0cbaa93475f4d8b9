"""Triton kernel of the row-invariant linear layer with quantised weights. Needs triton.

As in `row_linear_kernels`, no argument is specialised, so a weight and a configuration have one binary. In it, a row's
sum runs over the same blocks of K in the same order, independent of the row's index.
"""

import triton
import triton.language as tl

from treespec_kernels.launch.predecessors import PREFETCH, prefetch_rows, wait_for_predecessors
from treespec_kernels.linear.dot import dot
from treespec_kernels.linear.row_linear_kernels import tile_of_group

_RUNTIME = "x values scale zero out tiles members num_rows stride_x_group stride_x_row".split()


@triton.jit(do_not_specialize=_RUNTIME)
def multiply_quantized(
    x,  # [groups, num_rows, IN_FEATURES]
    values,  # [groups, OUT_FEATURES, IN_FEATURES] int8; with 4 BITS pairs in uint8, IN_FEATURES / 2
    scale,  # [groups, OUT_FEATURES, IN_FEATURES / GROUP]
    zero,  # shape of scale, int8 or fp32; or None
    out,  # [SPLIT_K, groups, num_rows, OUT_FEATURES] fp32
    tiles,  # as in `multiply_rows`
    members,
    num_rows,
    stride_x_group,
    stride_x_row,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale: all of them, or a multiple of BLOCK_K
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    BYTES_X: tl.constexpr,  # alignment of every row of x
    BYTES_VALUES: tl.constexpr,  # alignment of every row of values
    BYTES_OUT: tl.constexpr,  # alignment of every row of out
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PER_ROW: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program handles BLOCK_M rows, BLOCK_N outputs and one split of K.

    Zero points are subtracted from the integers, and the differences are converted to the dtype of x: exactly if zero
    points are integers, otherwise with one rounding. A block's product is scaled in fp32 and added to the sum; with one
    scale for all inputs, the whole sum is scaled at the end.
    """
    i_m = tl.program_id(0)
    i_n = tl.program_id(1)
    i_group = (tl.program_id(2) // SPLIT_K).to(tl.int64)
    i_split = tl.program_id(2) % SPLIT_K
    PER_BYTE: tl.constexpr = 8 // BITS
    GROUPS: tl.constexpr = IN_FEATURES // GROUP
    BYTES: tl.constexpr = BLOCK_K // PER_BYTE  # bytes of one output's weights per block

    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < num_rows
    o_source = o_m
    i_rows = i_group
    if tiles is not None:
        wait_for_predecessors(PDL)
        i_group, o_m = tile_of_group(tiles, members, i_m, BLOCK_M)
        if i_group < 0:
            return
        m_m = o_m >= 0
        o_source = o_m // PER_ROW
        i_rows = i_group * 0
    # Outputs past the last one read its weights (avoiding a mask in the loop) and are not stored.
    o_n = tl.minimum(i_n * BLOCK_N + tl.arange(0, BLOCK_N), OUT_FEATURES - 1)
    BLOCKS: tl.constexpr = (IN_FEATURES + BLOCK_K - 1) // BLOCK_K
    BLOCKS_PER_SPLIT: tl.constexpr = (BLOCKS + SPLIT_K - 1) // SPLIT_K
    first = i_split * BLOCKS_PER_SPLIT
    end = tl.minimum(first + BLOCKS_PER_SPLIT, BLOCKS)
    o_row = i_group * OUT_FEATURES + o_n.to(tl.int64)
    o_k = first * BLOCK_K + tl.arange(0, BLOCK_K)
    o_byte = first * BYTES + tl.arange(0, BYTES)
    o_x = i_rows * stride_x_group + o_source.to(tl.int64) * stride_x_row
    p_x = tl.multiple_of(x + o_x[:, None] + o_k[None, :], [BYTES_X, BYTES_X])
    o_first = o_row * (IN_FEATURES // PER_BYTE)
    if tiles is None:
        if PDL == PREFETCH and BYTES_VALUES == 16 and IN_FEATURES % BLOCK_K == 0:
            if (i_m == 0) & (first < end):
                prefetch_rows(values + o_first + first * BYTES, (end - first) * BYTES)
        wait_for_predecessors(PDL)
    o_values = o_first[:, None] + o_byte[None, :]
    p_values = tl.multiple_of(values + o_values, [BYTES_VALUES, BYTES_VALUES])
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for i_block in range(first, end):
        m_x = m_m[:, None]
        if IN_FEATURES % BLOCK_K == 0:
            b_q = tl.load(p_values, eviction_policy="evict_first")
        else:
            remaining = IN_FEATURES - i_block * BLOCK_K
            m_x = m_x & (tl.arange(0, BLOCK_K) < remaining)[None, :]
            b_q = tl.load(p_values, mask=(tl.arange(0, BYTES) * PER_BYTE < remaining)[None, :], other=0)
        b_x = tl.load(p_x, mask=m_x, other=0.0)
        if BITS == 4:
            b_pair = tl.join((b_q & 15).to(tl.int8), (b_q >> 4).to(tl.int8))  # the earlier input in the low bits
            b_q = tl.reshape(b_pair, [BLOCK_N, BLOCK_K]) - 8
        o_scale = o_row * GROUPS + i_block * BLOCK_K // GROUP
        if zero is not None:
            b_zero = tl.load(zero + o_scale)
            if zero.dtype.element_ty == tl.int8:
                b_weight = (b_q.to(tl.int16) - b_zero.to(tl.int16)[:, None]).to(x.dtype.element_ty)
            else:
                b_weight = (b_q.to(tl.float32) - b_zero[:, None]).to(x.dtype.element_ty)
        else:
            b_weight = b_q.to(x.dtype.element_ty)
        if GROUPS == 1:
            b_acc = dot(b_x, tl.trans(b_weight), b_acc)
        else:
            b_none = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            b_part = dot(b_x, tl.trans(b_weight), b_none)
            b_acc += b_part * tl.load(scale + o_scale).to(tl.float32)[None, :]
        p_x += BLOCK_K
        p_values += BYTES
    if GROUPS == 1:
        b_acc *= tl.load(scale + o_row).to(tl.float32)[None, :]

    o_f = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_out = m_m[:, None]
    if OUT_FEATURES % BLOCK_N != 0:
        m_out = m_out & (o_f < OUT_FEATURES)[None, :]
    i_plane = i_split * (tl.num_programs(2) // SPLIT_K) + i_rows
    o_out = (i_plane * num_rows + o_m) * OUT_FEATURES
    p_out = tl.multiple_of(out + o_out[:, None] + o_f[None, :], [BYTES_OUT, BYTES_OUT])
    tl.store(p_out, b_acc, mask=m_out)
