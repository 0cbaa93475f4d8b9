"""The interface between the engine and what runs a round: executors, and the verified trees that they return."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from treespec.drafters.calls import Failures, Source
from treespec.planning.draft_plan import NOTHING_DRAFTED, Drafted
from treespec.planning.planner import Planner
from treespec.planning.round_costs import RoundSeconds
from treespec.request import Request
from treespec.tree import TokenTree

STAGES = ("idle", "host", "prefill", "draft", "foreign", "search", "merge", "forward", "verify", "commit", "update")


class VerifiedTree(Protocol):
    """What the engine and the planner read of a verified tree: a `TokenTree`, or a captured round's before anybody
    needs the whole of it."""

    @property
    def tokens(self) -> np.ndarray:
        """int64 [num_nodes]."""

    @property
    def parents(self) -> np.ndarray:
        """int64 [num_nodes], -1 for the root."""

    @property
    def values(self) -> np.ndarray:
        """float [num_nodes], the estimated probability that each node is accepted."""

    @property
    def depths(self) -> np.ndarray:
        """int64 [num_nodes]."""

    def __len__(self) -> int: ...

    def sources_of(self, node: int) -> tuple[str, ...]: ...

    def token_tree(self) -> TokenTree:
        """The whole tree with the provenance of every node."""


class VerifiedRequest(NamedTuple):
    """One request of a round, after verification and before commit.

    Attributes:
        request: its `tokens` and `context_len` do not contain the round yet.
        tree: what the target verified.
        path: int64 [1 + accepted], the accepted nodes, root first. The target's K/V are compacted to it.
        bonus: the target's own token after the path.
        logits: [num_nodes, vocab] of the target; None where nothing reads them.
    """

    request: Request
    tree: VerifiedTree
    path: np.ndarray
    bonus: int
    logits: Tensor | None = None

    @property
    def tokens(self) -> list[int]:
        """What follows the root: the accepted drafted tokens and the bonus token."""
        return [*self.tree.tokens[self.path[1:]].tolist(), self.bonus]


class StageClock:
    """Divides an engine's time among stages: a moment belongs to the stage that was entered last.

    Stages: prefill; draft (the SSMs), foreign (drafts with other tokenizers), search (other drafters), merge (planning,
    merging and cutting trees), forward, verify, commit, update; host between them, and idle between steps.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._stage, self._since = "idle", time.perf_counter()

    def enter(self, stage: str) -> str:
        """Begin a stage. Returns the one that ends."""
        now = time.perf_counter()
        self.seconds[self._stage] += now - self._since
        ended, self._stage, self._since = self._stage, stage, now
        return ended

    def move(self, source: str, **stages: float) -> None:
        """Give seconds of the stage `source` to others."""
        for stage, seconds in stages.items():
            self.seconds[stage] += seconds
            self.seconds[source] -= seconds

    def mark(self) -> tuple[float, ...]:
        """A moment, for `since`; the current stage began with it."""
        seconds = self.seconds
        return self._since, seconds["draft"], seconds["forward"], seconds["foreign"]

    def since(self, mark: tuple[float, ...], read: float) -> tuple[RoundSeconds, float]:
        """Seconds between a mark and the begin of the current stage, by the parts that the planner decides on.

        Args:
            mark: at the start of a round.
            read: what of `draft` was reading committed tokens.

        Returns:
            Also the seconds of drafts that decide for themselves whether their passes pay.
        """
        whole, draft, forward, foreign = (now - then for now, then in zip(self.mark(), mark, strict=True))
        return RoundSeconds(draft - read, read, forward, whole - draft - forward - foreign), foreign


@dataclass
class Execution:
    """What an executor made of a batch.

    Attributes:
        verified: the requests that were decided.
        failed: requests that end here, and why.
        undecided: requests that another executor must decide; nothing of them was committed.
        proposals: by source, the trees that it proposed, by request id: it is told what was accepted of them.
        failures: requests that a drafter failed for; they end after this round.
        planner: that planned the round and learns from it; None where the batch was empty.
        drafted: what the SSMs did.
        rows: of the target pass, as the planner counts them; None: all nodes of all trees.
    """

    verified: list[VerifiedRequest] = field(default_factory=list)
    failed: list[tuple[Request, str]] = field(default_factory=list)
    undecided: list[Request] = field(default_factory=list)
    proposals: list[tuple[Source, dict[str, TokenTree]]] = field(default_factory=list)
    failures: Failures = field(default_factory=dict)
    planner: Planner | None = None
    drafted: Drafted = NOTHING_DRAFTED
    rows: int | None = None


class Executor(Protocol):
    """Runs one round of a batch: propose, forward, verify, and compact the target's KV cache to the accepted paths."""

    def serves(self, request: Request) -> bool:
        """Whether this executor decodes a request. The answer follows from its parameters alone, never from the
        batch, so that one executor chooses all of its tokens."""

    def expects_ssms(self, requests: Sequence[Request]) -> bool:
        """Whether SSMs seem worth their time where these requests run side by side."""

    def run(self, requests: Sequence[Request], others_wait: bool, clock: StageClock) -> Execution:
        """One round.

        Args:
            requests: prefilled, with their pages; all are served by this executor.
            others_wait: whether a request that ends makes room for another.
            clock: told of the round's stages.
        """


def follow(tree: TokenTree, tokens: Sequence[int]) -> np.ndarray:
    """The longest path of `tree` that `tokens` follow below its root, int64 node indices from the root on."""
    path, parents, own = [0], tree.parents.tolist(), tree.tokens.tolist()
    for node in range(1, len(tree)):  # parents precede their children
        if len(path) > len(tokens):
            break
        if parents[node] == path[-1] and own[node] == tokens[len(path) - 1]:
            path.append(node)
    return np.array(path, dtype=np.int64)
