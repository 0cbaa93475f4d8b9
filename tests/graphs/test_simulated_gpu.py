"""Whole rounds on a GPU that is simulated, and their launches compiled for one that is real."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.child import run_cases

ROOT = Path(__file__).parents[2]


def test_rounds_and_the_launches_that_they_made(tmp_path: Path) -> None:
    """Every kind of launch of captured rounds compiles as Triton specialises it, in bfloat16: with sizes of 1 as
    constants, with the types and the alignment that the engine passes."""
    launches = tmp_path / "launches.json"
    run_cases("simulated_rounds simulated_gpu", TREESPEC_LAUNCHES=str(launches))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.simulated_gpu.compile", str(launches), "sm_90"]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert child.returncode == 0, child.stderr
    report = json.loads(child.stdout)
    assert report["failed"] == [] and report["compiled"] > 30
