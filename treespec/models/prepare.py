"""Weight transformations shared by all decoders, applied before fusing or packing."""

import itertools

import torch
from torch import Tensor

from treespec.models.model_config import ModelConfig


def prepare(config: ModelConfig, weights: dict[str, Tensor]) -> None:
    """Transform decoder parameters in place.

    - Norms that scale by 1 + w store 1 + w in fp32, because the bf16 sum would lose precision.
    - With partial rotary embedding, q and k (weights with scales and zero points, biases, head norms) are permuted to
      `Rope.head_order`, so that rotation works as in all other models.
    """
    if config.rules.norm == "rms_plus_one":
        for name in weights:
            if name.rpartition(".")[2].endswith("norm"):
                weights[name] = 1.0 + weights[name].float()
    for i, kind in enumerate(config.layers):
        order = config.ropes[kind.rope].head_order if config.ropes else None
        if order is not None:
            for name, suffix in itertools.product(("q", "k"), ("", "_scale", "_zero", "_bias", "_norm")):
                key = f"layers.{i}.{name}{suffix}"
                if key in weights:  # [num_heads * head_dim, ...]
                    heads = weights[key].unflatten(0, (-1, len(order)))
                    weights[key] = torch.index_select(heads, 1, order.to(heads.device)).flatten(0, 1)
