"""Draft plans, drafting statistics, and the growth rule: the interface between planner and drafters."""

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
    """

    max_depth: int
    levels: int
    nodes: int
    branching: tuple[int, ...] | None = None
    adaptive: bool = False
    min_trust: float = 0.0
    max_ssms: int | None = None


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
