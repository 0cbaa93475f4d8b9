"""Weights of one layer of the eager decoder."""

import torch
from torch import Tensor

from treespec.config import ModelConfig
from treespec.models.norms import Norm, take_head_norm
from treespec.models.quantized_weights import take_projection
from treespec_kernels.linear.linear import Linear


class Layer:
    """Weights of one layer with fused projections. Parts that the family lacks are None.

    The first layer of a draft head has no `qkv`: the head computes these projections.

    `rope` indexes its cos in `Pass.rotation`, `window` its plan in `Pass.attention`.
    """

    def __init__(self, weights: dict[str, Tensor], i: int, config: ModelConfig, dtype: torch.dtype):
        def take(*names: str) -> Tensor | None:
            parts = [weights.pop(f"layers.{i}.{name}", None) for name in names]
            present = [part for part in parts if part is not None]
            return (torch.cat(present) if len(present) > 1 else present[0]) if present else None

        def linear(*names: str) -> Linear:
            weight, bias = take_projection(weights, f"layers.{i}.", names), take(*(f"{name}_bias" for name in names))
            return Linear(weight, bias, dtype)

        def norm(name: str) -> Norm | None:
            weight = take(name)
            bias, kind = take(f"{name}_bias"), config.rules.norm
            return None if weight is None else Norm.of(kind, weight, bias, config.norm_eps)

        attn_norm, mlp_norm = norm("attn_norm"), norm("mlp_norm")
        assert attn_norm is not None and mlp_norm is not None
        self.attn_norm, self.mlp_norm = attn_norm, mlp_norm
        self.attn_post_norm, self.mlp_post_norm = norm("attn_post_norm"), norm("mlp_post_norm")
        self.qkv = linear("q", "k", "v") if f"layers.{i}.q" in weights else None
        self.o, self.up, self.down = linear("o"), linear("up"), linear("down")
        self.gate = linear("gate") if config.shape.gated else None
        self.head_norm = take_head_norm(weights, f"layers.{i}.", config.shape.num_heads, config.shape.num_kv_heads)
        self.rope, self.window = 2 * config.layers[i].rope, config.windows.index(config.layers[i].window)

    @property
    def nbytes(self) -> int:
        parts = (
            self.attn_norm,
            self.mlp_norm,
            self.attn_post_norm,
            self.mlp_post_norm,
            self.head_norm,
            self.qkv,
            self.o,
            self.gate,
            self.up,
            self.down,
        )
        return sum(part.nbytes for part in parts if part is not None)
