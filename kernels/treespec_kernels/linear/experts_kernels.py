"""Triton kernels of mixtures of experts, around the products of `row_linear_kernels`. Needs triton."""

import triton
import triton.language as tl

from treespec_kernels.launch.predecessors import wait_for_predecessors
from treespec_kernels.linear.row_linear_kernels import sum_of_splits


@triton.jit
def first_largest(b_values, o_e, BLOCK_E: tl.constexpr):
    """Return the largest value and its first index; BLOCK_E as the index of NaN."""
    largest = tl.max(b_values, axis=0)
    return largest, tl.min(tl.where(b_values == largest, o_e, BLOCK_E), axis=0)


_ROUTED = ["partials", "bias", "correction", "scales", "slots", "spreads", "x", "chosen", "weights", "num_rows"]


@triton.jit(do_not_specialize=_ROUTED)
def route_rows(
    partials,  # [SPLIT_K, num_rows, COLUMNS] fp32 partial sums of the router's logits, in its first columns
    bias,  # [NUM_EXPERTS], or None
    correction,  # [NUM_EXPERTS] fp32, or None
    scales,  # [NUM_EXPERTS] fp32 factors on the weights, or None
    slots,  # [num_rows] int64, 0 for padding; or None
    spreads,  # [1] int32, whether padding rows choose experts too, each row different ones; or None
    x,  # any tensor in the dtype that the logits are rounded to
    chosen,  # [num_rows, TOP_K] int32
    weights,  # [num_rows, TOP_K] fp32
    num_rows,
    SCALE: tl.constexpr,
    SCORING: tl.constexpr,
    NORMALIZED: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program chooses the experts of one row, one after the other. Padding chooses none (NUM_EXPERTS)."""
    wait_for_predecessors(PDL)
    row = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, BLOCK_E)
    o_t = tl.arange(0, BLOCK_T)
    m_e = o_e < NUM_EXPERTS
    p_row = partials + row * COLUMNS + o_e
    b_logits = sum_of_splits(p_row, m_e, tl.cast(num_rows, tl.int64) * COLUMNS, SPLIT_K)
    if bias is not None:
        b_logits += tl.load(bias + o_e, mask=m_e, other=0.0).to(tl.float32)
    b_logits = b_logits.to(x.dtype.element_ty).to(tl.float32)
    if SCORING == "sigmoid":
        b_scores = 1.0 / (1.0 + tl.exp(-b_logits))
    elif SCORING == "softmax":
        b_masked = tl.where(m_e, b_logits, float("-inf"))
        b_exp = tl.exp(b_masked - tl.max(b_masked, axis=0))
        b_scores = b_exp / tl.sum(b_exp, axis=0)
    else:
        b_scores = b_logits
    b_choice = b_scores
    if correction is not None:
        b_choice += tl.load(correction + o_e, mask=m_e, other=0.0)
    b_choice = tl.where(m_e, b_choice, float("-inf"))
    if GROUPS > 1:
        SIZE: tl.constexpr = NUM_EXPERTS // GROUPS
        b_group = tl.full([BLOCK_E], float("-inf"), dtype=tl.float32)  # element g is of group g
        for g in tl.static_range(GROUPS):
            b_of_group = tl.where(o_e // SIZE == g, b_choice, float("-inf"))
            best, i_best = first_largest(b_of_group, o_e, BLOCK_E)
            second = tl.max(tl.where(o_e == i_best, float("-inf"), b_of_group), axis=0)
            b_group = tl.where(o_e == g, best + second, b_group)
        b_kept = tl.zeros([BLOCK_E], dtype=tl.int32)
        for _ in tl.static_range(CHOSEN_GROUPS):
            best, i_best = first_largest(b_group, o_e, BLOCK_E)
            b_kept = tl.where(o_e // SIZE == i_best, 1, b_kept)
            b_group = tl.where(o_e == i_best, float("-inf"), b_group)
        b_choice = tl.where(b_kept == 1, b_choice, float("-inf"))
    b_chosen = tl.zeros([BLOCK_T], dtype=tl.int32)
    b_weights = tl.full([BLOCK_T], float("-inf") if SCORING == "softmax_of_chosen" else 0.0, dtype=tl.float32)
    for rank in tl.static_range(TOP_K):
        best, i_best = first_largest(b_choice, o_e, BLOCK_E)
        score = tl.sum(tl.where(o_e == i_best, b_scores, 0.0), axis=0)
        score = tl.where(i_best < NUM_EXPERTS, score, float("nan"))  # a row with NaN chooses no expert, and stays NaN
        b_chosen = tl.where(o_t == rank, tl.minimum(i_best, NUM_EXPERTS), b_chosen)
        b_weights = tl.where(o_t == rank, score, b_weights)
        b_choice = tl.where(o_e == i_best, float("-inf"), b_choice)
    if SCORING == "softmax_of_chosen":
        b_exp = tl.exp(b_weights - tl.max(b_weights, axis=0))
        b_weights = (b_exp / tl.sum(b_exp, axis=0)).to(x.dtype.element_ty).to(tl.float32)
    else:
        if NORMALIZED:
            b_weights = b_weights / (tl.sum(b_weights, axis=0) + 1e-20)
        b_weights *= SCALE
    if scales is not None:
        b_weights *= tl.load(scales + b_chosen, mask=b_chosen < NUM_EXPERTS, other=1.0)
    if slots is not None:
        is_padding = tl.load(slots + row) == 0
        b_none = tl.zeros([BLOCK_T], dtype=tl.int32) + NUM_EXPERTS
        if spreads is not None:
            b_hashed = ((row * TOP_K + o_t) * 40503 % 65536 * NUM_EXPERTS // 65536).to(tl.int32)
            b_none = tl.where(tl.load(spreads) == 0, b_none, b_hashed)
        b_chosen = tl.where(is_padding, b_none, b_chosen)
        b_weights = tl.where(is_padding, 0.0, b_weights)
    tl.store(chosen + row * TOP_K + o_t, b_chosen, mask=o_t < TOP_K)
    tl.store(weights + row * TOP_K + o_t, b_weights, mask=o_t < TOP_K)


@triton.jit(do_not_specialize=["chosen", "tiles", "members", "num_pairs", "num_tiles"])
def group_rows(
    chosen,  # [num_pairs] int32, NUM_EXPERTS or more for none
    tiles,  # [num_tiles] int32, the expert of each tile; -1 for tiles without rows
    members,  # [num_tiles, BLOCK_M] int32, the pairs of each tile; -1 for padding
    num_pairs,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,  # more than NUM_EXPERTS
    PDL: tl.constexpr,
):
    """One program lists the pairs that chose one expert, in order, behind the tiles of the experts before it."""
    wait_for_predecessors(PDL)
    expert = tl.program_id(0)
    o_e = tl.arange(0, BLOCK_E)
    o_p = tl.arange(0, BLOCK_P)
    b_counts = tl.zeros([BLOCK_E], dtype=tl.int32)
    for first in range(0, num_pairs, BLOCK_P):
        b_chosen = tl.load(chosen + first + o_p, mask=first + o_p < num_pairs, other=NUM_EXPERTS)
        b_counts += tl.histogram(tl.minimum(b_chosen, NUM_EXPERTS), BLOCK_E)
    b_tiles = tl.where(o_e < NUM_EXPERTS, (b_counts + BLOCK_M - 1) // BLOCK_M, 0)
    first_tile = tl.sum(tl.where(o_e < expert, b_tiles, 0), axis=0)
    end_tile = first_tile + tl.sum(tl.where(o_e == expert, b_tiles, 0), axis=0)
    place = first_tile * BLOCK_M
    for first in range(0, num_pairs, BLOCK_P):
        b_chosen = tl.load(chosen + first + o_p, mask=first + o_p < num_pairs, other=NUM_EXPERTS)
        b_own = (b_chosen == expert).to(tl.int32)
        tl.store(members + place + tl.cumsum(b_own, axis=0) - 1, first + o_p, mask=b_own == 1)
        place += tl.sum(b_own, axis=0)
    o_m = tl.arange(0, BLOCK_M)
    tl.store(members + place + o_m, tl.zeros([BLOCK_M], dtype=tl.int32) - 1, mask=place + o_m < end_tile * BLOCK_M)
    for tile in range(first_tile, end_tile):
        tl.store(tiles + tile, expert)
    if expert == NUM_EXPERTS - 1:
        for tile in range(end_tile, num_tiles):
            tl.store(tiles + tile, -1)


@triton.jit(do_not_specialize=["outputs", "chosen", "weights", "shared", "partials", "out", "num_rows"])
def combine_rows(
    outputs,  # [num_rows, TOP_K, HIDDEN]
    chosen,  # [num_rows, TOP_K] int32
    weights,  # [num_rows, TOP_K] fp32
    shared,  # [SHARED_SPLITS, num_rows, HIDDEN] fp32 partial sums of the shared expert, or None
    partials,  # [SPLIT_K, num_rows, COLUMNS] fp32; the last column is the shared expert's gate, or None
    out,  # [num_rows, HIDDEN]
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARED_SPLITS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program adds BLOCK_F features of one row's experts, by rank, and those of the shared expert."""
    wait_for_predecessors(PDL)
    row = tl.program_id(0).to(tl.int64)
    rows = tl.cast(num_rows, tl.int64)
    o_f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    m_f = o_f < HIDDEN
    b_total = tl.zeros([BLOCK_F], dtype=tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = row * TOP_K + rank
        has_expert = tl.load(chosen + pair) < NUM_EXPERTS  # otherwise nothing was written
        b_output = tl.load(outputs + pair * HIDDEN + o_f, mask=m_f & has_expert, other=0.0)
        b_total += b_output.to(tl.float32) * tl.load(weights + pair)
    if shared is not None:
        b_shared = sum_of_splits(shared + row * HIDDEN + o_f, m_f, rows * HIDDEN, SHARED_SPLITS)
        b_shared = b_shared.to(out.dtype.element_ty).to(tl.float32)
        if partials is not None:
            o_gate = tl.zeros([1], dtype=tl.int32) + COLUMNS - 1
            b_gate = sum_of_splits(partials + row * COLUMNS + o_gate, o_gate >= 0, rows * COLUMNS, SPLIT_K)
            b_shared *= 1.0 / (1.0 + tl.exp(-b_gate.to(out.dtype.element_ty).to(tl.float32)))
        b_total += b_shared
    tl.store(out + row * HIDDEN + o_f, b_total.to(out.dtype.element_ty), mask=m_f)
