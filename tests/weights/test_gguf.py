"""GGUF files: what they hold, against the folders they are made of and transformers' reading."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.calls import calls_of
from tests.helpers.conversions import loaded
from tests.helpers.exactness import differences, run
from tests.helpers.families import CASES, TYPICAL, VOCAB, WINDOW, Case, fitting, make_model
from tests.helpers.gguf_files import (
    GGUF_CASES,
    RELATIVES,
    add_tensor,
    family_folder,
    gemma4_file,
    llama,
    llama_file,
    random_blocks,
    transformers_reading,
    write_gguf,
)
from tests.helpers.models import greedy, open_llm, quick, random_prompts, tokens_of
from tests.helpers.quantized_checkpoints import needs_compiler
from treespec import LLM, SpecConfig
from treespec.models.model_config import ModelConfig
from treespec.startup.memory import weight_bytes
from treespec.startup.vocabularies import fit_weights
from treespec_weights import convert_checkpoint, inspect_checkpoint, read_config
from treespec_weights.blocks import FORMS, Blocks, read_blocks
from treespec_weights.describe import describe
from treespec_weights.errors import UnsupportedModelError
from treespec_weights.gguf.reader import read_gguf
from treespec_weights.progress import shown_by
from treespec_weights.quantize import Quantized, dequantize

LENGTHS, TOKENS = (1, 20, 70), 12
OF_IMAGES = {"qwen2": "qwen2vl", "qwen3": "qwen3vl", "qwen3_moe": "qwen3vlmoe"}


@pytest.mark.parametrize("name", quick(GGUF_CASES, {*GGUF_CASES} - {*RELATIVES}))
def test_a_file_is_the_model_of_its_folder(name: str, tmp_path: Path) -> None:
    folder = family_folder(name)
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
        torch.testing.assert_close(
            weights[key], tensor, rtol=0, atol=2e-7 if key.endswith(("norm", "decay_log")) else 0
        )
    for pattern in (6, [True] * 5 + [False, True]) if name == "gemma3" else ():  # of windows: a distance, or flags
        path = write_gguf(tmp_path / "model.gguf", folder, attention__sliding_window_pattern=pattern)
        assert ModelConfig.from_hf(path).layers == given.layers
    if name in OF_IMAGES:
        path = write_gguf(path, folder, arch=OF_IMAGES[name], rope__dimension_sections=[2, 1, 1, 0])
        assert replace(ModelConfig.from_hf(path), ropes=made.ropes) == replace(made, folder=path)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_compiler)])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_value_heads_of_gguf_files(name: str, compiled: bool, tmp_path: Path) -> None:
    """Of several for a key head, and a layer of MTP that is not loaded. Only Qwen3-Next keeps the folder's order."""
    case = TYPICAL[name]
    folder = make_model(tmp_path / "folder", case, 0, mlp_only_layers=[], **(fitting(case) if compiled else {}))

    def add(writer: gguf.GGUFWriter) -> None:
        add_tensor(writer, "blk.3.nextn.eh_proj.weight", torch.zeros(4, 8), "F32")

    path = write_gguf(tmp_path / "model.gguf", folder, change=add, block_count=4, nextn_predict_layers=1)
    prompts = random_prompts((20,), vocab=VOCAB)
    outputs = [open_llm(each, compile=compiled).generate(prompts, greedy(12)) for each in (folder, path)]
    assert tokens_of(outputs[0]) == tokens_of(outputs[1])
    if name != "qwen3_next":
        with pytest.raises(UnsupportedModelError, match="tiled_value_heads"):
            convert_checkpoint(path, tmp_path / "back")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["falcon_h1", "falcon_h1, norms, biases"])
def test_factors_that_the_converter_multiplies(name: str, tmp_path: Path) -> None:
    """Into the matrices, where a folder has them in its config."""
    changes = dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), False)
    folder = make_model(tmp_path / "folder", CASES[name], 0, **changes, mlp_multipliers=[1.4, 0.7])
    path = write_gguf(tmp_path / "model.gguf", folder)
    given, made = (open_llm(each).generate(random_prompts((20,), vocab=VOCAB), greedy(24)) for each in (folder, path))
    assert tokens_of(given) == tokens_of(made)
    assert ModelConfig.from_hf(folder).value_scale != ModelConfig.from_hf(path).value_scale == 1


