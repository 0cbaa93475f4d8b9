"""Instructions that are written from documents: kinds of tasks, phrasings and packages."""

import ast
import importlib
import json
import shutil
import sys
import sysconfig
import tarfile
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from tests.helpers.scripts import load_script

WEIGHTS = Path(__file__).resolve().parents[2] / "weights"
PROSE = "Opening a box\n=============\n\n" + "The box is kept on a shelf. " * 12


@pytest.fixture(scope="module")
def written() -> Iterator[ModuleType]:
    """`treespec_training.instructions`, which is no part of the installed packages."""
    with mock.patch.object(sys, "path", [str(WEIGHTS), *sys.path]):
        yield importlib.import_module("treespec_training.instructions")


def test_every_kind_is_written_from_its_documents(written: ModuleType) -> None:
    data = importlib.import_module("treespec_training.data")
    documents = []
    for name, module in (("one", ast), ("two", tarfile)):
        code, prose = Path(str(module.__file__)).read_text(), PROSE.replace("box", f"{name} box")
        documents.append(data.Document(name, f"{name}/box.py", "code", "MIT", code))
        documents.append(data.Document(name, f"{name}/box.md", "prose", "MIT", prose))
    seen, held = (written.instructions(documents, held_out, per_kind=2, seed=0) for held_out in (False, True))
    kinds = [kind for kind in written.KINDS if kind not in written.TRAINING_ONLY]
    assert Counter(each.kind for each in seen) == dict.fromkeys(set(written.KINDS) - set(written.UNSEEN), 2)
    assert Counter((each.kind, each.package) for each in held) == {(k, p): 1 for k in kinds for p in ("one", "two")}
    for each in seen + held:
        phrasings = written.KINDS[each.kind][1 if each in seen else 2]
        assert any(each.text.startswith(p.split("{}")[0]) and each.text.endswith(p.split("{}")[1]) for p in phrasings)
    assert written.instructions(documents, False, 2, seed=0) == seen
    assert [each.kind for each in written.interleaved(held)[: len(kinds)]] == kinds


@pytest.mark.slow
def test_the_script_holds_out_packages_and_kinds(
    tmp_path: Path, written: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a few modules and packages: reading all that is installed takes a minute."""
    for module in ("asyncio", "email", "json", "http", "unittest", "logging", "xml"):
        shutil.copytree(Path(sysconfig.get_paths()["stdlib"]) / module, tmp_path / "stdlib" / module)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "stdlib")})
    some = {"networkx", "jinja2", "rich", "typer", "tqdm", "filelock", "safetensors"}
    installed = [each for each in metadata.distributions() if each.metadata["Name"].lower() in some]
    monkeypatch.setattr(metadata, "distributions", lambda: installed)
    command = ["write_instructions", "--out", str(tmp_path), "--per-kind", "12", "--heldout-per-kind", "4"]
    monkeypatch.setattr(sys, "argv", command)
    load_script(WEIGHTS / "write_instructions.py").main()
    train, held, texts = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout", "texts")
    )
    assert {each["kind"] for each in texts} == {"prose", "code"} and all(each["text"] for each in texts)
    code = sum(len(each["text"]) for each in texts if each["kind"] == "code")
    assert 0.3 < code / sum(len(each["text"]) for each in texts) < 0.5
    kinds = set(written.KINDS)
    assert Counter(each["kind"] for each in train) == dict.fromkeys(kinds - set(written.UNSEEN), 12)
    assert Counter(each["kind"] for each in held) == dict.fromkeys(kinds - set(written.TRAINING_ONLY), 4)
    packages = [{each["package"] for each in half} for half in (train, held)]
    assert len(packages[0]) > 3 and "networkx" in packages[1] and not {"networkx", "jinja2", "rich"} & packages[0]
