"""Tuning sweep: checks and times all configurations of each op and shape, and selects the fastest.

A configuration with wrong results, or with rows that depend on other rows, is not timed. Each measurement is appended
to a log immediately, so that a sweep that was interrupted or ran out of its budget can be resumed. The sweep minimises
the weighted mean time of the cases of one key.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from treespec_kernels.aot.compile_jobs import run_in_processes
from treespec_kernels.aot.launches import Launch, launches_of_case
from treespec_kernels.ops import TUNABLE, cases_of
from treespec_kernels.ops.op import Case
from treespec_kernels.ops.shapes import META, Setting
from treespec_kernels.tuning.clock import Clock
from treespec_kernels.tuning.tuned import TunedEntry, versions_of

MARGIN = 0.01  # minimum relative speed-up over the default for replacing it

TuningProblem = tuple[Case, ...]
"""Cases of one op and key, which are tuned together."""


class TuningError(RuntimeError):
    """Raised if a kernel left the device unusable for this process."""


@dataclass(frozen=True)
class Measurement:
    """Result of one configuration of a problem: the seconds of each case by its load, or an error."""

    config: Any
    seconds: dict[str, float] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Tuned:
    """Measurements of one problem. `unmeasured` is the number of configurations not measured within the time budget."""

    problem: TuningProblem
    measurements: tuple[Measurement, ...]
    unmeasured: int

    def mean(self, measurement: Measurement) -> float:
        """Return the weighted mean of the cases' seconds."""
        total = sum(case.weight for case in self.problem)
        return sum(case.weight * measurement.seconds[case.load] for case in self.problem) / total

    @property
    def default(self) -> Measurement | None:
        """Measurement of the default, or None if it failed."""
        shipped = self.problem[0].default
        return next((m for m in self.measurements if m.config == shipped and not m.error), None)

    @property
    def best(self) -> Measurement | None:
        """Fastest measurement, or the default's if none is faster by `MARGIN`; None if all failed."""
        best = min((m for m in self.measurements if not m.error), key=self.mean, default=None)
        default = self.default
        return default if best and default and self.mean(best) > (1 - MARGIN) * self.mean(default) else best

    @property
    def failed(self) -> list[Measurement]:
        return [m for m in self.measurements if m.error]

    def entry(self, versions: dict[str, str], bandwidth: float) -> TunedEntry | None:
        """Return the entry for a tuned file; None if all configurations failed. `bandwidth`: bytes per second."""
        best, first = self.best, self.problem[0]
        if best is None:
            return None
        shipped = self.default or best  # a failed default cannot be compared with
        loads = {
            case.load: {
                "microseconds": 1e6 * best.seconds[case.load],
                "default_microseconds": 1e6 * shipped.seconds[case.load],
                "share_of_copy": case.bytes / best.seconds[case.load] / bandwidth,
                "weight": case.weight,
            }
            for case in self.problem
        }
        means, now = (1e6 * self.mean(best), 1e6 * self.mean(shipped)), datetime.now(UTC).isoformat(timespec="seconds")
        return TunedEntry(first.op, first.key, asdict(best.config), *means, loads, versions, now)


class SweepLog:
    """Log of measurements on a device, one line of JSON per configuration. Truncated lines are ignored."""

    def __init__(self, path: Path, device_name: str):
        self.path, self.device_name = path, device_name
        self._stored: dict[str, tuple[dict[str, float], str | None]] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            with suppress(ValueError):
                key, *values = json.loads(line)
                self._stored[key] = values

    def find(self, problem: TuningProblem, config: Any) -> Measurement | None:
        stored = self._stored.get(self._key(problem, config))
        return stored and Measurement(config, *stored)

    def append(self, problem: TuningProblem, measurement: Measurement) -> None:
        key = self._key(problem, measurement.config)
        self._stored[key] = measurement.seconds, measurement.error
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:  # terminates a truncated line
            file.write(f"\n{json.dumps([key, measurement.seconds, measurement.error])}\n")

    def forget(self) -> None:
        """Delete the log."""
        self._stored = {}
        self.path.unlink(missing_ok=True)

    def _key(self, problem: TuningProblem, config: Any) -> str:
        first, loads = problem[0], [case.load for case in problem]
        return json.dumps([first.label, loads, asdict(config), versions_of(self.device_name, first.op)])


def problems_of(settings: Iterable[Setting], ops: Iterable[str] = TUNABLE) -> list[TuningProblem]:
    """Group the timed cases of ops by op and key, in order of first occurrence; a repeated load counts once."""
    ops, grouped = tuple(ops), dict[str, dict[str, Case]]()
    for case in (case for setting in settings for op in ops for case in cases_of(op, setting) if case.weight):
        grouped.setdefault(case.label, {}).setdefault(case.load, case)
    return [tuple(loads.values()) for loads in grouped.values()]


