"""Triton kernels of the row-invariant linear layer. Needs triton.

A row's bits do not depend on the number of rows. No argument is specialised (Triton would compile another binary for an
integer that is 1 or a multiple of 16, and for an aligned pointer), so a weight and a configuration have one binary;
alignments are constants that follow from the weight. In this binary, a row's sum runs over the same blocks of K in the
same order with the same instruction for every place in a tile, and the rows of a tile never mix.
"""

import triton
import triton.language as tl

from treespec_kernels.launch.pointwise import activate, activate_gate
from treespec_kernels.launch.predecessors import PREFETCH, prefetch_rows, wait_for_predecessors
from treespec_kernels.linear.dot import dot

_RUNTIME = (
    "x weight bias residual out tiles members chosen partials num_rows num_groups stride_x_group stride_x_row "
    "stride_weight_group stride_bias_group stride_residual_group stride_residual_row stride_out_group stride_out_row"
).split()


@triton.jit
def tile_of_group(tiles, members, i_tile, BLOCK_M: tl.constexpr):
    """Return the group and the rows of a tile; -1 for none."""
    i_group = tl.load(tiles + i_tile).to(tl.int64)
    return i_group, tl.load(members + i_tile * BLOCK_M + tl.arange(0, BLOCK_M))


@triton.jit(do_not_specialize=_RUNTIME)
def multiply_rows(
    x,  # [groups, num_rows, IN_FEATURES]
    weight,  # [groups, OUT_FEATURES, IN_FEATURES]
    bias,  # [groups, OUT_FEATURES], or None
    residual,  # [groups, num_rows, FEATURES]: OUT_FEATURES, or half of them with SILU_GATE; or None
    out,  # like residual; with PARTIALS [SPLIT_K, groups, num_rows, OUT_FEATURES] fp32
    # [num tiles] int32, [num tiles, BLOCK_M] int32: the group of each tile of rows, and its rows in residual and out,
    # of which PER_ROW have one row of x; -1 for none. None if every group has the same number of rows
    tiles,
    members,
    num_rows,
    stride_x_group,
    stride_x_row,
    stride_weight_group,
    stride_bias_group,
    stride_residual_group,
    stride_residual_row,
    stride_out_group,
    stride_out_row,
    STRIDE_WEIGHT: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    BYTES_IN: tl.constexpr,  # alignment of every row of x and weight
    BYTES_OUT: tl.constexpr,  # alignment of every row of out and residual
    SPLIT_K: tl.constexpr,
    PARTIALS: tl.constexpr,
    SILU_GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,  # activation of the gate, or of the sum without a gate
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PER_ROW: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program handles BLOCK_M rows, BLOCK_N rows of the weight and one split of K.

    Row tiles are the fastest axis of the grid, so programs that share a tile of the weight run together, and only the
    first of them reads it from memory.
    """
    i_m = tl.program_id(0)
    i_n = tl.program_id(1)
    i_group = (tl.program_id(2) // SPLIT_K).to(tl.int64)
    i_split = tl.program_id(2) % SPLIT_K

    # Rows past the last are masked and cause no traffic. Columns past the last read the last column again (avoiding a
    # mask in the loop) and are not stored.
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < num_rows
    o_row = o_m
    i_rows = i_group  # group of the rows
    if tiles is not None:
        wait_for_predecessors(PDL)
        i_group, o_m = tile_of_group(tiles, members, i_m, BLOCK_M)
        if i_group < 0:
            return
        m_m = o_m >= 0
        o_row = o_m // PER_ROW
        i_rows = i_group * 0
    o_column = tl.arange(0, BLOCK_N)
    if SILU_GATE:
        # Gate and up columns alternate in the tile, so that one thread has both members of a pair.
        FEATURES: tl.constexpr = OUT_FEATURES // 2
        BLOCK_F: tl.constexpr = BLOCK_N // 2
        o_n = tl.minimum(i_n * BLOCK_F + o_column // 2, FEATURES - 1) + o_column % 2 * FEATURES
    else:
        FEATURES: tl.constexpr = OUT_FEATURES  # type: ignore[no-redef]
        BLOCK_F: tl.constexpr = BLOCK_N  # type: ignore[no-redef]
        o_n = tl.minimum(i_n * BLOCK_N + o_column, OUT_FEATURES - 1)

    FULL_BLOCKS: tl.constexpr = IN_FEATURES // BLOCK_K
    BLOCKS: tl.constexpr = (IN_FEATURES + BLOCK_K - 1) // BLOCK_K
    BLOCKS_PER_SPLIT: tl.constexpr = (BLOCKS + SPLIT_K - 1) // SPLIT_K
    first = i_split * BLOCKS_PER_SPLIT
    end = tl.minimum(first + BLOCKS_PER_SPLIT, FULL_BLOCKS)
    o_k = first * BLOCK_K + tl.arange(0, BLOCK_K)
    o_x = i_rows * stride_x_group + o_row.to(tl.int64) * stride_x_row
    o_weight = i_group * stride_weight_group + o_n.to(tl.int64) * STRIDE_WEIGHT
    BYTES_WEIGHT: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    if tiles is None:
        if PDL == PREFETCH and BYTES_IN == 16:
            if (i_m == 0) & (first < end):
                prefetch_rows(weight + o_weight + first * BLOCK_K, (end - first) * BLOCK_K * BYTES_WEIGHT)
        wait_for_predecessors(PDL)
    p_x = tl.multiple_of(x + o_x[:, None] + o_k[None, :], [BYTES_IN, BYTES_IN])
    p_weight = tl.multiple_of(weight + o_weight[:, None] + o_k[None, :], [BYTES_IN, BYTES_IN])
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for _ in range(first, end):
        b_x = tl.load(p_x, mask=m_m[:, None], other=0.0)
        # A pass reads the weight once, so it should not evict activations and partial sums from L2.
        b_weight = tl.load(p_weight, eviction_policy="evict_first")
        b_acc = dot(b_x, tl.trans(b_weight), b_acc)
        p_x += BLOCK_K
        p_weight += BLOCK_K
    if BLOCKS > FULL_BLOCKS:
        if (first <= FULL_BLOCKS) & (first + BLOCKS_PER_SPLIT > FULL_BLOCKS):
            m_k = FULL_BLOCKS * BLOCK_K + tl.arange(0, BLOCK_K) < IN_FEATURES
            b_x = tl.load(p_x, mask=m_m[:, None] & m_k[None, :], other=0.0)
            b_weight = tl.load(p_weight, mask=m_k[None, :], other=0.0)
            b_acc = dot(b_x, tl.trans(b_weight), b_acc)

    o_f = i_n * BLOCK_F + tl.arange(0, BLOCK_F)
    m_out = m_m[:, None]
    if FEATURES % BLOCK_F != 0:
        m_out = m_out & (o_f < FEATURES)[None, :]
    if PARTIALS:
        i_plane = i_split * (tl.num_programs(2) // SPLIT_K) + i_rows
        # 32-bit offsets within the tile: with 64 bits, a tile of 64 x 64 spilled on sm_100.
        if tiles is None:
            p_tile = out + (i_plane * num_rows + i_m * BLOCK_M) * OUT_FEATURES + i_n * BLOCK_N
            o_tile = (tl.arange(0, BLOCK_M) * OUT_FEATURES)[:, None] + o_column[None, :]
        else:
            p_tile = out + i_plane * num_rows * OUT_FEATURES + i_n * BLOCK_N
            o_tile = (o_m.to(tl.int64) * OUT_FEATURES)[:, None] + o_column[None, :]
        tl.store(tl.multiple_of(p_tile + o_tile, [BYTES_OUT, BYTES_OUT]), b_acc, mask=m_out)
    else:
        if bias is not None:
            b_acc += tl.load(bias + i_group * stride_bias_group + o_n).to(tl.float32)[None, :]
        if SILU_GATE:
            b_gate, b_up = tl.split(tl.reshape(b_acc, [BLOCK_M, BLOCK_F, 2]))
            b_y = activate_gate(b_gate, b_up, ACTIVATION)
        else:
            b_y = activate(b_acc, ACTIVATION)
        if residual is not None:
            o_residual = i_rows * stride_residual_group + o_m.to(tl.int64) * stride_residual_row
            p_residual = tl.multiple_of(residual + o_residual[:, None] + o_f[None, :], [BYTES_OUT, BYTES_OUT])
            b_y += tl.load(p_residual, mask=m_out, other=0.0).to(tl.float32)
            # out may be residual, and the thread that stores an element may differ from the one that loaded it.
            tl.debug_barrier()
        o_out = i_rows * stride_out_group + o_m.to(tl.int64) * stride_out_row
        p_out = tl.multiple_of(out + o_out[:, None] + o_f[None, :], [BYTES_OUT, BYTES_OUT])
        tl.store(p_out, b_y.to(out.dtype.element_ty), mask=m_out)


@triton.jit
def sum_of_splits(p_row, m_f, stride_split, SPLIT_K: tl.constexpr):
    """Sum the splits in order; `p_row` points to the elements of split 0."""
    b_sum = tl.zeros(p_row.shape, dtype=tl.float32)
    for i_split in tl.static_range(SPLIT_K):
        b_sum += tl.load(p_row + i_split * stride_split, mask=m_f, other=0.0)
    return b_sum


@triton.jit(do_not_specialize=_RUNTIME)
def add_splits(
    partials,  # [SPLIT_K, groups, num_rows, OUT_FEATURES] fp32, or one product in the dtype of out
    bias,  # [groups, OUT_FEATURES], or None
    residual,  # [groups, num_rows, FEATURES]: OUT_FEATURES, or half of them with SILU_GATE; or None
    out,  # like residual
    chosen,  # [num_rows] int32, the group of the bias of each row, with one group of rows; or None
    num_rows,
    num_groups,
    stride_bias_group,
    stride_residual_group,
    stride_residual_row,
    stride_out_group,
    stride_out_row,
    OUT_FEATURES: tl.constexpr,
    BYTES_PARTIAL: tl.constexpr,  # alignment of every row's gates and ups in the partials
    BYTES_OUT: tl.constexpr,  # alignment of every row of out and residual
    SPLIT_K: tl.constexpr,
    SILU_GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,  # activation of the gate, or of the sum without a gate
    BLOCK_F: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program handles BLOCK_F features of one row of one group."""
    wait_for_predecessors(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    group, row = i_row // num_rows, i_row % num_rows
    if chosen is not None:  # rows without a group may have any bias, because nothing reads them
        group = tl.minimum(tl.load(chosen + i_row), num_groups - 1).to(tl.int64)
    FEATURES: tl.constexpr = OUT_FEATURES // 2 if SILU_GATE else OUT_FEATURES
    o_f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    m_f = o_f < FEATURES
    p_row = tl.multiple_of(partials + i_row * OUT_FEATURES + o_f, BYTES_PARTIAL)
    stride_split = tl.num_programs(0).to(tl.int64) * OUT_FEATURES
    o_bias = group * stride_bias_group + o_f
    b_y = sum_of_splits(p_row, m_f, stride_split, SPLIT_K)
    if bias is not None:
        b_y += tl.load(bias + o_bias, mask=m_f, other=0.0).to(tl.float32)
    if SILU_GATE:
        b_up = sum_of_splits(p_row + FEATURES, m_f, stride_split, SPLIT_K)
        if bias is not None:
            b_up += tl.load(bias + o_bias + FEATURES, mask=m_f, other=0.0).to(tl.float32)
        b_y = activate_gate(b_y, b_up, ACTIVATION)
    else:
        b_y = activate(b_y, ACTIVATION)
    if residual is not None:
        p_residual = residual + group * stride_residual_group + row * stride_residual_row + o_f
        b_y += tl.load(tl.multiple_of(p_residual, BYTES_OUT), mask=m_f, other=0.0).to(tl.float32)
        # out may be residual, and the thread that stores an element may differ from the one that loaded it.
        tl.debug_barrier()
    p_out = out + group * stride_out_group + row * stride_out_row + o_f
    tl.store(tl.multiple_of(p_out, BYTES_OUT), b_y.to(out.dtype.element_ty), mask=m_f)
