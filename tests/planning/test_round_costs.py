"""What a round takes: the curve at other contexts, and what measured rounds correct of it."""

import dataclasses

import numpy as np
import pytest

from tests.helpers.models import quick
from treespec import SpecConfig
from treespec.planning.draft_plan import Drafted
from treespec.planning.round_costs import CostCurve, RoundCosts, RoundSeconds, split_drafting
from treespec.request import Request
from treespec.sampling_params import SamplingParams

CURVE = CostCurve((1, 2, 4, 8, 16), (1e-3, 1.1e-3, 1.3e-3, 1.7e-3, 2.5e-3), 1e-4, context=128)
LONG = dataclasses.replace(CURVE, position_seconds=1e-6, row_position_seconds=2e-7)
NOTHING = Drafted(0, 0)


def batch_of(*contexts: int) -> list[Request]:
    requests = [Request([1] * (context + 1), SamplingParams(), SpecConfig()) for context in contexts]
    for request, context in zip(requests, contexts, strict=True):
        request.context_len = context
    return requests


def costs_at(curve: CostCurve, *contexts: int) -> RoundCosts:
    costs = RoundCosts(curve, learn_seconds=0.0)
    costs.begin(batch_of(*contexts))
    return costs


def test_at_its_own_context_the_curve_stands() -> None:
    for curve in (CURVE, LONG):
        costs = costs_at(curve, 128)
        for rows in (1, 7, 16, 40, 200):
            assert costs.verify(rows) == pytest.approx(float(curve.verify(rows)))
    costs = costs_at(LONG, 100, 156)  # 128 on average
    assert costs.verify(9) == pytest.approx(float(LONG.verify(9)))


def test_longer_contexts_make_every_row_dearer() -> None:
    costs = costs_at(LONG, 2128)
    assert costs.verify(1) == pytest.approx(1e-3 + 2000e-6)
    assert costs.verify(16) == pytest.approx(2.5e-3 + 2000 * (1e-6 + 15 * 2e-7))
    two = costs_at(LONG, 1128, 3128)
    assert two.verify(2) == pytest.approx(float(LONG.verify(2)) + 2 * 2000e-6)
    assert two.verify_each(np.arange(2, 30)) == pytest.approx([two.verify(rows) for rows in range(2, 30)])
    assert costs_at(LONG, 0).verify(1) < 1e-3
    steep = dataclasses.replace(LONG, position_seconds=1e-3)
    assert costs_at(steep, 0).verify(1) > 0, "shorter contexts never cost nothing"


