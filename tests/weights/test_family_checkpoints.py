"""Checkpoints of every family as they are published: older spellings, base models, buffers; and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.families import TYPICAL, VOCAB, WINDOW, make_model
from tests.helpers.logits import error, our_logits, their_logits
from tests.helpers.models import edit_config, greedy, open_llm, random_prompts
from treespec import SpecConfig
from treespec.errors import ModelError
from treespec.models.model_config import ModelConfig
from treespec_kernels.comparison import assert_close
from treespec_weights import CheckpointConfigError, inspect_checkpoint, verify_checkpoint

(TOKENS,) = random_prompts((90,), vocab=VOCAB)


def logits_of(folder: Path, **options: Any) -> Tensor:
    """[90, vocab]."""
    return our_logits(open_llm(folder, exact=False, **options), TOKENS)


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA3 = {"rope_theta": 300.0, "rope_local_base_freq": 70.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
PHI3 = {"rope_theta": 300.0, "partial_rotary_factor": 0.75, "rope_scaling": None, "sliding_window": WINDOW}
MISTRAL = {"rope_theta": 300.0, "hidden_size": 64, "torch_dtype": "float32"}
OLDER: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "theta of Mistral at the top": ("mistral", ("rope_parameters", "head_dim"), MISTRAL),
    "rope_scaling by type of Llama": ("llama", ("rope_parameters",), {"rope_theta": 300.0, "rope_scaling": YARN}),
    "rotary_pct of NeoX": ("gpt_neox", ("rope_parameters",), {"rotary_pct": 0.25, "rotary_emb_base": 300}),
    "local and global theta of Gemma 3": ("gemma3", ("rope_parameters",), GEMMA3),
    "sliding_window_pattern of Gemma 3": ("gemma3", ("layer_types",), {"sliding_window_pattern": 2}),
    "Phi-3 of before": ("phi3", ("rope_parameters",), PHI3),
    "windows of Qwen 2 by max_window_layers": ("qwen2", ("layer_types",), {"max_window_layers": 2}),
    "pattern of Nemotron-H": ("nemotron_h", ("layers_block_type",), {"hybrid_override_pattern": "ME*-M"}),
    "head size of Falcon-H1": (
        "falcon_h1",
        ("rope_parameters",),
        {"rope_theta": 300.0, "mamba_d_head": "auto", "attn_layer_indices": None},
    ),
    "layers of Granite 4": ("granite_hybrid", ("mamba_d_head",), {"layer_types": ["mamba", "attention", "mamba"]}),
}
# Added to a config.json that transformers 5 wrote, as model cards advise. Config classes of other families read it as
# Llama's does, or have no such scaling.
SCALED: dict[str, Any] = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
OLDER |= {
    f"rope_scaling beside rope_parameters of {case}": (case, (), SCALED) for case in ("llama", "gemma3", "gpt_neox")
}


@pytest.mark.parametrize("name", OLDER)
def test_older_spellings(name: str, tmp_path: Path) -> None:
    """They mean to us what they mean to transformers."""
    case, drop, values = OLDER[name]
    wide = {"hidden_size": 64} if "hidden_size" in values else {}
    folder = edit_config(make_model(tmp_path / "model", TYPICAL[case], 7, **wide), drop, **values)
    assert_close(logits_of(folder), their_logits(folder, TOKENS), max_error=1e-3, rms_error=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name, dtype", [*((name, torch.bfloat16) for name in TYPICAL), ("llama", torch.float16)])
def test_half_precision(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """As far from fp32 as transformers is; float32 is cast while loading."""
    folder = make_model(tmp_path / "model", TYPICAL[name], 7, dtype)
    rounded, exact = (their_logits(folder, TOKENS, each).float() for each in (dtype, torch.float32))
    ours = logits_of(folder, dtype=str(dtype).removeprefix("torch."))
    # In the median row, because rounding makes a row choose another expert now and then.
    own, theirs = ((logits.float() - exact).square().mean(-1).median() for logits in (ours, rounded))
    assert ours.dtype == dtype and own < 1.2 * theirs
    assert error(logits_of(folder, dtype=torch.float32), exact) < 1e-4


MASKS = {"rotary_emb.inv_freq": (2,), "bias": (1, 1, 8, 8), "masked_bias": ()}
BUFFERS: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {  # the prefix that is dropped, and buffers of a layer
    "gpt2": ("transformer.", {"h.{i}.attn.bias": (1, 1, 8, 8), "h.{i}.attn.masked_bias": ()}),
    "opt": ("model.", {}),
    "gpt_neox": ("", {f"gpt_neox.layers.{{i}}.attention.{name}": shape for name, shape in MASKS.items()}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUFFERS)
def test_checkpoints_of_first_releases(name: str, tmp_path: Path) -> None:
    """Of the base model alone, without a prefix and a head, and with buffers of masks and rotations."""
    folder = make_model(tmp_path / "model", TYPICAL[name], 7)
    expected = logits_of(folder)
    prefix, buffers = BUFFERS[name]
    tensors = load_file(folder / "model.safetensors")
    kept = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    kept |= {key.format(i=i): torch.ones(shape) for i in range(3) for key, shape in buffers.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits_of(folder), expected)
    assert verify_checkpoint(folder).ok and len(inspect_checkpoint(folder)["ignored"]) == 3 * len(buffers)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "Gemma 3 with pictures": ("gemma3", {"model_type": "gemma3"}, "'gemma3'"),
    "both directions": ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention.*True"),
    "norms after": ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before.*False"),
    "a narrow embedding": ("opt", {"word_embed_proj_dim": 24}, "word_embed_proj_dim.*24"),
    "no final norm": ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm.*True"),
    "scores by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx.*True"),
    "unscaled scores": ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights.*False"),
    "cross attention": ("gpt2", {"add_cross_attention": True}, "add_cross_attention.*True"),
    "layers of Ministral": ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types.*full_attention"),
    "an activation": ("opt", {"activation_function": "quick_gelu"}, "activation_function='quick_gelu'"),
    "a kind of layer": ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    "a window": ("mistral", {"sliding_window": -3}, "sliding_window.*-3"),
    "half a pair": ("llama", {"head_dim": 15}, "a head of 15; both must be even"),
    "limits of time steps": ("granite_hybrid", {"time_step_limit": [0.01, 0.1]}, r"time_step_limit.*\[0.01, 0.1\]"),
    "a norm before the gate": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
        "before_gate.*True",
    ),
    "one bias of two": ("falcon_h1", {"projectors_bias": True}, "projectors_bias.*True.*mamba_proj_bias"),
    "a factor too few": ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers.*expected 5 positive numbers"),
    "a part of nothing": ("gpt_neox", {"rotary_pct": 1.5, "rope_parameters": None}, "partial_rotary_factor=1.5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_variants_that_no_declaration_covers(name: str, tmp_path: Path) -> None:
    case, values, words = REFUSED[name]
    folder = edit_config(make_model(tmp_path / "model", TYPICAL[case], 7), **values)
    with pytest.raises((CheckpointConfigError, ModelError), match=words):
        ModelConfig.from_hf(folder)


@pytest.mark.slow
def test_a_draft_of_fewer_positions_than_the_target(tmp_path: Path) -> None:
    """What it learned of no position it guesses with the last one."""
    target = make_model(tmp_path / "target", TYPICAL["gpt2"], 7)
    draft = make_model(tmp_path / "draft", TYPICAL["opt"], 8, max_position_embeddings=32)
    llm = open_llm(target, [draft])
    (prompt,) = random_prompts((60,), vocab=VOCAB)
    spec = SpecConfig(branching=(2, 1), sources=("ssm",))
    (plain,), (tree,) = (llm.generate(prompt, greedy(8), each) for each in ("off", spec))
    assert plain.outputs[0].token_ids == tree.outputs[0].token_ids
