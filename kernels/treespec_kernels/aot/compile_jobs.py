"""Runs compile tasks in several processes, since compilation is CPU-bound and holds the GIL."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TypeVar

_BYTES = 1 << 30  # memory per process: torch, Triton and LLVM
_LEAST_TASKS = 8  # per process, because starting one takes seconds

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


def num_processes(tasks: int) -> int:
    """Return the number of processes to start: at most one per core, per GiB of free memory, and per 8 tasks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _free_bytes() // _BYTES, -(-tasks // _LEAST_TASKS)))


def run_in_processes(
    work: Callable[[_Task], _Result],
    tasks: Sequence[_Task],
    processes: int,
    finished: Callable[[int, _Result | None], None],
    fresh: bool = False,
) -> None:
    """Run every task. If a process dies, for example out of memory, run the remaining tasks in half as many processes.

    Args:
        work: a module-level function; processes are spawned rather than forked, since this one may have threads.
        tasks: picklable arguments of `work`.
        processes: number of processes; 1 runs the tasks in this process.
        finished: called with each task's index and result, in any order; None if its process died.
        fresh: whether to bypass Triton's own cache.
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
            if processes == 1:  # tasks run in order, so the first remaining one killed the process
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
    """Run the tasks in `left`, and remove each one that finishes."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_prepare, initargs=(fresh,))
    try:
        futures = {pool.submit(work, task): index for index, task in left.items()}
        for future in as_completed(futures):
            result = future.result()
            del left[futures[future]]
            finished(futures[future], result)
    finally:
        pool.shutdown(cancel_futures=True)  # so that Ctrl-C does not wait for hundreds of kernels


def _prepare(fresh: bool, of_its_own: bool = True) -> None:
    """Set the signal handler and environment of a process that compiles."""
    if of_its_own:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes; the parent handles it
    if fresh:
        os.environ["TRITON_ALWAYS_COMPILE"] = "1"


def _free_bytes() -> int:
    """Return the available memory in bytes; unlimited if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 60
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 1 << 60)
