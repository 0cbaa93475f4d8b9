"""Tiny random EAGLE heads in their published layouts, and references of what they compute.

A head reads hidden states of the target. Pair `t` is the target's feature at position `t` and the token at `t + 1`; it
has position `t`, and its output predicts the token at `t + 2`. A drafted token forms a pair with the output of the pair
before it. Everything is float32.

The references follow EAGLE (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from treespec_weights.draft_vocabulary import write_draft_vocabulary
from treespec_weights.state_projection import StateProjection, write_state_projection

Layout = Literal["eagle", "specforge", "speculators"]

MASK = 7
"""The token of a parallel head's pairs after the root."""

THETA = 5000.0
"""The rope base of heads that state one; the original EAGLE-3 layout states none, which means 10000."""


@dataclass(frozen=True)
class TargetShape:
    """What a head's shape depends on; the names are those of a Llama config."""

    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    vocab_size: int = 256
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


def write_eagle3(
    folder: Path,
    target: TargetShape,
    *,
    layout: Layout,
    draft_vocab: int | None,
    own_embedding: bool,
    seed: int,
    boundaries: tuple[int, ...] | None = None,
    hidden_size: int | None = None,
    parallel: int | None = None,
    **flags: bool,
) -> None:
    """Writes a random EAGLE-3 head, or a P-EAGLE head of two layers that predicts `parallel` tokens in a pass.

    `boundaries` are the target's layers whose inputs the head reads, ascending, by default 2, the middle one and the
    third from the end. `flags` are keys of the config, such as `norm_before_fc`.
    """
    hidden, count = hidden_size or target.hidden_size, len(boundaries or (0, 0, 0))
    vocab = draft_vocab or target.vocab_size
    generator = torch.Generator().manual_seed(seed)
    layer = "layers.0." if layout == "speculators" else "midlayer."
    head_dim = hidden // target.num_attention_heads if layout == "eagle" else target.head_dim  # "eagle" states none
    tensors = layer_tensors(layer, target, hidden, head_dim, 2 * hidden, 2.0, generator)
    tensors |= {f"{layer}{name}.weight": gains(hidden, generator) for name in ("input_layernorm", "hidden_norm")}
    tensors["fc.weight"] = matrix(hidden, count * target.hidden_size, 1.0, generator)
    tensors["norm.weight"] = gains(hidden, generator)
    tensors["lm_head.weight"] = matrix(vocab, hidden, 2.0, generator)
    if parallel is not None:
        tensors["mask_hidden"] = torch.randn(1, 1, count * target.hidden_size, generator=generator)
        tensors |= layer_tensors("layers.1.", target, hidden, head_dim, hidden, 1.0, generator)
        tensors["layers.1.input_layernorm.weight"] = gains(hidden, generator)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = gains(count * target.hidden_size, generator)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": gains(target.hidden_size, generator) for i in range(count)}
    if own_embedding:
        tensors["embed_tokens.weight"] = torch.randn(target.vocab_size, hidden, generator=generator)
    if draft_vocab is not None or layout == "specforge":  # SpecForge writes the identity too
        tensors |= draft_vocabulary(target, vocab, generator)
    config = _eagle3_config(target, layout, hidden, vocab, boundaries, flags)
    if parallel is not None:
        config |= {"speculators_model_type": "peagle", "architectures": ["PEagleDraftModel"], "mask_token_id": MASK}
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = parallel
        config["transformer_layer_config"]["num_hidden_layers"] = 2
    write_head(folder, config, tensors, "pytorch_model.bin" if layout == "eagle" else "model.safetensors")


def write_eagle1(
    folder: Path,
    target: TargetShape,
    *,
    layout: Literal["eagle", "speculators"] = "eagle",
    bias: bool,
    own_embedding: bool,
    seed: int,
    qkv_bias: bool = False,
) -> None:
    """Writes a random head of EAGLE-1 and EAGLE-2; "speculators" is the layout of that library before version 0.7."""
    generator = torch.Generator().manual_seed(seed)
    layer, fc = ("layers.0.", "fc") if layout == "eagle" else ("transformer.", "fusion_fc")
    hidden = target.hidden_size
    tensors = layer_tensors(layer, target, hidden, target.head_dim, hidden, 1.0, generator)
    tensors[f"{fc}.weight"] = matrix(hidden, 2 * hidden, 0.7, generator)
    if bias:
        tensors[f"{fc}.bias"] = 0.2 * torch.randn(hidden, generator=generator)
    if qkv_bias:
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = tensors[f"{layer}self_attn.{name}.weight"].shape[0]
            tensors[f"{layer}self_attn.{name}.bias"] = 0.2 * torch.randn(rows, generator=generator)
    if own_embedding:
        tensors["embed_tokens.weight"] = torch.randn(target.vocab_size, hidden, generator=generator)
    config = llama_config(target, hidden)
    if layout == "eagle":
        config |= {"architectures": ["LlamaForCausalLM"], "rope_theta": THETA, "bias": bias, "torch_dtype": "float32"}
        config |= {"qkv_bias": True} if qkv_bias else {}
    else:
        config |= {"rope_theta": THETA, "rope_scaling": None}
        head = {"architectures": ["EagleSpeculator", "LlamaDecoderLayer"], "fusion_bias": bias, "layernorms": False}
        config = _speculators("eagle", config) | head | {"transformer_layer_architecture": "LlamaDecoderLayer"}
    write_head(folder, config, tensors, "pytorch_model.bin" if layout == "eagle" else "model.safetensors")


