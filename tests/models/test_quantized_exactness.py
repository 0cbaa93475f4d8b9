"""Quantised models: trees give the tokens and the logits, bit for bit, of plain decoding, and what the API says."""

import functools
import logging
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.exactness import assert_exact, differences, run
from tests.helpers.families import TYPICAL, VOCAB, Case, make_model
from tests.helpers.logits import our_logits
from tests.helpers.models import (
    OracleDrafter,
    exact_in_compiled,
    greedy,
    make_llama,
    new_folder,
    open_llm,
    random_prompts,
    tiny,
)
from tests.helpers.quantized_checkpoints import needs_compiler, quantize_folder
from treespec import LLM, SpecConfig
from treespec.errors import ConfigError, ModelError
from treespec.models.model_config import ModelConfig
from treespec.models.triton_weights import ModelWeights
from treespec.startup.cost_measurement import cost_key
from treespec.startup.memory import weight_bytes
from treespec_kernels.comparison import assert_close
from treespec_kernels.cpu.compiled_linear import CompiledLinear
from treespec_kernels.linear.quantized import QuantizedWeight, dequantized
from treespec_weights import convert_checkpoint, load_weights

LENGTHS, TOKENS = (1, 62, 64, 126), 14
SPECS = [SpecConfig(nodes=16), SpecConfig(nodes=40, max_depth=4), SpecConfig(branching=(3, 2, 1))]


@functools.cache
def engine(dtype: torch.dtype, quantization: str | None, compile: bool, with_drafts: bool = True) -> LLM:
    target, drafts = tiny(dtype)
    return open_llm(target, drafts if with_drafts else [], quantization=quantization, compile=compile)


@needs_compiler
@exact_in_compiled
@pytest.mark.parametrize(
    ("quantization", "compile"),
    [
        ("int4", True),
        ("int8", False),
        pytest.param("int8", True, marks=pytest.mark.slow),
        pytest.param("int4", False, marks=pytest.mark.slow),
    ],
)
def test_trees_have_the_bits_of_plain_decoding(dtype: torch.dtype, quantization: str, compile: bool) -> None:
    prompts, sampled = random_prompts(LENGTHS), greedy(TOKENS, temperature=0.8, seed=5)
    llm = engine(dtype, quantization, compile)
    plain = run(engine(dtype, quantization, compile, False), prompts, greedy(TOKENS))
    for spec in SPECS:
        assert assert_exact(llm, plain, spec).acceptance_length > 1.2
    assert not differences(run(llm, prompts, sampled, "off"), run(llm, prompts, sampled, SPECS[0]))
    full = run(engine(dtype, None, compile, False), prompts, greedy(TOKENS))
    common = full.logits.keys() & plain.logits.keys()
    assert common and not all(torch.equal(full.logits[p], plain.logits[p]) for p in common)  # it is quantised


@needs_compiler
def test_weights_read_past_the_caches_give_the_same_bits() -> None:
    """As those of models that exceed the L3 cache are, here of one byte."""
    target, _ = tiny(torch.bfloat16)
    outputs = []
    for size in (None, 1):
        with mock.patch("treespec_kernels.cpu.decoder_cpu.l3_bytes", return_value=size):
            llm = open_llm(target, [], quantization="int4", compile=True)
        assert llm.engine.runner.target.compiled.model.streams == (size == 1)
        outputs.append(run(llm, random_prompts(LENGTHS), greedy(TOKENS)))
    assert not differences(*outputs)


@needs_compiler
def test_compiled_drafts_are_quantised_and_outputs_stay(tmp_path: Path) -> None:
    """By default, and those stored in fp8 too; their heads as well. Eager ones are not."""
    target, drafts = tiny(torch.bfloat16)
    convert_checkpoint(drafts[0], tmp_path / "fp8", quantization="fp8-all")
    folders = [*drafts, tmp_path / "fp8"]
    plain = run(engine(torch.bfloat16, None, True, False), random_prompts(LENGTHS), greedy(TOKENS))
    bytes_by_form = {}
    for form in ("auto", "int8", None):
        llm = open_llm(target, folders, compile=True, draft_quantization=form)
        models = llm.engine.sources.ssms.models
        assert {model.quantization for model in models} == {None if form is None else "int8"}
        assert llm.engine.runner.target.quantization is None
        bytes_by_form[form] = models[0].nbytes - models[0].embed.nbytes
        assert assert_exact(llm, plain, SPECS[0]).acceptance_length > 1.2
    assert bytes_by_form["auto"] == bytes_by_form["int8"] < 0.75 * bytes_by_form[None]
    eager = open_llm(target, drafts, compile=False).engine.sources.ssms
    assert {model.quantization for model in eager.models} == {None}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"draft_quantization": "int8"}, "draft_quantization='int8' is for compiled passes on a CPU"),
    ({"draft_quantization": "int4"}, "draft_quantization='int4'; valid: 'auto', 'int8', None"),
    ({"quantization": "int8", "activations": "int8"}, "activations='int8' is for compiled passes on a CPU"),
    ({"activations": "int4"}, "activations='int4'; valid: 'model', 'int8'"),
    ({"activations": "int8", "compile": True}, "activations='int8' is for quantised weights; set quantization"),
    ({"quantization": "int3"}, "quantization='int3'; valid: None, 'int8', 'int4'"),
]


@needs_compiler
@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    target, drafts = tiny(torch.bfloat16)
    with pytest.raises(ConfigError, match=message):
        open_llm(target, drafts, **({"compile": False} | options))


