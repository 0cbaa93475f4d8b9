"""Settings for the cases in processes of their own, which child.py runs."""

import gc
import os
from collections.abc import Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from tests.simulated_gpu import Gpu

# The interpreter makes hundreds of objects for every operation, none of them in cycles: at the usual threshold the
# collector takes an eighth of its time.
gc.set_threshold(50_000, 50, 50)


def patch_the_language_once() -> None:
    """Spares a quarter of the interpreter's time.

    It puts its own functions into triton.language whenever a kernel calls a jitted function, though they are there
    since the kernel was launched, or since the first such call for functions of Triton's own.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def once(function: FunctionType) -> Any:
        seen = [module for module in function.__globals__.values() if module is tl or module is tl.core]
        if not seen or any(tl.core.is_builtin(module.load) for module in seen):
            return patch(function)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = once


if os.environ.get("TRITON_INTERPRET") == "1":
    patch_the_language_once()


@pytest.fixture
def poisoned_allocations(request: pytest.FixtureRequest) -> Iterator[None]:
    """`torch.empty` fills with NaN or the largest integer, so an output or a partial result that nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(64, device=request.module.DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def gpu() -> "Iterator[Gpu]":
    """A GPU that is simulated while a case runs."""
    from tests.simulated_gpu import simulated_gpu

    with simulated_gpu() as gpu:
        yield gpu
