"""Clocks that time calls and measure copy bandwidth on an otherwise idle device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Call = Callable[[], Any]

SAMPLE_MS = 1  # approximate duration of one sample; a measurement is the median of several
MAX_COPIES = 64
COPIED_BYTES = 1 << 30  # maximum size of the additional copies of one workload's inputs
BANDWIDTH_BYTES = 2 << 30


class Clock(Protocol):
    """Timer of the calls of a sweep."""

    def seconds(self, calls: Sequence[Call]) -> float:
        """Return the seconds per call when `calls` run in turn."""

    def copies(self, num_bytes: int) -> int:
        """Return the number of copies of inputs of `num_bytes` to run in turn so that no copy stays in a cache."""

    def copy_bandwidth(self) -> float:
        """Return the bytes read and written per second by a copy, the limit of memory-bound kernels."""


class CudaClock:
    """Timer of calls in a captured graph, without launch overhead, as in an engine that replays graphs.

    `device` must be the current GPU.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._cache = int(torch.cuda.get_device_properties(device).L2_cache_size)

    def seconds(self, calls: Sequence[Call]) -> float:
        from triton.testing import do_bench_cudagraph

        torch.cuda.synchronize(self.device)  # the benchmark's stream does not wait for the inputs
        milliseconds = do_bench_cudagraph(lambda: _run_in_turn(calls), rep=SAMPLE_MS, return_mode="median")
        return milliseconds / 1e3 / len(calls)

    def copies(self, num_bytes: int) -> int:
        if num_bytes >= 4 * self._cache:  # a single copy does not stay in the cache
            return 1
        wanted = 1 + math.ceil(2 * self._cache / max(num_bytes, 1))
        return max(2, min(wanted, MAX_COPIES, 1 + COPIED_BYTES // max(num_bytes, 1)))

    def copy_bandwidth(self) -> float:
        size = min(BANDWIDTH_BYTES, torch.cuda.mem_get_info(self.device)[0] // 4)
        return _copy_bandwidth(self, self.device, size)


class HostClock:
    """Wall-clock timer on the host, for dry runs in Triton's interpreter, whose times are meaningless."""

    def seconds(self, calls: Sequence[Call]) -> float:
        start = time.perf_counter()
        _run_in_turn(calls)
        return (time.perf_counter() - start) / len(calls)

    def copies(self, num_bytes: int) -> int:
        return 2

    def copy_bandwidth(self) -> float:
        return _copy_bandwidth(self, torch.device("cpu"), 1 << 22)


def _run_in_turn(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _copy_bandwidth(clock: Clock, device: torch.device, size: int) -> float:
    source = torch.empty(size // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    # By a kernel: in a captured graph, `copy_` becomes a memory node, which reaches 63 % of a kernel's rate on an H200.
    return 2 * source.nbytes / clock.seconds([lambda: torch.neg(source, out=target)])
