"""Held-out prompts of this repository, and balanced selection over kinds and packages."""

import random
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from treespec.startup import smollm2
from treespec.text.prompt_files import Prompt
from treespec_weights import models_folder


def held_out_prompts(chat: bool) -> Path:
    """Return the file of instructions (for chat models) or texts, from packages absent from our SSMs' training data."""
    return models_folder(smollm2.NAME if chat else "default") / "heldout_prompts.json"


def choose(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """Choose prompts evenly over alternating kinds and their packages, or all in order if there are at most `count`."""
    if len(prompts) <= count:
        return list(prompts)
    order = list(prompts)
    random.Random(seed).shuffle(order)
    kinds: dict[str | None, dict[str | None, list[Prompt]]] = {}
    for prompt in sorted(order, key=lambda entry: (entry.kind or "", entry.package or "")):  # stable
        kinds.setdefault(prompt.kind, {}).setdefault(prompt.package, []).append(prompt)
    by_kind = [list(_round_robin(list(packages.values()))) for packages in kinds.values()]
    return list(_round_robin(by_kind))[:count]


def _round_robin(lists: Sequence[Sequence[Prompt]]) -> Iterator[Prompt]:
    for row in zip_longest(*lists):
        yield from (prompt for prompt in row if prompt is not None)
