"""Mutated checkpoints: each loads as described or is refused by one of our errors, at once."""

import json
import os
import random
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.conversions import counted, loaded
from tests.helpers.models import make_llama
from treespec_weights import (
    CheckpointError,
    ModelShape,
    convert_checkpoint,
    family_of,
    inspect_checkpoint,
    load_weights,
    read_config,
    verify_checkpoint,
)

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 12, "intermediate_size": 10, "head_dim": 6, "vocab_size": 17}
MOST_CALLS = 250_000  # of functions, for one folder: five times what any of thousands took


def mutate(rng: random.Random, data: bytes) -> bytes:
    """One to four random edits: bytes changed, cut out, repeated, or the end cut off."""
    edited = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(edited) + 1)
        match rng.randrange(5):
            case 0:
                edited[at : at + 1] = bytes([rng.randrange(256)])
            case 1 if at < len(edited):
                edited[at] ^= 1 << rng.randrange(8)
            case 2:
                del edited[at : at + rng.randint(1, 40)]
            case 3:
                edited[at:at] = edited[at : at + rng.randint(1, 40)]
            case 4:
                del edited[at:]
    return bytes(edited)


def mutate_json(rng: random.Random, document: Any) -> Any:
    """Replaces one random value, or drops, renames or repeats an entry, somewhere in a JSON document."""
    values: list[Any] = [None, True, -1, 0, 2**31, 2**63, 2**64, 10**30, 1.5, "", "../x", "U8", "\ud800", [], {}, [0]]
    if not isinstance(document, dict | list) or not document or rng.random() < 0.1:
        return rng.choice(values)
    copy = document.copy()
    key = rng.choice(list(copy)) if isinstance(copy, dict) else rng.randrange(len(copy))
    match rng.randrange(4):
        case 0:
            del copy[key]
        case 1 if isinstance(copy, dict):
            copy[rng.choice(["", "x", "model.norm.weight", "\x00"])] = copy.pop(key)
        case 2 if isinstance(copy, list):
            copy.insert(key, copy[key])
        case _:
            copy[key] = mutate_json(rng, copy[key])
    return copy


def split_header(data: bytes) -> tuple[Any, bytes]:
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join_header(header: Any, body: bytes) -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + body


def misplace(rng: random.Random, folder: Path) -> dict[Path, bytes]:
    """What an index, the shards or the folder can get wrong about each other; returns what was there before."""
    shards = sorted(folder.glob("*.safetensors"))
    one, other = rng.choice(shards), rng.choice(shards)
    index = folder / "model.safetensors.index.json"
    before = {path: path.read_bytes() for path in (one, other, index) if path.exists()}
    match rng.randrange(5):
        case 0:  # one shard in the place of another
            one.write_bytes(before[other])
        case 1:
            one.unlink()
        case 2:  # a tensor of one shard in another, too
            (header, body), (added, more) = split_header(before[one]), split_header(before[other])
            name = rng.choice([name for name in added if name != "__metadata__"])
            start, end = added[name]["data_offsets"]
            where = rng.choice([len(body), max(0, len(body) - 4), 0])  # behind, over the last tensor, over the first
            header[rng.choice([name, f"{name}.x"])] = added[name] | {"data_offsets": [where, where + end - start]}
            one.write_bytes(join_header(header, body + more[start:end]))
        case 3 if index.exists():
            weight_map = json.loads(before[index])["weight_map"]
            places = ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "x.bin", one.name, other.name, None]
            for name in rng.sample(sorted(weight_map), rng.randint(1, 3)):
                weight_map[name] = rng.choice(places)
            index.write_text(json.dumps({"weight_map": weight_map}))
        case _:
            config = json.loads((folder / "config.json").read_text())
            before[folder / "config.json"] = (folder / "config.json").read_bytes()
            key = rng.choice([key for key in config if isinstance(config[key], int)])
            config[key] = rng.choice([not config[key], config[key] + 1, config[key] * 2, -config[key]])
            (folder / "config.json").write_text(json.dumps(config))
    return before


