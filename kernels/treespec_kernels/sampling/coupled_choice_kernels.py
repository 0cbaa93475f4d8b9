"""Triton kernels of the coupled choice. Needs triton.

`choose_in_blocks` finds the best token of each block of the vocabulary, and `choose_of_blocks` the best block. Values
are computed per token and then only compared, so choices depend neither on the batch nor on the blocks. There are no
atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gumbel_integers(o_block, seed, sample, position):
    """Return the integers of tokens 8 * o_block to 8 * o_block + 7 of each element: [.., 8n] uint32 from [.., n].

    seed, sample and position are scalars, reinterpreted as uint64.
    """
    counter = (o_block + 1).to(tl.uint64)
    zero = tl.zeros_like(counter)
    words_0, words_1, words_2, words_3 = tl.philox_impl(
        counter,
        zero,
        zero + position.to(tl.uint64, bitcast=True),
        zero,
        seed.to(tl.uint64, bitcast=True),
        sample.to(tl.uint64, bitcast=True),
    )
    words = tl.interleave(tl.interleave(words_0, words_2), tl.interleave(words_1, words_3))
    return tl.interleave(words.to(tl.uint32), (words >> 32).to(tl.uint32))


@triton.jit
def gumbel(x):
    """Return g of uint32 integers, in float32.

    For w near 0, log(1 - w) keeps few bits of w. A factor corrects the rounding of 1 - w (Goldberg 1991, theorem 4),
    because libdevice's log1p does not run in the interpreter.
    """
    w = tl.minimum((x.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    complement = 1.0 - w
    rounded = 1.0 - complement
    is_tiny = rounded == 0.0
    minus_log = tl.where(is_tiny, w, -tl.log(complement) * (w / tl.where(is_tiny, 1.0, rounded)))
    return -tl.log(minus_log)


@triton.jit
def coupled_values(plain, o_philox, row, temperatures, seeds, samples, positions):
    """Return the values to compare, from float32 scores [.., 8n] of one row; o_philox [.., n] is token // 8.

    A NaN becomes +inf, so that comparisons do not drop it.
    """
    values = plain
    temperature = tl.load(temperatures + row)
    if temperature != 0:
        x = gumbel_integers(o_philox, tl.load(seeds + row), tl.load(samples + row), tl.load(positions + row))
        values = tl.div_rn(plain, temperature) + gumbel(x)
    return tl.where(values == values, values, float("inf"))


@triton.jit
def choose_in_blocks(
    scores,  # [rows, vocab]
    temperatures,  # [rows] fp32
    seeds,  # [rows] int64, as samples and positions
    samples,
    positions,
    best_values,  # [rows, num_programs(1)] fp32
    best_tokens,  # [rows, num_programs(1)] int32
    vocab,
    stride_scores,
    BLOCK_V: tl.constexpr,
):
    """One program owns one block of one row's tokens."""
    row = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    o_v = i_block * BLOCK_V + tl.arange(0, BLOCK_V)
    m_v = o_v < vocab
    plain = tl.load(scores + row * stride_scores + o_v, mask=m_v, other=0.0).to(tl.float32)
    o_philox = i_block * (BLOCK_V // 8) + tl.arange(0, BLOCK_V // 8)
    values = coupled_values(plain, o_philox, row, temperatures, seeds, samples, positions)
    values = tl.where(m_v, values, float("-inf"))
    value, index = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    o_best = row * tl.num_programs(1) + i_block
    tl.store(best_values + o_best, value)
    tl.store(best_tokens + o_best, i_block * BLOCK_V + index)


@triton.jit
def choose_of_blocks(
    best_values,  # [rows, NUM_BLOCKS] fp32
    best_tokens,
    tokens,  # [rows] int64
    finite,  # [rows] bool
    NUM_BLOCKS: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """One program owns one row. It chooses the first of equal blocks, and so the lowest token."""
    row = tl.program_id(0).to(tl.int64)
    o_b = tl.arange(0, BLOCK_B)
    values = tl.load(best_values + row * NUM_BLOCKS + o_b, mask=o_b < NUM_BLOCKS, other=float("-inf"))
    value, i_block = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(tokens + row, tl.load(best_tokens + row * NUM_BLOCKS + i_block).to(tl.int64))
    tl.store(finite + row, (value > float("-inf")) & (value < float("inf")))
