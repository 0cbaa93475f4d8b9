"""A captured round: draft, merge, verify and commit on the device, replayed from CUDA graphs.

A batch of B requests has buffers of fixed shapes. These buffers hold the requests, their depths, numbers of nodes and
tree topologies as data, so four kinds of graphs serve all rounds:

- first level: the SSMs read the tokens emitted in the last round and propose children of the new roots. Accepted tokens
are read again, one row per token, so the K/V of drafted nodes need no compaction in the SSMs' caches;
- next level: merges the last level's proposals, selects the next frontier, and scores it with the SSMs. The level
number is stored on the device, so one graph serves all levels;
- verify N: merges the last level, selects the tree's best N nodes, scores them in one target pass, walks along the
target's choices, compacts the accepted K/V in place, and copies the emitted tokens to the host;

- following: the beginning of the next round of the same requests (all of a plain round, or the first level), launched
before the host knows the results of this round. The device writes the inputs that depend on these results. If the next
round turns out to be another one, it runs as if nothing had been launched, since the launch wrote only behind the
contexts.

The host launches the first level, searches the proposals of model-free sources meanwhile, and launches the planned
number of next levels, and verify. It waits only once, for the result, and may do other work before. Without a GPU, the
same kernels run one by one in Triton's interpreter.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from treespec.drafters.evidence import SeedEvidence
from treespec.graphs.draft_stage import DraftStage
from treespec.graphs.round_inputs import RoundInput, RoundInputs, RoundLimits
from treespec.graphs.sampling_state import SamplingState
from treespec.graphs.stack_passes import FeaturePool, ModelStack
from treespec.graphs.verify_stage import GREEDY, RoundKind, RoundResult, VerifyStage
from treespec.models.adapter_slots import NO_ADAPTER
from treespec.tree import TokenTree
from treespec_kernels.launch.graph_capture import GraphMemory, capture_replay

logger = logging.getLogger("treespec")

# Fields of `RoundInput` that must not change between consecutive rounds.
_LASTING = "temperature", "draft_temperature", "rng_seed", "sample", "max_len", "adapter", "state_slot"


class _Round(NamedTuple):
    requests: Sequence[RoundInput]  # requests of the previous round, if launched as `following`
    levels: int
    nodes: int
    kind: RoundKind
    side: int = 0  # index of the events and of the host's result buffer
    captured: bool = False  # whether it captured graphs


class BatchRound:
    """Buffers and graphs for batches of up to B requests."""

    def __init__(
        self,
        num_requests: int,  # B
        limits: RoundLimits,  # depth, nodes and context of the round
        target: ModelStack,  # a stack of one model
        stacks: Sequence[ModelStack],  # the SSMs and draft heads
        # Memory pool shared by all graphs of an engine. Sharing is safe because graphs never run concurrently and
        # results are stored outside it. None launches every kernel individually
        graph_memory: GraphMemory | None = None,
        features: FeaturePool | None = None,  # hidden states of the target for heads; None without heads
        sampling: SamplingState | None = None,  # state of running requests' logit transforms; None creates one
        evidence: SeedEvidence | None = None,  # evidence ratios of model-free proposals; None for ratios of 1
    ):
        self.num_requests, self.limits, self._memory = num_requests, limits, graph_memory
        self._evidence = evidence
        device = target.pool.device
        self._inputs = RoundInputs(num_requests, sum(stack.groups for stack in stacks), limits, device)
        vocab_size = target.kernels.weights.head.shape[1]
        self._drafts = DraftStage(self._inputs, stacks, vocab_size, features)
        sampling = sampling or SamplingState(num_requests, vocab_size, device, limits.width)
        self._verify = VerifyStage(self._inputs, target, self._drafts, features, sampling)
        self.has_captured = False  # whether the last round captured graphs, which makes its time meaningless
        self.has_followed = False  # whether `launch_following` launched the last round, so the device did not wait
        self._warms_up = False
        self._graphs: dict[tuple[object, ...], Callable[[], None]] = {}
        self._events = [[_timing_event(device) for _ in range(3)] for _ in range(2)]  # start, middle, end of stages
        self._side = 0  # side of the last round whose results were read
        self._round: _Round | None = None  # the last round
        self._following: _Round | None = None
        self._decided: list[RoundResult] = []  # results of the last round

    def warm_up(self, nodes: Sequence[int]) -> None:
        """Capture the graphs of greedy rounds with these numbers of nodes, on an idle batch that touches the null page.

        All other graphs are captured at their first use, in a round that launches its kernels individually. If
        capturing fails, later rounds do the same.
        """
        self._inputs.fill([])
        self._warms_up = True
        for num_nodes in nodes:
            self.replay(min(2, self.limits.max_depth), num_nodes)
        self._warms_up = False

    def draft(
        self,
        requests: Sequence[RoundInput],  # at most B requests
        levels: int,  # draft levels; 0 = plain decoding
        nodes: int,  # target pass rows per request, one of `limits.nodes`; a request may use fewer
        logprobs: bool = False,
        # Returns the proposals of model-free sources by request, in the form of `RoundInputs.propose`; called after
        # launching the first level, which does not need them. None for no proposals
        search: Callable[[], Sequence[TokenTree | None]] | None = None,
    ) -> None:
        """Launch the draft levels of a round."""
        assert len(requests) <= self.num_requests and nodes in self.limits.nodes, (len(requests), nodes)
        assert 0 <= levels <= self.limits.max_depth and (levels > 0) == (nodes > 1), (levels, nodes)
        transforms = [request.transforms for request in requests if request.transforms is not None]
        kind = RoundKind(
            sampled=any(request.temperature for request in requests),
            transforms=bool(transforms),
            truncates=any(row.truncates for row in transforms),
            logprobs=logprobs,
            adapted=any(request.adapter != NO_ADAPTER for request in requests),
        )
        following, self._following = self._following, None
        if following is not None and self._continues(following, requests, levels, kind):
            self.has_followed, self.has_captured = True, following.captured
        else:
            self.has_followed, self.has_captured, following = False, False, _Round(requests, levels, nodes, kind)
        self._round = following._replace(requests=requests, nodes=nodes)
        if self._is_launched:
            return
        self._inputs.fill(requests)
        if not self.has_followed:
            self._launch_first(levels, kind)
        if search is not None:
            self._inputs.propose(search(), self._evidence)
        self._launch_levels(levels, kind, following.side)

    @property
    def _is_launched(self) -> bool:
        """Whether the whole round was launched as `following`."""
        return self.has_followed and self._round is not None and not self._round.levels

    def verify(self) -> Callable[[], list[RoundResult]]:
        """Launch verification and commit of the drafted round.

        Returns a function that waits for the device and returns results by request. Call it before the next round.
        """
        assert self._round is not None
        requests, levels, nodes, kind, side, _ = self._round
        if not self._is_launched:
            self._launch_verify(nodes, kind, side)

        def results() -> list[RoundResult]:
            self._synchronize(side)
            self._side = side
            self._decided = self._verify.results(requests, nodes, levels > 0, kind.logprobs, self._buffer(nodes, side))
            return self._decided

        return results

    def launch_following(self) -> bool:
        """Launch the beginning of the next round of the same requests; call it before reading this round's results.

        Does nothing in rounds that count tokens on the device, or copy log-probabilities to the host. Returns whether
        it launched a target pass.
        """
        assert self._round is not None
        requests, levels, nodes, kind, side, _ = self._round
        if kind.transforms or kind.logprobs:
            return False
        captured, self.has_captured = self.has_captured, False
        self._launch_first(levels, kind, 1 - side, follows=True)
        if not levels:
            self._launch_levels(levels, kind, 1 - side)
            self._launch_verify(nodes, kind, 1 - side, follows=True)
        self._following = _Round(requests, levels, nodes, kind, 1 - side, self.has_captured)
        self.has_captured = captured
        return not levels

    def _continues(self, following: _Round, requests: Sequence[RoundInput], levels: int, kind: RoundKind) -> bool:
        """Return whether a round begins with the kernels launched as `following`."""
        if kind != following.kind or (levels > 0) != (following.levels > 0):
            return False
        if len(requests) != len(following.requests):
            return False
        for last, decided, this in zip(following.requests, self._decided, requests, strict=True):
            emitted = decided.tokens if levels else decided.tokens[-1:]
            unread = this.new_tokens if levels else this.new_tokens[-1:]
            is_same = last.pages is this.pages and all(getattr(last, name) == getattr(this, name) for name in _LASTING)
            if not is_same or list(unread) != emitted or this.context_len != last.context_len + len(decided.path):
                return False
        return True

    def seconds(self) -> tuple[float, float]:
        """Return the device seconds of drafting and of verification in the last round."""
        started, drafted, verified = self._events[self._side]
        return started.elapsed_time(drafted) / 1000, drafted.elapsed_time(verified) / 1000

    def replay(self, levels: int, nodes: int) -> None:
        """Run the kernels of a round on the current contents of the buffers, for time measurements."""
        self._side = 0
        self._launch_first(levels, GREEDY)
        self._launch_levels(levels, GREEDY)
        self._launch_verify(nodes, GREEDY)
        self._synchronize()

    def _launch_first(self, levels: int, kind: RoundKind, side: int = 0, follows: bool = False) -> None:
        """Launch the first draft level, if there is one."""
        self._events[side][0].record()
        if not levels:
            return

        def launches() -> None:
            if follows:
                self._verify.advance()
            self._drafts.first_level(kind.sampled)

        self._run_graph(("first level", kind.sampled, follows), launches)

    def _launch_levels(self, levels: int, kind: RoundKind, side: int = 0) -> None:
        sampled = kind.sampled
        for _ in range(levels - 1):
            self._run_graph(("next level", sampled), lambda: self._drafts.next_level(sampled))
        self._events[side][1].record()

    def _launch_verify(self, nodes: int, kind: RoundKind, side: int = 0, follows: bool = False) -> None:
        buffer = self._buffer(nodes, side)

        def launches() -> None:
            if follows:
                self._verify.advance()
            self._verify.run(nodes, kind, buffer)

        self._run_graph(("verify", nodes, *kind, buffer, follows), launches)
        self._events[side][2].record()

    @staticmethod
    def _buffer(nodes: int, side: int) -> int:
        """Return the index of the host's result buffer; see `VerifyStage`."""
        return side if nodes == 1 else 0

    def _run_graph(self, name: tuple[object, ...], launches: Callable[[], None]) -> None:
        if self._memory is None:
            launches()
            return
        if name in self._graphs:
            self._graphs[name]()
            return
        launches()
        self.has_captured = True
        try:
            self._graphs[name] = capture_replay(launches, self._memory)
        except RuntimeError as error:  # out of memory for another graph, or a driver error
            if self._warms_up:
                raise
            torch.cuda.synchronize(self._inputs.device)  # raises if the device is lost
            logger.warning("cannot capture a CUDA graph; launching its kernels individually", exc_info=error)
            self._graphs[name] = launches

    def _synchronize(self, side: int = 0) -> None:
        self._events[side][-1].synchronize()


class _HostEvent:
    """Replacement of `torch.cuda.Event` for launches that run synchronously on the host."""

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """Return immediately, because launches on the host are synchronous."""

    def elapsed_time(self, end: "_HostEvent") -> float:
        return 1000 * (end._at - self._at)


def _timing_event(device: torch.device) -> Any:
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else _HostEvent()
