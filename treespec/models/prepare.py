"""What every decoder does with weights before it fuses or packs them."""

import itertools

import torch
from torch import Tensor

from treespec.config import ModelConfig


def prepare(config: ModelConfig, weights: dict[str, Tensor]) -> None:
    """Arrange decoder parameters by name for the pass, in place.

    * Norms that scale by 1 + w hold fp32 1 + w: in bf16 the sum would lose what w says.
    * Where only a part of a head is turned by position, the dimensions of q and k stand in `Rope.head_order`: weights
      with their scales and zero points, biases and the norms of heads. Then the halves of a head are turned against
      each other as in every other model.
    """
    if config.rules.norm == "rms_plus_one":
        for name in weights:
            if name.rpartition(".")[2].endswith("norm"):
                weights[name] = 1.0 + weights[name].float()
    for i, kind in enumerate(config.layers):
        order = config.ropes[kind.rope].head_order if config.ropes else None
        if order is not None:
            for name, part in itertools.product(("q", "k"), ("", "_scale", "_zero", "_bias", "_norm")):
                key = f"layers.{i}.{name}{part}"
                if key in weights:
                    weights[key] = _reordered(weights[key], order)


def _reordered(weight: Tensor, order: Tensor) -> Tensor:
    """Rows of [num_heads * head_dim, ...] in another order within each head."""
    heads = weight.unflatten(0, (-1, len(order)))
    return torch.index_select(heads, 1, order.to(weight.device)).flatten(0, 1)
