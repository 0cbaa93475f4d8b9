"""The commands `grow` and `load`, and the measurement of loading."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import commands
from tests.helpers.models import embedded_draft, make_llama
from treespec_weights import inspect_checkpoint, verify_checkpoint


def run(*arguments: object, code: int = 0) -> Any:
    return commands.run("weights", *arguments, "--json", code=code).document


def text(*arguments: object) -> str:
    ran = commands.run("weights", *arguments)
    assert ran.stderr == ""
    return ran.stdout


@pytest.mark.slow
def test_grow(tmp_path: Path) -> None:
    report = run("grow", embedded_draft("ssm-1"), tmp_path / "a", "--size=6M", "--seed=3")
    assert abs(report["parameters"] / 6e6 - 1) < 0.1 and report["problems"] == 0
    assert verify_checkpoint(tmp_path / "a").ok
    assert report["vocabulary"] == inspect_checkpoint(embedded_draft("ssm-1"))["vocabulary"]
    run("grow", embedded_draft("ssm-1"), tmp_path / "b", "--size=6M", "--seed=3")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    padded = run("grow", embedded_draft("ssm-1"), tmp_path / "c", "--size=24M", "--vocab=5000")
    assert padded["shape"]["vocab_size"] == 5000 and padded["unused_ids"] == 5000 - padded["vocabulary"]["max_id"] - 1
    assert "ids unused" in text("inspect", tmp_path / "c")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c"}


def test_grow_refuses(tmp_path: Path) -> None:
    source, broken = (shutil.copytree(embedded_draft("ssm-1"), tmp_path / name) for name in ("a", "broken"))
    (broken / "tokenizer.json").write_text('{"model": {"vocab": {"a": "b"}}}')
    run("convert", source, tmp_path / "q", "--quantize=int8")
    assert run("inspect", tmp_path / "q")["quantization"] == "compressed-tensors int8"
    assert "  quantised   compressed-tensors int8\n" in text("inspect", tmp_path / "q")
    free = tmp_path / "b"
    for folder, new, options, message in (
        (source, free, ["--size=big"], "--size big: valid are sizes such as 120M"),
        (source, free, ["--size=1K"], "--size 0.001M: this model can grow to"),
        (source, free, ["--size=6M", "--vocab=10"], "--vocab 10: the model has"),
        (source, free, [], "--size"),
        (source, source / "b", ["--size=6M"], " is in "),
        (source, free, ["--size=999999B"], "GB needed"),
        (broken, free, ["--size=6M"], "tokenizer.json"),
        (tmp_path / "q", free, ["--size=6M"], r"is quantised (compressed-tensors int8)"),
    ):
        assert message in run("grow", folder, new, *options, code=2)["error"]["message"]
    assert {path.name for path in tmp_path.iterdir()} == {"a", "broken", "q"}, "refused, and written all the same"


def test_load(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "a", 0)
    report = run("load", folder, "--repeats=2", "--dtype=bfloat16")
    assert report["bytes"] == inspect_checkpoint(folder)["bytes"]
    assert (report["dtype"], report["device"], report["repeats"], report["cold"]) == ("bfloat16", "cpu", 2, False)
    for row in (report["load_weights"], report["plain"]):
        assert len(row["seconds"]) == 2 and row["gb_per_second"] == report["bytes"] / row["median"] / 1e9
    assert "of the plain read's speed" in text("load", folder, "--repeats=1")
    if hasattr(sys.modules["os"], "posix_fadvise"):
        assert run("load", folder, "--cold", "--repeats=1")["cold"] is True
    for arguments in (["--dtype=int4"], ["--device=tpu9"], ["--device=meta"], ["--device=cuda:99"]):
        assert run("load", folder, *arguments, code=2)["error"]["type"] == "OptionError"
    assert run("load", folder, "--repeats=0", code=2)["error"]["type"] == "UsageError"
    (folder / "model.safetensors").unlink()
    assert run("load", folder, code=2)["error"]["type"] == "CheckpointError"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's memory counters")
def test_the_memory_of_loading_and_converting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As stored, files are mapped; a cast needs a copy, and a conversion a few tensors of 30."""
    monkeypatch.syspath_prepend(commands.ROOT / "perf")
    import loading

    document = loading.measure(0.064, tmp_path)
    assert 0.9 < document["bytes"] / 64e6 < 1.1 and document["files"] == 1
    stored, cast, converted = document["memory"].values()
    assert stored["of_size"] < 0.1 and cast["of_size"] < 1.1 and converted["of_largest_tensor"] < 6
    assert "MB anonymous" in loading.show(document) and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit, match="GB of disk are needed"):
        loading.measure(10**6, tmp_path)
