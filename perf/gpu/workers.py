"""Runs untimed tasks (kernel compilation, bit comparisons) in parallel worker processes.

A kernel takes up to one second of a core to compile, and a stage needs up to a hundred kernels. Processes share
Triton's cache.
"""

import faulthandler
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from gpu import failures
from gpu.stage import Context, Measurement

Task = Callable[[], Any]
MAX_WORKERS = 12
TRACE = 4000  # characters of the end of a traceback to keep


def num_workers() -> int:
    """Return the number of concurrent processes, which leaves two cores for the main process."""
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) - 2))


class WorkerPool:
    """Pool that runs each task in a new process, started in order.

    Args:
        tasks: picklable tasks by name.
        seconds: time limit per task, after which its process is killed.
    """

    def __init__(self, tasks: Mapping[str, Task], seconds: float):
        self._seconds, self._closed = seconds, threading.Event()
        self._pool = ThreadPoolExecutor(num_workers())
        self._running: set[BaseProcess] = set()
        self._futures: dict[str, Future[Any]] = {
            name: self._pool.submit(self._run, task) for name, task in tasks.items()
        }

    def result(self, name: str) -> Any:
        """Wait for a task and return its result.

        Raises:
            RuntimeError: the task raised, died or timed out; a note has its traceback.
        """
        return self._futures[name].result()

    def wait(self) -> dict[str, BaseException]:
        """Wait for all tasks and return their errors."""
        found = {name: future.exception() for name, future in self._futures.items()}
        return {name: error for name, error in found.items() if error is not None}

    def close(self) -> None:
        """Kill running tasks and start no more."""
        self._closed.set()
        self._pool.shutdown(wait=False)
        for process in list(self._running):
            process.kill()

    def _run(self, task: Task) -> Any:
        with tempfile.TemporaryDirectory(prefix="treespec-gpu-") as folder:
            stacks = Path(folder) / "stacks"
            try:
                result, error, trace = self._answer_of(task, stacks)
            except RuntimeError as failure:
                failure.add_note(stacks.read_text()[-TRACE:] if stacks.exists() else "it had not begun")
                raise
        if error is not None:
            failure = RuntimeError(error)
            failure.add_note(trace)
            raise failure
        return result

    def _answer_of(self, task: Task, stacks: Path) -> tuple[Any, str | None, str]:
        spawning = multiprocessing.get_context("spawn")
        receiver, sender = spawning.Pipe(duplex=False)
        until = time.monotonic() + self._seconds
        process = spawning.Process(target=run_task, args=(task, sender, str(stacks), until), daemon=True)
        if self._closed.is_set():
            raise RuntimeError("it did not begin")
        process.start()
        self._running.add(process)
        sender.close()
        if self._closed.is_set():  # closed before it was registered as running
            process.kill()
        try:
            if not receiver.poll(self._seconds):
                raise RuntimeError(f"it took more than {self._seconds:.0f} s")
            return receiver.recv()
        except EOFError:
            process.join()
            raise RuntimeError(f"its process ended with {process.exitcode}") from None
        finally:
            process.kill()  # its answer has arrived or will never arrive
            process.join()
            self._running.discard(process)


def in_workers(own: Sequence[Measurement], seconds: float, limit: float) -> list[Measurement]:
    """Return measurements that run in parallel, each in its own process; they must not be timed.

    The first one to run starts all that have no result yet, the longest first.

    Args:
        own: the measurements.
        seconds: time limit of each process.
        limit: time limit of each measurement, in which it may also be queued.
    """

    def result(name: str, context: Context) -> dict[str, Any]:
        def begin() -> WorkerPool:
            left = sorted((each for each in own if each.name not in context.results), key=lambda each: -each.seconds)
            fresh = Context(context.setting, {})
            return WorkerPool({each.name: partial(each.run, fresh) for each in left}, seconds)

        pool: WorkerPool = context.keep("workers", begin)
        found: dict[str, Any] = pool.result(name)
        return found

    return [Measurement(each.name, partial(result, each.name), limit) for each in own]


def run_task(task: Task, sender: Connection, stacks: str, until: float) -> None:
    """Run a task, and send its result, or the last line and traceback of its error.

    If it hangs, dump its stacks to the file `stacks` just before `until` (monotonic clock).
    """
    torch.set_num_threads(2)  # up to twelve processes share the cores
    with open(stacks, "w") as file:
        faulthandler.enable(file)
        faulthandler.dump_traceback_later(max(until - time.monotonic() - 2.0, 0.01), file=file)
        answer: tuple[Any, str | None, str]
        try:
            answer = task(), None, ""
        except Exception as error:  # compilers and drivers raise arbitrary types, and every error must be reported
            answer = None, failures.last_line(error), failures.trace(error)[-TRACE:]
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
    sender.send(answer)


def compile_in_workers(tasks: Mapping[str, Task], seconds: float, out: Path) -> dict[str, Any]:
    """Run tasks to fill the compile cache. Failures reappear when the kernels are measured.

    Args:
        tasks: as in `WorkerPool`.
        seconds: total time limit.
        out: results folder, to whose log the tracebacks are written.
    """
    pool = WorkerPool(tasks, seconds)
    timer = threading.Timer(seconds, pool.close)
    timer.start()
    try:
        found = pool.wait()
    finally:
        timer.cancel()
        pool.close()
    for name, error in found.items():
        failures.note(out, f"compiling {name}", failures.trace(error))
    return {"tasks": len(tasks), "failures": [str(error) for error in found.values()]}
