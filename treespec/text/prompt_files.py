"""Prompts from JSON files: texts, token ids and conversations."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from treespec.errors import ConfigError
from treespec.text.chat import Conversation, Message

FORMS = ("messages", "turns", "prompt", "text", "prompt_token_ids")
VALID = (
    'valid: {"messages": [{"role", "content"}, ...]}, {"turns": [text, ...]} (the first turn is used), '
    '{"prompt": text}, {"text": text} or {"prompt_token_ids": [int, ...]}; optional: "kind" or "category", "package"'
)

# Encodings by byte order mark. UTF-32's starts with UTF-16's, so it comes first.
_ENCODINGS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


class Prompt(NamedTuple):
    """A prompt as text, token ids or messages, with optional kind and package."""

    content: str | list[int] | list[Message]
    kind: str | None = None
    package: str | None = None


def read_text(path: Path) -> str:
    """Read a text in UTF-8, or in the encoding of its byte order mark, which is removed. Raises UnicodeDecodeError."""
    with path.open("rb") as file:
        start = file.read(4)
    encoding = next((name for mark, name in _ENCODINGS.items() if start.startswith(mark)), "utf-8")
    return path.read_text(encoding)


def read_prompts(path: Path, chat: bool = False) -> list[Prompt]:
    """Read prompts, user messages with `chat`, from JSON lines or a JSON list. Raises ConfigError with the location."""
    try:
        text = read_text(path)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is neither UTF-8 nor has a byte order mark: {error.reason} at byte {error.start}"
        ) from None
    prompts = [_prompt(entry, f"{path}, {location}", chat) for entry, location in _entries(text, path)]
    if not prompts:
        raise ConfigError(f"{path} contains no prompt; {VALID}")
    return prompts


def encode_prompt(tokenizer: Any, content: str | list[int] | list[Message]) -> list[int]:
    """Return a prompt's tokens. Render messages with the tokenizer's chat template."""
    if isinstance(content, str):
        return list(tokenizer.encode(content))
    if isinstance(content[0], int):
        return content
    return list(tokenizer.encode(Conversation(content).render(tokenizer), add_special_tokens=False))


def has_chat_template(tokenizer: Any) -> bool:
    """Return whether a tokenizer (or None) can render conversations."""
    return bool(getattr(tokenizer, "chat_template", None))


def _entries(text: str, path: Path) -> Iterator[tuple[Any, str]]:
    """Yield the parsed entries of a JSON list or of JSON lines with their locations."""
    if text.lstrip().startswith("["):
        try:
            entries = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
        yield from ((entry, f"entry {i}") for i, entry in enumerate(entries, start=1))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line), f"line {number}"
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}, line {number}: not JSON ({error.msg}); {VALID}") from None


def _prompt(entry: Any, location: str, chat: bool) -> Prompt:
    if not isinstance(entry, dict):
        raise ConfigError(f"{location}: a JSON {type(entry).__name__}, not an object; {VALID}")
    name = next((key for key in FORMS if key in entry), None)
    if name is None:
        raise ConfigError(f"{location}: keys {', '.join(map(repr, entry)) or 'none'}; {VALID}")
    content = entry[name]
    if name == "turns":
        content = content[0] if isinstance(content, list) and content else None
    kinds = {"messages": dict, "prompt_token_ids": int}
    if name in kinds:
        valid = isinstance(content, list) and all(type(element) is kinds[name] for element in content)
    else:
        valid = isinstance(content, str)
    if not valid or not content:
        raise ConfigError(f"{location}: {name!r} holds {str(content)[:40]!r}, which is not a prompt; {VALID}")
    if chat and name in ("turns", "prompt"):
        content = [{"role": "user", "content": content}]
    kind, package = entry.get("kind", entry.get("category")), entry.get("package")
    return Prompt(content, None if kind is None else str(kind), None if package is None else str(package))
