"""Tokenizers that are a sentencepiece model alone, and the packages that transformers reads them with."""

import importlib.util
from pathlib import Path

PACKAGES = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}  # and the module of each


def missing_packages(folder: Path) -> list[str]:
    """The packages to install before the tokenizer of a folder can be read; [] where it needs none.

    Without them transformers takes a sentencepiece model for a tiktoken file, and its errors are about that.
    """
    if (folder / "tokenizer.json").is_file() or not _is_sentencepiece(folder / "tokenizer.model"):
        return []
    return [package for package, module in PACKAGES.items() if not _is_installed(module)]


def sentencepiece_error(folder: str, missing: list[str]) -> str:
    """The message for a folder whose `missing_packages` are these."""
    return (
        f"the tokenizer of {folder} is a sentencepiece model (tokenizer.model without tokenizer.json), which needs "
        f"further packages to be read: pip install {' '.join(missing)}"
    )


def _is_sentencepiece(path: Path) -> bool:
    """Whether a file begins as a serialized sentencepiece model does, with the tag of its first piece. A tiktoken file,
    which may have the same name, begins with base64 text."""
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
