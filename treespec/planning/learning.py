"""Online estimates of the planner: backoff, calibration of node values, and expected tokens by tree shape."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from treespec.planning.planner_config import PlannerConfig


class SpeculationBackoff:
    """Exponential backoff of one kind of speculation.

    A credit absorbs the time that speculation loses against plain decoding; gains restore it up to a limit. When the
    credit is used up, speculation pauses, each time for twice as long. At the upper limit the pause is reset.

    Args:
        requests: smallest number of requests in the batch; the credit is divided by it.
        config: credit and pauses.

    Attributes:
        gain: running mean of tokens per second over plain decoding's.
        pause_left: rounds left of the current pause; 0 if speculation is enabled.
    """

    def __init__(self, requests: int, config: PlannerConfig) -> None:
        self.gain = config.initial_gain
        self.pause_left = 0
        self._requests, self._config = requests, config
        self._credit = config.credit / requests  # in rounds of plain decoding
        self._pause = config.pause  # rounds of the next pause

    def observe(self, gain: float, rounds: float, paid: float = 0.0) -> None:
        """Update gain and credit from a round of this kind of speculation.

        Args:
            gain: tokens per second of the round over plain decoding's.
            rounds: duration of the round, in rounds of plain decoding.
            paid: one-time cost within the round (reading prompts), in rounds of plain decoding.
        """
        config = self._config
        self.gain += config.gain_ema * (gain - self.gain)
        self._credit += (gain - 1 - config.margin) * rounds - paid
        if self._credit < 0:
            self.pause_left, self._credit = self._pause, config.retry_credit / self._requests
            self.gain = max(self.gain, config.retry_gain)
            self._pause = min(2 * self._pause, config.max_pause)
        elif self._credit > config.max_credit / self._requests:
            self._credit, self._pause = config.max_credit / self._requests, config.pause

    def miss(self) -> None:
        """Decay the gain towards its prior after a round without this kind of speculation."""
        self.gain += self._config.recovery * (self._config.initial_gain - self.gain)


class Calibration:
    """Ratio of accepted tokens to the tokens that node values predicted.

    It is a ratio of running means. A mean of the per-round ratios or differences would follow the outcome of the last
    long draft.

    Args:
        config: weight of the newest round and prior.
    """

    def __init__(self, config: PlannerConfig) -> None:
        self._accepted = self._predicted = config.calibration_prior
        self._config = config

    @property
    def value(self) -> float:
        """Accepted over predicted tokens, clipped to [0.1, 1.2]."""
        return min(max(self._accepted / self._predicted, 0.1), 1.2)

    def add(self, accepted: float, predicted: float) -> None:
        """Update with the accepted and predicted tokens of a round, both per request."""
        weight = self._config.calibration_ema
        self._accepted += weight * (accepted - self._accepted)
        self._predicted += weight * (predicted - self._predicted)

    def miss(self) -> None:
        """Decay towards a ratio of 1 after a round without drafted nodes of this kind."""
        self._accepted += self._config.recovery * (self._predicted - self._accepted)


class RoundShapes(NamedTuple):
    """Tree shapes that captured rounds exist for.

    Attributes:
        max_depth: maximum number of draft levels.
        nodes: rows per request of the target pass, by graph, ascending; the first is 1 (plain decoding).
    """

    max_depth: int
    nodes: tuple[int, ...]

    def fitting(self, nodes: int) -> int:
        """Return the rows of the smallest graph with room for `nodes` nodes, or of the largest graph."""
        return next((each for each in self.nodes if each >= nodes), self.nodes[-1])


class ScoredTree(Protocol):
    """A verified tree: float `values` [num_nodes] and int `depths` [num_nodes], root first."""

    @property
    def values(self) -> np.ndarray: ...

    @property
    def depths(self) -> np.ndarray: ...


class TreeYield:
    """Expected accepted tokens of each tree shape, for rounds whose shape is chosen in advance.

    Node values are acceptance probabilities, so the expected accepted tokens of a tree are the sum of its values. A
    verified tree therefore yields an estimate for every smaller shape: the sum of its best values within that shape.
    Larger shapes start from an optimistic extrapolation and decay back to it while they are not tried.

    Args:
        shapes: the shapes to choose from.
        config: running-mean weights and priors.

    Attributes:
        promised: expected accepted tokens before calibration, float64 [max_depth, len(shapes.nodes)].
    """

    def __init__(self, shapes: RoundShapes, config: PlannerConfig):
        self.shapes, self._config = shapes, config
        self._rows, self._levels = np.array(shapes.nodes), np.arange(1, shapes.max_depth + 1)
        self._most = np.minimum(self._levels[:, None], self._rows - 1.0)  # [levels, nodes], upper bound: all accepted
        self._prior = np.minimum(np.cumsum(config.coverage**self._levels)[:, None], self._most)
        self.promised = self._prior.copy()
        self._seen = np.zeros_like(self.promised)  # number of rounds that each shape was estimated from

    def observe(self, levels: int, nodes: int, trees: Sequence[ScoredTree]) -> None:
        """Update from a round's trees.

        Args:
            levels, nodes: shape of the round, an upper bound of every tree's.
            trees: the verified adaptive trees.
        """
        config, columns = self._config, self.shapes.nodes.index(nodes) + 1
        observed = np.mean([self._value_sums(tree, levels, columns) for tree in trees], axis=0)
        part = np.s_[:levels, :columns]
        self._seen[part] += 1
        self.promised[part] += np.maximum(config.seconds_ema, 1 / self._seen[part]) * (observed - self.promised[part])
        self._extrapolate(levels, columns)

    def miss(self) -> None:
        """Decay towards the prior, upwards only, after a round without drafted trees."""
        self.promised += self._config.recovery * np.maximum(self._prior - self.promised, 0.0)

    def _extrapolate(self, levels: int, columns: int) -> None:
        """Move the shapes beyond the last round's (`levels`, `columns`) towards an extrapolation from it."""
        config, known = self._config, self.promised[:levels, :columns]
        assumed = self._most.copy()
        wider = known[:, -1:]
        assumed[:levels, :columns] = known
        assumed[:levels, columns:] = wider + config.untried_share * (self._most[:levels, columns:] - wider)
        last = assumed[levels - 1]
        newest = last - (assumed[levels - 2] if levels > 1 else 0.0)  # accepted tokens of the deepest level
        further = np.cumsum(config.coverage ** np.arange(1, len(self._levels) - levels + 1))
        assumed[levels:] = np.minimum(last + further[:, None] * np.maximum(newest, 0.0), self._most[levels:])
        untried = np.ones_like(assumed, dtype=bool)
        untried[:levels, :columns] = False
        weights = np.where(self._seen > 0, config.exploration, 1.0)
        self.promised += np.where(untried, weights * (assumed - self.promised), 0.0)
        # Expected tokens never decrease with more levels or nodes.
        self.promised = np.maximum.accumulate(np.maximum.accumulate(self.promised, 0), 1)

    def _value_sums(self, tree: ScoredTree, levels: int, columns: int) -> np.ndarray:
        """Return the sums of one tree's best values within each smaller shape, float64 [levels, columns]."""
        order = 1 + np.argsort(-tree.values[1:], kind="stable")
        value, depth = tree.values[order], tree.depths[order]
        allowed = depth <= self._levels[:levels, None]  # [levels, nodes of the tree], best first
        rank = allowed.cumsum(1)
        return ((allowed & (rank < self._rows[:columns, None, None])) * value).sum(2).T
