"""Settings for the whole suite."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Side by side, each process computes on one core: threads that wait for a core that another process has cost far more
# than they gain. Tests of several threads ask for them.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

# An example's time depends on what else the machine does, so it says nothing about correctness.
settings.register_profile("treespec", deadline=None)
settings.load_profile("treespec")


@pytest.fixture
def engines_start_quickly() -> Iterator[None]:
    """Engines that a test opens around models of transformers start as `quick_start` says."""
    from tests.architectures import quick_start  # and with it transformers, which most tests do without

    with quick_start():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not _takes_minutes(item))  # first, so that no process ends with one while others wait
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _takes_minutes(item: pytest.Item) -> bool:
    """Whether a test runs cases in Triton's interpreter."""
    return isinstance(item, pytest.Function) and "run_cases" in item.function.__code__.co_names
