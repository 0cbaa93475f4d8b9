"""What the tests of `treespec.hf` share."""

from typing import Any

import pytest

from tests.helpers.architectures import make_model
from tests.helpers.models import add_noise


@pytest.fixture(autouse=True)
def quick_starts(engines_start_quickly: None) -> None:
    """Engines of all tests here start quickly."""


@pytest.fixture(scope="session")
def model() -> Any:
    return make_model("stablelm")


@pytest.fixture(scope="session")
def draft() -> Any:
    """The model with noise: deep paths are accepted, and others are not."""
    return add_noise(make_model("stablelm"), 0.03)
