"""A cache that is too small for its requests: they wait, are preempted and computed again, and no token changes."""

import asyncio
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest

from tests.graphs.test_graph_engine import ScriptedRounds, scripted
from tests.helpers.calls import calls_of
from tests.helpers.models import greedy, open_llm, quick, random_prompts, tiny, tiny_llm, tokens_of
from tests.helpers.sharing import assert_as_alone, assert_clean, guarded, random_requests, run_at_random_times
from tests.helpers.speech import checked, speaking_folder
from treespec import LLM, AsyncLLM, LLMEngine, RequestOutput, SamplingParams, SpecConfig
from treespec.cache.kv_cache import pages_for
from treespec.engine.scheduler import MOST_PASSED
from treespec.errors import ConfigError, RequestError
from treespec.graphs.round_inputs import RoundInput
from treespec.graphs.verify_stage import RoundResult
from treespec_kernels.attention.tree_batch import PAGE_SIZE

LENGTH = 256  # positions of the longest request, which takes 5 pages with its tree
SCRATCH = 64


def crowded(num_pages: int, model: Any = None, **options: Any) -> LLM:
    """An engine over `tiny` with so many pages, and priorities."""
    target, drafts = tiny()
    page = tiny_llm(ssms=(0,)).engine.cache
    size = num_pages * page.nbytes // (page.num_pages + 1)
    defaults = {"max_num_seqs": 4, "max_model_len": LENGTH, "max_num_batched_tokens": 64}
    defaults |= {"scheduling_policy": "priority"}
    return open_llm(model or target, drafts[:1], kv_cache_memory_bytes=size, **(defaults | options))


@pytest.mark.parametrize("caching", quick((False, True), (True,)))
@pytest.mark.parametrize("seed", quick((0, 2), (0,)))
def test_random_interleavings_give_what_requests_alone_give(seed: int, caching: bool) -> None:
    llm = crowded(10, max_num_seqs=16, enable_prefix_caching=caching)
    asked = random_requests(seed, 4, (100,), 30, (80, 110), priorities=3)

    def run() -> list[dict[int, RequestOutput]]:
        with nullcontext() if caching else guarded(llm):  # drafts write what they had not read of a cached prefix
            return [run_at_random_times(llm, asked, seed, aborts=0.003)]

    assert_as_alone(tiny_llm(max_model_len=LENGTH), llm, asked, run)
    assert llm.stats()["num_preemptions"]


def test_rules_that_draw_at_random_go_on_with_their_draws() -> None:
    """Their tokens depend on what is drafted; no draw is repeated."""
    llm = crowded(6)
    spec = SpecConfig(nodes=8, verification="rejection")
    params = [SamplingParams(max_tokens=80, temperature=1.0, seed=i, ignore_eos=True) for i in range(4)]
    drawn = set()

    def note(calls: list[Any]) -> None:
        drawn.update((request.request_id, id(request.sampler.draft_oracle)) for request in calls[-1][0])

    with calls_of(llm.engine.sources.ssms, "propose", note):
        outputs = llm.generate(random_prompts((60, 50, 40, 30)), params, spec)
    assert all(len(output.outputs[0].token_ids) == 80 for output in outputs)
    assert llm.stats()["num_preemptions"] and len(drawn) == 4, "one source of draws for each request"
    assert_clean(llm)


