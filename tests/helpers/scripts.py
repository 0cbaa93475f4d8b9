"""Python source in interpreters of its own, and scripts that are loaded from their files."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType


def run_script(code: str, cwd: Path | None = None, timeout: float = 300) -> str:
    """Runs source in a fresh interpreter, which must end without an error; returns what it printed."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def load_script(path: Path) -> ModuleType:
    """Imports a file that belongs to no package, under its own name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
