"""Tuning sweep: checks and times every configuration of each op and shape, and keeps the fastest.

A configuration with wrong results, or whose rows depend on other rows, is not timed. Each measurement is appended to a
log immediately, so that a sweep that was interrupted or ran out of its budget can be resumed. The sweep minimises the
weighted mean time of the workloads of one key.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from treespec_kernels.tuning.clock import Clock
from treespec_kernels.tuning.tuned import TunedEntry, config_fields, label_of, versions_of
from treespec_kernels.tuning.workloads import Case

MARGIN = 0.01  # relative speed-up over the default that a configuration needs to replace it
BATCH = 4  # configurations that a process compiles for each creation of inputs


class TuningError(RuntimeError):
    """Raised if a kernel left the device unusable for this process."""


@dataclass(frozen=True)
class Measurement:
    """Result of one configuration of one op and key: the seconds of each load, or an error."""

    config: Any
    seconds: dict[str, float] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Problem:
    """Workloads of one op and key, which are tuned together."""

    workloads: tuple[Case, ...]

    @property
    def op(self) -> str:
        return self.workloads[0].op

    @property
    def key(self) -> dict[str, Any]:
        return self.workloads[0].key

    @property
    def label(self) -> str:
        return label_of(self.op, self.key)

    def mean(self, seconds: dict[str, float]) -> float:
        """Return the mean of the loads' seconds, weighted by the workloads' weights."""
        total = sum(workload.weight for workload in self.workloads)
        return sum(workload.weight * seconds[workload.load] for workload in self.workloads) / total


@dataclass(frozen=True)
class Tuned:
    """Measurements of one problem. `left` is the number of configurations not measured within the time budget."""

    problem: Problem
    measurements: tuple[Measurement, ...]
    left: int

    @property
    def default(self) -> Measurement | None:
        """Measurement of the shipped default, or None if it failed."""
        shipped = self.problem.workloads[0].default
        return next((m for m in self.measurements if m.config == shipped and not m.error), None)

    @property
    def best(self) -> Measurement | None:
        """Fastest measurement, or the default's if none is faster by `MARGIN`; None if all failed."""
        right = [m for m in self.measurements if not m.error]
        if not right:
            return None
        best = min(right, key=lambda m: self.problem.mean(m.seconds))
        default = self.default
        if default and self.problem.mean(best.seconds) > (1 - MARGIN) * self.problem.mean(default.seconds):
            return default
        return best

    @property
    def failed(self) -> list[Measurement]:
        return [m for m in self.measurements if m.error]

    def entry(self, versions: dict[str, str]) -> TunedEntry | None:
        """Return the entry for a tuned file; None if the op has no configurations, or all failed."""
        best, default = self.best, self.default
        if best is None or best.config is None:
            return None
        shipped = default or best  # a default that failed cannot be compared with
        loads = {
            workload.load: {
                "microseconds": 1e6 * best.seconds[workload.load],
                "default_microseconds": 1e6 * shipped.seconds[workload.load],
                "weight": workload.weight,
            }
            for workload in self.problem.workloads
        }
        fields = config_fields(best.config) or {}
        return TunedEntry(
            op=self.problem.op,
            key=self.problem.key,
            config={name: value for name, value in fields.items() if name != "fixed_order_dot"},
            microseconds=1e6 * self.problem.mean(best.seconds),
            default_microseconds=1e6 * self.problem.mean(shipped.seconds),
            loads=loads,
            versions=versions,
            measured=datetime.now(UTC).isoformat(timespec="seconds"),
        )


class SweepLog:
    """Log of measurements on a device, one line of JSON per configuration.

    Lines of other versions and truncated lines are ignored.
    """

    def __init__(self, path: Path, device_name: str):
        self.path, self.device_name = path, device_name
        self._known: dict[str, dict[str, Any]] = {}
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            lines = []
        for line in lines:
            try:
                match json.loads(line):
                    case {"what": dict(what), "seconds": dict(seconds), "error": str() | None as error}:
                        self._known[_text(what)] = {"seconds": seconds, "error": error}
            except ValueError:
                continue

    def find(self, problem: Problem, config: Any) -> Measurement | None:
        known = self._known.get(_text(self._what(problem, config)))
        return None if known is None else Measurement(config, known["seconds"], known["error"])

    def append(self, problem: Problem, measurement: Measurement) -> None:
        what = self._what(problem, measurement.config)
        known = {"seconds": measurement.seconds, "error": measurement.error}
        self._known[_text(what)] = known
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * torn + _text({"what": what} | known) + "\n")

    def forget(self) -> None:
        """Delete the log."""
        self._known = {}
        self.path.unlink(missing_ok=True)

    def _what(self, problem: Problem, config: Any) -> dict[str, Any]:
        return {
            "op": problem.op,
            "key": problem.key,
            "loads": [workload.load for workload in problem.workloads],
            "config": config_fields(config),
            "versions": versions_of(self.device_name, problem.op),
        }


def problems_of(workloads: Iterable[Case]) -> list[Problem]:
    """Group workloads by op and key, in order of first occurrence; a repeated load counts once."""
    grouped: dict[str, dict[str, Case]] = {}
    for workload in workloads:
        loads = grouped.setdefault(label_of(workload.op, workload.key), {})
        loads.setdefault(workload.load, workload)
    return [Problem(tuple(loads.values())) for loads in grouped.values()]


