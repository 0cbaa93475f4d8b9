"""Random lives of groups and single requests: whoever comes, ends, fails or is given up, and in however few pages."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.models import random_prompts, tiny_llm
from tests.helpers.sharing import assert_clean, drive, few_pages, guarded, part_ways, samples
from tests.helpers.speech import altered_logits
from treespec import LLM, SpecConfig
from treespec.cache.kv_cache import pages_for
from treespec.request import Request
from treespec.tree import TokenTree

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
