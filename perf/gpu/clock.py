"""Device timing with warm-up and events: median and spread of repeats.

Short kernels are timed in a captured graph of many calls on rotating buffers, to exclude launch overhead and caches.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType

from treespec_kernels.launch.graph_capture import GraphMemory, captured

Call = Callable[[], object]


class Times(NamedTuple):
    """Microseconds per call over repeats."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Times":
        """Summarise samples; low and high are the 10th and 90th percentile."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered))

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "us": round(self.median, 3),
            "us_p10": round(self.low, 3),
            "us_p90": round(self.high, 3),
            "repeats": self.repeats,
        }


class Clock:
    """Timer of calls on one device.

    Args:
        device: a GPU, timed by events, or the CPU, without graphs.
        warmup, repeats: number of warm-up calls and of timed calls.
        seconds: time after which no repeat starts, if there are at least three.
    """

    def __init__(self, device: torch.device, warmup: int = 5, repeats: int = 50, seconds: float = 10.0):
        self.device, self.warmup, self.repeats, self.seconds = device, warmup, repeats, seconds

    def eager(self, *calls: Call) -> Times:
        """Time eager calls, including host overhead."""
        return self._times(lambda: _all(calls), len(calls))

    def graphed(self, *calls: Call) -> Times:
        """Time calls in one captured graph, without host overhead."""
        return self._times(self.capture(*calls), len(calls))

    def capture(self, *calls: Call) -> Call:
        """Capture `calls` in order, and return the replay function."""
        if self.device.type == "cpu":
            return lambda: _all(calls)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # compile, load modules and fill the allocator before the capture
                _all(calls)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        return captured(lambda: _all(calls), GraphMemory(torch.cuda.graph_pool_handle(), stream)).replay

    def _times(self, run: Call, count: int) -> Times:
        began = time.perf_counter()
        for _ in range(self.warmup):
            run()
        self.synchronize()
        samples: list[float] = []
        while len(samples) < self.repeats and (len(samples) < 3 or time.perf_counter() - began < self.seconds):
            samples += self._samples(run, min(10, self.repeats - len(samples)), count)
        return Times.of(samples)

    def _samples(self, run: Call, repeats: int, count: int) -> list[float]:
        """Return `repeats` samples of the microseconds per call of `run`, which makes `count` calls."""
        if self.device.type == "cpu":
            samples = []
            for _ in range(repeats):
                start = time.perf_counter()
                run()
                samples.append(1e6 * (time.perf_counter() - start) / count)
            return samples
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start_event, end_event in pairs:
            start_event.record()
            run()
            end_event.record()
        self.synchronize()
        return [1e3 * start_event.elapsed_time(end_event) / count for start_event, end_event in pairs]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def sets_for(bytes_of_one: int, cache_bytes: int, at_most: int = 64) -> int:
    """Return the number of rotating buffer sets needed to miss the caches."""
    return max(1, min(at_most, math.ceil(cache_bytes / max(bytes_of_one, 1)) + 1))


def copy_bandwidth(clock: Clock, size: int) -> dict[str, Any]:
    """Measure the bandwidth of a device copy (reads plus writes), the roofline of memory-bound kernels."""
    source = torch.empty(size // 2, dtype=torch.bfloat16, device=clock.device).normal_()
    target = torch.empty_like(source)
    times = clock.eager(lambda: target.copy_(source))
    moved = source.nbytes + target.nbytes
    return times.figures | {"bytes": moved, "bytes_per_second": moved / (1e-6 * times.median)}


def matmul_rate(clock: Clock, size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Measure the FLOP/s of a square matrix product of random data, the roofline of compute-bound kernels."""
    a, b = (torch.empty(size, size, dtype=dtype, device=clock.device).normal_() for _ in range(2))
    out = torch.empty_like(a)
    times = clock.eager(lambda: torch.mm(a, b, out=out))
    return times.figures | {"flop_per_second": 2 * size**3 / (1e-6 * times.median)}


def device_events(profiler: Any, device: torch.device) -> list[Any]:
    """Return all kernel and copy events."""
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    return [e for e in profiler.events() if e.device_type == kind and not getattr(e, "is_user_annotation", False)]
