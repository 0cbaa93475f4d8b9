"""Models that commands load, and an engine that they are lent instead."""

from collections.abc import Iterator

import pytest

from tests.helpers.commands import lend
from tests.helpers.models import quick_start, tiny
from tests.helpers.speech import speaking_folder, speaking_llm
from treespec import LLM, SpecConfig


@pytest.fixture(scope="session")
def llm() -> LLM:
    return speaking_llm(spec=SpecConfig(nodes=16), max_num_seqs=1)


@pytest.fixture
def models() -> Iterator[list[str]]:
    """Options that name a target and two drafts; their costs are known and stay, and their proofs are made once."""
    drafts = [part for draft in tiny()[1][:2] for part in ("--draft", str(draft))]
    with quick_start():
        yield ["--model", str(speaking_folder()), *drafts]


@pytest.fixture
def loaded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Commands get this engine instead of loading one of their own."""
    lend(llm, monkeypatch)
    return llm
