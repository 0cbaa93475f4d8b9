"""A checkpoint folder: what opens, and every kind of file, index and link that must not."""

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from treespec_weights import Checkpoint, CheckpointError, read_config

INDEX = "model.safetensors.index.json"
Q = "model.layers.1.self_attn.q_proj.weight"


def small_tensors() -> dict[str, Tensor]:
    return {Q: torch.arange(288.0).view(24, 12), "model.norm.weight": torch.ones(12)}


def opens(folder: Path) -> None:
    """Asserts that a folder opens and gives its tensors."""
    tensors = small_tensors()
    with Checkpoint.open(folder) as checkpoint:
        assert set(checkpoint.tensors) == set(tensors)
        assert torch.equal(checkpoint.tensor(Q), tensors[Q])


def write(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(small_tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def write_sharded(folder: Path, shards: dict[str, dict[str, Tensor]], weight_map: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    weight_map = weight_map or {name: file for file, tensors in shards.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def refused(folder: Path, *parts: str, problems: int | None = None) -> CheckpointError:
    """Asserts that opening is refused with a message that holds every part."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    assert problems is None or len(caught.value.problems) == problems, str(caught.value)
    return caught.value


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write_raw(path: Path, header: dict[str, Any], data: bytes) -> None:
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def test_tensors_are_read_lazily_and_aligned(tmp_path: Path) -> None:
    opens(write(tmp_path))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert (checkpoint.info(Q).shape, checkpoint.dtype(Q)) == ((24, 12), torch.float32)
        with pytest.raises(CheckpointError, match=r"q_pro'.*the nearest name is .*q_proj"):
            checkpoint.tensor("model.layers.1.self_attn.q_pro")
        kept = checkpoint.tensor(Q)
        assert checkpoint.tensor(Q, torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.tensor(Q)
    assert torch.equal(kept, small_tensors()[Q])
    values = torch.arange(3.0)
    header = {"p": entry("U8", [1], 0, 1), "a": entry("F32", [3], 1, 13)}
    write_raw(tmp_path / "model.safetensors", header, b"\0" + values.numpy().tobytes())
    with Checkpoint.open(tmp_path) as checkpoint:
        tensor = checkpoint.tensor("a")
    assert tensor.data_ptr() % 4 == 0
    assert torch.equal(tensor, values)


# --- wrong files


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such checkpoint folder: '.*nope'"):
        Checkpoint.open(tmp_path / "nope")
    with pytest.raises(FileNotFoundError, match="''"):
        Checkpoint.open("")
    with pytest.raises(FileNotFoundError):
        Checkpoint.open("a\0b")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="pass the folder"):
        Checkpoint.open(tmp_path / "file")


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").mkdir()
    refused(tmp_path, "'model.safetensors': a folder, where a file should be", problems=1)
    (tmp_path / "model.safetensors").rmdir()
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    denied = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr("treespec_weights.files.open", denied, raising=False)
    refused(tmp_path, r"'model.safetensors': cannot be opened (Permission denied)", problems=1)


def test_no_safetensors(tmp_path: Path) -> None:
    refused(tmp_path, "'model.safetensors'", INDEX)
    (tmp_path / "pytorch_model.bin").touch()
    refused(tmp_path, "pytorch_model.bin", "pickles are not loaded; convert to safetensors")
    (tmp_path / "other.safetensors").touch()
    refused(tmp_path, "must have this name", "other.safetensors")
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps({"a": 1}))
    refused(tmp_path, "'model.safetensors'", "not a valid safetensors file", "download it again")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    refused(tmp_path, "not a valid safetensors file", "it is a Git LFS pointer; run `git lfs pull`")
    write_raw(tmp_path / "model.safetensors", {}, b"")
    refused(tmp_path, "'model.safetensors'", "holds no tensor")
    write_raw(tmp_path / "model.safetensors", {"a": entry("F32", [0, 2**64 - 1], 0, 0)}, b"")
    refused(tmp_path, "'model.safetensors'", "not a valid safetensors file", "impossible shape", problems=1)


@pytest.mark.parametrize(
    "shard",
    [f"{path}.safetensors" for path in ("../x", "/etc/x", "a/b", "a\\b", "C:x", "x\0", "x\n", "\ud800")]
    + ["..", "", 3, None, ["x"], {"y": 1}],
)
def test_index_that_leads_outside(tmp_path: Path, shard: Any) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    folder = tmp_path / "model"
    write_sharded(folder, {"m.safetensors": {"b": torch.ones(2)}}, {"a": shard, "b": "m.safetensors"})
    refused(folder, INDEX, repr(shard), "plain file name in the same folder", problems=1)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "duplicate keys: 'a'"),
        ('{"weight_map": {"a": "x.bin"}}', "'x.bin': pickles are not loaded"),
        ('{"weight_map": {"a": "x.gguf"}}', "'x.gguf', which does not end in .safetensors"),
        ('{"weight_map": {"a": ' + "1" * 5000 + "}}", "not usable JSON"),
    ],
)
def test_malformed_index(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / INDEX).write_bytes(text.encode(errors="surrogateescape"))
    refused(tmp_path, INDEX, part)


def test_index_and_shards_that_disagree_are_listed_at_once(tmp_path: Path) -> None:
    shards = {"a.safetensors": ["x", "twice", "extra"], "b.safetensors": ["twice", "y"]}
    tensors = {file: {name: torch.ones(50) for name in names} for file, names in shards.items()}
    places = {"x": "a", "twice": "a", "y": "a", "gone": "b", "z": "c", "w": "../d"}
    weight_map = {name: f"{file}.safetensors" for name, file in places.items()}
    error = refused(
        write_sharded(tmp_path, tensors, weight_map),
        "'../d.safetensors'",
        "'c.safetensors': no such file",
        "'y': the index places it in 'a.safetensors', which does not hold it, but 'b.safetensors' does",
        "'twice': duplicate: in 'a.safetensors' and in 'b.safetensors'",
        "'extra': in 'a.safetensors', but not in",
        problems=5,
    )
    assert pickle.loads(pickle.dumps(error)).problems == error.problems
    write_sharded(tmp_path, {"a.safetensors": {"x": torch.ones(50)}, "b.safetensors": {"y": torch.ones(50)}})
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    refused(tmp_path, "keep one of the two", problems=1)
    (tmp_path / "model.safetensors").unlink()
    for file in shards:
        (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:-7])
    refused(tmp_path, "'a.safetensors': not a valid safetensors file", "'b.safetensors': not a valid", problems=2)


# --- links


def test_links_are_followed_inside_the_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    path, outside = folder / "model.safetensors", tmp_path / "secret.safetensors"
    path.rename(folder / "blob")
    path.symlink_to("blob")
    (tmp_path / "link").symlink_to(folder)
    opens(tmp_path / "link")
    save_file(small_tensors(), outside)
    path.unlink()
    path.symlink_to(outside)
    refused(folder, "'model.safetensors'", repr(str(outside)), "outside of the folder")
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json'.*outside of the folder"):
        read_config(folder.resolve())


def test_broken_and_circular_links_and_pipes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for target, problem in (("nowhere", "no such file"), (path.name, "cannot be opened")):
        path.symlink_to(target)
        refused(tmp_path, f"'model.safetensors': {problem}")
        path.unlink()
    os.mkfifo(path)
    refused(tmp_path, "'model.safetensors': not a regular file")


def hub_repo(cache: Path, name: str) -> Path:
    """A repository as the Hugging Face cache lays it out; returns the snapshot."""
    blobs, snapshot = cache / name / "blobs", cache / name / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    write(blobs)
    for file in ("model.safetensors", "config.json"):
        (blobs / file).rename(blobs / f"sha-of-{file}")
        (snapshot / file).symlink_to(Path("../../blobs") / f"sha-of-{file}")
    return snapshot


def test_snapshots_of_the_hubs_cache_open_and_stay_in_their_repository(tmp_path: Path) -> None:
    snapshot, other = hub_repo(tmp_path, "models--org--a"), hub_repo(tmp_path, "models--org--b")
    (tmp_path / "link").symlink_to(snapshot)
    (snapshot / "sub").mkdir()
    (snapshot / "sub" / "model.safetensors").symlink_to("../../../blobs/sha-of-model.safetensors")
    for folder in (snapshot, tmp_path / "link", snapshot / "sub"):
        opens(folder)
    for target in (other / "model.safetensors", tmp_path / "models--org--b/blobs/sha-of-model.safetensors"):
        (snapshot / "model.safetensors").unlink()
        (snapshot / "model.safetensors").symlink_to(target)
        refused(snapshot, "'model.safetensors'", "outside of the folder")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../blobs/sha-of-model.safetensors")
    blobs = tmp_path / "models--org--a" / "blobs"
    blobs.rename(tmp_path / "moved")
    blobs.symlink_to(tmp_path / "moved")
    refused(snapshot, "outside of the folder")
