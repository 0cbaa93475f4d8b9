"""Stage `ops`: runs the tests marked `gpu` on this device, one process per file.

Several processes share the device, which does not affect results but makes times meaningless. The output of files with
failures is kept in `ops/failed.txt` and `ops/failed.xml`.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import xml.etree.ElementTree as ElementTree
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gpu import failures
from gpu.setting import ROOT, Setting
from gpu.stage import Context, Measurement
from gpu.workers import num_workers

SECONDS = 240.0  # time limit per test file, compilation included
OUTPUT = 20000  # characters of the end of pytest's output to keep
DRY = {"tests/test_kv_commit.py": ["-k", "what_does_not_fit"]}


def test_files(setting: Setting) -> dict[str, list[str]]:
    """Return pytest's selection options by test file."""
    if setting.dry:
        return DRY
    marked = [path for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    return {str(path.relative_to(ROOT)): ["-m", "gpu"] for path in marked}


def measurements(setting: Setting) -> list[Measurement]:
    return [Measurement(_op_of(file), partial(_run, file), SECONDS + 60.0) for file in test_files(setting)]


def _op_of(file: str) -> str:
    return Path(file).stem.removeprefix("test_").removesuffix("_triton")


class Ran(NamedTuple):
    """Result of a test file: counts, pytest's XML report and output."""

    figures: dict[str, Any]
    report: str
    output: str


def _run(file: str, context: Context) -> dict[str, Any]:
    runs: Children = context.keep("children", lambda: Children(context.setting))
    ran = runs.result(file)
    if ran.figures["failed"]:
        keep(context.setting.out / "ops", file, ran)
    return ran.figures


def keep(folder: Path, file: str, ran: Ran) -> None:
    with failures.section(folder, file, "failed.txt") as text:
        text.write(ran.output[-OUTPUT:])
    whole, part = folder / "failed.xml", folder / ".failed.xml.part"
    suites = ElementTree.parse(whole).getroot() if whole.exists() else ElementTree.Element("testsuites")
    suites.extend(ElementTree.fromstring(ran.report).iter("testsuite"))
    ElementTree.ElementTree(suites).write(part)
    part.replace(whole)


class Children:
    """Processes that run the test files in parallel, from construction on."""

    def __init__(self, setting: Setting):
        self._closed = threading.Event()
        self._running: set[subprocess.Popen[str]] = set()
        self._pool = ThreadPoolExecutor(1 if setting.dry else num_workers())
        self._runs: dict[str, Future[Ran]] = {
            file: self._pool.submit(self._run, file, options) for file, options in test_files(setting).items()
        }

    def result(self, file: str) -> Ran:
        """Return the result of one test file.

        Raises:
            RuntimeError: no test was collected, or pytest failed; a note has its output.
            TimeoutExpired: the time limit was exceeded; a note has its output.
        """
        return self._runs[file].result()

    def close(self) -> None:
        """Kill running tests and start no more."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for child in list(self._running):
            _end(child)

    def _run(self, file: str, options: list[str]) -> Ran:
        with tempfile.TemporaryDirectory(prefix="treespec-gpu-") as folder:
            report = Path(folder) / "report.xml"
            child = _start(file, options, report)
            self._running.add(child)
            if self._closed.is_set():  # closed before it was registered as running
                _end(child)
            try:
                output, _ = child.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired as error:
                _end(child)
                output, _ = child.communicate(timeout=10)
                error.add_note(output[-OUTPUT:])
                raise
            finally:
                self._running.discard(child)
            try:
                if not report.exists():
                    raise RuntimeError(f"pytest ended with {child.returncode}: {' '.join(output.split())[-300:]}")
                return Ran(counts(text := report.read_text("utf-8")), text, output)
            except RuntimeError as error:
                error.add_note(output[-OUTPUT:])
                raise


def _start(file: str, options: list[str], report: Path) -> subprocess.Popen[str]:
    """Start pytest in its own process group. It prints each test before it starts, and dumps stacks if one hangs."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    paths = [str(ROOT / part) for part in ("", "kernels", "weights")]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])
    command = [
        sys.executable,
        "-m",
        "pytest",
        file,
        *options,
        "-v",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-o",
        "faulthandler_timeout=100",
        f"--junitxml={report}",
    ]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )


def _end(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):  # already ended
        os.killpg(child.pid, signal.SIGKILL)


def counts(report: str) -> dict[str, Any]:
    """Parse counts from pytest's XML report.

    Raises:
        RuntimeError: the report has no test.
    """
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    if not cases:
        raise RuntimeError("no test was collected")
    bad = [(case, part) for case in cases for part in case if part.tag in ("failure", "error")]
    skipped = sum(any(part.tag == "skipped" for part in case) for case in cases)
    figures: dict[str, Any] = {
        "passed": len(cases) - len({id(case) for case, _ in bad}) - skipped,
        "failed": len(bad),
        "skipped": skipped,
        "inner_failures": [],
        "first_failure": None,
    }
    if bad:
        text = bad[0][1].text or bad[0][1].get("message") or ""
        figures["inner_failures"] = re.findall(r"^FAILED (\S+)", "\n".join(p.text or "" for _, p in bad), re.M)[:20]
        figures["first_failure"] = f"{bad[0][0].get('name')}: {first_failure(text)}"
    return figures


def first_failure(text: str) -> str:
    """Return pytest's error lines (which start with E) of a failure."""
    lines = [line[1:].strip() for line in text.splitlines() if re.match(r"E\s", line)]
    return "\n".join(lines or text.strip().splitlines()[-6:])[:1200]


def describe(document: dict[str, Any]) -> str:
    rows = []
    for name, figures in document["measurements"].items():
        if "error" in figures:
            rows.append(f"  {name:28} ERROR {figures['error'][:150]}")
        else:
            text = f"  {name:28} {figures['passed']} passed, {figures['failed']} failed, {figures['skipped']} skipped"
            rows.append(text)
            if figures["failed"]:
                rows.append("    " + " | ".join(figures["first_failure"].splitlines())[:260])
                rows += [f"    {each}" for each in figures["inner_failures"][:4]]
    return "\n".join(rows)
