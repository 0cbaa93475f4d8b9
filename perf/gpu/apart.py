"""Work in processes of its own, several at a time: what compiles kernels, or compares bits and times nothing.

Compiling takes a core up to a second a kernel, and a stage needs up to a hundred. What a process compiles, the others
find in Triton's cache.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from gpu.failures import last_line

Task = Callable[[], Any]
MAX_WORKERS = 12


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
            RuntimeError: it raised, its process died, or it took too long.
        """
        return self._futures[name].result()

    def wait(self) -> list[str]:
        """Until all have ended. Returns what went wrong."""
        found = (future.exception() for future in self._futures.values())
        return [str(error) for error in found if error is not None]

    def close(self) -> None:
        """Ends what still runs, and begins nothing more."""
        self._closed.set()
        self._pool.shutdown(wait=False)
        for process in list(self._running):
            process.kill()

    def _run(self, task: Task) -> Any:
        spawning = multiprocessing.get_context("spawn")
        receiver, sender = spawning.Pipe(duplex=False)
        process = spawning.Process(target=_answer, args=(task, sender), daemon=True)
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
            result, error = receiver.recv()
        except EOFError:
            process.join()
            raise RuntimeError(f"its process ended with {process.exitcode}") from None
        finally:
            process.kill()  # its answer is here, or will never be
            process.join()
            self._running.discard(process)
        if error is not None:
            raise RuntimeError(error)
        return result


def _answer(task: Task, sender: Connection) -> None:
    torch.set_num_threads(2)  # beside a dozen others
    try:
        answer = task(), None
    except Exception as error:  # a measurement raises what compilers and drivers raise: it is written down there
        answer = None, last_line(error)
    sender.send(answer)


def compile_apart(tasks: Mapping[str, Task], seconds: float) -> dict[str, Any]:
    """Runs tasks for the kernels that they compile. What fails shows again where it is measured.

    Args:
        tasks: as in `Apart`.
        seconds: of all of them.
    """
    apart = Apart(tasks, seconds)
    timer = threading.Timer(seconds, apart.close)
    timer.start()
    try:
        return {"tasks": len(tasks), "failures": apart.wait()}
    finally:
        timer.cancel()
        apart.close()