@needs_compiler
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_int8_activations_keep_trees_exact(quantization: str) -> None:
    target, drafts = tiny(torch.bfloat16)
    llm = open_llm(target, drafts, compile=True, quantization=quantization, activations="int8")
    tree, plain = (run(llm, random_prompts(LENGTHS), greedy(TOKENS), spec) for spec in (SPECS[0], "off"))
    assert not differences(plain, tree) and tree.acceptance_length > 1.2
    assert llm.stats()["frozen"]["quantization"].endswith(", int8 activations")
    model = open_llm(target, drafts, compile=True, quantization=quantization)
    prompt, params = random_prompts(LENGTHS)[:1], greedy(1, logprobs=5)
    first = [engine.generate(prompt, params)[0].outputs[0].logprobs for engine in (llm, model)]
    assert first[0] != first[1]


@needs_compiler
def test_weights_that_cannot_be_quantised(tmp_path: Path) -> None:
    target, drafts = tiny(torch.bfloat16)
    broken = shutil.copytree(drafts[0], tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"broken: .*NaN.*; draft_quantization=None loads it as it is"):
        open_llm(target, [broken], compile=True, draft_quantization="auto")
    assert open_llm(target, [broken], compile=True, draft_quantization=None).draft_names == ("broken",)
    uneven = make_llama(tmp_path / "uneven", 0, num_hidden_layers=1, intermediate_size=80)
    with pytest.raises(ConfigError, match="80 is no multiple; use int8"):
        open_llm(uneven, quantization="int4")


@needs_compiler
def test_a_stored_quantised_model_has_the_tokens_and_bits_of_one_quantised_while_loading() -> None:
    prompts, params = random_prompts((5, 40)), greedy(8)
    for quantization, bits, group in (("int8", 8, None), ("int4", 4, 64)):
        folder = make_llama(new_folder("stored") / "m", 0, torch.bfloat16)
        loading = run(open_llm(folder, quantization=quantization), prompts, params)
        stored = open_llm(quantize_folder(folder, bits, group))
        assert not differences(loading, run(stored, prompts, params))
        assert stored.stats()["frozen"]["quantization"] == ("int8" if bits == 8 else "int4 groups of 64")
        with pytest.raises(ConfigError, match=r"is quantised already \(compressed-tensors int"):
            open_llm(folder, quantization="int8")


@needs_compiler
@pytest.mark.parametrize("compile", [False, True])
def test_a_stored_head_is_multiplied_as_stored(compile: bool) -> None:
    folder = quantize_folder(make_llama(new_folder("stored") / "m", 0, torch.bfloat16), 8, None, head=True)
    prompts, params = random_prompts((5, 40)), greedy(8)
    llm = open_llm(folder, [folder], compile=compile)
    assert not differences(run(llm, prompts, params, "off"), run(llm, prompts, params, SpecConfig(nodes=16)))
    config = ModelConfig.from_hf(folder)
    weights = load_weights(folder, config.shape, config.rules)
    head = dequantized(QuantizedWeight(weights["lm_head"], weights["lm_head_scale"])).bfloat16()
    logits = llm.engine.runner.target.logits(torch.eye(config.shape.hidden_size, dtype=torch.bfloat16))
    assert torch.equal(logits.T, head)
    assert torch.equal(ModelWeights.take(weights["embed"], weights, config.shape).head[0], head), "on a GPU"


@needs_compiler
def test_what_the_engine_says() -> None:
    plain, int8, int4 = (engine(torch.bfloat16, q, True, False) for q in (None, "int8", "int4"))
    said = [llm.stats()["frozen"]["quantization"] for llm in (plain, int8, int4)]
    assert said == [None, "int8", "int4 groups of 64"]
    held = [llm.stats()["memory"]["target_weights"] for llm in (plain, int8, int4)]
    assert held[0] > held[1] > held[2]
    config = ModelConfig.from_hf(tiny(torch.bfloat16)[0])
    planned = [weight_bytes(config, torch.bfloat16, q) for q in (None, "int8", "int4")]
    assert planned[0] > planned[1] > planned[2]
    keys = [cost_key(llm.engine.runner, None, 1) for llm in (plain, int8, int4)]
    assert not any(keys[0]["quantization"]) and keys[1] != keys[2] and keys[1]["quantization"] == ["int8"]
    assert isinstance(engine(torch.float32, "int8", False).engine.runner.target.layers[0].down, CompiledLinear)


def test_without_a_compiler_it_says_so_and_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafts = tiny(torch.float32)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING, "treespec"):
        llm = open_llm(target, drafts, compile=False, quantization="int4", prove=True)
    assert "quantised weights are held as torch.float32" in caplog.text
    assert_exact(llm, run(llm, random_prompts(LENGTHS[:3]), greedy(8)), SPECS[0])


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("case", TYPICAL.values(), ids=TYPICAL)
def test_int8_of_every_family(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the dequantised weights; the reference of these is in tests/weights/test_quantize.py."""
    source, oracle = make_model(tmp_path / "model", case, 3), OracleDrafter([], 6, vocab=VOCAB)
    llm = open_llm(source, [oracle], compile=False, quantization="int8")
    assert llm.stats()["frozen"]["quantization"] == "int8"
    monkeypatch.setenv("CXX", "no-such-compiler")
    held = open_llm(source, compile=False, quantization="int8")
    (tokens,) = random_prompts((70,), vocab=VOCAB)
    assert_close(our_logits(llm, tokens), our_logits(held, tokens), max_error=1e-3, rms_error=2e-5)
    plain = run(llm, random_prompts((3, 40, 70), vocab=VOCAB), greedy(12))
    oracle.truths = plain.sequences
    assert assert_exact(llm, plain, SpecConfig(nodes=16)).acceptance_length > 2
