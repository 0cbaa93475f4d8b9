"""Reads training data: texts, prompts and conversations from files and folders."""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treespec.errors import ConfigError
from treespec.text.chat import Conversation, Message
from treespec.text.prompt_files import VALID, read_prompts, read_text

logger = logging.getLogger(__name__)

LISTS = (".jsonl", ".json")
PASSAGE = 2048  # characters of a text that become one prompt, up to twice as many if no line ends
MAX_FILE_BYTES = 16 << 20
SYNTHETIC = "synthetic"  # group of the prompts that a target wrote itself


@dataclass(frozen=True)
class TrainingPrompt:
    """A beginning that the target continues."""

    # raw text, token ids, or a conversation, to which the target's chat template is applied
    content: str | list[int] | list[Message]
    # kind of text: an entry's "kind" or "category", or the folder below the given root, else the file's name
    group: str


def read_training_prompts(paths: Sequence[Path], chat: bool) -> list[TrainingPrompt]:
    """Read prompts from `.jsonl` and `.json` lists, and all other text files; raw texts are cut into passages.

    Folders are read recursively. Logs which files are left out, and why. `chat` as in `read_prompts`. Raises
    ConfigError and OSError.
    """
    prompts: list[TrainingPrompt] = []
    skipped = 0
    left_out = defaultdict[str, list[Path]](list)  # by reason
    for root in paths:
        if not root.exists():
            raise FileNotFoundError(f"{root} does not exist; give files or folders with text")
        for path in sorted(file for file in root.rglob("*") if file.is_file()) if root.is_dir() else [root]:
            folders = path.relative_to(root).parts if root.is_dir() else ()
            group = folders[0] if len(folders) > 1 else path.stem
            before = len(prompts)
            if path.suffix in LISTS:
                for entry in read_prompts(path, chat):
                    cut = list(_passages(entry.content)) if isinstance(entry.content, str) else [entry.content]
                    prompts += [TrainingPrompt(passage, entry.kind or group) for passage in cut]
            else:
                try:
                    prompts += [TrainingPrompt(passage, group) for passage in _passages(_raw_text(path))]
                except ConfigError as error:
                    left_out[str(error)].append(path)
            skipped += len(prompts) == before
    for reason, files in left_out.items():
        logger.warning("left out %d of the files, such as %s: %s", len(files), files[0], reason)
    if not prompts:
        names = ", ".join(map(str, paths))
        raise ConfigError(f"{names}: {skipped} files, none with text; give UTF-8 texts, or JSON lines; {VALID}")
    return prompts


def user_turn(tokenizer: Any) -> tuple[list[int], int]:
    """Return the tokens of a chat template before a user's message, and the first one after it.

    A chat model that continues the former writes a user's message of the distribution that it was trained on (Magpie,
    arXiv 2406.08464). Raises ConfigError for a template that does not render a message as it is.
    """
    message = "message"
    before, found, after = Conversation([{"role": "user", "content": message}]).render(tokenizer).rpartition(message)
    ends = tokenizer.encode(after, add_special_tokens=False)
    if not (found and before and ends):
        raise ConfigError("the target's chat template has no place for a user's message; give data")
    return list(tokenizer.encode(before, add_special_tokens=False)), ends[0]


def _raw_text(path: Path) -> str:
    """Return the text of a file. Raises ConfigError, with the reason, for binary and very large ones."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(f"larger than {MAX_FILE_BYTES >> 20} MiB; split large texts")
    try:
        text = read_text(path)
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:  # UTF-16 of ASCII without a byte order mark is valid UTF-8
        raise ConfigError(
            "binary, or in an encoding other than UTF-8 without a byte order mark; convert texts to UTF-8"
        )
    return text


def _passages(text: str) -> Iterator[str]:
    """Cut a text into passages at line ends, lines that are too long at spaces, or else anywhere."""
    start = 0
    while start < len(text):
        last, most = start + PASSAGE - 1, start + 2 * PASSAGE
        ends = (text.find(mark, last, most) + 1 for mark in "\n ")
        end = next(filter(None, ends), most)
        if (passage := text[start:end]).strip():
            yield passage
        start = end
