"""Stage `ops`: are the kernels right on this device? The tests that are marked `gpu`, file by file, each in a process.

Several processes share the device, which changes no result; what they take says nothing.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from gpu.apart import workers
from gpu.setting import ROOT, Setting
from gpu.stage import Context, Measurement

SECONDS = 240.0  # of a test file, compilers included
DRY = {"tests/test_kv_commit.py": ["-k", "what_does_not_fit"]}


def test_files(setting: Setting) -> dict[str, list[str]]:
    """What pytest is to run of each file."""
    if setting.dry:
        return DRY
    marked = [path for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    return {str(path.relative_to(ROOT)): ["-m", "gpu"] for path in marked}


def measurements(setting: Setting) -> list[Measurement]:
    return [Measurement(_op_of(file), partial(_run, file), SECONDS + 60.0) for file in test_files(setting)]


def _op_of(file: str) -> str:
    return Path(file).stem.removeprefix("test_").removesuffix("_triton")


def _run(file: str, context: Context) -> dict[str, Any]:
    runs: Children = context.keep("children", lambda: Children(context.setting))
    return runs.result(file)


class Children:
    """All test files that are asked for, some at a time; they begin with the first question."""

    def __init__(self, setting: Setting):
        self._pool = ThreadPoolExecutor(1 if setting.dry else workers())
        self._runs: dict[str, Future[dict[str, Any]]] = {
            file: self._pool.submit(run_tests, file, options, SECONDS) for file, options in test_files(setting).items()
        }

    def result(self, file: str) -> dict[str, Any]:
        return self._runs[file].result()


def run_tests(file: str, options: list[str], seconds: float) -> dict[str, Any]:
    """Counts of one test file, and what its first failure says.

    Raises:
        RuntimeError: it collected nothing, or pytest itself failed. TimeoutExpired: it took longer than `seconds`.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    paths = [str(ROOT / part) for part in ("", "kernels", "weights")]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="treespec-gpu-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", file, *options, "-q", "--tb=short", "-p", "no:cacheprovider",
                   f"--junitxml={report}"]  # fmt: skip
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = child.communicate(timeout=seconds)
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)  # the tests' own children too
            child.wait()
            raise
        if not report.exists():
            raise RuntimeError(f"pytest ended with {child.returncode}: {' '.join(output.split())[-300:]}")
        return counts(report.read_text("utf-8"))


def counts(report: str) -> dict[str, Any]:
    """From pytest's XML.

    Raises:
        RuntimeError: there is no test in it.
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
    """The lines of a failure that say what is wrong: pytest's own begin with E."""
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
