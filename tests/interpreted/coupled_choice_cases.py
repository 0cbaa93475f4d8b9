"""Cases of coupled_choice."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.interpreted.common import DEVICE, IMPLEMENTATION
from treespec_kernels.sampling.coupled_choice import (
    BLOCK_V,
    CoupledChoice,
    coupled_choice_ref,
    coupled_choice_triton,
    gumbel_integers_ref,
)

pytestmark = pytest.mark.usefixtures("poisoned_allocations")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCABS = [1, 5, 63, 64, 1000, 4096, 4099]
INF, NAN = float("inf"), float("nan")


class Inputs(NamedTuple):
    scores: torch.Tensor
    temperatures: torch.Tensor
    seeds: torch.Tensor
    samples: torch.Tensor
    positions: torch.Tensor

    def row(self, row: int) -> "Inputs":
        return Inputs(*(tensor[row : row + 1] for tensor in self))


def random_inputs(rows: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Scores lie in the middle of rows of NaN; a third of the temperatures is 0."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.full((rows, vocab + 24), NAN)
    scores[:, 16 : 16 + vocab] = torch.randn(rows, vocab, generator=generator) * 2
    temperatures = torch.tensor([1.0, 0.0, 0.5, 0.8, 0.0, 1.3])[torch.arange(rows) % 6]
    keys = [torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator), torch.arange(rows) // 2]
    keys.append(torch.randint(2**17, (rows,), generator=generator))
    scores = scores.to(DEVICE, dtype)[:, 16 : 16 + vocab]
    return Inputs(scores, temperatures.to(DEVICE), *(key.to(DEVICE) for key in keys))


def choose(inputs: Inputs) -> CoupledChoice:
    chosen = {"ref": coupled_choice_ref, "triton": coupled_choice_triton}[IMPLEMENTATION](*inputs)
    rows = len(inputs.scores)
    assert (chosen.tokens.shape, chosen.tokens.dtype) == ((rows,), torch.int64)
    assert (chosen.finite.shape, chosen.finite.dtype) == ((rows,), torch.bool)
    assert chosen.tokens.device == chosen.finite.device == inputs.scores.device
    return CoupledChoice(chosen.tokens.cpu(), chosen.finite.cpu())


def values_of(inputs: Inputs) -> np.ndarray:
    """The model: [rows, vocab] values in float64."""
    x = gumbel_integers_ref(*(key.cpu().numpy() for key in inputs[2:]), inputs.scores.shape[1])
    w = np.minimum((x + 0.5) * 2.0**-32, 1 - 2.0**-24)
    scores, temperatures = inputs.scores.double().cpu().numpy(), inputs.temperatures.double().cpu().numpy()
    values = scores.copy()
    drawn = temperatures != 0
    values[drawn] = scores[drawn] / temperatures[drawn, None] - np.log(-np.log1p(-w[drawn]))
    return values


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("vocab", VOCABS)
def test_the_largest_value_wins(vocab: int, dtype: torch.dtype) -> None:
    decided = 0
    for rows in (1, 3, 8):
        inputs = random_inputs(rows, vocab, dtype, seed=rows)
        chosen, values = choose(inputs), values_of(inputs)
        assert chosen.finite.all()
        for row, token in enumerate(chosen.tokens.tolist()):
            two = np.sort(values[row])[-2:]
            if inputs.temperatures[row] == 0 or len(two) < 2 or two[1] - two[0] > 1e-5:
                assert token == values[row].argmax(), (rows, row)
                decided += 1
    assert decided >= 11  # of 12


def test_a_token_is_chosen_alike_in_every_batch_and_padding() -> None:
    inputs = random_inputs(8, 1000)
    tokens, _ = choose(inputs)
    for row in range(8):
        assert choose(inputs.row(row)).tokens == tokens[row]
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert torch.equal(choose(Inputs(*(tensor[order] for tensor in inputs))).tokens, tokens[order.cpu()])
    for padding in (1, 24, 1100):
        padded = torch.nn.functional.pad(inputs.scores, (0, padding), value=-INF)
        chosen = choose(inputs._replace(scores=padded))
        assert torch.equal(chosen.tokens, tokens) and chosen.finite.all()


def test_every_number_of_the_key_matters() -> None:
    """With equal scores the choice is the noise's alone: it changes with each number, and with nothing else."""
    rows = 6
    zeros, names = torch.zeros(rows, dtype=torch.int64, device=DEVICE), ("seeds", "samples", "positions")
    flat = Inputs(torch.zeros(rows, 4099, device=DEVICE), torch.ones(rows, device=DEVICE), zeros, zeros, zeros)
    assert len(set(choose(flat).tokens.tolist())) == 1
    large = torch.tensor([0, 1, 2**32, 2**32 + 1, 2**62, -1], device=DEVICE)
    for name in names:
        assert len(set(choose(flat._replace(**{name: large})).tokens.tolist())) == rows


def test_the_first_of_equals_wins() -> None:
    inputs = random_inputs(4, BLOCK_V * 2 + 100)._replace(temperatures=torch.zeros(4, device=DEVICE))
    places = [[3, 4], [5, BLOCK_V + 5], [BLOCK_V - 1, BLOCK_V], [BLOCK_V * 2 + 99, BLOCK_V * 2 + 98]]
    for row, tied in enumerate(places):
        inputs.scores[row, tied] = 100.0
    assert choose(inputs).tokens.tolist() == [min(tied) for tied in places]
    assert choose(inputs._replace(scores=torch.zeros_like(inputs.scores))).tokens.tolist() == [0] * 4


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_masked_token_never_wins(temperature: float) -> None:
    vocab = BLOCK_V + 300
    inputs = random_inputs(4, vocab)._replace(temperatures=torch.full((4,), temperature, device=DEVICE))
    allowed = [[7], [BLOCK_V + 299], [BLOCK_V - 1, BLOCK_V], list(range(0, vocab, 2))]
    masked = torch.full_like(inputs.scores, -INF)
    for row, tokens in enumerate(allowed):
        masked[row, tokens] = inputs.scores[row, tokens]
    chosen = choose(inputs._replace(scores=masked))
    assert all(token in tokens for token, tokens in zip(chosen.tokens.tolist(), allowed, strict=True))
    assert chosen.finite.all()
    chosen = choose(inputs._replace(scores=torch.full_like(masked, -INF)))
    assert chosen.tokens.tolist() == [0] * 4 and not chosen.finite.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_nan_and_infinity_are_reported(temperature: float, dtype: torch.dtype) -> None:
    vocab = BLOCK_V + 300
    inputs = random_inputs(6, vocab, dtype)._replace(temperatures=torch.full((6,), temperature, device=DEVICE))
    clean = choose(inputs)
    inputs.scores[0, 3] = NAN
    inputs.scores[1, vocab - 1] = NAN
    inputs.scores[2, [5, BLOCK_V + 9]] = torch.tensor([INF, NAN], device=DEVICE, dtype=dtype)
    inputs.scores[3, :] = NAN
    inputs.scores[4, BLOCK_V + 1] = INF
    chosen = choose(inputs)
    assert chosen.tokens[:5].tolist() == [3, vocab - 1, 5, 0, BLOCK_V + 1]
    assert chosen.tokens[5] == clean.tokens[5]
    assert chosen.finite.tolist() == [False] * 5 + [True]


def test_a_temperature_that_is_no_number_is_reported() -> None:
    chosen = choose(random_inputs(2, 100)._replace(temperatures=torch.tensor([NAN, 1.0], device=DEVICE)))
    assert chosen.finite.tolist() == [False, True] and chosen.tokens[0] == 0
