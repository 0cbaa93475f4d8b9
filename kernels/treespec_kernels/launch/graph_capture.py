"""Captures CUDA graphs, and leaves torch usable where that fails.

What `torch.cuda.graph` alone does not care for:

- its own stream belongs to the GPU that was current at the first capture of the process, and with it whatever is
  captured later: a graph of another GPU needs a stream of that one;
- by default, memory that any other thread takes meanwhile breaks a capture; graphs are captured while others serve;
- where CUDA has invalidated a capture, leaving the context raises before anything is put back. The thread goes on on
  the capture's stream, in no order with other threads; the allocator takes the capture to go on, so that
  `torch.cuda.empty_cache` fails for the rest of the process, memory in need of which is then never given back; and
  CUDA's default generator refuses to draw.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch


class GraphMemory(NamedTuple):
    """What graphs share that never run at once: a pool of memory, and the stream on which all of them are captured, as
    memory is found again on the same stream alone."""

    pool: Any
    stream: torch.cuda.Stream

    @classmethod
    def of(cls, device: torch.device) -> GraphMemory:
        return cls(torch.cuda.graph_pool_handle(), torch.cuda.Stream(device))


def captured(launches: Callable[[], object], memory: GraphMemory) -> torch.cuda.CUDAGraph:
    """A graph of what `launches` launches on the current device, which is that of `memory`. It does not run.

    Raises:
        Exception: of `launches`, or of CUDA, which allows no such graph.
    """
    graph = torch.cuda.CUDAGraph()
    with _put_back(memory), torch.cuda.graph(graph, memory.pool, memory.stream, capture_error_mode="thread_local"):
        launches()
    return graph


@contextlib.contextmanager
def _put_back(memory: GraphMemory) -> Iterator[None]:
    before = torch.cuda.current_stream()
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(before)
        if _end_allocation(memory.stream.device_index, memory.pool):
            with contextlib.suppress(RuntimeError):  # the first error says more
                _end_generators_capture(memory.stream)
        raise


def _end_allocation(device: int, pool: Any) -> bool:
    """Take what torch calls at the end of a capture where it did not. Returns whether that was so."""
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # the capture was ended in order: it was the host that failed
        return False
    torch._C._cuda_releasePool(device, pool)
    return True


def _end_generators_capture(stream: torch.cuda.Stream) -> None:
    """A capture that ends in order takes the generators out of theirs."""
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, dtype=torch.uint8, device=stream.device)  # torch warns of empty graphs
        graph.capture_end()
