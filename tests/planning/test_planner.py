"""The planner: what pays is drafted and verified, what does not is not, in modelled seconds."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from tests.helpers.models import at_fixed_costs, greedy, make_draft, new_folder, open_llm, random_prompts, tiny, tree_of
from treespec import LLM, SpecConfig
from treespec.drawing.recording import watch
from treespec.planning.draft_plan import Drafted
from treespec.planning.learning import CREDIT, RETRY_CREDIT
from treespec.planning.planner import Planner
from treespec.planning.round_costs import CostCurve, RoundSeconds
from treespec.request import Request
from treespec.sampling_params import SamplingParams
from treespec.tree import TokenTree

COST = CostCurve((1, 16, 64), (1e-3, 1.3e-3, 3e-3), draft_seconds=2e-4, ssm_seconds=1e-4)
STARTING = dataclasses.replace(COST, draft_start_seconds=3e-4)
DEAR_LEVELS = CostCurve((1, 8, 16, 32), (22e-3, 36e-3, 66e-3, 126e-3), draft_seconds=9e-3)
AUTO = SpecConfig()


def request_of(spec: SpecConfig = AUTO) -> Request:
    return Request([1, 2, 3], SamplingParams(max_tokens=100), spec)


def random_tree(rng: np.random.Generator, nodes: int) -> TokenTree:
    paths: dict[tuple[int, ...], float] = {}
    while len(paths) < nodes:
        above = [(), *paths][rng.integers(len(paths) + 1)]
        if len(above) < 5:
            paths[(*above, int(rng.integers(1, 400)))] = float(rng.uniform(0, 0.9))
    return tree_of(3, paths)


def planner_at(gain: float, requests: list[Request], cost: CostCurve = COST) -> Planner:
    """Time is worth `gain` times what plain decoding makes of it; tokens of all requests are worth the same."""
    planner = Planner(cost)
    planner.draft_plans(requests, 256, others_wait=True)
    planner.state.gain = gain
    planner.draft_plans(requests, 256, others_wait=True)
    return planner


@pytest.mark.parametrize("batch", [1, 3])
def test_cut_keeps_what_is_worth_its_rows(batch: int) -> None:
    """Against every possible number of rows: the best by tokens promised less the price of their time."""
    rng = np.random.default_rng(batch)
    for gain in (1.0, 1.5, 3.0):
        requests = [request_of() for _ in range(batch)]
        trees = [random_tree(rng, int(rng.integers(1, 24))) for _ in requests]
        planner = planner_at(gain, requests)
        kept = planner.cut(requests, trees)
        for tree in kept:
            tree.check_integrity()
        calibrated = [tree.values * planner.calibration**tree.depths for tree in (*trees, *kept)]
        values = np.sort(np.concatenate([values[1:] for values in calibrated[:batch]]))[::-1]
        price = planner.rate
        worth = [values[:n].sum() - price * float(COST.verify(batch + n)) for n in range(len(values) + 1)]
        assert sum(map(len, kept)) - batch == int(np.argmax(worth))
        assert np.concatenate([values[1:] for values in calibrated[batch:]]).sum() == pytest.approx(
            values[: np.argmax(worth)].sum()
        )


def test_an_int_is_obeyed() -> None:
    requests = [request_of(SpecConfig(nodes=7)), request_of()]
    trees = [random_tree(np.random.default_rng(i), 20) for i in range(2)]
    planner = planner_at(50.0, requests)  # time is too dear for any node
    assert [len(tree) for tree in planner.cut(requests, trees)] == [7, 1]


@pytest.mark.parametrize("batch", [1, 3])
def test_ssms_are_expected_where_a_first_level_pays(batch: int) -> None:
    requests = [request_of() for _ in range(batch)]
    planner, dear = Planner(COST), Planner(dataclasses.replace(COST, draft_seconds=1.0))
    assert planner.expects_ssms(requests) and not dear.expects_ssms(requests)
    planner.draft_plans(requests, 256)
    planner.state.ssms.pause_left = 9
    assert not planner.expects_ssms(requests), "they rest in batches of this size"
    assert planner.expects_ssms([request_of() for _ in range(8)]), "and in no other"


def test_a_level_is_drafted_where_it_promises_more_than_its_time() -> None:
    """Its time includes that of a row of the target pass; the first one pays for the start of drafting too."""
    request, only = request_of(), np.array([0])
    row = float(COST.verify(17) - COST.verify(1)) / 16
    for gain, opened in itertools.product((1.0, 1.5, 3.0), (0.4, 0.7, 1.0)):
        planner = planner_at(gain, [request], STARTING)
        rule, start, level = planner.level_rule(), gain / 1e-3 * 3e-4, gain / 1e-3 * (2e-4 + row)
        pays = opened * rule.first_gain > start + level
        assert rule.worth_a_level(only, np.array([opened]), None).tolist() == [pays]
        if opened == 1:
            assert pays == (planner.draft_plans([request], 256)[0].levels > 0)
        for depth, reached in itertools.product((1, 4), (0.2, 0.5, 0.9)):
            decision = rule.worth_a_level(only, np.array([opened]), np.array([reached]), depth)
            expected = rule.calibration ** (depth + 1) * opened * reached
            assert decision.tolist() == [expected > level], "the start is paid already"


def test_only_trees_that_pay_grow_on() -> None:
    dear = dataclasses.replace(COST, draft_request_seconds=1e-4)
    planner = Planner(dear)
    planner.draft_plans([request_of()] * 3, 256, others_wait=True)
    price = planner.rate * 1e-4
    opened, reached = np.array([0.9, 0.5 * price, 0.9]), np.ones(3)
    rule = planner.level_rule()
    assert rule.worth_a_level(np.arange(3), opened, reached).tolist() == [True, False, True]
    assert not rule.worth_a_level(np.arange(3), np.full(3, 1.1 * price), reached).any(), "the level itself has a cost"


def test_tokens_count_for_the_request_that_ends_last() -> None:
    """One of four has nothing that can be guessed: the batch ends with it, whatever the others do."""
    requests = [request_of() for _ in range(4)]
    for request, speed in zip(requests, (1, 3, 3, 3), strict=True):
        request.target_passes = 10
        request.tokens += [7] * (10 * speed)
    planner = Planner(COST)
    planner.draft_plans(requests, 256)
    own_share = 1 - float(COST.verify(3) / COST.verify(4))
    assert planner.round.token_weights[0] == 1, "it ends last"
    lateness = (planner.round.token_weights[1] - own_share) / (1 - own_share)
    assert planner.round.token_weights[1:] == [planner.round.token_weights[1]] * 3 and 0.05 < lateness < 0.25, (
        "the others in a third of the time"
    )
    planner.draft_plans(requests, 256, others_wait=True)
    assert set(planner.round.token_weights) == {1.0}, "each that ends makes room for another"


TRUE = CostCurve(
    (1, 2, 4, 6, 8, 12, 16, 32),
    (2e-3, 2.1e-3, 2.5e-3, 3e-3, 3.6e-3, 5.4e-3, 6.6e-3, 12e-3),
    draft_seconds=1.5e-4,
    draft_start_seconds=2e-4,
)
WRONG = {
    "correct": TRUE,
    "rows too dear": dataclasses.replace(
        TRUE, verify_seconds=(2e-3, 2.1e-3, 2.5e-3, 4.5e-3, 5.4e-3, 8.1e-3, 1e-2, 18e-3)
    ),
    "rows too cheap": dataclasses.replace(
        TRUE, verify_seconds=(2e-3, 2e-3, 2e-3, 2.1e-3, 2.4e-3, 3.6e-3, 4.4e-3, 8e-3)
    ),
    "levels too dear": dataclasses.replace(TRUE, draft_seconds=6e-4, draft_start_seconds=1e-4),
}


def decisions(curve: CostCurve) -> np.ndarray:
    """How many nodes a planner with these costs verifies on average, and how many of 100 second levels it drafts."""
    rng, request = np.random.default_rng(7), request_of()
    planner = planner_at(1.3, [request], curve)
    nodes = [len(planner.cut([request], [random_tree(rng, 24)])[0]) for _ in range(50)]
    rule, masses, trees = planner.level_rule(), np.linspace(0.01, 1, 100), np.zeros(1, dtype=np.int64)
    further = [rule.worth_a_level(trees, np.array([mass]), np.ones(1)).sum() for mass in masses]
    return np.array([np.mean(nodes), np.sum(further)])


@pytest.mark.parametrize("name", WRONG)
def test_rounds_teach_a_planner_to_choose_by_what_they_take(name: str) -> None:
    """The machine's speed drifts, and a twentieth of the times are thrice as long."""
    planner, rng, speed = Planner(WRONG[name]), np.random.default_rng(1), 1.0

    def took(seconds: float) -> float:
        return seconds * speed * rng.lognormal(0.0, 0.05) * (3 if rng.random() < 0.05 else 1)

    for answer in range(12):
        request = request_of()
        for _ in range(40):
            speed = float(np.clip(speed * rng.lognormal(0.0, 0.03), 0.7, 1.7))
            planner.draft_plans([request], 256)
            levels = int(rng.integers(0, 4)) if answer % 3 else 0  # every third answer is plain
            tree = planner.cut([request], [random_tree(rng, 4 * levels)])[0] if levels else tree_of(3, {})
            drafted = Drafted(levels, levels, levels)
            seconds = took(TRUE.draft(drafted)), 0.0, took(float(TRUE.verify(len(tree)))), took(1e-4)
            planner.observe([request], [tree], [min(1 + levels, len(tree))], RoundSeconds(*seconds), drafted)
    right, before, after = (decisions(curve) for curve in (TRUE, WRONG[name], planner.costs.curve))
    assert np.abs(after / right - 1).max() < 0.12
    assert name == "correct" or np.abs(before / right - 1).max() > 0.2


