"""Random lives of groups and single requests: whoever comes, ends, fails or is given up, and in however few pages."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.cache.test_cache import new_cache
from tests.helpers.models import quick, random_prompts, tiny_llm
from tests.helpers.sharing import assert_clean, drive, few_pages, guarded, part_ways, samples
from tests.helpers.speech import altered_logits
from treespec import LLM, SpecConfig
from treespec.cache.kv_cache import pages_for
from treespec.llm import frontend_of
from treespec.request import Request
from treespec.tree import TokenTree
from treespec_kernels.attention.tree_batch import PAGE_SIZE

PROMPTS = random_prompts((1, 20, 64, 65, 130, 130), seed=1)
LONGEST = 12  # tokens of an output
SAMPLES = 5
SPECS = ("off", SpecConfig(nodes=6, max_depth=2), SpecConfig())


def truths(llm: LLM) -> list[list[list[int]]]:
    """By prompt and sample, what plain decoding says."""
    every = [samples(llm, prompt, [LONGEST] * SAMPLES, group=False) for prompt in PROMPTS]
    for own in every:
        drive(llm, own)
    return [[request.tokens for request in own] for own in every]


@dataclass(eq=False)
class Life:
    """A request with the prompt it has, and how many tokens it says before it fails."""

    request: Request
    prompt: int
    fails: int


class World:
    """An engine with requests that come and go at random."""

    def __init__(self, llm: LLM, seed: int):
        self.llm, self.rng = llm, np.random.default_rng(seed)
        self.lives: dict[str, Life] = {}
        self.shared = self.kept = 0

    def arrive(self) -> None:
        prompt, count = int(self.rng.integers(len(PROMPTS))), int(self.rng.integers(1, SAMPLES + 1))
        counts = self.rng.integers(1, LONGEST + 1, size=count).tolist()
        spec = SPECS[int(self.rng.integers(len(SPECS)))]
        for request in samples(self.llm, PROMPTS[prompt], counts, spec, group=self.rng.random() < 0.8):
            fails = int(self.rng.integers(3)) if self.rng.random() < 0.15 else 2 * LONGEST
            self.lives[request.request_id] = Life(request, prompt, fails)
            self.llm.engine.scheduler.add(request)

    def change(self, request: Request, tree: TokenTree, logits: Tensor) -> None:
        part_ways(request, tree, logits)
        late = request.num_generated + tree.depths >= self.lives[request.request_id].fails
        logits[torch.from_numpy(late)] = float("nan")

    def abort(self) -> None:
        going = [life.request for life in self.lives.values() if not life.request.finished]
        if going:
            self.llm.abort(going[int(self.rng.integers(len(going)))].request_id)

    def step(self) -> None:
        with torch.inference_mode():
            touched = self.llm.engine.step()
        scheduler = self.llm.engine.scheduler
        assert touched or scheduler.is_idle or any(r.needs_prefill for r in scheduler.running), "the engine is stuck"
        pages = np.arange(self.llm.engine.cache.num_pages + 1)
        self.shared += bool((self.llm.engine.cache.num_holders(pages) > 1).any())
        self.kept += any(r.group is not None and r.group.kept is not None for r in scheduler.waiting)

    def check(self, truth: list[list[list[int]]]) -> None:
        for life in self.lives.values():
            request, expected = life.request, truth[life.prompt][life.request.sample]
            assert request.finished and request.tokens == expected[: len(request.tokens)], request.request_id
            if request.finish_reason == "length":
                assert request.num_generated == request.max_tokens <= life.fails
            elif request.finish_reason == "error":
                assert request.num_generated == life.fails
        assert {life.request.finish_reason for life in self.lives.values()} == {"length", "error", "abort"}


@pytest.mark.slow
@pytest.mark.parametrize("seqs, chunk, spare", [(1, 512, 0), (2, 64, 1), (3, 24, 3), (4, 64, 20)])
def test_random_lives(seqs: int, chunk: int, spare: int) -> None:
    """`spare`: free pages beyond those that the largest request takes."""
    llm = tiny_llm(ssms=(0, 1), max_num_seqs=seqs, prefill_chunk=chunk)
    truth = truths(llm)
    largest = pages_for(max(map(len, PROMPTS)) + LONGEST + llm.engine.scheduler.scratch)
    world = World(llm, 100 * seqs)
    free = min(largest + spare, llm.engine.cache.num_free)
    with few_pages(llm, free), altered_logits(llm, world.change), guarded(llm):
        for _ in range(120):
            if len(llm.engine.scheduler.waiting) < 8 and world.rng.random() < 0.3:
                world.arrive()
            world.step()
            while world.rng.random() < 0.1:
                world.abort()
                llm.engine.cache.check_integrity()
                llm.engine.scheduler.check_integrity()
        while not llm.engine.scheduler.is_idle:
            world.step()
    world.check(truth)
    # With one spare page, samples of a prompt rarely run at once; they hand its pages on.
    assert world.shared if seqs > 1 and spare > 1 else world.kept, "nothing was shared"
    assert_clean(llm)


PLACES: dict[str, Any] = {
    "prefill": lambda llm: (llm.engine.runner, "prefill"),
    "read": lambda llm: (llm.engine.sources.ssms, "prefill"),
    "copy": lambda llm: (llm.engine.cache, "copy_slots"),
    "fork": lambda llm: (llm.engine.sources.ssms, "fork"),
    "draft": lambda llm: (llm.engine.sources.ssms, "propose"),
    "forward": lambda llm: (llm.engine.runner, "logits"),
    "commit": lambda llm: (llm.engine.cache, "commit"),
    "observe": lambda llm: (llm.engine.host.planner, "observe"),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_in_one_step(place: str) -> None:
    llm = tiny_llm(ssms=(0, 1), max_num_seqs=3, prefill_chunk=64)
    own = samples(llm, PROMPTS[4], (8,) * 4, group=False)
    drive(llm, own)
    expected = [request.tokens for request in own]
    owner, name = PLACES[place](llm)
    for nth in (1, 3):
        calls = 0

        def interrupted(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == nth:  # noqa: B023
                raise KeyboardInterrupt
            return original(*args, **options)  # noqa: B023

        group = samples(llm, PROMPTS[4], (3, 8, 5, 4), SPECS[1])
        with altered_logits(llm, part_ways), guarded(llm), pytest.MonkeyPatch.context() as patch:
            original = getattr(owner, name)
            patch.setattr(owner, name, interrupted)
            for request in group:
                llm.engine.scheduler.add(request)
            for _ in range(80):
                with suppress(KeyboardInterrupt):
                    frontend_of(llm).rounds.step()
        assert llm.engine.scheduler.is_idle
        for request in group:
            assert request.finish_reason == "abort" or request.num_generated == request.max_tokens
            assert request.tokens == expected[request.sample][: len(request.tokens)]
        ended = [request.finish_reason for request in group]
        assert ended.count("abort") <= 3
        assert_clean(llm)


# --- the cache alone


@pytest.mark.parametrize("seed", quick(range(3), (0,)))
def test_random_holders(seed: int) -> None:
    """Reference counts against sets: pages are free as soon as nobody holds them, and zeroed if anybody asked."""
    cache = new_cache(20)
    rng, held, dirty, count = np.random.default_rng(seed), {}, set(), 0
    filled = [pool.fill_(1.0) for pool in cache.pools]
    for _ in range(1500):
        kind = rng.random()
        if kind < 0.5 or not held:
            slots, source = int(rng.integers(1, 5 * PAGE_SIZE)), list(held.values())[-1] if held else np.empty(0, int)
            shared = source[: int(rng.integers(0, min(len(source), pages_for(slots)) + 1))]
            if cache.can_reserve(slots, len(shared)):
                count += 1
                pages = cache.reserve(f"r{count}", slots, shared)
                assert pages[: len(shared)].tolist() == shared.tolist() and len(pages) == pages_for(slots)
                held[f"r{count}"] = pages
        else:
            name, scrub = str(rng.choice(list(held))), bool(rng.integers(2))
            gone = set(held.pop(name).tolist())
            cache.release(name, scrub)
            dirty |= gone if scrub else set()
            free = gone - {page for pages in held.values() for page in pages.tolist()}
            for pool in filled:
                for page in gone:
                    assert bool(pool[:, :, page].any()) != (page in dirty and page in free)
                pool[:, :, list(free)] = 1.0
            dirty -= free
        every = [page for pages in held.values() for page in pages.tolist()]
        assert cache.num_holders(np.arange(21)).tolist() == [every.count(page) for page in range(21)]
        assert cache.num_free == 20 - len(set(every))
        cache.check_integrity()


def test_what_is_handed_over() -> None:
    """The first slots stay, in every pool; what stands behind them in their page is zeroed, and the rest is free."""
    cache = new_cache(6)
    pages = cache.reserve("leader", 4 * PAGE_SIZE)
    for pool in cache.pools:
        pool.fill_(float("nan"))
        pool[:, :, pages[0]] = 2.0
        pool[:, :, pages[1], :, :10] = 3.0
    other = cache.reserve("other", 2 * PAGE_SIZE, pages[:1])
    cache.copy_slots(pages[1], other[1], 10)
    kept = cache.transfer("leader", "group", PAGE_SIZE + 10, scrub=True)
    assert kept.tolist() == pages[:2].tolist()
    assert cache.num_holders(pages).tolist() == [2, 1, 0, 0]
    for pool in cache.pools:
        assert (pool[:, :, pages[0]] == 2).all()
        for page in (pages[1], other[1]):
            assert (pool[:, :, page, :, :10] == 3).all()
        assert not pool[:, :, pages[1], :, 10:].any() and not pool[:, :, pages[2:]].any()
    cache.release("group")
    cache.release("other")
    for pool in cache.pools:
        assert not pool[:, :, pages].any(), "the leader asked for clean pages"
    cache.check_integrity()


@pytest.mark.slow
def test_shared_pages_are_not_written() -> None:
    cache = new_cache(6)
    pages = cache.reserve("a", 2 * PAGE_SIZE)
    cache.reserve("b", 3 * PAGE_SIZE, pages[:1])
    refused: list[Any] = [
        lambda: cache.copy_slots(pages[1], pages[0], 5),
        lambda: cache.scrub_slots(0, pages, 0, 1),
        lambda: cache.reserve("c", PAGE_SIZE, np.array([6])),
        lambda: cache.reserve("c", PAGE_SIZE, pages),
    ]
    for misuse in refused:
        with pytest.raises(AssertionError):
            misuse()
    cache.check_integrity()