def test_streams_go_on_where_they_were() -> None:
    """Text that was emitted before a preemption is not emitted again, and a form still holds."""
    llm = crowded(6, speaking_folder())
    common: dict[str, Any] = {"ignore_eos": True, "max_tokens": 90, "output_kind": "DELTA"}
    params = [
        SamplingParams(**common),
        SamplingParams(temperature=0.9, seed=1, logprobs=1, **common),
        SamplingParams(temperature=0.9, seed=2, stop=["zzz"], **common),
        SamplingParams(
            temperature=0.9, seed=3, structured_outputs={"regex": "[a-z ]{80,}"}, **common | {"ignore_eos": False}
        ),
    ]
    prompts = ["def add(a, b):\n" * 4, "import os\n" * 9, "x = 1\ny = 2\n" * 4, "class Tree:\n" * 8]
    reference = open_llm(speaking_folder(), [], max_model_len=LENGTH)
    expected = [reference.generate(p, param, "off")[0].outputs[0] for p, param in zip(prompts, params, strict=True)]

    async def collect(engine: AsyncLLM, prompt: str, param: SamplingParams) -> tuple[str, list[int], list[Any]]:
        text, tokens, logprobs = "", list[int](), list[Any]()
        async for output in engine.generate(prompt, param, spec=SpecConfig(nodes=8)):
            (completion,) = output.outputs
            text, tokens = text + str(completion.text), tokens + completion.token_ids
            logprobs += completion.logprobs or []
        return text, tokens, logprobs

    async def together() -> list[Any]:
        return await asyncio.gather(*(collect(engine, *each) for each in zip(prompts, params, strict=True)))

    with AsyncLLM(llm) as engine:
        streamed = asyncio.run(together())
    assert streamed == [(one.text, one.token_ids, one.logprobs or []) for one in expected]
    assert llm.stats()["num_preemptions"]
    assert_clean(llm)


def test_a_preempted_sample_does_not_change_what_its_group_has_decided() -> None:
    """The SSMs did not read the prompt, as they would not have paid; samples that fork from it later need no state."""
    llm, params = crowded(6, max_num_seqs=3), SamplingParams(max_tokens=100, n=6, temperature=1.0, seed=1)
    params.ignore_eos = True
    with mock.patch.object(llm.engine.host, "expects_ssms", lambda batch: any(each.num_generated for each in batch)):
        (output,) = llm.generate(random_prompts((60,)), params)
    assert [len(each.token_ids) for each in output.outputs] == [100] * 6 and llm.stats()["num_preemptions"]
    assert_clean(llm)


@pytest.mark.parametrize(
    ("priority", "preempted"),
    [([1, 0, 0], [True, False, False]), (None, [False, False, True])],
    ids=["priority", "fcfs"],
)
def test_the_lowest_priority_that_came_last_is_preempted(priority: Any, preempted: list[bool]) -> None:
    llm, prompts = crowded(8), random_prompts((60,) * 3)
    with checked(llm) as running:
        outputs = llm.generate(prompts, greedy(90), "off", priority=priority)
    found = []
    for output in outputs:
        among = [output.request_id in now for now in running]
        found.append(False in among[among.index(True) : len(among) - among[::-1].index(True)])
    assert found == preempted
    assert tokens_of(outputs) == tokens_of(tiny_llm(max_model_len=LENGTH).generate(prompts, greedy(90), "off"))


def test_priorities_order_the_queue() -> None:
    llm = crowded(5, max_num_seqs=1)
    with checked(llm) as running:
        outputs = llm.generate(random_prompts((5,) * 4), greedy(3), "off", priority=[2, -1, 2, 0])
    order = list(dict.fromkeys(name for now in running for name in now))
    assert order == [outputs[i].request_id for i in (1, 3, 0, 2)]


def test_a_long_prompt_neither_starves_nor_is_starved() -> None:
    """While its pages are not free, a few shorter ones that came later are served; then it is its turn."""
    llm = crowded(7)
    engine = LLMEngine(llm)
    long, other = random_prompts((240, 60))
    engine.add_request("running", {"prompt_token_ids": other}, greedy(190), spec="off")
    engine.step()
    engine.add_request("long", {"prompt_token_ids": long}, greedy(5), spec="off")
    shorter, asked, ended = iter(random_prompts((9,) * 300)), ["running"], list[str]()

    def add_another() -> None:
        asked.append(f"short {len(asked)}")
        engine.add_request(asked[-1], {"prompt_token_ids": next(shorter)}, greedy(6), spec="off")

    for _ in range(3):
        add_another()
    while "long" not in ended:
        for output in engine.step():
            if output.finished:
                ended.append(output.request_id)
                add_another()
        llm.engine.check_integrity()
        assert len(ended) < 200, "the long prompt is starved"
    assert 3 <= ended.index("long") <= MOST_PASSED + 4 and ended[0] != "long"
    engine.abort_request([name for name in asked if name not in ended])
    while engine.has_unfinished_requests():
        engine.step()


