"""What an executor hands to the engine: verified trees, and the seconds of the stages that led to them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import Tensor

from treespec.drafters.calls import Committing, Failures
from treespec.planning.draft_plan import Drafted, DraftPlan
from treespec.planning.planner import PlannedRound, Planner
from treespec.planning.round_costs import RoundSeconds
from treespec.request import Request
from treespec.tree import TokenTree

STAGES = ("idle", "host", "prefill", "draft", "foreign", "search", "merge", "forward", "verify", "commit", "update")


@dataclass(eq=False)
class VerifiedRequest:
    """One request of a round, after verification and before commit.

    Attributes:
        request: until commit, `tokens` and `context_len` are those before the round.
        path: int64 [1 + accepted], the accepted nodes, root first. The target's K/V are already compacted to it.
        tokens: the accepted drafted tokens, then the target's own.
        build_tree: returns the verified tree; called once, by `tree`.
        path_logits: target logits at the path's nodes, [1 + accepted, vocab]; None if the request asks for no
            log-probabilities, or if they are computed already.
        logprobs: log-probabilities at the path's nodes, as `LogprobRows.packed` returns them; None as above.
        score_ssms: scores the SSMs on tokens that they read in a captured round; None if they read none.
    """

    request: Request
    path: np.ndarray
    tokens: list[int]
    build_tree: Callable[[], TokenTree]
    path_logits: Tensor | None = None
    logprobs: np.ndarray | None = None
    score_ssms: Callable[[], None] | None = None

    @cached_property
    def tree(self) -> TokenTree:
        """The verified tree. That of a captured round is built when it is learned from."""
        return self.build_tree()

    @property
    def bonus(self) -> int:
        """The target's own token after the path."""
        return self.tokens[-1]


class StageClock:
    """Accumulates wall time by stage; time counts for the stage that was entered last.

    Stages: prefill; draft (the SSMs), foreign (drafts with other tokenizers), search (other drafters), merge (planning,
    merging and cutting trees), forward, verify, commit, update; host between them, and idle between steps.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._stage, self._since = "idle", time.perf_counter()

    def enter(self, stage: str) -> str:
        """Enter a stage and return the previous one."""
        now = time.perf_counter()
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
        return self._since, seconds["draft"], seconds["forward"], seconds["foreign"]

    def since(self, mark: tuple[float, ...], read: float) -> tuple[RoundSeconds, float]:
        """Return the seconds from a mark to the start of the current stage.

        Args:
            mark: taken at the start of a round.
            read: seconds of `draft` spent on prefilling the SSMs.

        Returns:
            The seconds by the parts that the planner models, and those of foreign drafts, which have their own cost
            model.
        """
        whole, draft, forward, foreign = (now - then for now, then in zip(self.mark(), mark, strict=True))
        return RoundSeconds(draft - read, read, forward, whole - draft - forward - foreign), foreign


@dataclass
class Execution:
    """A round of a batch: what its steps have decided so far, for those that follow and for the engine.

    Attributes:
        requests, plans: requests with the limits of their trees.
        verified: verified requests.
        failed: requests that end in this round, with the error text.
        undecided: requests that the next executor must run; nothing of them was committed.
        proposals: trees by request id for each source, which is notified of the accepted nodes.
        failures: requests whose drafter failed; they end after this round.
        planner: the planner of the round, which learns from it; None for a round that captured graphs.
        planned: the planner's round, which it learns from after it may have planned the next one; None = its last one.
        overlaps: whether learning from this round may wait until the device computes the next one.
        drafted: the SSMs' work.
        rows: rows of the target pass as the planner counts them; None = all nodes of all trees.
        seconds: of the round, where the executor measures it itself, because rounds overlap; None = the clock's.
    """

    requests: Sequence[Request]
    plans: Sequence[DraftPlan]
    verified: list[VerifiedRequest] = field(default_factory=list)
    failed: list[tuple[Request, str]] = field(default_factory=list)
    undecided: list[Request] = field(default_factory=list)
    proposals: list[tuple[Committing, dict[str, TokenTree]]] = field(default_factory=list)
    failures: Failures = field(default_factory=dict)
    planner: Planner | None = None
    planned: PlannedRound | None = None
    overlaps: bool = False
    drafted: Drafted = field(default_factory=Drafted)
    rows: int | None = None
    seconds: RoundSeconds | None = None


def follow(tree: TokenTree, tokens: Sequence[int]) -> np.ndarray:
    """Return the path of `tree` that matches the longest prefix of `tokens`, int64 node indices, root first."""
    path, parents, node_tokens = [0], tree.parents.tolist(), tree.tokens.tolist()
    for node in range(1, len(tree)):  # parents precede their children
        if len(path) > len(tokens):
            break
        if parents[node] == path[-1] and node_tokens[node] == tokens[len(path) - 1]:
            path.append(node)
    return np.array(path, dtype=np.int64)
