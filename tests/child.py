"""Tests that need a process of their own: triton is interpreted, or not, per process, and a heap has a past."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = Path(__file__).parent / "interpreted"
_ALONE = "TREESPEC_TEST_ALONE"


def run_cases(name: str, environment: dict[str, str]) -> None:
    """Runs a file of cases of tests/interpreted/ under further environment variables; fails with its whole output."""
    command = [sys.executable, "-m", "pytest", str(INTERPRETED / name), "-q", "--tb=short", "-p", "no:cacheprovider"]
    child = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    if "only 0-dimensional arrays can be converted to Python scalars" in child.stdout:
        pytest.skip("the interpreter of Triton 3.6 cannot run loops with numpy 2.4 or later")
    if child.returncode != 0:
        pytest.fail(f"{name} with {environment}:\n{child.stdout}\n{child.stderr}", pytrace=False)


def runs_alone(node_id: str) -> bool:
    """Whether this process runs that test and no other. Where it does not, one that does is run, and must pass."""
    if os.environ.get(_ALONE) == node_id:
        return True
    command = [sys.executable, "-m", "pytest", node_id, "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
    root = Path(__file__).parent.parent
    child = subprocess.run(command, capture_output=True, text=True, env=os.environ | {_ALONE: node_id}, cwd=root)
    if child.returncode != 0:
        pytest.fail(f"{node_id} in a process of its own:\n{child.stdout}\n{child.stderr}", pytrace=False)
    return False


def run_uninterpreted(script: str) -> subprocess.CompletedProcess[str]:
    """Runs Python source in a process where triton is not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
