"""The training script, run whole on a toy: export, resume without loss, held-out packages."""

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.architectures import quick_start
from tests.helpers.exactness import threads
from tests.helpers.scripts import load_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "weights" / "train_default.py"
FOLDERS = ("target", "ssm-1", "ssm-2", "ssm-3")
WORDS = ["alpha", "beta", "gamma", "delta", "value", "index", "node", "tree", "token", "draft", "path", "count"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT)


@pytest.fixture(scope="module", autouse=True)
def toy_runs() -> Iterator[None]:
    """Toy shapes gain nothing from threads; engines that measure drafts start quickly, and decode little."""
    once = mock.patch("treespec.training.report.REPEATS", 1)
    with threads(1), quick_start(), once, mock.patch("treespec.training.run.REPORT_PROMPTS", 2):
        yield


@pytest.fixture(scope="module")
def text_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three packages of generated Python; every file of `secret` names its package on every line."""
    root = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    for package in ("one", "two", "secret"):
        for file in range(6):
            lines = ["import os\n"]
            for number in range(40):
                a, b, c = rng.sample(WORDS, 3)
                mark = f"  # {package}" if package == "secret" else ""
                manual = f'    """The {a} of {b}: {" ".join(rng.choices(WORDS, k=20))}{mark}."""{mark}\n'
                body = f"    return {c} + {rng.randrange(100)}{mark}\n\n"
                lines.append(f"def {a}_{b}_{number}({c}):{mark}\n{manual}{body}")
            path = root / package / f"module_{file}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(lines))
    shared = (root / "secret" / "module_0.py").read_text()
    (root / "one" / "copied.py").write_text(shared)
    return root


def options(text_root: Path, folder: Path) -> list[str]:
    toy = "--tiny --max-steps 4 --draft-tokens 600 --no-compile --device cpu --prompts 6 --new-tokens 8".split()
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
    assert not any("secret" in document.text for document in training), "a copied file counts too"
    prompts = json.loads((built / "default" / "heldout_prompts.json").read_text())
    assert prompts and {prompt["package"] for prompt in prompts} == {"secret"}


def test_report(built: Path) -> None:
    report = json.loads((built / "default" / "report.json").read_text())
    assert report["drafts"]["lesson_tokens"] >= 600 and report["drafts"]["minutes"] > 0
    assert set(report["agreement"]) == {*FOLDERS[1:], "union"}
    assert set(report["agreement_by_kind"]) == {"code", "prose", "data"}
    for table in (report["agreement"], *report["agreement_by_kind"].values()):
        for name, shares in table.items():
            assert 0 <= shares.get("only", 0) <= shares["top1"] <= shares["top2"] <= shares["top4"] <= 1
            assert shares["top1"] <= table["union"]["top1"], name
    assert report["target"]["steps"] == 5, "two of the shallow model, three of the deep one"


def test_pause_loses_nothing(
    script: ModuleType, text_root: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signals in every stage change no bit of any model."""
    progress, calls = script.train.Budget.progress, []

    def signalling(budget: object, step: int, elapsed: float) -> float:
        calls.append(step)
        if len(calls) in (2, 6, 12, 19, 26):
            os.kill(os.getpid(), signal.SIGTERM)
        return progress(budget, step, elapsed)

    monkeypatch.setattr(script.train.Budget, "progress", signalling)
    codes = [script.main([*options(text_root, tmp_path), "--resume"]) for _ in range(6)]
    assert codes == [130] * 5 + [0]
    for name in FOLDERS:
        file = Path("default") / name / "model.safetensors"
        assert (tmp_path / file).read_bytes() == (built / file).read_bytes(), name


def test_new_drafts_for_an_earlier_target(script: ModuleType, text_root: Path, built: Path, tmp_path: Path) -> None:
    target = built / "default" / "target"
    assert script.main([*options(text_root, tmp_path), "--target", str(target)]) == 0
    out = tmp_path / "default"
    assert sorted(folder.name for folder in out.iterdir() if folder.is_dir()) == sorted(FOLDERS[1:])
    found, earlier = (json.loads((folder / "report.json").read_text()) for folder in (out, built / "default"))
    assert "steps" not in found["target"] and found["target"]["held_out_loss"] == earlier["target"]["held_out_loss"]
    assert found["agreement"] == earlier["agreement"], "the same target, lessons and seed"


def test_work_folder_of_another_run_is_refused(script: ModuleType, text_root: Path, built: Path) -> None:
    with pytest.raises(ValueError, match="pass --resume"):
        script.main(options(text_root, built))
    with pytest.raises(ValueError, match="differs from"):
        script.main([*options(text_root, built), "--resume", "--seed", "5"])


def test_permissive_licenses(script: ModuleType) -> None:
    for license, permissive in (("BSD-3-Clause AND Zlib", True), ("MPL-2.0 AND MIT", False), ("unknown", False)):
        assert script.data.is_permissive(license) == permissive
