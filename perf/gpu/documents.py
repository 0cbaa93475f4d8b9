"""Documents of results, one a stage: whole on disk at any time, and what may be forgotten of them."""

import json
import math
import os
from pathlib import Path
from typing import Any


def path_of(folder: Path, stage: str) -> Path:
    return folder / f"{stage}.json"


def load(path: Path) -> dict[str, Any] | None:
    """A document, or None where there is none to go on with."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and "measurements" in document else None


def write(path: Path, document: dict[str, Any]) -> None:
    """Whole or not at all, whenever the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(_finite(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: what is no number is null."""
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def forget_cut(path: Path) -> None:
    """After a process that ran beyond its slice was ended: what was cut off with it is no failure."""
    document = load(path)
    if document is not None and document["running"] is not None and document["cut"]:
        write(path, document | {"running": None})


def forget_errors(path: Path) -> None:
    """What failed is measured again by the next run."""
    document = load(path)
    if document is not None:
        good = {name: figures for name, figures in document["measurements"].items() if "error" not in figures}
        complete = document["complete"] and len(good) == len(document["measurements"])
        write(path, document | {"measurements": good, "running": None, "complete": complete})
