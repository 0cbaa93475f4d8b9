"""What the planner learns from rounds: whether speculation pays, and how far node values hold."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from treespec.planning.planner_config import PlannerConfig


class SpeculationBackoff:
    """Decides whether a way to speculate rests. It may lose a few rounds' time; then it rests, each time for longer.

    Args:
        requests: of the batch.
        config: credit and pauses.
    """

    def __init__(self, requests: int, config: PlannerConfig) -> None:
        self.gain = config.first_gain  # running mean: its tokens per second over plain decoding's
        self.resting = 0  # rounds
        self._requests, self._config = requests, config
        self._credit = config.credit / requests  # what it may still lose, in rounds of plain decoding
        self._pause = config.pause

    def observe(self, gain: float, rounds: float, paid: float = 0.0) -> None:
        """Learn from a round that was decoded this way and took as long as `rounds` of plain decoding; `paid`: rounds
        that were spent once, for many to come."""
        config = self._config
        self.gain += config.gain_memory * (gain - self.gain)
        self._credit += (gain - 1 - config.margin) * rounds - paid
        if self._credit < 0:
            self.resting, self._credit = self._pause, config.second_credit / self._requests
            self.gain = max(self.gain, config.second_gain)
            self._pause = min(2 * self._pause, config.longest_pause)
        elif self._credit > config.largest_credit / self._requests:
            self._credit, self._pause = config.largest_credit / self._requests, config.pause

    def miss(self) -> None:
        """Learn from a round that was not decoded this way: the gain drifts back to what was assumed at first."""
        self.gain += self._config.recovery * (self._config.first_gain - self.gain)


class Calibration:
    """Accepted tokens over those that node values promised, as a ratio of running means.

    The mean of the rounds' ratios, or of their differences, would follow the last long guess that held, or did not.

    Args:
        config: memory and prior.
    """

    def __init__(self, config: PlannerConfig) -> None:
        self._accepted = self._promised = config.calibration_prior
        self._config = config

    @property
    def value(self) -> float:
        return min(max(self._accepted / self._promised, 0.1), 1.2)

    def add(self, accepted: float, promised: float) -> None:
        """Learn from a round; both per request."""
        memory = self._config.calibration_memory
        self._accepted += memory * (accepted - self._accepted)
        self._promised += memory * (promised - self._promised)

    def miss(self) -> None:
        """Learn from a round that promised nothing."""
        self._accepted += self._config.recovery * (self._promised - self._accepted)


class RoundShapes(NamedTuple):
    """Tree shapes that a captured round exists for.

    Attributes:
        max_depth: levels that can be drafted.
        nodes: rows of the target pass of each request, 1 first, ascending.
    """

    max_depth: int
    nodes: tuple[int, ...]

    def fitting(self, nodes: int) -> int:
        """The rows of the smallest graph that holds so many nodes, or the largest one's."""
        return next((each for each in self.nodes if each >= nodes), self.nodes[-1])


class ScoredTree(Protocol):
    """What is learned from: float values [num_nodes] and int depths [num_nodes], root first."""

    @property
    def values(self) -> np.ndarray: ...

    @property
    def depths(self) -> np.ndarray: ...


class TreeYield:
    """Accepted tokens that trees of each shape promise, for rounds whose shape is chosen before they start.

    A tree that comes back tells of every smaller one: the value of a node is the probability that it is accepted, so a
    smaller tree holds the sum of its best nodes' values. Larger shapes are assumed to hold somewhat more until they
    are tried, and drift back to that assumption while they are not.

    Args:
        shapes: to choose from.
        config: memory and assumptions.
    """

    def __init__(self, shapes: RoundShapes, config: PlannerConfig):
        self.shapes, self._config = shapes, config
        self._rows, self._levels = np.array(shapes.nodes), np.arange(1, shapes.max_depth + 1)
        self._most = np.minimum(self._levels[:, None], self._rows - 1.0)  # [levels, nodes], were all accepted
        self._prior = np.minimum(np.cumsum(config.reach**self._levels)[:, None], self._most)
        self.promised = self._prior.copy()  # [levels, nodes]
        self._seen = np.zeros_like(self.promised)  # trees that said what each shape holds

    def observe(self, levels: int, nodes: int, trees: Sequence[ScoredTree]) -> None:
        """Learn from a round's trees, which had this shape at most."""
        config, columns = self._config, self.shapes.nodes.index(nodes) + 1
        held = np.mean([self._promised_by(tree, levels, columns) for tree in trees], axis=0)
        part = np.s_[:levels, :columns]
        self._seen[part] += 1
        self.promised[part] += np.maximum(config.seconds_memory, 1 / self._seen[part]) * (held - self.promised[part])
        self._assume(levels, columns)

    def miss(self) -> None:
        """Learn from a round without trees."""
        self.promised += self._config.recovery * np.maximum(self._prior - self.promised, 0.0)

    def _assume(self, levels: int, columns: int) -> None:
        """Let shapes larger than that of the last round drift to what they are assumed to hold."""
        config, known = self._config, self.promised[:levels, :columns]
        assumed = self._most.copy()
        wider = known[:, -1:]
        assumed[:levels, :columns] = known
        assumed[:levels, columns:] = wider + config.untried_share * (self._most[:levels, columns:] - wider)
        last = assumed[levels - 1]
        newest = last - (assumed[levels - 2] if levels > 1 else 0.0)  # what the deepest level holds
        further = np.cumsum(config.reach ** np.arange(1, len(self._levels) - levels + 1))
        assumed[levels:] = np.minimum(last + further[:, None] * np.maximum(newest, 0.0), self._most[levels:])
        untried = np.ones_like(assumed, dtype=bool)
        untried[:levels, :columns] = False
        weights = np.where(self._seen > 0, config.exploration, 1.0)
        self.promised += np.where(untried, weights * (assumed - self.promised), 0.0)
        # More levels or nodes hold no less than fewer.
        self.promised = np.maximum.accumulate(np.maximum.accumulate(self.promised, 0), 1)

    def _promised_by(self, tree: ScoredTree, levels: int, columns: int) -> np.ndarray:
        """[levels, columns]: what the best nodes of one tree promise, of so many levels and in so many rows."""
        order = 1 + np.argsort(-tree.values[1:], kind="stable")
        value, depth = tree.values[order], tree.depths[order]
        allowed = depth <= self._levels[:levels, None]  # [levels, nodes of the tree], best first
        place = allowed.cumsum(1)
        return ((allowed & (place < self._rows[:columns, None, None])) * value).sum(2).T
