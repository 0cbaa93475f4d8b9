"""Commands, in this process and as programs of their own: what the tests of the command lines share."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from treespec import LLM
from treespec.cli import app

ROOT = Path(__file__).resolve().parents[2]


class Ran(NamedTuple):
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        return json.loads(self.stdout)


def run(*arguments: object, code: int = 0, stdin: str | bytes = "") -> Ran:
    """Run a command in this process; asserts its exit code, and that it ended by no exception of its own."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == code, result.output
    return Ran(result.stdout, result.stderr)


def program(*arguments: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run Python in a session of its own, with environment variables set, or unset where they are None."""
    given = {name: value for name, value in (os.environ | environment).items() if value is not None}
    command, own_session = [sys.executable, *arguments], {"start_new_session": True, "preexec_fn": take_interrupts}
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=300, **own_session)


def take_interrupts() -> None:
    """In a new process: a Ctrl-C arrives, though jobs in the background, as tests may be, ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


LOADERS = ("treespec.cli.options.load_llm",)
BENCH = ("treespec.bench.run.LLM",)


def lend(engine: LLM | Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, loaders: Sequence[str] = LOADERS) -> None:
    """Let commands use an engine that is there already, or what a function opens with the arguments of `LLM`.

    --check measures as few runs as it may.
    """
    opened = (lambda *_, **__: engine) if isinstance(engine, LLM) else engine
    for name, value in (dict.fromkeys(loaders, opened) | {"treespec.cli.generate.MEASURED_SECONDS": 0}).items():
        monkeypatch.setattr(name, value)


def use_hub_cache(folder: Path, monkeypatch: pytest.MonkeyPatch, **constants: Any) -> None:
    """Let a folder be the hub's cache; environment variables are read at the import of huggingface_hub alone."""
    for name, value in {"HF_HUB_CACHE": str(folder), **constants}.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
