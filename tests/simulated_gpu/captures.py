"""Streams of the simulated GPU, and what a capture does to a process: as torch 2.11 does it, failures among them."""

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from tests.simulated_gpu.graphs import Graph, Pool

if TYPE_CHECKING:
    from tests.simulated_gpu.device import Gpu


class Stream:
    """torch.cuda.Stream. All work of a GPU is done in one order; which stream is current is kept."""

    def __init__(self, gpu: "Gpu", device: Any = None):
        index = None if device is None else torch.device(device).index
        self._gpu, self.device_index = gpu, gpu.current if index is None else index
        self.device = torch.device("cuda", self.device_index)

    def wait_stream(self, other: "Stream") -> None:
        pass

    def synchronize(self) -> None:
        self._gpu.finish()


class CudaGraph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, gpu: "Gpu"):
        self._gpu, self.graph = gpu, Graph(Pool())

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        self._gpu.captures.begin(self, pool if pool is not None else Pool(), capture_error_mode)

    def capture_end(self) -> None:
        self._gpu.captures.end()

    def replay(self) -> None:
        self._gpu.replays += 1
        self._gpu.later(self.graph.replay)


class _Selected:
    """torch.cuda.stream: nothing is put back but by leaving it."""

    def __init__(self, captures: "Captures", stream: Stream):
        self._captures, self._stream = captures, stream
        self._before: list[Stream] = []

    def __enter__(self) -> None:
        self._before = [self._captures.current_stream(device) for device in (self._stream.device, None)]
        self._captures.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        for stream in self._before:
            self._captures.set_stream(stream)


class Captures:
    """The capture that goes on, and what those before it have left.

    Attributes:
        underway: pools that the allocator takes to be captured into.
        generators: whether CUDA's random numbers are taken to be captured.
    """

    def __init__(self, gpu: "Gpu"):
        self._gpu = gpu
        self.underway: list[Pool] = []
        self.generators = False
        self._graph: Graph | None = None
        self._thread, self._mode, self._broken = 0, "", ""
        self._streams: dict[int, Stream] = {}
        self._own: Stream | None = None

    @property
    def graph(self) -> Graph | None:
        """That this thread captures."""
        return self._graph if self._thread == threading.get_ident() else None

    def begin(self, held: CudaGraph, pool: Pool, mode: str) -> None:
        self._gpu.finish()
        assert self._graph is None
        self.underway.append(pool)
        self._graph = held.graph = Graph(pool)
        self._thread, self._mode, self._broken, self.generators = threading.get_ident(), mode, "", True

    def end(self) -> None:
        graph, self._graph = self._graph, None
        assert graph is not None
        if self._broken:
            raise RuntimeError(f"operation failed due to a previous error during capture: {self._broken}")
        self.underway.remove(graph.pool)
        self.generators = False

    def forbid(self, reason: str) -> RuntimeError:
        """What CUDA says to what it does not allow in a capture, which is lost by it."""
        self._broken = reason
        return RuntimeError(reason)

    def check_memory(self) -> None:
        """Memory is taken: no other thread may, while a graph is captured as it is by default."""
        if self._graph is not None and self.graph is None and self._mode == "global":
            raise self.forbid("another thread takes memory while a graph is captured")

    def check_cache(self) -> None:
        """torch.cuda.empty_cache."""
        if self.underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def end_allocation(self, device: int, pool: Pool) -> None:
        """torch._C._cuda_endAllocateToPool."""
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def current_stream(self, device: Any = None) -> Stream:
        index = None if device is None else torch.device(device).index
        index = self._gpu.current if index is None else index
        return self._streams.setdefault(index, Stream(self._gpu, torch.device("cuda", index)))

    def set_stream(self, stream: Stream) -> None:
        self._streams[stream.device_index] = stream
        self._gpu.current = stream.device_index

    def on(self, stream: Stream) -> "_Selected":
        """torch.cuda.stream."""
        return _Selected(self, stream)

    @contextlib.contextmanager
    def capture(
        self,
        held: CudaGraph,
        pool: Pool | None = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        """torch.cuda.graph: where the end of a capture raises, nothing is put back."""
        if stream is None:
            stream = self._own = self._own or Stream(self._gpu)  # of the GPU that is current at the first capture
        self.check_cache()
        selected = self.on(stream)
        selected.__enter__()
        held.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            held.capture_end()
            selected.__exit__(None, None, None)
