"""Training data: texts, prompts and conversations from files and folders."""

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
PASSAGE = 2048  # characters per prompt cut from a text; up to twice as many if no line ends
MAX_FILE_BYTES = 16 << 20
SYNTHETIC = "synthetic"  # group of the prompts that a target wrote itself


@dataclass(frozen=True)
class TrainingPrompt:
    """A prompt that the target continues in training."""

    # raw text, token ids, or a conversation for the target's chat template
    content: str | list[int] | list[Message]
    # an entry's "kind" or "category", else the folder below the given root, else the file name
    group: str


def read_training_prompts(paths: Sequence[Path], chat: bool) -> list[TrainingPrompt]:
    """Read prompts from `.jsonl` and `.json` lists and all other text files; cut raw texts into passages.

    Folders are read recursively. Logs skipped files with reasons. `chat` as in `read_prompts`. Raises
    ConfigError and OSError.
    """
    prompts: list[TrainingPrompt] = []
    skipped = 0
    left_out = defaultdict[str, list[Path]](list)  # skipped files by reason
    for root in paths:
        if not root.exists():
            raise FileNotFoundError(f"{root} does not exist; pass files or folders with text")
        for path in sorted(file for file in root.rglob("*") if file.is_file()) if root.is_dir() else [root]:
            folders = path.relative_to(root).parts if root.is_dir() else ()
            group = folders[0] if len(folders) > 1 else path.stem
            count_before = len(prompts)
            if path.suffix in LISTS:
                for entry in read_prompts(path, chat):
                    cut = list(_passages(entry.content)) if isinstance(entry.content, str) else [entry.content]
                    prompts += [TrainingPrompt(passage, entry.kind or group) for passage in cut]
            else:
                try:
                    prompts += [TrainingPrompt(passage, group) for passage in _passages(_raw_text(path))]
                except ConfigError as error:
                    left_out[str(error)].append(path)
            skipped += len(prompts) == count_before
    for reason, files in left_out.items():
        logger.warning("skipped %d of the files, such as %s: %s", len(files), files[0], reason)
    if not prompts:
        names = ", ".join(map(str, paths))
        raise ConfigError(f"{names}: {skipped} files, none with text; pass UTF-8 texts, or JSON lines; {VALID}")
    return prompts


def user_turn(tokenizer: Any) -> tuple[list[int], int]:
    """Return a chat template's tokens before a user message, and the first token after it.

    A chat model that continues these tokens writes a user message from its training distribution (Magpie, arXiv
    2406.08464). Raises ConfigError for a template that does not render messages literally.
    """
    message = "message"
    prefix, rendered, suffix = (
        Conversation([{"role": "user", "content": message}]).render(tokenizer).rpartition(message)
    )
    ends = tokenizer.encode(suffix, add_special_tokens=False)
    if not (rendered and prefix and ends):
        raise ConfigError("the target's chat template does not render user messages literally; pass data")
    return list(tokenizer.encode(prefix, add_special_tokens=False)), ends[0]


def _raw_text(path: Path) -> str:
    """Return the text of a file. Raises ConfigError, with the reason, for binary and very large files."""
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
    """Cut a text into passages at line ends, and overlong lines at spaces or else anywhere."""
    start = 0
    while start < len(text):
        earliest_end, latest_end = start + PASSAGE - 1, start + 2 * PASSAGE
        ends = (text.find(mark, earliest_end, latest_end) + 1 for mark in "\n ")
        end = next(filter(None, ends), latest_end)
        if (passage := text[start:end]).strip():
            yield passage
        start = end
