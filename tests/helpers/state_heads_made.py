"""Tiny random Medusa (arXiv 2401.10774) and MLPSpeculator (arXiv 2404.19124) heads, and references of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.heads_made import TargetShape, matrix, write_head

MedusaLayout = Literal["authors", "tgi", "vllm"]


def write_medusa(
    folder: Path,
    target: TargetShape,
    *,
    layout: MedusaLayout,
    heads: int = 3,
    layers: int = 1,
    bias: bool = True,
    mapped: int | None = None,
    shared: bool = False,
    seed: int = 1,
) -> None:
    """Writes random Medusa heads. `mapped` tokens, and one vocabulary head for all, are of the layout of vLLM only."""
    generator, hidden, tensors = torch.Generator().manual_seed(seed), target.hidden_size, dict[str, Tensor]()
    for i in range(heads):
        for j in range(layers):
            name = f"blocks.{i}.layers.{j}" if layout == "vllm" else f"{i}.{j}.linear"
            tensors[f"{name}.weight"] = matrix(hidden, hidden, 2.0, generator)
            if bias:
                tensors[f"{name}.bias"] = 0.3 * torch.randn(hidden, generator=generator)
        if not (shared and i):
            name = f"lm_heads.{i}" if layout == "vllm" else f"{i}.{layers}"
            tensors[f"{name}.weight"] = matrix(target.vocab_size, hidden, 2.0, generator)
    config: dict[str, Any] = {"medusa_num_heads": heads, "medusa_num_layers": layers}
    config |= {"base_model_name_or_path": "target"}
    if layout == "vllm":
        config = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": hidden, "num_heads": heads}
        config |= {"num_hidden_layers": layers, "vocab_size": target.vocab_size, "medusa_fc_bias": bias}
        config |= {"truncated_vocab_size": mapped or target.vocab_size, "original_lm_head": shared}
        if mapped is not None:
            tensors["token_map"] = torch.randperm(target.vocab_size, generator=generator)[:mapped].sort().values
    files = {"authors": "medusa_lm_head.pt", "tgi": "medusa_lm_head.safetensors", "vllm": "model.safetensors"}
    write_head(folder, config, tensors, files[layout])


def write_speculator(
    folder: Path, target: TargetShape, *, depths: int = 3, inner: int = 48, tied: bool, scaled: bool, seed: int = 1
) -> None:
    """Writes a random MLPSpeculator; with `tied` weights, only the stages that differ are stored."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for i in range(1 if tied else depths):
        tensors[f"speculator.emb.{i}.weight"] = torch.randn(target.vocab_size, inner, generator=generator)
        tensors[f"speculator.head.{i}.weight"] = matrix(target.vocab_size, inner, 3.0, generator)
        tensors[f"speculator.ln.{i}.weight"] = 1 + 0.2 * torch.randn(inner, generator=generator)
        tensors[f"speculator.ln.{i}.bias"] = 0.2 * torch.randn(inner, generator=generator)
    for i in range(2 if tied else depths):
        size = inner if i else target.hidden_size
        tensors[f"speculator.proj.{i}.weight"] = matrix(inner, size, 1.0, generator)
    config = {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"], "n_predict": depths}
    config |= {"vocab_size": target.vocab_size, "emb_dim": target.hidden_size, "inner_dim": inner}
    config |= {"tie_weights": tied, "scale_input": scaled}
    write_head(folder, config, tensors)


def reference_medusa(folder: Path, state: Tensor, depth: int) -> Tensor:
    """The logits of the tokens at a depth, [vocab]; `state` is the target's output state before the root."""
    config = json.loads((folder / "config.json").read_text())
    layers = config.get("medusa_num_layers", config.get("num_hidden_layers"))
    file = next(file for file in folder.iterdir() if file.suffix in (".pt", ".safetensors"))
    tensors = torch.load(file) if file.suffix == ".pt" else load_file(file)
    i = depth - 1
    for j in range(layers):
        names = [f"blocks.{i}.layers.{j}.", f"{i}.{j}.linear."]
        weight, bias = (
            next((tensors[n + kind] for n in names if n + kind in tensors), None) for kind in ("weight", "bias")
        )
        state = state + F.silu(F.linear(state, weight, bias))
    heads = [f"lm_heads.{i}.weight", f"{i}.{layers}.weight", "lm_heads.0.weight"]
    logits = F.linear(state, next(tensors[name] for name in heads if name in tensors))
    if (kept := tensors.get("token_map")) is not None:
        logits = torch.full_like(logits, -torch.inf).index_copy(0, kept, logits[kept])
    return logits


def reference_speculator(folder: Path, state: Tensor, tokens: Sequence[int]) -> Tensor:
    """The logits after a path, [vocab]: `tokens` are the root and what is drafted below it."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")

    def weight(name: str, stage: int) -> Tensor:
        found = [f"speculator.{name.format(i)}" for i in range(stage, -1, -1)]
        return next(tensors[each] for each in found if each in tensors)

    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean() + 1e-6)

    kept = 0.5 ** (0.5 / config["n_predict"])
    new = ((1 - kept**2) * config["inner_dim"] / 2) ** 0.5
    if config["scale_input"]:
        state = norm(state) / 2**0.5
    for stage, token in enumerate(tokens):
        mixed = weight("proj.{}.weight", stage) @ state + new / kept * weight("emb.{}.weight", stage)[token]
        state = F.gelu(norm(mixed) * weight("ln.{}.weight", stage) + weight("ln.{}.bias", stage))
    return weight("head.{}.weight", len(tokens) - 1) @ state
