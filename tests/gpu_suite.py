"""What tests of `perf/gpu_suite.py` share. Its modules are found once `perf` is on the path."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any


def module(name: str) -> ModuleType:
    return importlib.import_module(f"gpu.{name}")


class Lost(RuntimeError):
    """Of a planted fault."""


def stage_of(*measurements: Any) -> Any:
    return module("stage").Stage("s", "s", "a stage", lambda setting: measurements, lambda document: "")


def measurement(name: str, run: Any = lambda context: {"value": 1}, seconds: float = 30.0) -> Any:
    return module("stage").Measurement(name, run, seconds)


def facts_of(setting: Any) -> dict[str, Any]:
    """The facts of a document of `stage_of`."""
    return module("facts").facts(setting, stage_of().source()) | {"stage": "s"}


def state_of(pid: int) -> str | None:
    """Of a process on Linux; None where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None
