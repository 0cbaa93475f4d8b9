"""Engines to measure: `open_engine` checks that rounds are captured; `grown_folder` grows the embedded target."""

import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from gpu.failures import last_line
from gpu.models import shape_of_size
from gpu.setting import Setting
from gpu.sources import source_hash
from treespec import LLM
from treespec_weights import default_folder
from treespec_weights.grow import grow_checkpoint

MEMORY = Path("/dev/shm")  # a disk may take a minute to write 16 GB


def grown_folder(setting: Setting, size: str) -> Path:
    """Grow the embedded target to about `size` parameters, or return the folder of an earlier stage."""
    shape, name = shape_of_size(size), f"treespec-gpu-{source_hash('treespec_weights.grow')}-{setting.seed}"
    places = [place / name for place in (MEMORY, Path(tempfile.gettempdir())) if place.is_dir()]
    for root in places:
        if (root / size).exists():
            return root / size
    needed = int(1.1 * shape.num_parameters() * setting.dtype.itemsize)
    root = next((place for place in places[:-1] if shutil.disk_usage(place.parent).free > needed), places[-1])
    part = root / f"{size}.{os.getpid()}"
    shutil.rmtree(part, ignore_errors=True)
    root.mkdir(exist_ok=True)
    grow_checkpoint(default_folder("target"), part, shape, setting.seed, setting.device)
    return part.rename(root / size)  # atomic


def open_engine(setting: Setting, *given: Any, captured: bool = True, **options: Any) -> LLM:
    """Open an `LLM` on the device.

    Args:
        captured: whether to require captured rounds; ignored on a CPU.

    Raises:
        RuntimeError: rounds are not captured on a GPU; the message has the engine's warnings, and a note their
            tracebacks.
    """
    warnings = _WarningCollector()
    logger = logging.getLogger("treespec")
    logger.addHandler(warnings)
    try:
        llm = LLM(*given, device=setting.device, dtype=setting.dtype, **options)
    finally:
        logger.removeHandler(warnings)
    rounds = llm.stats()["frozen"]["rounds"]
    if captured and setting.device.type == "cuda" and rounds != "on the device":
        failure = RuntimeError(f"rounds go {rounds}: {'; '.join(warnings.lines) or 'no warning says why'}")
        failure.add_note("\n".join(warnings.whole))
        raise failure
    return llm


class _WarningCollector(logging.Handler):
    """Log handler that collects warnings, as single lines and with tracebacks."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.whole: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        cause = f" ({last_line(record.exc_info[1])})" if record.exc_info and record.exc_info[1] else ""
        self.lines.append(record.getMessage() + cause)
        self.whole.append(logging.Formatter().format(record))
