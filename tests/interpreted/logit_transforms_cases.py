"""Cases of logit_transforms."""

import math
from functools import partial
from typing import Any

import pytest
import torch

from tests.interpreted.common import DEVICE, IMPLEMENTATION, INF, NAN, normal, view_amid_nan
from treespec_kernels.sampling.logit_transforms import (
    IN_PROMPT,
    TransformInputs,
    logit_transforms_ref,
    logit_transforms_triton,
)

pytestmark = pytest.mark.usefixtures("poisoned_allocations")
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "slot": -1, "top_k": 0, "least": 0}
DEFAULTS |= {"repetition": 1.0, "frequency": 0.0, "presence": 0.0}
PENALTIES = {"slot": 0, "repetition": 1.3, "frequency": 0.4, "presence": -0.2}
REQUESTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 5, "temperature": 0.3},
    {"top_k": 10_000},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"top_p": 0.6, "temperature": 1.7},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 7, "top_p": 0.8, "min_p": 0.05, "temperature": 0.8},
    {"slot": 1},
    {"slot": 1, "top_p": 0.7, "top_k": 4},
    PENALTIES,
    PENALTIES | {"temperature": 0.0},
    PENALTIES | {"top_k": 3},
    {"slot": 2, "frequency": 2.0, "least": 20},
    {"least": 20, "top_p": 0.5},
    {"temperature": 0.0, "top_k": 2, "top_p": 0.1},
]

# One block of tokens with a part of one, and several.
TABLE = [(5, 3, torch.float32), (4099, 1, torch.float32), (100, 1, torch.float16), (100, 1, torch.bfloat16)]


def inputs_of(requests: list[dict[str, Any]], rows: int, vocab: int) -> TransformInputs:
    generator = torch.Generator().manual_seed(0)
    given = [DEFAULTS | request for request in requests]
    names = ("temperature", "top_p", "least_log", "repetition", "frequency", "presence")
    given = [r | {"least_log": math.log(r["min_p"]) if r["min_p"] else -INF} for r in given]
    ends = torch.randint(vocab, (len(given), 3), generator=generator, dtype=torch.int32)
    ends[:, 2] = -1
    paths = torch.randint(-1, vocab, (rows, 3), generator=generator, dtype=torch.int32)
    biases = torch.randn(3, vocab, generator=generator)
    biases[1][torch.rand(vocab, generator=generator) < 0.5] = -INF
    biases[1, 0], biases[2] = 0.0, 0.0
    counts = torch.randint(3, (3, vocab), generator=generator, dtype=torch.int32)
    counts += IN_PROMPT * torch.randint(2, (3, vocab), generator=generator, dtype=torch.int32)
    inputs = TransformInputs(
        torch.tensor([[r[name] for name in names] for r in given], dtype=torch.float32),
        torch.tensor([[r["slot"], r["top_k"], r["least"]] for r in given], dtype=torch.int32),
        ends,
        torch.randint(40, (rows,), generator=generator),
        paths,
        biases,
        counts,
    )
    return TransformInputs(*(tensor.to(DEVICE) for tensor in inputs))


def scores_of(logits: torch.Tensor, inputs: TransformInputs) -> torch.Tensor:
    found = {"ref": logit_transforms_ref, "triton": logit_transforms_triton}[IMPLEMENTATION](logits, inputs)
    assert found.shape == logits.shape and found.dtype == torch.float32 and found.device == logits.device
    return found.cpu()


def random_logits(rows: int, vocab: int) -> torch.Tensor:
    return view_amid_nan(3 * normal(1)(rows, vocab))


@pytest.mark.parametrize("vocab, nodes, dtype", TABLE)
def test_scores_are_those_of_the_reference(vocab: int, nodes: int, dtype: torch.dtype) -> None:
    """Rounded logits of 16 bits tie."""
    logits = random_logits(nodes * len(REQUESTS), vocab)
    logits = logits if dtype == torch.float32 else logits.round().to(dtype)
    inputs = inputs_of(REQUESTS, len(logits), vocab)
    assert_equal(scores_of(logits, inputs), logit_transforms_ref(logits, inputs).cpu())


def test_the_first_of_equal_tokens_are_kept() -> None:
    flat = torch.zeros(2, 72, device=DEVICE)
    found = scores_of(flat, inputs_of([{"top_k": 3}, {"top_p": 0.1}], 2, 72))
    assert [torch.nonzero(row > -INF)[:, 0].tolist() for row in found] == [[0, 1, 2], list(range(8))]


@pytest.mark.parametrize("special", [NAN, INF])
def test_what_is_not_finite_stays(special: float) -> None:
    logits = random_logits(len(REQUESTS), 100)
    logits[:, 37] = special
    inputs = inputs_of([request | {"slot": 0} for request in REQUESTS], len(logits), 100)
    found = scores_of(logits, inputs)
    assert bool((torch.where(found.isnan(), INF, found).amax(1) == INF).all())


def test_all_tokens_but_one_are_excluded() -> None:
    logits = random_logits(4, 64)
    inputs = inputs_of([{"slot": 0} | request for request in ({}, {"top_k": 5}, {"top_p": 0.2}, {"min_p": 0.9})], 4, 64)
    inputs.biases[0] = -INF
    inputs.biases[0, 41] = 0.5
    found = scores_of(logits, inputs)
    assert torch.nonzero(found > -INF).tolist() == [[row, 41] for row in range(4)]
    inputs.biases[0] = -INF
    assert bool((scores_of(logits, inputs) == -INF).all())
