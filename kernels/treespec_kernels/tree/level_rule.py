"""The stopping rule for growing trees level by level, in Python and in C++."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class LevelRule:
    """The planner's decision whether another draft level pays off, with the parameters of one round.

    `growth_cpu.cpp` makes the same decisions between the levels of one call, so all sums are plain loops over doubles,
    in the order of the trees. Expected tokens and costs have the same unit; the price of time converts costs to tokens.
    """

    calibration: float  # factor on a node's value per level of depth, see `Calibration` of the planner
    # Expected accepted tokens of a drafted tree if no other source covers the next token, minus the cost of its further
    # levels
    first_gain: float
    token_weights: Sequence[float]  # weight of a token, by tree of the batch
    start_cost: float  # cost of starting to draft
    level_cost: float  # cost of one tree's level
    marginal_cost: float  # cost of an additional tree in a level. All trees decided together: +4 %, see round_costs.py
    least_value: float  # minimum value at which a node pays for its row of the target pass

    def select(self, trees: Sequence[int]) -> "LevelRule":
        """Return the rule for a batch of some of the trees."""
        return replace(self, token_weights=[self.token_weights[tree] for tree in trees])

    def worth_a_level(
        self, trees: np.ndarray, open_mass: np.ndarray, reached: np.ndarray | None, depth: int = 0
    ) -> np.ndarray:
        """Return which of these adaptive trees grow by another level, bool [num trees]. Call it before each level.

        The next level is expected to hold the same share of its open mass as the last one, and the first level to gain
        `first_gain` times its open mass.

        Args:
            trees: int64 [num trees], their indices in the batch.
            open_mass: float64 [num trees], the probability that a tree's frontier is reached and no other source covers
                the next token.
            reached: float64 [num trees], the share of the last level's open mass that its nodes hold; None before the
                first level.
            depth: depth of the frontier.
        """
        factor = 1.0 if reached is None else self.calibration
        for _ in range(depth):
            factor *= self.calibration
        shares = [self.first_gain] * len(trees) if reached is None else np.minimum(reached, 1.0).tolist()
        rows = zip(open_mass.tolist(), shares, trees.tolist(), strict=True)
        expected = [factor * mass * share * self.token_weights[tree] for mass, share, tree in rows]
        return np.array(self.pays(expected, begins=reached is None), dtype=bool)

    def pays(self, expected: Sequence[float], begins: bool) -> list[bool]:
        """Return which trees' next level is expected to gain more tokens than its time costs.

        Uses lists because batches are small: one NumPy operation takes longer than a loop.

        Args:
            expected: accepted tokens expected from the level, weighted, by tree.
            begins: whether this is the round's first level, which must also repay the start of drafting.
        """
        total, growing = 0.0, 0
        for gain in expected:
            if gain > self.marginal_cost:  # not `sum`: since Python 3.12 it compensates rounding
                total, growing = total + gain, growing + 1
        cost = self.level_cost + max(growing - 1, 0) * self.marginal_cost + (self.start_cost if begins else 0.0)
        return [total > cost and gain > self.marginal_cost for gain in expected]
