"""Converting checkpoints: every bit as meant, refused by name."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from tests.helpers.commands import run
from tests.helpers.conversions import Q, assert_equal, assert_same, contents, loaded, make, tensors_of
from tests.helpers.logits import their_logits
from tests.helpers.models import edit_config, make_llama
from treespec_weights import (
    CheckpointError,
    ModelShape,
    OptionError,
    UnsupportedModelError,
    convert_checkpoint,
    family_of,
    parse_bytes,
    read_config,
    verify_checkpoint,
)
from treespec_weights.draft_vocabulary import FILE, write_draft_vocabulary
from treespec_weights.load import quantizable
from treespec_weights.quantize import Quantized, dequantize, quantize_fp8
from treespec_weights.state_projection import FILE as STATES
from treespec_weights.state_projection import StateProjection, write_state_projection

INDEX = "model.safetensors.index.json"
logits = functools.partial(their_logits, tokens=list(range(60)), dtype=torch.float64)


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (torch.float32, None),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float16),
    ],
)
def test_every_dtype(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype | None) -> None:
    source = make(tmp_path / "a", stored)
    if dtype is not None:
        edit_config(source, dtype=None, torch_dtype=str(stored).removeprefix("torch."))  # the older key
    before = contents(source)
    report = convert_checkpoint(source, tmp_path / "b", dtype=dtype)
    expected = {name: tensor.to(dtype or stored) for name, tensor in tensors_of(source).items()}
    assert_equal(tensors_of(tmp_path / "b"), expected)
    config = read_config(tmp_path / "b")
    assert config["dtype"] == str(dtype or stored).removeprefix("torch.") and "torch_dtype" not in config
    assert verify_checkpoint(tmp_path / "b").ok
    assert contents(source) == before
    assert report["tensors"] == len(expected)
    assert report["bytes"] == sum(tensor.nbytes for tensor in expected.values())
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE", "generation_config.json"):
        assert (tmp_path / "b" / name).read_bytes() == before[name]
    assert not {"pytorch_model.bin", "modeling.py", "conversion.json"} & {*contents(tmp_path / "b")}
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


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


def test_sizes() -> None:
    for text, size in (("2GB", 2 * 10**9), ("500 mb", 5 * 10**8), ("1.5GiB", 3 << 29)):
        assert parse_bytes(text) == size
    for text in ("", "2", "GB", "-1GB", "0GB", "1e3MB", "nanGB", "٣GB", "2GB2"):
        with pytest.raises(OptionError, match=r"--shard-size .*500MB, 2GB"):
            parse_bytes(text)


def test_there_and_back(tmp_path: Path) -> None:
    """Keys that families take otherwise when they are missing are written out."""
    source = make(tmp_path / "0")
    edit_config(source, drop=("max_position_embeddings", "hidden_act", "pad_token_id"))
    for i, after in enumerate(("phi3", "mistral", "llama")):
        came, goes = tmp_path / f"{i}", tmp_path / f"{i + 1}"
        report = convert_checkpoint(came, goes, layout=after, shard_bytes=9000)
        config = read_config(goes)
        assert (report["family"], config["model_type"]) == (after, after)
        assert config["architectures"] == [f"{after.capitalize()}ForCausalLM"]
        assert config["rms_norm_eps"] == 1e-3 and config.get("sliding_window") is None
        assert (config["max_position_embeddings"], config["hidden_act"], config["pad_token_id"]) == (2048, "silu", None)
        assert verify_checkpoint(goes).ok
        assert_same(source, goes)
        assert (logits(goes) - logits(source)).abs().max() < 1e-12  # a fused product may sum otherwise
    assert tensors_of(tmp_path / "3").keys() == tensors_of(source).keys()
    assert "qkv" not in str(tensors_of(tmp_path / "2").keys()) and "qkv" in str(tensors_of(tmp_path / "1").keys())


def refused_layout(source: Path, layout: str, *parts: str) -> None:
    before = sorted(source.parent.iterdir())
    with pytest.raises((UnsupportedModelError, CheckpointError)) as caught:
        convert_checkpoint(source, source.parent / "refused", layout=layout)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    assert sorted(source.parent.iterdir()) == before


def test_what_a_layout_cannot_express_is_refused(tmp_path: Path) -> None:
    biased = make(tmp_path / "biased", attention_bias=True, mlp_bias=True)
    refused_layout(biased, "phi3", "'attention_bias': True, but always False in a phi3 model", "'mlp_bias'")
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 128}
    scaled = make(tmp_path / "scaled", rope_parameters=rope | {"low_freq_factor": 1.0, "high_freq_factor": 4.0})
    refused_layout(scaled, "phi3", "'phi3': transformers refuses it", "llama3")
    convert_checkpoint(scaled, tmp_path / "mistral", layout="mistral")
    assert torch.equal(logits(tmp_path / "mistral"), logits(scaled))
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 8, "head_dim": 8, "vocab_size": 20}
    config = MistralConfig(num_attention_heads=2, num_key_value_heads=1, sliding_window=7, **sizes)
    window = tmp_path / "window"
    MistralForCausalLM(config).save_pretrained(window)
    refused_layout(window, "llama", "'sliding_window': 7 cannot be expressed in the config of a llama model")
    convert_checkpoint(window, tmp_path / "fused", layout="phi3")
    assert read_config(tmp_path / "fused")["sliding_window"] == 7
    rope = read_config(tmp_path / "fused")["rope_parameters"]
    edit_config(tmp_path / "fused", rope_parameters=rope | {"partial_rotary_factor": 0.5})
    refused_layout(tmp_path / "fused", "mistral", "'partial_rotary_factor': 0.5")
    with pytest.raises(OptionError, match=r"--layout gpt5: valid are .*llama"):
        convert_checkpoint(biased, tmp_path / "x", layout="gpt5")


def test_parts_of_several_dtypes_cannot_be_fused(tmp_path: Path) -> None:
    source = make(tmp_path / "a")
    for file in source.glob("*.safetensors"):
        save_file({n: t.bfloat16() if n == Q else t.clone() for n, t in load_file(file).items()}, file)
    convert_checkpoint(source, tmp_path / "b")
    assert_same(source, tmp_path / "b")
    refused_layout(source, "phi3", "qkv_proj.weight'", f"{Q!r} is bfloat16", "--dtype")
    convert_checkpoint(source, tmp_path / "c", layout="phi3", dtype=torch.float32)


QUANTISED = [("int8", False), ("int4", False), ("fp8", False), ("fp8-all", True), ("fp8-all", False)]


@pytest.mark.parametrize(("quantization", "tied"), QUANTISED)
def test_quantised_while_converting_and_dequantised(quantization: str, tied: bool, tmp_path: Path) -> None:
    """Integers are those of loading with quantization=, fp8 the nearest numbers; a draft keeps its vocabulary."""
    source = make_llama(tmp_path / "a", 0, torch.bfloat16, tie_word_embeddings=tied)
    write_draft_vocabulary(source, np.arange(read_config(source)["vocab_size"]), 500)
    write_state_projection(source, StateProjection(*torch.ones(4, 1)), (0,))
    report = convert_checkpoint(source, tmp_path / "b", quantization=quantization, shard_bytes=40_000)
    config, found = read_config(tmp_path / "b"), loaded(tmp_path / "b")
    assert config["quantization_config"]["quant_method"] == "compressed-tensors" and len(report["files"]) > 1
    for name in (FILE, STATES):
        assert (tmp_path / "b" / name).read_bytes() == (source / name).read_bytes()
    if quantization.startswith("int"):
        assert_equal(found, loaded(source, quantization=quantization))
        assert any(name.endswith("_scale") for name in found)
    else:
        assert "F8_E4M3" in report["dtypes"]
        shape = ModelShape.from_hf(config, family_of(config, tmp_path / "b"))
        ends = ("embed", "lm_head") if quantization == "fp8-all" else ()
        check_fp8(found, loaded(source), {*quantizable(shape), *ends})
    fused = convert_checkpoint(source, tmp_path / "c", quantization=quantization, layout="phi3")
    assert fused["family"] == "phi3"
    convert_checkpoint(tmp_path / "b", tmp_path / "d", dtype=torch.float32, layout="phi3")
    assert "quantization_config" not in read_config(tmp_path / "d")
    assert all(verify_checkpoint(tmp_path / name).ok for name in "bcd")
    stored = loaded(tmp_path / "b", torch.float32)
    for name, tensor in loaded(tmp_path / "d", torch.float32).items():
        scale = stored.get(f"{name}_scale")
        expected = stored[name] if scale is None else dequantize(Quantized(stored[name], scale))
        assert torch.equal(tensor, expected), name


def check_fp8(found: dict[str, Tensor], plain: dict[str, Tensor], matrices: set[str]) -> None:
    """Asserts that these matrices are the nearest fp8 numbers times their scales, and the others as they were."""
    assert found.keys() == plain.keys()
    for name, tensor in plain.items():
        if name not in matrices:
            assert torch.equal(found[name], tensor), name
            continue
        values, scale = quantize_fp8(tensor)
        assert torch.equal(found[name], (values.float() * scale.float()).bfloat16()), name
        largest = tensor.float().abs().amax(1, keepdim=True)
        error = (found[name].float() - tensor.float()).abs()
        assert (error <= tensor.float().abs() / 12 + largest / 2**15).all(), name  # half of 2^-3, and bfloat16's


def test_what_cannot_be_quantised_while_converting(tmp_path: Path) -> None:
    source = make_llama(tmp_path / "a", 0, torch.bfloat16)
    with pytest.raises(OptionError, match="--quantize int3: valid are int8, int4, fp8, fp8-all"):
        convert_checkpoint(source, tmp_path / "b", quantization="int3")
    convert_checkpoint(source, tmp_path / "b", quantization="int8")
    for options in ({}, {"dtype": torch.float32, "quantization": "int8"}):
        with pytest.raises(OptionError, match=r"is quantised .*give --dtype alone to dequantise it"):
            convert_checkpoint(tmp_path / "b", tmp_path / "c", **options)
    odd = make_llama(tmp_path / "odd", 0, torch.bfloat16, intermediate_size=100)
    with pytest.raises(OptionError, match=r"--quantize int4: .*100"):
        convert_checkpoint(odd, tmp_path / "c", quantization="int4")
    assert not (tmp_path / "c").exists()


def test_the_command(tmp_path: Path) -> None:
    source = make(tmp_path / "a")
    command = ("weights", "convert", "--json")
    options = ("--dtype=bfloat16", "--shard-size=10KB", "--layout=phi3")
    report = run(*command, source, tmp_path / "b", *options).document
    assert report["family"] == "phi3" and report["dtypes"] == ["BF16"] and len(report["files"]) > 1
    assert_same(source, tmp_path / "b", torch.bfloat16)
    for arguments, kind in (
        ([source, tmp_path / "b"], "OptionError"),
        ([source, tmp_path / "c", "--dtype=int8"], "OptionError"),
        ([tmp_path / "nowhere", tmp_path / "c"], "FileNotFoundError"),
        ([source], "UsageError"),
    ):
        assert run(*command, *arguments, code=2).document["error"]["type"] == kind
    ran = run("weights", "convert", source, tmp_path / "d")
    assert "F32" in ran.stdout and ran.stderr == ""
    assert not list(tmp_path.glob("*.partial"))
