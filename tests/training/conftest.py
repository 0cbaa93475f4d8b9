"""What makes runs of training quick in all tests of this folder."""

from collections.abc import Iterator
from unittest import mock

import pytest

from tests.helpers.architectures import quick_start
from tests.helpers.exactness import threads


@pytest.fixture(scope="module", autouse=True)
def quick_runs() -> Iterator[None]:
    """Lessons and steps are small, without threads; engines start quickly, and decode every prompt once."""
    few = {"STEP_TOKENS": 512, "EPOCHS": 3, "REPORT_PROMPTS": 3, "REPEATS": 1, "PER_SHARD": 10}
    with threads(1), quick_start(), mock.patch.multiple("treespec.training.run", **few):
        yield
