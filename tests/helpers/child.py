"""Tests that need a process of their own: triton is interpreted, or not, per process, and a heap has a past."""

import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

INTERPRETED = Path(__file__).parents[1] / "interpreted"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# Processes fork from one that has imported what most of them need, which is half the cost of a start, but neither
# triton nor anything of ours. Nor has it computed anything: it has no threads and no state on a GPU.
_PRELOADED = ["torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes", "transformers", "pytest"]
_processes = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
if sys.platform == "linux":
    _processes.set_forkserver_preload(_PRELOADED)


def _redirected(folder: str, environment: dict[str, str], function: Callable[..., None], argument: object) -> None:
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    function(argument)


def _run_pytest(arguments: list[str]) -> None:
    sys.exit(pytest.main(arguments))


def _run_script(script: str) -> None:
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})


def _run(function: Callable[..., None], argument: object, environment: dict[str, str]) -> subprocess.CompletedProcess:
    """Calls a function of this module in a process of its own, with these environment variables alone."""
    with tempfile.TemporaryDirectory() as folder:
        process = _processes.Process(target=_redirected, args=(folder, environment, function, argument))
        process.start()
        process.join()
        stdout, stderr = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(str(argument), process.exitcode, stdout, stderr)


def run_cases(names: str, implementation: str = "interpreter", **environment: str) -> None:
    """Runs files of tests/interpreted/ (`names`, without "_cases.py") in one process; fails with its whole output.

    The implementation of kernels is "ref" or "cpu", or Triton's, by "interpreter" or "gpu".
    """
    if implementation in ("interpreter", "gpu"):
        pytest.importorskip("triton")
        environment["TRITON_INTERPRET"], implementation = str(int(implementation == "interpreter")), "triton"
    environment["TREESPEC_IMPLEMENTATION"] = implementation
    files = [str(INTERPRETED / f"{name}_cases.py") for name in names.split()]
    child = _run(_run_pytest, [*files, "-q", "--tb=short", "-p", "no:cacheprovider"], os.environ | environment)
    if "only 0-dimensional arrays can be converted to Python scalars" in child.stdout:
        pytest.skip("the interpreter of Triton 3.6 cannot run loops with numpy 2.4 or later")
    if child.returncode != 0:
        pytest.fail(f"{names} with {environment}:\n{child.stdout}\n{child.stderr}", pytrace=False)


def faster_interpreter() -> dict[str, str]:
    """Environment variables for programs that run kernels in Triton's interpreter."""
    folders = [INTERPRETED / "startup", INTERPRETED.parents[1], *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(map(str, folders))}


def run_uninterpreted(script: str) -> subprocess.CompletedProcess[str]:
    """Runs Python source in a process where triton is not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return _run(_run_script, script, environment)


def uninterpreted_document(script: str) -> Any:
    """What a script prints as JSON where triton is not interpreted; asserts that it ends well."""
    child = run_uninterpreted(script)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)
