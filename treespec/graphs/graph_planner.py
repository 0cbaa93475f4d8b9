"""How deep to draft and how many nodes to verify in a captured round, from what its graphs take and drafts promise.

A round's levels and nodes are chosen before it starts, as nothing is read back inside it. What each choice would have
held is learned from the trees that come back: a node's value is the chance that it is accepted, so the tokens that a
smaller tree would have brought are the sum of its best nodes' values. The choice is the one with the most tokens per
second; where none beats plain decoding, rounds are plain. Now and then, and first of all, a round looks at a larger
tree, which tells of all smaller ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_MEMORY = 0.1  # weight of the newest round in the running means
_USUAL = 0.7  # what a level is assumed to hold of the one before it, before it was tried
_MARGIN = 1.04  # over plain decoding, below which a gain counts as none
# Rounds after which a larger tree is looked at: at first, and once a look has shown something new; each one in vain
# doubles them.
_FIRST_LOOK, _LOOK, _LONGEST_LOOK = 16, 32, 1024
_DEAREST_LOOK = 2.0  # what a look may take, in rounds of the best plan
_LARGEST_STEP = 2.0  # factor between a measured time and the learned one beyond which it counts as a disturbance


@dataclass(frozen=True)
class RoundSeconds:
    """What the parts of a captured round take, in seconds.

    Args:
        first_level, next_level: of drafting.
        verify: by rows of each request.
        host: between two rounds.
    """

    first_level: float
    next_level: float
    verify: Mapping[int, float]
    host: float = 0.0

    def of(self, levels: int, nodes: int) -> float:
        """A round of so many levels and rows."""
        draft = self.first_level + (levels - 1) * self.next_level if levels else 0.0
        return draft + self.verify[nodes] + self.host


class RoundPlan(NamedTuple):
    """What a round drafts and verifies: levels of drafting, and rows of each request, root included."""

    levels: int
    nodes: int


PLAIN = RoundPlan(0, 1)


class RoundPlanner:
    """Chooses one plan for a batch of one size.

    Args:
        seconds: of this size of batch.
        max_depth: levels that can be drafted.
        nodes: rows that graphs exist for, 1 first, ascending.
    """

    def __init__(self, seconds: RoundSeconds, max_depth: int, nodes: Sequence[int]):
        self.seconds, self.max_depth, self.nodes = seconds, max_depth, tuple(nodes)
        self._rows, self._levels = np.array(self.nodes), np.arange(1, max_depth + 1)
        held = np.cumsum(_USUAL**self._levels)
        # All [max_depth, len(nodes)], by levels and nodes: accepted drafted tokens, and modelled seconds of a round.
        self._held = np.minimum(held[:, None], self._rows - 1.0)
        self._modelled = np.array([[seconds.of(int(level), n) for n in self.nodes] for level in self._levels])
        # Measured over modelled seconds, NaN before a plan was tried: then it is taken to be like all others.
        self._ratios = np.full_like(self._modelled, np.nan)
        self._plain_ratio, self._ratio = np.nan, 1.0
        self._truth = 1.0  # accepted tokens over those that values promised
        self._seen = np.zeros_like(self._held)  # trees that said what each choice holds
        self._wait = self._since = _FIRST_LOOK  # rounds: between looks, and since the last one

    def choose(self, max_depth: int, max_nodes: int) -> RoundPlan:
        """The best plan within a depth and a number of nodes; `PLAIN` where speculation does not pay."""
        depth, most = min(max_depth, self.max_depth), self.fitting(max_nodes)
        if depth < 1 or most == 1:
            return PLAIN
        count = self.nodes.index(most) + 1
        exists = self._levels[:depth, None] < self._rows[:count]
        rates = np.where(exists, self._rates()[:depth, :count], 0.0)
        best = self._plan_at(rates.argmax(), count)
        if self.rate(best) <= _MARGIN * self.rate(PLAIN):
            best = PLAIN
        self._since += 1
        if self._since < self._wait:
            return best
        look = self._look(best, exists)  # not before: it takes the host 40 us
        self._since = 0
        if look != best:
            self._wait = min(2 * self._wait, _LONGEST_LOOK)
        return look

    def _look(self, best: RoundPlan, exists: np.ndarray) -> RoundPlan:
        """The dearest plan, which tells most, that may be tried beside `best`, and would pay were all of it accepted.

        Args:
            exists: bool [levels, nodes], the plans to choose from.
        """
        seconds = self._seconds()[: len(exists), : exists.shape[1]]
        pays = (1.0 + self._levels[: len(exists), None]) / seconds > _MARGIN * self.rate(PLAIN)
        tried = np.where(exists & pays & (seconds <= _DEAREST_LOOK * self._seconds_of(best)), seconds, 0.0)
        return self._plan_at(tried.argmax(), exists.shape[1]) if tried.any() else best

    def _plan_at(self, place: int | np.integer, columns: int) -> RoundPlan:
        level, column = divmod(int(place), columns)
        return RoundPlan(level + 1, self.nodes[column])

    def fitting(self, nodes: int) -> int:
        """The rows of the smallest graph that holds so many nodes, or the largest one's."""
        return next((each for each in self.nodes if each >= nodes), self.nodes[-1])

    def rate(self, plan: RoundPlan) -> float:
        """Tokens per second that a plan is expected to bring each request."""
        if not plan.levels:
            return 1.0 / self._seconds_of(PLAIN)
        return float(self._rates()[self._place(plan)])

    def observe(
        self, plan: RoundPlan, trees: Sequence[tuple[np.ndarray, np.ndarray]], accepted: Sequence[int], seconds: float
    ) -> None:
        """Learn from a round.

        Args:
            plan: what was drafted and verified.
            trees: values and depths of each request's nodes, root first.
            accepted: drafted tokens of each.
            seconds: that it took.
        """
        before = self.rate(plan)
        self._learn_seconds(plan, seconds)
        if not plan.levels or not trees:
            return
        held = np.mean([self._held_by(values, depths, plan) for values, depths in trees], axis=0)
        part = np.s_[: plan.levels, : held.shape[1]]
        self._seen[part] += 1
        self._held[part] += np.maximum(_MEMORY, 1 / self._seen[part]) * (held - self._held[part])
        # More levels or nodes hold no less than fewer: what was not seen is raised with what was.
        self._held = np.maximum.accumulate(np.maximum.accumulate(self._held, 0), 1)
        promised = float(held[-1, -1])
        if promised > 0:
            self._truth += _MEMORY * (min(float(np.mean(accepted)) / promised, 2.0) - self._truth)
        if self.rate(plan) > _MARGIN * before:
            self._wait = _LOOK

    def _held_by(self, values: np.ndarray, depths: np.ndarray, plan: RoundPlan) -> np.ndarray:
        """[levels, nodes]: what the best nodes of one tree promise, of so many levels and in so many rows."""
        order = 1 + np.argsort(-values[1:], kind="stable")
        value, depth = values[order], depths[order]
        allowed = depth <= self._levels[: plan.levels, None]  # [levels, nodes of the tree], best first
        place = allowed.cumsum(1)
        rows = self._rows[: self.nodes.index(plan.nodes) + 1]
        return ((allowed & (place < rows[:, None, None])) * value).sum(2).T

    def _rates(self) -> np.ndarray:
        return (1.0 + self._truth * self._held) / self._seconds()

    def _seconds(self) -> np.ndarray:
        """What a round takes by levels and nodes, as learned."""
        return self._modelled * np.where(np.isnan(self._ratios), self._ratio, self._ratios)

    def _seconds_of(self, plan: RoundPlan) -> float:
        if plan.levels:
            return float(self._seconds()[self._place(plan)])
        return self.seconds.of(*plan) * self._known(self._plain_ratio)

    def _known(self, ratio: float) -> float:
        return self._ratio if np.isnan(ratio) else ratio

    def _place(self, plan: RoundPlan) -> tuple[int, int]:
        return plan.levels - 1, self.nodes.index(plan.nodes)

    def _learn_seconds(self, plan: RoundPlan, seconds: float) -> None:
        modelled = self.seconds.of(*plan)
        known = self._known(float(self._ratios[self._place(plan)]) if plan.levels else self._plain_ratio)
        step = _MEMORY * (min(max(seconds / modelled, known / _LARGEST_STEP), known * _LARGEST_STEP) - known)
        self._ratio += _MEMORY * (known + step - self._ratio)
        if plan.levels:
            self._ratios[self._place(plan)] = known + step
        else:
            self._plain_ratio = known + step
