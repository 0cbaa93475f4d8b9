"""Samples of one prompt, driven through an engine under guard: what the tests of shared pages have in common."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.helpers.calls import calls_of
from tests.helpers.exactness import Run, altered_logits, recorded
from tests.helpers.models import VOCAB, greedy, random_prompts
from tests.helpers.speech import around_steps
from treespec import LLM, LLMEngine, RequestOutput, SamplingParams, SpecConfig
from treespec.cache.kv_cache import KVCache
from treespec.drafters.cross_tokenizer.cross_tokenizer_drafter import CrossTokenizerDrafter
from treespec.models.decoder import Decoder
from treespec.request import PromptGroup, Request
from treespec.tree import TokenTree
from treespec_kernels.attention.tree_batch import PAGE_SIZE


def samples(llm: LLM, prompt: list[int], counts: Sequence[int], spec: Any = "off", group: bool = True) -> list[Request]:
    """A request for each of `counts`, the tokens that it is to generate; of one group, or on their own."""
    shared = PromptGroup() if group else None
    resolved = SpecConfig.resolve(spec, llm.spec)
    return [
        Request(prompt, greedy(count), resolved, group=shared, sample=sample) for sample, count in enumerate(counts)
    ]


_NOISE = 3.0 * torch.randn((8, VOCAB), generator=torch.Generator().manual_seed(9))


def part_ways(request: Request, tree: TokenTree, logits: Tensor) -> None:
    """Add noise of the sample's own: samples say different things, whatever else is in the batch."""
    logits += _NOISE[request.sample % len(_NOISE)]


@dataclass
class Driven(Run):
    """What a drive has seen; logits are those before any noise."""

    peak: int = 0  # the most pages that were held after a step
    running: list[list[Request]] = field(default_factory=list)  # after each step


def drive(llm: LLM, requests: Sequence[Request], change: Any = part_ways) -> Driven:
    """Run requests to their end, as `LLM` does, checking every step and every write."""
    engine = llm.engine
    with recorded(llm) as (logits, unequal), altered_logits(llm, change), guarded(llm):
        driven = Driven([], [], logits, unequal)

        @contextmanager
        def watched() -> Iterator[None]:
            yield
            driven.running.append(list(engine.scheduler.running))
            driven.peak = max(driven.peak, engine.cache.num_pages - engine.cache.num_free)

        with around_steps(llm, watched):
            for _ in llm.rounds.run(requests):
                pass
    assert engine.scheduler.is_idle
    driven.prompts = [request.prompt_token_ids for request in requests]
    driven.tokens = [request.tokens[request.num_prompt :] for request in requests]
    return driven


