"""Converting checkpoints: every bit as meant, whole or not at all, refused by name."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from typer.testing import CliRunner

import treespec_weights.writer
from tests.models import make_llama
from treespec_weights import (
    FAMILIES,
    LLAMA,
    CheckpointError,
    FamilyRules,
    ModelShape,
    OptionError,
    TensorRule,
    UnsupportedModelError,
    WriteError,
    convert_checkpoint,
    family_of,
    load_weights,
    parse_bytes,
    read_config,
    verify_checkpoint,
)
from treespec_weights.cli import app
from treespec_weights.load import Placement
from treespec_weights.writer import Output, Shard, is_written, plan_shards, write_shard

ROOT = Path(__file__).resolve().parents[1]
Q = "model.layers.1.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"

# Families of the same parameters as Llama's, written down here: one renames and fuses, one has every other layout.
SIZES = {field: key for field, key in LLAMA.config_keys.items() if not field.endswith("bias")}
NO_BIAS = {"attention_bias": False, "o_bias": False, "mlp_bias": False}
SPLIT = {f"layers.{{i}}.{part}" for part in ("q", "k", "v", "gate", "up")}
QKV = ("layers.{i}.q", "layers.{i}.k", "layers.{i}.v")
FUSED = replace(
    LLAMA, model_type="phi3", config_keys=SIZES, defaults={"tied": False}, constants=NO_BIAS,
    tensors=(
        *(rule for rule in LLAMA.tensors if rule.params[0] not in SPLIT),
        TensorRule("model.layers.{i}.self_attn.qkv_proj.weight", QKV),
        TensorRule("model.layers.{i}.mlp.gate_up_proj.weight", ("layers.{i}.gate", "layers.{i}.up")),
    ),
)  # fmt: skip
ODD = replace(
    LLAMA, model_type="mistral", config_keys=SIZES, defaults={"tied": False}, constants=NO_BIAS, tied_copy="out",
    tensors=(
        *(replace(rule, name=f"x.{rule.name}") for rule in LLAMA.tensors
          if rule.params[0] not in {*SPLIT, "layers.{i}.down", "lm_head"} and "bias" not in rule.name),
        TensorRule("h.{i}.qkv", QKV, "per_head"),
        TensorRule("h.{i}.up_gate", ("layers.{i}.up", "layers.{i}.gate"), "transposed"),
        TensorRule("h.{i}.down", ("layers.{i}.down",), "transposed"),
        TensorRule("out", ("lm_head",)),
    ),
)  # fmt: skip
RENAMED = replace(LLAMA, model_type="mistral", config_keys=SIZES, defaults={"tied": False}, constants=NO_BIAS)


@pytest.fixture(autouse=True)
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in (FUSED, RENAMED):
        monkeypatch.setitem(FAMILIES, family.model_type, family)


def make(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A random Llama checkpoint, with files beside the weights; sharded."""
    config = LlamaConfig(
        **{
            "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 33, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 63, "rms_norm_eps": 1e-3,
            "tie_word_embeddings": False,
        } | options
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
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


def assert_same(folder: Path, other: Path, dtype: torch.dtype | None = None) -> None:
    """Asserts that two folders hold the same decoder parameters, bit for bit."""
    loaded = []
    for each in (folder, other):
        config = read_config(each)
        family = family_of(config, each)
        loaded.append(load_weights(each, ModelShape.from_hf(config, family, each), family, dtype))
    assert loaded[0].keys() == loaded[1].keys()
    for name, tensor in loaded[0].items():
        assert torch.equal(tensor, loaded[1][name]), name


def logits(folder: Path) -> Tensor:
    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)(torch.arange(60)[None]).logits


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


