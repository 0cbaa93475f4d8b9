"""Converting checkpoints: whole or not at all, and in the memory of one tensor."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import treespec_weights.writer
from tests.helpers.commands import program
from tests.helpers.conversions import Q, assert_same, contents, make, tensors_of
from treespec_weights import CheckpointError, OptionError, WriteError, convert_checkpoint

pytestmark = pytest.mark.slow


def test_the_destination_must_be_free(tmp_path: Path) -> None:
    source = make(tmp_path / "a")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for taken in (tmp_path / "full", tmp_path / "full" / "x", tmp_path / "link", source):
        with pytest.raises(OptionError, match="exists already; name a new folder"):
            convert_checkpoint(source, taken)
    with pytest.raises(OptionError, match=" is in "):
        convert_checkpoint(source, source / "b")
    with pytest.raises(FileNotFoundError, match=r"no such folder: .*nowhere"):
        convert_checkpoint(source, tmp_path / "nowhere" / "b")
    with pytest.raises(OptionError, match="name a new folder"):
        convert_checkpoint(source, "")
    (tmp_path / "empty").mkdir()
    convert_checkpoint(source, tmp_path / "empty")
    assert_same(source, tmp_path / "empty")
    assert not list(tmp_path.glob("*.partial"))


def test_a_value_that_the_dtype_has_no_room_for(tmp_path: Path) -> None:
    source = make(tmp_path / "a")
    for file in source.glob("*.safetensors"):
        save_file({name: tensor * (1e6 if name == Q else 1) for name, tensor in load_file(file).items()}, file)
    with pytest.raises(CheckpointError, match=r"layers.1.self_attn.q_proj.*is infinite in torch.float16"):
        convert_checkpoint(source, tmp_path / "b", dtype=torch.float16, shard_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    convert_checkpoint(source, tmp_path / "b", dtype=torch.bfloat16)


def test_files_that_link_outside_are_not_carried(tmp_path: Path) -> None:
    """Refused before hours of writing."""
    source, written = make(tmp_path / "a"), []
    (tmp_path / "secret.json").write_text("{}")
    (source / "added_tokens.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(CheckpointError, match=r"added_tokens.json': a link to .*outside"):
        convert_checkpoint(source, tmp_path / "b", on_bytes=lambda done, _: written.append(done))
    assert not written and not (tmp_path / "b").exists()


def interrupting_after(count: int) -> Any:
    """Progress that ends a conversion after some reports."""

    def advance(done: int, total: int) -> None:
        nonlocal count
        count -= 1
        if count == 0:
            raise KeyboardInterrupt

    return advance


@pytest.mark.parametrize("layout", [None, "phi3"])
def test_resume(tmp_path: Path, layout: str | None) -> None:
    source = make(tmp_path / "a")
    options: dict[str, Any] = {"layout": layout, "dtype": torch.bfloat16, "shard_bytes": 3000}
    convert_checkpoint(source, tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, tmp_path / "b", **options, on_bytes=interrupting_after(9))
    partial = tmp_path / "b.partial"
    assert not (tmp_path / "b").exists()
    finished = {path.name for path in partial.glob("*.safetensors")}
    assert 1 <= len(finished) < len(list((tmp_path / "whole").glob("*.safetensors")))
    assert {path.name for path in partial.iterdir()} == {*finished, "conversion.json"}

    def refused(message: str, source: Path = source, place: str = "b", resume: bool = True, **change: Any) -> None:
        with pytest.raises(OptionError, match=message):
            convert_checkpoint(source, tmp_path / place, **options | change, resume=resume)

    refused(r"b.partial' already exists.*--resume, or delete it", resume=False)
    for change in ({"dtype": None}, {"shard_bytes": 4000}, {"layout": "mistral"}):
        refused("has other options; delete the folder", **change)
    refused("has another source", make(tmp_path / "other"))
    damaged = partial / sorted(finished)[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (partial / f"{damaged.name}.part").write_bytes(b"of a killed process")
    report = convert_checkpoint(source, tmp_path / "b", **options, resume=True)
    assert set(report["resumed"]) == finished - {damaged.name}
    assert contents(tmp_path / "b") == contents(tmp_path / "whole") and not partial.exists()
    refused("no interrupted conversion", place="c")
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, tmp_path / "c", **options, on_bytes=interrupting_after(9))
    os.utime(sorted(source.glob("*.safetensors"))[0], ns=(1, 1))
    refused("has changed source files", place="c")
    (tmp_path / "c.partial" / "conversion.json").write_text("[]")
    refused("is not from a conversion", place="c")


def test_a_folder_that_is_put_in_the_way(tmp_path: Path) -> None:
    """A link in the place of the unfinished folder is neither followed nor removed."""
    source = make(tmp_path / "a")
    (tmp_path / "outside").mkdir()
    (tmp_path / "b.partial").symlink_to(tmp_path / "outside")
    for resume in (False, True):
        with pytest.raises(OptionError):
            convert_checkpoint(source, tmp_path / "b", resume=resume)
    assert not list((tmp_path / "outside").iterdir()) and (tmp_path / "b.partial").is_symlink()


def test_a_place_that_is_taken_meanwhile(tmp_path: Path) -> None:
    """The very last step fails; what it says of --resume holds."""
    source = make(tmp_path / "a")

    def taken(done: int, total: int) -> None:
        (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / "b" / "x").touch()

    with pytest.raises(WriteError, match=r"cannot be renamed(.|\n)*continue with --resume"):
        convert_checkpoint(source, tmp_path / "b", on_bytes=taken)
    (tmp_path / "b" / "x").unlink()
    report = convert_checkpoint(source, tmp_path / "b", resume=True)
    assert report["resumed"] == ["model.safetensors"] and not (tmp_path / "b" / "conversion.json").exists()
    assert_same(source, tmp_path / "b")


def test_a_disk_that_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second file; test_grow_leaves_nothing_half_written has the first."""
    source = make(tmp_path / "a")
    with monkeypatch.context() as patch, pytest.raises(WriteError, match=r"GB needed, 0.00 GB free"):
        patch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=0))
        convert_checkpoint(source, tmp_path / "b", shard_bytes=6000)
    write = treespec_weights.writer.write_tensor
    filling = mock.Mock(wraps=write, side_effect=[mock.DEFAULT] * 6 + [OSError(28, "No space left on device")])
    message = r"'model-000.*tensor '.*No space left on device(.|\n)*--resume"
    with mock.patch("treespec_weights.writer.write_tensor", filling), pytest.raises(WriteError, match=message):
        convert_checkpoint(source, tmp_path / "b", shard_bytes=6000)
    assert not (tmp_path / "b").exists() and not list(tmp_path.rglob("*.part"))
    convert_checkpoint(source, tmp_path / "b", shard_bytes=6000, resume=True)
    assert_same(source, tmp_path / "b")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's memory counters")
