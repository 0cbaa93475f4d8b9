"""The training script, run whole on a toy: export, resume without loss, held-out packages."""

import json
import os
import shutil
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.calls import calls_of
from tests.helpers.scripts import load_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "weights" / "train_default.py"
FOLDERS = ("target", "ssm-1", "ssm-2", "ssm-3")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT)


@pytest.fixture(scope="module")
def text_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three packages, of which "one" has a file of "secret" too."""
    root, library = tmp_path_factory.mktemp("text"), Path(json.__file__).parents[1]
    for package, module in (("one", "json"), ("two", "wsgiref"), ("secret", "dbm")):
        shutil.copytree(library / module, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "secret" / "dumb.py", root / "one" / "copied.py")
    return root


def options(text_root: Path, folder: Path) -> list[str]:
    toy = "--tiny --max-steps 4 --draft-tokens 600 --no-compile --device cpu --prompts 6".split()
    text = ["--text-root", str(text_root), "--held-out", "secret", "--compare"]
    return [*toy, *text, "--work", str(folder / "work"), "--out", str(folder / "default")]


@pytest.fixture(scope="module")
def built(script: ModuleType, text_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    assert script.main(options(text_root, folder)) == 0
    return folder


TEXTS = ("def f(x):\n    return  x , y !\n", " a", "a \t\r\n\n\n  b", "naïve – 漢字 😀", "", "\x00\x7f don 't")


def test_exports_load(built: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built / "default" / "target")
    for name in FOLDERS:
        folder = built / "default" / name
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        assert model.dtype == torch.bfloat16
        assert model.config.tie_word_embeddings
        card = (folder / "README.md").read_text()
        assert "held out" in card and ("mostly on one kind" in card) == (name != "target")
        if name == "target":
            assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id == 0
            assert len(tokenizer) == model.config.vocab_size
            assert model(input_ids=torch.tensor([tokenizer.encode("def f(x):")])).logits.isfinite().all()
    generalist = AutoModelForCausalLM.from_pretrained(built / "work" / "drafts" / "generalist").config
    assert generalist.num_hidden_layers == 1 and generalist.vocab_size == model.config.vocab_size
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_held_out_package_is_never_trained_on(script: ModuleType, built: Path) -> None:
    training = list(script.data.read_documents(built / "work" / "train.jsonl"))
    assert {document.package for document in training} == {"one", "two"}
    assert not any("_Database" in document.text for document in training), "a copied file counts too"
    prompts = json.loads((built / "default" / "heldout_prompts.json").read_text())
    assert prompts and {prompt["package"] for prompt in prompts} == {"secret"}


def test_pause_loses_nothing(script: ModuleType, text_root: Path, built: Path, tmp_path: Path) -> None:
    """Signals in every stage change no bit of any model."""

    def pause(calls: list[Any]) -> None:
        if len(calls) in (2, 6, 12, 19, 26):
            os.kill(os.getpid(), signal.SIGTERM)

    with calls_of(script.train.Budget, "progress", pause):
        codes = [script.main([*options(text_root, tmp_path), "--resume"]) for _ in range(6)]
    assert codes == [130] * 5 + [0]
    for name in FOLDERS:
        file = Path("default") / name / "model.safetensors"
        assert (tmp_path / file).read_bytes() == (built / file).read_bytes(), name


def test_work_folder_of_another_run_is_refused(script: ModuleType, text_root: Path, built: Path) -> None:
    with pytest.raises(ValueError, match="pass --resume"):
        script.main(options(text_root, built))
    with pytest.raises(ValueError, match="differs from"):
        script.main([*options(text_root, built), "--resume", "--seed", "5"])


def test_permissive_licenses(script: ModuleType) -> None:
    for license, permissive in (("BSD-3-Clause AND Zlib", True), ("MPL-2.0 AND MIT", False), ("unknown", False)):
        assert script.data.is_permissive(license) == permissive
