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


def resolve_folder(folder: Path | str) -> Path:
    """Return the real path of a checkpoint folder.

    Raises FileNotFoundError if it does not exist, NotADirectoryError if `folder` is a file, CheckpointError if it is
    a GGUF file or a folder whose only weights are GGUF files.
    """
    try:
        if not os.fspath(folder):
            raise ValueError("empty path")
        real = Path(os.path.realpath(folder, strict=True))
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise FileNotFoundError(f"no such checkpoint folder: {str(folder)!r}{_hub_hint(str(folder))}") from error
    if (gguf := _gguf_of(real)) is not None:
        raise CheckpointError(folder, [Problem("file", repr(gguf.name), _no_gguf(gguf))])
    if not real.is_dir():
        raise NotADirectoryError(f"{str(folder)!r} is a file; pass the folder that holds it")
    return real


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


def _gguf_of(path: Path) -> Path | None:
    """Return the path if it is a GGUF file, or the first GGUF file of a folder without safetensors, or None."""
    if path.is_file():
        return path if path.suffix.lower() == ".gguf" else None
    try:
        names = sorted(os.listdir(path)) if path.is_dir() else []
    except OSError:
        return None  # opening the folder's files raises the error
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return None
    return next((path / name for name in names if name.lower().endswith(".gguf")), None)


def _no_gguf(path: Path) -> str:
    """Return the error message for a GGUF file."""
    source = f"{str(path.parent)!r}, gguf_file={path.name!r}"
    return (
        "GGUF is not supported; supported are folders with config.json and *.safetensors. transformers converts it "
        f"(pip install gguf accelerate): AutoModelForCausalLM.from_pretrained({source}, quantization_config=GgufConfig("
        f"dequantize=True)).save_pretrained(NEW_FOLDER), and AutoTokenizer.from_pretrained({source}).save_pretrained("
        "NEW_FOLDER)"
    )


def file_inside(folder: Path, name: str) -> Path:
    """Return the real path of the regular file `name` of `folder`, a result of `resolve_folder`.

    A symlink must lead to a file inside the folder or, in a Hugging Face cache (`<repo>/snapshots/<revision>`),
    inside `<repo>/blobs`. Raises CheckpointError otherwise, before anything is opened.
    """

    def refuse(message: str) -> CheckpointError:
        return CheckpointError(folder, [Problem("file", repr(name), message)])

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
        raise refuse("not a regular file")
    return real


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
    """Parse the JSON file `name` of `folder`.

    Raises CheckpointError if the file is missing, outside of the folder, larger than 256 MiB, not JSON or, with
    `unique_keys`, repeats a key, of which Python's parser would silently keep the last.
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
