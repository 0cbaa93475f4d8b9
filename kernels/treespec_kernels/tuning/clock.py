"""Timing of calls, and measurement of the copy bandwidth, on an otherwise idle device."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]

SAMPLE_MS = 1  # approximate duration of one sample; a measurement is the median of several
MAX_COPIES = 64
COPIED_BYTES = 1 << 30  # maximum size of the additional copies of one case's inputs
BANDWIDTH_BYTES = 2 << 30


class Clock:
    """Timer for calls in a captured graph, without launch overhead, like in an engine that replays graphs.

    `device` must be the current GPU, or the CPU for dry runs in Triton's interpreter, whose times are meaningless.
    """

    def __init__(self, device: torch.device):
        self.device = device
        is_gpu = device.type == "cuda"
        self._cache = int(torch.cuda.get_device_properties(device).L2_cache_size) if is_gpu else 0

    def seconds(self, calls: Sequence[Call]) -> float:
        """Return the seconds per call when `calls` run in turn."""

        def run() -> None:
            for call in calls:
                call()

        if self.device.type == "cpu":
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) / len(calls)
        from triton.testing import do_bench_cudagraph

        torch.cuda.synchronize(self.device)  # the benchmark's stream does not wait for the inputs
        return do_bench_cudagraph(run, rep=SAMPLE_MS, return_mode="median") / 1e3 / len(calls)

    def copies(self, num_bytes: int) -> int:
        """Return the number of input copies of `num_bytes` to rotate through so that none stays in a cache."""
        if num_bytes >= 4 * self._cache:  # a single copy does not stay in the cache
            return 1
        return max(2, min(1 + math.ceil(2 * self._cache / num_bytes), MAX_COPIES, 1 + COPIED_BYTES // num_bytes))

    def copy_bandwidth(self) -> float:
        """Return the bytes read and written per second by a copy, the upper limit for memory-bound kernels."""
        is_gpu = self.device.type == "cuda"
        size = min(BANDWIDTH_BYTES, torch.cuda.mem_get_info(self.device)[0] // 4) if is_gpu else 1 << 22
        source = torch.empty(size // 4, dtype=torch.float32, device=self.device).normal_()
        target = torch.empty_like(source)
        # Uses a kernel: in a captured graph, `copy_` becomes a memory node, which reaches 63 % of the rate on an H200.
        return 2 * source.nbytes / self.seconds([lambda: torch.neg(source, out=target)])
