"""Reads training data: texts, prompts and conversations from files and folders."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treespec.bench.prompts import entries
from treespec.errors import ConfigError
from treespec.text.chat import Message

LISTS = (".jsonl", ".json")
PASSAGE = 2048  # characters of a text that become one prompt
MAX_FILE_BYTES = 16 << 20
VALID = (
    'valid: {"messages": [...]}, {"prompt": text}, {"text": text}, or {"turns": [text, ...]}, with an optional "kind"'
)


@dataclass(frozen=True)
class TrainingPrompt:
    """A beginning that the target continues.

    Attributes:
        content: raw text, or a conversation, to which the target's chat template is applied.
        group: kind of text: an entry's "kind" or "category", or the folder below the given root, else the file's name.
    """

    content: str | list[Message]
    group: str


def read_training_prompts(paths: Sequence[Path], chat: bool) -> list[TrainingPrompt]:
    """Read prompts from `.jsonl` and `.json` lists, and passages from all other UTF-8 text files.

    Args:
        paths: files, or folders that are read recursively.
        chat: the target has a chat template, so an entry's "prompt" is a user message; texts stay raw.

    Raises:
        ConfigError: an invalid entry, or no text in any file. OSError: a path does not exist.
    """
    found: list[TrainingPrompt] = []
    skipped = 0
    for root in paths:
        if not root.exists():
            raise FileNotFoundError(f"{root} does not exist; give files or folders with text")
        for path in sorted(each for each in root.rglob("*") if each.is_file()) if root.is_dir() else [root]:
            parts = path.relative_to(root).parts if root.is_dir() else ()
            group = parts[0] if len(parts) > 1 else path.stem
            before = len(found)
            found += _from_list(path, group, chat) if path.suffix in LISTS else _passages(path, group)
            skipped += len(found) == before
    if not found:
        names = ", ".join(map(str, paths))
        raise ConfigError(f"--data {names}: {skipped} files, none with text; give UTF-8 texts, or JSON lines; {VALID}")
    return found


def _from_list(path: Path, group: str, chat: bool) -> Iterator[TrainingPrompt]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    for entry, where in entries(text, path):
        keys = entry.keys() if isinstance(entry, dict) else ()
        name = next((key for key in ("messages", "prompt", "turns", "text") if key in keys), None)
        if name is None:
            raise ConfigError(f"{path}, {where}: {str(entry)[:60]!r}; {VALID}")
        content: Any = entry[name]
        if name == "turns" and isinstance(content, list) and content:
            content = content[0]
        is_messages = isinstance(content, list) and bool(content) and all(isinstance(each, dict) for each in content)
        if not (is_messages if name == "messages" else isinstance(content, str) and content):
            raise ConfigError(f"{path}, {where}: {name!r} holds {str(content)[:40]!r}; {VALID}")
        if chat and name in ("prompt", "turns"):
            content = [{"role": "user", "content": content}]
        yield TrainingPrompt(content, str(entry.get("kind", entry.get("category", group))))


def _passages(path: Path, group: str) -> Iterator[TrainingPrompt]:
    """Cut a text file into passages at line ends. Binary and very large files yield nothing."""
    if path.stat().st_size > MAX_FILE_BYTES:
        return
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    passage, size = list[str](), 0
    for line in text.splitlines(keepends=True):
        passage.append(line)
        size += len(line)
        if size >= PASSAGE:
            yield TrainingPrompt("".join(passage), group)
            passage, size = [], 0
    if "".join(passage).strip():
        yield TrainingPrompt("".join(passage), group)
