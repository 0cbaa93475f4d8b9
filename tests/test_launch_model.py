"""The model of an 8B pass, from compiled kernels."""

import pytest

from tests.child import run_uninterpreted
from tests.commands import ROOT

pytestmark = pytest.mark.slow

SCRIPT = f"""
import runpy, sys
sys.argv[1:] = ["--rows", "1", "32"]
runpy.run_path({str(ROOT / "perf" / "launch_model.py")!r}, run_name="__main__")
"""
BUSY = 24  # KiB per SM: an H200's 4.8 TB/s over 132 SMs for the 600 ns that a load takes
COPIES = {"qkv", "o", "gate_up", "down", "head", "attention"}  # which read weights, K or V


def test_every_kernel_waits_once_and_keeps_memory_busy() -> None:
    pytest.importorskip("triton")
    child = run_uninterpreted(SCRIPT)
    assert child.returncode == 0, child.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in child.stdout.splitlines() if "|" in line]
    kernels = [row for row in rows if row[0] not in ("kernel", "---") and row[3]]
    assert {name for name, *_ in kernels} >= COPIES and len(kernels) == 2 * 10
    for name, launches, _, residents, in_flight, waits, _ in kernels:
        assert int(launches) in (1, 32) and int(residents) >= 1 and waits == "1", name
        assert (int(in_flight) >= BUSY) == (name in COPIES), name
    predictions = [line for line in child.stdout.splitlines() if "floor" in line]
    assert len(predictions) == 4
    for line in predictions:
        floor, ordinary, programmatic, prefetching = (
            float(part.split(" ms")[0].split()[-1]) for part in line.split(" ms", 4)[:4]
        )
        assert floor < prefetching < programmatic < ordinary
