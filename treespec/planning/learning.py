"""Online estimates of the planner: backoff, calibration of node values, and expected tokens by tree shape.

Percentages in comments: see round_costs.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from treespec.planning.round_costs import RoundCosts
from treespec.tree import TokenTree

# Durations are in rounds of plain decoding; weights of running means are those of the newest round.
PAUSE, MAX_PAUSE = 64, 1024  # first and longest pause (always 64: +2.3 %, useless drafts)
# Loss that a request's speculation may accumulate before it pauses, the same after a pause, and the limit of
# accumulated gains. Acceptance comes in bursts: with a fifth of the credit, lookup paused through most texts and gained
# 1.11 to 1.15 instead of 1.52 to 1.61. A batch of n requests gets an n-th, because its requests' bursts average out.
CREDIT, RETRY_CREDIT, MAX_CREDIT = 10.0, 5.0, 20.0
MARGIN = 0.04  # gain over plain decoding that counts as zero, about the error of modelled seconds
# Calibration of node values: prior, weight of the prior and memory of observations, both in levels.
INITIAL_CALIBRATION, PRIOR_LEVELS, MEMORY = 0.85, 8.0, 60.0
# Accepted tokens of rounds with SSM drafts: prior for a first level, its weight in rounds, and the minimum weight of
# the newest round. A request's own rounds are weighted against the mean of all, which counts as PRIOR_ROUNDS rounds.
FIRST_ACCEPTED, PRIOR_ROUNDS, ACCEPTED_EMA = 1.0, 8, 0.03
# Decay towards the priors per round without drafts (without: +15 %, when the text becomes predictable).
RECOVERY = 0.0015
EMA = 0.1  # weight of the newest round in the expected tokens of tree shapes
EXPLORATION = 0.0008  # step per round by which the expected tokens of tree shapes recover


class SpeculationBackoff:
    """Exponential backoff of one kind of speculation (without: +30 % of useless drafts).

    A credit absorbs the time that speculation loses against plain decoding; gains restore it up to a limit. When the
    credit is used up, speculation pauses, each time for twice as long. At the limit, the pause is reset.
    """

    def __init__(self, requests: int) -> None:
        self.pause_left, self._pause = 0, PAUSE  # remaining rounds of the current pause, and length of the next one
        self._requests, self._credit = requests, CREDIT / requests  # smallest batch that shares the credit

    def observe(self, gain: float, rounds: float) -> None:
        """Update the credit from a round with a relative `gain` in tokens per second over plain decoding.

        `rounds`: its duration in rounds of plain decoding.
        """
        self._credit += (gain - 1 - MARGIN) * rounds
        if self._credit < 0:
            self.pause_left, self._credit = self._pause, RETRY_CREDIT / self._requests
            self._pause = min(2 * self._pause, MAX_PAUSE)
        elif self._credit > MAX_CREDIT / self._requests:
            self._credit, self._pause = MAX_CREDIT / self._requests, PAUSE


class Calibration:
    """Ratio of accepted to predicted levels; a node's value is multiplied by it once per level of its depth.

    A draft that is overconfident of its next token is equally so of the following one, so a value's error grows with
    depth. Counted levels are those of the accepted path, and the first one after it.
    """

    def __init__(self) -> None:
        self._accepted, self._predicted = INITIAL_CALIBRATION * PRIOR_LEVELS, PRIOR_LEVELS

    @property
    def value(self) -> float:
        """Accepted over predicted levels, clipped to [0.1, 1], so that values never increase along a path."""
        return min(max(self._accepted / self._predicted, 0.1), 1.0)

    def add(self, tree: TokenTree, accepted: int) -> None:
        """Update with a verified tree and its number of accepted nodes."""
        reached = np.bincount(tree.depths, tree.values).tolist()  # predicted probability of reaching each depth
        tried = min(accepted + 1, len(reached) - 1)
        kept = 1 - tried / MEMORY
        self._accepted = kept * self._accepted + min(accepted, tried)
        shares = [below / above if below < above else 1.0 for above, below in pairwise(reached[: tried + 1])]
        self._predicted = kept * self._predicted + sum(shares)

    def recover(self, share: float) -> None:
        """Move towards the initial value by `share`."""
        self._accepted += share * (INITIAL_CALIBRATION * PRIOR_LEVELS - self._accepted)
        self._predicted += share * (PRIOR_LEVELS - self._predicted)


class DraftedMeans:
    """Means over rounds with SSM drafts: accepted tokens per request, and seconds of all levels after the first."""

    def __init__(self, rounds: float = 0.0) -> None:
        self.rounds = rounds  # number of rounds in the means
        self.accepted, self.later_seconds = FIRST_ACCEPTED, 0.0

    def add(self, accepted: float, later_seconds: float) -> None:
        self.rounds += 1
        weight = max(ACCEPTED_EMA, 1 / self.rounds)
        self.accepted += weight * (accepted - self.accepted)
        self.later_seconds += weight * (later_seconds - self.later_seconds)

    def recover(self, share: float) -> None:
        """Move towards the prior by `share`."""
        self.accepted += share * (FIRST_ACCEPTED - self.accepted)
        self.later_seconds *= 1 - share


@dataclass(frozen=True)
class RoundShapes:
    """Tree shapes of captured rounds."""

    max_depth: int  # D, the maximum number of draft levels
    nodes: tuple[int, ...]  # target pass rows per request, by graph, ascending; the first is 1 (plain decoding)

    def fitting(self, nodes: int) -> int:
        """Return the rows of the smallest graph that fits `nodes` nodes, or of the largest graph."""
        return next((size for size in self.nodes if size >= nodes), self.nodes[-1])


class TreeYield:
    """Expected accepted tokens of each tree shape, for rounds whose shape is chosen in advance.

    Node values are acceptance probabilities, so the expected accepted tokens of a tree are the sum of its values. A
    verified tree therefore yields an estimate for every smaller shape: the sum of its best values within that shape.
    All shapes start from the assumption that every node is accepted, so the largest shape is tried first, which yields
    an estimate for all of them.
    """

    def __init__(self, shapes: RoundShapes):
        self.shapes = shapes
        self._rows, self._levels = np.array(shapes.nodes), np.arange(1, shapes.max_depth + 1)
        # [levels, nodes], accepted tokens if all nodes are
        self._upper_bound = np.minimum(self._levels[:, None], self._rows - 1.0)
        self.promised = self._upper_bound.copy()  # [levels, nodes], expected accepted tokens
        self._seen = np.zeros_like(self.promised)  # number of rounds in each shape's estimate
        self._best_shapes: dict[int, tuple[int, int]] = {}  # by depth, until the next round

    def observe(self, levels: int, nodes: int, trees: Sequence[TokenTree], calibration: float = 1.0) -> None:
        """Update from a round's verified adaptive trees, which have at most `levels` levels and `nodes` nodes."""
        columns = self.shapes.nodes.index(nodes) + 1
        observed = np.mean([self._value_sums(tree, levels, columns, calibration) for tree in trees], axis=0)
        region = np.s_[:levels, :columns]
        self._seen[region] += 1
        self.promised[region] += np.maximum(EMA, 1 / self._seen[region]) * (observed - self.promised[region])
        # Expected tokens never decrease with more levels or nodes.
        self.promised = np.maximum.accumulate(np.maximum.accumulate(self.promised, 0), 1)

    def recover(self, share: float = EXPLORATION) -> None:
        """Move every shape towards its maximum, so that shapes with low estimates are retried. Call it every round."""
        self.promised += share * (self._upper_bound - self.promised)
        self._best_shapes.clear()

    def best_shape(self, costs: RoundCosts, depth: int) -> tuple[int, int]:
        """Return the (levels, nodes) with the most expected tokens per second, for at most `depth` levels.

        Returns (0, 1), plain decoding, unless the gain over it exceeds the margin.
        """
        if (best := self._best_shapes.get(depth)) is not None:
            return best
        curve, levels = costs.curve, self._levels[:depth]
        draft = curve.draft_start_seconds + levels * curve.draft_seconds
        seconds = draft[:, None] + costs.verify_each(self._rows) + costs.host("drafted")
        rates = np.where(levels[:, None] < self._rows, (1 + self.promised[:depth]) / seconds, 0.0)
        level, column = divmod(int(rates.argmax()), len(self._rows))
        pays = rates[level, column] * costs.plain > 1 + MARGIN
        best = self._best_shapes[depth] = (level + 1, self.shapes.nodes[column]) if pays else (0, 1)
        return best

    def _value_sums(self, tree: TokenTree, levels: int, columns: int, calibration: float) -> np.ndarray:
        """Return the sum of one tree's best values within each smaller shape, float64 [levels, columns]."""
        order = 1 + np.argsort(-tree.values[1:], kind="stable")
        depth = tree.depths[order]
        value = tree.values[order] * calibration**depth
        allowed = depth <= self._levels[:levels, None]  # [levels, nodes of the tree], best first
        rank = allowed.cumsum(1)
        return ((allowed & (rank < self._rows[:columns, None, None])) * value).sum(2).T
