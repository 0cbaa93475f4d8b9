"""Logits processors of the user's: what they are given; tests/frontend/test_hostile_code.py has those that fail."""

import pytest
import torch
from torch import Tensor

from tests.helpers.exactness import threads
from tests.sampling.test_sampling import CPU, OUTPUT, PROMPT, random_logits, transform
from treespec import SamplingParams
from treespec.sampling.sampler import Sampler
from treespec.sampling.transforms import Transforms


def test_processors_get_each_nodes_own_past() -> None:
    calls: list[tuple[Tensor, Tensor]] = []

    def spy(ids: Tensor, scores: Tensor) -> Tensor:
        calls.append((ids.clone(), scores.clone()))
        ids.fill_(0)
        return scores.add_(1)  # their own copy to spoil

    params = SamplingParams(logits_processors=[spy, spy], temperature=0.5, logit_bias={3: 1.0})
    transforms = Transforms(params, len(PROMPT), (0,), (), 20, CPU)
    for path in ([], [4], [4, 2], [9]):
        logits = random_logits(20, len(path), torch.bfloat16)
        tokens = [*PROMPT, *OUTPUT]
        scores = transforms.scores(logits, tokens, path)
        assert tokens == [*PROMPT, *OUTPUT]
        biased = logits.float() + torch.eye(20)[3]
        assert torch.equal(scores, (biased + 2) / 0.5)
        for i, (ids, seen) in enumerate(calls):
            assert ids.dtype == torch.int64 and (i or ids.tolist() == [[*tokens, *path]])
            assert seen.dtype == torch.float32 and seen.shape == (1, 20)
            assert torch.equal(seen[0], biased + i)
        calls.clear()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_processors_may_return_another_floating_type(dtype: torch.dtype) -> None:
    logits = random_logits(20)
    scores = transform(logits, logits_processors=[lambda ids, scores: scores.to(dtype)])
    assert scores.dtype == torch.float32 and torch.equal(scores, logits.to(dtype).float())


def test_processors_run_on_the_callers_threads() -> None:
    """Rows are sampled on one."""
    seen: list[int] = []

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return scores

    params = SamplingParams(logits_processors=[processor], temperature=0.5)
    sampler = Sampler(params, Transforms(params, len(PROMPT), (0,), (), 20, CPU), (0,), 20, CPU, seed=1)
    with threads(2):
        sampler.choose(random_logits(20, 1, torch.bfloat16), PROMPT)
        assert seen == [2] and torch.get_num_threads() == 2