def write_state_ssm(
    folder: Path, target: TargetShape, *, draft_vocab: int, layers: tuple[int, ...], tied: bool, seed: int
) -> None:
    """Writes a random SSM of two layers, and the projection of the states of the target's `layers`, ascending."""
    generator, hidden = torch.Generator().manual_seed(seed), target.hidden_size
    tensors = {"embed_tokens.weight": torch.randn(draft_vocab + 1, hidden, generator=generator)}
    tensors["norm.weight"] = gains(hidden, generator)
    for layer in ("layers.0.", "layers.1."):
        tensors |= layer_tensors(layer, target, hidden, target.head_dim, hidden, 1.0, generator)
        tensors[f"{layer}input_layernorm.weight"] = gains(hidden, generator)
    tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    if not tied:
        tensors["lm_head.weight"] = matrix(draft_vocab + 1, hidden, 2.0, generator)
    config = llama_config(target, hidden) | {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    config |= {"vocab_size": draft_vocab + 1, "num_hidden_layers": 2, "tie_word_embeddings": tied}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}}
    write_head(folder, config, tensors)
    ids = torch.randperm(target.vocab_size, generator=generator)[:draft_vocab].sort().values
    write_draft_vocabulary(folder, np.append(ids.numpy(), -1), target.vocab_size)
    states = len(layers) * target.hidden_size
    matrices = matrix(hidden, states, 1.0, generator), matrix(hidden, 2 * hidden, 1.0, generator)
    norms = gains(hidden, generator), gains(hidden, generator)
    write_state_projection(folder, StateProjection(*matrices, *norms), layers)


