"""Clocks that time calls and measure copy bandwidth on an otherwise idle device."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from treespec_kernels.launch.graph_capture import GraphMemory, captured

Call = Callable[[], Any]

MAX_COPIES = 64
COPIED_BYTES = 1 << 30  # held by the copies of one workload, beyond the first
BANDWIDTH_BYTES = 2 << 30


class Clock(Protocol):
    """Times the calls of a sweep."""

    def seconds(self, calls: Sequence[Call]) -> float:
        """Seconds per call, with `calls` run in turn."""

    def copies(self, num_bytes: int) -> int:
        """The number of copies of inputs of `num_bytes` to run in turn so that none stays in a cache."""

    def copy_bandwidth(self) -> float:
        """Bytes read and written per second by a copy: the limit of memory-bound kernels."""


class CudaClock:
    """Many calls in one captured graph, between two events: the host's launches are not part of the time, as they are
    not in an engine that replays graphs.

    Args:
        device: a GPU.
        sample_seconds: how long each sample is to take, about.
        samples: of which the median counts.
    """

    def __init__(self, device: torch.device, sample_seconds: float = 1e-3, samples: int = 15):
        self.device, self.sample_seconds, self.samples = device, sample_seconds, samples
        self._cache = int(torch.cuda.get_device_properties(device).L2_cache_size)

    def seconds(self, calls: Sequence[Call]) -> float:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for call in calls:  # compiles, loads modules and fills the allocator before the capture
                call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        once = self._elapsed(lambda: [call() for call in calls])  # an upper bound, launches included
        turns = min(max(1, math.ceil(self.sample_seconds / once)), 1 + 512 // len(calls))
        graph = captured(partial(_in_turns, calls, turns), GraphMemory(torch.cuda.graph_pool_handle(), stream))
        self._elapsed(graph.replay)
        return statistics.median(self._elapsed(graph.replay) for _ in range(self.samples)) / (turns * len(calls))

    def _elapsed(self, run: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def copies(self, num_bytes: int) -> int:
        if num_bytes >= 4 * self._cache:  # its end drives its beginning out
            return 1
        wanted = 1 + math.ceil(2 * self._cache / max(num_bytes, 1))
        return max(2, min(wanted, MAX_COPIES, 1 + COPIED_BYTES // max(num_bytes, 1)))

    def copy_bandwidth(self) -> float:
        size = min(BANDWIDTH_BYTES, torch.cuda.mem_get_info(self.device)[0] // 4)
        return _copy_bandwidth(self, self.device, size)


class HostClock:
    """A host's own time, for rehearsals without a GPU: of kernels in Triton's interpreter it says nothing."""

    def seconds(self, calls: Sequence[Call]) -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)

    def copies(self, num_bytes: int) -> int:
        return 2

    def copy_bandwidth(self) -> float:
        return _copy_bandwidth(self, torch.device("cpu"), 1 << 22)


def _in_turns(calls: Sequence[Call], turns: int) -> None:
    for _ in range(turns):
        for call in calls:
            call()


def _copy_bandwidth(clock: Clock, device: torch.device, size: int) -> float:
    source = torch.empty(size // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / clock.seconds([lambda: target.copy_(source)])
