"""Detect tokenizers that consist of only a sentencepiece model, and the packages that transformers needs to read
them.
"""

import importlib.util
from pathlib import Path

PACKAGES = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}  # package -> module


def missing_packages(folder: Path) -> list[str]:
    """Return the packages to install before a folder's tokenizer can be read.

    Without them transformers reads a sentencepiece model as a tiktoken file, with misleading errors.
    """
    if (folder / "tokenizer.json").is_file() or not _is_sentencepiece(folder / "tokenizer.model"):
        return []
    return [package for package, module in PACKAGES.items() if not _is_installed(module)]


def sentencepiece_error(folder: str, missing: list[str]) -> str:
    """Return the error message for a folder with `missing_packages`."""
    return (
        f"the tokenizer of {folder} is a sentencepiece model (tokenizer.model without tokenizer.json), which needs "
        f"more packages: pip install {' '.join(missing)}"
    )


def _is_sentencepiece(path: Path) -> bool:
    """Return whether a file starts with the tag of a sentencepiece model's first piece, not with base64 (tiktoken)."""
    try:
        with path.open("rb") as file:
            return file.read(1) == b"\n"
    except OSError:
        return False


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not installed
        return False