def _eagle3_config(
    target: TargetShape,
    layout: Layout,
    hidden: int,
    draft_vocab: int,
    boundaries: tuple[int, ...] | None,
    flags: dict[str, bool],
) -> dict[str, Any]:
    llama, own = llama_config(target, hidden), {"draft_vocab_size": draft_vocab}
    if hidden != target.hidden_size or layout == "speculators":
        own["target_hidden_size"] = target.hidden_size if hidden != target.hidden_size else None
    if layout == "eagle":
        return llama | own | {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
    own |= flags
    if layout == "specforge":
        if boundaries is not None:  # these ids are those of layers whose outputs are read
            ids = [boundary - 1 for boundary in boundaries]
            own["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
        rope = {"head_dim": target.head_dim, "rope_theta": THETA, "rope_scaling": None}
        return llama | rope | own | {"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "float32"}
    rope = {"head_dim": target.head_dim, "rope_parameters": {"rope_type": "default", "rope_theta": THETA}}
    all_flags = dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False)
    own = all_flags | own | {"eagle_aux_hidden_state_layer_ids": list(boundaries) if boundaries else None}
    return _speculators("eagle3", llama | rope) | {"architectures": ["Eagle3DraftModel"]} | own


def llama_config(target: TargetShape, hidden: int) -> dict[str, Any]:
    extra = {"hidden_act": "silu", "max_position_embeddings": 2048, "model_type": "llama", "tie_word_embeddings": False}
    return asdict(target) | extra | {"hidden_size": hidden, "num_hidden_layers": 1}


def _speculators(kind: str, llama: dict[str, Any]) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    described = {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"},
    }
    top = {"speculators_model_type": kind, "speculators_version": "0.9.0", "tie_word_embeddings": False}
    return top | {"speculators_config": described, "transformer_layer_config": llama, "dtype": "float32"}


def layer_tensors(
    prefix: str, target: TargetShape, hidden: int, head_dim: int, width: int, gain: float, generator: torch.Generator
) -> dict[str, Tensor]:
    """The matrices of a decoder layer whose attention reads `width`, and the norm of its MLP; `gain` makes it sharp."""
    queries, keys = target.num_attention_heads * head_dim, target.num_key_value_heads * head_dim
    shapes = {
        "self_attn.q_proj": (queries, width, gain),
        "self_attn.k_proj": (keys, width, gain),
        "self_attn.v_proj": (keys, width, gain),
        "self_attn.o_proj": (hidden, queries, gain),
        "mlp.gate_proj": (target.intermediate_size, hidden, gain),
        "mlp.up_proj": (target.intermediate_size, hidden, gain),
        "mlp.down_proj": (hidden, target.intermediate_size, gain),
    }
    tensors = {f"{prefix}{name}.weight": matrix(*shape, generator) for name, shape in shapes.items()}
    return tensors | {f"{prefix}post_attention_layernorm.weight": gains(hidden, generator)}


def matrix(rows: int, columns: int, gain: float, generator: torch.Generator) -> Tensor:
    return gain * columns**-0.5 * torch.randn(rows, columns, generator=generator)


def gains(size: int, generator: torch.Generator) -> Tensor:
    return 1.0 + 0.2 * torch.randn(size, generator=generator)


def draft_vocabulary(target: TargetShape, size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Some of the target's tokens, as the distances of their ids from the head's own, and as flags."""
    ids = torch.randperm(target.vocab_size, generator=generator)[:size].sort().values
    known = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return {"d2t": ids - torch.arange(size), "t2d": known}


def write_head(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str = "model.safetensors"
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file, metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / file)


def reference_eagle3(
    folder: Path, target_embed: Tensor, tokens: Sequence[int], features: Tensor, drafted: Sequence[int] = ()
) -> Tensor:
    """What an EAGLE-3 head says after each pair of `tokens`, x_0 to x_n, and of one path of drafted tokens.

    `features` is [n, count, hidden], lowest layer first. Logits are over the head's own vocabulary (`draft_ids`).
    """
    config, weights = _read(folder)
    eps = config["rms_norm_eps"]
    embedding = weights.get("embed_tokens.weight", target_embed)[torch.tensor([*tokens[1:], *drafted])]
    if config.get("norm_before_fc"):
        features = norm(features.flatten(1), weights["input_norm.weight"], eps).view_as(features)
    if config.get("fc_norm"):
        gains = torch.stack([weights[f"fc_norm.{i}.weight"] for i in range(features.shape[1])])
        features = norm(features, gains, eps)
    read = features.flatten(1) @ weights["fc.weight"].T
    while True:
        embedded = norm(embedding[: len(read)], weights["layers.0.input_layernorm.weight"], eps)
        normed = norm(read, weights["layers.0.hidden_norm.weight"], eps)
        residual = normed if config.get("norm_before_residual") else read
        hidden = decoder_layer(residual, torch.cat((embedded, normed), -1), config, weights)
        final = norm(hidden, weights["norm.weight"], eps)
        if len(read) == len(embedding):
            return final @ weights["lm_head.weight"].T
        read = torch.cat((read, (final if config.get("norm_output") else hidden)[-1:]))


def reference_peagle(folder: Path, target_embed: Tensor, tokens: Sequence[int], features: Tensor) -> Tensor:
    """What a P-EAGLE head predicts below the last of `tokens`, [num_predicted, draft_vocab]."""
    config, weights = _read(folder)
    eps, count = config["rms_norm_eps"], config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    embedding = weights.get("embed_tokens.weight", target_embed)
    embedded = embedding[torch.tensor([*tokens[1:], *[config["mask_token_id"]] * (count - 1)])]
    masks = weights["mask_hidden"][0].expand(count - 1, -1)
    read = torch.cat((features.flatten(1), masks)) @ weights["fc.weight"].T
    normed = norm(read, weights["layers.0.hidden_norm.weight"], eps)
    pairs = torch.cat((norm(embedded, weights["layers.0.input_layernorm.weight"], eps), normed), -1)
    hidden = decoder_layer(read, pairs, config, weights)
    normed = norm(hidden, weights["layers.1.input_layernorm.weight"], eps)
    hidden = decoder_layer(hidden, normed, config, weights, 1)
    return norm(hidden, weights["norm.weight"], eps)[-count:] @ weights["lm_head.weight"].T


def reference_eagle1(
    folder: Path, target_embed: Tensor, tokens: Sequence[int], features: Tensor, drafted: Sequence[int] = ()
) -> Tensor:
    """What an EAGLE head passes to the lm_head after each pair; `features` [n, hidden] come after the final norm."""
    config, weights = _read(folder)
    embedding = weights.get("embed_tokens.weight", target_embed)[torch.tensor([*tokens[1:], *drafted])]
    read = features
    while True:
        pairs = torch.cat((embedding[: len(read)], read), -1)
        x = F.linear(pairs, weights["fc.weight"], weights.get("fc.bias"))
        hidden = decoder_layer(x, x, config, weights)
        if len(read) == len(embedding):
            return hidden
        read = torch.cat((read, hidden[-1:]))


def reference_state_ssm(folder: Path, tokens: Sequence[int], features: Tensor, drafted: Sequence[int]) -> Tensor:
    """What an SSM with states predicts below the last of `drafted`, without its last row; see `reference_eagle3`."""
    config, weights = _read(folder)
    weights |= load_file(folder / "state_projection.safetensors")
    eps, ids, rows = config["rms_norm_eps"], draft_ids(folder).tolist(), weights["embed_tokens.weight"]
    row_of = {token: row for row, token in enumerate(ids)}
    embedding = rows[torch.tensor([row_of.get(token, len(ids)) for token in [*tokens[1:], *drafted]])]
    read = features.flatten(1) @ weights["fc"].T
    while True:
        embedded = norm(embedding[: len(read)], weights["enorm"], eps)
        x = torch.cat((embedded, norm(read, weights["hnorm"], eps)), -1) @ weights["eh_proj"].T
        for i in range(2):
            x = decoder_layer(x, norm(x, weights[f"layers.{i}.input_layernorm.weight"], eps), config, weights, i)
        x = norm(x, weights["norm.weight"], eps)
        if len(read) == len(embedding):
            return x[-1] @ weights.get("lm_head.weight", rows)[:-1].T
        read = torch.cat((read, x[-1:]))


def draft_ids(folder: Path) -> Tensor:
    """The target's ids of a head's own vocabulary, [draft_vocab]; `d2t` holds their distances from its own ids."""
    if (vocabulary := folder / "draft_vocab.safetensors").exists():
        return load_file(vocabulary)["target_ids"][:-1]
    config, weights = _read(folder)
    count = config.get("draft_vocab_size", config["vocab_size"])
    return torch.arange(count) + weights.get("d2t", torch.zeros(count, dtype=torch.long))


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A head's config, flat, and its tensors under one set of names."""
    config = json.loads((folder / "config.json").read_text())
    config |= config.get("transformer_layer_config", {})
    binary = folder / "pytorch_model.bin"
    tensors = torch.load(binary) if binary.exists() else load_file(folder / "model.safetensors")
    for old, new in (("model.", ""), ("midlayer.", "layers.0."), ("transformer.", "layers.0."), ("fusion_fc.", "fc.")):
        tensors = {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}
    return config, tensors


def norm(x: Tensor, gains: Tensor, eps: float) -> Tensor:
    return gains * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def decoder_layer(
    residual: Tensor, read: Tensor, config: dict[str, Any], weights: dict[str, Tensor], layer: int = 0, *before: Tensor
) -> Tensor:
    """A layer of Llama or Qwen3 over `read` [n, width]; behind a context `before`, each row sees all of the others."""
    own = {name.removeprefix(f"layers.{layer}."): tensor for name, tensor in weights.items()}
    head_dim, eps = len(own["self_attn.q_proj.weight"]) // config["num_attention_heads"], config["rms_norm_eps"]

    def project(name: str, x: Tensor) -> Tensor:
        return F.linear(x, own[f"{name}.weight"], own.get(f"{name}.bias"))

    def heads(name: str, x: Tensor) -> Tensor:
        x, gains = project(f"self_attn.{name}_proj", x), own.get(f"self_attn.{name}_norm.weight")
        x = x.unflatten(1, (-1, head_dim))
        return x if gains is None else norm(x, gains, eps)

    rows = torch.cat((*before, read))
    parts = rope(heads("q", read), config, len(rows) - len(read)), rope(heads("k", rows), config), heads("v", rows)
    query, key, value = (part.transpose(0, 1) for part in parts)
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=not before, enable_gqa=True)
    x = residual + project("self_attn.o_proj", attended.transpose(0, 1).flatten(1))
    normed = norm(x, own["post_attention_layernorm.weight"], eps)
    return x + project("mlp.down_proj", F.silu(project("mlp.gate_proj", normed)) * project("mlp.up_proj", normed))


def rope(x: Tensor, config: dict[str, Any], first: int = 0) -> Tensor:
    """Rotates [n, heads, head_dim] at positions from `first` on; the halves of a head are the pairs' components."""
    theta = config.get("rope_parameters", config).get("rope_theta", 10000.0)
    frequencies = 1.0 / theta ** (torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = (torch.arange(first, first + len(x))[:, None] * frequencies).repeat(1, 2)[:, None]
    low, high = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-high, low), -1) * angles.sin()
