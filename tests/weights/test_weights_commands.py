"""The commands `grow` and `load`, and the measurement of loading."""

import math
import shutil
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import commands
from tests.helpers.models import embedded_draft, make_llama
from treespec_weights import (
    LLAMA,
    ModelShape,
    convert_checkpoint,
    default_folder,
    grow_checkpoint,
    grown_shape,
    inspect_checkpoint,
    load_weights,
    read_config,
    verify_checkpoint,
)
from treespec_weights.timing import touch


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
        (source, free, ["--size=6M", f"--seed={2**64}"], "--seed"),
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


def anonymous_bytes() -> int:
    """The process's anonymous memory."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) << 10


def anonymous_peak(run: Callable[[], object]) -> int:
    """The most anonymous memory that a call takes, sampled while it runs and before its result is freed."""
    before, samples, done = anonymous_bytes(), list[int](), threading.Event()

    def watch() -> None:
        while not done.wait(0.003):
            samples.append(anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        result = run()
        samples.append(anonymous_bytes())
        del result
    finally:
        done.set()
        thread.join()
    return max(samples) - before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's memory counters")
def test_the_memory_of_loading_and_converting(tmp_path: Path) -> None:
    """As stored, files are mapped; a cast needs a copy, and a conversion a few of 30 tensors."""
    source, folder = default_folder("target"), tmp_path / "model"
    shape = grown_shape(ModelShape.from_hf(read_config(source), LLAMA, source), 32_000_000)
    grow_checkpoint(source, folder, shape, seed=0)
    size, largest = 2 * shape.num_parameters(), 2 * max(map(math.prod, shape.parameters().values()))

    def load(dtype: torch.dtype | None) -> object:
        weights = load_weights(folder, shape, dtype=dtype)
        touch(weights.values())
        return weights

    assert anonymous_peak(lambda: load(None)) < 0.1 * size
    assert anonymous_peak(lambda: load(torch.float16)) < 1.1 * size
    convert = partial(convert_checkpoint, folder, tmp_path / "converted", dtype=torch.float16)
    assert anonymous_peak(convert) < 6 * largest
