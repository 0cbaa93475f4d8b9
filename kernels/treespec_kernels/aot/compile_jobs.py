"""Compilation in several processes, since it is CPU-bound and holds the GIL."""

import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

_LEAST_TASKS = 8  # minimum tasks per process, because starting one takes seconds


def num_processes(tasks: int) -> int:
    """Return the number of processes to start: at most one per core, per GiB of free memory, and per 8 tasks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = Path("/proc/meminfo")
    available = re.search(r"MemAvailable:\s+(\d+)", memory.read_text() if memory.exists() else "")
    return max(1, min(cores, int(available[1]) >> 20 if available else cores, -(-tasks // _LEAST_TASKS)))


def run_in_processes(
    work: Callable[[Any], Any],  # a module-level function; processes are spawned, since this one may have threads
    tasks: Sequence[Any],  # picklable arguments of `work`
    processes: int,  # 1 runs the tasks in this process
    finished: Callable[[int, Any], None],  # gets each task's index and result (None if its process died)
) -> None:
    """Run every task. If a process dies, e.g. out of memory, run the remaining tasks in half as many processes."""
    if processes <= 1:
        for index, task in enumerate(tasks):
            finished(index, work(task))
        return
    remaining, context = dict(enumerate(tasks)), multiprocessing.get_context("spawn")
    while remaining:
        # Ctrl-C reaches all processes; only this one handles it, without waiting for hundreds of kernels.
        ignore = (signal.SIGINT, signal.SIG_IGN)
        pool = ProcessPoolExecutor(processes, mp_context=context, initializer=signal.signal, initargs=ignore)
        try:
            futures = {pool.submit(work, task): index for index, task in remaining.items()}
            for future in as_completed(futures):
                result = future.result()
                del remaining[futures[future]]
                finished(futures[future], result)
        except BrokenProcessPool:
            if processes == 1:  # tasks run in order, so the first remaining task killed the process
                index = next(iter(remaining))
                del remaining[index]
                finished(index, None)
            processes = max(1, processes // 2)
        finally:
            pool.shutdown(cancel_futures=True)
