"""What compiled kernels take of a target, kept between runs of the ahead-of-time compiler.

A result is found by everything that it depends on: the kernel's source and that of the functions it calls, its types,
constants and options, the target, the versions of Triton and of its assembler, and the code that reads the result.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from treespec_kernels.tuning import tuned

logger = logging.getLogger("treespec")

# Where Triton keeps its own files, which changes no code.
_NO_CODE = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR", "TRITON_ALWAYS_COMPILE")


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/treespec/aot or ~/.cache/treespec/aot. Raises OSError for a user without a home."""
    try:
        return tuned.user_folder().parent / "aot"
    except RuntimeError as error:
        raise OSError("no home folder to keep files in; set XDG_CACHE_HOME or HOME") from error


def result_key(source: Any, backend: Any, options: dict[str, Any]) -> str:
    """The name of a kernel's result.

    Args:
        source: Triton's `ASTSource`.
        backend: Triton's compiler for the target.
        options: as `KernelSpec`.
    """
    import triton

    settings = {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}
    parts = {
        "source": source.hash(),
        "backend": str(backend.hash()),
        "target": str(backend.target),
        "options": options,
        "triton": triton.__version__,
        "settings": {name: value for name, value in settings.items() if name not in _NO_CODE},
        "reader": _reader(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _reader() -> str:
    """Hash of the files that say what a compiled kernel takes."""
    here = Path(__file__).parent
    texts = [(here / name).read_bytes() for name in ("compiler.py", "launch_order.py")]
    return hashlib.sha256(b"".join(texts)).hexdigest()


class ResultCache:
    """Results in a folder, a file each, so that processes may share it and an interrupted run is continued.

    Args:
        folder: made when the first result is stored.
        reads: whether stored results are used; without that they are only written.
    """

    def __init__(self, folder: Path, reads: bool = True):
        self.folder, self._reads, self._writes = folder, reads, True

    def load(self, key: str) -> dict[str, Any] | None:
        """A stored result; None where there is none, or a broken one."""
        if not self._reads:
            return None
        try:
            found = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def store(self, key: str, result: dict[str, Any]) -> None:
        """Keep a result. Where that fails nothing more is kept, as the log says once."""
        if not self._writes:
            return
        temporary = self.folder / f"{key}.{os.getpid()}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(result), encoding="utf-8")
            os.replace(temporary, self.folder / f"{key}.json")
        except OSError as error:
            self._writes = False
            logger.warning("results cannot be kept in %s: %s", self.folder, error)
