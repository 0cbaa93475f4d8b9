"""Thousands of mutated checkpoints: each loads as described or is refused by one of our errors, at once."""

import json
import random
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from treespec_weights import CheckpointError, ModelShape, load_weights, read_config, verify_checkpoint


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


@pytest.mark.parametrize("sharded", [False, True])
def test_fuzz(tmp_path: Path, sharded: bool) -> None:
    """1,000 mutated folders each: loaded as described, or refused by one of our errors, at once."""
    folder = tmp_path / "model"
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=12,
        intermediate_size=10,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        vocab_size=17,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="3KB" if sharded else "1GB")
    assert len(list(folder.glob("*.safetensors"))) == (4 if sharded else 1)
    originals = {path: path.read_bytes() for path in folder.iterdir()}
    rng = random.Random(int(sharded))
    accepted = 0
    for _ in range(1000):
        path = rng.choice(sorted(originals))
        data = originals[path]
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
        start = time.perf_counter()
        try:
            shape = ModelShape.from_hf(read_config(folder))
            weights = load_weights(folder, shape, dtype=torch.bfloat16)
            assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == shape.parameters()
            accepted += 1
        except CheckpointError as error:
            assert error.problems
        verify_checkpoint(folder)
        assert time.perf_counter() - start < 5, path.read_bytes()[:500]
        path.write_bytes(data)
    assert 0 < accepted < 500  # flips of values pass, most else must not
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
