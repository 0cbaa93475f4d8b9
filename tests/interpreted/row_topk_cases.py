"""Cases of row_topk."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.interpreted.common import DEVICE, IMPLEMENTATION, INF, NAN, view_amid_nan
from treespec_kernels.linear.lm_head import block_stats_ref
from treespec_kernels.sampling.coupled_choice import RowNoise, gumbel_integers_ref
from treespec_kernels.sampling.row_topk import BLOCK, RowTopk, row_topk_ref, row_topk_triton

TRITON = IMPLEMENTATION == "triton"
pytestmark = pytest.mark.usefixtures("poisoned_allocations")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCABS = [1, 63, 1100]  # a token, a part of a block, and several spans of blocks
KS = [1, 3, 16]


def random_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """In the middle of rows of NaN; about half of them have an equal."""
    generator = torch.Generator().manual_seed(seed)
    return view_amid_nan(((torch.randn(rows, vocab, generator=generator) * 64).round() / 32).to(DEVICE, dtype))


def noise_of(rows: int, seed: int = 0, temperature: float | None = None) -> RowNoise:
    """Of the given temperature, or of several, of which a third is 0."""
    generator = torch.Generator().manual_seed(seed)
    noise = RowNoise(
        torch.tensor([1.0, 0.0, 0.5, 0.8, 0.0, 1.3])[torch.arange(rows) % 6],
        torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
        torch.arange(rows) // 2,
        torch.randint(2**17, (rows,), generator=generator),
    )
    if temperature is not None:
        noise.temperatures.fill_(temperature)
    return RowNoise(*(tensor.to(DEVICE) for tensor in noise))


def topk(logits: torch.Tensor, k: int, **arguments: Any) -> RowTopk:
    top = row_topk_triton(logits, k, **arguments) if TRITON else row_topk_ref(logits, k, **arguments)
    rows = len(logits)
    assert [(tuple(t.shape), t.dtype) for t in top] == [
        ((rows, k), torch.int32),
        ((rows, k), torch.float32),
        ((rows,), torch.float32),
        ((rows,), torch.bool),
    ]
    assert all(tensor.device == logits.device for tensor in top)
    return RowTopk(*(tensor.cpu() for tensor in top))


def equal(some: RowTopk, others: RowTopk) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def best_first(values: np.ndarray, k: int) -> np.ndarray:
    """The model: by falling value, of equals by rising token."""
    return np.argsort(-values, axis=1, kind="stable")[:, :k]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("rows, k", [(1, 16), (7, 2), (3, 1)])
def test_the_best_logits_in_order(rows: int, k: int, vocab: int) -> None:
    k, dtype = min(k, vocab), DTYPES[(rows + k) % 3]
    logits = random_logits(rows, vocab, dtype, seed=rows)
    top, values = topk(logits, k), logits.float().cpu().numpy()
    assert np.array_equal(top.tokens.numpy(), best_first(values, k))
    assert np.array_equal(top.values.numpy(), np.take_along_axis(values, best_first(values, k), axis=1))
    assert top.finite.all()
    torch.testing.assert_close(top.lse.double(), logits.double().cpu().logsumexp(dim=1), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("vocab, k", [(vocab, k) for vocab in VOCABS for k in KS if k <= vocab])
def test_the_best_with_noise(vocab: int, k: int) -> None:
    """Against float64; where two values are that close, logarithms may differ in their last bits."""
    rows = 6
    logits, noise = random_logits(rows, vocab, DTYPES[k % 3], seed=k), noise_of(rows, seed=vocab)
    top = topk(logits, k, noise=noise)
    keys = [key.cpu().numpy() for key in noise[1:]]
    w = np.minimum((gumbel_integers_ref(*keys, vocab) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    values, temperatures = logits.double().cpu().numpy(), noise.temperatures.double().cpu().numpy()
    drawn = temperatures != 0
    values[drawn] = values[drawn] / temperatures[drawn, None] - np.log(-np.log1p(-w[drawn]))
    expected = best_first(values, k)
    sorted_values = np.take_along_axis(values, best_first(values, min(k + 1, vocab)), axis=1)
    decided = ~drawn | (np.abs(np.diff(sorted_values, axis=1)) > 1e-5).all(axis=1)
    assert decided.sum() >= 5
    assert np.array_equal(top.tokens.numpy()[decided], expected[decided])
    np.testing.assert_allclose(top.values.numpy(), sorted_values[:, :k], rtol=1e-6, atol=5e-6)
    largest = values.max(axis=1, keepdims=True)
    lse = np.log(np.exp(values - largest).sum(axis=1)) + largest[:, 0]
    np.testing.assert_allclose(top.lse.numpy(), lse, rtol=2e-6, atol=2e-6)
    assert top.finite.all()


def test_a_token_is_chosen_alike_in_every_batch_and_padding() -> None:
    logits, noise = random_logits(8, 300), noise_of(8)
    tokens = topk(logits, 1, noise=noise).tokens
    for row in range(8):
        alone = RowNoise(*(tensor[row : row + 1] for tensor in noise))
        assert topk(logits[row : row + 1], 1, noise=alone).tokens == tokens[row]
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    permuted = topk(logits[order], 1, noise=RowNoise(*(tensor[order] for tensor in noise)))
    assert torch.equal(permuted.tokens, tokens[order.cpu()])
    for padding in (1, 24, 1100):
        padded = topk(torch.nn.functional.pad(logits, (0, padding), value=-INF), 1, noise=noise)
        assert torch.equal(padded.tokens, tokens) and padded.finite.all()


def test_equal_values_go_by_rising_token() -> None:
    """In one block, over the border of two, and in more blocks than are read; +0 and -0 are equal."""
    vocab = 4 * BLOCK + 20
    logits = torch.full((5, vocab), -3.0, device=DEVICE)
    places = [
        [4, 3, 77],
        [BLOCK, BLOCK - 1, 3 * BLOCK],
        [BLOCK * i + 9 for i in (4, 3, 2, 1)],
        [vocab - 1, vocab - 2, 5],
    ]
    for row, tied in enumerate(places):
        logits[row, tied] = 1.0
    for k in (1, 2, 3):
        expected = [sorted(tied)[:k] for tied in places] + [[0, 1, 2][:k]]
        assert topk(logits, k).tokens.tolist() == expected
    zeros = torch.zeros(1, 3 * BLOCK, device=DEVICE)
    zeros[0, [0, 2, BLOCK]] = -0.0
    assert topk(zeros, 4).tokens.tolist() == [[0, 1, 2, 3]]
    assert topk(zeros, 16).tokens.tolist() == [list(range(16))]
    numbers = torch.tensor([-1e-45, -3e38, -1.0, -0.0, -2.0, 1e-45, -INF, -1e-30], device=DEVICE)
    assert topk(numbers[None], 8).tokens.tolist() == [[5, 3, 0, 7, 2, 4, 1, 6]]


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("temperature", [None, 0.0, 0.9])
def test_masked_tokens_come_last_and_in_order(temperature: float | None, k: int) -> None:
    vocab = 3 * BLOCK + 7
    noise = None if temperature is None else noise_of(4, temperature=temperature)
    logits = torch.full((4, vocab), -INF, device=DEVICE)
    logits[0, [BLOCK + 1, 2 * BLOCK]] = torch.tensor([50.0, 0.0], device=DEVICE)
    logits[1, vocab - 1] = 0.0
    logits[2, 1] = 0.0
    top = topk(logits, k, noise=noise)
    expected = [[BLOCK + 1, 2 * BLOCK, 0], [vocab - 1, 0, 1], [1, 0, 2], [0, 1, 2]]
    assert top.tokens.tolist() == [tokens[:k] for tokens in expected]
    assert top.finite.tolist() == [True, True, True, False]
    assert top.lse[:3].isfinite().all() and top.lse[3] == -INF and (top.values[3] == -INF).all()


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("temperature", [None, 0.0, 0.9])
def test_nan_and_infinity_are_reported(temperature: float | None, k: int) -> None:
    vocab, dtype = BLOCK + 30, torch.float16 if k == 1 else torch.bfloat16
    noise = None if temperature is None else noise_of(6, temperature=temperature)
    logits = random_logits(6, vocab, dtype)
    clean = topk(logits, k, noise=noise)
    logits[0, 3] = NAN
    logits[1, vocab - 1] = NAN
    logits[2, [5, BLOCK + 9]] = torch.tensor([INF, NAN], device=DEVICE, dtype=dtype)
    logits[3, :] = NAN
    logits[4, BLOCK + 1] = INF
    top = topk(logits, k, noise=noise)
    assert top.tokens[:5, 0].tolist() == [3, vocab - 1, 5, 0, BLOCK + 1]
    assert top.finite.tolist() == [False] * 5 + [True]
    assert (top.lse[:5] == INF).all() and (top.values[:5, 0] == INF).all()
    assert equal(RowTopk(*(t[5:] for t in top)), RowTopk(*(t[5:] for t in clean)))
    if temperature is not None:
        noise.temperatures[5] = NAN
        assert not topk(logits, k, noise=noise).finite[5]
    if k > 1:
        assert top.tokens[2, 1] == BLOCK + 9 and top.tokens[3].tolist() == list(range(k))


@pytest.mark.skipif(not TRITON, reason="about the kernels")
@pytest.mark.parametrize("vocab", VOCABS)
def test_a_given_summary_changes_nothing(vocab: int) -> None:
    """Whatever its blocks: the log-sum-exp alone may differ in its last bits."""
    logits = random_logits(3, vocab, torch.float16)
    for k, block in ((1, 1024), (min(vocab, 16), 16)):
        plain, top = topk(logits, k), topk(logits, k, stats=block_stats_ref(logits, block))
        assert equal(top._replace(lse=plain.lse), plain)
        torch.testing.assert_close(top.lse, plain.lse, rtol=2e-6, atol=2e-6)
