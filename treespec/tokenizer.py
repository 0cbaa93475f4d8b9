"""The tokenizer that belongs to a model."""

import json
import logging
import os
from typing import Any

from treespec.errors import ConfigError

logger = logging.getLogger("treespec")


def load_tokenizer(tokenizer: Any, folder: os.PathLike[str]) -> Any:
    """A tokenizer object as it is, one from the files of a folder, or for None the model folder's own, if it has one.

    Raises:
        ConfigError: it is neither, or the folder has no tokenizer files.
    """
    if tokenizer is not None and not isinstance(tokenizer, str | os.PathLike):
        if not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
            raise ConfigError(f"tokenizer={tokenizer!r}; valid: a folder, or an object with encode and decode")
        return tokenizer
    source = os.fspath(tokenizer if tokenizer is not None else folder)
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if not any(os.path.isfile(os.path.join(source, name)) for name in names):
        if tokenizer is not None:
            raise ConfigError(f"tokenizer={tokenizer!r} is no folder with tokenizer files ({', '.join(names)})")
        logger.info("%s has no tokenizer: prompts and outputs are token ids", source)
        return None
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer imports the model's config first, 3 s of code that is of no use here.
    kind = PreTrainedTokenizerFast if _names_its_class(source) else AutoTokenizer
    return kind.from_pretrained(source, local_files_only=True)


def _names_its_class(folder: str) -> bool:
    """Whether a tokenizer's files say that tokenizer.json is all there is to it."""
    try:
        with open(os.path.join(folder, "tokenizer_config.json"), encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError):
        return False  # AutoTokenizer's own error says what is wrong
    return isinstance(config, dict) and config.get("tokenizer_class") == "TokenizersBackend"
