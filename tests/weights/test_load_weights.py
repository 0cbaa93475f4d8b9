"""Strict loading: what comes out is exactly what was saved, and everything else is refused by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.helpers.models import embed_models_of, make_llama, new_folder
from treespec_weights import (
    LLAMA,
    CheckpointConfigError,
    CheckpointError,
    ModelShape,
    default_folder,
    default_names,
    load_weights,
    read_config,
    verify_checkpoint,
)

INDEX = "model.safetensors.index.json"
SIZES = {"num_hidden_layers": 2, "hidden_size": 12, "intermediate_size": 10, "head_dim": 6, "vocab_size": 17}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
CONFIG = SIZES | {"model_type": "llama"}
SHAPE = ModelShape.from_hf(CONFIG, LLAMA)
Q = "model.layers.1.self_attn.q_proj.weight"


def llama_tensors(**config: Any) -> dict[str, Tensor]:
    return load_file(make_llama(new_folder("llama"), 0, **(SIZES | config)) / "model.safetensors")


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] = CONFIG) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load_refused(folder: Path, *parts: str, shape: ModelShape = SHAPE) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_weights(folder, shape)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("sharded", "tied", "biases"), [(False, False, True), (True, True, False), (True, False, True), (False, True, True)]
)
def test_round_trip_with_transformers(tmp_path: Path, sharded: bool, tied: bool, biases: bool) -> None:
    said = {"tie_word_embeddings": tied, "attention_bias": biases, "mlp_bias": biases}
    sizes = {"hidden_size": 24, "intermediate_size": 33, "num_key_value_heads": 1, "head_dim": 10, "vocab_size": 63}
    model = AutoModelForCausalLM.from_pretrained(make_llama(tmp_path / "one", 0, **sizes, **said))
    model.save_pretrained(tmp_path, max_shard_size="8KB" if sharded else "1GB")
    assert (tmp_path / INDEX).exists() == sharded
    shape = ModelShape.from_hf(read_config(tmp_path), LLAMA)
    assert (shape.tied, shape.attention_bias, shape.o_bias, shape.mlp_bias) == (tied, biases, biases, biases)
    weights = load_weights(tmp_path, shape)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == shape.parameters()
    assert list(weights) == list(shape.parameters())
    assert shape.num_parameters() == model.num_parameters()
    both = weights.values(), model.requires_grad_(False).parameters()
    found, stored = (sorted(each.numpy().tobytes() for each in tensors) for tensors in both)
    assert found == stored, "which is which: tests/models/test_families.py"
    assert verify_checkpoint(tmp_path).ok


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [(torch.bfloat16, None), (torch.bfloat16, torch.float32), (torch.float64, torch.float16), (torch.float16, None)],
)
def test_cast_on_load(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype | None) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in llama_tensors().items()}
    weights = load_weights(write(tmp_path, tensors), SHAPE, dtype=dtype)
    assert {tensor.dtype for tensor in weights.values()} == {dtype or stored}
    assert torch.equal(weights["layers.1.q"], tensors[Q].to(dtype or stored))
    assert torch.equal(weights["embed"], tensors["model.embed_tokens.weight"].to(dtype or stored))
    weights["layers.1.q"].zero_()
    assert torch.equal(load_file(tmp_path / "model.safetensors")[Q], tensors[Q]), "the file was written to"
    for bad in (torch.int8, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=rf"{bad}; valid: torch\.float64, torch\.float32"):
            load_weights(tmp_path, SHAPE, dtype=bad)
    if stored == torch.float64:
        tensors[Q][0, 0] = -1e6
        write(tmp_path, tensors)
        assert load_weights(tmp_path, SHAPE, dtype=torch.bfloat16)["layers.1.q"].isfinite().all()
        with pytest.raises(CheckpointError, match=r"q_proj.*1e\+06.*float16"):
            load_weights(tmp_path, SHAPE, dtype=torch.float16)


def test_a_tied_matrix_by_either_name(tmp_path: Path) -> None:
    """Both must be equal."""
    tensors = llama_tensors()
    wanted, embed = load_weights(write(tmp_path, tensors), SHAPE), tensors["model.embed_tokens.weight"]
    head_alone = {name: tensor for name, tensor in tensors.items() if tensor is not embed}
    for stored in (tensors, head_alone):
        found = load_weights(write(tmp_path, stored | {"lm_head.weight": embed.clone()}), SHAPE)
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert verify_checkpoint(tmp_path).ok
    missing = "'model.embed_tokens.weight': missing; expected [17, 12]; download or convert"
    load_refused(write(tmp_path, head_alone), missing)
    load_refused(write(tmp_path, tensors | {"lm_head.weight": embed[:-1].clone()}), "[16, 12]", "[17, 12]")
    load_refused(write(tmp_path, tensors | {"lm_head.weight": embed + 1e-3}), "'lm_head.weight'", "tie_word_embeddings")
    assert not verify_checkpoint(tmp_path).ok


def test_index_entries_without_a_tensor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A layer that a conversion left out but not its entries; and a tensor of the model."""
    tensors, shard = llama_tensors(), "model-00001-of-00001.safetensors"
    wanted = load_weights(write(tmp_path, tensors), SHAPE)
    names = [*tensors, "lm_head.weight", "mtp.fc.weight"]  # a tied head is not needed either
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
    (tmp_path / "model.safetensors").rename(tmp_path / shard)
    with caplog.at_level("INFO", "treespec"):
        found = load_weights(tmp_path, SHAPE)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: no file holds 2 tensors of {INDEX!r}, such as 'lm_head.weight', and none is needed"
    ]
    (tmp_path / shard).unlink()
    save_file({name: tensor for name, tensor in tensors.items() if name != Q}, tmp_path / shard)
    where = f"{Q!r}: missing; expected [24, 12]; the index places it in {shard!r}, which does not hold it; download or"
    load_refused(tmp_path, where)