def test_a_converted_file_has_the_tensors_of_its_family(tmp_path: Path) -> None:
    """Also where llama.cpp divides one of them: Granite's MLP."""
    folder = family_folder("granite_hybrid, dense")
    convert_checkpoint(write_gguf(tmp_path / "model.gguf", folder), tmp_path / "back")
    given, made = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "back"))
    assert given.keys() == made.keys() and all(made[name].shape == given[name].shape for name in given)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "lfm2_moe", "qwen3_next"])
def test_fused_projections_of_experts(name: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "folder", TYPICAL[name], 0, mlp_only_layers=[], **fitting(TYPICAL[name]))
    types = lambda name: "Q8_0" if "gate" in name or "up" in name else "F16"  # noqa: E731
    one, other = (write_gguf(tmp_path / f"{fuses}.gguf", folder, types, fuses=fuses) for fuses in (False, True))
    assert read_gguf(other).tensors.keys() - read_gguf(one).tensors.keys()
    weights, expected = (loaded(path, torch.float32, blocks=True) for path in (other, one))
    assert weights.keys() == expected.keys()
    for key, found in weights.items():
        pair = [each.dequantize(torch.float32) if isinstance(each, Blocks) else each for each in (found, expected[key])]
        assert torch.equal(*pair)
    prompts = random_prompts((20,), vocab=VOCAB)
    outputs = [open_llm(path, dtype="float32").generate(prompts, greedy(12)) for path in (one, other)]
    assert tokens_of(outputs[0]) == tokens_of(outputs[1])


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
def test_scaled_rotations(name: str, metadata: Any, divisor: float, magnitude: float, tmp_path: Path) -> None:
    files = (write_gguf(tmp_path / "m.gguf", family_folder(name), **more) for more in ({}, metadata))
    plain, scaled = (ModelConfig.from_hf(path).ropes for path in files)
    rotated = plain[-1].inv_freq > 0
    assert torch.equal(scaled[-1].inv_freq * divisor, plain[-1].inv_freq)
    assert torch.equal(scaled[-1].scale, torch.where(rotated, plain[-1].scale * magnitude, 1.0))
    for rope, expected in zip(scaled[:-1], plain[:-1], strict=True):  # of sliding windows
        assert torch.equal(rope.inv_freq, expected.inv_freq)


@pytest.mark.slow
def test_unknown_metadata_of_rotations_are_announced_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = {"rope__scaling__alpha": 2.0, "rope__scaling__finetuned": True, "rope__freq_base_swa": 5.0}
    path = write_gguf(tmp_path / "m.gguf", llama(), **more)
    open_llm(path, [path])
    [line] = [record.getMessage() for record in caplog.records if "rope" in record.getMessage()]
    assert "m.gguf: ignoring rope.scaling.alpha=2.0, rope.freq_base_swa=5.0, which treespec does not know" in line


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


FORMATS = dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), "int4 groups of 32")
FORMATS |= dict.fromkeys(("Q8_0", "Q5_0", "Q5_1", "Q5_K", "IQ4_NL", "IQ4_XS", "MXFP4"), "int8 groups of 32")
FORMATS |= {"Q2_K": "int4 groups of 16", "Q3_K": "int4 groups of 16", "Q6_K": "int8 groups of 16"}
FORMATS |= {"tied": "int4 groups of 32", "Q4_K_M": "int4 groups of 32, int8 groups of 16"}
IN_BLOCKS = {kind: f"gguf {kind}" for kind in FORMATS} | {"tied": "gguf Q4_1, Q8_0", "Q4_K_M": "gguf Q4_K, Q6_K, Q8_0"}


