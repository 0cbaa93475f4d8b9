"""Sampling parameters inside captured rounds."""

from typing import Any
from unittest import mock

import pytest
import torch

from tests.models import greedy, make_draft, make_llama, new_folder, open_llm, random_prompts
from treespec import LLM, SamplingParams, SpecConfig
from treespec.engine.host_executor import HostExecutor
from treespec.graphs.graph_executor import GraphExecutor
from treespec.graphs.verify_stage import MAX_LOGPROBS

torch.set_num_threads(1)
PROMPTS = random_prompts([3, 20, 9], vocab=64)
SMALL = {"num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}
TREES = SpecConfig(nodes=8, max_depth=2)
SOME = list(range(0, 64, 3))


@pytest.fixture(scope="module")
def llm() -> LLM:
    root = new_folder("sampling")
    target = make_llama(root / "target", 0, **SMALL)
    draft = make_draft(root / "ssm", target, 1, 0.04)
    spec = SpecConfig(max_depth=2, sources=("ssm", "lookup"))
    return open_llm(target, [draft], spec=spec, attention="triton", linear="triton", max_num_seqs=2, prove=None)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    return [tokens for tokens, _ in told(llm, greedy(4), "off")]


def sampled(**params: Any) -> SamplingParams:
    return greedy(4, temperature=params.pop("temperature", 0.9), seed=3, **params)


def told(llm: LLM, params: Any, spec: Any) -> list[Any]:
    """Tokens and log-probabilities; the requests outnumber the batch, so that some join and leave."""
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(PROMPTS, params, spec=spec)]


def assert_equal(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    """Captured trees, captured plain decoding and plain decoding step by step agree in every bit."""
    with mock.patch.object(GraphExecutor, "serves", lambda executor, request: False):
        expected = told(llm, params, "off")
    with mock.patch.object(HostExecutor, "propose", side_effect=AssertionError("step by step")):
        for spec in ("off", TREES):
            assert told(llm, params, spec) == expected
    llm.engine.check_integrity()
    return [tokens for tokens, _ in expected]


@pytest.mark.parametrize(
    "params",
    [
        [
            sampled(top_k=4),
            sampled(top_p=0.7, temperature=1.5),
            sampled(repetition_penalty=1.4, logit_bias={5: 3.0, 9: -100.0}),
        ],
        [
            sampled(frequency_penalty=1.5, presence_penalty=0.5, top_k=20, top_p=0.9, min_p=0.02),
            greedy(4, repetition_penalty=3.0),
            greedy(4, logit_bias={7: 50.0}, logprobs=2),
        ],
        [
            sampled(allowed_token_ids=SOME, top_p=0.8, logprobs=1),
            greedy(4, logprobs=3),
            sampled(logprobs=MAX_LOGPROBS, top_k=30),
        ],
    ],
    ids=["truncated", "penalised", "restricted"],
)
def test_parameters(llm: LLM, plain: list[list[int]], params: list[SamplingParams]) -> None:
    found = assert_equal(llm, params)
    assert found != plain
    for tokens, unmodified, own in zip(found, plain, params, strict=True):
        assert own.allowed_token_ids is None or set(tokens) <= set(SOME)
        assert own != greedy(4, logprobs=3) or tokens == unmodified


def test_requests_of_every_kind_together(llm: LLM) -> None:
    """Penalties count what a request wrote itself, in a slot that another one may have had before it."""
    one = sampled(frequency_penalty=2.0, logprobs=1)
    assert_equal(llm, [one, greedy(3), greedy(4, presence_penalty=2.0)])
    assert_equal(llm, [greedy(2, repetition_penalty=3.0), sampled(top_k=3), one])
    alone = [told_alone(llm, prompt, one) for prompt in PROMPTS]
    assert told(llm, [one, sampled(), one], TREES)[::2] == alone[::2]


def test_penalties_count_the_path_above_a_node(llm: LLM) -> None:
    """Two tokens take turns, because each makes itself less likely. Lookup proposes what repeats, and the tokens of an
    accepted path change the choices after them."""
    params = greedy(10, logit_bias={7: 90.0, 9: 89.0}, frequency_penalty=2.0)
    tokens = assert_equal(llm, params)
    assert all(set(own) == {7, 9} and own.count(7) == pytest.approx(5, abs=1) for own in tokens)
    outputs = llm.generate(PROMPTS, params, spec=TREES)
    assert all(output.metrics.acceptance_length > 1.3 for output in outputs)


def told_alone(llm: LLM, prompt: list[int], params: SamplingParams) -> Any:
    [output] = llm.generate([prompt], params, spec=TREES)
    return output.outputs[0].token_ids, output.outputs[0].logprobs


def test_more_logprobs_than_rounds_compute(llm: LLM) -> None:
    """They go step by step, beside a request that does not."""
    many, few = told(llm, [greedy(4, logprobs=MAX_LOGPROBS + 1), greedy(4, logprobs=2), greedy(4, logprobs=-1)], TREES)[
        ::2
    ]
    for (tokens, found), count in ((many, MAX_LOGPROBS + 1), (few, 64)):
        assert all(len(each) in (count, count + 1) and token in each for token, each in zip(tokens, found, strict=True))
    assert many[0] == told(llm, greedy(4), "off")[0][0]


def test_the_least_length(llm: LLM) -> None:
    """An end token is not chosen before `min_tokens`, in trees either."""
    first = told(llm, greedy(1), "off")[0][0][0]
    params = SamplingParams(max_tokens=4, stop_token_ids=[first], min_tokens=3, ignore_eos=True)
    tokens = assert_equal(llm, params)
    assert first not in tokens[0][:3]


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_no_token_is_left(llm: LLM) -> None:
    stuck = SamplingParams(max_tokens=4, allowed_token_ids=[3], stop_token_ids=[3], min_tokens=2)
    params = [greedy(4), stuck, greedy(4)]
    outputs = llm.generate(PROMPTS, params, spec=TREES)
    assert "no token is left" in str(outputs[1].error)
    assert [len(outputs[i].outputs[0].token_ids) for i in (0, 2)] == [4, 4]