# --- dtype and shards


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype | None) -> None:
    source = make(tmp_path / "a", stored)
    before = contents(source)
    report = convert_checkpoint(source, tmp_path / "b", dtype=dtype)
    expected = {name: tensor.to(dtype or stored) for name, tensor in tensors_of(source).items()}
    result = tensors_of(tmp_path / "b")
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        assert result[name].dtype == tensor.dtype and torch.equal(result[name], tensor), name
    assert read_config(tmp_path / "b")["dtype"] == str(dtype or stored).removeprefix("torch.")
    assert verify_checkpoint(tmp_path / "b").ok
    assert contents(source) == before
    assert report["tensors"] == len(expected)
    assert report["bytes"] == sum(tensor.nbytes for tensor in expected.values())
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE", "generation_config.json"):
        assert (tmp_path / "b" / name).read_bytes() == before[name]
    assert not {"pytorch_model.bin", "modeling.py", "conversion.json"} & {*contents(tmp_path / "b")}
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_the_older_key_of_the_dtype_is_replaced(tmp_path: Path) -> None:
    source = make(tmp_path / "a")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "dtype": None, "torch_dtype": "float32"}))
    convert_checkpoint(source, tmp_path / "b", dtype=torch.bfloat16)
    config = read_config(tmp_path / "b")
    assert config["dtype"] == "bfloat16" and "torch_dtype" not in config


@pytest.mark.parametrize("size", [1, 4000, 12_000, 10**9])
def test_shards(tmp_path: Path, size: int) -> None:
    source = make(tmp_path / "a")
    report = convert_checkpoint(source, tmp_path / "b", shard_bytes=size)
    files = sorted((tmp_path / "b").glob("*.safetensors"))
    assert {file.name: file.stat().st_size for file in files} == report["files"]
    for file in files:
        held = load_file(file)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= size
    if size == 10**9:
        assert [file.name for file in files] == ["model.safetensors"] and not (tmp_path / "b" / INDEX).exists()
    else:
        assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
        index = json.loads((tmp_path / "b" / INDEX).read_text())
        assert index["metadata"]["total_size"] == report["bytes"]
    assert_same(source, tmp_path / "b")
    assert torch.equal(logits(source), logits(tmp_path / "b"))


def test_what_is_not_a_parameter_is_left_out(tmp_path: Path) -> None:
    source = make(tmp_path / "a", tie_word_embeddings=True)
    stored = tensors_of(source)
    for file in source.glob("*.safetensors*"):
        file.unlink()
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(5)
    save_file(stored, source / "model.safetensors")
    convert_checkpoint(source, tmp_path / "b")
    assert {*stored} - {*tensors_of(tmp_path / "b")} == {
        "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq",
    }  # fmt: skip
    assert verify_checkpoint(tmp_path / "b").ok


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2 * 10**9), ("500 mb", 5 * 10**8), ("1.5GiB", 3 << 29), ("1KB", 1000)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "2", "GB", "-1GB", "0GB", "0.0001KB", "1e3MB", "2G", "nanGB", "٣GB", "2GB2"])
def test_bad_sizes(text: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"--shard-size .*500MB, 2GB"):
        parse_bytes(text)
    error = run("convert", make(tmp_path / "a"), tmp_path / "b", f"--shard-size={text}", code=2)["error"]
    assert error["type"] == "OptionError" and not (tmp_path / "b").exists()


