"""Runs the compiler in several processes: it is bound by the CPU, and its threads would share one interpreter."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TypeVar

_BYTES = 1 << 30  # of memory for each process: torch, Triton and LLVM
_LEAST_TASKS = 8  # for each process, whose start takes seconds

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


def num_processes(tasks: int) -> int:
    """Processes that are worth starting: at most one for each core and for each GiB of free memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _free_bytes() // _BYTES, -(-tasks // _LEAST_TASKS)))


def run_in_processes(
    work: Callable[[_Task], _Result],
    tasks: Sequence[_Task],
    processes: int,
    finished: Callable[[int, _Result | None], None],
    fresh: bool = False,
) -> None:
    """Run every task. Where a process dies, as for lack of memory, the rest runs in half as many.

    Args:
        work: a function of a module: processes are spawned, since this one may have threads.
        tasks: to be pickled.
        processes: 1 runs the tasks in this process.
        finished: told a task's index and its result, in any order; None where its process died.
        fresh: whether Triton compiles what is in its own cache.
    """
    if processes <= 1:
        before = os.environ.get("TRITON_ALWAYS_COMPILE")
        _prepare(fresh, of_its_own=False)
        try:
            for index, task in enumerate(tasks):
                finished(index, work(task))
        finally:
            if fresh:
                os.environ.pop("TRITON_ALWAYS_COMPILE")
                os.environ |= {} if before is None else {"TRITON_ALWAYS_COMPILE": before}
        return
    left = dict(enumerate(tasks))
    while left:
        try:
            _run_in_pool(work, left, processes, finished, fresh)
        except BrokenProcessPool:
            if processes == 1:  # tasks run in their order, so it was the first of those that are left
                index = next(iter(left))
                del left[index]
                finished(index, None)
            processes = max(1, processes // 2)


def _run_in_pool(
    work: Callable[[_Task], _Result],
    left: dict[int, _Task],
    processes: int,
    finished: Callable[[int, _Result | None], None],
    fresh: bool,
) -> None:
    """Run what is left, and remove from it what has finished."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_prepare, initargs=(fresh,))
    try:
        futures = {pool.submit(work, task): index for index, task in left.items()}
        for future in as_completed(futures):
            result = future.result()
            del left[futures[future]]
            finished(futures[future], result)
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C does not wait for hundreds of kernels


def _prepare(fresh: bool, of_its_own: bool = True) -> None:
    """What a process does before its first task."""
    if of_its_own:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the parent ends the work
    if fresh:
        os.environ["TRITON_ALWAYS_COMPILE"] = "1"


def _free_bytes() -> int:
    """Memory that may be taken; very much where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 60
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 1 << 60)
