"""Draft plans, prices, drafting statistics, and the rule of levels: the interface between planner and drafters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

COVERAGE = 0.7  # share of its open mass that a draft level is expected to hold


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
    branching: Sequence[int] | None = None
    adaptive: bool = False
    min_trust: float = 0.0
    max_ssms: int | None = None
    time_left: float = math.inf


class Prices(Protocol):
    """The planner's prices of this round, for drafters that decide by themselves what pays."""

    @property
    def rate(self) -> float:
        """Price of time in weighted tokens per second."""

    @property
    def least_value(self) -> float:
        """Minimum value at which a node pays for its row of the target pass."""


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


@dataclass(frozen=True)
class LevelRule:
    """The planner's decision whether another draft level pays, in the numbers of one round.

    `growth_cpu.cpp` takes the same decisions between the levels of one call, so all sums are plain loops over doubles,
    in the order of the trees. Expected tokens and costs have the same unit; the price of time converts the latter.

    Attributes:
        calibration: accepted tokens per token that node values predict.
        token_weights: weight of a token, by request of the batch.
        start_cost: cost of starting to draft.
        level_cost: cost of a level of one tree.
        marginal_cost: cost of a further tree in a level. All trees decided together: +4 %, see round_costs.py.
        least_value: minimum value at which a node pays for its row of the target pass.
    """

    calibration: float
    token_weights: Sequence[float]
    start_cost: float
    level_cost: float
    marginal_cost: float
    least_value: float

    def worth_a_level(self, trees: np.ndarray, open_mass: np.ndarray, reached: np.ndarray | None) -> np.ndarray:
        """Return which of these adaptive trees grow by another level, bool [num trees]. Called before each level.

        The next level is expected to hold the same share of its open mass as the last one, and the first level
        `COVERAGE` of it.

        Args:
            trees: int64 [num trees], indices of their requests in the batch.
            open_mass: float64 [num trees], the probability that a tree's frontier is reached and no other source covers
                the next token.
            reached: float64 [num trees], the share of the last level's open mass that its nodes hold; None before the
                first level.
        """
        shares = [COVERAGE] * len(trees) if reached is None else np.minimum(reached, 1.0).tolist()
        rows = zip(open_mass.tolist(), shares, trees.tolist(), strict=True)
        expected = [self.calibration * mass * share * self.token_weights[tree] for mass, share, tree in rows]
        return np.array(self.pays(expected, begins=reached is None), dtype=bool)

    def pays(self, expected: Sequence[float], begins: bool) -> list[bool]:
        """Return which trees' next level is expected to gain more tokens than its time costs.

        Uses lists because batches are small: one NumPy operation takes longer than a loop over them.

        Args:
            expected: accepted tokens expected from the level, weighted, by tree.
            begins: whether this is the round's first level, which must also repay the start of drafting.
        """
        total, growing = 0.0, 0
        for gain in expected:
            if gain > self.marginal_cost:  # no `sum`: since Python 3.12 it compensates rounding
                total, growing = total + gain, growing + 1
        cost = self.level_cost + max(growing - 1, 0) * self.marginal_cost + (self.start_cost if begins else 0.0)
        return [total > cost and gain > self.marginal_cost for gain in expected]
