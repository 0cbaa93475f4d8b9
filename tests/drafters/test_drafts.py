"""The SSMs' side: a draft that is the target itself is never wrong, and a draft's cache holds what it computes anew."""

from collections.abc import Iterable, Iterator
from unittest import mock

import pytest
import torch

from tests.helpers.exactness import assert_exact, run
from tests.helpers.models import (
    assert_same_tree,
    equal_weights,
    exact_in,
    greedy,
    open_llm,
    random_prompts,
    tiny,
    tiny_llm,
)
from treespec import LLM, SpecConfig
from treespec.drawing.recording import watch
from treespec.engine.round_record import RoundRecord
from treespec.tree import TokenTree

TOKENS = 24
LENGTHS = (1, 30, 62, 63, 64, 126)


def twin_llm(dtype: torch.dtype = torch.float32, copies: int = 1, **options: object) -> LLM:
    """The tiny target, with itself as its draft."""
    target, _ = tiny(dtype)
    return open_llm(target, [target] * copies, max_num_seqs=4, **options)


@exact_in
@pytest.mark.parametrize(
    "copies, depth", [(1, 4), (2, 3), *(pytest.param(1, depth, marks=pytest.mark.slow) for depth in (1, 12))]
)
def test_a_draft_that_is_the_target_loses_nothing(copies: int, depth: int, dtype: torch.dtype) -> None:
    """Its cache is compacted, caught up and shared with the tree's scratch without a fault: every pass is full."""
    llm = twin_llm(dtype, copies)
    prompts = random_prompts(LENGTHS)
    plain = run(llm, prompts, greedy(TOKENS))
    # Equal logits of bf16 may tie, so that the likeliest two are needed.
    shapes = [(width,) * depth for width in (1, 2, 3) if width**depth < 40]
    specs = [SpecConfig(branching=shape, max_depth=12, sources=("ssm",)) for shape in shapes]
    for spec in specs[dtype == torch.bfloat16 :]:
        tree = assert_exact(llm, plain, spec)
        assert {output.metrics.target_passes for output in tree.outputs} == {-(-TOKENS // (depth + 1))}
        for output in tree.outputs:
            counts = output.metrics.accepted_by_source
            assert list(counts.values()) == [TOKENS - output.metrics.target_passes] * copies


def proposals(rounds: list[RoundRecord]) -> dict[tuple[int, ...], TokenTree]:
    """By the tokens up to the root."""
    return {(*each.context, int(each.tree.tokens[0])): each.tree for each in rounds}


def first_proposals(llm: LLM, keys: Iterable[tuple[int, ...]], spec: SpecConfig) -> dict[tuple[int, ...], TokenTree]:
    """What new requests with those tokens draft first."""
    with watch(llm.engine) as rounds:
        llm.generate([list(key) for key in keys], greedy(7), spec=spec)
    return proposals([each for each in rounds if each.number == 1])


@pytest.fixture
def equal_trust() -> Iterator[None]:
    """The weights of the SSMs remember more than the tokens of a new request's prompt."""
    with equal_weights():
        yield


SSMS_24 = SpecConfig(nodes=24, max_depth=5, sources=("ssm",))
SSMS_321 = SpecConfig(branching=(3, 2, 1), sources=("ssm",))


@pytest.mark.usefixtures("equal_trust")
@pytest.mark.parametrize("spec", [SSMS_24, SSMS_321], ids=["24", "321"])
def test_a_tree_does_not_depend_on_the_rounds_before(spec: SpecConfig) -> None:
    """Each tree of a run equals the first tree of a new request with the same tokens, to the last bit."""
    llm = tiny_llm(ssms=(1, 2), max_num_seqs=4)
    with watch(llm.engine) as rounds:
        llm.generate(random_prompts((1, 58, 63, 120)), greedy(20), spec=spec)
    deepest = len(spec.branching or "") or spec.max_depth  # near the end of an output trees are cut
    running = {key: tree for key, tree in proposals(rounds).items() if tree.depths.max() == deepest}
    assert len(running) > 8
    fresh = first_proposals(llm, running, spec)
    for key, tree in running.items():
        assert_same_tree(tree, fresh[key])


@pytest.mark.usefixtures("equal_trust")
def test_a_pause_is_caught_up() -> None:
    """Rounds without drafting leave a gap in the SSMs' caches; the next tree does not show it."""
    llm = open_llm(tiny()[0], tiny()[1][:2])
    (prompt,) = random_prompts((40,))
    spec = SpecConfig(nodes=24, max_depth=4, sources=("ssm",))
    llm.engine.host.rounds.most_rounds = 1  # so that each round is planned
    plans = llm.engine.host.planner.draft_plans
    calls = 0

    def paused(requests: list[object], *others: object) -> list[object]:
        nonlocal calls
        calls += 1
        result = plans(requests, *others)
        return [type(plan)(0, 0, 1) for plan in result] if 3 < calls < 9 else result

    with watch(llm.engine) as rounds, mock.patch.object(llm.engine.host.planner, "draft_plans", paused):
        (output,) = llm.generate(prompt, greedy(40), spec=spec)
    assert len(output.outputs[0].token_ids) == 40
    assert [len(each.tree) for each in rounds[3:8]] == [1] * 5
    after = {key: tree for key, tree in proposals(rounds[8:]).items() if tree.depths.max() == 4}
    fresh = first_proposals(llm, after, spec)
    assert len(after) > 3
    for key, tree in after.items():
        assert_same_tree(tree, fresh[key])
