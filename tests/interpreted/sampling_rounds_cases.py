"""Sampling parameters inside captured rounds."""

from typing import Any

import pytest

from tests.helpers.models import greedy, make_draft, make_llama, new_folder, open_llm, random_prompts
from tests.interpreted.engines import SMALL, TREES, TRITON, captured_rounds, step_by_step, told
from treespec import LLM, SamplingParams, SpecConfig
from treespec.graphs.verify_stage import MAX_LOGPROBS

PROMPTS = random_prompts([3, 9, 5], vocab=64)  # they outnumber the batch, so that some join and leave
SOME = list(range(0, 64, 3))


@pytest.fixture(scope="module")
def llm() -> LLM:
    root = new_folder("sampling")
    target = make_llama(root / "target", 0, **SMALL)
    draft = make_draft(root / "ssm", target, 1, 0.04)
    spec = SpecConfig(max_depth=2, sources=("ssm", "lookup"))
    return open_llm(target, [draft], spec=spec, max_num_seqs=2, max_model_len=128, **TRITON)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    return [tokens for tokens, _ in told(llm, PROMPTS, greedy(4), "off")]


def sampled(**params: Any) -> SamplingParams:
    return greedy(4, temperature=params.pop("temperature", 0.9), seed=3, **params)


def assert_equal(llm: LLM, params: Any, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    """Captured trees, captured plain decoding and plain decoding step by step agree in every bit."""
    with step_by_step(llm):
        expected = told(llm, prompts, params, "off")
    with captured_rounds():
        for spec in ("off", TREES):
            assert told(llm, prompts, params, spec) == expected
    llm.engine.check_integrity()
    return expected


def test_parameters(llm: LLM, plain: list[list[int]]) -> None:
    params = [
        sampled(top_p=0.7, temperature=1.5, repetition_penalty=1.4, logit_bias={5: 3.0, 9: -100.0}),
        sampled(presence_penalty=0.5, allowed_token_ids=SOME, top_k=20, min_p=0.02, logprobs=MAX_LOGPROBS),
        greedy(4, repetition_penalty=3.0, logit_bias={7: 5.0}, logprobs=2),
    ]
    found = [tokens for tokens, _ in assert_equal(llm, params)]
    assert found != plain and set(found[1]) <= set(SOME)
    first = plain[0][0]  # no end token is chosen before `min_tokens`
    params = [greedy(4, stop_token_ids=[first], min_tokens=3)]
    assert first not in assert_equal(llm, params, PROMPTS[:1])[0][0][:3]


def test_requests_of_every_kind_together(llm: LLM, plain: list[list[int]]) -> None:
    """Penalties count what a request wrote itself, in a slot that another one may have had before it."""
    one = sampled(frequency_penalty=2.0, logprobs=1)
    found = assert_equal(llm, [greedy(2, repetition_penalty=3.0), greedy(3, logprobs=3), one])
    assert found[1][0] == plain[1][:3] and told(llm, PROMPTS[2:], one, TREES) == found[2:]


def test_penalties_count_the_path_above_a_node(llm: LLM) -> None:
    """Two tokens take turns, as each makes itself less likely; an accepted path changes the choices after it."""
    params = greedy(8, logit_bias={7: 90.0, 9: 89.0}, frequency_penalty=2.0)
    accepted = sum(llm.engine.stats.accepted_by_source.values())
    [(found, _)] = assert_equal(llm, params, PROMPTS[:1])
    assert set(found) == {7, 9} and found.count(7) == pytest.approx(4, abs=1)
    assert sum(llm.engine.stats.accepted_by_source.values()) - accepted > 1


def test_more_logprobs_than_rounds_compute(llm: LLM, plain: list[list[int]]) -> None:
    """They go step by step, beside a request that does not."""
    params = [greedy(4, logprobs=MAX_LOGPROBS + 1), greedy(4, logprobs=2), greedy(4, logprobs=-1)]
    many, _, few = told(llm, PROMPTS, params, TREES)
    for (tokens, found), count in ((many, MAX_LOGPROBS + 1), (few, 64)):
        assert all(len(each) in (count, count + 1) and token in each for token, each in zip(tokens, found, strict=True))
    assert many[0] == plain[0]


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_no_token_is_left(llm: LLM) -> None:
    stuck = SamplingParams(max_tokens=4, allowed_token_ids=[3], stop_token_ids=[3], min_tokens=2)
    outputs = llm.generate(PROMPTS, [greedy(4), stuck, greedy(4)], spec=TREES)
    assert "no token is left" in str(outputs[1].error)
    assert [len(outputs[i].outputs[0].token_ids) for i in (0, 2)] == [4, 4]
