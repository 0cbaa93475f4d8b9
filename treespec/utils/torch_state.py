"""Thread-local state of torch (grad mode, autocast, device, threads) around the engine's passes and user code."""

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from treespec.errors import RequestError, describe_error


def own_passes(device: torch.device) -> AbstractContextManager[Any]:
    """Run passes as the self-test does: in inference mode and without autocast.

    Under `torch.autocast`, linear layers round differently than in the self-test. Disabling autocast takes 20 us, 2 %
    of a short round, so this is done only if it is enabled.
    """
    casting = [kind for kind in {device.type, "cpu"} if torch.is_autocast_enabled(kind)]
    return _without_autocast(casting) if casting else torch.inference_mode()


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Launch this thread's kernels on `device`, because each thread has its own current GPU."""
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

    They could neither keep nor modify inference tensors later. Create or clone their arguments inside this context.
    Code called from within `one_thread` gets the thread's own number of threads back.
    """
    with torch.inference_mode(False), torch.no_grad(), _torch_threads(getattr(_caller, "threads", None)):
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's CPU operations of this thread on it alone, without waking the threads of OpenMP.

    An element-wise operation on one row of 49,152 logits takes 5 us, but torch splits any of more than 32,768 elements.
    OpenMP's threads then spin for about a millisecond, on the cores that the compiled decoder's threads need: sampled
    tokens of SmolLM2-135M took 9.0 ms on two cores, and 5.9 ms without. `torch.set_num_threads` also changes what other
    threads get, so this sets OpenMP's number of this thread only.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    before, _caller.threads = getattr(_caller, "threads", None), threads
    try:
        with _torch_threads(1):
            yield
    finally:
        _caller.threads = before


def threads_of_passes(compiled: bool) -> AbstractContextManager[None]:
    """Run passes with torch's threads or, beside the threads of compiled passes, on this thread alone."""
    return one_thread() if compiled else nullcontext()


_caller = threading.local()  # .threads: the number outside `one_thread`, None if there is none


@contextmanager
def _torch_threads(number: int | None) -> Iterator[None]:
    """Set OpenMP's number of threads for parallel regions that this thread starts. None: leave it as it is."""
    set_number = _omp_setter()
    if number is None or set_number is None:
        yield
        return
    before = torch.get_num_threads()
    set_number(number)
    try:
        yield
    finally:
        set_number(before)


@functools.cache
def _omp_setter() -> Callable[[int], None] | None:
    """Return `omp_set_num_threads` of the OpenMP runtime that torch uses, or None if it is not accessible."""
    try:
        set_number = ctypes.CDLL(None).omp_set_num_threads
    except (OSError, TypeError, AttributeError):  # another system's loader, or torch without OpenMP
        return None
    set_number.argtypes, set_number.restype = [ctypes.c_int], None
    return set_number


def call_processor(name: str, call: Callable[[], Any], size: int, device: torch.device) -> Tensor:
    """Call a logits processor and return a checked copy of its scores.

    The result may be any object that claims to be a tensor, so all access to it is guarded. It is copied because the
    processor may keep and modify it.

    Args:
        name: name of the processor, for messages.
        call: runs the processor, within `outside_code`.
        size: vocabulary size.
        device: device of the logits.

    Returns:
        float32 [size].

    Raises:
        RequestError: the processor fails, or returns anything but dense floating-point scores [1, size].
    """
    scores = torch.full((size,), torch.nan, dtype=torch.float32, device=device)
    try:
        result = call()
        problem = _problem_of_scores(result, size)
        if problem is None:
            scores.copy_(result[0])
    except Exception as error:  # user code may raise anything; only this request fails
        raise RequestError(f"{name} failed: {describe_error(error)}") from error
    if problem is not None:
        raise RequestError(f"{name} returned {problem}")
    return scores


def _problem_of_scores(result: Any, size: int) -> str | None:
    """Describe the error in a processor's result, or return None if it is dense and of the right shape and dtype."""
    if not isinstance(result, Tensor):
        return f"{type(result).__name__} instead of a tensor"
    if result.is_nested:
        return "a nested tensor; expected a dense one"
    if result.layout != torch.strided:
        return f"a tensor of layout {result.layout}; expected a dense one, as to_dense() gives"
    if result.is_meta:
        return "a tensor on the device meta, which has no values"
    if result.shape != (1, size) or not result.is_floating_point():
        return f"{result.dtype} {list(result.shape)}; expected floating point [1, {size}]"
    return None
