"""Whole rounds of one engine on a simulated GPU: captured, launched ahead, and told to observers."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.calls import calls_of
from tests.helpers.models import greedy, tokens_of
from tests.helpers.observed import assert_tell
from tests.interpreted.engines import (
    PROMPTS,
    SHORT,
    TREES,
    launched_ahead,
    leave,
    open_on_gpu,
    rounds_wait_for_nothing,
    step_by_step,
    told,
)
from tests.simulated_gpu import Gpu, simulated_gpu
from treespec import LLM, RoundRecord
from treespec.bench.measure import profiled
from treespec.engine.runner import Runner
from treespec.graphs.batch_round import BatchRound
from treespec.graphs.graph_executor import GraphExecutor
from treespec.graphs.round_inputs import RoundInput
from treespec.request import Request


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    """One for all cases, as its engine must not outlive it."""
    with simulated_gpu() as gpu:
        yield gpu


@pytest.fixture(scope="module")
def llm(gpu: Gpu) -> LLM:
    return open_on_gpu()


def test_rounds_replay_graphs(gpu: Gpu, llm: LLM) -> None:
    some = list(range(3, 9))
    mixed = [
        greedy(2, allowed_token_ids=some),
        greedy(4, temperature=0.9, seed=3, top_k=30, top_p=0.9, frequency_penalty=1.0, logprobs=1),
    ]
    with step_by_step(llm):
        expected = told(llm, SHORT, mixed, "off")
    assert set(expected[0][0]) <= set(some)
    with rounds_wait_for_nothing(gpu):
        for spec in ("off", TREES):  # a graph is captured at its first use, and replayed afterwards
            assert told(llm, SHORT, mixed, spec) == expected
        gpu.launches.backwards = True  # no program of a launch leans on one before it
        assert told(llm, SHORT, mixed, TREES) == expected
        gpu.launches.backwards = False
    llm.engine.check_integrity()
    leave(gpu)


def test_rounds_launched_ahead(gpu: Gpu, llm: LLM) -> None:
    """The device writes what the host would. One request ends by a token that no launch could foresee."""
    followed: list[tuple[bool, bool]] = []
    sampling: dict[str, Any] = {"temperature": 0.9, "seed": 3}
    with step_by_step(llm):
        plain = tokens_of(llm.generate(PROMPTS, [greedy(10), greedy(10, **sampling)], spec="off"))
    params = [greedy(10), greedy(10, stop_token_ids=[plain[1][5]], **sampling)]
    expected = [plain[0], plain[1][: plain[1].index(plain[1][5]) + 1]]
    draft = BatchRound.draft

    def watched(batch: BatchRound, requests: Sequence[RoundInput], levels: int, *rest: Any) -> None:
        draft(batch, requests, levels, *rest)
        followed.append((levels > 0, batch.has_followed))

    with rounds_wait_for_nothing(gpu), mock.patch.object(BatchRound, "draft", watched), launched_ahead():
        for spec in ("off", TREES):
            assert tokens_of(llm.generate(PROMPTS, params, spec=spec)) == expected
            llm.engine.check_integrity()
    assert {drafts for drafts, ahead in followed if ahead} == {False, True}
    assert not all(ahead for _, ahead in followed)


def test_a_round_does_not_wait_for_prompts(gpu: Gpu, llm: LLM) -> None:
    """The planner learns from what a round takes, which a prompt before it is no part of."""
    prefill, order = Runner.prefill, []

    def prompts(runner: Runner, requests: Sequence[Request], counts: Sequence[int]) -> list[torch.Tensor]:
        states = prefill(runner, requests, counts)
        gpu.later(lambda: order.append("prompt computed"))
        return states

    def begins(calls: list[Any]) -> None:
        order.extend(["round begins"] if calls[-1][1] else [])

    with mock.patch.object(Runner, "prefill", prompts), calls_of(GraphExecutor, "run", begins):
        llm.generate(PROMPTS[:1], greedy(1), spec="off")
    assert order == ["prompt computed", "round begins"]


def test_captured_rounds_are_told(llm: LLM) -> None:
    repeated = [5, 9, 2, 7] * 5
    prompts = [PROMPTS[0], repeated]
    params = [greedy(4), greedy(4, temperature=0.9, seed=3)]
    records: list[RoundRecord] = []
    rounds = llm.engine.stats.rounds
    with llm.add_round_observer(records.append), profiled(llm.engine) as profile:
        outputs = llm.generate(prompts, params, spec=TREES)
        plain = llm.generate(prompts[:1], greedy(1), spec="off")
    assert profile.accepted == Counter(each.accepted for each in records)
    assert profile.rounds == llm.engine.stats.rounds - rounds > 2
    assert_tell(records, [*outputs, *plain])
    sizes = [len(each.tree) for each in records]
    assert max(sizes) == 8 and max(int(each.tree.depths.max()) for each in records) == 2
    assert {name for each in records for name in each.tree.source_names} == {"near", "other", "lookup"}
    told = {each.tree.sources_of(node) for each in records for node in range(1, len(each.tree))}
    assert {name for names in told for name in names} >= {"near", "other", "lookup"} and max(map(len, told)) > 1
    assert json.loads(json.dumps(records[-1].as_dict()))["bonus"] == records[-1].bonus
    assert not llm.engine.observers
    llm.engine.check_integrity()
