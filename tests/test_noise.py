"""The noise: its integers against Philox on Python integers, independence of padding, distribution, what is kept."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treespec.sampling.noise import Noise
from treespec_kernels.sampling.coupled_choice import gumbel_integers_of_row as integers
from treespec_kernels.sampling.coupled_choice import gumbel_integers_ref
from treespec_kernels.sampling.coupled_choice import gumbel_ref as gumbel

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


def g_test(observed: np.ndarray, expected: np.ndarray) -> float:
    """The p-value of counts against expected counts."""
    assert expected.min() > 5
    counts, wanted = torch.from_numpy(observed).double(), torch.from_numpy(expected).double()
    statistic = 2 * torch.special.xlogy(counts, counts / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


def test_philox_has_its_published_answers() -> None:
    """Random123's for all zeros and all ones."""
    zeros = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    ones = [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]
    assert philox((0,) * 4, (0, 0)) == zeros
    assert philox((WORD,) * 4, (WORD, WORD)) == ones


# --- integers


@pytest.mark.parametrize("seed, sample, position", KEYS)
def test_integers_are_philox_of_seed_sample_position_and_token(seed: int, sample: int, position: int) -> None:
    row = integers(seed, sample, position, 151936)
    assert (row.shape, row.dtype) == ((151936,), np.uint32)
    tokens = [*range(200), 4095, 4096, 4097, 65535, 65536, 151934, 151935]
    assert row[tokens].tolist() == [noise_integer(seed, sample, position, token) for token in tokens]


@settings(max_examples=60)
@given(st.integers(0, WORD), st.integers(0, 2**34), st.integers(0, 2**40), st.integers(1, 300))
def test_integers_of_any_key(seed: int, sample: int, position: int, vocab: int) -> None:
    row = integers(seed, sample, position, vocab)
    assert len(row) == vocab
    assert row[-1] == noise_integer(seed, sample, position, vocab - 1)
    keys = (np.array([number], dtype=np.uint64) for number in (seed, sample, position))
    assert np.array_equal(row, gumbel_integers_ref(*keys, vocab)[0])


@pytest.mark.parametrize("vocab", [*VOCABS, 152064])
def test_bits_are_those_of_the_kernels_reference(vocab: int) -> None:
    """Integers and floats: what a GPU checks itself against is what the engine samples with."""
    seeds, samples, positions = np.array(KEYS, dtype=np.uint64).T
    words = gumbel_integers_ref(seeds, samples, positions, vocab)
    noise = gumbel(words)
    for row, key in enumerate(KEYS):
        assert np.array_equal(integers(*key, vocab), words[row])
        assert np.array_equal(Noise(*key[:2], vocab).row(key[2]), noise[row])


@pytest.mark.parametrize("vocab", VOCABS)
def test_a_row_does_not_know_how_long_it_is(vocab: int) -> None:
    """Vocabularies that differ by padding have the same noise, in every bit: 151936 and 152064 above all."""
    for key in KEYS[:3]:
        for longer in (vocab + 1, vocab + 3, vocab + 64, 152064):
            whole = integers(*key, longer)
            assert np.array_equal(integers(*key, vocab), whole[:vocab])
            assert np.array_equal(gumbel(integers(*key, vocab)), gumbel(whole)[:vocab])
            assert np.array_equal(Noise(*key[:2], vocab).row(key[2]), Noise(*key[:2], longer).row(key[2])[:vocab])


def test_a_float_does_not_know_where_it_stands() -> None:
    """One token's noise alone, and at every place of a vector and of its tail."""
    words = integers(3, 1, 4, 200)
    noise = gumbel(words)
    for start in range(40):
        for length in (1, 2, 7, 16, 17, 33, 100):
            part = gumbel(words[start : start + length])
            assert np.array_equal(part, noise[start : start + length]), (start, length)


def test_integers_are_left_as_they_are() -> None:
    words = integers(3, 1, 4, 100)
    before = words.copy()
    gumbel(words)
    assert np.array_equal(words, before)


def test_another_seed_sample_or_position_is_another_row() -> None:
    keys = [(s, i, p) for s in (0, 1, 2**53, WORD) for i in (0, 1, 2) for p in (0, 1, 2, 64, 4096)]
    rows = [integers(*key, 256) for key in keys]
    assert len({row.tobytes() for row in rows}) == len(keys)
    equal = sum(int((a == b).sum()) for i, a in enumerate(rows) for b in rows[:i])
    assert equal <= 2  # of 450,000 pairs of integers, one in 9,000 such tests has one in common
    assert np.array_equal(integers(5, 1, 2, 256), integers(5, 1, 2, 256))


