"""A stage: measurements one after another, each within its own time, all in one document that can be gone on with.

A measurement that raises, or takes longer than it may, is written down as that and the next one begins. What cannot go
on in the same process (a lost CUDA context, a call that never returns) ends it with `RESTART`; the next process finds
the document and starts behind what is in it.
"""

import gc
import importlib.util
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from gpu.clock import Clock
from gpu.setting import Setting

RESTART = 75  # exit status: something is left to do, in another process
GRACE = 30.0  # seconds beyond its bound until a measurement that does not return is ended with its process


class OutOfTime(BaseException):
    """A measurement took longer than it may. No `except Exception` on the way keeps it."""


class NotThere(Exception):
    """This checkout does not have what a measurement is about."""


@dataclass
class Context:
    """What a measurement is given.

    Attributes:
        results: of the measurements before it, by name.
        shared: what measurements of one process keep for each other, such as an open model.
    """

    setting: Setting
    results: dict[str, Any]
    shared: dict[str, Any] = field(default_factory=dict)

    def release(self) -> None:
        """Let go of what was kept, before something as large is made: an engine is freed by the collector alone."""
        for kept in self.shared.values():
            if hasattr(kept, "close"):
                kept.close()
        self.shared.clear()
        _free(self.setting)

    def clock(self, repeats: int = 50, seconds: float = 10.0) -> Clock:
        return Clock(self.setting.device, *((0, 1) if self.setting.dry else (5, repeats)), seconds)

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` made the first time."""
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]

    def figure(self, name: str, key: str) -> Any:
        """A figure of an earlier measurement; None where there is none."""
        return self.results.get(name, {}).get(key)


@dataclass(frozen=True)
class Measurement:
    """One thing to measure.

    Args:
        name: its key in the document.
        run: returns its figures.
        seconds: how long it may take, loading and compiling included.
    """

    name: str
    run: Callable[[Context], dict[str, Any]]
    seconds: float = 60.0


@dataclass(frozen=True)
class Stage:
    """Args: name, letter: how it is asked for; title: of its table; measurements, describe: of its module."""

    name: str
    letter: str
    title: str
    measurements: Callable[[Setting], Sequence[Measurement]]
    describe: Callable[[dict[str, Any]], str]
    seconds: float = 460.0


def op_module(name: str) -> ModuleType:
    """A module of the kernels.

    Raises:
        NotThere: this checkout has none of that name.
    """
    if importlib.util.find_spec(f"treespec_kernels.{name}") is None:
        raise NotThere(f"there is no treespec_kernels.{name}")
    return importlib.import_module(f"treespec_kernels.{name}")


def path_of(folder: Path, stage: str) -> Path:
    return folder / f"{stage}.json"


def load(path: Path) -> dict[str, Any] | None:
    """A document, or None where there is none to go on with."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and "measurements" in document else None


def write(path: Path, document: dict[str, Any]) -> None:
    """Whole or not at all, whenever the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(_finite(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: what is no number is null."""
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def run(stage: Stage, setting: Setting, seconds: float) -> bool:
    """Measure what is left of a stage within `seconds`; whether all of it is in the document now."""
    path = path_of(setting.out, stage.name)
    facts = setting.facts()
    document = load(path)
    if document is None or document["source"] != facts["source"]:
        document = {"stage": stage.name, "title": stage.title, **facts, "date": _now(), "complete": False,
                    "running": None, "measurements": {}}  # fmt: skip
    results = document["measurements"]
    if document["running"]:  # this is what the process before ended in
        results[document["running"]] = {"error": "the process ended in it"}
        document["running"] = None
    context = Context(setting, results)
    deadline = time.monotonic() + min(seconds, stage.seconds)
    for measurement in stage.measurements(setting):
        if measurement.name in results:
            continue
        left = deadline - time.monotonic()
        if left < min(measurement.seconds, 20.0):  # most end long before their bound
            _say(f"{stage.name}: no time is left for {measurement.name} and what follows; run it again")
            write(path, document)
            context.release()
            return False
        document["running"] = measurement.name
        write(path, document)
        results[measurement.name] = _measure(measurement, context, min(measurement.seconds, left), path, document)
        document["running"] = None
        write(path, document)
        _say(f"{stage.name:9} {measurement.name:44} {summary(results[measurement.name])}")
        if "error" in results[measurement.name] and _context_is_lost(setting):
            _leave()
    document["complete"] = True
    write(path, document)
    context.release()
    return True


def _measure(
    measurement: Measurement, context: Context, seconds: float, path: Path, document: dict[str, Any]
) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        with _within(seconds, measurement.name, path, document):
            figures = measurement.run(context)
            if context.setting.device.type == "cuda":
                torch.cuda.synchronize()
    except (Exception, OutOfTime) as error:
        figures = {"error": last_line(error)}
        del error
        _free(context.setting)
    return figures | {"seconds": round(time.perf_counter() - began, 2)}


def last_line(error: BaseException) -> str:
    """The last line of a traceback, and where it was raised; of a long message the first line."""
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text[:400]} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text[:400]


@contextmanager
def _within(seconds: float, name: str, path: Path, document: dict[str, Any]) -> Iterator[None]:
    """Raise `OutOfTime` after `seconds`; where that does not come through, write it down and end the process."""

    def raise_it(*given: object) -> None:
        raise OutOfTime(f"it took more than {seconds:.0f} s")

    def give_up() -> None:
        document["measurements"][name] = {"error": f"it did not return within {seconds + GRACE:.0f} s"}
        document["running"] = None
        write(path, document)
        _say(f"{name}: did not return; going on in another process")
        _leave()

    watchdog = threading.Timer(seconds + GRACE, give_up)
    watchdog.daemon = True
    before = signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    watchdog.start()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        watchdog.cancel()


def _leave() -> None:
    sys.stdout.flush()
    os._exit(RESTART)  # neither a lost context nor a hanging call lets Python end in order


def _context_is_lost(setting: Setting) -> bool:
    """After an illegal access every call fails until the process ends."""
    if setting.device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device=setting.device).item()
    except RuntimeError:
        return True
    return False


def _free(setting: Setting) -> None:
    gc.collect()
    if setting.device.type == "cuda":
        try:
            torch.cuda.empty_cache()
        except RuntimeError:
            return  # the context is lost, which is found out right after


def summary(figures: dict[str, Any]) -> str:
    """A measurement in one line."""
    if "error" in figures:
        return f"ERROR {figures['error'][:110]}"
    shown = [f"{key} {_short(value)}" for key, value in figures.items() if isinstance(value, int | float | str)]
    return "  ".join(shown)[:150]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _say(text: str) -> None:
    print(text, flush=True)
