"""Models that commands load, and an engine that they are lent instead."""

import pytest

from tests.helpers.commands import lend
from tests.helpers.models import CURVE, _differing_rows_once, tiny
from tests.helpers.speech import speaking_folder, speaking_llm
from treespec import LLM, SpecConfig


@pytest.fixture(scope="session")
def llm() -> LLM:
    return speaking_llm(spec=SpecConfig(nodes=16), max_num_seqs=1)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options that name a target and two drafts; their costs are known and stay, and their proofs are made once."""
    monkeypatch.setattr("treespec.startup.build.differing_rows", _differing_rows_once)
    monkeypatch.setattr("treespec.startup.cost_measurement.load", lambda key: CURVE)
    monkeypatch.setattr("treespec.planning.round_costs.RoundCosts.learn", lambda *_: None)
    drafts = [part for draft in tiny()[1][:2] for part in ("--draft", str(draft))]
    return ["--model", str(speaking_folder()), *drafts]


@pytest.fixture
def loaded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Commands get this engine instead of loading one of their own."""
    lend(llm, monkeypatch)
    return llm
