"""Prompts and an engine for benchmarks."""

import json
from pathlib import Path

import pytest

from tests.helpers.commands import BENCH, lend
from tests.helpers.models import random_prompts, tiny_llm


@pytest.fixture
def ids_file(tmp_path: Path) -> Path:
    """Prompts of two kinds for models without a tokenizer."""
    kinds = zip(random_prompts([5, 9, 17, 30]), ["code", "data"] * 2, strict=True)
    path = tmp_path / "ids.jsonl"
    path.write_text("\n".join(json.dumps({"prompt_token_ids": tokens, "kind": kind}) for tokens, kind in kinds))
    return path


@pytest.fixture
def lent_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """`treespec bench` gets an engine that is there already."""
    lend(tiny_llm(), monkeypatch, BENCH)
