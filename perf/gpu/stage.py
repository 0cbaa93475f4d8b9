"""A stage: measurements one after another, each within its own time, all in one document that can be gone on with.

A measurement that raises, or takes longer than it may, is written down as that, with its traceback in `errors.log`, and
the next one begins. What cannot go on in the same process (a lost CUDA context, a call that never returns) ends it with
`RESTART`; the next process finds the document and starts behind what is in it. What is cut off because the time of the
whole slice ended is not written down, since that says nothing of it: a later slice measures it anew.
"""

import gc
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from gpu import failures
from gpu.clock import Clock
from gpu.documents import load, path_of, write
from gpu.setting import Setting

RESTART = 75  # exit status: something is left to do, in another process
GRACE = 30.0  # seconds beyond its bound until a measurement that does not return is ended with its process
LAST = 10.0  # the same beyond the end of the slice
LEAST = 20.0  # seconds that are enough to begin with any measurement: most end long before their bound


class OutOfTime(BaseException):
    """A measurement, or the slice that it is in, took longer than it may. No `except Exception` on the way keeps it."""


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
        free_memory(self.setting)

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


class Bound(NamedTuple):
    """How long a measurement may take in this slice.

    Attributes:
        seconds: until it is interrupted.
        grace: further seconds until its process is ended.
        cut: the slice ends before the measurement's own time does.
    """

    seconds: float
    grace: float
    cut: bool

    @classmethod
    def of(cls, own: float, left: float) -> "Bound":
        seconds = min(own, left)
        return cls(seconds, min(seconds + GRACE, left + LAST) - seconds, left < own)


def run(stage: Stage, setting: Setting, seconds: float) -> bool:
    """Measure what is left of a stage within `seconds`; whether all of it is in the document now."""
    path = path_of(setting.out, stage.name)
    document = _begin(stage, setting, path)
    results = document["measurements"]
    context = Context(setting, results)
    deadline = time.monotonic() + min(seconds, stage.seconds)
    try:
        for measurement in stage.measurements(setting):
            name = measurement.name
            if name in results:
                continue
            left = deadline - time.monotonic()
            if left < min(measurement.seconds, LEAST):
                _say(f"{stage.name}: no time is left for {name} and what follows; run it again")
                break
            bound = Bound.of(measurement.seconds, left)
            document |= {"running": name, "cut": bound.cut}
            write(path, document)
            try:
                results[name] = _measure(measurement, context, bound, path, document)
            except OutOfTime:
                document["running"] = None
                _say(f"{stage.name}: the time ended in {name}; run it again")
                break
            document["running"] = None
            write(path, document)
            _say(f"{stage.name:9} {name:44} {summary(results[name])}")
            if "error" in results[name] and _context_is_lost(setting):
                leave(RESTART)
        else:
            document["complete"] = True
        write(path, document)
    finally:
        context.release()
    return document["complete"]


def _begin(stage: Stage, setting: Setting, path: Path) -> dict[str, Any]:
    """The document of a stage as it is, or an empty one."""
    facts = setting.facts()
    document = load(path)
    if document is None or document["source"] != facts["source"]:
        document = {
            "stage": stage.name,
            "title": stage.title,
            **facts,
            "date": _now(),
            "complete": False,
            "running": None,
            "measurements": {},
        }
    if (name := document["running"]) is not None:  # this is what the process before ended in
        document["measurements"][name] = {"error": "the process ended in it"}
        document["running"] = None
        failures.note(setting.out, f"{stage.name}: {name}", "The process ended in it: above is what it left, if it did")
    return document


def _measure(
    measurement: Measurement, context: Context, bound: Bound, path: Path, document: dict[str, Any]
) -> dict[str, Any]:
    """Figures, or the error.

    Raises:
        OutOfTime: the slice ended in it.
    """
    began, heading = time.perf_counter(), f"{path.stem}: {measurement.name}"
    try:
        with _within(bound, measurement.name, path, document):
            figures = measurement.run(context)
            if context.setting.device.type == "cuda":
                torch.cuda.synchronize()
    except (Exception, OutOfTime) as error:
        late = time.perf_counter() - began >= bound.seconds
        over = bound.cut and (late or isinstance(error, OutOfTime))  # a library may have made it one of its own
        failures.note(context.setting.out, heading + ", cut off" * over, failures.trace(error))
        if over:
            raise OutOfTime("the slice ended") from None
        figures = {"error": failures.last_line(error)}
        del error
        free_memory(context.setting)
    return figures | {"seconds": round(time.perf_counter() - began, 2)}


@contextmanager
def _within(bound: Bound, name: str, path: Path, document: dict[str, Any]) -> Iterator[None]:
    """Raise `OutOfTime` at the bound; where that does not come through, write it down and end the process."""

    def raise_it(*given: object) -> None:
        raise OutOfTime(f"it took more than {bound.seconds:.0f} s")

    def give_up() -> None:
        try:
            if not bound.cut:
                words = f"it did not return within {bound.seconds + bound.grace:.0f} s"
                document["measurements"][name] = {"error": words}
            document["running"] = None
            write(path, document)
            _say(f"{name}: did not return; its process is ended")
            failures.note_stacks(path.parent, f"{path.stem}: {name}, did not return")
        finally:
            leave(0 if bound.cut else RESTART)

    watchdog = threading.Timer(bound.seconds + bound.grace, give_up)
    watchdog.daemon = True
    before = signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, bound.seconds)
    watchdog.start()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        watchdog.cancel()


def leave(status: int) -> None:
    """End the process at once."""
    sys.stdout.flush()
    os._exit(status)  # neither a lost context nor a hanging call lets Python end in order


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


def free_memory(setting: Setting) -> None:
    """Let the collector and the allocator give back what nothing holds."""
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
