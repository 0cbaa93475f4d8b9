"""The planner of captured rounds, whose levels and nodes are chosen before they start: the same costs, calibration and
backoff as where trees are cut afterwards."""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from tests.helpers.models import at_fixed_costs
from treespec import SamplingParams, SpecConfig
from treespec.planning.draft_plan import Drafted
from treespec.planning.learning import RoundShapes, TreeYield
from treespec.planning.planner import Planner
from treespec.planning.round_costs import CostCurve, RoundSeconds
from treespec.request import Request

NODES = (1, 8, 16, 32)
SHAPES = RoundShapes(4, NODES)
CHEAP = CostCurve(NODES, (1.0, 1.05, 1.1, 1.2), 0.1)
PLAIN = (0, 1)


@dataclass
class Chain:
    """A chain whose edges have these probabilities."""

    chances: list[float]

    @property
    def values(self) -> np.ndarray:
        return np.cumprod([1.0, *self.chances])

    @property
    def depths(self) -> np.ndarray:
        return np.arange(1 + len(self.chances))


def request_of(spec: SpecConfig | None = None, left: int = 10**6) -> Request:
    return Request([1, 2, 3], SamplingParams(max_tokens=left), spec or SpecConfig())


def planner_of(curve: CostCurve = CHEAP, shapes: RoundShapes = SHAPES) -> Planner:
    return at_fixed_costs(Planner(curve, shapes))


def simulate(planner: Planner, chance: float, rounds: int, promised: float | None = None) -> list[tuple[int, int]]:
    """Levels and nodes of rounds over text of which each level is predicted with one probability."""
    rng, plans, request = np.random.default_rng(0), [], request_of()
    assert planner.shapes is not None
    for _ in range(rounds):
        [plan] = planner.draft_plans([request], 10**7)
        accepted = next((d for d in range(plan.levels) if rng.random() >= chance), plan.levels)
        tree = Chain([chance if promised is None else promised] * plan.levels)
        drafted = Drafted(plan.levels, plan.levels, plan.levels)
        planner.observe([request], [tree], [accepted + 1], None, drafted, planner.shapes.fitting(plan.nodes))
        plans.append((plan.levels, plan.nodes))
    return plans


def test_a_round_is_observed_after_the_next_was_planned() -> None:
    """The planner learns the same from it, even if the next round has another batch and is plain."""
    learned = []
    for late in (False, True):
        planner = Planner(CHEAP, shapes=SHAPES)
        request, other = request_of(), request_of(SpecConfig.resolve("off", SpecConfig()))
        planner.draft_plans([other, next_one := request_of(left=3)], 10**7)
        request.context_len = 500
        for _ in range(6):
            [plan] = planner.draft_plans([request], 10**7)
            planned = planner.round
            if late:
                planner.draft_plans([other, next_one], 10**7)
            drafted, seconds = Drafted(plan.levels, plan.levels, plan.levels), RoundSeconds(0.1, 0.0, 1.2, 0.05)
            tree, nodes = Chain([0.8] * plan.levels), SHAPES.fitting(plan.nodes)
            planner.observe([request], [tree], [2], seconds, drafted, nodes, planned)
        learned.append((planner.rate, planner.costs.plain, planner.draft_plans([request], 10**7)))
        learned[-1] += (planner.costs.verify(8), planner.costs.host("drafted"))
    assert learned[0] == learned[1] and learned[0][2][0].levels


def test_text_that_drafts_predict_is_speculated_on() -> None:
    plans = simulate(planner_of(), 0.9, 400)
    assert plans[-100:].count((4, 8)) >= 95, "a chain of four fits into the smallest graph; larger ones are tried"


def test_text_that_drafts_do_not_predict_is_decoded_plainly() -> None:
    plans = simulate(planner_of(), 0.02, 3000)
    assert plans[0] != PLAIN and plans[-1000:].count(PLAIN) > 985


def test_what_could_not_pay_is_never_tried() -> None:
    """Were all of it accepted, it would still be slower."""
    dear = CostCurve(NODES, (1.0,) * len(NODES), 4.0)
    assert set(simulate(planner_of(dear), 0.9, 300)) == {PLAIN}


