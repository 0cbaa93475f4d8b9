"""Benchmark prompts: the embedded held-out ones or a user's file."""

import json
import random
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from treespec.errors import ConfigError

VALID = (
    'valid: {"question_id", "category", "turns": [text, ...]} (the first turn is used), {"task_id", "prompt": text}, '
    '{"prompt": text}, {"text": text} or {"prompt_token_ids": [int, ...]}; optional: "kind" or '
    '"category", "package"'
)


class Prompt(NamedTuple):
    """A prompt as text or token ids, with optional kind and package."""

    content: str | list[int]
    kind: str | None = None
    package: str | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts from JSONL or from a JSON list of objects.

    Raises:
        ConfigError: an invalid entry; the message names file, line or entry, and the valid forms.
        OSError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    prompts = [_prompt(entry, f"{path}, {where}") for entry, where in entries(text, path)]
    if not prompts:
        raise ConfigError(f"{path} holds no prompt; {VALID}")
    return prompts


def choose(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """Choose `count` prompts evenly over kinds and, within a kind, over packages; randomly within a package.

    Kinds alternate, so that every batch is mixed. All prompts are returned in order if there are at most `count`.
    """
    if len(prompts) <= count:
        return list(prompts)
    order = list(prompts)
    random.Random(seed).shuffle(order)
    kinds: dict[str | None, dict[str | None, list[Prompt]]] = {}
    for prompt in sorted(order, key=lambda each: (each.kind or "", each.package or "")):  # stable
        kinds.setdefault(prompt.kind, {}).setdefault(prompt.package, []).append(prompt)
    by_kind = [list(_round_robin(list(packages.values()))) for packages in kinds.values()]
    return list(_round_robin(by_kind))[:count]


def _round_robin(lists: Sequence[Sequence[Prompt]]) -> Iterator[Prompt]:
    """Yield the prompts of the lists in round-robin order."""
    for row in zip_longest(*lists):
        yield from (each for each in row if each is not None)


def entries(text: str, path: Path) -> Iterator[tuple[Any, str]]:
    """Yield the parsed entries of a JSON list or of JSON lines with their locations."""
    if text.lstrip().startswith("["):
        try:
            listed = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
        yield from ((entry, f"entry {i}") for i, entry in enumerate(listed, start=1))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line), f"line {number}"
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}, line {number}: not JSON ({error.msg}); {VALID}") from None


def _prompt(entry: Any, where: str) -> Prompt:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: a JSON {type(entry).__name__}, not an object; {VALID}")
    name = next((key for key in ("turns", "prompt", "text", "prompt_token_ids") if key in entry), None)
    if name is None:
        raise ConfigError(f"{where}: keys {', '.join(map(repr, entry)) or 'none'}; {VALID}")
    content = entry[name]
    if name == "turns":
        content = content[0] if isinstance(content, list) and content else None
    is_ids = isinstance(content, list) and all(type(token) is int for token in content)
    if not content or not (is_ids if name == "prompt_token_ids" else isinstance(content, str)):
        raise ConfigError(f"{where}: {name!r} holds {str(content)[:40]!r}, which is not a prompt; {VALID}")
    kind, package = entry.get("kind", entry.get("category")), entry.get("package")
    return Prompt(content, None if kind is None else str(kind), None if package is None else str(package))