def test_the_writer_aligns_what_it_writes(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.randn(5, 3), "c": torch.randn(()).bfloat16(),
               "d": torch.randn(2, 0), "e": torch.randn(7).double(), "f": torch.ones(3, dtype=torch.bool)}  # fmt: skip
    spelt = {"a": "U8", "b": "F32", "c": "BF16", "d": "F32", "e": "F64", "f": "BOOL"}
    shard = Shard("x.safetensors", tuple(Output(n, spelt[n], tuple(t.shape)) for n, t in tensors.items()))
    write_shard(tmp_path, shard, iter(tensors.values()))
    assert is_written(tmp_path, shard) and (tmp_path / shard.file).stat().st_size == shard.nbytes
    loaded = load_file(tmp_path / shard.file)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor) and loaded[name].data_ptr() % max(tensor.element_size(), 1) == 0
    with safe_open(tmp_path / shard.file, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_groups_stay_together() -> None:
    outputs = [Output(str(i), "U8", (4,)) for i in range(6)]
    shards = plan_shards([outputs[:1], outputs[1:4], outputs[4:]], 8)
    assert [[output.name for output in shard.outputs] for shard in shards] == [["0"], ["1", "2", "3"], ["4", "5"]]


# --- layouts


def test_there_and_back(tmp_path: Path) -> None:
    source = make(tmp_path / "llama")
    way = [("llama", "phi3"), ("phi3", "mistral"), ("mistral", "llama")]
    for i, (before, after) in enumerate(way):
        came, goes = tmp_path / (before if i == 0 else f"{i}"), tmp_path / f"{i + 1}"
        report = convert_checkpoint(came, goes, layout=after, shard_bytes=9000)
        config = read_config(goes)
        assert (report["family"], config["model_type"]) == (after, after)
        assert config["architectures"] == [
            {"llama": "Llama", "phi3": "Phi3", "mistral": "Mistral"}[after] + "ForCausalLM"
        ]
        assert config["rms_norm_eps"] == 1e-3 and config.get("sliding_window") is None
        assert verify_checkpoint(goes).ok
        assert_same(source, goes)
        assert (logits(goes) - logits(source)).abs().max() < 1e-12  # a fused product may sum otherwise
    assert tensors_of(tmp_path / "3").keys() == tensors_of(source).keys()
    assert "qkv" not in str(tensors_of(tmp_path / "2").keys()) and "qkv" in str(tensors_of(tmp_path / "1").keys())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_every_layout_of_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None) -> None:
    monkeypatch.setitem(FAMILIES, "mistral", ODD)
    source = make(tmp_path / "a", num_key_value_heads=1)
    convert_checkpoint(source, tmp_path / "b", layout="mistral", dtype=dtype)
    stored, odd = tensors_of(source), tensors_of(tmp_path / "b")
    gate, up = (stored[f"model.layers.0.mlp.{part}_proj.weight"].to(dtype) for part in ("gate", "up"))
    assert torch.equal(odd["h.0.up_gate"], torch.cat([up, gate]).t())
    assert odd["h.1.qkv"].shape == (4 * 10 + 2 * 10, 24)
    assert_same(source, tmp_path / "b", dtype)
    convert_checkpoint(tmp_path / "b", tmp_path / "c", layout="phi3")
    assert_same(source, tmp_path / "c", dtype)


@pytest.mark.parametrize("layout", ["stacked", "per_head", "transposed"])
@pytest.mark.parametrize("heads", [1, 3])
def test_pack_undoes_unpack(layout: Any, heads: int) -> None:
    sizes = {"q": (heads * 4, 5), "k": (heads * 2, 5), "v": (heads * 2, 5)}
    placement = Placement("qkv", TensorRule("qkv", ("q", "k", "v"), layout), sizes, heads)
    tensor = torch.randn(placement.shape)
    parts = placement.unpack(tensor)
    assert {name: tuple(part.shape) for name, part in parts.items()} == sizes
    assert torch.equal(placement.pack(parts), tensor) and placement.pack(parts).is_contiguous()


def test_keys_that_families_take_otherwise_when_missing_are_written_out(tmp_path: Path) -> None:
    source = make(tmp_path / "a")
    config = json.loads((source / "config.json").read_text())
    for key in ("rms_norm_eps", "max_position_embeddings", "hidden_act", "pad_token_id"):
        config.pop(key, None)
    (source / "config.json").write_text(json.dumps(config))
    convert_checkpoint(source, tmp_path / "b", layout="phi3")
    config = read_config(tmp_path / "b")
    assert config["rms_norm_eps"] == 1e-6 and config["max_position_embeddings"] == 2048
    assert config["hidden_act"] == "silu" and config["pad_token_id"] is None


def refused_layout(source: Path, layout: str, *parts: str) -> None:
    before = sorted(source.parent.iterdir())
    with pytest.raises((UnsupportedModelError, CheckpointError)) as caught:
        convert_checkpoint(source, source.parent / "refused", layout=layout)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    assert sorted(source.parent.iterdir()) == before