def tune(
    problems: Sequence[TuningProblem],
    clock: Clock,
    log: SweepLog,  # earlier measurements, not repeated; new ones are appended
    *,
    # Time limit for starting measurements; each problem gets an equal share of the remaining time
    budget_seconds: float = float("inf"),
    # Number of processes that compile kernels before timing, for at most half of the budget; 0 skips this step
    jobs: int = 0,
    # Called with the label of the current step, the number of finished configurations, and the total
    advance: Callable[[str, int, int], None] = lambda label, done, total: None,
) -> list[Tuned]:
    """Sweep the configurations of every problem.

    Raises:
        TuningError: a kernel broke the device. The log records it as failed, so the next sweep skips it.
        torch.OutOfMemoryError: the inputs do not fit in memory.
    """
    end, results = time.monotonic() + budget_seconds, []
    configs_of = [problem[0].candidates() for problem in problems]
    measured_of = [
        {config: measurement for config in configs if (measurement := log.find(problem, config))}
        for problem, configs in zip(problems, configs_of, strict=True)
    ]
    done, total = sum(map(len, measured_of)), sum(map(len, configs_of))
    if jobs:
        advance("compiling", done, total)
        pending_of = [[c for c in configs if c not in k] for configs, k in zip(configs_of, measured_of, strict=True)]
        precompile(problems, pending_of, jobs, end - budget_seconds / 2)
    for index, (problem, configs, measured) in enumerate(zip(problems, configs_of, measured_of, strict=True)):
        now, label = time.monotonic(), problem[0].label
        deadline = now + (end - now) / (len(problems) - index)
        advance(label, done, total)
        try:
            for config in (config for config in configs if config not in measured):
                if time.monotonic() >= deadline:
                    break
                measured[config] = measurement = measure(problem, config, clock)
                log.append(problem, measurement)
                if measurement.error and not works(clock.device):  # all further measurements would fail, too
                    error = measurement.error.splitlines()[0]
                    raise TuningError(f"{label}, {config} broke the device ({error}); run again to continue without it")
                done += 1
                advance(label, done, total)
        finally:
            for case in problem:
                case.release()
        measurements = tuple(measured[config] for config in configs if config in measured)
        results.append(Tuned(problem, measurements, len(configs) - len(measurements)))
    return results


def measure(problem: TuningProblem, config: Any, clock: Clock) -> Measurement:
    """Check a configuration on every case of a problem, then time it on each."""
    try:
        for case in problem:
            case.check(config)
        seconds = {}
        for case in problem:
            copies = clock.copies(case.bytes)
            case.prepare(copies)
            seconds[case.load] = clock.seconds([partial(case.run, config, copy) for copy in range(copies)])
    except torch.OutOfMemoryError:  # caused by the inputs, not by the configuration
        raise
    except Exception as error:  # compilers and drivers raise arbitrary types; record the error and continue
        return Measurement(config, error=f"{type(error).__name__}: {error}".strip()[:600])
    return Measurement(config, seconds)


def precompile(
    problems: Sequence[TuningProblem], pending_of: Sequence[Sequence[Any]], jobs: int, deadline: float
) -> None:
    """Compile configurations in other processes until the deadline, to fill Triton's cache.

    Failed or remaining configurations are compiled when measured. Every problem's first configurations come first.
    """
    launches: dict[str, tuple[int, Launch]] = {}
    for (first, *_), pending in zip(problems, pending_of, strict=True):
        absent = replace(first.setting, device=META, compiled_for=first.setting.target)
        [case] = [c for c in cases_of(first.op, absent) if (c.key, c.load) == (first.key, first.load)]
        for index, config in enumerate(pending):
            with suppress(Exception):  # see `measure`
                for launch in launches_of_case(case, config):
                    launches.setdefault(repr(launch.binary), (index, launch))
    tasks = [launch for _, launch in sorted(launches.values(), key=lambda task: task[0])]
    target = problems[0][0].setting.target
    assert target is not None, "nothing is compiled for a CPU"
    work = partial(_compile, target, deadline)
    run_in_processes(work, tasks, jobs, lambda place, result: None)


def _compile(target: str, deadline: float, launch: Launch) -> None:
    with suppress(Exception):
        if time.monotonic() < deadline:
            launch.compile(target)


def works(device: torch.device) -> bool:
    """Return whether the device still works, that is, whether a synchronisation raises no error."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
