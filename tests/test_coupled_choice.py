"""Coupled choice: the noise's integers and logarithms, and the distribution of the specification."""

import numpy as np
import pytest
import torch

from treespec_kernels.sampling.coupled_choice import RowNoise, gumbel_integers_ref, gumbel_ref
from treespec_kernels.sampling.row_topk import row_topk_ref

WORD = 2**64 - 1


def philox4x64_10(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    """Philox4x64-10 as in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11), on Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (high >> 64) ^ c1 ^ k0, high & WORD, (low >> 64) ^ c3 ^ k1, low & WORD
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD, (k1 + 0xBB67AE8584CAA73B) & WORD
    return [c0, c1, c2, c3]


# The known answers of Random123: zeros, ones, and digits of pi.
PI = (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89)
KNOWN_ANSWERS = [
    ((0,) * 4, (0, 0), "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"),
    ((WORD,) * 4, (WORD, WORD), "87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0"),
    (
        PI,
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        "a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6",
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_philox_gives_the_known_answers(counter: tuple[int, ...], key: tuple[int, ...], answer: str) -> None:
    words = [int(word, 16) for word in answer.split()]
    assert philox4x64_10(counter, key) == words
    number = (sum(word << 64 * i for i, word in enumerate(counter)) - 1) % 2**256  # numpy increments it first
    before = np.array([number >> 64 * i & WORD for i in range(4)], dtype=np.uint64)
    numpy_words = np.random.Philox(key=np.array(key, dtype=np.uint64), counter=before).random_raw(4)
    assert numpy_words.tolist() == words


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 63, 1000])
def test_integers_are_philox_of_seed_sample_position_and_token(vocab: int) -> None:
    rows = [(0, 0, 0), (1, 2, 3), (-1, 5, 131071), (-(2**63), 2**40, 2**33), (2**63 - 1, -7, -1)]
    integers = gumbel_integers_ref(*np.array(rows, dtype=np.int64).T, vocab)
    assert (integers.shape, integers.dtype) == ((len(rows), vocab), np.uint32)
    for row, (seed, sample, position) in enumerate(rows):
        for v in range(vocab):
            words = philox4x64_10((1 + v // 8, 0, position & WORD, 0), (seed & WORD, sample & WORD))
            assert integers[row, v] == words[v // 2 % 4] >> 32 * (v % 2) & 0xFFFFFFFF


def test_integers_of_unsigned_seeds_are_those_of_their_bits() -> None:
    seeds, zeros = np.array([2**64 - 1, 2**63], dtype=np.uint64), np.zeros(2, dtype=np.int64)
    assert np.array_equal(
        gumbel_integers_ref(seeds, zeros, zeros, 16), gumbel_integers_ref(seeds.view(np.int64), zeros, zeros, 16)
    )


def test_noise_is_finite_and_accurate_at_every_integer() -> None:
    edges = [0, 1, 2, 127, 128, 129, 2**24, 2**31 - 1, 2**31, 2**32 - 2**8, 2**32 - 129, 2**32 - 2, 2**32 - 1]
    drawn = np.random.default_rng(0).integers(0, 2**32, 10000)
    small = np.random.default_rng(1).integers(0, 2**32, 10000) >> np.arange(10000) % 32
    x = np.concatenate([edges, drawn, small]).astype(np.uint32)
    g = gumbel_ref(x)
    assert g.dtype == np.float32 and np.isfinite(g).all()
    w = np.minimum((x.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32), np.float32(1 - 2**-24))
    expected = -np.log(-np.log1p(-w.astype(np.float64)))
    assert (np.abs(g - expected) <= 3e-7 * np.maximum(1, np.abs(expected))).all()
    assert g[0] == g.max() == np.float32(33 * np.log(2))
    assert g[12] == g.min() and -2.82 < g[12] < -2.81


@pytest.mark.parametrize("varied", ["seeds", "samples", "positions"])
def test_the_distribution_is_softmax_of_scores_over_temperature(varied: str) -> None:
    """A G-test over neighbours in each of the three numbers, and one that consecutive choices are independent."""
    rows, temperature = 30000, 1.3
    scores = torch.tensor([0.3, -1.2, 1.1, 0.0, -0.4, 0.9])
    fixed = {"seeds": 12345, "samples": 1, "positions": 77}
    keys = {name: torch.full((rows,), value) for name, value in fixed.items()} | {varied: torch.arange(rows)}
    chosen = row_topk_ref(scores.expand(rows, -1), 1, RowNoise(torch.full((rows,), temperature), **keys))
    assert chosen.finite.all()
    probs = (scores.double() / temperature).softmax(0)
    pairs = chosen.tokens.view(-1, 2)
    for tokens, expected in (
        (chosen.tokens[:, 0], probs * rows),
        (pairs[:, 0] * 6 + pairs[:, 1], (probs[:, None] * probs).flatten() * len(pairs)),
    ):
        assert expected.min() > 5
        observed = tokens.bincount(minlength=len(expected)).double()
        statistic = 2 * torch.special.xlogy(observed, observed / expected).sum()
        p_value = torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2)
        assert p_value > 1e-6, (observed.tolist(), expected.tolist())