def test_what_a_layout_cannot_express_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    biased = make(tmp_path / "biased", attention_bias=True, mlp_bias=True)
    refused_layout(biased, "phi3", "'layers.{i}.q_bias'", "'layers.{i}.down_bias': a phi3 model has no such")
    with monkeypatch.context() as patch:
        patch.setitem(FAMILIES, "mistral", replace(RENAMED, constants={**NO_BIAS, "attention_bias": True}))
        refused_layout(make(tmp_path / "plain"), "mistral", "'layers.{i}.q_bias': a mistral model has this parameter")
    scaled = make(
        tmp_path / "scaled",
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    )  # fmt: skip
    refused_layout(scaled, "phi3", "'phi3': transformers refuses it", "llama3")
    convert_checkpoint(scaled, tmp_path / "mistral", layout="mistral")
    assert torch.equal(logits(tmp_path / "mistral"), logits(scaled))
    config = MistralConfig(
        num_hidden_layers=1, hidden_size=16, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=20, sliding_window=7, head_dim=8,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path / "window")
    refused_layout(tmp_path / "window", "llama", "'sliding_window': 7 cannot be said in the config of a llama model")
    convert_checkpoint(tmp_path / "window", tmp_path / "fused", layout="phi3")
    assert read_config(tmp_path / "fused")["sliding_window"] == 7
    config = read_config(tmp_path / "fused")
    config["rope_parameters"]["partial_rotary_factor"] = 0.5
    (tmp_path / "fused" / "config.json").write_text(json.dumps(config))
    refused_layout(tmp_path / "fused", "mistral", "'partial_rotary_factor': 0.5")
    with pytest.raises(OptionError, match=r"--layout gpt5: valid are .*llama"):
        convert_checkpoint(biased, tmp_path / "x", layout="gpt5")
    fewer: FamilyRules = replace(FUSED, tensors=tuple(r for r in FUSED.tensors if r.params != ("final_norm",)))
    monkeypatch.setitem(FAMILIES, "phi3", fewer)
    refused_layout(scaled, "phi3", "'final_norm': a phi3 model has no such parameter")


def test_parts_of_several_dtypes_cannot_be_fused(tmp_path: Path) -> None:
    source = make(tmp_path / "a")
    for file in source.glob("*.safetensors"):
        save_file({n: t.bfloat16() if n == Q else t.clone() for n, t in load_file(file).items()}, file)
    convert_checkpoint(source, tmp_path / "b")
    assert_same(source, tmp_path / "b")
    refused_layout(source, "phi3", "qkv_proj.weight'", f"{Q!r} is bfloat16", "--dtype")
    convert_checkpoint(source, tmp_path / "c", layout="phi3", dtype=torch.float32)


# --- one tensor may become several


@dataclass(frozen=True)
class Halves:
    """Every projection in two parts, as a quantised weight and its scales would be."""

    def outputs(self, placement: Placement, dtype: torch.dtype) -> Sequence[Output]:
        if len(placement.shape) == 1:
            return [Output(placement.name, "BF16", placement.shape)]
        return [Output(f"{placement.name}.low", "I8", placement.shape), Output(f"{placement.name}.max", "F32", ())]

    def apply(self, placement: Placement, tensor: Tensor) -> Sequence[Tensor]:
        if tensor.dim() == 1:
            return [tensor.bfloat16()]
        return [tensor.mul(10).to(torch.int8), tensor.max().float()]

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        return config | {"halves": True}


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_while_converting(quantization: str, tmp_path: Path) -> None:
    """The stored integers and scales are those that loading with quantization= gives, and transformers' config."""
    source = make_llama(tmp_path / "a", 0, torch.bfloat16)
    report = convert_checkpoint(source, tmp_path / "b", quantization=quantization, shard_bytes=40_000)
    assert len(report["files"]) > 1
    config = read_config(tmp_path / "b")
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert verify_checkpoint(tmp_path / "b").ok
    rules = family_of(config, tmp_path / "b")
    shape = ModelShape.from_hf(config, rules)
    expected = load_weights(source, shape, rules, quantization=quantization)
    found = load_weights(tmp_path / "b", shape, rules)
    assert found.keys() == expected.keys() and any(name.endswith("_scale") for name in found)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    fused = convert_checkpoint(source, tmp_path / "c", quantization=quantization, layout="phi3")
    assert fused["family"] == "phi3" and verify_checkpoint(tmp_path / "c").ok


def test_what_cannot_be_quantised_while_converting(tmp_path: Path) -> None:
    source = make_llama(tmp_path / "a", 0, torch.bfloat16)
    with pytest.raises(OptionError, match="--quantize int3: valid are int8, int4"):
        convert_checkpoint(source, tmp_path / "b", quantization="int3")
    convert_checkpoint(source, tmp_path / "b", quantization="int8")
    with pytest.raises(OptionError, match="is quantised"):
        convert_checkpoint(tmp_path / "b", tmp_path / "c")
    odd = make_llama(tmp_path / "odd", 0, torch.bfloat16, intermediate_size=100)
    with pytest.raises(OptionError, match=r"--quantize int4: .*100"):
        convert_checkpoint(odd, tmp_path / "c", quantization="int4")
    assert not (tmp_path / "c").exists()


