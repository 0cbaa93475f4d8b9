"""`perf/gpu.py`: what a dry run measures, what remains of failures, and the table of targets."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.child import faster_interpreter
from tests.helpers.commands import ROOT
from tests.helpers.scripts import load_script

pytestmark = pytest.mark.slow
SCRIPT = ROOT / "perf" / "gpu.py"
FAILING = f"""
import os, sys, time
sys.path.insert(0, {str(SCRIPT.parent)!r})
from processes import Section

def no_bench(*given):
    pass

def steps(bench):
    yield "fine", 30, lambda bench: {{"ms": 1.5}}
    yield "raises", 30, lambda bench: 1 / 0
    yield "late", 0.05, lambda bench: time.sleep(600)
    yield "check/ends", 30, lambda bench: os._exit(7)
    yield "after", 30, lambda bench: {{}}

def waits(bench):
    yield "last", 30, lambda bench: {{}}

if __name__ == "__main__":  # the processes of measurements do without what gpu.py imports
    import gpu
    gpu.SECTIONS, gpu.Bench = (Section(waits, 0), Section(steps, 1e9)), no_bench
    sys.exit(gpu.main())
"""


def run(
    script: Path, out: Path, **environment: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, Any]]]:
    command = [sys.executable, str(script), "--dry-run", "--out", str(out), "--seconds", "1400"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=os.environ | environment)
    [file] = out.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return done, {row.pop("name"): row for row in rows}


def test_every_kind_of_measurement_runs(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done, rows = run(SCRIPT, tmp_path, **faster_interpreter())
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(name, row["error"]) for name, row in rows.items() if "error" in row] == []
    kinds = {"versions", "check", "compile", "copy", "pass", "round", "compiled", "kernel", "prefill", "autotune"}
    assert {name.split("/")[0] for name in rows} == kinds | {"tuned", "targets"}
    assert rows["round/tree 32"]["tokens_per_pass"] >= rows["round/plain"]["tokens_per_pass"] == 1.0
    assert "failed checks" in done.stdout and "0.000  met" in done.stdout


def test_failures_are_rows_and_the_run_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done, rows = run(script, tmp_path / "out")
    assert list(rows) == ["fine", "raises", "late", "check/ends", "after", "last", "targets"]
    errors = {name: row["error"] for name, row in rows.items() if "error" in row}
    assert errors == {
        "raises": "ZeroDivisionError: division by zero",
        "late": "Late: the measurement took too long",
        "check/ends": "the process died in this measurement; see log.txt",
    }
    assert done.returncode == 1 and "ended with 7" in done.stdout
    assert "ZeroDivisionError" in (tmp_path / "out" / "log.txt").read_text()


def test_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    table = load_script(SCRIPT).table
    rows = {"copy": {"bytes_per_second": 2.155e12}, "pass/rows 1": {"ms": 7.9}, "pass/rows 32": {"ms": 8.6}}
    rows |= {"round/plain": {"tokens_per_second": 100.0}, "check/one": {"error": "wrong"}, "check/two": {}}
    rows |= {f"round/tree {n}": {"tokens_per_second": 9.0 * n, "tokens_per_pass": 3.0} for n in (16, 32)}
    rows["round/tree 64"] = {"error": "no memory"}
    assert [line.split() for line in table(rows)][1][-3:] == ["8", "7.900", "met"]  # 4.0 ms at twice the bandwidth
    found = {line[:54].strip(): line.split()[-1] for line in table(rows)}
    assert found["failed checks"] == "MISSED" and found["exact over exact=False, 32 nodes"] == "measured"
    assert found["8B plain pass at 2k, ms"] == found["speed-up of trees over tokens per pass"] == "met"
