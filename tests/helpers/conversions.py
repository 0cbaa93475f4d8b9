"""Checkpoints to convert, and what a conversion must keep of them: shared by the tests of converting."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from treespec_weights import FAMILIES, LLAMA, ModelShape, TensorRule, family_of, load_weights, read_config

Q = "model.layers.1.self_attn.q_proj.weight"

# Families of the same parameters as Llama's, written down here: one renames and fuses, one has every other layout.
SIZES = {field: key for field, key in LLAMA.config_keys.items() if not field.endswith("bias")}
NO_BIAS = {"attention_bias": False, "o_bias": False, "mlp_bias": False}
SPLIT = {f"layers.{{i}}.{part}" for part in ("q", "k", "v", "gate", "up")}
QKV = ("layers.{i}.q", "layers.{i}.k", "layers.{i}.v")
RENAMED = replace(LLAMA, model_type="mistral", config_keys=SIZES, defaults={"tied": False}, constants=NO_BIAS)
FUSED = replace(
    RENAMED,
    model_type="phi3",
    tensors=(
        *(rule for rule in LLAMA.tensors if rule.params[0] not in SPLIT),
        TensorRule("model.layers.{i}.self_attn.qkv_proj.weight", QKV),
        TensorRule("model.layers.{i}.mlp.gate_up_proj.weight", ("layers.{i}.gate", "layers.{i}.up")),
    ),
)
ODD = replace(
    RENAMED,
    tied_copy="out",
    tensors=(
        *(
            replace(rule, name=f"x.{rule.name}")
            for rule in LLAMA.tensors
            if rule.params[0] not in {*SPLIT, "layers.{i}.down", "lm_head"} and "bias" not in rule.name
        ),
        TensorRule("h.{i}.qkv", QKV, "per_head"),
        TensorRule("h.{i}.up_gate", ("layers.{i}.up", "layers.{i}.gate"), "transposed"),
        TensorRule("h.{i}.down", ("layers.{i}.down",), "transposed"),
        TensorRule("out", ("lm_head",)),
    ),
)


def add_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the test at hand convert to FUSED and RENAMED, in the place of the families of their names."""
    for family in (FUSED, RENAMED):
        monkeypatch.setitem(FAMILIES, family.model_type, family)


def make(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A random Llama checkpoint, with files beside the weights; sharded."""
    config = {"num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 33, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "head_dim": 10, "vocab_size": 63}
    config |= {"rms_norm_eps": 1e-3, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(config | options)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5, 0.3)
    model.to(dtype).save_pretrained(folder, max_shard_size="9KB")
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "LICENSE").write_text("free")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "modeling.py").write_text("raise SystemExit")
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def loaded(path: Path, dtype: torch.dtype | None = None, **options: Any) -> dict[str, Tensor]:
    """The parameters of a folder or file."""
    config = read_config(path)
    family = family_of(config, path)
    return load_weights(path, ModelShape.from_hf(config, family, path), family, dtype, **options)


def assert_same(folder: Path, other: Path, dtype: torch.dtype | None = None) -> None:
    """Asserts that two folders hold the same decoder parameters, bit for bit."""
    expected, found = loaded(folder, dtype), loaded(other, dtype)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
