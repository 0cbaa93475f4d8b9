"""The steps of a round, over data on the host or on the device: plan, propose, forward, verify and commit.

An executor returns verified trees to the engine, and the seconds of each stage.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from treespec.drafters.base import Failures, Proposals
from treespec.errors import RequestError
from treespec.planning.draft_plan import Drafted, DraftPlan, PlainReason
from treespec.planning.planner import PlannedRound, Planner
from treespec.planning.round_costs import RoundSeconds
from treespec.request import Request
from treespec.tree import TokenTree

STAGES = "idle host prefill draft cross_tokenizer search merge forward verify commit update".split()


@dataclass(eq=False)
class VerifiedRequest:
    """One request of a round, after verification and before commit."""

    request: Request  # until commit, `tokens` and `context_len` are those before the round
    path: np.ndarray  # int64 [1 + accepted], the accepted nodes, root first; the target's K/V are compacted to it
    tokens: list[int]  # the accepted drafted tokens, then the target's own
    tree_source: TokenTree | Callable[[], TokenTree]  # the verified tree, or, in a captured round, a function for it
    # For a request with log-probabilities, the target's logits at the path's nodes, [1 + accepted, vocab]; or their
    # log-probabilities as in `LogprobRows.packed`
    path_logits: Tensor | None = None
    logprobs: np.ndarray | None = None
    score_ssms: Callable[[], None] | None = None  # scores the SSMs on the tokens that they read in a captured round

    @property
    def tree(self) -> TokenTree:
        """The verified tree; that of a captured round is built on first access."""
        if not isinstance(self.tree_source, TokenTree):
            self.tree_source = self.tree_source()
        return self.tree_source

    @property
    def bonus(self) -> int:
        return self.tokens[-1]


class StageClock:
    """Accumulates wall time by stage; time counts for the stage that was entered last.

    Stages: prefill; draft (the SSMs), cross_tokenizer (drafts with another tokenizer), search (other drafters), merge
    (planning, merging and cutting trees), forward, verify, commit, update; host between them, and idle between steps.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self.now = dict.fromkeys(STAGES, 0.0), now
        self._stage, self._since = "idle", now()

    def enter(self, stage: str) -> str:
        """Enter a stage and return the previous one."""
        now = self.now()
        self.seconds[self._stage] += now - self._since
        ended, self._stage, self._since = self._stage, stage, now
        return ended

    def move(self, source: str, **stages: float) -> None:
        """Reassign seconds of the stage `source` to other stages."""
        for stage, seconds in stages.items():
            self.seconds[stage] += seconds
            self.seconds[source] -= seconds

    def mark(self) -> tuple[float, ...]:
        """Return a marker for `since`: the start of the current stage."""
        seconds = self.seconds
        return self._since, seconds["draft"], seconds["forward"], seconds["cross_tokenizer"]

    def since(self, mark: tuple[float, ...], read: float) -> tuple[RoundSeconds, float]:
        """Return the seconds from a mark to the start of the current stage, `read` of them for prefilling the SSMs.

        The seconds of cross-tokenizer drafts, which have another cost model, are returned separately.
        """
        whole, draft, forward, others = (now - then for now, then in zip(self.mark(), mark, strict=True))
        return RoundSeconds(draft - read, read, forward, whole - draft - forward - others), others


@dataclass
class Execution:
    """State of a batch's round, filled in by its steps."""

    requests: Sequence[Request]
    plans: Sequence[DraftPlan]  # by request
    planner: Planner
    planned: PlannedRound  # the planner's round
    verified: list[VerifiedRequest] = field(default_factory=list)
    failed: list[tuple[Request, RequestError]] = field(default_factory=list)  # requests that end in this round
    undecided: list[Request] = field(default_factory=list)  # uncommitted requests, left to the next executor
    proposals: list[Proposals] = field(default_factory=list)  # of each source that proposed a tree
    reading: list[Request] = field(default_factory=list)  # requests without drafts because their SSMs read the prompt
    failures: Failures = field(default_factory=dict)  # requests whose drafter failed; they end after this round
    updates_planner: bool = True  # False for a round whose times say nothing about later ones
    overlaps: bool = False  # whether drafters may be updated while the device computes the next round
    drafted: Drafted = field(default_factory=Drafted)
    rows: int | None = None  # rows of the target pass as the planner counts them; None = all nodes of all trees
    seconds: RoundSeconds | None = None  # as measured by the executor; None: by the engine's clock

    def add(self, proposals: Proposals) -> None:
        """Add the proposals of a source."""
        self.failures |= proposals.failures
        if proposals.trees:
            self.proposals.append(proposals)

    def trees_of(self, request: Request) -> list[TokenTree]:
        """Return the proposals for a request."""
        name = request.request_id
        return [proposed.trees[name] for proposed in self.proposals if name in proposed.trees]

    def plain_reasons(self, verified: VerifiedRequest) -> tuple[PlainReason, ...]:
        """Return why a request's tree is only a root; nothing if it has drafted nodes."""
        if len(verified.tree) > 1:
            return ()
        request = verified.request
        if any(len(tree) > 1 for tree in self.trees_of(request)):
            return ("cut",)
        plan = next(plan for other, plan in zip(self.requests, self.plans, strict=True) if other is request)
        reasons = (*plan.plain_reasons, "reading") if request in self.reading else plan.plain_reasons
        return (*reasons, "nothing_proposed") if plan.max_depth or not reasons else reasons


class Executor(ABC):
    """Runs rounds of batches, step by step: plan, propose, forward, verify and commit."""

    @abstractmethod
    def serves(self, request: Request) -> bool:
        """Return whether this executor can decode a request.

        Never depends on the batch, so that a request changes executors only after a round that was left undecided.
        """

    @abstractmethod
    def expects_ssms(self, requests: Sequence[Request]) -> bool:
        """Return whether SSMs are expected to pay for a batch of these requests."""

    @abstractmethod
    def run(
        self, requests: Sequence[Request], others_wait: bool, clock: StageClock, meanwhile: Callable[[], None]
    ) -> Execution:
        """Run one round. Requests that are not in it join the next one.

        Args:
            requests: prefilled requests that this executor serves, at least one.
            others_wait: whether the queue holds requests for slots that become free.
            clock: receives the stages.
            meanwhile: called while a device computes the round, if the host waits for it.
        """


class DeviceExecutor(Executor):
    """An executor whose rounds a device computes while the host goes on."""

    @abstractmethod
    def launch(self, requests: Sequence[Request], others_wait: bool, clock: StageClock) -> None:
        """Begin a round, which the next `run` ends; arguments as in `run`."""

    @abstractmethod
    def drop_finished(self) -> None:
        """Wait for the device and discard the launched round, if there is one and all of its requests have ended."""
