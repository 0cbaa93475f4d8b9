"""The planner: which sources draft, how deep, and how many nodes the target verifies.

A drafted node's value is the product of edge probabilities on its path, the estimated probability that it is accepted.
The objective is tokens per second. With candidates sorted by value, the planner keeps the prefix of N of them with the
largest (sum of values) - rate * (verify time of N rows), over all requests of the batch at once, where `rate` is what
rounds bring in tokens per second; that maximises tokens per second over many rounds (a fractional program, Dinkelbach
1967). So trees shrink as the batch grows, down to one node.

Where a round's trees can be read while they grow, the planner stops each when its next level does not pay, and cuts it
afterwards. A captured round reads nothing back, so its levels and nodes are chosen before, from what earlier trees
promised. Costs, calibration and backoff are the same.

Times are a measured curve's, corrected by what rounds take; a way to speculate that gains nothing rests. A rest is
decided by modelled seconds and counted tokens, so a disturbance of one round decides nothing.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from treespec.planning.draft_plan import Drafted, DraftPlan
from treespec.planning.learning import Calibration, RoundShapes, ScoredTree, SpeculationBackoff, TreeYield
from treespec.planning.planner_config import DEFAULT, PlannerConfig
from treespec.planning.round_costs import CostCurve, RoundCosts, RoundSeconds
from treespec.request import Request
from treespec.tree import TokenTree

PLAIN = DraftPlan(0, 0, 1)


class _Idle(NamedTuple):
    """Batches of `size` requests draft nothing for `rounds` more."""

    size: int
    rounds: int


class _Outlook:
    """What was learned at one size of batch: there are few sizes, and what pays for one request may not for eight.

    Args:
        requests: the fewest of this size.
        config: of the planner.
    """

    def __init__(self, requests: int, config: PlannerConfig) -> None:
        self.gain = config.first_gain  # running mean over all rounds that speculate
        # Rounds with SSMs, and with sources that run no model alone.
        self.ssms, self.free = SpeculationBackoff(requests, config), SpeculationBackoff(requests, config)


class Planner:
    """Chooses what to draft and what to keep of it.

    Time has a price: `rate`, the tokens that a second is worth when it is spent as in the rounds before. A level is
    drafted, and a node verified, where the tokens that it promises are worth its time; the first level, where it and
    those that may follow are worth the start of drafting as well. Where drafting gains nothing over plain decoding, it
    rests: SSMs, and sources that run no model, each for themselves.

    Args:
        cost: this machine's curve. With `shapes`: of whole batches, by rows of each request.
        learns_seconds: whether times measured in rounds correct the curve's.
        shapes: of captured rounds, whose levels and nodes are chosen before they start; None: trees are cut after they
            have grown.
        config: constants.
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
        self._outlooks: dict[int, _Outlook] = {}
        self._reach = config.reach  # running mean: share of its open mass that a first level holds
        # Of node values, in rounds without SSMs and with them.
        self._calibrations = {False: Calibration(config), True: Calibration(config)}
        self._passes_per_level = 1.0  # running mean of rounds with drafting
        self._batch: Sequence[Request] = ()
        self._worth = [1.0]  # of a token, by request of the batch
        self._requests, self._drafted, self._reach_learned = 1, Drafted(0, 0), False
        self._deepest = 0  # level that a request of the batch has room for
        self._asks_free = False  # whether sources that cost no pass are asked in this round
        self._idle = _Idle(0, 0)
        self._grows: list[bool] = []  # by request, whether a captured round grows an adaptive tree for it

    def expects_ssms(self, requests: Sequence[Request]) -> bool:
        """Whether SSMs seem worth their time where these requests run side by side. Asked between two rounds."""
        self._begin(requests)
        self._worth = [1.0] * len(requests)
        self._deepest = max(min(request.spec.max_depth, request.tokens_left - 1) for request in requests)
        promised = self._calibrations[True].value * self._reach
        return not self._outlook.ssms.resting and any(self._pays([promised] * len(requests), begins=True))

    def draft_plans(
        self,
        requests: Sequence[Request],
        max_model_len: int,
        unread: Callable[[Request], int] | None = None,
        others_wait: bool = False,
    ) -> list[DraftPlan]:
        """What to draft for each request; depth 0 where nothing is worth drafting.

        With `shapes`, plans say what is drafted and verified; without, they bound it.

        Args:
            requests: of this round.
            max_model_len: positions of the longest request.
            unread: tokens that SSMs would have to read first, summed over the SSMs; None: nothing.
            others_wait: whether a request that ends makes room for another.
        """
        self._begin(requests)
        self._drafted, self._asks_free = Drafted(0, 0), False
        self._batch, self._worth = requests, [1.0] * len(requests)
        if all(request.spec.is_plain for request in requests):
            return [PLAIN] * len(requests)
        self._deepest = max(min(request.spec.max_depth, request.tokens_left - 1) for request in requests)
        outlook = self._outlook
        for backoff in (outlook.ssms, outlook.free):
            backoff.resting = max(backoff.resting - 1, 0)
        if self._yield is not None:
            return self._shaped_plans(requests, max_model_len, self._yield)
        adaptive = all(request.spec.is_adaptive for request in requests)
        if adaptive and outlook.free.resting and (self._keeps_idle() or not self._may_draft()):
            return [PLAIN] * len(requests)  # a round as short as plain decoding's
        if not others_wait:
            self._worth = self._worth_of_tokens(requests)
        drafts, min_trust = [False] * len(requests), 0.0
        if not (adaptive and outlook.ssms.resting):
            # Before other sources have spoken: where SSMs are not worth a level now, they will not be later.
            promised = self._calibrations[True].value * self._reach
            drafts = self._pays([promised * worth for worth in self._worth], begins=True)
            min_trust = self._min_trust()
        plans = []
        for i, request in enumerate(requests):
            spec = request.spec
            room = max(request.room(max_model_len), 0)
            depth = min(spec.max_depth, len(spec.branching) if spec.branching else spec.max_depth, room)
            if spec.is_plain:
                depth = 0
            levels = depth
            if spec.is_adaptive and outlook.free.resting:
                depth = 0
            if spec.is_adaptive and levels:
                if outlook.ssms.resting or not drafts[i]:
                    levels = 0
                elif unread is not None:
                    levels = levels if self.costs.read(unread(request)) <= self._saving(request) else 0
            trust = min_trust if spec.is_adaptive else 0.0
            plans.append(
                DraftPlan(depth, levels, spec.max_nodes, spec.branching, spec.is_adaptive, trust, spec.max_ssms)
            )
        self._asks_free = any(plan.max_depth for plan in plans)
        idle = adaptive and not any(plan.max_depth or plan.levels for plan in plans)
        self._idle = _Idle(len(requests), self.config.idle_rounds if idle else 0)
        return plans

    def _begin(self, requests: Sequence[Request]) -> None:
        self._requests = len(requests)
        self.costs.begin(requests, None if self.shapes is None else 1)

    def _shaped_plans(self, requests: Sequence[Request], max_model_len: int, expected: TreeYield) -> list[DraftPlan]:
        """Plans of a captured round. All requests share its levels and its graph; a fixed tree widens them."""
        shapes, limits, free, levels = expected.shapes, [], 0, 0
        for request in requests:
            spec = request.spec
            depth = 0 if spec.is_plain else max(min(spec.max_depth, shapes.max_depth, request.room(max_model_len)), 0)
            limits.append(depth)
            if spec.is_adaptive:
                free = max(free, depth)
            elif depth:
                levels = max(levels, min(depth, spec.max_nodes - 1))
        chosen = self._best_shape(expected, free) if free and not self._outlook.ssms.resting else (0, 1)
        levels = max(levels, chosen[0])
        plans = []
        for request, depth in zip(requests, limits, strict=True):
            adaptive = request.spec.is_adaptive
            nodes = chosen[1] if adaptive else request.spec.max_nodes
            depth = min(depth, levels, nodes - 1)
            plans.append(DraftPlan(depth, depth, nodes, adaptive=adaptive) if depth > 0 else PLAIN)
        self._asks_free = any(plan.levels for plan in plans)
        self._grows = [plan.adaptive for plan in plans]
        return plans

    def _best_shape(self, expected: TreeYield, depth: int) -> tuple[int, int]:
        """Levels and nodes with the most tokens per second, at most `depth` levels; (0, 1) where plain decoding is as
        fast."""
        shapes, costs = expected.shapes, self.costs
        count = np.arange(1, depth + 1)
        verify = np.array([costs.verify(nodes, 1, int(nodes > 1)) for nodes in shapes.nodes])
        draft = costs.draft_start + count * costs.level(1, 1)
        seconds = draft[:, None] + verify + costs.host("drafted")
        tokens = 1 + self._calibrations[True].value * expected.promised[:depth]
        rates = np.where(count[:, None] < np.array(shapes.nodes), tokens / seconds, 0.0)
        level, column = divmod(int(rates.argmax()), len(shapes.nodes))
        if rates[level, column] * costs.plain <= 1 + self.config.margin:
            return 0, 1
        return level + 1, shapes.nodes[column]

    def _keeps_idle(self) -> bool:
        """Whether SSMs were not worth a level a few rounds ago: asked in every round, the question costs 3 % of a
        short one."""
        size, left = self._idle
        self._idle = _Idle(size, max(left - 1, 0))
        return left > 0 and size == self._requests

    @property
    def rate(self) -> float:
        """Tokens that a second is worth in this batch."""
        return max(self._outlook.gain, 1.0) * sum(self._worth) / self.costs.plain

    def _may_draft(self) -> bool:
        """Whether SSMs could pay at all: as `worth_a_level`, were all mass open and every request's level as cheap as
        one's."""
        outlook = self._outlook
        promised = self._calibrations[True].value * self._reach * self.costs.plain / max(outlook.gain, 1.0)
        level = self.costs.level(self._passes_per_level, self._passes_per_level)
        return not outlook.ssms.resting and self._outweighs(promised, level, self.costs.draft_start)

    def _worth_of_tokens(self, requests: Sequence[Request]) -> list[float]:
        """What a token is worth to each request of a batch that ends with its last one.

        One brings the end nearer where its request is the last; elsewhere it saves no more than that request's own
        share of a round.
        """
        count = len(requests)
        if count == 1:
            return [1.0]
        own_share = 1 - self.costs.verify(count - 1, count - 1) / self.costs.verify(count, count)
        prior = self.config.speed_prior
        left = [r.tokens_left * (r.target_passes + prior) / (r.num_generated + prior) for r in requests]
        last = max(left)
        return [own_share + (1 - own_share) * (each / last) ** self.config.sharpness for each in left]

    @property
    def least_value(self) -> float:
        """The value of a node that is worth its row of the target pass."""
        count, window = self._requests, self.config.row_window
        row = (self.costs.verify(count + window, count) - self.costs.verify(count, count)) / window
        return min(self.rate * row / max(self._worth), self.config.largest_least_value)

    @property
    def _outlook(self) -> _Outlook:
        size = self._requests.bit_length()
        if size not in self._outlooks:
            self._outlooks[size] = _Outlook(2 ** (size - 1), self.config)
        return self._outlooks[size]

    def _saving(self, request: Request) -> float:
        """Seconds that SSMs may save until a request has all its tokens."""
        share = 1 - 1 / max(self._outlook.ssms.gain, 1.0)
        return request.tokens_left * self.costs.plain / self._requests * share

    def _min_trust(self) -> float:
        """The mixture weight that an extra SSM must have: without it, `unique_share` of its tokens are lost."""
        count = self._requests
        level = self.costs.further_ssm(count)
        return (
            self.rate
            * level
            / max(self.config.unique_share * self._calibrations[True].value * self._reach * count, 1e-9)
        )

    def worth_a_level(self, trees: np.ndarray, open_mass: np.ndarray, reached: np.ndarray | None) -> np.ndarray:
        """Which trees' next level promises more tokens than its time is worth; the first one pays for the start too,
        together with those behind it. The share that a level is expected to hold of the mass that is open to it lies
        between the one that the level before it held and the usual one."""
        shares = [self._reach] * len(trees)
        if reached is not None:
            own = np.minimum(reached, 1.0)
            self._first_reach(own.tolist())
            shares = (self._reach + self.config.own_share * (own - self._reach)).tolist()
        calibration, worth = self._calibrations[True].value, self._worth
        of_each = zip(open_mass.tolist(), shares, trees.tolist(), strict=True)
        promised = [calibration * mass * share * worth[tree] for mass, share, tree in of_each]
        return np.array(self._pays(promised, begins=reached is None), dtype=bool)

    def _pays(self, promised: list[float], begins: bool) -> list[bool]:
        """Which trees' next level promises more than its time is worth.

        Lists, as batches are small: an operation on arrays takes longer than a loop over them.

        Args:
            promised: tokens times their worth, by tree.
            begins: whether this is the first level.
        """
        rate, passes = self.rate, self._passes_per_level
        least = rate * self.costs.further_request(passes)
        growing = [each for each in promised if each > least]
        start = self.costs.draft_start if begins else 0.0
        if not self._outweighs(sum(growing), rate * self.costs.level(passes, passes * len(growing)), rate * start):
            return [False] * len(promised)
        return [each > least for each in promised]

    def _outweighs(self, promised: float, level: float, start: float) -> bool:
        """Whether levels that promise less and less, as long as they pay for themselves, pay for the start as well.

        Args:
            promised: by the first of them.
            level, start: the price of each level and of the start, in the same unit.
        """
        gained = -start
        for _ in range(self._deepest):
            if promised <= level:
                break
            gained += promised - level
            promised *= self._reach
        return gained > 0

    def _first_reach(self, shares: list[float]) -> None:
        """Learn what a first level holds; later ones of the round say nothing of it."""
        if not self._reach_learned:
            self._reach += self.config.reach_memory * (sum(shares) / len(shares) - self._reach)
            self._reach_learned = True

    def cut(self, requests: Sequence[Request], trees: Sequence[TokenTree], drafted: Drafted) -> list[TokenTree]:
        """Keep of each tree what its configuration asks for, or, for "auto", what pays in this batch.

        A tree with random draws stays whole: leaving one out for its token would change the others' distribution.

        Args:
            requests, trees: side by side.
            drafted: what the SSMs did for them.
        """
        self._drafted, self._reach_learned = drafted, False
        kept = [
            tree if tree.draws.rows is not None else tree.best(request.spec.max_nodes)
            for request, tree in zip(requests, trees, strict=True)
        ]
        free = [
            i
            for i, request in enumerate(requests)
            if request.spec.is_adaptive and len(kept[i]) > 1 and kept[i].draws.rows is None
        ]
        if not free:
            return kept
        others = [len(tree) for i, tree in enumerate(kept) if i not in free]
        rows, grown = sum(others) + len(free), sum(size > 1 for size in others)
        values = [kept[i].values[1:] * self._worth[i] for i in free]
        with_nodes: np.ndarray | int = grown + 1  # trees of several nodes, once so many of the best are kept
        if len(free) == 1:
            owner, falling = None, -np.sort(-values[0])
        else:
            value = np.concatenate(values)
            order = np.argsort(-value, kind="stable")
            owner, falling = np.repeat(np.arange(len(free)), [len(own) for own in values])[order], value[order]
            first = np.zeros(len(order), dtype=np.int64)  # 1 where a request gets its first node
            first[np.unique(owner, return_index=True)[1]] = 1
            with_nodes = grown + np.cumsum(first)
        seconds = self.costs.verify_more(rows, len(falling), len(requests), with_nodes)
        if not drafted.levels:  # a guess that cost no pass may still be dropped, with the host's work on its tree
            seconds += (with_nodes - grown) * max(self.costs.host("tree") - self.costs.host("search"), 0.0)
        seconds -= self.costs.verify(rows, len(requests), grown)
        gain = self._calibrations[drafted.levels > 0].value * np.cumsum(falling) - self.rate * seconds
        most = int(np.argmax(gain))
        count = most + 1 if gain[most] > 0 else 0
        counts = [count] if owner is None else np.bincount(owner[:count], minlength=len(free)).tolist()
        for i, nodes in zip(free, counts, strict=True):
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
    ) -> None:
        """Learn from a round: where automatic trees emit fewer tokens per second than plain decoding would, they rest.

        Args:
            requests, trees, emitted: side by side; `emitted` counts tokens.
            seconds: what the round took; None: as the cost curve says.
            drafted: what the SSMs did; None: as `cut` was told.
            rows: of the target pass as the cost curve counts them; None: all nodes of all trees.
        """
        if not requests:
            return
        config, outlook, drafted = self.config, self._outlook, self._drafted if drafted is None else drafted
        count, nodes = len(requests), [len(tree.values) for tree in trees]
        grown = sum(size > 1 for size in nodes) if rows is None else int(rows > 1)
        rows = sum(nodes) if rows is None else rows
        speculates = self._asks_free or drafted.levels > 0
        if seconds is not None:
            self.costs.learn(seconds, rows, grown, drafted, speculates or grown > 0)
        if not drafted.levels:  # what is not tried cannot be learned: assumptions return slowly
            self._reach += config.recovery * (config.reach - self._reach)
            self._calibrations[True].miss()
            outlook.ssms.miss()
            if self._yield is not None:
                self._yield.miss()
        if not speculates or not any(request.spec.is_adaptive for request in requests):
            return
        rounds = self.costs.speculative(rows, grown, drafted) / self.costs.plain
        places = {request: place for place, request in enumerate(self._batch)}  # some may have failed since
        worth = [self._worth[places[request]] for request in requests]
        gain = sum(w * tokens for w, tokens in zip(worth, emitted, strict=True)) / sum(worth) / rounds
        outlook.gain += config.gain_memory * (gain - outlook.gain)
        if grown:
            promised = sum(float(tree.values[1:].sum()) for tree in trees)
            self._calibrations[drafted.levels > 0].add((sum(emitted) - count) / count, promised / count)
        if not drafted.levels:
            outlook.free.observe(gain, rounds)
            return
        # A request that reads its prompt for itself earns it back; in a batch all wait for it.
        read = self.costs.read(drafted.read_tokens) if count > 1 else 0.0
        outlook.ssms.observe(gain, rounds, read / self.costs.plain)
        self._passes_per_level += config.gain_memory * (drafted.passes / drafted.levels - self._passes_per_level)
        if self._yield is not None and self.shapes is not None:
            grown_trees = [tree for tree, request in zip(trees, requests, strict=True) if self._grows[places[request]]]
            if grown_trees:
                self._yield.observe(drafted.levels, self.shapes.fitting(rows), grown_trees)
