"""How large a tree is worth its pass: budget and topology from measured cost and drafted probabilities.

A drafted node's value is the product of edge probabilities on its path, the chance that it is accepted. With
candidates sorted by value, the planner takes the prefix of N of them with the largest (sum of values) - rate * verify
time(N), over all requests of the batch at once, where `rate` is what rounds bring in tokens per second; that maximises
tokens per second over many rounds. So trees shrink by themselves as the batch grows, down to nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from treespec.config import SpecConfig
from treespec.drafters.ssm import Drafted, DraftPlan
from treespec.request import Request
from treespec.tree import TokenTree

PAUSE = 64  # rounds of plain decoding after speculation was seen to cost more than it saves
LONGEST_PAUSE = 1024  # each pause in a row doubles
_MEMORY = 0.05  # weight of the newest round in the running mean
_USUAL_REACH = 0.7  # what a first level is assumed to hold before one was tried
_REACH_MEMORY = 0.15
_TRUTH_MEMORY = 0.1
_RECOVERY = 0.0015  # of what was assumed at first, with each round in which nothing is drafted
_HOPE, _SECOND_HOPE = 1.2, 1.08  # what speculation is assumed to gain before it was tried, and after a pause


@dataclass(frozen=True)
class CostCurve:
    """Measured times of this machine, in seconds.

    Args:
        rows, verify_seconds: a target pass of one request over so many rows.
        draft_seconds: one level of one SSM for one request, host work included.
        ssm_seconds: what each further SSM adds to a level.
        request_seconds, draft_request_seconds: what each further request adds to a pass and to a level, beside rows.
    """

    rows: tuple[int, ...]
    verify_seconds: tuple[float, ...]
    draft_seconds: float
    request_seconds: float = 0.0
    draft_request_seconds: float = 0.0
    ssm_seconds: float = 0.0

    def verify(self, rows: np.ndarray | float, requests: int = 1) -> np.ndarray:
        """Seconds of a pass over `rows` rows of `requests` requests, linear between and beyond what was measured."""
        x, y = self._measured
        # Beyond the last point at the mean slope of the upper half: two neighbours may measure alike by chance.
        middle = (len(x) - 1) // 2
        slope = (y[-1] - y[middle]) / (x[-1] - x[middle]) if len(x) > 1 else y[-1] / x[-1]
        beyond = np.maximum(np.asarray(rows) - x[-1], 0) * slope
        return np.interp(rows, x, y) + beyond + (requests - 1) * self.request_seconds

    def draft(self, drafted: Drafted, requests: int) -> float:
        """Seconds of a round's drafting for `requests` requests."""
        level = self.draft_seconds + (requests - 1) * self.draft_request_seconds
        return drafted.levels * level + (drafted.passes - drafted.levels) * self.ssm_seconds

    @cached_property
    def _measured(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.rows, float), np.maximum.accumulate(self.verify_seconds)


def is_adaptive(spec: SpecConfig) -> bool:
    """Whether the planner sizes this configuration's trees."""
    return spec.nodes == "auto" and spec.branching is None