def test_a_transform_may_write_several_tensors_for_one(tmp_path: Path) -> None:
    source = make(tmp_path / "a")
    report = convert_checkpoint(source, tmp_path / "b", transform=Halves(), shard_bytes=3000)
    stored, result = tensors_of(source), tensors_of(tmp_path / "b")
    assert torch.equal(result[f"{Q}.low"], stored[Q].mul(10).to(torch.int8))
    assert torch.equal(result[f"{Q}.max"], stored[Q].max()) and read_config(tmp_path / "b")["halves"] is True
    assert report["tensors"] == len(result) > len(stored) and report["dtypes"] == ["BF16", "F32", "I8"]


# --- whole or not at all


def test_the_destination_must_be_free(tmp_path: Path) -> None:
    source = make(tmp_path / "a")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for taken in (tmp_path / "full", tmp_path / "full" / "x", tmp_path / "link", source):
        with pytest.raises(OptionError, match="exists already; name a new folder"):
            convert_checkpoint(source, taken)
    with pytest.raises(OptionError, match="lies in"):
        convert_checkpoint(source, source / "b")
    with pytest.raises(FileNotFoundError, match=r"no such folder: .*nowhere"):
        convert_checkpoint(source, tmp_path / "nowhere" / "b")
    with pytest.raises(OptionError, match="name a new folder"):
        convert_checkpoint(source, "")
    (tmp_path / "empty").mkdir()
    convert_checkpoint(source, tmp_path / "empty")
    assert_same(source, tmp_path / "empty")
    assert not list(tmp_path.glob("*.partial"))


