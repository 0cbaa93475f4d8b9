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

from tests.helpers.conversions import contents
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


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Bytes put in the place of others, or of all that follows."""
    at, count = rng.randrange(len(data) + 1), rng.choice([0, 1, 1, 8, 40, len(data)])
    return data[:at] + rng.randbytes(rng.choice([0, 1, 1, 8])) + data[at + count :]


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


def mutate_one(rng: random.Random, folder: Path) -> tuple[Path, bytes]:
    """Damages a file of a checkpoint folder; returns what was there before."""
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
    return path, data


def try_everything(rng: random.Random, folder: Path) -> bool:
    """Opens, loads, verifies, describes and converts a folder; whether it could be loaded."""
    weights: dict[str, torch.Tensor] | None = None
    with refusing():
        config = read_config(folder)
        shape = ModelShape.from_hf(config, family_of(config))
        weights = load_weights(folder, shape, dtype=torch.bfloat16)
        assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == shape.parameters()
    verification = verify_checkpoint(folder)
    assert not verification.ok or weights is not None
    with refusing():
        inspect_checkpoint(folder)
    result = folder.parent / "result"
    with refusing():
        options = {"layout": rng.choice([None, "mistral"]), "shard_bytes": rng.choice([1, 3000, 10**9])}
        convert_checkpoint(folder, result, dtype=torch.bfloat16, **options)
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
def test_fuzz(tmp_path: Path, sharded: bool) -> None:
    """Mutated folders: loaded and converted, or refused by one of our errors.

    TREESPEC_FUZZ_COUNT=100000 asks for as many of either kind.
    """
    folder = tmp_path / "model"
    make_llama(folder, 0, max_shard_size="3KB" if sharded else "1GB", tie_word_embeddings=True, **SIZES)
    assert len(list(folder.glob("*.safetensors"))) == (4 if sharded else 1)
    count = int(os.environ.get("TREESPEC_FUZZ_COUNT", "150"))
    rng = random.Random(int(sharded))
    accepted = 0
    for _ in range(count):
        path, before = mutate_one(rng, folder)
        damaged = contents(folder)
        accepted += try_everything(rng, folder)
        assert contents(folder) == damaged, "the source was written to"
        path.write_bytes(before)
        assert list(tmp_path.iterdir()) == [folder]
    assert 0 < accepted < count
