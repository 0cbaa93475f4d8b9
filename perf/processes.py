"""Runs measurements in separate processes within a time limit, and stores each row as soon as it is measured."""

import contextlib
import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

Figures = dict[str, Any]
Step = tuple[str, float, Callable[[Any], Figures]]  # row name, limit in seconds, measurement
GRACE, CLOSING = 8.0, 12.0  # seconds for a late measurement to stop, and for finishing a run


class Section(NamedTuple):
    """Measurements in order, their seconds in a run of 400, and the number of processes that share them."""

    steps: Callable[[Any], Iterator[Step]]
    seconds: float
    processes: int = 1


class Job(NamedTuple):
    """A section with its measurements' inputs, output file and deadlines, passed to its processes."""

    section: Section
    make: Callable[[dict[str, Figures]], Any]  # creates the measurements' input from the rows so far, by name
    file: Path  # rows as JSON lines; stray output and tracebacks go to log.txt next to it
    only: tuple[str, ...]  # prefixes of the rows to measure; empty for all
    few: bool  # whether to run only two measurements per kind, with limits for the interpreter
    until: float  # time after which no measurement starts
    end: float


class Late(BaseException):
    """Raised in a measurement that exceeds its limit; no `except Exception` of a library swallows it."""


def run(
    sections: Sequence[Section], make: Any, file: Path, seconds: float, only: Sequence[str] = (), few: bool = False
) -> dict[str, Figures]:
    """Run sections within their shares of the time, then their remaining measurements; return all rows."""
    began = time.monotonic()
    end, until, pending = began + seconds - CLOSING, began, []
    for section in sections:
        until += section.seconds * seconds / 400
        job = Job(section, make, file, tuple(only), few, min(until, end), end)
        if not _run_section(job):
            pending.append(job)
    for job in pending:
        if time.monotonic() < end:
            _run_section(job._replace(until=end))
    rows = rows_of(file)
    file.write_text("")  # removes errors stored in advance
    for name, figures in rows.items():
        store(file, name, figures)
    return rows


def rows_of(file: Path) -> dict[str, Figures]:
    """Return the last figures of each row."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {row.pop("name"): row for row in rows}


def store(file: Path, name: str, figures: Figures) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps({"name": name} | figures) + "\n")


def _run_section(job: Job) -> bool:
    """Run a section, replacing processes that die in a measurement. Return whether it is complete."""
    context, complete, count = multiprocessing.get_context("spawn"), True, job.section.processes
    running: dict[Any, tuple[int, int]] = {}

    def start(share: int) -> None:
        num_rows = len(rows_of(job.file))
        process = context.Process(target=_work, args=(job, share))
        process.start()
        running[process] = share, num_rows

    for share in range(count):
        start(share)
    while running:
        wait([process.sentinel for process in running], max(job.end + 2 * GRACE - time.monotonic(), 0.0))
        for process, (share, num_rows) in list(running.items()):
            if process.is_alive() and time.monotonic() < job.end + 2 * GRACE:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # including its children
            process.join(5)
            del running[process]
            complete = complete and process.exitcode == 0
            if process.exitcode in (0, 3):
                continue
            print(f"a process of {job.section.steps.__name__} ended with {process.exitcode}", flush=True)
            if time.monotonic() < job.end and len(rows_of(job.file)) > num_rows:
                start(share)
    return complete


def _work(job: Job, share: int) -> None:
    """Run every nth measurement of a section; exit with 0, or with 3 if some are left at `job.until`."""
    os.setsid()  # lets this process be killed with its children
    screen, log = os.fdopen(os.dup(1), "w"), (job.file.parent / "log.txt").open("a")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)

    def late(*_: object) -> None:
        raise Late("the measurement took too long")

    signal.signal(signal.SIGALRM, late)
    torch.set_grad_enabled(False)
    rows, kinds, parent = rows_of(job.file), Counter[Any](), multiprocessing.parent_process()
    bench = job.make(rows)
    for i, (name, limit, measure) in enumerate(job.section.steps(bench)):
        kind = (measure.func, *measure.keywords) if isinstance(measure, partial) else measure
        kinds[kind] += 1
        is_wanted = not job.only or name.startswith(("copy", *job.only))
        if name in rows or i % job.section.processes != share or not is_wanted or (job.few and kinds[kind] > 2):
            continue
        began = time.monotonic()
        if began > job.until or parent is None or not parent.is_alive():
            sys.exit(3)
        store(job.file, name, {"error": "the process died in this measurement; see log.txt"})  # kept only if it does
        limit = min(limit * (20 if job.few else 1), job.end - began)
        faulthandler.dump_traceback_later(limit + GRACE, exit=True, file=log)
        try:
            signal.setitimer(signal.ITIMER_REAL, limit)
            figures = measure(bench)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except (Exception, Late) as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            log.write(f"\n=== {name}\n{''.join(traceback.format_exception(error))}")
            log.flush()
            figures = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
        rows[name] = figures | {"seconds": round(time.monotonic() - began, 1)}
        store(job.file, name, rows[name])
        texts = (f"{key} {f'{value:.4g}' if isinstance(value, float) else value}" for key, value in figures.items())
        print(f"{name:40} {', '.join(texts)[:300]}", file=screen, flush=True)
        if "error" in figures and torch.cuda.is_initialized():
            gc.collect()
            torch.cuda.synchronize()  # raises, and so ends the process, if the device is lost
    faulthandler.cancel_dump_traceback_later()
