"""Sampled requests that cannot be served, or fail on the way: alone, and the others finish."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.exactness import altered_logits
from tests.helpers.models import VOCAB
from tests.helpers.sampled import (
    COMPANY,
    PROMPTS,
    REJECTION,
    SAME,
    TRAVERSAL,
    TREE,
    company_alone,
    sampled,
    tokens_of,
    two_ssms,
)
from tests.helpers.sharing import assert_clean
from tests.helpers.speech import checked, speaking_llm
from treespec import SpecConfig
from treespec.errors import RequestError
from treespec.request import Request
from treespec.tree import TokenTree

pytestmark = pytest.mark.slow


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "only an end": ({"min_tokens": 3, "stop_token_ids": [*range(VOCAB)]}, "no token is left at position 9"),
    "bias out of range": ({"logit_bias": {512: 1.0}}, "logit_bias: token 512; valid: 0 to 511"),
    "allowed out of range": ({"allowed_token_ids": [3, 512]}, "allowed_token_ids: token 512; valid: 0 to 511"),
    "logprobs": ({"logprobs": 513}, "logprobs=513; the vocabulary has 512 tokens"),
    "bad words": ({"bad_words": ["x"]}, "bad_words=('x',) needs a tokenizer; use logit_bias"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_ends_alone(name: str) -> None:
    llm = two_ssms()
    options, message = BAD[name]
    bad, mates = sampled(**options), COMPANY[:3]
    alone = [company_alone()[i] for i in range(3)]
    for spec in ("off", TREE, REJECTION):
        if spec is not REJECTION:
            with checked(llm):
                outputs = llm.generate([PROMPTS[0], PROMPTS[0], *PROMPTS[1:3]], [mates[0], bad, *mates[1:]], spec)
            assert tokens_of([outputs[0], *outputs[2:]]) == alone
            failed = outputs[1]
            assert failed.outputs[0].finish_reason == "error" and message in str(failed.error)
            assert failed.outputs[0].token_ids == [] and failed.finished
            assert [output.error for output in outputs if output is not failed] == [None] * 3
        with pytest.raises(RequestError, match=re.escape(message)):
            llm.generate(PROMPTS[0], bad, spec)
        with pytest.raises(RequestError, match=re.escape(message)):
            list(llm.stream(PROMPTS[0], bad, spec))
        assert_clean(llm)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("spec", SAME.values(), ids=SAME)
def test_a_processor_that_fails_midway(spec: SpecConfig, temperature: float) -> None:
    """The tokens before are those of plain decoding, wherever in an accepted path it fails."""
    llm = two_ssms()
    (whole,) = llm.generate(PROMPTS[0], sampled(temperature=temperature), "off")
    for count in (0, 2, 5):

        def late(ids: Tensor, scores: Tensor, count: int = count) -> Tensor:
            if ids.shape[1] >= 9 + count:
                raise RuntimeError("late")
            return scores

        bad = sampled(temperature=temperature, logits_processors=[late], logprobs=0)
        failed, other = llm.generate([PROMPTS[0], PROMPTS[0]], [bad, COMPANY[0]], spec)
        assert failed.outputs[0].token_ids == whole.outputs[0].token_ids[:count]
        assert len(failed.outputs[0].logprobs or []) == count
        assert "logits processor late failed: RuntimeError: late" in str(failed.error)
        assert other.outputs[0].token_ids == company_alone()[0]
    assert_clean(llm)


def test_a_processor_that_would_fail_past_a_stop_string() -> None:
    """Beyond the end nothing is asked of it that counts."""
    llm = speaking_llm()
    (whole,) = llm.generate("def f(x):", sampled(30), "off")
    prompt_tokens = len(whole.prompt_token_ids)
    (stopped,) = llm.generate("def f(x):", sampled(30, stop="e"), "off")
    most = prompt_tokens + len(stopped.outputs[0].token_ids)

    def late(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] >= most:
            raise RuntimeError("late")
        return scores

    for spec in ("off", *SAME.values()):
        (output,) = llm.generate("def f(x):", sampled(30, stop="e", logits_processors=[late]), spec)
        assert output.error is None and output.outputs == stopped.outputs


def test_one_of_several_outputs_fails() -> None:
    """The others are as without it."""
    llm = two_ssms()
    (whole,) = llm.generate(PROMPTS[0], sampled(n=4), "off")
    unlucky = whole.outputs[2].token_ids[:5]
    assert not any(c.token_ids[:5] == unlucky for c in whole.outputs if c.index != 2)

    def picky(ids: Tensor, scores: Tensor) -> Tensor:
        if ids[0, 9:14].tolist() == unlucky:
            raise ValueError("not this one")
        return scores

    for spec in ("off", TREE):
        (output,) = llm.generate(PROMPTS[0], sampled(n=4, logits_processors=[picky]), spec)
        assert [c.finish_reason for c in output.outputs] == ["length", "length", "error", "length"]
        assert [c.token_ids for c in output.outputs if c.index != 2] == [
            c.token_ids for c in whole.outputs if c.index != 2
        ]
        assert output.outputs[2].token_ids == unlucky and "not this one" in str(output.error)
        with pytest.raises(RequestError, match="not this one"):
            list(llm.stream(PROMPTS[0], sampled(n=4, logits_processors=[picky]), spec))
        assert_clean(llm)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 1.1}, {}, {"top_k": 3, "top_p": 0.5}],
    ids=str,
)
def test_one_logit_that_is_not_finite(options: dict[str, Any]) -> None:
    """A row of the head: no hidden state is touched, and no truncation may drop it silently."""
    llm, prompts = two_ssms(), PROMPTS[:3]
    params = sampled(**options)
    alone = tokens_of(llm.generate(prompts, params, "off"))

    def change(request: Request, tree: TokenTree, logits: Tensor) -> None:
        if request.prompt_token_ids == prompts[1]:
            late = torch.from_numpy(request.num_generated + tree.depths >= 6)
            logits[late, 300] = math.nan

    rules = ["off", *SAME.values()] + ([REJECTION, TRAVERSAL] if params.temperature else [])
    for spec in rules:
        with altered_logits(llm, change), checked(llm):
            outputs = llm.generate(prompts, params, spec)
        assert f"the target computed NaN or infinity at position {len(prompts[1]) + 5}" in str(outputs[1].error)
        assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
        if spec not in (REJECTION, TRAVERSAL):
            assert tokens_of(outputs) == [alone[0], alone[1][:6], alone[2]]
        assert_clean(llm)