def test_how_deep_to_draft_is_learned_within_some_rounds() -> None:
    deep = simulate(planner_of(shapes=RoundShapes(12, NODES)), 0.97, 60)
    assert min(levels for levels, _ in deep[-20:]) >= 10
    shallow = simulate(planner_of(shapes=RoundShapes(12, NODES)), 0.3, 60)
    assert sum(levels <= 2 for levels, _ in shallow[-20:]) >= 18, "deeper trees are tried now and then"


def test_drafting_begins_again_when_the_text_changes() -> None:
    planner = planner_of()
    assert simulate(planner, 0.02, 400)[-1] == PLAIN
    assert simulate(planner, 0.95, 1500)[-1] != PLAIN


def test_wider_trees_are_tried_and_kept_where_they_hold_more() -> None:
    """Of each level the eight likeliest tokens hold 0.1 each: a tree of 8 rows holds 0.7, one of 32 rows more."""

    class Bush(Chain):
        @property
        def values(self) -> np.ndarray:
            return np.concatenate([[1.0], np.full(8, 0.1), np.full(23, 0.08)])

        @property
        def depths(self) -> np.ndarray:
            return np.concatenate([[0], np.ones(8, int), np.full(23, 2)])

    expected = TreeYield(SHAPES)
    expected.observe(4, 32, [Bush([])])
    assert expected.promised[3, 1:].tolist() == pytest.approx([0.7, 0.8 + 7 * 0.08, 0.8 + 23 * 0.08])
    assert expected.promised[0, 1:].tolist() == pytest.approx([0.7, 0.8, 0.8])
    planner, request, seen = planner_of(), request_of(), []
    for _ in range(600):
        [plan] = planner.draft_plans([request], 10**7)
        rows = SHAPES.fitting(plan.nodes)
        kept = Bush([]).depths[:rows] <= plan.levels
        cut = SimpleNamespace(values=Bush([]).values[:rows][kept], depths=Bush([]).depths[:rows][kept])
        drafted = Drafted(plan.levels, plan.levels, plan.levels)
        planner.observe([request], [cut], [1 + float(cut.values[1:].sum())], None, drafted, rows)  # type: ignore[list-item]
        seen.append((plan.levels, plan.nodes))
    assert seen[-50:].count((2, 32)) > 40


def test_limits_of_a_request_are_kept() -> None:
    for depth, left, nodes in itertools.product((1, 2, 4, 9), (1, 2, 5), ("auto", 2, 8, 20)):
        planner = planner_of()
        [plan] = planner.draft_plans([request_of(SpecConfig(nodes=nodes, max_depth=depth), left)], 10**7)
        assert plan.levels <= min(depth, 4, left - 1) and plan.nodes <= (32 if nodes == "auto" else nodes)
        assert (plan.levels == 0) == (left == 1) and (plan.levels > 0 or plan.nodes == 1)
        assert plan.plain_reasons == (("room",) if left == 1 else ())
    assert [SHAPES.fitting(n) for n in (1, 2, 8, 9, 32, 99)] == [1, 8, 8, 16, 32, 32]


def test_a_fixed_tree_beside_adaptive_and_plain_ones() -> None:
    planner = planner_of(CostCurve(NODES, (1.0,) * len(NODES), 4.0))
    requests = [request_of(), request_of(SpecConfig(nodes=16)), request_of(SpecConfig(nodes=1))]
    plans = planner.draft_plans(requests, 10**7)
    assert [(plan.levels, plan.nodes) for plan in plans] == [PLAIN, (4, 16), PLAIN], (
        "an int is obeyed, whatever it costs"
    )
    assert [plan.plain_reasons for plan in plans] == [("drafting_cost",), (), ("off",)]
    planner.state.ssms.pause_left = 9
    assert planner.draft_plans(requests, 10**7)[0].plain_reasons == ("drafting_paused",)


@pytest.mark.parametrize("promised", [0.3, 0.9])
def test_promises_are_measured_against_what_was_accepted(promised: float) -> None:
    assert simulate(planner_of(), 0.0, 1500, promised)[-1000:].count(PLAIN) > 950