def mutate_one(rng: random.Random, folder: Path) -> dict[Path, bytes]:
    """Damages a checkpoint folder somewhere; returns what was there before."""
    if rng.random() < 0.25:
        return misplace(rng, folder)
    path = rng.choice(sorted(folder.iterdir()))
    data = path.read_bytes()
    if path.suffix == ".safetensors" and rng.random() < 0.5:
        header, body = split_header(data)
        path.write_bytes(join_header(mutate_json(rng, header), body))
    elif path.suffix == ".json" and rng.random() < 0.5:
        path.write_text(json.dumps(mutate_json(rng, json.loads(data))))
    elif path.suffix == ".safetensors":  # most edits in the header, where they matter
        cut = rng.choice([8, 64, len(data) - len(split_header(data)[1]), len(data)])
        path.write_bytes(mutate(rng, data[:cut]) + data[cut:])
    else:
        path.write_bytes(mutate(rng, data))
    return {path: data}


def try_everything(rng: random.Random, folder: Path) -> bool:
    """Opens, loads and verifies a folder, and describes and converts every third; whether it could be loaded."""
    weights: dict[str, torch.Tensor] | None = None
    with refusing():
        config = read_config(folder)
        shape = ModelShape.from_hf(config, family_of(config))
        weights = load_weights(folder, shape, dtype=torch.bfloat16)
        assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == shape.parameters()
    verification = verify_checkpoint(folder)
    assert not verification.ok or weights is not None
    if rng.random() < 2 / 3:  # the rest takes the most time
        return weights is not None
    with refusing():
        inspect_checkpoint(folder)
    result = folder.parent / "result"
    with refusing():
        convert_checkpoint(folder, result, dtype=torch.bfloat16, shard_bytes=rng.choice([1, 3000, 10**9]))
        assert weights is not None
        converted = loaded(result)
        for name, tensor in weights.items():
            assert torch.equal(converted[name].view(torch.int16), tensor.view(torch.int16)), name
        shutil.rmtree(result)
    return weights is not None


@contextmanager
def refusing() -> Iterator[None]:
    """What the block does may be refused by one of our errors."""
    try:
        yield
    except CheckpointError as error:
        assert error.problems and str(error)


@pytest.mark.parametrize("sharded", [False, True])
def test_fuzz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool) -> None:
    """Mutated folders: loaded and converted as described, or refused by one of our errors, without ado.

    TREESPEC_FUZZ_COUNT=100000 asks for as many of either kind.
    """
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # nobody needs these files after a power cut
    folder = tmp_path / "model"
    make_llama(folder, 0, max_shard_size="3KB" if sharded else "1GB", tie_word_embeddings=True, **SIZES)
    assert len(list(folder.glob("*.safetensors"))) == (4 if sharded else 1)
    for outside in ("x.safetensors", "x"):  # what a path that leads outside would find, and must not touch
        (tmp_path / outside).write_bytes(next(folder.glob("*.safetensors")).read_bytes())
    around = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path != folder}
    count = int(os.environ.get("TREESPEC_FUZZ_COUNT", "250"))
    rng = random.Random(int(sharded))
    accepted = 0
    for _ in range(count):
        before = mutate_one(rng, folder)
        damaged = {path: path.read_bytes() for path in folder.iterdir()}
        was_loaded, calls = counted(try_everything, rng, folder)
        accepted += was_loaded
        assert calls < MOST_CALLS, {path.name: data[:500] for path, data in damaged.items()}
        assert {path: path.read_bytes() for path in folder.iterdir()} == damaged, "the source was written to"
        for path, data in before.items():
            path.write_bytes(data)
        assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path != folder} == around
    assert 0 < accepted < count / 2  # flips of values pass, most else must not


def test_fuzzed_configs_in_another_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutated configs, converted to another family's layout, which asks transformers' config classes."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    folder = tmp_path / "model"
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    make_llama(folder, 0, num_hidden_layers=1, rope_parameters=rope, **SIZES)
    original, rng, accepted = (folder / "config.json").read_text(), random.Random(2), 0
    for _ in range(int(os.environ.get("TREESPEC_FUZZ_COUNT", "100"))):
        (folder / "config.json").write_text(json.dumps(mutate_json(rng, json.loads(original))))
        with refusing():
            convert_checkpoint(folder, tmp_path / "result", layout="mistral")
            shutil.rmtree(tmp_path / "result")
            accepted += 1
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert accepted
