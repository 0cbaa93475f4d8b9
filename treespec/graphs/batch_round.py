"""A captured round: draft, merge, verify and commit on the device, from CUDA graphs.

A batch of B requests has buffers of fixed shapes; which requests, how deep, how many nodes and which topology is data
in them. Three kinds of graphs serve every round:

- first level: the SSMs read the tokens that the last round emitted and propose below the new roots. What was accepted
  is read anew, one row a token, so that an SSM's K/V of rejected nodes need no compaction;
- next level: the SSMs score the frontier, their proposals are merged, the best become the next frontier. The level is a
  number on the device, so one graph serves all of them;
- verify N: the best N nodes become the tree, the target scores it in one pass, the walk follows its choices, the
  accepted K/V move down in place, and what was emitted is copied to the host.

The host launches the first level, as many next ones as the plan says and verify, then waits once, for the result.
Without a GPU the same calls run one by one, in Triton's interpreter.
"""

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from treespec.graphs.draft_stage import DraftHalf
from treespec.graphs.round_inputs import RoundInput, RoundInputs, RoundLimits
from treespec.graphs.stack_passes import ModelStack
from treespec.graphs.verify_stage import RoundResult, VerifyHalf
from treespec_kernels.launch.graph_capture import GraphMemory, captured


class BatchRound:
    """Buffers and graphs for batches of up to B requests.

    Args:
        num_requests: B.
        limits: of the round.
        target: the target, a stack of one.
        stacks: of the SSMs.
        graph_memory: that all graphs of an engine share, as no two of them run at once and what outlives one lies in
            buffers outside; None runs every launch by itself.
    """

    def __init__(
        self,
        num_requests: int,
        limits: RoundLimits,
        target: ModelStack,
        stacks: Sequence[ModelStack],
        graph_memory: GraphMemory | None = None,
    ):
        self.num_requests, self.limits, self._memory = num_requests, limits, graph_memory
        device = target.pool.device
        self._inputs = RoundInputs(num_requests, sum(stack.groups for stack in stacks), limits, device)
        self._drafts = DraftHalf(self._inputs, stacks, target.kernels.weights.head.shape[1])
        self._verify = VerifyHalf(self._inputs, target, self._drafts)
        self._graphs: dict[tuple[object, ...], Callable[[], None]] = {}
        self._marks = [_mark_of(device) for _ in range(3)]  # before drafting, behind it, and behind verification

    def warm_up(self) -> None:
        """Compile and capture what greedy rounds take, on an idle batch that touches the null page alone. Graphs with
        noise are captured when they are first needed."""
        self._inputs.fill([])
        for nodes in reversed(self.limits.nodes):  # the largest first: the others then find room in its memory
            self._launch(min(2, self.limits.max_depth), nodes, sampled=False)
        self._wait()

    def run(self, requests: Sequence[RoundInput], levels: int, nodes: int) -> list[RoundResult]:
        """One round of these requests.

        Args:
            requests: at most B.
            levels: that are drafted, 0 for plain decoding.
            nodes: rows of each request's target pass, one of the limits'; requests may be given fewer.
        """
        assert len(requests) <= self.num_requests and nodes in self.limits.nodes, (len(requests), nodes)
        assert 0 <= levels <= self.limits.max_depth and (levels > 0) == (nodes > 1), (levels, nodes)
        self._inputs.fill(requests)
        self._launch(levels, nodes, any(request.temperature for request in requests))
        self._wait()
        return self._verify.results(requests, nodes, drafted=levels > 0)

    def seconds(self) -> tuple[float, float]:
        """Device seconds of drafting and of verification in the last round."""
        started, drafted, done = self._marks
        return started.elapsed_time(drafted) / 1000, drafted.elapsed_time(done) / 1000

    def replay(self, levels: int, nodes: int) -> None:
        """The kernels of a round on whatever the buffers hold, to measure them."""
        self._launch(levels, nodes, sampled=False)
        self._wait()

    def _launch(self, levels: int, nodes: int, sampled: bool) -> None:
        """`sampled`: whether any choice takes noise; without, the head's own maxima do."""
        started, drafted, done = self._marks
        started.record()
        if levels:
            self._play(("first level", sampled), lambda: self._drafts.first_level(sampled))
            for _ in range(levels - 1):
                self._play(("next level", sampled), lambda: self._drafts.next_level(sampled))
        drafted.record()
        self._play(("verify", nodes, sampled), lambda: self._verify.run(nodes, sampled))
        done.record()

    def _play(self, name: tuple[object, ...], launches: Callable[[], None]) -> None:
        if self._memory is None:
            launches()
            return
        if name not in self._graphs:
            self._graphs[name] = _captured(launches, self._memory)  # has run them
            return
        self._graphs[name]()

    def _wait(self) -> None:
        self._marks[-1].synchronize()


class _HostMark:
    """`torch.cuda.Event` where launches run one by one on the host."""

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """Return at once: launches on the host have ended."""

    def elapsed_time(self, end: "_HostMark") -> float:
        """Milliseconds until `end`."""
        return 1000 * (end._at - self._at)


def _mark_of(device: torch.device) -> Any:
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else _HostMark()


def _captured(launches: Callable[[], None], memory: GraphMemory) -> Callable[[], None]:
    """A CUDA graph of these launches. They run once before, which compiles what is not compiled yet."""
    launches()
    torch.cuda.synchronize()
    collects = gc.isenabled()
    gc.disable()  # what an older engine left behind must not be freed while memory is being captured
    try:
        return captured(launches, memory).replay
    finally:
        if collects:
            gc.enable()
