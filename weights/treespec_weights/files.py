"""Open files of a checkpoint folder, and reject files outside of it."""

import json
import os
import re
import stat
from collections import Counter
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from treespec_weights.errors import CheckpointError, Problem

MAX_JSON_BYTES = 256 << 20  # the largest published tokenizer.json is about 35 MB
_GGUF = ".gguf"
_LATER_PART = re.compile(r"-(?!00001-)\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)  # a model split into several files


def resolve_folder(folder: Path | str) -> Path:
    """Return the real path of a checkpoint: of a folder, of a GGUF file, or of the only GGUF file in a folder.

    Files named *.gguf and files that start with "GGUF" count as GGUF files. In a folder with safetensors, GGUF files
    are ignored. Raises FileNotFoundError, NotADirectoryError for another file, and CheckpointError for several GGUF
    models.
    """
    named_gguf = os.fspath(folder).lower().endswith(_GGUF)
    try:
        if not os.fspath(folder):
            raise ValueError("empty path")
        real = Path(os.path.realpath(folder, strict=True))
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        named_file = str(folder).lower().endswith((".safetensors", ".bin", ".json"))
        kind = "GGUF file" if named_gguf else "file" if named_file else "checkpoint folder"
        hint = "" if named_gguf or named_file else _hub_hint(str(folder))
        raise FileNotFoundError(f"no such {kind}: {str(folder)!r}{hint}") from error
    if real.is_dir():
        return _gguf_in(real) or real
    if not named_gguf and not is_gguf(folder):
        raise NotADirectoryError(f"{str(folder)!r} is a file; pass the folder that holds it, or a GGUF file")
    path = Path(os.path.abspath(folder))
    return Path(os.path.realpath(path.parent)) / path.name  # not its target, which in a hub cache has another name


def is_gguf(path: Path | str) -> bool:
    """Return whether a path is a file that is named *.gguf or starts with GGUF's magic number."""
    try:
        with open(path, "rb") as file:
            return os.fspath(path).lower().endswith(_GGUF) or file.read(4) == b"GGUF"
    except OSError:
        return False


def _hub_hint(name: str) -> str:
    """Return how to download a Hugging Face model, if `name` may be one, else an empty string."""
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name, re.ASCII):
        return ""
    if "/" in name:
        return f"; if it is a model of the Hugging Face hub, download it first: treespec weights fetch {name}"
    return (
        "; models of the Hugging Face hub are named owner/name, such as openai-community/gpt2 (treespec weights fetch "
        "owner/name downloads one)"
    )


def _gguf_in(folder: Path) -> Path | None:
    """Return the GGUF file, or its first part, of the only model of a folder without safetensors, or None."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return None  # opening the folder's files raises the error
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return None
    files = [name for name in names if name.lower().endswith(_GGUF)]
    models = [name for name in files if not _LATER_PART.search(name)] or files
    if len(models) > 1:
        message = f"holds {len(models)} GGUF models; give the path of one of them"
        raise CheckpointError(folder, [Problem("file", ", ".join(map(repr, models)), message)])
    if models:
        file_inside(folder, models[0])
    return folder / models[0] if models else None


def file_inside(folder: Path, name: str) -> Path:
    """Return the real path of the regular file `name` of `folder`, a result of `resolve_folder`.

    A symlink must lead to a file inside the folder or, in a Hugging Face cache (`<repo>/snapshots/<revision>`),
    inside `<repo>/blobs`. Raises CheckpointError otherwise, before anything is opened.
    """

    def refuse(message: str) -> CheckpointError:
        return CheckpointError.of(folder, "file", name, message)

    if not is_plain_name(name):
        raise refuse("not a plain file name; a checkpoint's files are directly in its folder")
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
        raise refuse("a folder, where a file should be" if stat.S_ISDIR(mode) else "not a regular file")
    try:
        open(real, "rb").close()  # safetensors names other reasons
    except OSError as error:
        raise refuse(f"cannot be opened ({error.strerror})") from error
    return real


def remedy(path: Path) -> str:
    """Return how to replace a malformed file; a clone without Git LFS holds pointers instead of files."""
    with path.open("rb") as file:
        is_pointer = file.read(128).startswith(b"version https://git-lfs")
    return "it is a Git LFS pointer; run `git lfs pull` in its folder" if is_pointer else "download it again"


def is_plain_name(name: str) -> bool:
    """Return whether `name` is one path component on every platform: no separator, drive, `..` or control character."""
    return (
        name not in ("", ".", "..")
        and name.isprintable()
        and PurePosixPath(name).name == name
        and PureWindowsPath(name).name == name
    )


def _hub_blobs(folder: Path) -> list[Path]:
    """Return the blobs folder that a Hugging Face cache snapshot links to, if `folder` is in a snapshot, as a list."""
    for revision in (folder, *folder.parents):
        if revision.parent.name == "snapshots":
            return [revision.parent.parent / "blobs"]
    return []


def read_json(folder: Path, name: str, *, unique_keys: bool = True) -> Any:
    """Parse the JSON file `name` of `folder`, a result of `resolve_folder`.

    Raises CheckpointError if the file is missing, outside of the folder, larger than 256 MiB, not JSON or, with
    `unique_keys`, repeats a key (Python's parser would silently keep the last one).
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
    raise CheckpointError.of(folder, "file", name, f"not usable JSON: {reason}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(key for key, _ in pairs)
    if repeated := [key for key, count in counts.items() if count > 1]:
        raise ValueError(f"duplicate keys: {', '.join(map(repr, repeated))}")
    return dict(pairs)