# --- floats


def test_extremes_are_finite() -> None:
    edges = np.array([0, 1, 127, 128, 2**24, 2**31, 2**32 - 257, 2**32 - 129, 2**32 - 128, 2**32 - 2, 2**32 - 1])
    noise = gumbel(edges.astype(np.uint32))
    assert noise.dtype == np.float32 and np.isfinite(noise).all()
    assert (np.diff(noise) <= 0).all()  # falls as the integer grows
    assert noise[0] == np.float32(33 * math.log(2))
    assert noise[-1] == pytest.approx(-math.log(24 * math.log(2)), abs=1e-6)


def test_mean_and_variance_are_gumbels() -> None:
    noise = np.concatenate([gumbel(integers(2024, 0, position, 65536)) for position in range(16)]).astype(np.float64)
    variance = math.pi**2 / 6
    assert abs(noise.mean() - np.euler_gamma) < 5 * math.sqrt(variance / noise.size)
    assert abs(noise.var() - variance) < 5 * variance * math.sqrt(4.4 / noise.size)  # kurtosis 5.4
    shares = np.bincount((np.exp(-np.exp(-noise)) * 64).astype(int), minlength=64)
    assert g_test(shares, np.full(64, noise.size / 64)) > 1e-6


@pytest.mark.parametrize("varied", ["seed", "sample", "position"])
def test_the_largest_sum_of_log_probability_and_noise_follows_the_distribution(varied: str) -> None:
    """Over neighbours in each part of the key, alone and in pairs."""
    rounds, probs = 12000, np.array([0.4, 0.25, 0.05, 0.0, 0.15, 0.02, 0.13])
    with np.errstate(divide="ignore"):
        log_probs = np.log(probs).astype(np.float32)
    keys = [{"seed": 99, "sample": 0, "position": 31} | {varied: i} for i in range(rounds)]
    chosen = np.array([int((log_probs + gumbel(integers(**key, vocab=7))).argmax()) for key in keys])
    possible = np.flatnonzero(probs)
    counts = np.bincount(chosen, minlength=7)
    assert counts[3] == 0
    assert g_test(counts[possible], probs[possible] * rounds) > 1e-6
    pairs = np.bincount(chosen[::2] * 7 + chosen[1::2], minlength=49).reshape(7, 7)[np.ix_(possible, possible)]
    rare = possible.tolist().index(5)  # 2 %: its pairs are pooled with those of 5 %
    pairs[rare - 2] += pairs[rare]
    pairs[:, rare - 2] += pairs[:, rare]
    pooled = probs[possible].copy()
    pooled[rare - 2] += pooled[rare]
    pairs, pooled = np.delete(np.delete(pairs, rare, 0), rare, 1), np.delete(pooled, rare)
    assert g_test(pairs.ravel(), np.outer(pooled, pooled).ravel() * (rounds // 2)) > 1e-6


# --- rows that are kept


def test_noise_keeps_rows_and_forgets() -> None:
    noise = Noise(11, 2, 100)
    rows = {position: noise.row(position) for position in (5, 6, 9, 3)}
    assert all(noise.row(position) is row for position, row in rows.items())
    assert all(np.array_equal(row, gumbel(integers(11, 2, position, 100))) for position, row in rows.items())
    noise.forget(6)
    assert noise.row(6) is rows[6] and noise.row(9) is rows[9]
    for forgotten, position in ((6, 5), (6, 3), (10, 6), (10, 9)):
        noise.forget(forgotten)
        again = noise.row(position)
        assert again is not rows[position] and np.array_equal(again, rows[position])
    noise.forget(10)


@pytest.mark.parametrize("vocab", [64, 1000, 49_152])
def test_the_choice_is_that_of_all_sums(vocab: int) -> None:
    """Peaked and flat scores, masked tokens, ties, a whole row of -inf, and values that are not finite."""
    rng = np.random.default_rng(vocab)
    noise = Noise(7, 2, vocab)
    for position in range(40):
        scores = (rng.standard_normal(vocab) * rng.choice([0.01, 1, 4, 30])).astype(np.float32)
        if position % 3 == 1:
            scores[rng.random(vocab) < 0.9] = -np.inf
        if position % 7 == 2:
            scores[:] = rng.choice([0.0, -np.inf, np.inf])
        if position % 11 == 5:
            scores[rng.integers(vocab)] = rng.choice([np.nan, np.inf])
        sums = scores + noise.row(position)
        token, best = noise.choose(scores, position)
        assert token == sums.argmax() and np.array_equal(best, sums[token], equal_nan=True)