def tune(
    problems: Sequence[Problem],
    clock: Clock,
    log: SweepLog,
    *,
    budget_seconds: float = float("inf"),
    jobs: int = 1,
    advance: Callable[[str, int, int], None] = lambda label, done, total: None,
) -> list[Tuned]:
    """Sweep the configurations of every problem.

    Args:
        problems: the problems to tune.
        clock: timer of the workloads.
        log: earlier measurements, which are not repeated; new ones are appended.
        budget_seconds: time after which no measurement starts; each problem gets an equal share of the remaining time.
        jobs: number of processes that compile kernels before the timing, for at most half of the budget; 1 skips this
            step.
        advance: called with the label of the current step, the number of finished configurations, and the total.

    Raises:
        TuningError: a kernel broke the device. The log records it as failed, so the next sweep skips it.
        torch.OutOfMemoryError: the inputs do not fit in memory.
    """
    began, done = time.monotonic(), 0
    candidates_of = [problem.workloads[0].candidates() for problem in problems]
    known_of = [
        {i: found for i, config in enumerate(candidates) if (found := log.find(problem, config))}
        for problem, candidates in zip(problems, candidates_of, strict=True)
    ]
    total = sum(map(len, candidates_of))
    broken_of: dict[int, dict[int, str]] = {}
    if jobs > 1:
        advance("compiling", sum(map(len, known_of)), total)
        pending_of = [[i for i in range(len(c)) if i not in k] for c, k in zip(candidates_of, known_of, strict=True)]
        broken_of = compile_problems(problems, pending_of, jobs, began + budget_seconds / 2)
    results = []
    for index, (problem, candidates, known) in enumerate(zip(problems, candidates_of, known_of, strict=True)):
        left = budget_seconds - (time.monotonic() - began)
        deadline = time.monotonic() + left / (len(problems) - index)
        pending = [i for i in range(len(candidates)) if i not in known]
        broken = broken_of.get(index, {})
        done += len(known)
        advance(problem.label, done, total)
        try:
            for i in pending:
                if time.monotonic() >= deadline:
                    break
                known[i] = (
                    Measurement(candidates[i], error=broken[i])
                    if i in broken
                    else measure(problem, candidates[i], clock)
                )
                log.append(problem, known[i])
                _check_device(problem, known[i])
                done += 1
                advance(problem.label, done, total)
        finally:
            for workload in problem.workloads:
                workload.release()
        measured = tuple(known[i] for i in sorted(known))
        results.append(Tuned(problem, measured, len(candidates) - len(measured)))
    return results


def measure(problem: Problem, config: Any, clock: Clock) -> Measurement:
    """Check a configuration on every workload of a problem, then time it on each."""
    try:
        for workload in problem.workloads:
            workload.check(config)
        seconds = {}
        for workload in problem.workloads:
            copies = clock.copies(workload.bytes)
            workload.prepare(copies)
            seconds[workload.load] = clock.seconds([partial(workload.run, config, copy) for copy in range(copies)])
    except torch.OutOfMemoryError:  # caused by the inputs, not by the configuration
        raise
    except Exception as error:  # compilers and drivers raise arbitrary types; record the error and continue
        return Measurement(config, error=_message(error))
    return Measurement(config, seconds)


def _check_device(problem: Problem, measurement: Measurement) -> None:
    """Raise TuningError if a failed kernel left the process with a sticky device error."""
    if measurement.error is not None and not works(problem.workloads[0].device):
        raise TuningError(
            f"{problem.label}, {measurement.config} broke the device ({measurement.error.splitlines()[0]}); "
            "run again to continue without it"
        )


def compile_problems(
    problems: Sequence[Problem], pending_of: Sequence[Sequence[int]], jobs: int, deadline: float
) -> dict[int, dict[int, str]]:
    """Run configurations once in other processes, which fills Triton's cache and detects those that break a device.

    Returns error messages by index of the problem and of the candidate. Configurations that miss the deadline are
    compiled when they are measured.
    """
    for problem in problems:
        for workload in problem.workloads:
            workload.release()  # so that it is pickled without inputs
    batches = [
        (index, list(pending[at : at + BATCH]))
        for at in range(0, max(map(len, pending_of), default=0), BATCH)
        for index, pending in enumerate(pending_of)  # inner loop, so that every problem's first candidates come first
        if pending[at : at + BATCH]
    ]
    wrong: dict[int, dict[int, str]] = {}
    if not batches:
        return wrong
    pool = ProcessPoolExecutor(min(jobs, len(batches)), mp_context=multiprocessing.get_context("spawn"))
    try:
        futures = [(index, pool.submit(_try_out, problems[index], batch)) for index, batch in batches]
        for index, future in futures:
            left = None if deadline == float("inf") else max(deadline - time.monotonic(), 0.0)
            wrong.setdefault(index, {}).update(future.result(left))
    except (BrokenProcessPool, TimeoutError):  # the measurements show which configuration killed a process
        pass
    finally:
        pool.shutdown(cancel_futures=True)
    return wrong


def _try_out(problem: Problem, batch: Sequence[int]) -> dict[int, str]:
    """Run some candidates, and return errors by index. Runs in a separate process.

    One load suffices, because all loads of a key share a binary.
    """
    workload, wrong = problem.workloads[0], {}
    candidates = workload.candidates()
    try:
        for i in batch:
            if not works(workload.device):  # after a sticky device error this process cannot run kernels
                break
            try:
                workload.run(candidates[i])
                _synchronize(workload.device)
            except torch.OutOfMemoryError:  # many processes share the device's memory
                break
            except Exception as error:  # as in `measure`
                wrong[i] = _message(error)
    finally:
        workload.release()
    return wrong


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def works(device: torch.device) -> bool:
    """Return whether the device still works, that is, whether a synchronisation raises no error."""
    try:
        _synchronize(device)
    except RuntimeError:
        return False
    return True


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip()[:600]


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, sort_keys=True)
