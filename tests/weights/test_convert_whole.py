"""Converting checkpoints: whole or not at all; test_weights_commands.py has the memory that it takes."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.conversions import assert_same, contents, full_disk, make, no_file_above
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
    (tmp_path / "b.partial").symlink_to(tmp_path / "full")  # neither followed nor removed
    for resume in (False, True):
        with pytest.raises(OptionError):
            convert_checkpoint(source, tmp_path / "b", resume=resume)
    (tmp_path / "b.partial").unlink()
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


def test_files_that_link_outside_are_not_carried(tmp_path: Path) -> None:
    """Refused before hours of writing."""
    source, written = make(tmp_path / "a"), []
    (tmp_path / "secret.json").write_text("{}")
    (source / "added_tokens.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(CheckpointError, match=r"added_tokens.json': a link to .*outside"):
        convert_checkpoint(source, tmp_path / "b", on_bytes=lambda done, _: written.append(done))
    assert not written and not (tmp_path / "b").exists()


@pytest.mark.parametrize("layout", [None, "phi3"])
def test_resume(tmp_path: Path, layout: str | None) -> None:
    source = make(tmp_path / "a")
    options: dict[str, Any] = {"layout": layout, "dtype": torch.bfloat16, "shard_bytes": 3000}
    convert_checkpoint(source, tmp_path / "whole", **options)
    interrupted = mock.Mock(side_effect=([None] * 8 + [KeyboardInterrupt]) * 2)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, tmp_path / "b", **options, on_bytes=interrupted)
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
        convert_checkpoint(source, tmp_path / "c", **options, on_bytes=interrupted)
    os.utime(sorted(source.glob("*.safetensors"))[0], ns=(1, 1))
    refused("has changed source files", place="c")
    (tmp_path / "c.partial" / "conversion.json").write_text("[]")
    refused("is not from a conversion", place="c")


def test_a_disk_that_fills(tmp_path: Path) -> None:
    source = make(tmp_path / "a", intermediate_size=400)  # larger than a buffer, in files behind the first
    with full_disk(), pytest.raises(WriteError, match=r"GB needed, 0.00 GB free"):
        convert_checkpoint(source, tmp_path / "b", shard_bytes=6000)
    message = r"'model-000.*tensor '.*File too large(.|\n)*--resume"
    with no_file_above(20_000), pytest.raises(WriteError, match=message):
        convert_checkpoint(source, tmp_path / "b", shard_bytes=6000)
    assert not (tmp_path / "b").exists() and not list(tmp_path.rglob("*.part"))
    convert_checkpoint(source, tmp_path / "b", shard_bytes=6000, resume=True)
    assert_same(source, tmp_path / "b")