def test_a_plan_says_why_it_asks_no_sources() -> None:
    cheap, dear = Planner(COST), Planner(dataclasses.replace(COST, draft_seconds=1.0))
    for planner, ssms, model_free, reasons in (
        (cheap, 0, 0, ()),
        (dear, 0, 0, ("drafting_cost",)),
        (cheap, 9, 0, ("drafting_paused",)),
        (cheap, 0, 9, ("model_free_paused",)),
        (cheap, 9, 9, ("drafting_paused", "model_free_paused")),
    ):
        planner.draft_plans([request := request_of()], 256)
        planner.state.ssms.pause_left, planner.state.model_free.pause_left = ssms, model_free
        [plan] = planner.draft_plans([request], 256, lambda _: 0)
        assert plan.plain_reasons == reasons
    assert cheap.draft_plans([request], 256)[0].plain_reasons == ("model_free_paused",), "an engine without SSMs"
    assert not cheap.draft_plans([request_of()], 256)[0].plain_reasons, "another text"


@pytest.mark.parametrize("drafts", [True, False])
def test_what_loses_rests_for_longer_and_longer(drafts: bool) -> None:
    """Trees whose guesses never hold: what is lost before each rest is bounded, and rests double."""
    planner, request = at_fixed_costs(Planner(COST)), request_of()
    asked = []
    for _ in range(600):
        plan = planner.draft_plans([request], 256)[0]
        asked.append(plan.levels > 0 if drafts else plan.max_depth > 0)
        drafted = Drafted(1, 1, 1) if drafts and asked[-1] else Drafted(0, 0)
        planner.observe([request], [tree_of(3, {(5,): 0.9} if asked[-1] else {})], [1], drafted=drafted)
    rests = [sum(1 for _ in group) for kind, group in itertools.groupby(asked) if not kind]
    if drafts:  # what the SSMs promise was corrected: no level is worth its time long before the credit is used up
        assert max(sum(asked[:300]), sum(asked[300:])) < 50
    else:
        assert rests[:2] == [63, 127]
    round_seconds = float(COST.verify(2)) + (COST.draft(Drafted(1, 1, 1)) if drafts else 0.0)
    lost = sum(asked) * (round_seconds / float(COST.verify(1)) - 1)
    assert lost < CREDIT + len(rests) * RETRY_CREDIT, "in rounds of plain decoding"
    assert lost < 0.03 * len(asked)


