"""The decoder against transformers on random models: exactness is not bought with accuracy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.helpers.models import LONGROPE, VOCAB, edit_config, greedy, make_llama, open_llm, random_prompts
from treespec import LLM, SpecConfig
from treespec.request import Request
from treespec.sampling_params import SamplingParams
from treespec.tree import TokenTree
from treespec_kernels.tuning.testing import assert_close

pytestmark = pytest.mark.slow

LENGTH = 160  # tokens of a comparison; behind the first tile's border, and behind the second's
MAX_LEN = 256

BETAS = {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn with betas": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, **BETAS},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64, **BANDS},
    "longrope": LONGROPE | {"factor": 4.0},
}

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one kv head": {"num_key_value_heads": 1},
    "three heads": {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48},
    "wide heads": {"head_dim": 32},
    "narrow heads": {"head_dim": 8},
    "heads of 12": {"head_dim": 12},
    "all biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "odd sizes": {"vocab_size": 509, "intermediate_size": 173, "hidden_size": 76, "num_attention_heads": 2},
    "large eps": {"rms_norm_eps": 0.1},
}

CASES = {f"rope: {name}": {"rope_parameters": {"rope_theta": 1e4} | rope} for name, rope in ROPES.items()} | SHAPES


def our_logits(llm: LLM, tokens: list[int]) -> Tensor:
    """[len(tokens), vocab] teacher-forced: half of the tokens as one prefill, the others a step each."""
    engine, half = llm.engine, len(tokens) // 2
    request = Request(tokens[: half + 1], SamplingParams(), SpecConfig.off(), max_tokens=len(tokens))
    request.pages = engine.cache.reserve(request.request_id, len(tokens) + 1)
    rows = []
    with torch.inference_mode():
        # Every position's logits: the prompt as one-node trees too, once it is prefilled.
        while request.context_len < half:
            engine.runner.prefill([request], [min(llm.config.prefill_chunk, half - request.context_len)])
        for position in range(half):
            replay = Request(tokens[: position + 1], SamplingParams(), SpecConfig.off(), max_tokens=len(tokens))
            replay.pages, replay.context_len = request.pages, position
            rows.append(engine.runner.logits([replay], [TokenTree.root(tokens[position])]))
        for position in range(half, len(tokens)):
            request.context_len = position
            rows.append(engine.runner.logits([request], [TokenTree.root(tokens[position])]))
    engine.cache.release(request.request_id)
    return torch.cat(rows).clone()


def their_logits(folder: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].clone()


def error(logits: Tensor, exact: Tensor) -> float:
    """The RMS of the difference, relatively."""
    return float((logits.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def assert_agrees(ours: Tensor, theirs: Tensor) -> None:
    """Close, and the same greedy choice at every position but where rounding decides."""
    assert_close(ours.float(), theirs.float(), max_error=2e-3, rms_error=1e-4)
    top = theirs.float().topk(2).values
    tied = top[:, 0] - top[:, 1] < 1e-4 * theirs.float().square().mean().sqrt()
    assert tied.float().mean() < 0.05
    assert bool(((ours.argmax(-1) == theirs.argmax(-1)) | tied).all())


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_logits_in_float32(config: dict[str, Any], tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model", 11, max_position_embeddings=MAX_LEN, **config)
    (tokens,) = random_prompts((LENGTH,), vocab=config.get("vocab_size", VOCAB))
    assert_agrees(our_logits(open_llm(folder), tokens), their_logits(folder, tokens))


@pytest.mark.parametrize("rope", ["default", "linear", "yarn", "llama3"])
def test_configurations_of_older_checkpoints(rope: str, tmp_path: Path) -> None:
    """As most published ones are: rope_theta and rope_scaling at the top, torch_dtype, no head_dim."""
    scaling = ROPES[rope] | {"rope_theta": 300.0}
    folder = make_llama(tmp_path / "model", 11, max_position_embeddings=MAX_LEN, rope_parameters=scaling)
    (tokens,) = random_prompts((LENGTH,))
    expected = their_logits(folder, tokens)
    for spelling in ("rope_type", "type"):
        older = {k: v for k, v in scaling.items() if not k.startswith("rope_")} | {spelling: rope}
        changes = {"rope_scaling": None if rope == "default" else older, "rope_theta": 300.0, "torch_dtype": "float32"}
        edit_config(folder, ("rope_parameters", "head_dim", "dtype"), **changes)
        assert_agrees(our_logits(open_llm(folder), tokens), expected)


def test_the_end_token_is_that_of_transformers(tmp_path: Path) -> None:
    """generation_config.json, a list there too, goes before config.json."""
    folder = make_llama(tmp_path / "model", 30)
    (prompt,) = random_prompts((9,))
    (whole,) = open_llm(folder).generate(prompt, greedy(40), "off")
    tokens = whole.outputs[0].token_ids
    ends = [tokens[12], tokens[25]]
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    (stopped,) = open_llm(folder).generate(prompt)
    first = min(tokens.index(end) for end in ends)
    assert stopped.outputs[0].token_ids == tokens[: first + 1]
    assert stopped.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("config", [{}, SHAPES["all biases"], {"rope_parameters": ROPES["llama3"]}], ids=str)
def test_half_precision(dtype: torch.dtype, config: dict[str, Any], tmp_path: Path) -> None:
    """As far from fp32 as transformers is, and finite."""
    folder = make_llama(tmp_path / "model", 40, dtype, **config)
    (tokens,) = random_prompts((LENGTH,))
    ours = our_logits(open_llm(folder, dtype=dtype), tokens)
    assert ours.dtype == dtype and ours.isfinite().all()
    theirs, exact = their_logits(folder, tokens, dtype), their_logits(folder, tokens)
    assert error(ours, exact) < 1.5 * error(theirs, exact) + 1e-3
    same, theirs_same = (float((x.argmax(-1) == exact.argmax(-1)).float().mean()) for x in (ours, theirs))
    assert same > max(0.8, theirs_same - 0.06)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", torch.float32])
def test_the_dtype_is_cast_on_load(dtype: str | torch.dtype, tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model", 50, torch.bfloat16)
    llm = open_llm(folder, dtype=dtype)
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    assert llm.config.dtype == llm.engine.runner.target.dtype == wanted
    (tokens,) = random_prompts((40,))
    found = our_logits(llm, tokens).float()
    assert error(found, their_logits(folder, tokens)) < (1e-4 if wanted == torch.float32 else 0.1)