@needs_compiler
@pytest.mark.parametrize("kind", quick(("F32", "F16", "BF16", *FORMATS), ("F16", "Q8_0", "Q6_K", "Q4_K_M", "tied")))
def test_every_type_of_block(kind: str) -> None:
    path = llama_file(kind)
    assert read_config(path)["dtype"] == {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")
    for compile in (False, True):
        llm = open_llm(path, dtype="float32", compile=compile)
        assert llm.stats()["frozen"]["quantization"] == (IN_BLOCKS if compile else FORMATS).get(kind)
        assert_same_logits(path, llm)
        assert torch.equal(llm.engine.runner.target.embed, loaded(path, torch.float32)["embed"])


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
        pytest.param("gemma4", "bfloat16", True, marks=pytest.mark.slow),
    ],
)
def test_trees_have_the_bits_of_plain_decoding(kind: str, dtype: str, compile: bool) -> None:
    path = gemma4_file() if kind == "gemma4" else llama_file(kind)
    llm = open_llm(path, [path], dtype=dtype, compile=compile, prove=True)
    prompts = random_prompts(LENGTHS)
    plain = run(open_llm(path, dtype=dtype, compile=compile), prompts, greedy(TOKENS))
    tree = run(llm, prompts, greedy(TOKENS), SpecConfig(nodes=16))
    assert not (found := differences(plain, tree)), "\n".join(found[:10])
    assert tree.acceptance_length > 2
    assert llm.engine.sources.ssms.models[0].quantization == llm.engine.runner.target.quantization
    assert llm.stats()["draft_vocabularies"] == {path.stem: "same vocabulary"}


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
    assert found.scale.shape == (6, 512 // FORMS[kind].group) and (found.zero is not None) == FORMS[kind].has_zero
    assert found.values.dtype == {4: torch.uint8, 8: torch.int8}[FORMS[kind].bits]
    torch.testing.assert_close(dequantize(found), expected, rtol=0, atol=2e-7 * float(expected.abs().max()))


MIXED = {"blk.0.attn_k.weight": "F16", "blk.0.attn_v.weight": "Q6_K", "blk.1.ffn_up.weight": "Q8_0"}
STORED = ("mixed", "phi3, partial", "Q4_K_M", "tied", *FORMS)


@pytest.mark.parametrize("name", quick(STORED, STORED[:3]))
def test_blocks_are_loaded_as_stored(name: str, tmp_path: Path) -> None:
    """Also the permuted rows of llama's q and k, and the rows of phi3's q, k and v in one tensor."""
    if name == "mixed":
        path = write_gguf(tmp_path / "m.gguf", llama(), lambda name: MIXED.get(name, "Q4_K"))
    elif name in GGUF_CASES:
        path = write_gguf(tmp_path / "m", family_folder(name), lambda name: "F16" if "ffn_down" in name else "Q8_0")
    else:
        path = llama_file(name)
    plain, held = loaded(path, torch.float32), loaded(path, torch.float32, blocks=True)
    assert held.keys() == {key for key in plain if not key.endswith(("_scale", "_zero"))}
    dense = {key.split(".")[-1] for key, value in held.items() if isinstance(value, Tensor) and value.dim() == 2}
    assert dense == {"mixed": {"k"}, "phi3, partial": {"down"}}.get(name, set())
    for key, found in held.items():
        expected = plain[key]
        if f"{key}_scale" in plain:
            expected = dequantize(Quantized(expected, plain[f"{key}_scale"], plain.get(f"{key}_zero")))
        if isinstance(found, Blocks):
            found.release()  # from memory: its values stay
            found = found.dequantize(torch.float32)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-7 * float(expected.abs().max()))


@needs_compiler
def test_the_selftest_computes_layers_of_every_form() -> None:
    """Behind `tracked`, which tells how far loading has come."""
    told: list[tuple[str, float]] = []
    with shown_by(lambda *progress: told.append(progress)):
        models = [open_llm(llama_file(name)).engine.runner.target for name in ("Q4_K", "Q4_K_M")]
    assert [model.layer_subset(90)[1] for model in models] == [1, 2]
    parts = dict.fromkeys(part for part, _ in told)
    assert [*parts] == [f"{doing} {name}.gguf" for name in ("Q4_K", "Q4_K_M") for doing in ("reading", "packing")]
    for part in parts:
        fractions = [fraction for told_part, fraction in told if told_part == part]
        assert fractions == sorted(set(fractions)) and (fractions[0], fractions[-1]) == (0.0, 1.0)


@needs_compiler
def test_pages_of_the_file_are_dropped() -> None:
    """Of each matrix when it is packed; of q and k when they are permuted; of the embedding after the self-test."""
    with calls_of(Blocks, "release") as released:
        open_llm(llama_file("tied"))
    assert Counter(blocks.kind for (blocks,) in released) == {"Q4_1": 14 + 4, "Q8_0": 2}


@pytest.mark.parametrize(("name", "read"), [("Q4_K_M", "output.weight"), ("tied", "token_embd.weight")])
def test_inspect_tells_what_a_pass_reads(name: str, read: str) -> None:
    report, tensors = inspect_checkpoint(llama_file(name)), read_gguf(llama_file(name)).tensors
    assert all(row["in_blocks"] for row in report["matrices"])
    assert sum(row["bytes"] for row in report["matrices"]) == sum(
        t.nbytes for t in tensors.values() if len(t.shape) == 2
    )
    expected = [t.nbytes for key, t in tensors.items() if key.startswith(("blk.", "output_norm")) or key == read]
    assert report["pass_bytes"] == sum(expected)
    assert re.search(rf"pass reads +{sum(expected) / 1024:.1f} KiB: the layers and the", describe(report))


