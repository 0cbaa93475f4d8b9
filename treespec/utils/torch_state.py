"""Thread-local state of torch (grad mode, autocast, device, threads) around the engine's passes and user code."""

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch


def own_passes(device: torch.device) -> AbstractContextManager[Any]:
    """Run passes in the mode of the self-test: inference mode without autocast.

    Under `torch.autocast`, linear layers round differently than in the self-test. Disabling autocast takes 20 us, 2 %
    of a short round, so it is done only if autocast is enabled.
    """
    casting = [kind for kind in {device.type, "cpu"} if torch.is_autocast_enabled(kind)]
    return _without_autocast(casting) if casting else torch.inference_mode()


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Launch this thread's kernels on `device`. Each thread has its own current GPU."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


@contextmanager
def _without_autocast(kinds: Sequence[str]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def outside_code() -> Iterator[None]:
    """Run logits processors and stopping criteria as transformers does: with no_grad, but not in inference mode.

    User code could neither keep nor modify inference tensors later. Create or clone its arguments inside this context.
    Code called from within `one_thread` gets the thread's own number of threads back.
    """
    with torch.inference_mode(False), torch.no_grad(), _torch_threads(getattr(_caller, "threads", None)):
        yield


class one_thread:
    """Context that runs this thread's torch CPU operations single-threaded, without waking OpenMP's threads.

    An element-wise operation on one row of 49,152 logits takes 5 us, but torch parallelises it above 32,768 elements.
    OpenMP's threads then spin for about a millisecond on the cores that the compiled decoder needs: sampled tokens of
    SmolLM2-135M took 9.0 ms on two cores, and 5.9 ms without. `torch.set_num_threads` also affects other threads, so
    this only sets this thread's number in OpenMP. A class, because every round enters it.
    """

    def __enter__(self) -> None:
        self._threads, self._set_number = torch.get_num_threads(), _omp_setter()
        if self._threads > 1 and self._set_number is not None:
            self._previous, _caller.threads = getattr(_caller, "threads", None), self._threads
            self._set_number(1)

    def __exit__(self, *exception: object) -> None:
        if self._threads > 1 and self._set_number is not None:
            self._set_number(self._threads)
            _caller.threads = self._previous


_caller = threading.local()  # .threads: number of threads outside `one_thread`, or None


@contextmanager
def _torch_threads(number: int | None) -> Iterator[None]:
    """Set OpenMP's number of threads for parallel regions that this thread starts. None leaves it unchanged."""
    set_number = _omp_setter()
    if number is None or set_number is None:
        yield
        return
    previous = torch.get_num_threads()
    set_number(number)
    try:
        yield
    finally:
        set_number(previous)


@functools.cache
def _omp_setter() -> Callable[[int], None] | None:
    """Return `omp_set_num_threads` of the OpenMP runtime that torch uses, or None if it is not accessible."""
    try:
        set_number = ctypes.CDLL(None).omp_set_num_threads
    except (OSError, TypeError, AttributeError):  # another platform's loader, or torch without OpenMP
        return None
    set_number.argtypes, set_number.restype = [ctypes.c_int], None
    return set_number
