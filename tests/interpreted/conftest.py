"""Settings for the cases in processes of their own, which child.py runs."""

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.simulated_gpu import Gpu

# The interpreter makes hundreds of objects for every operation, none of them in cycles: at the usual threshold the
# collector takes an eighth of its time.
gc.set_threshold(50_000, 50, 50)


if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreted.faster import make_the_interpreter_faster

    make_the_interpreter_faster()


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
