"""Where the fetched files are, and what the tests of this folder share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.fetch import real_folder


@pytest.fixture(scope="session")
def fetched() -> Callable[[str], Path]:
    """The folder of a name of `fetch.NAMES`; the test is skipped where it is not there."""

    def find(name: str) -> Path:
        folder = real_folder() / name
        if not folder.is_dir():
            pytest.skip(f"{folder} is not there; fetch it with: python tests/real/fetch.py {name}")
        return folder

    return find
