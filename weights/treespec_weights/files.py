"""Opening files of a checkpoint folder, and nothing outside of it."""

import json
import os
import stat
from collections import Counter
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from treespec_weights.errors import CheckpointError, Problem

MAX_JSON_BYTES = 256 << 20  # the largest published tokenizer.json is about 35 MB


def resolve_folder(folder: Path | str) -> Path:
    """The real path of a checkpoint folder.

    Raises FileNotFoundError where there is none, NotADirectoryError where `folder` is a file.
    """
    try:
        if not os.fspath(folder):
            raise ValueError("empty path")
        real = Path(os.path.realpath(folder, strict=True))
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise FileNotFoundError(f"no such checkpoint folder: {str(folder)!r}") from error
    if not real.is_dir():
        raise NotADirectoryError(f"{str(folder)!r} is a file; give the folder that holds it")
    return real


def file_inside(folder: Path, name: str) -> Path:
    """The real path of the regular file `name` of `folder`, a result of `resolve_folder`.

    A symlink must lead to a file inside the folder or, in a Hugging Face cache (`<repo>/snapshots/<revision>`),
    inside `<repo>/blobs`. Raises CheckpointError otherwise, before anything is opened.
    """

    def refuse(message: str) -> CheckpointError:
        return CheckpointError(folder, [Problem("file", repr(name), message)])

    if not is_plain_name(name):
        raise refuse("not a plain file name; a checkpoint's files lie directly in its folder")
    try:
        real = Path(os.path.realpath(folder / name, strict=True))
        mode = real.stat().st_mode
    except FileNotFoundError:
        raise refuse("no such file") from None
    except OSError as error:
        raise refuse(f"cannot be opened ({error.strerror})") from error
    allowed = [folder, *_hub_blobs(folder)]
    if not any(real.is_relative_to(root) for root in allowed):
        raise refuse(f"a link to {str(real)!r}, outside of the folder; copy the file into the folder")
    if not stat.S_ISREG(mode):
        raise refuse("not a regular file")
    return real


def is_plain_name(name: str) -> bool:
    """Whether `name` is one path component on every platform: no separator, drive, `..` or control character."""
    return (
        name not in ("", ".", "..")
        and name.isprintable()
        and PurePosixPath(name).name == name
        and PureWindowsPath(name).name == name
    )


def _hub_blobs(folder: Path) -> list[Path]:
    """The blobs folder that a Hugging Face cache snapshot links to, if `folder` lies in a snapshot."""
    for revision in (folder, *folder.parents):
        if revision.parent.name == "snapshots":
            return [revision.parent.parent / "blobs"]
    return []


def read_json(folder: Path, name: str, *, unique_keys: bool = True) -> Any:
    """The parsed JSON file `name` of `folder`.

    Raises CheckpointError where the file is missing, lies outside, is larger than 256 MiB, is not JSON or, with
    `unique_keys`, repeats a key (Python's parser would keep the last and drop the others unnoticed).
    """
    path = file_inside(folder, name)
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"larger than {MAX_JSON_BYTES >> 20} MiB")
        return json.loads(path.read_bytes(), object_pairs_hook=_unique if unique_keys else None)
    except RecursionError:
        reason = "nested too deeply"
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    except ValueError as error:
        reason = str(error)
    raise CheckpointError(folder, [Problem("file", repr(name), f"not usable JSON: {reason}")])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(key for key, _ in pairs)
    if repeated := [key for key, count in counts.items() if count > 1]:
        raise ValueError(f"duplicate keys: {', '.join(map(repr, repeated))}")
    return dict(pairs)
