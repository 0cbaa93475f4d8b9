"""The coupled choice's noise and values in Triton. Needs triton."""

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
