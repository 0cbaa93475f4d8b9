"""Map token ids to bytes of text, for every kind of tokenizer.

Byte-level BPE writes a space as "Ġ" and every byte as a printable character. SentencePiece writes "▁" for a space and
"<0x0A>" for a byte without a token. Converted to bytes, tokens of both kinds can be compared, and texts that end inside
a multi-byte character can be concatenated.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treespec_weights.documents import TOKENIZER, has_document, read_document
from treespec_weights.errors import CheckpointError
from treespec_weights.sentencepiece import missing_packages, sentencepiece_error

FILES = (TOKENIZER, "tokenizer.model", "vocab.json")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
MAX_ID = (1 << 24) - 1  # limits the size of tables indexed by id


def has_tokenizer(folder: Path) -> bool:
    """Return whether a checkpoint (a result of `resolve_folder`) has a tokenizer of any kind."""
    return any(has_document(folder, name) for name in FILES)


@dataclass(frozen=True, eq=False, repr=False)
class Codec:
    """A tokenizer that works on bytes."""

    # bytes that each token adds to a text, by id; None for control tokens and unused ids
    tokens: tuple[bytes | None, ...]
    controls: dict[str, int]  # ids of control tokens, such as end tokens, by name
    byte_ids: dict[int, int]  # byte -> token of that single byte
    start: tuple[int, ...]  # control tokens that the tokenizer prepends to a text
    spaces_first: bool  # whether the tokenizer prepends a space to a text
    _inner: Any  # a tokenizers.Tokenizer that prepends nothing

    @classmethod
    def read(cls, folder: Path) -> "Codec":
        """Read the tokenizer of a folder (a result of `resolve_folder`).

        Raises CheckpointError if there is none to read.
        """
        from tokenizers import Tokenizer

        raw = read_tokenizer(folder)
        try:
            raw = raw | {"truncation": None, "padding": None}
            tokenizer = Tokenizer.from_str(json.dumps(raw))
            inner = Tokenizer.from_str(json.dumps(_without_prefix(raw)))
            first, plain = (tokenizer.encode("a", add_special_tokens=special) for special in (True, False))
        except BaseException as error:  # tokenizers raises plain Exceptions, and its Rust panics are BaseExceptions
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            message = f"refused by the tokenizers library: {error}"
            raise CheckpointError.of(folder, "tokenizer", TOKENIZER, message) from error
        by_id = {id: token for token, id in tokenizer.get_vocab(with_added_tokens=True).items()}
        added = tokenizer.get_added_tokens_decoder()
        table = byte_table(raw)
        if (last := max(by_id, default=-1)) > MAX_ID:
            message = f"{by_id[last]!r} has the id {last}; valid: up to {MAX_ID:,}"
            raise CheckpointError.of(folder, "tokenizer", TOKENIZER, message)
        tokens: list[bytes | None] = [None] * (last + 1)
        for id, token in by_id.items():
            if id not in added:
                tokens[id] = bytes_of(token, table)
            elif not added[id].special:
                tokens[id] = token.encode()
        controls = {token.content: id for id, token in added.items() if token.special}
        byte_ids: dict[int, int] = {}
        for id, data in enumerate(tokens):
            if data is not None and len(data) == 1:
                is_regular = table is not None or not _BYTE_TOKEN.fullmatch(by_id[id])
                if is_regular or data[0] not in byte_ids:
                    byte_ids[data[0]] = id
        start: list[int] = []
        for id, is_control in zip(first.ids, first.special_tokens_mask, strict=True):
            if not is_control:
                break
            start.append(id)
        spaces_first = inner.encode("a", add_special_tokens=False).ids != plain.ids
        return cls(tuple(tokens), controls, byte_ids, tuple(start), spaces_first, inner)

    def encode(self, text: str) -> list[int]:
        """Tokenize a piece of text, which may start in the middle of a text."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_bytes(self, data: bytes) -> list[int]:
        """Tokenize bytes. A byte outside of complete characters becomes its own token, or is dropped if it has none."""
        ids: list[int] = []
        while data:
            try:
                text, broken, data = data.decode(), b"", b""
            except UnicodeDecodeError as error:
                text, broken, data = data[: error.start].decode(), data[error.start : error.end], data[error.end :]
            ids += self.encode(text) if text else []
            ids += [self.byte_ids[byte] for byte in broken if byte in self.byte_ids]
        return ids

    def ids_of_bytes(self) -> dict[bytes, int]:
        """Return the token of each byte string. Regular tokens take precedence over byte tokens, then lower ids."""
        ids: dict[bytes, int] = {}
        for id, data in enumerate(self.tokens):
            if data:
                ids.setdefault(data, id)
        return ids | {bytes([byte]): id for byte, id in self.byte_ids.items()}


def read_tokenizer(folder: Path) -> Any:
    """Return a folder's parsed tokenizer.json, converted from older files if it has none. Raises as `Codec.read`."""
    return read_document(folder, TOKENIZER) if has_document(folder, TOKENIZER) else _converted(folder)


def _converted(folder: Path) -> dict[str, Any]:
    """Convert older tokenizer files to tokenizer.json with transformers."""
    if missing := missing_packages(folder):
        message = sentencepiece_error(str(folder), missing)
        raise CheckpointError.of(folder, "tokenizer", "tokenizer.model", message)
    from transformers import AutoTokenizer

    try:
        return dict(json.loads(AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer.to_str()))
    except Exception as error:  # each file format raises its own library's errors
        message = f"there is none, and transformers does not convert this folder's files: {error}"
        raise CheckpointError.of(folder, "tokenizer", TOKENIZER, message) from error


def _mentions(component: Any, kind: str) -> bool:
    """Return whether a component of tokenizer.json has this type, or contains one of this type."""
    if isinstance(component, dict):
        return component.get("type") == kind or any(_mentions(value, kind) for value in component.values())
    return isinstance(component, list) and any(_mentions(value, kind) for value in component)


def _without_prefix(raw: dict[str, Any]) -> dict[str, Any]:
    """Modify tokenizer.json to prepend nothing, so that the middle of a text can be encoded."""

    def changed(component: Any) -> Any:
        if isinstance(component, list):
            return [child for child in map(changed, component) if child is not None]
        if not isinstance(component, dict):
            return component
        if component.get("type") == "Prepend":
            return None
        component = {key: changed(value) for key, value in component.items()}
        if component.get("type") in ("ByteLevel", "Metaspace") and "add_prefix_space" in component:
            component["add_prefix_space"] = False
        if component.get("type") == "Metaspace":
            component["prepend_scheme"] = "never"
        return component

    return raw | {name: changed(raw.get(name)) for name in ("normalizer", "pre_tokenizer")} | {"post_processor": None}


def byte_characters() -> dict[str, int]:
    """Return the byte of each character in byte-level tokenizers (GPT-2).

    Printable bytes other than the space map from the character of the same code, all others from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(unprintable)}


def byte_table(raw: dict[str, Any]) -> dict[str, int] | None:
    """Return `byte_characters` for the tokenizer.json of a byte-level tokenizer, None for others."""
    byte_level = any(_mentions(raw.get(key), "ByteLevel") for key in ("pre_tokenizer", "decoder"))
    return byte_characters() if byte_level else None


def bytes_of(token: str, table: dict[str, int] | None) -> bytes:
    """Return the bytes that a token of the model's vocabulary adds to a text; `table` as `byte_table` returns it."""
    if table is not None:
        try:
            return bytes([table[char] for char in token])
        except KeyError:
            return token.encode()
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE, " ").encode()
