"""Draft plans and drafting statistics: the interface between planner and drafters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Reasons for a request without drafts in a round; see `RoundRecord`.
PlainReason = Literal[
    "off", "room", "reading", "drafting_paused", "drafting_cost", "model_free_paused", "nothing_proposed", "cut"
]

MAX_STALL = 0.1  # maximum seconds by which a request's prompt may delay the tokens of the others in a round


@dataclass(frozen=True)
class DraftPlan:
    """Limits for the tree of one request."""

    max_depth: int  # maximum depth of proposals from model-free sources
    levels: int  # maximum number of levels that SSMs draft
    nodes: int  # tree size after pruning; only nodes that can be kept are expanded
    branching: Sequence[int] | None = None  # children per node by depth (static policy); None: selected by probability
    adaptive: bool = False  # whether growth stops as soon as another level is not expected to pay off
    least_addition: float = 0.0  # minimum share of drafted tokens that an SSM must add to pay for its pass
    max_ssms: int | None = None  # maximum number of SSMs that draft; None: all that pay off
    time_left: float = math.inf  # expected time until the request ends, in tokens that an SSM could read in it
    max_read: float = math.inf  # maximum committed tokens that the SSMs read in this round
    plain_reasons: tuple[PlainReason, ...] = ()  # reasons for not asking sources


@dataclass
class Drafted:
    """Amount of work done by the SSMs in a round."""

    levels: int = 0
    passes: int = 0  # draft passes, one per level and SSM; includes the levels of block drafts
    request_passes: int = 0  # draft passes times the requests in each pass
    read_tokens: int = 0  # committed tokens that SSMs read before drafting, summed over the SSMs
    read_seconds: float = 0.0

    def add_pass(self, requests: int) -> None:
        self.passes, self.request_passes = self.passes + 1, self.request_passes + requests


NOTHING_DRAFTED = Drafted()