@contextmanager
def guarded(llm: LLM) -> Iterator[None]:
    """While the block runs no write targets a page with several holders, which keeps its bits; pages add up."""
    cache, scheduler = llm.engine.cache, llm.engine.scheduler

    def assert_own(pages: np.ndarray) -> None:
        assert (cache.num_holders(pages) == 1).all(), f"a write to shared pages: {np.unique(pages).tolist()}"

    def check_plan(calls: list[Any]) -> None:
        for rows in calls[-1][1]:
            assert_own(rows.slots[0])

    def check_commit(calls: list[Any]) -> None:
        for own, length, path in zip(*calls[-1][2:], strict=True):
            assert_own(own[(length + np.arange(len(path))) // PAGE_SIZE])

    @contextmanager
    def checked_step() -> Iterator[None]:
        several = np.flatnonzero(cache.num_holders(np.arange(cache.num_pages + 1)) > 1)
        before = [pool[:, :, several].clone() for pool in cache.pools]
        yield
        kept = cache.num_holders(several) > 0  # those that are free now may have been zeroed
        for pool, bits in zip(cache.pools, before, strict=True):
            now, then = (x[:, :, torch.from_numpy(kept)].contiguous() for x in (pool[:, :, several], bits))
            assert torch.equal(now.view(torch.int16), then.view(torch.int16)), "a shared page has changed"
        cache.check_integrity()
        scheduler.check_integrity()

    plans, commits = calls_of(Decoder, "plan", check_plan), calls_of(KVCache, "commit", check_commit)
    with plans, commits, around_steps(llm, checked_step):
        yield


def random_requests(
    seed: int, count: int, stems: Sequence[int], tail: int, tokens: tuple[int, int], priorities: int = 1
) -> list[tuple[list[int], SamplingParams, Any, int]]:
    """Prompts that branch off stems of these lengths, with fewer than `tail` tokens of their own, and mixed options."""
    rng, beginnings, found = np.random.default_rng(seed), random_prompts(stems, seed), []
    for i in range(count):
        stem = beginnings[rng.integers(len(stems))]
        prompt = [*stem[: rng.integers(len(stem) + 1)], *rng.integers(1, VOCAB, size=rng.integers(1, tail)).tolist()]
        options: dict[str, Any] = {"logprobs": 2} if rng.random() < 0.3 else {}
        options |= {"prompt_logprobs": 1} if rng.random() < 0.1 else {}
        if rng.random() < 0.5:
            options |= {"temperature": 0.8, "seed": i, "n": int(rng.integers(1, 5)), "repetition_penalty": 1.1}
        spec = ("off", SpecConfig(nodes=8, max_depth=3), SpecConfig())[rng.integers(3)]
        found.append((prompt, greedy(int(rng.integers(*tokens)), **options), spec, int(rng.integers(priorities))))
    return found


def run_at_random_times(
    llm: LLM, asked: Sequence[tuple[Any, ...]], seed: int, aborts: float
) -> dict[int, RequestOutput]:
    """Add requests at random times, abort fewer than half, with this probability; the outputs of the others by number.

    Timings decide how many steps there are, each of which may abort a request.
    """
    rng, engine, waiting = np.random.default_rng(seed), LLMEngine(llm), dict(enumerate(asked))
    to_abort = rng.permutation(len(asked))[: (len(asked) - 1) // 2].tolist()
    outputs: dict[int, RequestOutput] = {}
    while waiting or engine.has_unfinished_requests():
        for i in rng.permutation(list(waiting))[: rng.integers(0, 4)].tolist():
            prompt, params, spec, priority, *lora = waiting.pop(i)
            options = {"spec": spec, "priority": priority, "lora_request": lora[0] if lora else None}
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params, **options)
        if rng.random() < aborts:
            engine.abort_request(str(rng.choice(to_abort)))
        for output in engine.step():
            if not llm.engine.scheduler.is_idle:  # `few_pages` may hold some
                llm.engine.check_integrity()
            if output.finished and all(one.finish_reason == "length" for one in output.outputs):
                outputs[int(output.request_id)] = output
    return outputs


def assert_as_alone(
    plain: LLM, llm: LLM, asked: Sequence[tuple[Any, ...]], run: Callable[[], list[dict[int, RequestOutput]]]
) -> None:
    """Asserts that requests which ended in `run` on `llm` have the outputs and logit bits of `plain` one by one."""
    with recorded(plain) as (alone, twice):
        expected = [
            plain.generate([prompt], params, spec="off", lora_request=lora or None)[0]
            for prompt, params, _, _, *lora in asked
        ]
    with recorded(llm) as (logits, unequal):
        runs = run()
    for ended in runs:
        assert len(ended) > len(asked) // 2
        for i, output in ended.items():
            assert output.outputs == expected[i].outputs, "tokens, log-probabilities and reasons to end"
            assert output.prompt_logprobs == expected[i].prompt_logprobs
    common = alone.keys() & logits.keys()
    assert len(common) > 100 and not twice and not unequal
    assert all(torch.equal(alone[prefix], logits[prefix]) for prefix in common)
    assert_clean(llm)


@contextmanager
def few_pages(llm: LLM, count: int) -> Iterator[None]:
    """Leave an engine `count` free pages while the block runs."""
    cache = llm.engine.cache
    cache.reserve("hoard", (cache.num_free - count) * PAGE_SIZE)
    try:
        yield
        assert cache.num_free == count, "pages are lost"
    finally:
        cache.release("hoard")


def assert_clean(llm: LLM) -> None:
    """Nothing is held, and no stale NaN waits for the next request."""
    assert llm.engine.scheduler.is_idle
    llm.engine.check_integrity()
    for drafter in llm.engine.sources.others:
        if isinstance(drafter, CrossTokenizerDrafter):
            drafter.cache.check_integrity()
            assert drafter.cache.num_free == drafter.cache.num_pages
    for pool in llm.engine.cache.pools:
        assert pool[:, :, 1:].isfinite().all(), "stale NaN or infinity is left for the next request"
