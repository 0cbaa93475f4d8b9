"""Checks the machine's prerequisites before any stage runs."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_ASKED = {
    "driver": "driver_version",
    "compute_mode": "compute_mode",
    "memory_free": "memory.free",
    "memory_total": "memory.total",
}


def facts() -> dict[str, Any]:
    """Return facts about this machine, collected without a GPU process; None for missing or unknown ones."""
    scheme = sysconfig.get_default_scheme()  # the lookup of Python.h in Triton's launcher build
    paths = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)
    header = Path(paths["include"]) / "Python.h"
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return {
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "c_compiler": compiler and shutil.which(compiler),
        "python_h": str(header) if header.is_file() else None,
        "memory_dev_shm": f"{shutil.disk_usage('/dev/shm').free >> 20} MiB" if Path("/dev/shm").is_dir() else None,
        **{name: _imported(name) for name in ("pytest", "hypothesis", "torch", "triton", "transformers")},
        **_gpu(),
    }


def _imported(name: str) -> str | None:
    """Return the version of a package, or None if it is not installed. Nothing is imported, which takes seconds."""
    try:
        return version(name) if importlib.util.find_spec(name) is not None else None
    except PackageNotFoundError:
        return None


def _gpu() -> dict[str, str | None]:
    """Query nvidia-smi, because torch would create a context on the device."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_ASKED.values())}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return dict.fromkeys(_ASKED)
    answers = [answer.strip() for answer in done.stdout.partition("\n")[0].split(",")]
    return dict(zip(_ASKED, answers, strict=True)) if len(answers) == len(_ASKED) else dict.fromkeys(_ASKED)


NEEDED = {
    "c_compiler": "Triton kernels need it",
    "python_h": "Triton kernels need it",
    "pytest": "stage ops runs it",
    "hypothesis": "tests of stage ops import it",
    "torch": "everything needs it",
    "triton": "kernels are written in it",
    "transformers": "stages grown1b and grown8b compare with it",
    "compute_mode": "unknown whether processes can share the GPU, as in ops and bits",
}


def describe(found: dict[str, Any]) -> str:
    """Return one line of facts, and one line per missing prerequisite."""
    lines = ["host: " + ", ".join(f"{name} {value}" for name, value in found.items() if value is not None)]
    lines += [f"  MISSING {name}: {why}" for name, why in NEEDED.items() if found[name] is None]
    if found["compute_mode"] not in (None, "Default"):
        lines.append(f"  COMPUTE MODE {found['compute_mode']}: processes of ops and bits do not share the GPU")
    return "\n".join(lines)