def test_a_source_that_is_not_what_its_config_says(tmp_path: Path) -> None:
    source = make(tmp_path / "a")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"intermediate_size": 34}))
    with pytest.raises(CheckpointError, match=r"up_proj.weight': has shape \[33, 24\], expected \[34, 24\]"):
        convert_checkpoint(source, tmp_path / "b")
    (source / "config.json").write_text(json.dumps(config | {"model_type": "nope"}))
    with pytest.raises(UnsupportedModelError, match="'nope' is not supported"):
        convert_checkpoint(source, tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_values_that_do_not_fit(tmp_path: Path) -> None:
    source = make(tmp_path / "a")
    for file in source.glob("*.safetensors"):
        save_file({name: tensor * (1e6 if name == Q else 1) for name, tensor in load_file(file).items()}, file)
    with pytest.raises(CheckpointError, match=r"layers.1.self_attn.q_proj.*is infinite in torch.float16"):
        convert_checkpoint(source, tmp_path / "b", dtype=torch.float16, shard_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    convert_checkpoint(source, tmp_path / "b", dtype=torch.bfloat16)


def test_files_that_link_outside_are_not_carried(tmp_path: Path) -> None:
    source = make(tmp_path / "a")
    (tmp_path / "secret.json").write_text("{}")
    (source / "added_tokens.json").symlink_to(tmp_path / "secret.json")
    written: list[int] = []
    with pytest.raises(CheckpointError, match=r"added_tokens.json': a link to .*outside"):
        convert_checkpoint(source, tmp_path / "b", on_bytes=lambda done, _: written.append(done))
    assert not written  # hours of writing do not come before it
    assert not (tmp_path / "b").exists()


def failing_after(count: int, error: BaseException) -> Any:
    """Progress that ends a conversion after some reports."""

    def advance(done: int, total: int) -> None:
        nonlocal count
        count -= 1
        if count == 0:
            raise error

    return advance


@pytest.mark.parametrize("layout", [None, "phi3"])
def test_resume(tmp_path: Path, layout: str | None) -> None:
    source = make(tmp_path / "a")
    options: dict[str, Any] = {"layout": layout, "dtype": torch.bfloat16, "shard_bytes": 3000}
    convert_checkpoint(source, tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, tmp_path / "b", **options, on_bytes=failing_after(9, KeyboardInterrupt()))
    partial = tmp_path / "b.partial"
    assert not (tmp_path / "b").exists()
    finished = {path.name for path in partial.glob("*.safetensors")}
    assert 1 <= len(finished) < len(list((tmp_path / "whole").glob("*.safetensors")))
    assert {path.name for path in partial.iterdir()} == {*finished, "conversion.json"}
    with pytest.raises(OptionError, match=r"b.partial' is there already.*--resume, or delete it"):
        convert_checkpoint(source, tmp_path / "b", **options)
    for change in ({"dtype": None}, {"shard_bytes": 4000}, {"layout": "mistral"}):
        with pytest.raises(OptionError, match="of other options; delete the folder"):
            convert_checkpoint(source, tmp_path / "b", **options | change, resume=True)
    with pytest.raises(OptionError, match="of another source"):
        convert_checkpoint(make(tmp_path / "other"), tmp_path / "b", **options, resume=True)
    damaged = partial / sorted(finished)[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (partial / f"{damaged.name}.part").write_bytes(b"of a killed process")
    report = convert_checkpoint(source, tmp_path / "b", **options, resume=True)
    assert set(report["resumed"]) == finished - {damaged.name}
    assert contents(tmp_path / "b") == contents(tmp_path / "whole") and not partial.exists()
    with pytest.raises(OptionError, match="no interrupted conversion"):
        convert_checkpoint(source, tmp_path / "c", **options, resume=True)


def test_resume_sees_that_the_source_has_changed(tmp_path: Path) -> None:
    source = make(tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, tmp_path / "b", shard_bytes=1, on_bytes=failing_after(3, KeyboardInterrupt()))
    os.utime(sorted(source.glob("*.safetensors"))[0], ns=(1, 1))
    with pytest.raises(OptionError, match="of files that have changed"):
        convert_checkpoint(source, tmp_path / "b", shard_bytes=1, resume=True)
    (tmp_path / "b.partial" / "conversion.json").write_text("[]")
    with pytest.raises(OptionError, match="of something else"):
        convert_checkpoint(source, tmp_path / "b", shard_bytes=1, resume=True)


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

    with pytest.raises(WriteError, match=r"cannot be renamed(.|\n)*go on with --resume"):
        convert_checkpoint(source, tmp_path / "b", on_bytes=taken)
    (tmp_path / "b" / "x").unlink()
    report = convert_checkpoint(source, tmp_path / "b", resume=True)
    assert report["resumed"] == ["model.safetensors"] and not (tmp_path / "b" / "conversion.json").exists()
    assert_same(source, tmp_path / "b")


@pytest.mark.parametrize("failing", [1, 2, 7, 20])
def test_a_disk_that_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    source = make(tmp_path / "a")
    write, count = treespec_weights.writer._write, 0

    def filling(file: Any, tensor: Tensor, on_bytes: Any) -> None:
        nonlocal count
        count += 1
        if count == failing:
            raise OSError(28, "No space left on device")
        write(file, tensor, on_bytes)

    monkeypatch.setattr("treespec_weights.writer._write", filling)
    with pytest.raises(WriteError) as caught:
        convert_checkpoint(source, tmp_path / "b", shard_bytes=6000)
    problem = caught.value.problems[0]
    assert problem.where.startswith("'model-000") and problem.message.startswith("tensor '")
    assert "No space left on device" in problem.message and not (tmp_path / "b").exists()
    assert not list(tmp_path.rglob("*.part"))
    if (tmp_path / "b.partial").exists():
        assert "--resume" in str(caught.value)
        convert_checkpoint(source, tmp_path / "b", shard_bytes=6000, resume=True)
        assert_same(source, tmp_path / "b")
    else:
        assert failing <= 2 and "--resume" not in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="limits and mounts of Linux")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    source = make(tmp_path / "a", vocab_size=5000)  # 480 kB embedding and head
    script = (
        "import resource, sys; from treespec_weights.cli import app\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)); app(sys.argv[1:])"
    )
    command = [sys.executable, "-c", script, "convert", str(source), str(tmp_path / "b"), "--shard-size=1KB", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    message = json.loads(done.stdout)["error"]["message"]
    assert "model-00001-of-" in message and "'model.embed_tokens.weight' cannot be written: File too large" in message
    assert [path.name for path in tmp_path.iterdir()] == ["a"]

    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "none", disk], capture_output=True).returncode:
        pytest.skip("no permission to mount")
    try:
        with pytest.raises(WriteError, match=r"GB are to be written, and .* are free"):
            convert_checkpoint(source, disk / "b", shard_bytes=1)
        assert not list(disk.iterdir())
        plenty = type("Usage", (), {"free": 10**12})
        with pytest.MonkeyPatch.context() as patch, pytest.raises(WriteError) as caught:
            patch.setattr("shutil.disk_usage", lambda folder: plenty)
            convert_checkpoint(source, disk / "b", shard_bytes=1)
        assert "'lm_head.weight' cannot be written: No space left on device" in str(caught.value)
        assert [path.name for path in disk.iterdir()] == ["b.partial"] and not list(disk.rglob("*.part"))
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_process_that_is_killed(tmp_path: Path) -> None:
    source = make(tmp_path / "a")
    script = (
        "import sys, time\nfrom treespec_weights import convert_checkpoint\n"
        "def wait(done, total):\n    if done > 9000: print('here', flush=True); time.sleep(60)\n"
        "convert_checkpoint(sys.argv[1], sys.argv[2], shard_bytes=3000, on_bytes=wait)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(source), str(tmp_path / "b")], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"here\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "b").exists() and list((tmp_path / "b.partial").glob("*.part"))
    with pytest.raises(OptionError, match="--resume"):
        convert_checkpoint(source, tmp_path / "b", shard_bytes=3000)
    assert convert_checkpoint(source, tmp_path / "b", shard_bytes=3000, resume=True)["resumed"]
    assert_same(source, tmp_path / "b")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's memory counters")
def test_memory_is_that_of_a_tensor(tmp_path: Path) -> None:
    """In a process of its own, whose malloc gives large blocks back at once."""
    source = make(tmp_path / "a", hidden_size=768, intermediate_size=4096, num_hidden_layers=5, vocab_size=2048)
    make(tmp_path / "small")
    cases = [(None, None), (None, "bfloat16"), ("phi3", None), ("phi3", "float16")]
    script = (
        "import json, sys, torch\nfrom pathlib import Path\n"
        "from tests.test_convert import FUSED\nfrom treespec_weights import FAMILIES, convert_checkpoint\n"
        "FAMILIES['phi3'] = FUSED\nroot, peak = Path(sys.argv[1]), 0\n"
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
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), json.dumps(cases)],
        cwd=ROOT, env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for i, ((layout, dtype), peak) in enumerate(zip(cases, map(int, done.stdout.split()), strict=True)):
        tensors = tensors_of(tmp_path / str(i))
        largest = max(tensor.nbytes for tensor in tensors.values())
        assert sum(tensor.nbytes for tensor in tensors.values()) > 5 * largest
        # What is fused has the stored dtype, of twice the size here, before it is cast.
        held = 3 if layout and dtype else 1 if layout or dtype else 0
        assert peak < held * largest + (2 << 20), (layout, dtype)
    assert_same(source, tmp_path / "2")


