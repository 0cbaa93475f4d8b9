"""Caches the resource usage of compiled kernels between runs of the ahead-of-time compiler.

The key covers everything that a result depends on: the source of the kernel and of the functions it calls, its types,
constants and options, the target, the versions of Triton and its assembler, and the code that reads the result.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

from treespec_kernels.aot.launches import Launch, gpu_target
from treespec_kernels.tuning import tuned

logger = logging.getLogger("treespec")

# Settings of Triton that do not affect the compiled code.
_NO_CODE = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR", "TRITON_ALWAYS_COMPILE")


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/treespec/aot or ~/.cache/treespec/aot. Raises OSError if there is no home folder."""
    try:
        return tuned.user_folder().parent / "aot"
    except RuntimeError as error:
        raise OSError("no home folder for the cache; set XDG_CACHE_HOME or HOME") from error


def result_key(launch: Launch, target: str) -> str:
    """Return the cache key of a compiled kernel's result."""
    import triton
    from triton.compiler import make_backend

    settings = {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}
    launches = [launch.binary] + ([] if launch.first is None else [launch.first.binary])
    parts = {
        "source": [each.function.cache_key for each in launches],
        "launches": [repr(each) for each in launches],
        "backend": str(make_backend(gpu_target(target)).hash()),
        "target": target,
        "triton": triton.__version__,
        "settings": {name: value for name, value in settings.items() if name not in _NO_CODE},
        "reader": _reader(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@cache
def _reader() -> str:
    """Return the hash of the modules that derive a result from a compiled kernel."""
    here, names = (
        Path(__file__).parent,
        ("assembly.py", "compiler.py", "k_order.py", "launch_order.py", "proxy_fences.py"),
    )
    texts = [(here / name).read_bytes() for name in names]
    return hashlib.sha256(b"".join(texts)).hexdigest()


class ResultCache:
    """Folder of results with one file per key, so that processes can share it and an interrupted run can be resumed.

    Args:
        folder: created when the first result is stored.
        reads: whether to load stored results; False only writes them.
    """

    def __init__(self, folder: Path, reads: bool = True):
        self.folder, self._reads, self._writes = folder, reads, True

    def load(self, key: str) -> dict[str, Any] | None:
        """Return a stored result, or None if it is missing or unreadable."""
        if not self._reads:
            return None
        try:
            found = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def store(self, key: str, result: dict[str, Any]) -> None:
        """Store a result. The first failure is logged, and disables all further writes."""
        if not self._writes:
            return
        temporary = self.folder / f"{key}.{os.getpid()}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(result), encoding="utf-8")
            os.replace(temporary, self.folder / f"{key}.json")
        except OSError as error:
            self._writes = False
            logger.warning("cannot write results to %s: %s", self.folder, error)
