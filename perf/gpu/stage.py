"""Runs the measurements of a stage with individual time limits, and stores results in a resumable document.

A measurement that raises or times out is recorded as an error, with its traceback in `errors.log`, and the next one
starts. After a lost CUDA context or a hanging call, the process exits with `RESTART`, and the next process resumes from
the document. A stage runs for a time slice. Measurements cut off by its end are not recorded, and a later slice repeats
them.
"""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu import failures
from gpu.clock import Clock
from gpu.documents import load, write
from gpu.facts import facts
from gpu.setting import Setting
from gpu.sources import source_hash

RESTART = 75  # exit status that asks for another process to continue
GRACE = 30.0  # seconds after its limit at which the process of a hanging measurement is killed
LAST = 5.0  # seconds after the end of the slice at which it is killed
LEAST = 20.0  # minimum remaining seconds to start a measurement; most end well before their limit


class MeasurementTimeout(BaseException):
    """Raised when a measurement or its slice exceeds its time limit.

    It is a BaseException, so that no `except Exception` swallows it.
    """


@dataclass
class Context:
    """Input of a measurement.

    Attributes:
        setting: setting of the run.
        results: results of earlier measurements, by name.
        shared: objects that the measurements of a process share, such as an open model.
    """

    setting: Setting
    results: dict[str, Any]
    shared: dict[str, Any] = field(default_factory=dict)

    def release(self) -> None:
        """Free shared objects, to make room for other large ones."""
        for kept in self.shared.values():
            if hasattr(kept, "close"):
                kept.close()
        self.shared.clear()
        free_memory(self.setting)

    def clock(self, repeats: int = 50, seconds: float = 10.0) -> Clock:
        return Clock(self.setting.device, *((0, 1) if self.setting.dry else (5, repeats)), seconds)

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the shared object `name`, created by `make` on the first call."""
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]

    def figure(self, name: str, key: str) -> Any:
        """Return a figure of an earlier measurement, or None."""
        return self.results.get(name, {}).get(key)


@dataclass(frozen=True)
class Measurement:
    """A named measurement.

    Args:
        name: key in the document.
        run: function that measures and returns the figures.
        seconds: time limit, including loading and compiling.
    """

    name: str
    run: Callable[[Context], dict[str, Any]]
    seconds: float = 60.0


@dataclass(frozen=True)
class Stage:
    """A stage of the suite.

    Args:
        name, letter: names for its selection.
        title: title of its table.
        measurements, describe: functions of its module.
        seconds: maximum duration of a slice.
        also: returns the modules that its measurements run in other processes.
    """

    name: str
    letter: str
    title: str
    measurements: Callable[[Setting], Iterable[Measurement]]
    describe: Callable[[dict[str, Any]], str]
    seconds: float = 460.0
    also: Callable[[], tuple[str, ...]] = tuple

    def source(self) -> str:
        """Return the hash of the sources that its figures depend on."""
        function = self.measurements.func if isinstance(self.measurements, partial) else self.measurements
        return source_hash(function.__module__, *self.also())


class Bound(NamedTuple):
    """Time limits of a measurement within this slice.

    Attributes:
        seconds: seconds until it is interrupted.
        grace: further seconds until its process is killed.
        cut: whether the slice ends before the measurement's own limit.
    """

    seconds: float
    grace: float
    cut: bool

    @classmethod
    def of(cls, own: float, left: float) -> "Bound":
        seconds = min(own, left)
        return cls(seconds, min(seconds + GRACE, left + LAST) - seconds, left < own)


def run(stage: Stage, setting: Setting, seconds: float) -> bool:
    """Run the remaining measurements of a stage within `seconds`. Return whether the document is complete."""
    document = _begin(stage, setting)
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
            write(setting.out, stage.name, document)
            try:
                results[name] = _measure(measurement, context, bound, stage.name, document)
            except MeasurementTimeout:
                document["running"] = None
                _say(f"{stage.name}: the time ended in {name}; run it again")
                break
            document["running"] = None
            write(setting.out, stage.name, document)
            _say(f"{stage.name:9} {name:44} {summary(results[name])}")
            if "error" in results[name] and _context_is_lost(setting):
                leave(RESTART)
        else:
            document["complete"] = True
        write(setting.out, stage.name, document)
    finally:
        context.release()
    return document["complete"]


def _begin(stage: Stage, setting: Setting) -> dict[str, Any]:
    """Load a stage's document or create an empty one."""
    document, source = load(setting.out, stage.name), stage.source()
    if document is None or document["source"] != source:
        document = {
            "stage": stage.name,
            "title": stage.title,
            **facts(setting, source),
            "date": _now(),
            "complete": False,
            "running": None,
            "measurements": {},
        }
    if (name := document["running"]) is not None:  # the previous process died in this measurement
        document["measurements"][name] = {"error": "the process ended in it"}
        document["running"] = None
        failures.note(setting.out, f"{stage.name}: {name}", "The process ended in it: above is what it left, if it did")
    return document


def _measure(
    measurement: Measurement, context: Context, bound: Bound, stage: str, document: dict[str, Any]
) -> dict[str, Any]:
    """Run a measurement, and return its figures or its error.

    Raises:
        MeasurementTimeout: the slice ended.
    """
    began, heading = time.perf_counter(), f"{stage}: {measurement.name}"
    try:
        with _within(bound, measurement.name, context.setting.out, document):
            figures = measurement.run(context)
            if context.setting.device.type == "cuda":
                torch.cuda.synchronize()
    except (Exception, MeasurementTimeout) as error:
        late = time.perf_counter() - began >= bound.seconds
        over = bound.cut and (late or isinstance(error, MeasurementTimeout))  # `late`: a library may wrap the timeout
        failures.note(context.setting.out, heading + ", cut off" * over, failures.trace(error))
        if over:
            raise MeasurementTimeout("the slice ended") from None
        figures = {"error": failures.last_line(error)}
        del error
        free_memory(context.setting)
    return figures | {"seconds": round(time.perf_counter() - began, 2)}


@contextmanager
def _within(bound: Bound, name: str, out: Path, document: dict[str, Any]) -> Iterator[None]:
    """Raise `MeasurementTimeout` in the block at the limit; if that has no effect, record it and exit the process."""

    def raise_it(*given: object) -> None:
        raise MeasurementTimeout(f"it took more than {bound.seconds:.0f} s")

    def give_up() -> None:
        try:
            if not bound.cut:
                words = f"it did not return within {bound.seconds + bound.grace:.0f} s"
                document["measurements"][name] = {"error": words}
            document["running"] = None
            write(out, document["stage"], document)
            _say(f"{name}: did not return; its process is ended")
            failures.note_stacks(out, f"{document['stage']}: {name}, did not return")
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
    """Exit the process at once."""
    sys.stdout.flush()
    os._exit(status)  # a lost context or a hanging call prevents a normal exit


def _context_is_lost(setting: Setting) -> bool:
    """Return whether the CUDA context is lost: after an illegal access every call fails."""
    if setting.device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device=setting.device).item()
    except RuntimeError:
        return True
    return False


def free_memory(setting: Setting) -> None:
    """Run the garbage collector, which engines need, and release the allocator's unused memory."""
    gc.collect()
    if setting.device.type == "cuda":
        try:
            torch.cuda.empty_cache()
        except RuntimeError:
            return  # the context is lost; the caller checks this next


def summary(figures: dict[str, Any]) -> str:
    """Return the figures of a measurement in one line."""
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