def test_memory_is_that_of_a_tensor(tmp_path: Path) -> None:
    """In a process of its own, whose malloc gives large blocks back at once."""
    source = make(tmp_path / "a", hidden_size=256, intermediate_size=4096, num_hidden_layers=4, vocab_size=64)
    make(tmp_path / "small")
    cases = [(None, None), (None, "bfloat16"), ("phi3", None), ("phi3", "float16")]
    script = (
        "import json, sys, torch\nfrom pathlib import Path\nfrom treespec_weights import convert_checkpoint\n"
        "root, peak = Path(sys.argv[1]), 0\n"
        "def anonymous():\n"
        "    return int(Path('/proc/self/status').read_text().split('RssAnon:')[1].split()[0]) * 1024\n"
        "def watch(done, total):\n    global peak\n    peak = max(peak, anonymous())\n"
        "for i, (layout, dtype) in enumerate(json.loads(sys.argv[2])):\n"
        "    options = {'layout': layout, 'dtype': dtype and getattr(torch, dtype), 'on_bytes': watch}\n"
        "    convert_checkpoint(root / 'small', root / f'small-{i}', **options)\n"  # imports, caches
        "    before, peak = anonymous(), 0\n"
        "    convert_checkpoint(root / 'a', root / f'{i}', **options)\n"
        "    print(peak - before)"
    )
    done = program("-c", script, str(tmp_path), json.dumps(cases), MALLOC_MMAP_THRESHOLD_="65536")
    assert done.returncode == 0, done.stderr
    for i, ((layout, dtype), peak) in enumerate(zip(cases, map(int, done.stdout.split()), strict=True)):
        tensors = tensors_of(tmp_path / str(i))
        largest = max(tensor.nbytes for tensor in tensors.values())
        assert sum(tensor.nbytes for tensor in tensors.values()) > 5 * largest
        # What is fused has the stored dtype, of twice the size here, before it is cast.
        held = 3 if layout and dtype else 1 if layout or dtype else 0
        assert peak < held * largest + (2 << 20), (layout, dtype)
    assert_same(source, tmp_path / "2")