# --- the command


def test_the_command(tmp_path: Path) -> None:
    source = make(tmp_path / "a")
    report = run("convert", source, tmp_path / "b", "--dtype=bfloat16", "--shard-size=10KB", "--layout=phi3")
    assert report["family"] == "phi3" and report["dtypes"] == ["BF16"] and len(report["files"]) > 1
    assert_same(source, tmp_path / "b", torch.bfloat16)
    for arguments, kind in (
        ([source, tmp_path / "b"], "OptionError"),
        ([source, tmp_path / "c", "--dtype=int8"], "OptionError"),
        ([source, tmp_path / "c", "--layout=bert"], "OptionError"),
        ([source, tmp_path / "c", "--resume"], "OptionError"),
        ([tmp_path / "nowhere", tmp_path / "c"], "FileNotFoundError"),
        ([source], "UsageError"),
        ([source, tmp_path / "c", "--quantise=int8"], "UsageError"),
    ):
        assert run("convert", *arguments, code=2)["error"]["type"] == kind
    text = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "d")])
    assert text.exit_code == 0 and "F32" in text.stdout and text.stderr == ""
    assert not list(tmp_path.glob("*.partial"))


def test_a_conversion_takes_no_longer_than_it_must(tmp_path: Path) -> None:
    """Nothing in it is quadratic: a checkpoint of many tiny tensors and files."""
    source = make(tmp_path / "a", num_hidden_layers=60, hidden_size=4, intermediate_size=4, head_dim=2, vocab_size=5)
    start = time.perf_counter()
    convert_checkpoint(source, tmp_path / "b", shard_bytes=300)
    assert time.perf_counter() - start < 20
