"""What of torch's state surrounds a computation: the engine's own passes, and code from outside that they call."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch


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
