"""Read the JSON documents of a checkpoint: the files of its folder, or those generated from a GGUF file's metadata."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from treespec_weights.errors import CheckpointConfigError, CheckpointError
from treespec_weights.families import family_config, family_of
from treespec_weights.files import read_json
from treespec_weights.gguf.config import generation_config, hf_config
from treespec_weights.gguf.reader import GgufFile, read_gguf
from treespec_weights.gguf.tensors import block_types
from treespec_weights.gguf.tokenizer import (
    has_tokenizer,
    is_stored,
    stored_tokenizer,
    tokenizer_config,
    tokenizer_json,
    tokenizer_text,
)
from treespec_weights.quant_config import KEY
from treespec_weights.rules import FamilyRules, ModelShape
from treespec_weights.text_part import text_config
from treespec_weights.writer import write_json, write_text

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"


def _gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return config.json; its quantization_config has the types and forms of matrices that stay quantised."""
    types = {name: [kind, *form] for name, (kind, form) in block_types(file).items()}
    return hf_config(file) | ({KEY: {"quant_method": "gguf", "types": types}} if types else {})


_MAKERS: Mapping[str, Callable[[GgufFile], dict[str, Any]]] = {
    CONFIG: _gguf_config,
    GENERATION_CONFIG: generation_config,
    TOKENIZER: tokenizer_json,
    "tokenizer_config.json": tokenizer_config,
}


def has_document(folder: Path, name: str) -> bool:
    """Return whether a checkpoint (a result of `resolve_folder`) has a document. Raises as `read_gguf`."""
    if not folder.is_file():
        return (folder / name).exists()
    return name in _MAKERS and (not name.startswith("tokenizer") or has_tokenizer(read_gguf(folder)))


def read_document(folder: Path, name: str) -> Any:
    """Parse or generate a JSON document of a checkpoint (a result of `resolve_folder`).

    Only a tokenizer.json may repeat keys. Raises CheckpointError as `read_json`, and for a GGUF file without this
    document or with unusable values.
    """
    if not folder.is_file():
        return read_json(folder, name, unique_keys=name != TOKENIZER)
    if not has_document(folder, name):
        raise CheckpointError.of(folder, "file", name, "a GGUF file has no such document")
    return _MAKERS[name](read_gguf(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """Return the parsed config.json of a checkpoint, or of its text part (`text_config`), as `family_config` does.

    Raises as `read_document` and `text_config`, and CheckpointConfigError if it is not a JSON object.
    """
    return family_config(text_config(folder, _with_numbers(_read_object(folder, CONFIG))))


def _with_numbers(value: Any) -> Any:
    """Return a parsed document with the infinities that transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_with_numbers(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity"):
        return float(value["__float__"])
    return {key: _with_numbers(entry) for key, entry in value.items()}


def read_model(folder: Path) -> tuple[ModelShape, FamilyRules]:
    """Return a checkpoint's shape and the rules of its family. Raises the errors of `read_config` and `family_of`."""
    config = read_config(folder)
    rules = family_of(config, folder)
    return ModelShape.from_hf(config, rules, folder), rules


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the parsed generation_config.json of a checkpoint without null values, or {} if it has none."""
    if not has_document(folder, GENERATION_CONFIG):
        return {}
    return {key: value for key, value in _read_object(folder, GENERATION_CONFIG).items() if value is not None}


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    document = read_document(folder, name)
    if not isinstance(document, dict):
        raise CheckpointConfigError.of(folder, "config", name, f"a JSON {type(document).__name__}, not an object")
    return document


def write_documents(path: Path, folder: Path) -> None:
    """Write all documents of a GGUF file except config.json, which depends on the format of the weights."""
    for name in _MAKERS:
        if name == TOKENIZER and has_document(path, name):  # not parsed: 150,000 tokens would take half a second
            write_text(folder, name, tokenizer_text(read_gguf(path)))
        elif name != CONFIG and has_document(path, name) and (document := read_document(path, name)):
            write_json(folder, name, document)


def write_tokenizer(path: Path, folder: Path) -> Any:
    """Write the files that transformers needs besides a GGUF file's tokenizer, and return this tokenizers.Tokenizer.

    Without a tokenizer, or with a tokenizer.json beside the file, writes the documents and returns None. Raises as
    `tokenizer_text`.
    """
    file = read_gguf(path)
    if not is_stored(file):
        write_documents(path, folder)
        return None
    tokenizer = stored_tokenizer(file)
    names = "content", "single_word", "lstrip", "rstrip", "normalized", "special"
    added = tokenizer.get_added_tokens_decoder().items()
    described = [{"id": id} | {name: getattr(token, name) for name in names} for id, token in added]
    write_json(folder, TOKENIZER, {"added_tokens": described})
    write_json(folder, "tokenizer_config.json", tokenizer_config(file))
    return tokenizer
