"""`perf/identity.py --sampling`: what it counts, and how it goes on."""

import functools
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.models import random_prompts, tiny_llm
from tests.helpers.scripts import load_script
from treespec import LLM

PROMPTS = random_prompts([5, 9, 17, 4, 11])


@functools.cache
def sampled() -> ModuleType:
    return load_script(Path(__file__).resolve().parents[2] / "perf" / "identity_sampled.py")


def setup(**more: Any) -> dict[str, Any]:
    settings = {name: sampled().SETTINGS[name] for name in ("T=1", "penalties")}
    known: dict[str, Any] = {"dtypes": ["float32"], "batches": [1, 8], "max_tokens": 6, "nodes": 8, "max_depth": 6}
    return known | {"settings": settings} | more


def engine(dtype: str) -> LLM:
    return tiny_llm(ssms=(0, 1))


def run(out: Path | None, llm: Any = engine, **more: Any) -> dict[str, Any]:
    return sampled().run(llm, lambda llm: PROMPTS, setup(**more), out)


@pytest.mark.slow
def test_all_cells_are_identical(tmp_path: Path) -> None:
    document = run(tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == document["rows"]
    assert document["complete"] and document["totals"]["cells"] == 2 * 3 * 2 and document["distinct_prompts"] == 5
    assert document["totals"]["differing_tokens"] == 0 and document["totals"]["tokens"] == 12 * 5 * 6
    assert {row["sources"] for row in document["rows"]} == {"ssm-1", "ssm-2", "ssm-1,ssm-2"}
    assert [(row["setting"], row["tokens"]) for row in document["plain"]] == [("T=1", 30), ("penalties", 30)]
    assert "0 of 360 tokens differ, 12 cells" in sampled().describe(document)


def test_differences_are_counted_and_placed() -> None:
    found = sampled().compare([[1, 2, 3], [1, 2]], [[1, 2, 3], [1, 9, 4]])
    first = [{"prompt": 1, "position": 1}]
    assert found == {"differing_tokens": 2, "outputs_that_differ": 1, "first_differences": first}
