"""Stage `ops`: runs the cases of every kernel on this device, each file in a process of its own.

Several processes share the device, which does not affect results but makes times meaningless. Every file has its own
time limit. The output of files with failures is kept in `ops-failed.txt`.
"""

import ast
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from gpu import failures
from gpu.setting import ROOT, Setting
from gpu.stage import Context, Measurement
from gpu.workers import num_workers

SECONDS = 240.0  # time limit per file, compilation included
OUTPUT = 20000  # characters of the end of pytest's output to keep
LISTED = 50  # failing tests to list
FAILED = "ops-failed.txt"
CASES = "tests/interpreted"


def case_files(setting: Setting) -> dict[str, dict[str, str]]:
    """Return the files of cases that tests run on a GPU, with their environment variables.

    They are found in the tests' calls of `environments` and `run_cases`.
    """
    if setting.dry:
        return {f"{CASES}/kv_commit_cases.py": {"TREESPEC_KV_COMMIT": "ref"}}
    found: dict[str, dict[str, str]] = {}
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        for test in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(test, ast.FunctionDef) and (variables := _variables(test)) is not None:
                environment = {"TRITON_INTERPRET": "0"} | dict.fromkeys(variables, "triton")
                found |= {f"{CASES}/{name}": environment for name in _names(test)}
    return found


def _variables(test: ast.FunctionDef) -> list[str] | None:
    """Return the arguments of a test's decorator `environments`; None without it."""
    for each in test.decorator_list:
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "environments":
            return [ast.literal_eval(argument) for argument in each.args]
    return None


def _names(test: ast.FunctionDef) -> list[str]:
    strings = [node.value for node in ast.walk(test) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return sorted({text for text in strings if text.endswith("_cases.py")})


@cache
def modules() -> tuple[str, ...]:
    """Return the modules that the cases consist of, which run in other processes."""
    files = case_files(Setting(Path()))
    return ("tests.conftest", "tests.interpreted.conftest", *(file[:-3].replace("/", ".") for file in files))


def measurements(setting: Setting) -> list[Measurement]:
    # Queued files have the time of those before them.
    return [Measurement(_op_of(file), partial(_run, file), 2 * SECONDS) for file in case_files(setting)]


def _op_of(file: str) -> str:
    return Path(file).stem.removesuffix("_cases")


class Ran(NamedTuple):
    """Result of a file of cases: counts and pytest's output."""

    figures: dict[str, Any]
    output: str


def _run(file: str, context: Context) -> dict[str, Any]:
    def begin() -> Children:
        return Children(context.setting, [each for each in case_files(context.setting) if _left(each, context)])

    ran = context.keep("children", begin).result(file)
    if ran.figures["failed"] or "error" in ran.figures:
        with failures.section(context.setting.out, file, FAILED) as text:
            text.write(ran.output[-OUTPUT:])
    figures: dict[str, Any] = ran.figures
    return figures


def _left(file: str, context: Context) -> bool:
    return _op_of(file) not in context.results


class Children:
    """Processes that run files of cases in parallel, from construction on."""

    def __init__(self, setting: Setting, files: Sequence[str]):
        self._closed = threading.Event()
        self._running: set[subprocess.Popen[str]] = set()
        self._pool = ThreadPoolExecutor(1 if setting.dry else num_workers())
        self._runs: dict[str, Future[Ran]] = {
            file: self._pool.submit(self._run, file, variables)
            for file, variables in case_files(setting).items()
            if file in files
        }

    def result(self, file: str) -> Ran:
        """Return the result of one file. After its time limit, it is an error with the counts up to then.

        Raises:
            RuntimeError: no test was collected, or pytest failed; a note has its output.
        """
        return self._runs[file].result()

    def close(self) -> None:
        """Kill running tests and start no more."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for child in list(self._running):
            _end(child)

    def _run(self, file: str, variables: dict[str, str]) -> Ran:
        with tempfile.TemporaryDirectory(prefix="treespec-gpu-") as folder:
            report = Path(folder) / "report.xml"
            child = _start(file, variables, report)
            self._running.add(child)
            if self._closed.is_set():  # closed before it was registered as running
                _end(child)
            try:
                output, _ = child.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                _end(child)
                output, _ = child.communicate(timeout=10)
                return Ran(unfinished(output), output)
            finally:
                self._running.discard(child)
            try:
                if not report.exists():
                    raise RuntimeError(f"pytest ended with {child.returncode}: {' '.join(output.split())[-300:]}")
                return Ran(counts(report.read_text("utf-8")), output)
            except RuntimeError as error:
                error.add_note(output[-OUTPUT:])
                raise


def _start(file: str, variables: dict[str, str], report: Path) -> subprocess.Popen[str]:
    """Start pytest in its own process group. It prints each test before it starts, and dumps stacks if one hangs."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | variables
    paths = [str(ROOT / part) for part in ("", "kernels", "weights")]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])
    command = [
        sys.executable,
        "-m",
        "pytest",
        file,
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
    names = list(dict.fromkeys(case.get("name", "") for case, _ in bad))
    figures: dict[str, Any] = {
        "passed": len(cases) - len({id(case) for case, _ in bad}) - skipped,
        "failed": len(bad),
        "skipped": skipped,
        "failures": names[:LISTED],
        "first_failure": None,
    }
    if bad:
        text = bad[0][1].text or bad[0][1].get("message") or ""
        figures["first_failure"] = f"{bad[0][0].get('name')}: {first_failure(text)}"
    return figures


def unfinished(output: str) -> dict[str, Any]:
    """Count in the verbose output of a pytest that was killed, and name the test that it was in."""
    begun = re.findall(r"^\S+\.py::(.+?)(?: (PASSED|FAILED|ERROR|SKIPPED).*)?$", output, re.M)
    by_verdict = {verdict: [name for name, each in begun if each == verdict] for verdict in _VERDICTS}
    last = begun[-1][0] if begun else "its collection"
    failed = by_verdict["FAILED"] + by_verdict["ERROR"]
    return {
        "error": f"it took more than {SECONDS:.0f} s, in {last.strip()}",
        "passed": len(by_verdict["PASSED"]),
        "failed": len(failed),
        "skipped": len(by_verdict["SKIPPED"]),
        "failures": failed[:LISTED],
    }


_VERDICTS = ("PASSED", "FAILED", "ERROR", "SKIPPED")


def first_failure(text: str) -> str:
    """Return pytest's error lines (which start with E) of a failure."""
    lines = [line[1:].strip() for line in text.splitlines() if re.match(r"E\s", line)]
    return "\n".join(lines or text.strip().splitlines()[-6:])[:1200]


def describe(document: dict[str, Any]) -> str:
    rows = []
    for name, figures in document["measurements"].items():
        if "error" in figures:
            rows.append(f"  {name:28} ERROR {figures['error'][:150]}")
        if "passed" in figures:
            text = f"  {name:28} {figures['passed']} passed, {figures['failed']} failed, {figures['skipped']} skipped"
            rows.append(text)
            if figures.get("first_failure"):
                rows.append("    " + " | ".join(figures["first_failure"].splitlines())[:260])
            rows += [f"    {each}" for each in figures["failures"][:4]]
    return "\n".join(rows)
