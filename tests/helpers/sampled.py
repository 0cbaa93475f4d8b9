"""What the tests of sampled requests share: rules, parameters, company."""

import functools
from typing import Any

import pytest
from torch import Tensor

from tests.helpers.models import VOCAB, random_prompts, tiny_llm, tokens_of
from treespec import LLM, SamplingParams, SpecConfig

TREE = SpecConfig(nodes=16, max_depth=5)
NAIVE = SpecConfig(nodes=16, max_depth=5, verification="naive")
STATIC = SpecConfig(branching=(3, 2, 1))
REJECTION = SpecConfig(branching=(2, 2, 1), verification="rejection")
TRAVERSAL = SpecConfig(branching=(2, 2, 1), verification="traversal")
SAME = {"tree": TREE, "naive": NAIVE}  # the tokens of plain decoding
DRAWN = {"rejection": REJECTION, "traversal": TRAVERSAL}
quick_rule = pytest.mark.parametrize("spec", [TREE, pytest.param(NAIVE, marks=pytest.mark.slow)], ids=SAME.keys())
every_rule = pytest.mark.parametrize(
    "spec", [TREE, pytest.param(REJECTION, marks=pytest.mark.slow), TRAVERSAL], ids=["tree", *DRAWN]
)
PROMPTS = random_prompts((9, 40, 1, 63))


LENGTH = 10


def two_ssms() -> LLM:
    return tiny_llm(ssms=(0, 1))


def sampled(max_tokens: int = LENGTH, **options: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.8, "seed": 7} | options))


def say_hush(ids: Tensor, scores: Tensor) -> Tensor:
    """A processor that depends on the past."""
    scores[:, (ids[0, -1] * 7 + ids.shape[1]) % VOCAB] += 4
    return scores


COMPANY = [
    sampled(),
    sampled(temperature=0.0),
    sampled(temperature=1.3, top_k=20, seed=2),
    sampled(seed=3, top_p=0.8),
    sampled(seed=7, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2),
    sampled(seed=5, min_p=0.1),
    sampled(temperature=0.0, repetition_penalty=1.5),
    sampled(logits_processors=[say_hush]),
    sampled(logit_bias={3: 4.0, 9: -50.0}),
    sampled(min_tokens=5, ignore_eos=False, temperature=2.0),
    sampled(n=3),
    sampled(seed=7, max_tokens=5, logprobs=2),
]
"""What a request may stand beside."""


@functools.cache
def company_alone() -> list[list[int]]:
    return tokens_of([two_ssms().generate(PROMPTS[i % 4], params, "off")[0] for i, params in enumerate(COMPANY)])
