"""Draft plans and drafting statistics: the interface between planner and drafters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Why a request drafts nothing in a round; see `RoundRecord`.
PlainReason = Literal[
    "off", "room", "reading", "drafting_paused", "drafting_cost", "model_free_paused", "nothing_proposed", "cut"
]

MAX_STALL = 0.1  # seconds by which one request's prompt may delay the tokens of the others in a round


@dataclass(frozen=True)
class DraftPlan:
    """Limits for the tree of one request."""

    max_depth: int  # maximum depth of proposals from sources without a model
    levels: int  # maximum number of levels that SSMs draft
    nodes: int  # size that the tree is cut to; only nodes that can be among these are expanded
    branching: Sequence[int] | None = None  # children per node by depth (static policy); None = chosen by probability
    adaptive: bool = False  # whether growth stops as soon as another level is not expected to pay
    least_addition: float = 0.0  # share of the drafted tokens that an SSM must add to the others' to pay for its pass
    max_ssms: int | None = None  # number of SSMs that draft; None = those that pay
    time_left: float = math.inf  # expected until the request ends, in tokens that an SSM could read meanwhile
    max_read: float = math.inf  # maximum number of committed tokens that the SSMs read in this round
    plain_reasons: tuple[PlainReason, ...] = ()  # why sources are not asked


@dataclass
class Drafted:
    """Amount of work that the SSMs did in a round."""

    levels: int = 0
    passes: int = 0  # draft passes, one per level and SSM; a block draft's levels count, too
    request_passes: int = 0  # draft passes times the requests in each
    read_tokens: int = 0  # committed tokens that SSMs had not read yet and read first, summed over the SSMs
    read_seconds: float = 0.0

    def add_pass(self, requests: int) -> None:
        self.passes, self.request_passes = self.passes + 1, self.request_passes + requests


NOTHING_DRAFTED = Drafted()
