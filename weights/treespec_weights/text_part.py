"""Config and tensor names of the text part of a checkpoint for text and images."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from treespec_weights.families import FAMILIES
from treespec_weights.layouts import with_defaults

# Models whose text part equals the text model that `text_config` describes.
COMPOSITES = ("gemma3", "gemma4", "gemma4_unified", "llama4", "mistral3", "qwen3_5", "qwen3_5_moe")
_OF_THE_WHOLE = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
_PARTS = {"model.language_model.": "model.", "language_model.": ""}  # prefixes of current and earlier releases
_BESIDE = ("lm_head.", "mtp.")  # head and MTP layer


def text_config(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return a composite config's text part if its family is supported, else the config itself.

    Values that config.json lacks are transformers' defaults. Raises CheckpointConfigError if transformers rejects it.
    """
    if not is_composite(config):
        return config
    outer = with_defaults(folder, {key: value for key, value in config.items() if key != "architectures"})
    text: dict[str, Any] = outer["text_config"]
    shared = {key: outer[key] for key in _OF_THE_WHOLE if outer.get(key) is not None}
    tokens = {key: value for key, value in config.items() if key.endswith("_token_id") and key in text}
    return {**text, **shared, **tokens}


def is_composite(config: Mapping[str, Any]) -> bool:
    """Return whether `text_config` replaces this config."""
    text = config.get("text_config")
    return config.get("model_type") in COMPOSITES and isinstance(text, dict) and text.get("model_type") in FAMILIES


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Return the text part's tensor names in the file, by their names in a text model.

    A file with only the text part has these names already.
    """
    names = list(names)
    prefix = next((prefix for prefix in _PARTS if any(name.startswith(prefix) for name in names)), None)
    if prefix is None:
        return {name: name for name in names}
    renamed = {_PARTS[prefix] + name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    return renamed | {name: name for name in names if name.startswith(_BESIDE)}
