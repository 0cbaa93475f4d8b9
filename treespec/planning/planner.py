"""The planner: chooses draft levels and verified nodes so as to maximise tokens per second.

Objective. The value p(v) of a drafted node v is the product of the edge probabilities on its path, the estimated
probability that it is accepted. A round over a batch of B requests with the drafted nodes T emits an expected

    tokens(T) = B + c * sum of p(v) over v in T

tokens, where the calibration c is the observed ratio of accepted tokens to summed values. (If no requests are queued,
the tokens of requests that end early weigh less, see `_weights_of_tokens`.) Throughput is total tokens over total
seconds of many rounds. This is a fractional program (Dinkelbach 1967): at the optimum, every round maximises

    tokens(T) - rate * seconds(T),

where `rate` is the throughput that the rounds achieve. `rate` is estimated by a running mean and is at least that of
plain decoding. It puts a price on time, which turns every decision into a comparison of marginal gain and cost:

- Draft a level if c * (open mass of the frontier) * (coverage) > rate * (seconds of the level). Open mass is the
  probability that the frontier is reached and no other source covers the next token; coverage is the share of it that
  a level's nodes hold. The first level must also repay the start of drafting, together with the levels that follow.
- Verify the N nodes with the largest values over all requests, where N maximises
  c * (sum of the N values) - rate * (seconds of the target pass with N more rows). Values never increase along a path,
  so these nodes form subtrees. A larger batch makes rows more expensive and trees smaller, down to plain decoding.

The host executor reads trees back while they grow, so it asks before each level (`worth_a_level`) and cuts afterwards
(`cut`). A captured round reads nothing back: the planner chooses its levels and nodes in advance, by the largest
tokens(T) / seconds(T) predicted from earlier trees (`TreeYield`).

Measured once per machine and set of models: the `CostCurve` (target passes by rows, draft levels, their start).
Learned from rounds: corrections of the curve (`RoundCosts`), the calibration c, the coverage, the gain over plain
decoding, and backoff. Gain and backoff use modelled seconds and counted tokens, so that one disturbed round does not
pause speculation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from treespec.planning.draft_plan import NOTHING_DRAFTED, Drafted, DraftPlan, LevelRule, repays_start
from treespec.planning.learning import Calibration, RoundShapes, ScoredTree, SpeculationBackoff, TreeYield
from treespec.planning.planner_config import DEFAULT, PlannerConfig
from treespec.planning.round_costs import CostCurve, CostedBatch, RoundCosts, RoundSeconds
from treespec.request import Request
from treespec.tree import TokenTree

PLAIN = DraftPlan(0, 0, 1)


class _Idle(NamedTuple):
    """A batch of `size` requests decodes plainly for `rounds` more rounds before drafting is considered again."""

    size: int
    rounds: int


class _BatchSizeState:
    """Gain and backoff of batches of similar size (2^k to 2^(k+1) - 1 requests), because both depend on the size.

    Args:
        requests: smallest batch of this size class.
        config: planner constants.

    Attributes:
        gain: running mean of tokens per second over plain decoding's, of all rounds that speculate.
        ssms: backoff of rounds in which SSMs draft.
        model_free: backoff of rounds in which only sources without a model draft.
    """

    def __init__(self, requests: int, config: PlannerConfig) -> None:
        self.gain = config.initial_gain
        self.ssms, self.model_free = SpeculationBackoff(requests, config), SpeculationBackoff(requests, config)


@dataclass
class PlannedRound:
    """What the planner needs of a round from its plans to its observation, when the next round may be planned already.

    Attributes:
        batch: the requests.
        costed: what costs depend on.
        token_weights: by request, see `_weights_of_tokens`.
        deepest: most levels that any request has room for.
        asks_sources: whether any source is asked to draft.
        adaptive_depth: most levels of a captured round's adaptive trees.
        adaptive_trees: by request, whether a captured round grows an adaptive tree for it.
        drafted: what the SSMs drafted, as given to `cut`.
        coverage_learned: whether the first level of the round has corrected the coverage.
    """

    batch: Sequence[Request]
    costed: CostedBatch
    token_weights: list[float]
    deepest: int = 0
    asks_sources: bool = False
    adaptive_depth: int = 0
    adaptive_trees: list[bool] = field(default_factory=list)
    drafted: Drafted = NOTHING_DRAFTED
    coverage_learned: bool = False

    @property
    def size(self) -> int:
        """Number of requests."""
        return len(self.token_weights)


class Planner:
    """Chooses what each round drafts and verifies; see the module docstring.

    Speculation that gains nothing over plain decoding is paused with exponential backoff, separately for SSMs and for
    sources without a model.

    Args:
        cost: measured cost curve. With `shapes`, it is the curve of a whole batch by rows per request.
        learns_seconds: whether times measured in rounds correct the curve.
        shapes: tree shapes of captured rounds, which are chosen in advance; None if trees are cut after growth.
        config: planner constants.

    Attributes:
        round: the round that was planned last, or that is observed.
    """

    def __init__(
        self,
        cost: CostCurve,
        learns_seconds: bool = True,
        shapes: RoundShapes | None = None,
        config: PlannerConfig = DEFAULT,
    ):
        self.config, self.shapes = config, shapes
        self.costs = RoundCosts(cost, learns_seconds, config)
        self._yield = None if shapes is None else TreeYield(shapes, config)
        self._states: dict[int, _BatchSizeState] = {}
        self._coverage = config.coverage  # running mean: share of the open mass that a round's first level holds
        # By whether SSMs drafted: the two kinds of rounds are calibrated separately.
        self._calibrations = {False: Calibration(config), True: Calibration(config)}
        self._passes_per_level = 1.0  # running mean over rounds in which SSMs draft
        self._idle = _Idle(0, 0)
        self._best_shapes: dict[int, tuple[int, int]] = {}  # by depth, chosen since the last observation
        self.round = PlannedRound((), self.costs.batch, [1.0])  # of one request, until a batch is planned

    def expects_ssms(self, requests: Sequence[Request]) -> bool:
        """Return whether a first draft level is expected to pay for a batch of these requests.

        Call it between rounds only, because it overwrites the state of the current batch.
        """
        self._begin(requests)
        promised = self._calibrations[True].value * self._coverage
        return not self._state.ssms.pause_left and any(self.level_rule().pays([promised] * len(requests), begins=True))

    def draft_plans(
        self,
        requests: Sequence[Request],
        max_model_len: int,
        unread: Callable[[Request], int] | None = None,
        others_wait: bool = False,
    ) -> list[DraftPlan]:
        """Return the draft plan of each request; depth 0 where drafting does not pay.

        With `shapes`, a plan is exactly what is drafted and verified; without, it is an upper bound.

        Args:
            requests: the batch.
            max_model_len: maximum positions of a request.
            unread: returns the tokens of a request that the leading SSM must read before it drafts; None without SSMs.
            others_wait: whether requests are queued, so that a finished request frees its place for another.
        """
        self._begin(requests)
        if all(request.spec.is_plain for request in requests):
            return [PLAIN] * len(requests)
        state = self._state
        for backoff in (state.ssms, state.model_free):
            backoff.pause_left = max(backoff.pause_left - 1, 0)
        if self._yield is not None:
            return self._shaped_plans(requests, max_model_len, self._yield)
        adaptive = all(request.spec.is_adaptive for request in requests)
        if adaptive and state.model_free.pause_left and (self._stays_idle() or not self._could_draft()):
            return [PLAIN] * len(requests)  # early exit: this round then takes as long as plain decoding
        if not others_wait:
            self.round.token_weights = self._weights_of_tokens(requests)
        drafts, min_trust = [False] * len(requests), 0.0
        if not (adaptive and state.ssms.pause_left):
            # The whole mass is still open: proposals of other sources only reduce it, so a level that does not pay now
            # never will.
            expected = self._calibrations[True].value * self._coverage
            drafts = self.level_rule().pays([expected * weight for weight in self.round.token_weights], begins=True)
            min_trust = self._min_trust()
        plans = []
        for i, request in enumerate(requests):
            spec = request.spec
            room = max(request.room(max_model_len), 0)
            depth = min(spec.max_depth, len(spec.branching) if spec.branching else spec.max_depth, room)
            if spec.is_plain:
                depth = 0
            levels = depth
            if spec.is_adaptive and state.model_free.pause_left:
                depth = 0
            if spec.is_adaptive and levels:
                if state.ssms.pause_left or not drafts[i]:
                    levels = 0
                elif unread is not None:
                    levels = levels if self.costs.read(unread(request)) <= self._expected_saving(request) else 0
            trust, left = (min_trust, self._time_left(request)) if spec.is_adaptive else (0.0, math.inf)
            plans.append(
                DraftPlan(depth, levels, spec.max_nodes, spec.branching, spec.is_adaptive, trust, spec.max_ssms, left)
            )
        self.round.asks_sources = any(plan.max_depth for plan in plans)
        idle = adaptive and not any(plan.max_depth or plan.levels for plan in plans)
        self._idle = _Idle(len(requests), self.config.idle_rounds if idle else 0)
        return plans

    def _begin(self, requests: Sequence[Request]) -> None:
        """Begin a round; a curve of whole batches counts its batch as one request."""
        self.costs.begin(requests, None if self.shapes is None else 1)
        deepest = max(min(request.spec.max_depth, request.tokens_left - 1) for request in requests)
        self.round = PlannedRound(requests, self.costs.batch, [1.0] * len(requests), deepest)

    def _shaped_plans(self, requests: Sequence[Request], max_model_len: int, tree_yield: TreeYield) -> list[DraftPlan]:
        """Return the plans of a captured round.

        All requests share the round's levels and graph, so the deepest fixed tree sets the minimum number of levels.
        """
        shapes, limits, adaptive_depth, levels = tree_yield.shapes, [], 0, 0
        for request in requests:
            spec = request.spec
            depth = 0 if spec.is_plain else max(min(spec.max_depth, shapes.max_depth, request.room(max_model_len)), 0)
            limits.append(depth)
            if spec.is_adaptive:
                adaptive_depth = max(adaptive_depth, depth)
            elif depth:
                levels = max(levels, min(depth, spec.max_nodes - 1))
        drafts = adaptive_depth and not self._state.ssms.pause_left
        chosen = self._best_shape(tree_yield, adaptive_depth) if drafts else (0, 1)
        self.round.adaptive_depth = adaptive_depth
        levels = max(levels, chosen[0])
        plans = []
        for request, depth in zip(requests, limits, strict=True):
            adaptive = request.spec.is_adaptive
            nodes = chosen[1] if adaptive else request.spec.max_nodes
            depth = min(depth, levels, nodes - 1)
            plans.append(DraftPlan(depth, depth, nodes, adaptive=adaptive) if depth > 0 else PLAIN)
        self.round.asks_sources = any(plan.levels for plan in plans)
        self.round.adaptive_trees = [plan.adaptive for plan in plans]
        return plans

    def _best_shape(self, tree_yield: TreeYield, depth: int) -> tuple[int, int]:
        """Return the (levels, nodes) with the most expected tokens per second, at most `depth` levels.

        Returns (0, 1), plain decoding, unless the gain over it exceeds the margin.
        """
        if depth not in self._best_shapes:
            self._best_shapes[depth] = self._search_shapes(tree_yield, depth)
        return self._best_shapes[depth]

    def _search_shapes(self, tree_yield: TreeYield, depth: int) -> tuple[int, int]:
        shapes, costs = tree_yield.shapes, self.costs
        count = np.arange(1, depth + 1)
        verify = np.array([costs.verify(nodes, 1, int(nodes > 1)) for nodes in shapes.nodes])
        draft = costs.draft_start + count * costs.level(1, 1)
        seconds = draft[:, None] + verify + costs.host("drafted")
        tokens = 1 + self._calibrations[True].value * tree_yield.promised[:depth]
        rates = np.where(count[:, None] < np.array(shapes.nodes), tokens / seconds, 0.0)
        level, column = divmod(int(rates.argmax()), len(shapes.nodes))
        if rates[level, column] * costs.plain <= 1 + self.config.margin:
            return 0, 1
        return level + 1, shapes.nodes[column]

    def _stays_idle(self) -> bool:
        """Return whether a batch of this size is still in its idle rounds, and count one of them.

        Idle rounds skip the decision whether SSMs draft, which would cost 3 % of a short round.
        """
        size, left = self._idle
        self._idle = _Idle(size, max(left - 1, 0))
        return left > 0 and size == self.round.size

    @property
    def rate(self) -> float:
        """Price of time in weighted tokens per second: recent throughput of this batch, at least plain decoding's."""
        return max(self._state.gain, 1.0) * sum(self.round.token_weights) / self.costs.plain

    def _could_draft(self) -> bool:
        """Return whether drafting could pay under the most optimistic assumptions.

        Assumes that no mass is covered by other sources and that a level of the whole batch costs as much as a level of
        one request.
        """
        state = self._state
        expected = self._calibrations[True].value * self._coverage * self.costs.plain / max(state.gain, 1.0)
        level = self.costs.level(self._passes_per_level, self._passes_per_level)
        start = self.costs.draft_start
        return not state.ssms.pause_left and repays_start(expected, level, start, self._coverage, self.round.deepest)

    def _weights_of_tokens(self, requests: Sequence[Request]) -> list[float]:
        """Return the weight of one token of each request, for a batch with no requests queued.

        Such a batch ends with its slowest request, whose tokens weigh 1. A token of a request that ends earlier saves
        only that request's share of a round; the weight approaches this share as the expected remaining time decreases.
        """
        count = len(requests)
        if count == 1:
            return [1.0]
        own_share = 1 - self.costs.verify(count - 1, count - 1) / self.costs.verify(count, count)
        prior = self.config.speed_prior
        left = [r.tokens_left * (r.target_passes + prior) / (r.num_generated + prior) for r in requests]
        last = max(left)
        return [own_share + (1 - own_share) * (each / last) ** self.config.lateness_exponent for each in left]

    @property
    def least_value(self) -> float:
        """Minimum value at which a node pays for its row of the target pass."""
        count, window = self.round.size, self.config.row_window
        row = (self.costs.verify(count + window, count) - self.costs.verify(count, count)) / window
        return min(self.rate * row / max(self.round.token_weights), self.config.max_least_value)

    @property
    def _state(self) -> _BatchSizeState:
        size = self.round.size.bit_length()
        if size not in self._states:
            self._states[size] = _BatchSizeState(2 ** (size - 1), self.config)
        return self._states[size]

    def _expected_saving(self, request: Request) -> float:
        """Return the seconds that SSM drafting is expected to save over the rest of a request."""
        share = 1 - 1 / max(self._state.ssms.gain, 1.0)
        return request.tokens_left * self.costs.plain / self.round.size * share

    def _time_left(self, request: Request) -> float:
        """Return the expected time until a request ends, as in `DraftPlan.time_left`."""
        seconds = request.tokens_left * self.costs.plain / max(self._state.ssms.gain, 1.0) / self.round.size
        return seconds / max(self.costs.read(1), 1e-12)

    def _min_trust(self) -> float:
        """Return the mixture weight above which an additional SSM pays for its pass.

        Dropping an SSM loses `unique_share` of the tokens in proportion to its weight; other sources propose the rest.
        """
        count = self.round.size
        level = self.costs.further_ssm(count)
        return (
            self.rate
            * level
            / max(self.config.unique_share * self._calibrations[True].value * self._coverage * count, 1e-9)
        )

    def worth_a_level(self, trees: np.ndarray, open_mass: np.ndarray, reached: np.ndarray | None) -> np.ndarray:
        """Return which trees' next level pays, bool [num trees]; see `GrowthRule.worth_a_level`."""
        rule = self.level_rule()
        pays = rule.worth_a_level(trees, open_mass, reached)
        self.adopt(rule)
        return pays

    def level_rule(self) -> LevelRule:
        """Return the rule by which the levels of this round are drafted."""
        config, costs, rate, passes = self.config, self.costs, self.rate, self._passes_per_level
        return LevelRule(
            self._calibrations[True].value,
            self._coverage,
            0.0 if self.round.coverage_learned else config.coverage_ema,
            config.last_level_weight,
            self.round.token_weights,
            rate * costs.draft_start,
            rate * costs.level(passes, passes),
            rate * costs.further_request(passes),
            self.round.deepest,
        )

    def adopt(self, rule: LevelRule) -> None:
        """Take over the coverage, which is learned from a round's first level."""
        self._coverage, self.round.coverage_learned = rule.coverage, not rule.coverage_weight

    def cut(self, requests: Sequence[Request], trees: Sequence[TokenTree], drafted: Drafted) -> list[TokenTree]:
        """Cut each tree to its configured size or, with nodes="auto", to the nodes that pay in this batch.

        Trees with random draws stay whole: removing a draw because of its token would change the distribution of the
        others.

        Args:
            requests, trees: one tree per request.
            drafted: what the SSMs drafted in this round.
        """
        self.round.drafted, self.round.coverage_learned = drafted, False
        kept = [
            tree if tree.draws.rows is not None else tree.best(request.spec.max_nodes)
            for request, tree in zip(requests, trees, strict=True)
        ]
        adaptive = [
            i
            for i, request in enumerate(requests)
            if request.spec.is_adaptive and len(kept[i]) > 1 and kept[i].draws.rows is None
        ]
        if not adaptive:
            return kept
        others = [len(tree) for i, tree in enumerate(kept) if i not in adaptive]
        rows, grown = sum(others) + len(adaptive), sum(size > 1 for size in others)
        values = [kept[i].values[1:] * self.round.token_weights[i] for i in adaptive]
        # Number of trees with drafted nodes when the best 1, 2, ... candidates are kept.
        num_trees: np.ndarray | int = grown + 1
        if len(adaptive) == 1:
            owner, descending = None, -np.sort(-values[0])
        else:
            value = np.concatenate(values)
            order = np.argsort(-value, kind="stable")
            owner, descending = np.repeat(np.arange(len(adaptive)), [len(own) for own in values])[order], value[order]
            first = np.zeros(len(order), dtype=np.int64)  # 1 at each request's first candidate
            first[np.unique(owner, return_index=True)[1]] = 1
            num_trees = grown + np.cumsum(first)
        seconds = self.costs.verify_more(rows, len(descending), len(requests), num_trees)
        if not drafted.levels:  # dropping a whole tree of model-free sources also saves the host's work on it
            seconds += (num_trees - grown) * max(self.costs.host("tree") - self.costs.host("search"), 0.0)
        seconds -= self.costs.verify(rows, len(requests), grown)
        gain = self._calibrations[drafted.levels > 0].value * np.cumsum(descending) - self.rate * seconds
        best = int(np.argmax(gain))
        count = best + 1 if gain[best] > 0 else 0
        counts = [count] if owner is None else np.bincount(owner[:count], minlength=len(adaptive)).tolist()
        for i, nodes in zip(adaptive, counts, strict=True):
            kept[i] = kept[i].best(1 + nodes)
        return kept

    def observe(
        self,
        requests: Sequence[Request],
        trees: Sequence[ScoredTree],
        emitted: Sequence[int],
        seconds: RoundSeconds | None = None,
        drafted: Drafted | None = None,
        rows: int | None = None,
        planned: PlannedRound | None = None,
    ) -> None:
        """Update costs, calibration, coverage, gain and backoff from a verified round.

        Args:
            requests, trees, emitted: verified requests with their trees and numbers of emitted tokens.
            seconds: measured time of the round; None keeps the modelled costs.
            drafted: what the SSMs drafted; None = as given to `cut`.
            rows: rows of the target pass as the cost curve counts them; None = all nodes of all trees.
            planned: the round, if another one was planned after it.
        """
        if not requests:
            return
        if planned is not None:
            self.round, self.costs.batch = planned, planned.costed
        self._observe(requests, trees, emitted, seconds, self.round.drafted if drafted is None else drafted, rows)
        self._best_shapes.clear()
        if self._yield is not None and (depth := self.round.adaptive_depth):
            self._best_shape(self._yield, depth)  # now, when the device may be busy, rather than before the next launch

    def _observe(
        self,
        requests: Sequence[Request],
        trees: Sequence[ScoredTree],
        emitted: Sequence[int],
        seconds: RoundSeconds | None,
        drafted: Drafted,
        rows: int | None,
    ) -> None:
        config, state, planned = self.config, self._state, self.round
        count, nodes = len(requests), [len(tree.values) for tree in trees]
        grown = sum(size > 1 for size in nodes) if rows is None else int(rows > 1)
        rows = sum(nodes) if rows is None else rows
        speculates = planned.asks_sources or drafted.levels > 0
        if seconds is not None:
            self.costs.learn(seconds, rows, grown, drafted, speculates or grown > 0)
        if not drafted.levels:  # decay towards the priors, so that SSMs that stopped drafting are eventually retried
            self._coverage += config.recovery * (config.coverage - self._coverage)
            self._calibrations[True].miss()
            state.ssms.miss()
            if self._yield is not None:
                self._yield.miss()
        if not speculates or not any(request.spec.is_adaptive for request in requests):
            return
        rounds = self.costs.speculative(rows, grown, drafted) / self.costs.plain
        places = {request: place for place, request in enumerate(planned.batch)}  # failed requests are missing here
        weights = [planned.token_weights[places[request]] for request in requests]
        gain = sum(w * tokens for w, tokens in zip(weights, emitted, strict=True)) / sum(weights) / rounds
        state.gain += config.gain_ema * (gain - state.gain)
        if grown:
            promised = sum(float(tree.values[1:].sum()) for tree in trees)
            self._calibrations[drafted.levels > 0].add((sum(emitted) - count) / count, promised / count)
        if not drafted.levels:
            state.model_free.observe(gain, rounds)
            return
        # `_expected_saving` ensures that a request repays the reading of its own prompt. In a batch the others wait for
        # it too, so the backoff counts it.
        read = self.costs.read(drafted.read_tokens) if count > 1 else 0.0
        state.ssms.observe(gain, rounds, read / self.costs.plain)
        self._passes_per_level += config.gain_ema * (drafted.passes / drafted.levels - self._passes_per_level)
        if self._yield is not None and self.shapes is not None:
            grown_trees = [
                tree for tree, request in zip(trees, requests, strict=True) if planned.adaptive_trees[places[request]]
            ]
            if grown_trees:
                self._yield.observe(drafted.levels, self.shapes.fitting(rows), grown_trees)
