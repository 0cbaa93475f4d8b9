"""compile=True where it cannot be had: an error that says why. These run without a compiler, too."""

from pathlib import Path
from typing import Any

import pytest

from tests.models import make_llama, new_folder, tiny
from treespec import LLM, costs
from treespec.errors import ConfigError, KernelError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is built in the user's cache."""
    monkeypatch.setattr(costs, "cache_folder", lambda: tmp_path)


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"compile": 1}, ConfigError, "compile=1; valid: True or False"),
        ({"attention": "cpu-packed"}, KernelError, "attention='cpu-packed'.*leave it at 'auto'"),
        ({"dtype": "float16"}, KernelError, "float16.*compile=False"),
    ],
)
def test_refusals(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        LLM(tiny()[0], **({"device": "cpu", "compile": True} | options))


def test_a_size_that_does_not_fit_is_refused() -> None:
    target = make_llama(new_folder("uneven"), 0, intermediate_size=100)
    with pytest.raises(KernelError, match=r"MLP size of 100.*multiple of 16"):
        LLM(target, device="cpu", compile=True)


@pytest.mark.parametrize(
    "command, words", [("no-such-compiler", "CXX='no-such-compiler'"), ("false", "false .* failed")]
)
def test_no_compiler_is_an_error(command: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a silent fallback."""
    monkeypatch.setenv("CXX", command)
    with pytest.raises(KernelError, match=words):
        LLM(tiny()[0], device="cpu", compile=True)
