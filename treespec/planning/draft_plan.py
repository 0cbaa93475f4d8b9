"""Draft plans: what a round asks of the SSMs, and what they did for it."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


@dataclass(frozen=True)
class DraftPlan:
    """What to grow for one request.

    Args:
        max_depth: bounds the sources that run no model.
        levels: bounds what SSMs draft.
        nodes: how many nodes the tree will be cut to: only nodes that can be among them are expanded.
        branching: children per node by depth (static policy); None lets probabilities decide.
        adaptive: stop growing as soon as another level is not expected to pay.
        min_trust: mixture weight that an SSM must have to draft; with less its proposals are not worth its time.
        max_ssms: how many may draft; None = all.
    """

    max_depth: int
    levels: int
    nodes: int
    branching: tuple[int, ...] | None = None
    adaptive: bool = False
    min_trust: float = 0.0
    max_ssms: int | None = None


class Drafted(NamedTuple):
    """What a round of drafting did.

    Attributes:
        levels: of the trees.
        passes: of one SSM over a level.
        request_passes: the same, counted once for each request in them.
        read_tokens, read_seconds: committed tokens that SSMs had missed, summed over the SSMs, and their time.
    """

    levels: int
    passes: int
    request_passes: int = 0
    read_tokens: int = 0
    read_seconds: float = 0.0


NOTHING_DRAFTED = Drafted(0, 0)


class GrowthRule(Protocol):
    """Decides whether another level of the adaptive trees is worth drafting."""

    @property
    def least_value(self) -> float:
        """The value of a node that is worth its row of the target pass."""

    def worth_a_level(self, trees: np.ndarray, open_mass: np.ndarray, reached: np.ndarray | None) -> np.ndarray:
        """Which of these trees grow by another level; bool [num trees]. Asked before each level, the first too.

        Args:
            trees: int64 [num trees], their requests' places in the batch.
            open_mass: float64 [num trees], the chance that a tree's frontier is reached and no other source says what
                follows.
            reached: float64 [num trees], which share of the last level's open mass its nodes turned out to hold; None
                before the first level.
        """