def test_all_mismatches_are_listed_at_once(tmp_path: Path) -> None:
    tensors = llama_tensors()
    del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    tensors[Q] = torch.zeros(24, 13)
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(12, 12, dtype=torch.int8)
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(24)
    tensors["model.layers.2.input_layernorm.weight"] = torch.zeros(12)
    tensors["model.layers.01.input_layernorm.weight"] = torch.zeros(12)
    tensors["transformer.wte.weight"] = torch.zeros(3)
    error = load_refused(
        write(tmp_path, tensors),
        "'model.norm.weight': missing; expected [12]",
        "'model.layers.0.mlp.up_proj.weight': missing; expected [10, 12]",
        f"{Q!r}: has shape [24, 13], expected [24, 12]",
        "'model.layers.0.self_attn.k_proj.weight': has dtype I8, expected F64, F32, F16, BF16",
        "'model.layers.1.self_attn.q_proj.bias': unexpected: the config says that the model has no such bias",
        "'model.layers.2.input_layernorm.weight': unexpected: 'num_hidden_layers' is 2",
        "'model.layers.01.input_layernorm.weight': unexpected",
        "'transformer.wte.weight': unexpected: no tensor of the family 'llama' has this name",
    )
    assert len(error.problems) == 8
    assert {problem.kind for problem in error.problems} == {"missing", "shape", "dtype", "unexpected"}


def test_biases_that_the_config_promises_are_required(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, attention_bias=True)  # without o_bias: as Qwen2 has it
    tensors = llama_tensors(attention_bias=True)
    write(tmp_path, {name: tensor for name, tensor in tensors.items() if "o_proj.bias" not in name})
    assert "layers.0.q_bias" in load_weights(tmp_path, shape)
    load_refused(tmp_path, "o_proj.bias': missing; expected [12]", shape=dataclasses.replace(shape, o_bias=True))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"hidden_size": None}, ["'hidden_size': missing"]),
        ({"num_hidden_layers": 10**12}, ["'num_hidden_layers': 1000000000000"]),
        ({"num_hidden_layers": True}, ["'num_hidden_layers': True is not a whole number"]),
        ({"vocab_size": 0, "hidden_size": 1.5}, ["'vocab_size': 0", "'hidden_size': 1.5"]),
        ({"num_key_value_heads": 3}, ["'num_attention_heads': 4 is not a multiple of num_key_value_heads 3"]),
        ({"head_dim": None, "hidden_size": 13}, ["'hidden_size': 13 is not a multiple of num_attention_heads 4"]),
        ({"tie_word_embeddings": "no"}, ["'tie_word_embeddings': 'no' is not true or false"]),
    ],
)
def test_config_problems(change: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(CheckpointConfigError) as caught:
        ModelShape.from_hf(CONFIG | change, LLAMA)
    assert len(caught.value.problems) == len(parts)
    assert all(part in str(caught.value) for part in parts)


def test_config_defaults() -> None:
    left_out = ("head_dim", "num_key_value_heads", "tie_word_embeddings")
    config = {key: value for key, value in CONFIG.items() if key not in left_out}
    shape = ModelShape.from_hf(config, LLAMA)
    assert (shape.head_dim, shape.num_kv_heads, shape.tied, shape.o_bias) == (3, 4, False, False)


def test_embedded_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embed_models_of(tmp_path, monkeypatch)
    with pytest.raises(FileNotFoundError, match=r"no embedded model 'target'.* the weights are missing"):
        default_folder("target")
    (tmp_path / "default").mkdir()
    write(tmp_path / "default" / "target", llama_tensors())
    write(tmp_path / "default" / "ssm-1", llama_tensors())
    assert default_names() == ("ssm-1", "target")
    assert default_folder("target") == tmp_path / "default" / "target"
    for name in ("ssm-9", "../default/target", ""):
        with pytest.raises(FileNotFoundError, match=f"no embedded model {name!r}; there are: ssm-1, target"):
            default_folder(name)