@pytest.mark.parametrize("name", ["Q4_K_M", "tied"])
def test_a_vocabulary_is_fitted_in_blocks(name: str) -> None:
    given = loaded(llama_file(name), torch.float32, blocks=True)
    embed, head = (given.get(key, given["embed"]).dequantize(torch.float32) for key in ("embed", "lm_head"))
    for size in (len(embed) - 3, len(embed) + 3):
        fitted = dict(given)
        tokens = fit_weights(fitted, size, None)
        assert tokens is None if size < len(embed) else tokens.tolist() == [*range(len(embed))]
        rows = F.pad(embed, (0, 0, 0, max(0, size - len(embed))))[:size]
        assert torch.equal(fitted["embed"].dequantize(torch.float32), rows)
        assert torch.equal(fitted.get("lm_head", fitted["embed"]).dequantize(torch.float32), head[:size])


@pytest.mark.slow
def test_products_are_in_blocks_only_as_a_whole(tmp_path: Path) -> None:
    types = {"blk.0.attn_k.weight": "Q4_0", "blk.0.attn_v.weight": "Q6_K", "blk.0.ffn_up.weight": "Q8_0"}
    types |= {"blk.1.ffn_up.weight": "F16", "blk.1.ffn_down.weight": "F16"}
    path = write_gguf(tmp_path / "m.gguf", llama(), lambda name: types.get(name, "Q4_1"))
    held = read_config(path)["quantization_config"]["types"]
    assert held["model.layers.0.self_attn.q_proj.weight"] == ["Q4_1", 8, 16, True]
    of_layer = [{name.split(".")[-2] for name in held if f".{i}." in name} for i in (0, 1)]
    attention = {f"{part}_proj" for part in "qkvo"}
    assert of_layer == [attention | {"gate_proj", "up_proj", "down_proj"}, attention]
    assert_same_logits(path, open_llm(path, dtype="float32"))
    config = ModelConfig.from_hf(path)
    assert weight_bytes(config, torch.bfloat16, None) < config.shape.num_parameters() * 2


@pytest.mark.slow
def test_an_unquantised_file_can_be_quantised_while_loading() -> None:
    llm = open_llm(llama_file("F16"), quantization="int8", dtype="float32")
    assert llm.stats()["frozen"]["quantization"] == "int8"
    assert open_llm(llama_file("F16"), quantization="gguf").stats()["frozen"]["quantization"] is None
    assert open_llm(llama_file("Q4_0"), quantization="gguf").stats()["frozen"]["quantization"] == "gguf Q4_0"
    with pytest.raises(ValueError, match=r"is quantised already \(gguf Q4_0\)"):
        open_llm(llama_file("Q4_0"), quantization="int8")


@pytest.mark.slow
def test_end_tokens_and_sampling_parameters(tmp_path: Path) -> None:
    """Ids in the metadata come first, then control tokens that end a turn by their name."""

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(7)
        writer.add_eom_token_id(0)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 9)

    path = write_gguf(tmp_path / "m.gguf", llama(), change=more)
    assert ModelConfig.from_hf(path).eos_token_ids == (0, 7)
    params = open_llm(path).get_default_sampling_params()
    assert (params.temperature, params.top_k) == (0.5, 9)
    tokens = {"<|endoftext|>": 3, "a": 1, "<|im_end|>": 3, "</s>": 4, "<|end|>": 3, "<|im_start|>": 3}

    def ends(names: dict[str, int], **more: Any) -> tuple[int, ...]:
        vocabulary = {"tokens": list(names), "token_type": list(names.values())} | more
        metadata = {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
        return ModelConfig.from_hf(write_gguf(tmp_path / "m.gguf", llama(), tokenizer=metadata)).eos_token_ids

    assert ends(tokens) == (0, 2, 4)
    assert ends(tokens, eos_token_id=4, eos_token_ids=[4, 1]) == (4, 1, 0, 2)
    assert ends(tokens | {"<|return|>": 3}) == (0, 2, 6), "<|end|>, which ends a message of a turn here"