def test_a_request_that_failed_does_not_count() -> None:
    planner, requests = Planner(COST), [request_of() for _ in range(3)]
    planner.draft_plans(requests, 256)
    trees = planner.cut(requests, [tree_of(3, {(5,): 0.9})] * 3)
    planner.observe(requests[1:], trees[1:], [4, 4], RoundSeconds(1e-3, 0.0, 1e-3, 1e-4), Drafted(1, 1, 3))
    assert planner.state.gain > 1.2


def test_a_long_prompt_is_not_read_for_a_few_tokens() -> None:
    planner = Planner(dataclasses.replace(COST, read_seconds=1e-5))
    few, many = request_of(), Request([1, 2, 3], SamplingParams(max_tokens=5000), AUTO)
    few.max_tokens = 8
    assert [plan.levels > 0 for plan in planner.draft_plans([few, many], 9000, lambda _: 3000, True)] == [False, True]
    assert [plan.levels > 0 for plan in planner.draft_plans([few, many], 9000, lambda _: 0, True)] == [True, True]


def test_ssms_draft_together_where_their_additions_pay() -> None:
    cheap, dear = (Planner(dataclasses.replace(COST, ssm_seconds=seconds)) for seconds in (1e-6, 2e-3))
    for spec in (AUTO, SpecConfig(nodes=16)):
        least = [planner.draft_plans([request_of(spec)], 256)[0].least_addition for planner in (cheap, dear)]
        assert 0.001 < least[0] < 0.003 and least[1] > 1
    assert dear.draft_plans([request_of(SpecConfig(max_ssms=2))], 256)[0].least_addition == 0, "an int is obeyed"


