"""Draft plans, prices and drafting statistics: the interface between planner and drafters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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


@dataclass
class Drafted:
    """Amount of work that the SSMs did in a round.

    Attributes:
        levels: draft levels.
        passes: draft passes, one per level and SSM; a block draft's levels count, too.
        request_passes: draft passes times the requests in each.
        read_tokens: committed tokens that SSMs had not read yet and read first, summed over the SSMs.
        read_seconds: time of reading them.
    """

    levels: int = 0
    passes: int = 0
    request_passes: int = 0
    read_tokens: int = 0
    read_seconds: float = 0.0

    def add_pass(self, requests: int) -> None:
        """Count a draft pass over trees of this many requests."""
        self.passes, self.request_passes = self.passes + 1, self.request_passes + requests


NOTHING_DRAFTED = Drafted()
