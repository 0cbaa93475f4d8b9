"""Draft plans, drafting statistics, and the growth rule: the interface between planner and drafters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


@dataclass(frozen=True)
class DraftPlan:
    """Limits for the tree of one request.

    Args:
        max_depth: maximum depth of proposals from sources without a model.
        levels: maximum number of levels that SSMs draft.
        nodes: size that the tree is cut to; only nodes that can be among these are expanded.
        branching: children per node by depth (static policy); None = chosen by probability.
        adaptive: whether growth stops as soon as another level is not expected to pay.
        min_trust: minimum mixture weight of an SSM; below it, its proposals do not pay for its pass.
        max_ssms: maximum number of SSMs that draft; None = all.
        time_left: expected time until the request ends, as the number of tokens that an SSM could read meanwhile.
    """

    max_depth: int
    levels: int
    nodes: int
    branching: tuple[int, ...] | None = None
    adaptive: bool = False
    min_trust: float = 0.0
    max_ssms: int | None = None
    time_left: float = math.inf


class Drafted(NamedTuple):
    """Amount of work that the SSMs did in a round.

    Attributes:
        levels: draft levels.
        passes: draft passes, one per level and SSM.
        request_passes: draft passes times the requests in each.
        read_tokens: committed tokens that SSMs had not read yet and read first, summed over the SSMs.
        read_seconds: time of reading them.
    """

    levels: int
    passes: int
    request_passes: int = 0
    read_tokens: int = 0
    read_seconds: float = 0.0


NOTHING_DRAFTED = Drafted(0, 0)


@dataclass
class LevelRule:
    """The planner's decision whether another draft level pays, in the numbers of one round.

    `growth_cpu.cpp` takes the same decisions between the levels of one call, so all sums are plain loops over doubles,
    in the order of the trees. Expected tokens and costs have the same unit; the price of time converts the latter.

    Attributes:
        calibration: accepted tokens per token that node values predict.
        coverage: running mean of the coverage of first levels; `worth_a_level` updates it with this round's.
        coverage_weight: weight of this round's first level in it; 0 once it is included.
        last_level_weight: weight of the last level's coverage in that expected of the next one.
        token_weights: weight of a token, by request of the batch.
        start_cost: cost of starting to draft.
        level_cost: cost of a level of one tree.
        marginal_cost: cost of a further tree in a level.
        max_levels: maximum number of levels that any tree has room for.
    """

    calibration: float
    coverage: float
    coverage_weight: float
    last_level_weight: float
    token_weights: Sequence[float]
    start_cost: float
    level_cost: float
    marginal_cost: float
    max_levels: int

    def worth_a_level(self, trees: np.ndarray, open_mass: np.ndarray, reached: np.ndarray | None) -> np.ndarray:
        """Return which of these trees grow by another level, bool [num trees]; see `GrowthRule.worth_a_level`.

        The expected coverage of the next level is a weighted mean of the previous level's and the running mean.
        """
        coverages = [self.coverage] * len(trees)
        if reached is not None:
            own = np.minimum(reached, 1.0).tolist()
            self.coverage += self.coverage_weight * (_sum(own) / len(own) - self.coverage)
            self.coverage_weight = 0.0
            coverages = [self.coverage + self.last_level_weight * (each - self.coverage) for each in own]
        rows = zip(open_mass.tolist(), coverages, trees.tolist(), strict=True)
        expected = [self.calibration * mass * coverage * self.token_weights[tree] for mass, coverage, tree in rows]
        return np.array(self.pays(expected, begins=reached is None), dtype=bool)

    def pays(self, expected: Sequence[float], begins: bool) -> list[bool]:
        """Return which trees' next level is expected to gain more tokens than its time costs.

        Uses lists because batches are small: one NumPy operation takes longer than a loop over them.

        Args:
            expected: accepted tokens expected from the level, weighted, by tree.
            begins: whether this is the round's first level, which must also repay the start of drafting.
        """
        growing = [each for each in expected if each > self.marginal_cost]
        level = self.level_cost + max(len(growing) - 1, 0) * self.marginal_cost
        start = self.start_cost if begins else 0.0
        if not repays_start(_sum(growing), level, start, self.coverage, self.max_levels):
            return [False] * len(expected)
        return [each > self.marginal_cost for each in expected]


def repays_start(expected: float, level: float, start: float, coverage: float, max_levels: int) -> bool:
    """Return whether consecutive levels gain more than the start of drafting costs.

    Expected tokens shrink by the coverage from level to level; drafting ends at the first level that does not pay for
    itself.

    Args:
        expected: tokens expected from the first level.
        level, start: cost of each level and of the start, in the unit of `expected`.
        coverage, max_levels: as in `LevelRule`.
    """
    gained = -start
    for _ in range(max_levels):
        if expected <= level:
            break
        gained += expected - level
        expected *= coverage
    return gained > 0


def _sum(numbers: Sequence[float]) -> float:
    """Return the sum in order; since Python 3.12, the built-in `sum` compensates rounding."""
    total = 0.0
    for number in numbers:
        total += number
    return total


class GrowthRule(Protocol):
    """Decides whether to draft another level of the adaptive trees."""

    @property
    def least_value(self) -> float:
        """Minimum value at which a node pays for its row of the target pass."""

    def worth_a_level(self, trees: np.ndarray, open_mass: np.ndarray, reached: np.ndarray | None) -> np.ndarray:
        """Return which of these trees grow by another level, bool [num trees]. Called before each level.

        Args:
            trees: int64 [num trees], indices of their requests in the batch.
            open_mass: float64 [num trees], the probability that a tree's frontier is reached and no other source covers
                the next token.
            reached: float64 [num trees], coverage of the last level: the share of its open mass that its nodes hold;
                None before the first level.
        """

    def level_rule(self) -> LevelRule:
        """Return the rule of this round, for decisions that are taken elsewhere."""

    def adopt(self, rule: LevelRule) -> None:
        """Learn from the levels on which `rule`, from `level_rule`, has decided."""
