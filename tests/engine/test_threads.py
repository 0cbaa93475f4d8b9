"""Several threads on one engine: rounds take turns, tokens are plain decoding's, and nothing stays behind."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest

from tests.helpers.exactness import altered_logits
from tests.helpers.models import greedy, open_llm, random_prompts, tiny, tiny_llm
from treespec import LLM, SpecConfig
from treespec.errors import RequestError
from treespec.sampling_params import SamplingParams

pytestmark = pytest.mark.slow

TREE = SpecConfig(nodes=12)
PROMPTS = random_prompts((5, 30, 64, 70))
PARAMS = [greedy(24), greedy(24, temperature=0.8, seed=3, n=2)]


def assert_idle(llm: LLM) -> None:
    llm.engine.check_integrity()
    assert llm.engine.scheduler.is_idle
    with ThreadPoolExecutor(1) as other:  # the lock is free
        assert other.submit(llm.stats).result(timeout=60)["max_num_seqs"]


def generated(llm: LLM, prompt: list[int], params: SamplingParams, spec: Any = TREE) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(prompt, params, spec)[0].outputs]


def streamed(llm: LLM, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in range(params.n)]
    for chunk in llm.stream(prompt, params, TREE):
        tokens[chunk.index] += chunk.token_ids
    assert chunk.output is not None and [one.token_ids for one in chunk.output.outputs] == tokens
    return tokens


def test_threads_get_plain_decodings_tokens() -> None:
    llm = tiny_llm(max_num_seqs=4)
    work = [
        (how, prompt, params) for prompt in PROMPTS for how, params in zip((generated, streamed), PARAMS, strict=True)
    ]
    expected = [generated(llm, prompt, params, "off") for _, prompt, params in work]
    with ThreadPoolExecutor(len(work)) as pool:
        found = list(pool.map(lambda each: each[0](llm, *each[1:]), work))
    assert found == expected
    assert_idle(llm)


def test_a_round_of_another_thread_advances_and_ends_this_ones_requests() -> None:
    llm = tiny_llm(max_num_seqs=4)
    expected = [generated(llm, prompt, PARAMS[0], "off") for prompt in PROMPTS[:2]]
    stream = llm.stream(PROMPTS[0], PARAMS[0], TREE)
    chunks = [next(stream)]
    with ThreadPoolExecutor(1) as other:
        assert other.submit(generated, llm, PROMPTS[1], greedy(24)).result() == expected[1]
        assert other.submit(lambda: [chunks.append(chunk) for chunk in stream]).result()
    assert [token for chunk in chunks for token in chunk.token_ids] == expected[0][0]
    assert chunks[-1].output is not None
    assert_idle(llm)


def test_aborts_from_another_thread_and_in_the_middle_of_a_round() -> None:
    llm = tiny_llm(max_num_seqs=4)
    whole = generated(llm, PROMPTS[1], PARAMS[0], "off")[0]
    stream = llm.stream(PROMPTS[1], PARAMS[0], TREE)
    chunks = [next(stream)]
    with ThreadPoolExecutor(1) as other:
        other.submit(llm.abort, chunks[0].request_id).result()
    chunks += stream
    assert chunks[-1].finish_reason == "abort"
    stream = llm.stream(PROMPTS[1], PARAMS[0], TREE)
    again = [next(stream)]
    with altered_logits(llm, lambda *_: llm.abort(again[0].request_id)):  # as a processor or a drafter might
        again += stream
    assert again[-1].finish_reason == "abort"
    for some in (chunks, again):
        tokens = [token for chunk in some for token in chunk.token_ids]
        assert tokens == whole[: len(tokens)]
    assert_idle(llm)


def test_a_stream_that_is_dropped_in_the_middle_of_a_round() -> None:
    llm = tiny_llm(max_num_seqs=4)
    expected = generated(llm, PROMPTS[1], PARAMS[0], "off")
    kept = [llm.stream(PROMPTS[0], greedy(24), TREE)]
    next(kept[0])
    with altered_logits(llm, lambda *_: kept.clear()):
        assert generated(llm, PROMPTS[1], PARAMS[0]) == expected
    assert_idle(llm)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_round_that_breaks_off_tells_the_other_callers(error: type[BaseException]) -> None:
    llm = open_llm(tiny()[0])

    stream = llm.stream(PROMPTS[0], greedy(24))
    next(stream)
    with altered_logits(llm, Mock(side_effect=error("enough"))), pytest.raises(error):
        llm.generate(PROMPTS[1], greedy(24))
    if error is KeyboardInterrupt:
        assert next(stream).finish_reason == "abort"
    else:
        with pytest.raises(RequestError, match="a round failed: OSError: enough"):
            next(stream)
    assert_idle(llm)
    assert len(generated(llm, PROMPTS[1], greedy(24))[0]) == 24
