"""Pages and pictures that scripts write are those that the scripts write now."""

from pathlib import Path

import pytest

from tests.helpers.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["write_api_docs", "draw_architecture"])
def test_generated_files_are_current(name: str) -> None:
    documents = load_script(ROOT / "tools" / f"{name}.py").documents()
    for path, text in documents.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is outdated: python tools/{name}.py"
    assert name != "write_api_docs" or set((ROOT / "docs" / "api").iterdir()) == set(documents), "a page is left over"
