"""Atomic file writes: to a temporary name, then renamed."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL_BYTES = 1 << 16  # disks with less free space count as full


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; move the file or folder into place if the block ends without an error.

    Raises OSError if the disk is full, whatever the writer raised.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        if temporary.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        os.replace(temporary, path)
    except Exception as error:  # torch and safetensors raise other errors for a full disk
        if shutil.disk_usage(path.parent).free < FULL_BYTES:
            raise OSError(errno.ENOSPC, f"no space left for {path}; free some space, then resume") from error
        raise
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def remove_temporary(folder: Path) -> None:
    """Remove temporary files that a killed process left behind in `replacing`."""
    for path in list(folder.rglob(".*.tmp")):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    atomic_write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
