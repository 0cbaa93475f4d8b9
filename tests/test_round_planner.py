"""What a captured round drafts and verifies: the choice, and what is learned from the trees that come back."""

import itertools

import numpy as np
import pytest

from treespec.graphs.graph_planner import PLAIN, RoundPlan, RoundPlanner, RoundSeconds

NODES = (1, 8, 16, 32)
CHEAP = RoundSeconds(0.1, 0.1, {1: 1.0, 8: 1.05, 16: 1.1, 32: 1.2})


def tree(chances: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Values and depths of a chain whose edges have these chances."""
    values = np.cumprod([1.0, *chances]).astype(np.float32)
    return values, np.arange(len(values), dtype=np.int32)


def simulate(
    planner: RoundPlanner, chance: float, rounds: int, max_nodes: int = 32, max_depth: int = 4
) -> list[RoundPlan]:
    """Rounds over text of which each level is foretold with one chance, and takes as long as modelled."""
    rng, plans = np.random.default_rng(0), []
    for _ in range(rounds):
        plan = planner.choose(max_depth, max_nodes)
        depth = min(plan.levels, plan.nodes - 1)
        held = next((d for d in range(depth) if rng.random() >= chance), depth)
        planner.observe(plan, [tree([chance] * depth)], [held], planner.seconds.of(*plan))
        plans.append(plan)
    return plans


def test_text_that_drafts_know_is_speculated_on() -> None:
    plans = simulate(RoundPlanner(CHEAP, 4, NODES), 0.9, 200)
    assert plans[-50:].count(RoundPlan(4, 8)) >= 49, "a chain of four fits into the smallest graph; now and then a look"


def test_text_that_drafts_do_not_know_is_decoded_plainly() -> None:
    plans = simulate(RoundPlanner(CHEAP, 4, NODES), 0.02, 2000)
    speculated = [i for i, plan in enumerate(plans) if plan != PLAIN]
    assert len([i for i in speculated if i >= 1000]) <= 2, "it looks again, each time after twice as long"
    assert speculated and plans[-1] == PLAIN


def test_what_could_not_pay_is_never_tried() -> None:
    """Were all of it accepted, it would still be slower."""
    dear = RoundSeconds(4.0, 4.0, dict.fromkeys(NODES, 1.0))
    assert set(simulate(RoundPlanner(dear, 4, NODES), 0.9, 300)) == {PLAIN}


def test_one_look_tells_how_deep_to_draft() -> None:
    """The first tree is the largest, and the best plan follows from it, not from hundreds of rounds."""
    planner = RoundPlanner(CHEAP, 12, NODES)
    plans = simulate(planner, 0.97, 6, max_depth=12)
    assert plans[0] == RoundPlan(12, 32) and min(plan.levels for plan in plans) >= 10
    shallow = simulate(RoundPlanner(CHEAP, 12, NODES), 0.3, 12, max_depth=12)
    assert shallow[0] == RoundPlan(12, 32) and max(plan.levels for plan in shallow[2:]) <= 2


def test_a_look_is_no_dearer_than_two_rounds() -> None:
    seconds = RoundSeconds(0.1, 0.1, {1: 1.0, 8: 1.1, 16: 2.0, 32: 9.0})
    plans = simulate(RoundPlanner(seconds, 4, NODES), 0.02, 500)
    assert max(seconds.of(*plan) for plan in plans) <= 2 * 1.5 and PLAIN in plans
    assert {plan.nodes for plan in plans} == {1, 8, 16}


def test_hope_returns_when_the_text_changes() -> None:
    planner = RoundPlanner(CHEAP, 4, NODES)
    simulate(planner, 0.02, 400)
    assert planner.choose(4, 32) == PLAIN
    assert simulate(planner, 0.95, 3000)[-1] != PLAIN


def test_limits_of_a_request_are_kept() -> None:
    planner = RoundPlanner(CHEAP, 4, NODES)
    for depth, nodes in itertools.product((1, 2, 4, 9), (2, 8, 20, 500)):
        plan = planner.choose(depth, nodes)
        assert plan.levels <= min(depth, 4) and plan.nodes <= planner.fitting(nodes) and plan.nodes in NODES
    assert planner.choose(0, 32) == PLAIN
    assert [planner.fitting(n) for n in (1, 2, 8, 9, 32, 99)] == [1, 8, 8, 16, 32, 32]


def test_what_takes_longer_than_modelled_is_avoided() -> None:
    planner = RoundPlanner(CHEAP, 4, NODES)
    for _ in range(100):
        planner.observe(PLAIN, [], [], 1.0)
        for nodes in (8, 16, 32):
            for levels in (1, 2, 3, 4):
                plan = RoundPlan(levels, nodes)
                planner.observe(plan, [tree([0.8] * levels)], [1], 8.0)
    assert planner.rate(PLAIN) > max(planner.rate(RoundPlan(d, n)) for d in (1, 2, 3, 4) for n in (8, 16, 32))


def test_seconds_of_a_round() -> None:
    seconds = RoundSeconds(3.0, 2.0, {1: 10.0, 8: 11.0}, host=0.5)
    assert seconds.of(0, 1) == 10.5 and seconds.of(1, 8) == 14.5 and seconds.of(4, 8) == 20.5


@pytest.mark.parametrize("promised", [0.3, 0.9])
def test_promises_are_measured_against_what_was_accepted(promised: float) -> None:
    """Trees that promise much and hold nothing are worth nothing."""
    planner = RoundPlanner(CHEAP, 4, NODES)
    for _ in range(300):
        plan = RoundPlan(4, 8)
        planner.observe(plan, [tree([promised] * 4)], [0], planner.seconds.of(*plan))
    assert planner.rate(RoundPlan(4, 8)) < planner.rate(PLAIN)
