"""Triton kernels of row top-k. Needs triton.

`summarise_blocks` computes the best token and the sum of exponentials of each block of the vocabulary.
`select_of_blocks` selects the k best blocks, and then the k best of their tokens. Both compute a token's value by the
same function of the row and the token, so choices depend neither on the batch nor on the blocks. There are no atomics.
"""

import triton
import triton.language as tl

from treespec_kernels.linear.lm_head_kernels import summary
from treespec_kernels.sampling.coupled_values import coupled_values

_TAKEN = tl.constexpr(-(2**63))  # less than the key of every number, including -inf


@triton.jit
def _keys(values, index):
    """Return int64 sort keys; in descending order, they sort by descending value, then ascending index.

    The high half has the float32 bits, with negative numbers flipped so that they compare as integers; the low half has
    the complement of the index.
    """
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0 equals +0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _index_of(keys):
    return (0x7FFFFFFF - (keys & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def _value_of(keys):
    ordered = (keys >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _values(logits, row, o_v, o_philox, m_v, temperatures, seeds, samples, positions):
    """Return float32 values of the tokens o_v of a row, +inf for NaN; o_philox is o_v // 8 along the last dimension."""
    values = tl.load(logits + o_v, mask=m_v, other=0.0).to(tl.float32)
    if temperatures is not None:
        values = coupled_values(values, o_philox, row, temperatures, seeds, samples, positions)
    else:
        values = tl.where(values == values, values, float("inf"))
    return values


@triton.jit
def summarise_blocks(
    logits,  # [rows, VOCAB]
    temperatures,  # [rows] fp32; this and the next three may be None
    seeds,  # [rows] int64; also samples and positions
    samples,
    positions,
    best_values,  # [rows, cdiv(VOCAB, BLOCK)] fp32; also sums
    best_tokens,  # int32
    sums,
    stride_logits,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):
    """One program handles SPAN / BLOCK blocks of one row."""
    row = tl.program_id(0).to(tl.int64)
    i_span = tl.program_id(1)
    num_blocks: tl.constexpr = (VOCAB + BLOCK - 1) // BLOCK
    o_v = i_span * SPAN + tl.arange(0, SPAN)
    o_philox = i_span * (SPAN // 8) + tl.arange(0, SPAN // 8)
    p_row = logits + row * stride_logits
    values = _values(p_row, row, o_v, o_philox, o_v < VOCAB, temperatures, seeds, samples, positions)
    values = tl.where(o_v < VOCAB, values, float("-inf"))
    best, index, b_sums = summary(tl.reshape(values, [SPAN // BLOCK, BLOCK]))
    o_b = i_span * (SPAN // BLOCK) + tl.arange(0, SPAN // BLOCK)
    m_b = o_b < num_blocks
    o_stats = row * num_blocks + o_b
    tl.store(best_values + o_stats, best, mask=m_b)
    tl.store(best_tokens + o_stats, o_b * BLOCK + index, mask=m_b)
    tl.store(sums + o_stats, b_sums, mask=m_b)


@triton.jit
def select_of_blocks(
    logits,  # [rows, VOCAB]
    temperatures,  # [rows] fp32; this and the next three may be None
    seeds,  # [rows] int64; also samples and positions
    samples,
    positions,
    best_values,  # [rows, NUM_BLOCKS] fp32; also sums
    best_tokens,  # int32
    sums,
    tokens,  # [rows, K] int32
    values,  # [rows, K] fp32
    lse,  # [rows] fp32
    finite,  # [rows] bool
    stride_logits,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_READ: tl.constexpr,  # min(K, NUM_BLOCKS)
    K: tl.constexpr,
    BLOCK_B: tl.constexpr,  # this and the next two: NUM_BLOCKS, NUM_READ and K rounded up to powers of two
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program handles one row."""
    row = tl.program_id(0).to(tl.int64)
    o_b = tl.arange(0, BLOCK_B)
    m_b = o_b < NUM_BLOCKS
    b_best = tl.load(best_values + row * NUM_BLOCKS + o_b, mask=m_b, other=float("-inf"))
    b_sums = tl.load(sums + row * NUM_BLOCKS + o_b, mask=m_b, other=0.0)
    top = tl.max(b_best, axis=0)
    is_finite = (top > float("-inf")) & (top < float("inf"))
    shift = tl.where(is_finite, top, 0.0)
    tl.store(lse + row, shift + tl.log(tl.sum(b_sums * tl.exp(b_best - shift), axis=0)))
    tl.store(finite + row, is_finite)

    keys = tl.where(m_b, _keys(b_best, o_b), _TAKEN)
    if K == 1:
        key = tl.max(keys, axis=0)
        tl.store(tokens + row, tl.load(best_tokens + row * NUM_BLOCKS + _index_of(key)))
        tl.store(values + row, _value_of(key))
    else:
        o_r = tl.arange(0, BLOCK_R)
        b_blocks = tl.zeros([BLOCK_R], dtype=tl.int32)
        for i in range(NUM_READ):
            key = tl.max(keys, axis=0)
            keys = tl.where(keys == key, _TAKEN, keys)
            b_blocks = tl.where(o_r == i, _index_of(key), b_blocks)

        o_v = b_blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        o_philox = b_blocks[:, None] * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
        m_v = (o_r < NUM_READ)[:, None] & (o_v < VOCAB)
        p_row = logits + row * stride_logits
        b_values = _values(p_row, row, o_v, o_philox, m_v, temperatures, seeds, samples, positions)
        candidates = tl.where(m_v, _keys(b_values, o_v), _TAKEN)
        o_k = tl.arange(0, BLOCK_K)
        b_keys = tl.zeros([BLOCK_K], dtype=tl.int64)
        for i in range(K):
            key = tl.max(tl.max(candidates, axis=1), axis=0)
            candidates = tl.where(candidates == key, _TAKEN, candidates)
            b_keys = tl.where(o_k == i, key, b_keys)
        tl.store(tokens + row * K + o_k, _index_of(b_keys), mask=o_k < K)
        tl.store(values + row * K + o_k, _value_of(b_keys), mask=o_k < K)
