"""Result documents of all stages in one file, `results.json`, which is written atomically.

One file, because a machine may return only a few. A document has the facts of its run, and figures by measurement.
"""

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "results.json"


def load_all(folder: Path) -> dict[str, dict[str, Any]]:
    """Load all documents of a results folder by stage; none if the file is missing or unreadable."""
    try:
        found = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: each for name, each in found.items() if isinstance(each, dict) and "measurements" in each}


def load(folder: Path, stage: str) -> dict[str, Any] | None:
    """Load a stage's document; None if there is none."""
    return load_all(folder).get(stage)


def write(folder: Path, stage: str, document: dict[str, Any]) -> None:
    """Write a stage's document, and leave those of the others as they are."""
    _write_all(folder, load_all(folder) | {stage: document})


def forget(folder: Path, stage: str) -> None:
    """Drop a stage's document."""
    kept = load_all(folder)
    if kept.pop(stage, None) is not None:
        _write_all(folder, kept)


def _write_all(folder: Path, documents: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{NAME}.part"
    part.write_text(json.dumps(_finite(documents), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, folder / NAME)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by null."""
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def adopt(kept: Path, out: Path) -> None:
    """Copy the files of a results folder that another one lacks, to continue there."""
    for path in sorted(kept.glob("[!.]*")) if kept.is_dir() else ():
        if path.is_file() and not (out / path.name).exists():
            shutil.copy(path, out)


def forget_cut(folder: Path, stage: str) -> None:
    """Drop a measurement that was killed with its process at the end of the time slice, which is not a failure."""
    document = load(folder, stage)
    if document is not None and document["running"] is not None and document["cut"]:
        write(folder, stage, document | {"running": None})


def forget_errors(folder: Path, stage: str) -> None:
    """Drop failed measurements, so that the next run repeats them."""
    document = load(folder, stage)
    if document is not None:
        good = {name: figures for name, figures in document["measurements"].items() if "error" not in figures}
        complete = document["complete"] and len(good) == len(document["measurements"])
        write(folder, stage, document | {"measurements": good, "running": None, "complete": complete})