def answer(planner: Planner, trust: float, sure: float, seed: int) -> tuple[float, float]:
    """Modelled seconds and target passes of an answer, per 96 tokens.

    The draft has a probability of `sure` or 0.5 for each next token, which is right `trust` times as often.
    """
    request, rng = request_of(), np.random.default_rng(seed)
    chances, only, place, seconds, passes = rng.choice([sure, 0.5], 200), np.array([0]), 0, 0.0, 0
    holds = rng.random(200) < trust * chances
    while place < 96:
        most, levels = planner.draft_plans([request], 256)[0].levels, 0
        rule, mass, reached = planner.level_rule(), np.ones(1), None
        while levels < most and rule.worth_a_level(only, mass, reached, levels)[0]:
            reached = chances[place + levels : place + levels + 1]
            mass, levels = mass * reached, levels + 1
        paths = {(5,) * (i + 1): float(chances[place + i]) for i in range(levels)}
        [tree] = planner.cut([request], [tree_of(3, paths)])
        accepted = int(np.argmin([*holds[place : place + len(tree) - 1], False]))
        planner.observe([request], [tree], [accepted + 1], None, Drafted(levels, levels, levels))
        seconds += float(DEAR_LEVELS.verify(len(tree))) + DEAR_LEVELS.draft(Drafted(levels, levels, levels))
        place, passes = place + accepted + 1, passes + 1
    return seconds * 96 / place, passes * 96 / place


@pytest.mark.parametrize(("trust", "sure", "most"), [(1.0, 0.97, 1.0), (0.7, 0.97, 1.04), (0.45, 0.9, 1.05)])
def test_a_first_answer_takes_hardly_longer_than_with_the_best_depth(trust: float, sure: float, most: float) -> None:
    """Even if the draft is too sure. A level costs 0.4 of a pass, so the best fixed depths are 1 and 0 (plain)."""
    one_level = float(DEAR_LEVELS.verify(2)) + DEAR_LEVELS.draft(Drafted(1, 1, 1))
    best = 96 * min(one_level / (1 + trust * (sure + 0.5) / 2), float(DEAR_LEVELS.verify(1)))
    assert np.mean([answer(Planner(DEAR_LEVELS), trust, sure, seed)[0] for seed in range(10)]) < most * best


def test_texts_that_nothing_predicts_do_not_end_drafting_for_others() -> None:
    useless = [Planner(DEAR_LEVELS) for _ in range(6)]
    seconds = [[answer(planner, 0.05, 0.9, seed)[0] for seed in range(30)] for planner in useless]
    assert np.mean([row[3:] for row in seconds]) < 1.03 * 96 * float(DEAR_LEVELS.verify(1))
    passes = np.array([[answer(planner, 1.0, 0.97, 99 + i)[1] for i in range(3)] for planner in useless])
    fresh = np.mean([answer(Planner(DEAR_LEVELS), 1.0, 0.97, 101)[1] for _ in useless])
    assert passes[:, 2].mean() < 1.1 * fresh


class Recorded(Planner):
    """Keeps what was drafted in every round."""

    def __init__(self, curve: CostCurve):
        super().__init__(curve)
        self.drafted: list[Drafted] = []

    def observe(self, *round: Any) -> None:
        self.drafted.append(round[4])
        super().observe(*round)


def modelled_speedup(llm: LLM, spec: SpecConfig, tokens: int) -> tuple[float, float]:
    """(speed-up over plain decoding, share of rounds with drafting), in the cost curve's seconds."""
    planner, cost = llm.engine.host.planner, llm.engine.host.planner.costs.curve
    assert isinstance(planner, Recorded)
    planner.drafted.clear()
    with watch(llm.engine) as rounds:
        llm.generate(random_prompts((40,)), greedy(tokens), spec=spec)
    drafted = planner.drafted
    seconds = sum(float(cost.verify(len(each.tree))) for each in rounds)
    seconds += sum(cost.draft(d) for d in drafted)
    return tokens * float(cost.verify(1)) / seconds, sum(d.levels > 0 for d in drafted) / len(rounds)


@pytest.fixture(scope="module")
def drafts() -> dict[str, LLM]:
    """Engines with a draft that is nearly the target, and with one that knows nothing; drafting costs a fifth."""
    target, good = tiny()
    bad = make_draft(new_folder("bad") / "bad", target, 10, 3.0)
    llms = {"good": open_llm(target, [good[0]], max_num_seqs=4), "bad": open_llm(target, [bad], max_num_seqs=4)}
    for llm in llms.values():
        llm.engine.host.planner = at_fixed_costs(Recorded(COST))
    return llms


def test_good_guesses_are_used(drafts: dict[str, LLM]) -> None:
    speedup, share = modelled_speedup(drafts["good"], AUTO, 150)
    assert speedup > 1.5 and share > 0.8


def test_useless_guesses_cost_next_to_nothing(drafts: dict[str, LLM]) -> None:
    modelled_speedup(drafts["bad"], AUTO, 100)  # learns that they are useless
    speedup, share = modelled_speedup(drafts["bad"], AUTO, 190)
    assert speedup > 0.97 and share < 0.2
