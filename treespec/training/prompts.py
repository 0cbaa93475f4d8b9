"""Reads training data: texts, prompts and conversations from files and folders."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from treespec.errors import ConfigError
from treespec.text.chat import Message
from treespec.text.prompt_files import VALID, read_prompts

LISTS = (".jsonl", ".json")
PASSAGE = 2048  # characters of a text that become one prompt
MAX_FILE_BYTES = 16 << 20


@dataclass(frozen=True)
class TrainingPrompt:
    """A beginning that the target continues."""

    # raw text, token ids, or a conversation, to which the target's chat template is applied
    content: str | list[int] | list[Message]
    # kind of text: an entry's "kind" or "category", or the folder below the given root, else the file's name
    group: str


def read_training_prompts(paths: Sequence[Path], chat: bool) -> list[TrainingPrompt]:
    """Read prompts from `.jsonl` and `.json` lists, and all other UTF-8 text files; raw texts are cut into passages.

    Folders are read recursively. `chat` as in `read_prompts`. Raises ConfigError and OSError.
    """
    prompts: list[TrainingPrompt] = []
    skipped = 0
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
                prompts += [TrainingPrompt(passage, group) for passage in _passages(_read_text(path))]
            skipped += len(prompts) == before
    if not prompts:
        names = ", ".join(map(str, paths))
        raise ConfigError(f"--data {names}: {skipped} files, none with text; give UTF-8 texts, or JSON lines; {VALID}")
    return prompts


def _read_text(path: Path) -> str:
    """Return the text of a file, empty for binary and very large ones."""
    if path.stat().st_size > MAX_FILE_BYTES:
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def _passages(text: str) -> Iterator[str]:
    """Cut a text into passages at line ends."""
    passage, size = list[str](), 0
    for line in text.splitlines(keepends=True):
        passage.append(line)
        size += len(line)
        if size >= PASSAGE:
            yield "".join(passage)
            passage, size = [], 0
    if "".join(passage).strip():
        yield "".join(passage)
