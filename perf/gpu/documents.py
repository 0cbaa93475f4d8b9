"""Result documents, one per stage, written atomically."""

import json
import math
import os
from pathlib import Path
from typing import Any


def path_of(folder: Path, stage: str) -> Path:
    return folder / f"{stage}.json"


def load(path: Path) -> dict[str, Any] | None:
    """Load a document; None if it is missing or unreadable."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and "measurements" in document else None


def write(path: Path, document: dict[str, Any]) -> None:
    """Write a document atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(_finite(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by null."""
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def forget_cut(path: Path) -> None:
    """Drop a measurement that was killed with its process at the end of the time slice, which is not a failure."""
    document = load(path)
    if document is not None and document["running"] is not None and document["cut"]:
        write(path, document | {"running": None})


def forget_errors(path: Path) -> None:
    """Drop failed measurements, so that the next run repeats them."""
    document = load(path)
    if document is not None:
        good = {name: figures for name, figures in document["measurements"].items() if "error" not in figures}
        complete = document["complete"] and len(good) == len(document["measurements"])
        write(path, document | {"measurements": good, "running": None, "complete": complete})
