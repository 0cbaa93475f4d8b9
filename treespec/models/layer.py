"""Weights of one layer of the eager decoder, and fused projections for every decoder."""

from ctypes import CDLL
from typing import Any

import torch
from torch import Tensor

from treespec.errors import ModelError
from treespec.models.model_config import ModelConfig
from treespec.models.norms import STREAMS, Norm, take_head_norm
from treespec_kernels.linear.compiled_linear import CompiledLinear, quantized_linear
from treespec_kernels.linear.linear import Linear, LinearImpl
from treespec_kernels.linear.quantized import QuantizedWeight, stacked


def make_linear(
    weight: Tensor | QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, impl: LinearImpl, library: CDLL | None
) -> Linear | CompiledLinear:
    """Return the linear layer of a weight; `library` computes a quantised one, as in `Decoder`."""
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(weight, bias, dtype, impl, library)
    return Linear(weight, bias, impl)


def take_projection(weights: dict[str, Tensor], prefix: str, names: tuple[str, ...]) -> Tensor | QuantizedWeight:
    """Pop and concatenate the matrices `prefix + name`, with their scales and zero points."""
    values = [weights.pop(prefix + name) for name in names]
    scales = [weights.pop(f"{prefix}{name}_scale", None) for name in names]
    zeros = [weights.pop(f"{prefix}{name}_zero", None) for name in names]
    if all(scale is None for scale in scales):
        return torch.cat(values) if len(values) > 1 else values[0]
    parts = [QuantizedWeight(v, s, z) for v, s, z in zip(values, scales, zeros, strict=True) if s is not None]
    if len(parts) < len(names) or len({(part.bits, part.group) for part in parts}) > 1:
        raise ModelError(
            f"{', '.join(prefix + name for name in names)} are fused into one product, but not all quantised alike; "
            "use a checkpoint that quantises all of them or none"
        )
    for part in parts:
        part.check()
    return stacked(parts) if len(parts) > 1 else parts[0]


def take_layer(weights: dict[str, Tensor], i: int) -> dict[str, Any]:
    """Pop layer i: the fused projections `qkv`, `o`, `gate_up` and `down`, their biases, and the norms of its inputs.

    Parts that the family lacks are None. The first layer of a draft head has no `qkv`: the head computes these
    projections.
    """
    prefix = f"layers.{i}."
    gate_up = ("gate", "up") if f"{prefix}gate" in weights else ("up",)
    layer: dict[str, Any] = {}
    for name, fused in {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": gate_up, "down": ("down",)}.items():
        layer[name] = take_projection(weights, prefix, fused) if prefix + fused[0] in weights else None
        biases = [weights.pop(f"{prefix}{part}_bias", None) for part in fused]
        present = [bias for bias in biases if bias is not None]
        layer[f"{name}_bias"] = torch.cat(present) if present else None
    norms = ("attn_norm", "attn_norm_bias", "attn_post_norm", "mlp_norm", "mlp_norm_bias", "mlp_post_norm")
    return layer | {name: weights.pop(prefix + name, None) for name in norms}


class Layer:
    """Weights of one layer with fused projections. Parts that the family lacks are None.

    The first layer of a draft head has no `qkv`: the head computes these projections.

    `rope` indexes its cos in `Pass.rotation`, `window` its plan in `Pass.attention`.
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        i: int,
        config: ModelConfig,
        impl: LinearImpl,
        dtype: torch.dtype,
        library: CDLL | None,
    ):
        def take(*names: str) -> Tensor | None:
            tensors = [weights.pop(f"layers.{i}.{name}", None) for name in names]
            present = [tensor for tensor in tensors if tensor is not None]
            return (torch.cat(present) if len(present) > 1 else present[0]) if present else None

        def linear(*names: str) -> Linear | CompiledLinear:
            weight, bias = take_projection(weights, f"layers.{i}.", names), take(*(f"{name}_bias" for name in names))
            return make_linear(weight, bias, dtype, impl, library)

        def norm(name: str) -> Norm | None:
            weight = take(name)
            return None if weight is None else STREAMS[config.rules.norm].take(weight, take(f"{name}_bias"))

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
        return sum(getattr(weight, "nbytes", 0) for weight in vars(self).values())
