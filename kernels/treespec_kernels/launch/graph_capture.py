"""Capture of CUDA graphs; restores torch's state after a failed capture.

This module works around three limitations of `torch.cuda.graph`:

- torch's default capture stream belongs to the GPU that was current at the first capture of the process; capturing on
  another GPU needs a stream of that GPU;
- by default, an allocation by any other thread invalidates a capture, but graphs are captured while other threads
  serve requests;
- after CUDA invalidates a capture, `torch.cuda.graph` raises on exit before it restores any state: the thread stays on
  the capture stream, unordered with other threads; the allocator stays in capture mode, so `torch.cuda.empty_cache`
  fails for the rest of the process; and the default CUDA generator raises on every draw.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import torch


class GraphMemory(NamedTuple):
    """Memory pool and capture stream shared by graphs that never run concurrently.

    The allocator reuses memory only on the stream that it was allocated on, so all graphs use one capture stream.
    """

    pool: Any
    stream: torch.cuda.Stream

    @classmethod
    def of(cls, device: torch.device) -> Self:
        return cls(torch.cuda.graph_pool_handle(), torch.cuda.Stream(device))


def run_then_capture(launches: Callable[[], object], memory: GraphMemory) -> Callable[[], None]:
    """Run the launches once to compile their kernels; return the result of `capture_replay`."""
    launches()
    return capture_replay(launches, memory)


def capture_replay(launches: Callable[[], object], memory: GraphMemory) -> Callable[[], None]:
    """Capture launches that have run before, and return the graph's `replay`. Errors as in `captured`."""
    torch.cuda.synchronize()
    collects = gc.isenabled()
    gc.disable()  # a collection could free tensors of an older engine, which is not allowed during capture
    try:
        return captured(launches, memory).replay
    finally:
        if collects:
            gc.enable()


def captured(launches: Callable[[], object], memory: GraphMemory) -> torch.cuda.CUDAGraph:
    """Capture the launches of `launches` in a graph, without running them.

    The current device must be that of `memory`.
    """
    graph = torch.cuda.CUDAGraph()
    with _restored(memory), torch.cuda.graph(graph, memory.pool, memory.stream, capture_error_mode="thread_local"):
        launches()
    return graph


@contextlib.contextmanager
def _restored(memory: GraphMemory) -> Iterator[None]:
    before = torch.cuda.current_stream()
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(before)
        if _end_allocation(memory.stream.device_index, memory.pool):
            with contextlib.suppress(RuntimeError):  # keep the original error
                _end_generators_capture(memory.stream)
        raise


def _end_allocation(device: int, pool: Any) -> bool:
    """End the allocator's capture if torch did not. Return whether it was still active."""
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # torch has ended the capture: the failure was on the host
        return False
    torch._C._cuda_releasePool(device, pool)
    return True


def _end_generators_capture(stream: torch.cuda.Stream) -> None:
    """Reset the capture state of the generators by capturing and regularly ending an almost empty graph."""
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, dtype=torch.uint8, device=stream.device)  # torch warns about empty graphs
        graph.capture_end()
