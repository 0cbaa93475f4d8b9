"""Weights of the decoders: their preparation, fused projections, and one layer of the eager decoder."""

import itertools
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


def prepare(config: ModelConfig, weights: dict[str, Tensor]) -> None:
    """Transform decoder parameters in place, before fusing or packing.

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
    matrices = [QuantizedWeight(v, s, z) for v, s, z in zip(values, scales, zeros, strict=True) if s is not None]
    if len(matrices) < len(names) or len({(matrix.bits, matrix.group) for matrix in matrices}) > 1:
        raise ModelError(
            f"{', '.join(prefix + name for name in names)} are fused into one product, but not all quantised alike; "
            "use a checkpoint that quantises all of them or none"
        )
    for matrix in matrices:
        matrix.check()
    return stacked(matrices) if len(matrices) > 1 else matrices[0]


def take_layer(weights: dict[str, Tensor], i: int, fuses_gate: bool = True) -> dict[str, Any]:
    """Pop layer i: the fused projections `qkv`, `o`, `gate_up` and `down`, their biases, and the norms of its inputs.

    Without `fuses_gate`, `gate` and `up` are two projections. Parts that the family lacks are None. The first layer of
    a draft head has no `qkv`: the head computes these projections.
    """
    prefix = f"layers.{i}."
    projections: dict[str, tuple[str, ...]] = {"qkv": ("q", "k", "v"), "o": ("o",), "down": ("down",)}
    if fuses_gate:
        projections["gate_up"] = ("gate", "up") if f"{prefix}gate" in weights else ("up",)
    else:
        projections |= {"gate": ("gate",), "up": ("up",)}
    layer: dict[str, Any] = {}
    for name, fused in projections.items():
        layer[name] = take_projection(weights, prefix, fused) if prefix + fused[0] in weights else None
        biases = [weights.pop(f"{prefix}{matrix}_bias", None) for matrix in fused]
        present = [bias for bias in biases if bias is not None]
        layer[f"{name}_bias"] = torch.cat(present) if present else None
    norms = ("attn_norm", "attn_norm_bias", "attn_post_norm", "mlp_norm", "mlp_norm_bias", "mlp_post_norm")
    return layer | {name: weights.pop(prefix + name, None) for name in norms}


class Layer:
    """Weights of one layer, as of `take_layer`.

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
        layer = take_layer(weights, i, fuses_gate=False)

        def linear(name: str) -> Linear | CompiledLinear:
            return make_linear(layer[name], layer[f"{name}_bias"], dtype, impl, library)

        def norm(name: str) -> Norm:
            return STREAMS[config.rules.norm].take(layer[name], layer.get(f"{name}_bias"))

        self.attn_norm, self.mlp_norm = norm("attn_norm"), norm("mlp_norm")
        self.attn_post_norm = None if layer["attn_post_norm"] is None else norm("attn_post_norm")
        self.mlp_post_norm = None if layer["mlp_post_norm"] is None else norm("mlp_post_norm")
        self.qkv = None if layer["qkv"] is None else linear("qkv")
        self.o, self.up, self.down = linear("o"), linear("up"), linear("down")
        self.gate = None if layer["gate"] is None else linear("gate")
        self.head_norm = take_head_norm(weights, f"layers.{i}.", config.shape.num_heads, config.shape.num_kv_heads)
        self.rope, self.window = 2 * config.layers[i].rope, config.windows.index(config.layers[i].window)

    @property
    def nbytes(self) -> int:
        return sum(getattr(weight, "nbytes", 0) for weight in vars(self).values())