class Planner:
    """Chooses what to draft and what to keep of it.

    Time has a price: `rate`, the tokens that a second is worth when it is spent as in the rounds before. A level is
    drafted, and a node verified, where the tokens that it promises are worth its time.
    """

    least_value = 0.03  # of a node that is worth a row: one costs 1 to 3 % of a pass

    def __init__(self, cost: CostCurve):
        self.cost = cost
        self._known_seconds: dict[tuple[int, int], float] = {}
        self._gain = _HOPE  # running mean: tokens per modelled second of automatic trees, over plain decoding's
        self._reach = _USUAL_REACH  # running mean: share of its open mass that a first level holds
        self._truth = 1.0  # running ratio of accepted tokens to those that the trees' values promised
        self._levels = 2.0  # running mean of levels drafted in a round
        self._pause, self._paused_rounds = PAUSE, 0
        self._requests, self._drafted, self._reach_learned = 1, Drafted(0, 0), False

    def draft_plans(self, requests: Sequence[Request], max_model_len: int) -> list[DraftPlan]:
        """What to draft for each request; depth 0 where nothing is worth drafting."""
        self._paused_rounds = max(self._paused_rounds - 1, 0)
        self._requests = len(requests)
        price = self._price_of_an_ssm()
        plans = []
        for request in requests:
            spec = request.spec
            room = min(request.tokens_left - 1, max_model_len - len(request.tokens) - 1)
            depth = min(spec.max_depth, len(spec.branching) if spec.branching else spec.max_depth, max(room, 0))
            adaptive = is_adaptive(spec)
            if spec.is_plain:
                depth = 0
            levels = 0 if adaptive and self._paused_rounds else depth
            least_trust = price if adaptive else 0.0
            plans.append(
                DraftPlan(depth, levels, spec.max_nodes, spec.branching, adaptive, least_trust, spec.max_ssms)
            )  # fmt: skip
        return plans

    @property
    def rate(self) -> float:
        """Tokens that a second is worth in this batch."""
        return max(self._gain, 1.0) * self._requests / self._seconds(self._requests, self._requests)

    def _seconds(self, rows: int, requests: int) -> float:
        """The cost curve at one point, looked up once: each round asks for a few of the same."""
        key = rows, requests
        if key not in self._known_seconds:
            self._known_seconds[key] = float(self.cost.verify(rows, requests))
        return self._known_seconds[key]

    def _price_of_an_ssm(self) -> float:
        """The trust that a further SSM must have: leaving it out loses at most its share of the drafted tokens."""
        if not self.cost.ssm_seconds:
            return 0.0
        promised = self._truth * self._reach * max(self._levels, 1.0) * self._requests
        return self.rate * max(self._levels, 1.0) * self.cost.ssm_seconds / max(promised, 1e-9)

    def worth_a_level(self, open_mass: np.ndarray, reached: np.ndarray | None) -> bool:
        """Whether another level promises more tokens than its time is worth. A level is expected to hold as large a
        share of the mass that is open to it as the one before it held."""
        if reached is None:
            promised = self._reach * float(open_mass.sum())
        else:
            promised = float((open_mass * np.minimum(reached, 1.0)).sum())
            self._first_reach(reached)
        return self._truth * promised > self.rate * self.cost.draft(Drafted(1, 1), self._requests)

    def _first_reach(self, reached: np.ndarray) -> None:
        """Learn what a first level holds; later ones of the round say nothing of it."""
        if not self._reach_learned:
            self._reach += _REACH_MEMORY * (float(np.minimum(reached, 1.0).mean()) - self._reach)
            self._reach_learned = True

    def cut(self, requests: Sequence[Request], trees: Sequence[TokenTree], drafted: Drafted) -> list[TokenTree]:
        """Keep of each tree what its configuration asks for, or, for "auto", what pays in this batch.

        Args:
            requests, trees: side by side.
            drafted: what the SSMs did for them.
        """
        self._drafted, self._reach_learned = drafted, False
        kept = [_best(tree, request.spec.max_nodes) for request, tree in zip(requests, trees, strict=True)]
        free = [i for i, request in enumerate(requests) if is_adaptive(request.spec) and len(kept[i]) > 1]
        if not free:
            return kept
        owner = np.concatenate([np.full(len(kept[i]) - 1, i) for i in free])
        node = np.concatenate([np.arange(1, len(kept[i])) for i in free])
        value = np.concatenate([kept[i].values[1:] for i in free])
        depth = np.concatenate([kept[i].depths[1:] for i in free])
        order = np.lexsort((depth, -value))  # a parent stays ahead of a child of equal value
        fixed_rows = sum(len(tree) for i, tree in enumerate(kept) if i not in free) + len(free)
        promised = self._truth * np.concatenate([[0.0], np.cumsum(value[order])])
        seconds = self.cost.verify(fixed_rows + np.arange(len(order) + 1), len(requests))
        count = int(np.argmax(promised - self.rate * seconds))
        owner, node = owner[order[:count]], node[order[:count]]
        for i in free:
            kept[i] = kept[i].keep(np.concatenate([[0], np.sort(node[owner == i])]))
        return kept

    def observe(self, requests: Sequence[Request], trees: Sequence[TokenTree], emitted: Sequence[int]) -> None:
        """Learn from a round. Where automatic trees emit fewer tokens per second than plain decoding would, the SSMs
        pause.

        Seconds are the cost curve's: they do not shake, and a pause depends on tokens alone.
        """
        if not any(is_adaptive(request.spec) for request in requests):
            return
        count, rows, drafted = len(requests), sum(len(tree) for tree in trees), self._drafted
        seconds = self.cost.draft(drafted, count) + self._seconds(rows, count)
        gain = sum(emitted) / count * self._seconds(count, count) / seconds
        self._gain += _MEMORY * (gain - self._gain)
        if rows > count:
            promised = sum(float(tree.values[1:].sum()) for tree in trees)
            error = (sum(emitted) - count - self._truth * promised) / count
            self._truth = min(max(self._truth + _TRUTH_MEMORY * error, 0.1), 1.2)
        if not drafted.levels:  # what is not tried cannot be learned: hope returns slowly
            self._reach += _RECOVERY * (_USUAL_REACH - self._reach)
            self._truth += _RECOVERY * (1.0 - self._truth)
            return
        self._levels += _MEMORY * (drafted.levels - self._levels)
        if self._gain < 1:
            self._paused_rounds, self._gain = self._pause, _SECOND_HOPE
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        elif self._gain > _HOPE:
            self._pause = PAUSE


def _best(tree: TokenTree, nodes: int) -> TokenTree:
    """The `nodes` nodes of the largest value; connected, because values fall along a path and parents come first."""
    if len(tree) <= nodes:
        return tree
    return tree.keep(np.sort(np.lexsort((tree.depths, -tree.values))[:nodes]))
