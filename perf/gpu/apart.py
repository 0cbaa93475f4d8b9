"""Work in processes of its own, several at a time: what compiles kernels, or compares bits and times nothing.

Compiling takes a core up to a second a kernel, and a stage needs up to a hundred. What a process compiles, the others
find in Triton's cache.
"""

import faulthandler
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from gpu import failures

Task = Callable[[], Any]
MAX_WORKERS = 12
TRACE = 4000  # characters of a traceback, from its end


def workers() -> int:
    """Processes at a time: a few cores are left to those that drive the device."""
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) - 2))


class Apart:
    """Tasks in fresh processes, begun in their order.

    Args:
        tasks: by name, such as can be sent to another process.
        seconds: of one, after which its process is ended.
    """

    def __init__(self, tasks: Mapping[str, Task], seconds: float):
        self._seconds, self._closed = seconds, threading.Event()
        self._pool = ThreadPoolExecutor(workers())
        self._running: set[BaseProcess] = set()
        self._futures: dict[str, Future[Any]] = {
            name: self._pool.submit(self._run, task) for name, task in tasks.items()
        }

    def result(self, name: str) -> Any:
        """What a task returned, once it has.

        Raises:
            RuntimeError: it raised, its process died, or it took too long. A note has the traceback from there.
        """
        return self._futures[name].result()

    def wait(self) -> dict[str, BaseException]:
        """Until all have ended. Returns what went wrong."""
        found = {name: future.exception() for name, future in self._futures.items()}
        return {name: error for name, error in found.items() if error is not None}

    def close(self) -> None:
        """Ends what still runs, and begins nothing more."""
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
        if self._closed.is_set():  # perhaps before it was among the running
            process.kill()
        try:
            if not receiver.poll(self._seconds):
                raise RuntimeError(f"it took more than {self._seconds:.0f} s")
            return receiver.recv()
        except EOFError:
            process.join()
            raise RuntimeError(f"its process ended with {process.exitcode}") from None
        finally:
            process.kill()  # its answer is here, or will never be
            process.join()
            self._running.discard(process)


def run_task(task: Task, sender: Connection, stacks: str, until: float) -> None:
    """Sends what a task returned, or the last line and the traceback of what it raised; where it can do neither, its
    stacks are in a file, by the monotonic clock just before `until` at the latest."""
    torch.set_num_threads(2)  # beside a dozen others
    with open(stacks, "w") as file:
        faulthandler.enable(file)
        faulthandler.dump_traceback_later(max(until - time.monotonic() - 2.0, 0.01), file=file)
        answer: tuple[Any, str | None, str]
        try:
            answer = task(), None, ""
        except Exception as error:  # a measurement raises what compilers and drivers raise: it is written down there
            answer = None, failures.last_line(error), failures.trace(error)[-TRACE:]
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
    sender.send(answer)


def compile_apart(tasks: Mapping[str, Task], seconds: float, out: Path) -> dict[str, Any]:
    """Runs tasks for the kernels that they compile. What fails shows again where it is measured.

    Args:
        tasks: as in `Apart`.
        seconds: of all of them.
        out: the folder of results, whose log has the tracebacks.
    """
    apart = Apart(tasks, seconds)
    timer = threading.Timer(seconds, apart.close)
    timer.start()
    try:
        found = apart.wait()
    finally:
        timer.cancel()
        apart.close()
    for name, error in found.items():
        failures.note(out, f"compiling {name}", failures.trace(error))
    return {"tasks": len(tasks), "failures": [str(error) for error in found.values()]}
