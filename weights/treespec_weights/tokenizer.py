"""Fingerprint the vocabulary of a folder, to check whether two models use the same token ids."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from treespec_weights.documents import TOKENIZER, has_document, read_document
from treespec_weights.errors import CheckpointError
from treespec_weights.files import file_inside

SENTENCEPIECE = "tokenizer.model"


class Vocabulary(NamedTuple):
    """Identity of a vocabulary. Models with equal identities can draft for each other."""

    sha256: str  # hash of the sorted (id, token) pairs, independent of the file's formatting
    tokens: int | None  # None for a SentencePiece file, which is hashed as a whole
    max_id: int | None


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """Return the vocabulary of a checkpoint (a result of `resolve_folder`), or None without a tokenizer.

    Raises CheckpointError for a malformed tokenizer.json.
    """
    if has_document(folder, TOKENIZER):
        tokens = token_ids(folder, read_document(folder, TOKENIZER))
        canonical = json.dumps(sorted((id, token) for token, id in tokens.items()))
        return Vocabulary(
            hashlib.sha256(canonical.encode()).hexdigest(), len(tokens), max(tokens.values(), default=None)
        )
    if (folder / SENTENCEPIECE).exists():
        return Vocabulary(hashlib.sha256(file_inside(folder, SENTENCEPIECE).read_bytes()).hexdigest(), None, None)
    return None


def token_ids(folder: Path, tokenizer: Any) -> dict[str, int]:
    """Return the id of each token of a parsed tokenizer.json. Raises CheckpointError for a malformed one."""
    try:
        vocab = tokenizer["model"]["vocab"]
        # Unigram models list [token, score] in id order, others map token to id.
        tokens = {entry[0]: id for id, entry in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
        tokens |= {added["content"]: added["id"] for added in tokenizer.get("added_tokens") or []}
        if not all(type(token) is str and type(id) is int for token, id in tokens.items()):
            raise TypeError
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        message = "malformed: expected model.vocab and added_tokens as the tokenizers library writes them"
        raise CheckpointError.of(folder, "tokenizer", TOKENIZER, message) from None
    return tokens
