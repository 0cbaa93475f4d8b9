"""The planner: chooses draft levels and verified nodes to maximise tokens per second.

Objective. The value p(v) of a drafted node v is the product of the edge probabilities on its path, the estimated
probability that it is accepted. A round over a batch of B requests with the drafted nodes T emits an expected

    tokens(T) = B + sum of c ** depth(v) * p(v) over v in T

tokens, where the calibration c is the observed ratio of accepted to predicted levels: an overconfident draft is so at
every level. (If no requests are queued, the tokens of requests that end early weigh less, see `_weights_of_tokens`.)
Throughput is total tokens over total seconds of many rounds. This is a fractional program (Dinkelbach 1967): at the
optimum, every round maximises

    tokens(T) - rate * seconds(T),

where `rate` is the throughput that the rounds achieve. `rate` is estimated by a running mean and is at least that of
plain decoding. As a price of time, it turns every decision into a comparison of marginal gain and cost:

- Draft a level of depth d if c ** d * (open mass of the frontier) * (coverage) > rate * (seconds of the level and of a
  row). Open mass is the probability that the frontier is reached and no other source covers the next token; coverage is
  the share of it that a level's nodes hold, predicted by that of the level before.
- Draft a first level if drafting rounds (starting from a prior) are faster than plain decoding: compare their mean
accepted tokens with the seconds of drafting and of rows. The comparison is with plain decoding instead of the rate,
because the text determines how many rounds have no other proposals.
- Verify the N nodes with the largest c ** depth(v) * p(v) over all requests, where N maximises their sum less
  rate * (seconds of the target pass with N more rows). Values never increase along a path, so these nodes form
  subtrees. A larger batch makes rows more expensive and trees smaller, down to plain decoding.

The host executor reads trees back while they grow, so it asks before each level (`LevelRule`) and prunes afterwards
(`cut`). A captured round reads nothing back: the planner chooses its levels and nodes in advance, by the largest
tokens(T) / seconds(T) predicted from earlier trees (`TreeYield`).

Measured at the start and corrected by rounds: the `CostCurve` (target passes by rows, draft levels, their start), see
round_costs.py, also for percentages in comments. Learned from rounds: the calibration c, the gain over plain decoding,
and backoff. Gain and backoff use modelled seconds and counted tokens, so that one disturbed round does not pause
speculation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from treespec.planning.draft_plan import MAX_STALL, NOTHING_DRAFTED, Drafted, DraftPlan, PlainReason
from treespec.planning.learning import (
    FIRST_ACCEPTED,
    PRIOR_ROUNDS,
    RECOVERY,
    Calibration,
    DraftedMeans,
    RoundShapes,
    SpeculationBackoff,
    TreeYield,
)
from treespec.planning.round_costs import CostCurve, CostedBatch, RoundCosts, RoundSeconds
from treespec_kernels.tree.level_rule import LevelRule

if TYPE_CHECKING:
    from treespec.request import Request
    from treespec.tree import TokenTree


def _plain(*reasons: PlainReason) -> DraftPlan:
    return DraftPlan(0, 0, 1, plain_reasons=reasons)


PLAIN, OFF, NO_ROOM = _plain(), _plain("off"), _plain("room")
DRAFTING_PAUSED, DRAFTING_COST = _plain("drafting_paused"), _plain("drafting_cost")
MODEL_FREE_PAUSED, ALL_PAUSED = _plain("model_free_paused"), _plain("drafting_paused", "model_free_paused")
GAIN_EMA = 0.03  # weight of the newest round in running means of gains
INITIAL_GAIN, LEAST_GAIN = 1.2, 1.08  # prior, and assumed minimum for a request that its SSMs have not read
# Window for averaging the marginal cost of a row, because two neighbouring row counts may measure the same time by
# chance (1 row: +7 %).
ROW_WINDOW = 16
LEVEL_COVERAGE = 0.8  # expected share of a level's open mass that its nodes cover
# Share of a request's time for exploring its own acceptance: first levels, and reading its prompt. Without it, a
# predictable text would stay plain after many unpredictable ones.
EXPLORED = 0.02
# Share by which the estimates of tree shapes recover when a request begins.
RETRIED = 0.02
SPEED_PRIOR = 4  # weight of the prior for a request's tokens per round, in rounds of plain decoding
# Number of plain rounds before an unprofitable batch is reconsidered; deciding in every round costs 3 % of a short one.
IDLE_ROUNDS = 8
# One in this many cuts keeps twice as many nodes as pay off, plus one, so that costs of larger passes become known.
EXPLORE_ROWS = 32


class _BatchSizeState:
    """Gain and backoff of batches of `requests` to 2 * `requests` - 1 requests (one state for all sizes: +4 %)."""

    def __init__(self, requests: int) -> None:
        self.gain = INITIAL_GAIN  # mean relative speed of speculating rounds against plain decoding (1: +59 %)
        self.drafted = DraftedMeans(PRIOR_ROUNDS)  # means over all requests
        self.ssms = SpeculationBackoff(requests)  # backoff of rounds with SSM drafts
        self.model_free = SpeculationBackoff(requests)  # backoff of rounds with model-free drafts only


@dataclass
class PlannedRound:
    """A planned round, kept until it is observed; the next round may already be planned by then."""

    batch: Sequence[Request]
    costed: CostedBatch  # cost parameters of the batch
    token_weights: list[float]  # weights by request, see `_weights_of_tokens`
    asks_sources: bool = False  # whether any source is asked to draft
    adaptive_depth: int = 0  # maximum levels of a captured round's adaptive trees
    # Value of a second, and of another row of the target pass, in weighted tokens; computed on first use
    prices: tuple[float, float] | None = None
    rule: LevelRule | None = None  # computed on first use
    plans: list[DraftPlan] | None = None  # also for further rounds of the batch, until one is observed
    others_wait: bool = False  # see `Planner.draft_plans`
    size: int = field(init=False)  # number of requests

    def __post_init__(self) -> None:
        self.size = len(self.token_weights)


class Planner:
    """Chooses draft levels and verified nodes of each round; see the module docstring.

    Speculation without gain over plain decoding is paused with exponential backoff, separately for SSMs and for
    model-free sources.
    """

    def __init__(
        self,
        cost: CostCurve,  # with `shapes`, the cost of a whole batch by rows per request
        shapes: RoundShapes | None = None,  # shapes of captured rounds; None if trees are pruned after growth
    ):
        self.shapes = shapes
        self.costs = RoundCosts(cost)
        self._yield = None if shapes is None else TreeYield(shapes)
        self._states: dict[int, _BatchSizeState] = {}
        self.num_cuts = 0  # number of cuts of adaptive trees
        self._calibrations = {samples: Calibration() for samples in (False, True)}  # by whether requests sample
        # The last planned or currently observed round; for one request until a batch is planned.
        self.round = PlannedRound((), self.costs.batch, [1.0])

    def expects_ssms(self, requests: Sequence[Request]) -> bool:
        """Return whether a first draft level is expected to pay off for a batch of these requests.

        Call it between rounds only, because it overwrites the state of the current batch.
        """
        self._begin(requests)
        pauses = self.state.ssms.pause_left and all(request.drafted is not None for request in requests)
        return not pauses and any(self._first_level_pays())

    def draft_plans(
        self,
        requests: Sequence[Request],
        max_model_len: int,
        # Returns the number of a request's tokens that the leading SSM must read before drafting; None without SSMs
        unread: Callable[[Request], int] | None = None,
        others_wait: bool = False,  # whether requests are queued, so that an ended request is replaced
    ) -> list[DraftPlan]:
        """Return the draft plan of each request; depth 0 if drafting does not pay off.

        With `shapes`, plans are exact; without, they are upper bounds.
        """
        self._begin(requests)
        if all(request.spec.is_plain for request in requests):
            return [OFF] * len(requests)
        self.count_pauses()
        state = self.state
        for request in requests:
            if request.drafted is None:
                self._begin_request(request)
        if self._yield is not None:
            return self._shaped_plans(requests, max_model_len, self._yield)
        adaptive = all(request.spec.is_adaptive for request in requests)
        if adaptive and state.model_free.pause_left and state.ssms.pause_left:
            # early exit: this round then takes no longer than plain decoding
            return [MODEL_FREE_PAUSED if unread is None else ALL_PAUSED] * len(requests)
        if not others_wait:
            self.round.token_weights = self._weights_of_tokens(requests)
        paused = adaptive and state.ssms.pause_left
        pays = [False] * len(requests) if paused else self._first_level_pays()
        least_addition = 0.0 if paused else self._least_addition()
        limits = max_model_len, least_addition, self.costs.plain, unread
        plans = [self._plan(request, first, *limits) for request, first in zip(requests, pays, strict=True)]
        self.round.plans, self.round.others_wait = plans, others_wait
        self.round.asks_sources = any(plan.max_depth for plan in plans)
        if adaptive and not any(plan.max_depth or plan.levels for plan in plans):
            state.ssms.pause_left = max(state.ssms.pause_left, IDLE_ROUNDS)
        return plans

    def _plan(
        self,
        request: Request,
        pays: bool,  # whether a first level is expected to pay off
        max_model_len: int,
        least_addition: float,
        plain: float,  # seconds of a round of plain decoding
        unread: Callable[[Request], int] | None,  # as in `draft_plans`
    ) -> DraftPlan:
        """Return a request's plan for the host executor."""
        spec, state, count = request.spec, self.state, self.round.size
        depth = min(spec.max_depth, len(spec.branching or ()) or spec.max_depth, request.room(max_model_len))
        if spec.is_plain:
            return OFF
        if depth <= 0:
            return NO_ROOM
        max_depth, levels, time_left, max_read, reasons = depth, depth, math.inf, math.inf, list[PlainReason]()
        if spec.is_adaptive:
            gain, read_seconds = max(state.gain, LEAST_GAIN), max(self.costs.curve.read_seconds, 1e-12)
            time_left = request.tokens_left * plain / count / gain / read_seconds
            max_read = math.inf if count == 1 else MAX_STALL / read_seconds
            # Reading a request's prompt must be repaid by the expected savings of drafting.
            pays = pays and (unread is None or unread(request) <= time_left * (gain - 1))
            if state.ssms.pause_left or not pays:
                levels = 0
                if unread is not None:
                    reasons.append("drafting_paused" if state.ssms.pause_left else "drafting_cost")
            if state.model_free.pause_left:
                max_depth = 0
                reasons.append("model_free_paused")
        return DraftPlan(
            max_depth,
            levels,
            spec.max_nodes,
            spec.branching,
            adaptive=spec.is_adaptive,
            least_addition=least_addition if spec.max_ssms is None else 0.0,
            max_ssms=spec.max_ssms,
            time_left=time_left,
            max_read=max_read,
            plain_reasons=tuple(reasons),
        )

    def last_plans(self, requests: Sequence[Request], max_model_len: int, others_wait: bool) -> list[DraftPlan] | None:
        """Return the last round's plans for another round; None if it was observed or had another batch.

        Arguments as in `draft_plans`.
        """
        last = self.round
        if last.plans is None or last.batch != requests or last.others_wait != others_wait:
            return None
        for request, plan in zip(requests, last.plans, strict=True):
            if max(plan.max_depth, plan.levels) > request.room(max_model_len):
                return None
        self.count_pauses()
        return last.plans

    def _begin(self, requests: Sequence[Request]) -> None:
        """Begin a round; with a curve for whole batches, the batch counts as one request."""
        self.costs.begin(requests, None if self.shapes is None else 1)
        self.round = PlannedRound(requests, self.costs.batch, [1.0] * len(requests))

    def count_pauses(self) -> None:
        """Count a round of the current plans against the pauses."""
        state = self.state
        for backoff in (state.ssms, state.model_free):
            backoff.pause_left -= backoff.pause_left > 0

    def _begin_request(self, request: Request) -> None:
        """End the pauses: losses on earlier texts say little about a new one."""
        request.drafted = DraftedMeans()
        for backoff in (self.state.ssms, self.state.model_free):
            backoff.pause_left = 0
        if self._yield is not None:
            self._yield.recover(RETRIED)

    def _first_level_pays(self) -> list[bool]:
        """Return for which requests a first level is expected to pay off.

        The whole mass is still open: other sources' proposals only reduce it, so a level that does not pay off now
        never will.
        """
        rule = self.level_rule()
        return rule.pays([rule.first_gain * weight for weight in rule.token_weights], begins=True)

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
        drafts = adaptive_depth and not self.state.ssms.pause_left
        shape = tree_yield.best_shape(self.costs, adaptive_depth) if drafts else (0, 1)
        self.round.adaptive_depth = adaptive_depth
        levels = max(levels, shape[0])
        plans = []
        for request, limit in zip(requests, limits, strict=True):
            adaptive = request.spec.is_adaptive
            nodes = shape[1] if adaptive else request.spec.max_nodes
            depth = min(limit, levels, nodes - 1)
            if depth > 0:
                plans.append(DraftPlan(depth, depth, nodes, adaptive=adaptive))
            elif not limit:
                plans.append(OFF if request.spec.is_plain else NO_ROOM)
            else:
                plans.append(DRAFTING_PAUSED if self.state.ssms.pause_left else DRAFTING_COST)
        self.round.asks_sources = any(plan.levels for plan in plans)
        return plans

    @property
    def calibration(self) -> float:
        """Factor on node values per level, for this batch's requests."""
        factors = {is_sampled: calibration.value for is_sampled, calibration in self._calibrations.items()}
        return sum([factors[request.is_sampled] for request in self.round.batch]) / self.round.size

    def _observe_draft(self, requests: Sequence[Request], emitted: Sequence[int], drafted: Drafted, rows: int) -> None:
        """Update the means with a round in which SSMs drafted."""
        count, costs = self.round.size, self.costs
        later = max(costs.speculative(rows, drafted) - costs.speculative(2 * count, Drafted(1, 1, count)), 0.0)
        self.state.drafted.add(sum(emitted) / len(requests) - 1, later)
        for request, tokens in zip(requests, emitted, strict=True):
            if request.drafted is not None:
                request.drafted.add(tokens - 1, later)

    def _drafted_gain(self, cost: float) -> float:
        """Return the mean tokens that a request of this batch gains in a round with drafts.

        A request's own mean is weighted with the mean of all requests. While a request may spend time on learning its
        own mean, the gain is at least the `cost` of a first level, in tokens.
        """
        shared_means, gains, plain = self.state.drafted, list[float](), self.costs.plain
        for request in self.round.batch:
            means = request.drafted or DraftedMeans()
            own_share = means.rounds / (means.rounds + PRIOR_ROUNDS)
            accepted = shared_means.accepted + own_share * (means.accepted - shared_means.accepted)
            later_seconds = shared_means.later_seconds + own_share * (means.later_seconds - shared_means.later_seconds)
            gains.append(accepted - later_seconds / plain)
            unread = len(request.tokens) if request.drafted is None else 0
            explored = (means.rounds + 1) * cost + unread * self.costs.curve.read_seconds / plain
            if explored <= EXPLORED * (request.num_generated + request.tokens_left):
                gains[-1] = max(gains[-1], cost)
        return sum(gains) / len(gains) if gains else FIRST_ACCEPTED

    @property
    def rate(self) -> float:
        """Price of time in weighted tokens per second: the batch's recent throughput, at least plain decoding's."""
        return self._prices[0]

    @property
    def _prices(self) -> tuple[float, float]:
        if self.round.prices is None:
            count, rate = self.round.size, max(self.state.gain, 1.0) * sum(self.round.token_weights) / self.costs.plain
            rows = self.costs.verify(count + ROW_WINDOW) - self.costs.verify(count)
            self.round.prices = rate, rate * rows / ROW_WINDOW
        return self.round.prices

    def _weights_of_tokens(self, requests: Sequence[Request]) -> list[float]:
        """Return the weight of one token of each request, for a batch with no requests queued.

        Such a batch ends with its slowest request, whose tokens weigh 1. A token of a request that ends earlier saves
        only that request's share of a round; the weight approaches this share as the expected remaining time decreases.
        Since it is squared, a request that ends after seven tenths of the time has half of the last request's weight.
        Equal weights: +9 %.
        """
        count = len(requests)
        if count == 1:
            return [1.0]
        own_share = 1 - self.costs.one_row(count - 1) / self.costs.one_row(count)
        passes = [r.tokens_left * (r.target_passes + SPEED_PRIOR) / (r.num_generated + SPEED_PRIOR) for r in requests]
        last = max(passes)
        return [own_share + (1 - own_share) * (n / last) ** 2 for n in passes]

    @property
    def least_value(self) -> float:
        """Minimum value at which a node pays for its row of the target pass."""
        return self._prices[1] / max(self.round.token_weights)

    @property
    def state(self) -> _BatchSizeState:
        size = self.round.size.bit_length()
        if size not in self._states:
            self._states[size] = _BatchSizeState(2 ** (size - 1))
        return self._states[size]

    def _least_addition(self) -> float:
        """Return the minimum share of drafted tokens that an SSM must add to pay for its pass."""
        count, curve = self.round.size, self.costs.curve
        drafted = LEVEL_COVERAGE * self.calibration * count
        level = curve.ssm_seconds + (count - 1) * curve.draft_request_seconds
        return self.rate * level / drafted

    def level_rule(self) -> LevelRule:
        """Return the rule for drafting this round's levels, at the cost of one SSM's passes.

        A level also costs a row of the target pass, for at least one of its nodes.
        """
        if self.round.rule is not None:
            return self.round.rule
        (rate, row), curve = self._prices, self.costs.curve
        start, level = rate * curve.draft_start_seconds, rate * curve.draft_seconds + row
        gain = max(self.state.gain, 1.0) * self._drafted_gain(start + level + 1e-6)
        self.round.rule = LevelRule(
            self.calibration,
            gain,
            self.round.token_weights,
            start,
            level,
            rate * curve.draft_request_seconds + row,
            self.least_value,
        )
        return self.round.rule

    def cut(self, requests: Sequence[Request], trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Prune each tree to the nodes to verify: the configured number or, with nodes="auto", those that pay off.

        These are the nodes with the largest values, calibrated with nodes="auto". Trees with random draws are not
        pruned: removing a draw because of its token would change the distribution of the others.
        """
        sizes = self._sizes(requests, trees, calibration := self.calibration)
        return [
            tree.best(size, calibration if request.spec.is_adaptive else 1.0) if len(tree.tokens) > size else tree
            for request, tree, size in zip(requests, trees, sizes, strict=True)
        ]

    def _sizes(self, requests: Sequence[Request], trees: Sequence[TokenTree], calibration: float) -> list[int]:
        """Return the number of nodes of each tree to verify."""
        draws = [tree.draw_rows is not None for tree in trees]
        sizes = [
            len(tree.tokens) if drawn else min(len(tree.tokens), request.spec.max_nodes)
            for request, tree, drawn in zip(requests, trees, draws, strict=True)
        ]
        adaptive = [i for i, r in enumerate(requests) if r.spec.is_adaptive and sizes[i] > 1 and not draws[i]]
        if not adaptive:
            return sizes
        rows = len(adaptive) + sum(size for i, size in enumerate(sizes) if i not in adaptive)
        nodes: list[tuple[float, int]] = []  # weighted value and tree; lists, as most rounds have a few nodes
        for i in adaptive:
            weight, columns = self.round.token_weights[i], (trees[i].values.tolist(), trees[i].depths.tolist())
            values = [weight * value * calibration**depth for value, depth in zip(*columns, strict=True)][1:]
            nodes += [(value, i) for value in sorted(values, reverse=True)[: sizes[i] - 1]]
            sizes[i] = 1
        nodes.sort(key=lambda node: -node[0])
        seconds, rate = self.costs.verify_each(np.arange(rows, rows + len(nodes) + 1)).tolist(), self.rate
        count, gain, most = 0, 0.0, 0.0
        for k, (value, _) in enumerate(nodes):
            gain += value - rate * (seconds[k + 1] - seconds[k])
            if gain > most:
                count, most = k + 1, gain
        self.num_cuts += 1
        if self.num_cuts % EXPLORE_ROWS == 0:
            count = 2 * count + 1
        for _, i in nodes[:count]:
            sizes[i] += 1
        return sizes

    def observe(
        self,
        requests: Sequence[Request],
        trees: Sequence[TokenTree],
        emitted: Sequence[int],
        seconds: RoundSeconds | None = None,  # measured time of the round; None keeps the modelled costs
        drafted: Drafted = NOTHING_DRAFTED,
        rows: int | None = None,  # target pass rows as counted by the cost curve; None for all nodes of all trees
        planned: PlannedRound | None = None,  # this round, if another one was planned after it
    ) -> None:
        """Update costs, calibration, gain and backoff from verified requests, their trees and emitted tokens."""
        if not requests:
            return
        if planned is not None:
            self.round, self.costs.batch = planned, planned.costed
        self.round.prices = self.round.rule = self.round.plans = None
        sizes = [len(tree.values) for tree in trees]
        rows, grows = sum(sizes) if rows is None else rows, max(sizes) > 1
        speculates = self.round.asks_sources or drafted.levels > 0
        if seconds is not None:
            self.costs.learn(seconds, rows, drafted, speculates or grows)
        self._recover(requests, drafted)
        if speculates and any(request.spec.is_adaptive for request in requests):
            self._observe_gain(requests, emitted, drafted, rows)
            if drafted.levels:
                self._observe_draft(requests, emitted, drafted, rows)
            if grows:
                for request, tree, tokens in zip(requests, trees, emitted, strict=True):
                    self._calibrations[request.is_sampled].add(tree, tokens - 1)
            tried = [t for t, r in zip(trees, requests, strict=True) if r.spec.is_adaptive and len(t.values) > 1]
            if drafted.levels and tried and self._yield is not None:
                self._yield.observe(drafted.levels, self._yield.shapes.fitting(rows), tried, self.calibration)
        if self._yield is not None and (depth := self.round.adaptive_depth):
            self._yield.best_shape(self.costs, depth)  # cached now, while the device may be busy

    def _recover(self, requests: Sequence[Request], drafted: Drafted) -> None:
        """Move estimates towards their priors, so that shapes and SSMs that are not used are retried eventually."""
        if self._yield is not None:
            self._yield.recover()
        if not drafted.levels:
            means = self.state.drafted, *(request.drafted for request in requests)
            for estimate in (*self._calibrations.values(), *means):
                if estimate is not None:
                    estimate.recover(RECOVERY)

    def _observe_gain(self, requests: Sequence[Request], emitted: Sequence[int], drafted: Drafted, rows: int) -> None:
        """Update the gain over plain decoding, and the backoff, with a speculating round."""
        state, weight_of = self.state, dict(zip(self.round.batch, self.round.token_weights, strict=True))
        weights = [weight_of[request] for request in requests]  # excludes failed requests of the batch
        rounds = self.costs.speculative(rows, drafted) / self.costs.plain
        gain = sum(w * tokens for w, tokens in zip(weights, emitted, strict=True)) / sum(weights) / rounds
        state.gain += GAIN_EMA * (gain - state.gain)
        (state.ssms if drafted.levels else state.model_free).observe(gain, rounds)
