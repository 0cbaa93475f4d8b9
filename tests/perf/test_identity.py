"""`perf/identity.py`: what it compares and counts."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.helpers.models import tiny
from tests.helpers.scripts import load_script

PERF = Path(__file__).resolve().parents[2] / "perf"


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(PERF)
    return load_script(PERF / "identity.py")


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--sampling"]], ids=["greedy", "sampled"])
def test_all_runs_are_identical(options: list[str], identity: ModuleType, tmp_path: Path) -> None:
    (target, drafts), out = tiny(torch.float32), tmp_path / "out.json"
    models = ["--model", target, *(part for draft in drafts[:2] for part in ("--draft", draft))]
    arguments = [*models, "--prompts", 5, "--max-tokens", 6, "--nodes", 8, "--dtypes", "float32", "--out", out]
    assert identity.main([*map(str, arguments), *options]) == 0
    document = json.loads(out.read_text())
    settings = list(identity.SAMPLING if options else identity.GREEDY)
    modes = ["plain", "ssm-1", "ssm-2", "ssm-1,ssm-2", "one a round", "lookup", "everything", "auto"]
    found = [(run["batch"], run["setting"], run["sources"]) for run in document["runs"]]
    assert found == [(batch, setting, mode) for batch in (1, 8) for setting in settings for mode in modes]
    assert all(run["tokens"] == 30 for run in document["runs"])
    assert options or document["transformers"]["agree"] == document["transformers"]["tokens"] == 30


def test_differing_rows_are_counted(identity: ModuleType) -> None:
    plain, tree = torch.zeros(3, 4), torch.zeros(2, 4)
    assert identity.differing_rows([plain], [plain.clone()]) == 0
    tree[1, 2] = 1e-30
    assert identity.differing_rows([plain], [tree]) == 2, "one row differs, and one is missing"