class PagedRounds(ScriptedRounds):
    """Scripted rounds of requests that are told apart by their maximum length, whose pages must hold their trees."""

    def result(self, request: RoundInput, proposal: Any, levels: int) -> RoundResult:
        at, text = request.context_len + 1, self.texts[request.max_len]
        assert len(request.pages) * PAGE_SIZE >= at + SCRATCH, "a round without pages"
        assert text[at - len(request.new_tokens) : at] == request.new_tokens
        self.texts_by_page[request.pages[0]] = text
        return super().result(request, proposal, levels)

    texts: dict[int, list[int]]


@pytest.mark.parametrize("accepts", quick((0, 3), (3,)))
@pytest.mark.parametrize("spec", ["off", SpecConfig(nodes=8, sources=("ssm",))], ids=["plain", "trees"])
def test_captured_rounds_have_their_pages_before_they_are_launched(spec: Any, accepts: int) -> None:
    page = tiny_llm(ssms=(0, 1), max_num_seqs=3).engine.cache
    size = 6 * page.nbytes // (page.num_pages + 1)
    llm, rounds, *_ = scripted(accepts, PagedRounds, kv_cache_memory_bytes=size, max_model_len=256)
    prompts, counts = random_prompts([30, 40, 50]), (200, 180, 160)
    params = [greedy(count) for count in counts]
    expected = tokens_of(tiny_llm().generate(prompts, params, "off"))
    rounds.texts = {len(p) + len(t): [*p, *t] for p, t in zip(prompts, expected, strict=True)}  # type: ignore[attr-defined]
    assert tokens_of(llm.generate(prompts, params, spec)) == expected
    assert llm.stats()["num_preemptions"]
    seen = [[request.pages for request in requests] for requests, _, _ in rounds.seen]
    kept = [all(map(lambda a, b: a is b, seen[i - 1], seen[i])) for i in rounds.followed if i < len(seen)]
    assert len(kept) > 20 and sum(kept) > len(kept) - 5, "rounds that were launched ahead are lost"
    llm.engine.check_integrity()


def test_the_size_of_the_cache() -> None:
    assert crowded(8).engine.cache.num_pages == 8
    assert crowded(1000).engine.cache.num_pages == 4 * pages_for(LENGTH + SCRATCH)
    assert crowded(6, max_model_len=None).config.max_model_len == 6 * PAGE_SIZE - SCRATCH
    for pages, options, text in (
        (4, {}, "a request of max_model_len=256 needs"),
        (1, {"max_model_len": None}, "holds no context"),
        (1 << 40, {}, "GiB of cpu are free"),
    ):
        with pytest.raises(ConfigError, match=text):
            crowded(pages, **options)
    with pytest.raises(RequestError, match="a prompt of 256 tokens; shorten it, raise max_model_len"):
        crowded(8).generate(random_prompts((256,)), greedy(5))


@pytest.mark.parametrize("priority", [[1], "12", [True, 0]])
def test_priorities_that_are_refused(priority: Any) -> None:
    with pytest.raises(ConfigError, match="priority"):
        crowded(8).generate(random_prompts((5, 5)), greedy(3), priority=priority)
    with pytest.raises(ConfigError, match='requires LLM\\(scheduling_policy="priority"\\)'):
        tiny_llm().generate(random_prompts((5, 5)), greedy(3), priority=[0, 1])
