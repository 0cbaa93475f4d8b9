"""Generate the JSON files of a Hugging Face folder from a GGUF file."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from treespec_weights.errors import CheckpointError, Problem
from treespec_weights.gguf.config import generation_config, hf_config
from treespec_weights.gguf.reader import GgufFile, read_gguf
from treespec_weights.gguf.tensors import block_types
from treespec_weights.gguf.tokenizer import has_tokenizer, tokenizer_config, tokenizer_json
from treespec_weights.quant_config import KEY
from treespec_weights.rules import CONFIG, GENERATION_CONFIG
from treespec_weights.tokenizer import TOKENIZER
from treespec_weights.writer import write_json


def _config(file: GgufFile) -> dict[str, Any]:
    """Return config.json, with the types of matrices that stay in blocks as its quantization_config."""
    config, types = hf_config(file), block_types(file)
    return config | ({KEY: {"quant_method": "gguf", "types": types}} if types else {})


_MAKERS: Mapping[str, Callable[[GgufFile], dict[str, Any]]] = {
    CONFIG: _config,
    GENERATION_CONFIG: generation_config,
    TOKENIZER: tokenizer_json,
    "tokenizer_config.json": tokenizer_config,
}


def has_document(path: Path, name: str) -> bool:
    """Return whether `read_document` can return a document. Raises as `read_gguf`."""
    return name in _MAKERS and (not name.startswith("tokenizer") or has_tokenizer(read_gguf(path)))


def read_document(path: Path, name: str) -> dict[str, Any]:
    """Return a JSON document of a GGUF file. Raises CheckpointError if there is none, or for unusable values."""
    if not has_document(path, name):
        raise CheckpointError(path, [Problem("file", repr(name), "a GGUF file has no such document")])
    return _MAKERS[name](read_gguf(path))


def write_documents(path: Path, folder: Path) -> None:
    """Write all documents of a GGUF file except config.json, which depends on the format of the weights.

    Raises CheckpointError as `read_document`, and WriteError.
    """
    for name in _MAKERS:
        if name != CONFIG and has_document(path, name) and (document := read_document(path, name)):
            # Indentation makes json several times slower, which takes seconds for a large tokenizer.
            write_json(folder, name, document, indent=None if name == TOKENIZER else 2)
