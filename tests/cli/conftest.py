"""Folders of models that commands load, and an engine that they are lent instead."""

from pathlib import Path
from typing import NamedTuple

import pytest
from tokenizers import ByteLevelBPETokenizer

from tests.helpers.commands import lend
from tests.helpers.libraries import share_libraries
from tests.helpers.models import CURVE, _differing_rows_once, make_draft, make_llama, new_folder, open_llm
from treespec import LLM, SpecConfig
from treespec.startup import cost_measurement as costs

VOCAB = 320


class Models(NamedTuple):
    """Folders of a target, of drafts that resemble it, and of a target without a tokenizer."""

    target: Path
    drafts: list[Path]
    bare: Path

    @property
    def arguments(self) -> list[str]:
        return ["--model", str(self.target), *(part for path in self.drafts for part in ("--draft", str(path)))]


@pytest.fixture(scope="session")
def folders() -> Models:
    folder = new_folder("commands")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([Path(__file__).with_name("test_cli.py").read_text()], VOCAB, show_progress=False)
    bare = make_llama(folder / "bare", 0, vocab_size=VOCAB, eos_token_id=None, bos_token_id=None)
    target = make_draft(folder / "target", bare, 0, noise=0.0)
    drafts = [make_draft(folder / name, bare, seed, 0.07) for seed, name in enumerate(("ssm-a", "ssm-b"), start=1)]
    for path in (target, *drafts):
        tokenizer.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return Models(target, drafts, bare)


@pytest.fixture(scope="session")
def llm(folders: Models) -> LLM:
    return open_llm(folders.target, folders.drafts, spec=SpecConfig(nodes=16), max_num_seqs=1)


@pytest.fixture
def models(folders: Models, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Models:
    """The folders for commands that load them; costs are known, so that none is measured, and proofs are made once."""
    monkeypatch.setattr("treespec.startup.build.differing_rows", _differing_rows_once)
    key = costs.cost_key(llm.engine.runner, llm.engine.sources.ssms, llm.config.num_threads)
    costs.save(CURVE, key, share_libraries(tmp_path / "cache" / "treespec"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folders


@pytest.fixture
def loaded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Commands get this engine instead of loading one of their own."""
    lend(llm, monkeypatch)
    return llm
