"""What of torch's state surrounds a computation: the engine's own passes, and code from outside that they call."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from treespec.errors import RequestError, describe_error


def own_passes(device: torch.device) -> AbstractContextManager[Any]:
    """Passes compute as they were proven: without gradients, and in the model's own dtype.

    Under `torch.autocast` linear layers would round as nothing was proven to. It is seldom on, and leaving it takes
    20 us, 2 % of a short round.
    """
    casting = [kind for kind in {device.type, "cpu"} if torch.is_autocast_enabled(kind)]
    return _without_autocast(casting) if casting else torch.inference_mode()


@contextmanager
def _without_autocast(kinds: Sequence[str]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def outside_code() -> Iterator[None]:
    """Processors and criteria run as transformers runs them: without gradients, but not in inference mode, whose
    tensors they could neither keep nor change later. Tensors that they get are made in here, or cloned."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def call_processor(name: str, call: Callable[[], Any], size: int, device: torch.device) -> Tensor:
    """Call a logits processor and copy what it returns into a tensor of our own.

    A processor may return any object that claims to be a tensor, and may keep what it returned and change it later:
    everything that touches the result is guarded, and the scores are a copy.

    Args:
        name: of the processor, for messages.
        call: runs it; within `outside_code`.
        size: of the vocabulary.
        device: of the logits.

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
    except Exception as error:  # code from outside may raise anything, and only one request asked for it
        raise RequestError(f"{name} failed: {describe_error(error)}") from error
    if problem is not None:
        raise RequestError(f"{name} returned {problem}")
    return scores


def _problem_of_scores(result: Any, size: int) -> str | None:
    """What keeps a processor's result from being scores; None where it is dense and of the right shape and type."""
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