def learn(costs: RoundCosts, rows: int, forward: float, host: float = 1e-4, drafting: bool = True) -> None:
    costs.learn(RoundSeconds(0.0, 0.0, forward, host), rows, NOTHING, drafting)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_rounds_of_different_contexts_teach_what_positions_take(factor: float) -> None:
    truth = {"position_seconds": factor * LONG.position_seconds}
    truth["row_position_seconds"] = factor * LONG.row_position_seconds
    true, known = RoundCosts(dataclasses.replace(LONG, **truth)), RoundCosts(LONG)
    for turn in range(400):
        for costs in (true, known):
            costs.begin(batch_of(6000 if turn // 50 % 2 else 200))
        rows = (1, 4, 16)[turn % 3]
        learn(known, rows, true.verify(rows))
    for costs in (true, known):
        costs.begin(batch_of(3000))
    modelled, expected = (costs.verify_each(np.arange(1, 17)) / costs.verify(1) for costs in (known, true))
    assert modelled == pytest.approx(expected, rel=0.02)


def price(costs: RoundCosts, rows: int) -> float:
    """What these rows add to a pass over one, in such passes."""
    return costs.verify(rows) / costs.verify(1) - 1


DISTURBED = {
    "flat": (2.5e-3,) * 4,
    "one row too slow": (2e-3, 1.3e-3, 1.7e-3, 2.5e-3),
    "one row too fast": (6e-4, 1.3e-3, 1.7e-3, 2.5e-3),
    "steep": (1e-3, 2.2e-3, 3.8e-3, 7e-3),
    "shallow": (1e-3, 1.06e-3, 1.14e-3, 1.3e-3),
    "slow": (3e-3, 3.9e-3, 5.1e-3, 7.5e-3),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("disturbance", DISTURBED)
def test_rounds_correct_a_disturbed_curve(disturbance: str, seed: int) -> None:
    """By trees of different sizes alone, no plain decoding between them: after a few dozen rounds what rows are
    thought to take is as good as right, or a good deal nearer to it."""
    wrong = dataclasses.replace(CURVE, rows=(1, 4, 8, 16), verify_seconds=DISTURBED[disturbance])
    costs, rng = costs_at(wrong, 128), np.random.default_rng(seed)
    truth = float(CURVE.verify(16) / CURVE.verify(1)) - 1
    before = abs(price(costs, 16) - truth)
    for _ in range(60):
        rows = int(rng.integers(2, 12))
        learn(costs, rows, float(CURVE.verify(rows)) * rng.lognormal(0.0, 0.03))
    assert abs(price(costs, 16) - truth) < max(0.1 * truth, 0.5 * before)


@pytest.mark.parametrize("seed", quick(range(4), (0,)))
@pytest.mark.parametrize(("sizes", "near"), [((2, 3, 8), 0.3), ((2, 3), 0.4)])
def test_a_busy_machine_makes_nothing_seem_dear(sizes: tuple[int, ...], near: float, seed: int) -> None:
    """Interruptions of many times a round's length strike whatever runs, the longer the oftener, and all times vary, by
    more than what a small tree adds. What is learned stays near what the parts take."""
    costs, rng = costs_at(CURVE, 128), np.random.default_rng(seed)

    def disturbed(seconds: float) -> float:
        interruption = rng.uniform(2e-3, 30e-3) if rng.random() < 0.15 * seconds / 1e-3 else 0.0
        return seconds * rng.lognormal(0.0, 0.15) + interruption

    hosts, scales = {"plain": 4e-5, "search": 8e-5, "tree": 1.5e-4}, []
    truth = float(CURVE.verify(8) / CURVE.verify(1)) - 1
    for _ in range(2000):
        rows, drafting = int(rng.choice([1] * len(sizes) + [*sizes])), rng.random() < 0.7
        rows = rows if drafting else 1
        host = hosts["tree" if rows > 1 else "search" if drafting else "plain"]
        learn(costs, rows, disturbed(float(CURVE.verify(rows))), disturbed(host), drafting)
        scales.append(price(costs, 8) / truth)
    assert np.median(scales[200:]) == pytest.approx(1, abs=near)
    assert [costs.host(work) for work in hosts] == pytest.approx(list(hosts.values()), rel=0.2)


def test_a_machine_that_is_slower_from_now_on_makes_no_rows_dear() -> None:
    """Whatever is decoded then, for however long; and it is as fast as before in the end."""
    costs, truth = costs_at(CURVE, 128), float(CURVE.verify(8) / CURVE.verify(1)) - 1
    for slowness, sizes in ((1, (1, 1)), (1, (8, 8)), (3, (8, 8)), (3, (1, 1)), (3, (6, 10)), (1, (6, 10))):
        for turn in range(60):
            rows = sizes[turn % 2]
            learn(costs, rows, slowness * float(CURVE.verify(rows)))
            assert price(costs, 8) == pytest.approx(truth, rel=0.2), (slowness, sizes, turn)


def test_the_hosts_work_is_known_by_what_it_did() -> None:
    """Trees of SSMs, on which it works longer, say nothing of guesses without a pass."""
    costs = costs_at(CURVE, 128)
    works = {"plain": 1e-5, "search": 4e-5, "tree": 9e-5, "drafted": 9e-4}
    for work, host in [*works.items()] * 60:
        rows, drafted = (8, NOTHING) if work == "tree" else (8, Drafted(2, 2, 2)) if work == "drafted" else (1, NOTHING)
        costs.learn(RoundSeconds(0.0, 0.0, float(CURVE.verify(rows)), host), rows, drafted, work != "plain")
    assert [costs.host(work) for work in works] == pytest.approx([*works.values()], rel=0.02)
    assert costs.plain == pytest.approx(1.01e-3, rel=0.01)
    assert costs.speculative(8, NOTHING) - costs.verify(8) == pytest.approx(9e-5, rel=0.1)


DRAFTING = dataclasses.replace(CURVE, draft_seconds=2e-4, draft_start_seconds=2e-4, ssm_seconds=1e-4)


def draft(costs: RoundCosts, levels: int, seconds: float, slowness: float = 1.0) -> None:
    parts = slowness * np.array([seconds, 0.0, float(CURVE.verify(8)), 1e-4])
    costs.learn(RoundSeconds(*parts), 8, Drafted(levels, levels, levels), True)


@pytest.mark.parametrize("times", [(1.0, 1.5, 2), (1.0, 0.9, 2), (1.0, 2.5, 2), (1.0, 1.0, 1)])
def test_disturbed_times_make_no_part_of_drafting_free(times: tuple[float, float, int]) -> None:
    start, level = split_drafting(*times)
    assert min(start, level) > 0 and start + times[2] * level == pytest.approx(times[1])


@pytest.mark.parametrize("slowness", [1.0, 5.0])
def test_rounds_teach_what_drafting_takes(slowness: float) -> None:
    costs, rng = costs_at(DRAFTING, 128), np.random.default_rng(0)
    for _ in range(600):
        levels = int(rng.choice([1, 2, 4, 8]))
        draft(costs, levels, 2 * DRAFTING.draft(Drafted(levels, levels, levels)) * rng.lognormal(0.0, 0.02), slowness)
    for levels in (1, 3, 8):
        expected = 2 * DRAFTING.draft(Drafted(levels, levels, levels))
        assert costs.curve.draft(Drafted(levels, levels, levels)) == pytest.approx(expected, rel=0.05)
    assert costs.curve.draft(NOTHING) == 0 == DRAFTING.draft(Drafted(0, 0, 0))


@pytest.mark.parametrize("seed", quick(range(4), (0,)))
def test_on_a_busy_machine_drafting_does_not_seem_dear(seed: int) -> None:
    costs, rng = costs_at(DRAFTING, 128), np.random.default_rng(seed)
    learned = []
    for turn in range(2000):
        levels = int(rng.choice([1, 2, 4, 8]))
        took = DRAFTING.draft(Drafted(levels, levels, levels)) * rng.lognormal(0.0, 0.15)
        draft(costs, levels, took + (rng.uniform(2e-3, 30e-3) if rng.random() < 0.1 * took / 1e-3 else 0.0))
        learned.append(costs.curve.draft(Drafted(3, 3, 3)) / DRAFTING.draft(Drafted(3, 3, 3)))
        assert turn > 0 or learned[0] < 1.04, "one round teaches little"
    assert np.median(learned[200:]) == pytest.approx(1, abs=0.2)
