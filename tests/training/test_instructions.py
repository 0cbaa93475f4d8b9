"""Instructions that are written from documents: kinds of tasks, phrasings and packages."""

import importlib
import json
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from tests.helpers.scripts import load_script

CODE = '''"""A module about a box.

It explains at some length what a box is, how it is opened and closed, and why anybody would want to keep several of
them side by side on a shelf in a warm and dry room, where they are easy to find, and where nobody else looks for them.
"""


def open_box(name, force=False):
    """Open a box by its name."""
    box = find(name)
    if box.locked and not force:
        raise ValueError(name)
    box.lid = None
    return box


def _hidden(name):
    """Private, and so left out."""
    a = 1
    b = 2
    c = 3
    d = 4
    return a + b + c + d
'''
PROSE = "Opening a box\n=============\n\n" + "The box is kept on a shelf. " * 12


@pytest.fixture(scope="module")
def written() -> Iterator[ModuleType]:
    """`treespec_training.instructions`, which is no part of the installed packages."""
    with mock.patch.object(sys, "path", [str(Path(__file__).resolve().parents[2] / "weights"), *sys.path]):
        yield importlib.import_module("treespec_training.instructions")


def document(path: str, text: str) -> Any:
    data = importlib.import_module("treespec_training.data")
    return data.Document(path.split("/")[0], path, "code" if path.endswith("py") else "prose", "MIT", text)


def test_every_kind_is_written_from_its_documents(written: ModuleType) -> None:
    documents = [
        document(f"{package}/box.{suffix}", text.replace("box", f"{package}box"))
        for package in ("one", "two")
        for suffix, text in (("py", CODE), ("md", PROSE))
    ]
    seen = written.instructions(documents, held_out=False, per_kind=2, seed=0)
    held = written.instructions(documents, held_out=True, per_kind=2, seed=0)
    kinds = [kind for kind in written.KINDS if kind not in written.TRAINING_ONLY]
    assert Counter(each.kind for each in seen) == dict.fromkeys(set(written.KINDS) - set(written.UNSEEN), 2)
    assert Counter(each.kind for each in held) == dict.fromkeys(kinds, 2)
    assert {(each.kind, each.package) for each in held} == {(k, p) for k in kinds for p in ("one", "two")}
    texts = {each.kind: each.text for each in seen}
    assert "box by its name" in texts["write"]
    assert '"Opening a' in texts["topic"]
    for each in seen + held:
        phrasings = written.KINDS[each.kind][1 if each in seen else 2]
        assert any(each.text.startswith(p.split("{}")[0]) and each.text.endswith(p.split("{}")[1]) for p in phrasings)
        assert "_hidden" not in each.text
    half = next(each.text for each in held if each.kind == "continue")
    assert "box = find(name)" in half and "return " not in half
    assert written.instructions(documents, False, 2, seed=0) == seen
    assert [each.kind for each in written.interleaved(held)[: len(kinds)]] == kinds


def test_raw_texts_hold_docstrings_and_a_share_of_the_code(written: ModuleType) -> None:
    docstring = " ".join(["The box is kept on a shelf."] * 6)
    code = document("one/box.py", f'"""{docstring}"""\n\n\ndef f():\n    """Short."""\n')
    broken, short = document("one/broken.py", "def (:"), document("one/box.md", "A box.")
    found = list(written.raw_texts([code, broken, short, code, code]))
    prose = [text for kind, text in found if kind == "prose"]
    assert prose == [docstring, "A box.", docstring, docstring]
    codes = [text for kind, text in found if kind == "code"]
    assert codes == [code.text, "def (:", code.text], "stops with the document that exceeds the share"
    share = sum(map(len, codes)) / sum(len(text) for _, text in found)
    assert written.CODE_SHARE < share < written.CODE_SHARE + 0.2


@pytest.mark.slow
def test_the_script_holds_out_packages_and_kinds(
    tmp_path: Path, written: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a few modules and packages: reading all that is installed takes a minute."""
    for module in ("asyncio", "email", "json", "http", "unittest", "logging", "xml"):
        shutil.copytree(Path(sysconfig.get_paths()["stdlib"]) / module, tmp_path / "stdlib" / module)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "stdlib")})
    some = {"networkx", "jinja2", "rich", "typer", "tqdm", "filelock", "safetensors", "numpy"}
    installed = [each for each in metadata.distributions() if each.metadata["Name"].lower() in some]
    monkeypatch.setattr(metadata, "distributions", lambda: installed)
    script = load_script(Path(__file__).resolve().parents[2] / "weights" / "write_instructions.py")
    command = ["write_instructions", "--out", str(tmp_path), "--per-kind", "12", "--heldout-per-kind", "4"]
    monkeypatch.setattr(sys, "argv", command)
    script.main()
    train, held = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    )
    texts = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert {each["kind"] for each in texts} == {"prose", "code"} and all(each["text"] for each in texts)
    kinds = set(written.KINDS)
    assert Counter(each["kind"] for each in train) == dict.fromkeys(kinds - set(written.UNSEEN), 12)
    assert Counter(each["kind"] for each in held) == dict.fromkeys(kinds - set(written.TRAINING_ONLY), 4)
    packages = [{each["package"] for each in half} for half in (train, held)]
    assert len(packages[0]) > 3 and "networkx" in packages[1] and not {"networkx", "jinja2", "rich"} & packages[0]
