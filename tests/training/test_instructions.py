"""Instructions that are written from documents: kinds of tasks, phrasings and packages."""

import importlib
import json
import shutil
import sysconfig
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest

from tests.helpers.scripts import load_script

WEIGHTS = Path(__file__).resolve().parents[2] / "weights"


def test_the_script_holds_out_packages_kinds_and_phrasings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few modules and packages: reading all that is installed takes a minute."""
    for module in ("asyncio", "json", "unittest"):
        shutil.copytree(Path(sysconfig.get_paths()["stdlib"]) / module, tmp_path / "stdlib" / module)
    some = {"jinja2", "tqdm", "typer", "filelock", "safetensors"}
    installed = [each for each in metadata.distributions() if each.metadata["Name"].lower() in some]
    monkeypatch.syspath_prepend(WEIGHTS)
    written = importlib.import_module("treespec_training.instructions")
    data = importlib.import_module("treespec_training.data")
    arguments = ["--out", str(tmp_path), "--per-kind", "4", "--heldout-per-kind", "4"]
    documents = data.installed_documents(tmp_path / "stdlib", installed)
    load_script(WEIGHTS / "write_instructions.py").main(arguments, documents)
    train, held, texts = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout", "texts")
    )
    assert {each["kind"] for each in texts} == {"prose", "code"} and all(each["text"] for each in texts)
    code = sum(len(each["text"]) for each in texts if each["kind"] == "code")
    assert 0.3 < code / sum(len(each["text"]) for each in texts) < 0.6
    kinds = set(written.KINDS)
    assert Counter(each["kind"] for each in train) == dict.fromkeys(kinds - set(written.UNSEEN), 4)
    assert Counter(each["kind"] for each in held) == dict.fromkeys(kinds - set(written.TRAINING_ONLY), 4)
    for i, each in [(1, each) for each in train] + [(2, each) for each in held]:
        ends = [phrasing.split("{}") for phrasing in written.KINDS[each["kind"]][i]]
        assert any(each["prompt"].startswith(start) and each["prompt"].endswith(end) for start, end in ends)
    packages = [{each["package"] for each in half} for half in (train, held)]
    assert len(packages[0]) > 3 and "jinja2" not in packages[0] and packages[1] == {"jinja2", "stdlib"}  # of asyncio
