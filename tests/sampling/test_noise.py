"""The noise: its integers against Philox on Python integers, independence of padding, distribution, choice."""

import itertools
import math

import numpy as np
import pytest
import torch

from tests.sampling.test_sampled_distribution import p_value
from treespec.sampling.noise import Noise
from treespec_kernels.sampling.coupled_choice import RowNoise, gumbel_integers_ref
from treespec_kernels.sampling.coupled_choice import gumbel_integers_of_row as integers
from treespec_kernels.sampling.coupled_choice import gumbel_ref as gumbel
from treespec_kernels.sampling.row_topk import row_topk_ref

WORD = 2**64 - 1
VOCABS = (1, 5, 63, 64, 100, 4096, 4099, 151936)
KEYS = [(0, 0, 0), (1, 2, 3), (7, 0, 1000), (WORD, 5, 131071), (2**63, 2**32 + 1, 2**33)]


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x64-10, from the paper (Salmon et al., SC 2011), by `divmod` on Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c[0], 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * c[2], 2**64)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B97F4A7C15) % 2**64, (k[1] + 0xBB67AE8584CAA73B) % 2**64]
    return c


def noise_integer(seed: int, sample: int, position: int, token: int) -> int:
    word = philox((1 + token // 8, 0, position, 0), (seed, sample))[token // 2 % 4]
    return word >> 32 if token % 2 else word % 2**32


@pytest.mark.parametrize("vocab", [*VOCABS, 152064])
@pytest.mark.parametrize("seed, sample, position", KEYS)
def test_integers_are_philox_of_seed_sample_position_and_token(
    seed: int, sample: int, position: int, vocab: int
) -> None:
    """Vocabularies that differ by padding have the same noise."""
    row = integers(seed, sample, position, vocab)
    assert (row.shape, row.dtype) == ((vocab,), np.uint32)
    every = [*range(200), 4095, 4096, 4097, 65535, 65536, 151934, 151935]
    tokens = [token for token in every if token < vocab]
    assert row[tokens].tolist() == [noise_integer(seed, sample, position, token) for token in tokens]


def test_integers_of_signed_keys_are_those_of_their_bits() -> None:
    keys = np.array([(-1, 5, 131071), (-(2**63), 2**40, 2**33), (2**63 - 1, -7, -1)], dtype=np.int64)
    found = gumbel_integers_ref(*keys.T, 63)
    for row, (seed, sample, position) in zip(found, keys.view(np.uint64).tolist(), strict=True):
        assert row.tolist() == [noise_integer(seed, sample, position, token) for token in range(63)]


@pytest.mark.parametrize("vocab", [*VOCABS, 152064])
def test_bits_are_those_of_the_kernels_reference(vocab: int) -> None:
    """Integers and floats: what a GPU checks itself against is what the engine samples with."""
    seeds, samples, positions = np.array(KEYS, dtype=np.uint64).T
    words = gumbel_integers_ref(seeds, samples, positions, vocab)
    noise = gumbel(words)
    for row, key in enumerate(KEYS):
        assert np.array_equal(integers(*key, vocab), words[row])
        assert np.array_equal(Noise(*key[:2], vocab).row(key[2]), noise[row])


def test_a_float_does_not_know_where_it_stands() -> None:
    """In a vector or its tail."""
    words = integers(3, 1, 4, 200)
    for start, length in itertools.product(range(0, 200, 3), (1, 2, 7, 16, 17, 33)):
        assert np.array_equal(gumbel(words[start : start + length]), gumbel(words)[start : start + length])


def test_noise_is_finite_and_accurate_at_every_integer() -> None:
    edges = np.array([0, 1, 127, 128, 2**24, 2**31, 2**32 - 257, 2**32 - 129, 2**32 - 128, 2**32 - 2, 2**32 - 1])
    drawn = np.random.default_rng(0).integers(0, 2**32, 20000)
    drawn[10000:] >>= np.arange(10000) % 32
    words = np.concatenate([edges, drawn]).astype(np.uint32)
    noise = gumbel(words)
    assert noise.dtype == np.float32 and np.isfinite(noise).all()
    uniforms = np.minimum((words.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32), np.float32(1 - 2**-24))
    expected = -np.log(-np.log1p(-uniforms.astype(np.float64)))
    assert (np.abs(noise - expected) <= 3e-7 * np.maximum(1, np.abs(expected))).all()
    noise = noise[: len(edges)]
    assert (np.diff(noise) <= 0).all()  # falls as the integer grows
    assert noise[0] == np.float32(33 * math.log(2))
    assert noise[-1] == pytest.approx(-math.log(24 * math.log(2)), abs=1e-6)


@pytest.mark.parametrize("varied", ["seeds", "samples", "positions"])
def test_the_distribution_is_softmax_of_scores_over_temperature(varied: str) -> None:
    """A G-test over neighbours in each of the three numbers, and one that consecutive choices are independent."""
    rows, temperature = 30000, 1.3
    scores = torch.tensor([0.3, -1.2, 1.1, 0.0, -0.4, 0.9])
    fixed = {"seeds": 12345, "samples": 1, "positions": 77}
    keys = {name: torch.full((rows,), value) for name, value in fixed.items()} | {varied: torch.arange(rows)}
    chosen = row_topk_ref(scores.expand(rows, -1), 1, RowNoise(torch.full((rows,), temperature), **keys))
    assert chosen.finite.all()
    probs = (scores.double() / temperature).softmax(0).numpy()
    pairs = chosen.tokens.view(-1, 2).numpy()
    counts = np.bincount(chosen.tokens[:, 0].numpy(), minlength=6)
    assert p_value(counts, probs * rows) > 1e-6
    counts = np.bincount(pairs[:, 0] * 6 + pairs[:, 1], minlength=36)
    assert p_value(counts, np.outer(probs, probs).ravel() * len(pairs)) > 1e-6


@pytest.mark.parametrize("vocab", [64, 1000, 49_152])
def test_the_choice_is_that_of_all_sums(vocab: int) -> None:
    """Peaked, flat and large scores, masked tokens, ties, a whole row of -inf, and values that are not finite."""
    rng = np.random.default_rng(vocab)
    noise = Noise(7, 2, vocab)
    for position in range(40):
        scores = (rng.standard_normal(vocab) * rng.choice([0.01, 1, 4, 30])).astype(np.float32)
        if position % 4 == 3:  # sums are rounded to multiples of 8
            scores += np.float32(1e8)
        if position % 3 == 1:
            scores[rng.random(vocab) < 0.9] = -np.inf
        if position % 7 == 2:
            scores[:] = rng.choice([0.0, -np.inf, np.inf])
        if position % 11 == 5:
            scores[rng.integers(vocab)] = rng.choice([np.nan, np.inf])
        sums = scores + noise.row(position)
        token, best = noise.choose(scores, position)
        assert token == sums.argmax() and np.array_equal(best, sums[token], equal_nan=True)
