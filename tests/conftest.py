"""Settings for the whole suite."""

import pytest
import torch
from hypothesis import settings

# An example's time depends on what else the machine does, so it says nothing about correctness.
settings.register_profile("treespec", deadline=None)
settings.load_profile("treespec")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
