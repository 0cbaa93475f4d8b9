"""Choices and log-probabilities in C++ against their references, with every instruction set that the machine has."""

import ctypes
import math
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.libraries import LIBRARIES, compiler_of, instruction_sets
from tests.helpers.quantized_checkpoints import needs_compiler
from tests.sampling.test_noise import KEYS
from treespec import SamplingParams
from treespec.sampling.logprobs import LogprobRows, packed_logprobs
from treespec.sampling.noise import Noise
from treespec.sampling.sampler import Sampler
from treespec.sampling.transforms import Transforms
from treespec_kernels.cpu.choice_cpu import RowChoice
from treespec_kernels.cpu.cpu_library import find_compiler
from treespec_kernels.cpu.growth_cpu import growth_library
from treespec_kernels.sampling.logit_transforms import truncated_row

pytestmark = needs_compiler
NATIVE = "native"
sets = pytest.mark.parametrize(
    "names",
    [pytest.param([NATIVE], id=NATIVE), pytest.param([*instruction_sets()], id="all", marks=pytest.mark.slow)],
)

# temperature, top_k, top_p, log_min_p
TRUNCATIONS = [
    (0.7, 0, 1.0, -math.inf),
    (1.0, 50, 0.95, -math.inf),
    (0.6, 0, 0.9, -math.inf),
    (1.3, 3, 1.0, -math.inf),
    (0.5, 0, 0.3, math.log(0.05)),
    (2.0, 20, 0.5, math.log(0.1)),
    (1e-3, 10**6, 0.999, -math.inf),
]
ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: 3 * x,
    "peaked": lambda x: 30 * x,
    "flat": lambda x: 0.01 * x,
    "tied": lambda x: (2 * x).round() / 2,
    "masked": lambda x: (3 * x).masked_fill(x < min(1.0, float(x.max())), -math.inf),
    "one left": lambda x: torch.full_like(x, -math.inf).index_fill(0, x.argmax(), -7.0),
    "rounded": lambda x: 3 * x + 1e6,
    "equal": lambda x: torch.full_like(x, -3.25),
    "large and equal": lambda x: torch.full_like(x, 1e30),
    "nothing left": lambda x: torch.full_like(x, -math.inf),
    "infinite": lambda x: (3 * x).index_fill(0, x.argmin(), math.inf),
    "broken": lambda x: (3 * x).index_fill(0, x.argmin(), math.nan),
}


def library(instructions: str) -> ctypes.CDLL:
    return growth_library(find_compiler() if instructions == NATIVE else compiler_of(instructions), LIBRARIES)


@pytest.mark.parametrize("kind", ROWS)
@sets
def test_choices_are_those_of_the_reference(names: Sequence[str], kind: str) -> None:
    """Or they are left to it."""
    generator, decided = torch.Generator().manual_seed(len(kind)), []
    for (seed, sample, position), vocab in product(KEYS[::2], (1, 5, 63, 100, 4099, 49152)):
        dtype = torch.bfloat16 if position else torch.float32
        logits = ROWS[kind](torch.randn(vocab, generator=generator)).to(dtype)
        for truncation in TRUNCATIONS if vocab < 5000 else TRUNCATIONS[:2]:
            scores = truncated_row(logits.float(), *truncation).numpy()
            expected, _ = Noise(seed, sample, vocab).choose(scores, position)
            for name in names:
                found = RowChoice(library(name), (seed, sample), *truncation).choose(logits, position)
                assert found in (expected, None), (name, vocab, truncation)
                decided.append(found is not None)
    if kind in ("nothing left", "infinite", "broken"):
        assert not any(decided)
    elif kind not in ("rounded", "equal", "large and equal"):  # with few different scores, the nucleus is undecided
        assert np.mean(decided) > 0.99


@sets
def test_logprobs_are_those_of_torch(names: Sequence[str]) -> None:
    """But for rounding; with one result for all instruction sets, and for a row alone and among others."""
    generator = torch.Generator().manual_seed(0)
    for kind, vocab, dtype in product(list(ROWS)[:5], (1, 63, 100, 4099), (torch.float32, torch.bfloat16)):
        logits = torch.stack([ROWS[kind](torch.randn(vocab, generator=generator)) for _ in range(3)]).to(dtype)
        chosen = torch.randint(vocab, (3,), generator=generator).tolist()
        for count in {0, min(16, vocab), min(vocab, 100)}:
            expected = LogprobRows.of(logits, torch.tensor(chosen), count)
            whole = packed_logprobs([logits[:1], logits[1:]], chosen, count, library(names[0]))
            found = LogprobRows.unpacked(whole)
            assert torch.equal(found.ranks, expected.ranks) and torch.equal(found.tokens, expected.tokens)
            assert torch.allclose(found.values, expected.values, rtol=1e-6, atol=4e-6)
            assert torch.allclose(found.token_logprobs, expected.token_logprobs, rtol=1e-6, atol=4e-6)
            for name, row in product(names, range(3)):
                alone = packed_logprobs([logits[row : row + 1]], chosen[row : row + 1], count, library(name))
                assert np.array_equal(alone[0], whole[row])


def test_logits_processors_are_called_once_if_the_reference_decides() -> None:
    calls = []

    def level(ids: Tensor, scores: Tensor) -> Tensor:
        calls.append(ids.tolist())
        return torch.full_like(scores, 1e30)

    params = SamplingParams(temperature=1.0, logits_processors=[level])
    transforms = Transforms(params, 1, (), (), 1000, torch.device("cpu"))
    plain, compiled = (
        Sampler(params, transforms, (), 1000, torch.device("cpu"), 5, library=made) for made in (None, library(NATIVE))
    )
    logits = torch.zeros(1000)
    assert compiled.choose(logits, [1, 2]) == plain.choose(logits, [1, 2])
    assert calls == [[[1, 2]]] * 2
