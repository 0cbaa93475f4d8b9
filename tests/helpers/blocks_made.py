"""Tiny random DFlash drafts (arXiv 2602.06036) in their published layouts, and a reference of them, in float32."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.heads_made import (
    MASK,
    THETA,
    TargetShape,
    decoder_layer,
    draft_vocabulary,
    gains,
    layer_tensors,
    llama_config,
    matrix,
    norm,
    write_head,
)

DFlashLayout = Literal["z-lab", "transformers", "speculators"]
LAYERS = 2
HEAD_DIM = 16
RANK = 16  # of a DSpark draft's bias


def write_dflash(
    folder: Path,
    target: TargetShape,
    *,
    layout: DFlashLayout,
    read: tuple[int, ...] = (1, 4, 6),
    block_size: int = 6,
    draft_vocab: int | None = None,
    from_anchor: bool = False,
    markov: str | None = None,
    seed: int = 1,
    **changes: Any,
) -> None:
    """Writes a random DFlash draft, or a DSpark draft, whose bias by a node's token is `markov`, "vanilla" or "gated".

    `read` are the target's layers whose inputs it reads. `from_anchor`: the root's row predicts the next token.
    """
    generator, hidden = torch.Generator().manual_seed(seed), target.hidden_size
    tensors: dict[str, Tensor] = {}
    for i in range(LAYERS):
        tensors |= layer_tensors(f"layers.{i}.", target, hidden, HEAD_DIM, hidden, 1.5, generator)
        norms = {"input_layernorm": hidden, "self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
        tensors |= {f"layers.{i}.{name}.weight": gains(size, generator) for name, size in norms.items()}
    encoder = "encoder." if layout == "transformers" else ""
    state_norm = "output_norm_enc" if layout == "transformers" else "hidden_norm"
    tensors[f"{encoder}fc.weight"] = matrix(hidden, len(read) * hidden, 1.0, generator)
    tensors[f"{encoder}{state_norm}.weight"] = gains(hidden, generator)
    tensors["norm.weight"] = gains(hidden, generator)
    if draft_vocab is not None:
        tensors |= draft_vocabulary(target, draft_vocab, generator)
        tensors["lm_head.weight"] = matrix(draft_vocab, hidden, 2.0, generator)
    if markov is not None:
        tensors["markov_head.markov_w1.weight"] = torch.randn(target.vocab_size, RANK, generator=generator)
        tensors["markov_head.markov_w2.weight"] = matrix(draft_vocab or target.vocab_size, RANK, 1.5, generator)
        tensors["confidence_head.proj.weight"] = matrix(1, hidden + RANK, 1.0, generator)
        if markov == "gated":
            tensors["markov_head.gate_proj.weight"] = matrix(RANK, hidden + RANK, 2.0, generator)
            tensors["markov_head.gate_proj.bias"] = torch.randn(RANK, generator=generator)
    layers = llama_config(target, hidden) | {"num_hidden_layers": LAYERS, "head_dim": HEAD_DIM}
    layers |= {"attention_bias": False, "layer_types": ["full_attention"] * LAYERS}
    outputs = [layer - 1 for layer in read]
    config: dict[str, Any]
    if layout == "z-lab":
        config = layers | {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "rope_theta": THETA}
        config |= {"block_size": block_size, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": outputs}}
    elif layout == "transformers":
        parameters = {"rope_type": "default", "rope_theta": THETA}
        config = layers | {"model_type": "muse_glimmer_assistant", "rope_parameters": parameters, "mask_token_id": MASK}
        config |= {"architectures": ["MuseGlimmerAssistantModel"], "target_layer_ids": outputs}
        config |= {"block_size": block_size}
    else:
        config = {"speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"], "dtype": "float32"}
        config |= {"transformer_layer_config": layers | {"model_type": "qwen3", "rope_theta": THETA}}
        config |= {"aux_hidden_state_layer_ids": list(read), "mask_token_id": MASK, "block_size": block_size}
        config |= {"draft_vocab_size": draft_vocab or target.vocab_size, "sample_from_anchor": from_anchor}
        if markov is not None:
            config |= {"speculators_model_type": "dspark", "architectures": ["DSparkDraftModel"]}
            config |= {"markov_rank": RANK, "markov_head_type": markov}
    write_head(folder, config | changes, tensors)


def reference_dflash(
    folder: Path, embed: Tensor, lm_head: Tensor, root: int, states: Tensor, path: Sequence[int] = ()
) -> Tensor:
    """What a DFlash draft predicts below a root, logits [num_predicted, vocab]; a DSpark draft, one token below `path`.

    `states` [num_tokens, count, hidden] are the target's before the root, in the order of the config's layers.
    """
    config = json.loads((folder / "config.json").read_text())
    config |= config.get("transformer_layer_config", {}) | config.get("dflash_config", {})
    tensors = load_file(folder / "model.safetensors")
    weights = {
        name.removeprefix("encoder.").replace("output_norm_enc", "hidden_norm"): t for name, t in tensors.items()
    }
    eps, size = config["rms_norm_eps"], config["block_size"]
    context = norm(states.flatten(1) @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    x = embed[torch.tensor([root, *[config["mask_token_id"]] * (size - 1)])]
    for i in range(config["num_hidden_layers"]):
        normed = norm(x, weights[f"layers.{i}.input_layernorm.weight"], eps)
        x = decoder_layer(x, normed, config, weights, i, context)
    final = norm(x, weights["norm.weight"], eps)[0 if config.get("sample_from_anchor") else 1 :]
    logits = final @ weights.get("lm_head.weight", lm_head).T
    if "markov_head.markov_w1.weight" not in weights:
        return logits
    markov = {name.removeprefix("markov_head."): t for name, t in weights.items() if name.startswith("markov_head.")}
    before, final = markov["markov_w1.weight"][torch.tensor([root, *path])], final[: 1 + len(path)]
    if "gate_proj.weight" in markov:
        gate = F.linear(torch.cat((final, before), 1), markov["gate_proj.weight"], markov["gate_proj.bias"])
        before = before * torch.sigmoid(gate)
    return logits[: 1 + len(path)] + before @ markov["markov_w2.weight"].T
