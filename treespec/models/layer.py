"""Weights of the decoders: their preparation, fused projections, and one layer of the eager decoder."""

import itertools
from collections.abc import Collection, Iterable, Mapping
from ctypes import CDLL
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from treespec.errors import ModelError
from treespec.models.model_config import ModelConfig
from treespec.models.norms import STREAMS, Norm, take_head_norm
from treespec.models.sparse_mlp import Expert, SparseMlp
from treespec_kernels.cpu.compiled_linear import CompiledLinear, quantized_linear
from treespec_kernels.linear.linear import Linear, LinearImpl
from treespec_kernels.linear.quantized import BlockWeight, QuantizedWeight, stacked
from treespec_kernels.linear.row_linear import RowLinear
from treespec_weights.blocks import Blocks, Weights

Products = Mapping[str, tuple[str, ...]]
"""Names of the matrices that are fused into each product of a layer, as far as the layer has them."""

_GATE, _UP = ("gate", "shared.gate"), ("up", "shared.up")
_QKV, _RATES = ("q", "k", "v"), ("beta", "decay")
_MIX = ("mix", "mix_q", "mix_k", "mix_v")
_OUTPUTS = {"o": ("o",), "mix_out": ("mix_out",), "down": ("down", "shared.down")}
_INPUTS = {"input_gate": ("input_gate",), "input_out": ("input_out",)}
_MIXER = {"mix": (*_MIX, "mix_gate"), "rates": _RATES}
COMPILED: Products = {
    "qkv": (*_QKV, "attn_gate"),
    "mix": (*_MIX, *_RATES, "mix_gate"),
    "gate_up": (*_GATE, *_UP),
    **_OUTPUTS,
    **_INPUTS,
}
EAGER: Products = {"qkv": (*_QKV, "attn_gate"), "gate": _GATE, "up": _UP, **_MIXER, **_OUTPUTS, **_INPUTS}
TRITON: Products = {
    "qkv": _QKV,
    "attn_gate": ("attn_gate",),
    "gate_up": (*_GATE, *_UP),
    "o": ("o", "mix_out"),
    "down": _OUTPUTS["down"],
    **_MIXER,
    **_INPUTS,
}


def present(names: Iterable[str], prefix: str, weights: Collection[str]) -> tuple[str, ...]:
    """Return those of the names that, with `prefix` before them, are among `weights`."""
    return tuple(name for name in names if prefix + name in weights)


def prepare(config: ModelConfig, weights: Weights) -> None:
    """Transform decoder parameters in place, before fusing or packing.

    - Norms that scale by 1 + w store 1 + w in fp32, because the bf16 sum would lose precision.
    - Parameters take the model's factors (`Factors`), and outputs of Mamba 2 that have no norm a gain of 1.
    - The final norm includes the factor on logits. A norm of attention and MLP is two norms.
    - Where values are the keys (`LayerSizes.has_v`), the matrices of K also get the names of those of V.
    - With partial or interleaved rotary embedding, q and k (weights with scales and zero points, biases, head norms)
      are permuted to `Rope.head_order`, so that rotation works as in all other models.
    """
    if config.rules.norm == "rms_plus_one":
        for name in weights:
            if name.rpartition(".")[2].endswith("norm"):
                weights[name] = 1.0 + weights[name].float()
    if config.logit_scale != 1 and (norm := weights.get("final_norm")) is not None:
        weights["final_norm"] = (norm.float() * config.logit_scale).to(norm.dtype)
    for i, kind in enumerate(config.layers):
        recurrent = config.shape.recurrent if kind.recurrent else None
        if recurrent is not None and not recurrent.normed and (skip := weights.get(f"layers.{i}.skip")) is not None:
            size = recurrent.heads * recurrent.value_dim
            weights[f"layers.{i}.mix_gain"] = torch.ones(size, dtype=torch.float32, device=skip.device)
        for name, factor in config.factors:
            if factor != 1 and (value := weights.get(f"layers.{i}.{name}")) is not None:
                kept = value.dtype if name.endswith("_bias") else torch.float32
                weights[f"layers.{i}.{name}"] = (value.float() * factor).to(kept)
        if not config.shape.layer(i).has_v:
            keys = ((suffix, weights.get(f"layers.{i}.k{suffix}")) for suffix in ("", "_scale", "_zero"))
            weights |= {f"layers.{i}.v{suffix}": key for suffix, key in keys if key is not None}
        if config.shape.shared_norm and (norm := weights.get(f"layers.{i}.attn_norm")) is not None:
            weights[f"layers.{i}.mlp_norm"] = norm
        order = config.ropes[kind.rope].head_order if config.ropes else None
        if order is not None:
            for name, suffix in itertools.product(("q", "k"), ("", "_scale", "_zero", "_bias", "_norm")):
                key = f"layers.{i}.{name}{suffix}"
                if key in weights:
                    weights[key] = _permuted(weights[key], order)


def _permuted(value: Any, order: Tensor) -> Any:
    """Return a parameter of q or k, [num_heads * head_dim, ...], with the rows of each head in another order."""
    if isinstance(value, Blocks):
        return value._replace(rows=_permuted(value.rows, order))
    heads = value.unflatten(0, (-1, len(order)))
    return torch.index_select(heads, 1, order.to(heads.device)).flatten(0, 1)


class LinearMaker(NamedTuple):
    """Implementation of a decoder's linear layers, in `dtype`."""

    impl: LinearImpl | Literal["triton"]
    dtype: torch.dtype
    library: CDLL | None = None  # computes quantised layers, as in `Decoder`; "triton" needs none

    def __call__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> Any:
        """Return the linear layer of a weight."""
        if self.impl == "triton":
            return RowLinear(weight, bias)
        if isinstance(weight, QuantizedWeight):
            return quantized_linear(weight, bias, self.dtype, self.impl, self.library)
        return Linear(weight, bias, self.impl)


def take_projection(weights: Weights, prefix: str, names: tuple[str, ...], joins: bool = True) -> Any:
    """Pop the matrices `prefix + name`, with their scales and zero points, and return the weight of their product.

    It is a Tensor or a QuantizedWeight of all outputs, or a list of weights if any of the matrices is in blocks. A list
    also takes the place of several Tensors without `joins`, which saves a copy.
    """
    matrices = [_take_matrix(weights, prefix + name) for name in names]
    if len(matrices) == 1:
        return matrices[0]
    if any(isinstance(matrix, BlockWeight) for matrix in matrices):
        return matrices
    quantized = [matrix for matrix in matrices if isinstance(matrix, QuantizedWeight)]
    if not quantized:
        return torch.cat(matrices) if joins else matrices
    if len(quantized) < len(names) or len({(part.bits, part.group) for part in quantized}) > 1:
        raise ModelError(
            f"{', '.join(prefix + name for name in names)} are fused into one product, but not all quantised alike; "
            "use a checkpoint that quantises all of them or none"
        )
    return stacked(quantized)


def _take_matrix(weights: Weights, name: str) -> Any:
    """Pop a matrix as a Tensor, QuantizedWeight or BlockWeight."""
    value, (scale, zero) = weights.pop(name), (weights.pop(name + end, None) for end in ("_scale", "_zero"))
    if isinstance(value, Blocks):
        return BlockWeight(value.kind, value.rows, value.release)
    if scale is None:
        return value
    weight = QuantizedWeight(value, scale, zero)
    weight.check()
    return weight


def take_products(
    weights: Weights, prefix: str, names: Iterable[str], products: Products, joins: bool = True
) -> dict[str, Any]:
    """Pop these products and their biases, None for missing ones; `joins` as in `take_projection`."""
    taken: dict[str, Any] = {}
    for name in names:
        if name in products:
            fused = present(products[name], prefix, weights)
            taken[name] = take_projection(weights, prefix, fused, joins) if fused else None
            biases = [weights.pop(f"{prefix}{matrix}_bias", None) for matrix in products[name]]
            present_biases = [bias for bias in biases if bias is not None]
            taken[f"{name}_bias"] = torch.cat(present_biases) if present_biases else None
    return taken


def take_mlp(weights: Weights, prefix: str, products: Products, joins: bool = True) -> dict[str, Any]:
    """Pop the projections of an MLP or expert, and their biases, as in `take_layer`."""
    return take_products(weights, prefix, ("gate_up", "gate", "up", "down"), products, joins)


def take_layer(weights: Weights, i: int, products: Products, joins: bool = True) -> dict[str, Any]:
    """Pop layer i: its products and their biases, and the norms of its inputs; `joins` as in `take_projection`.

    Parts that the family lacks are None. The first layer of a draft head has no `qkv`: the head computes these
    projections. A mixer's parameters remain. The MLP of a sparse layer is its shared expert, and `take_experts` pops
    the others.
    """
    prefix = f"layers.{i}."
    layer = take_products(weights, prefix, ("qkv", "attn_gate", "o", "mix_out"), products, joins)
    layer |= take_mlp(weights, prefix, products, joins)
    norms = ("attn_norm", "attn_norm_bias", "attn_post_norm", "mlp_norm", "mlp_norm_bias", "mlp_post_norm")
    return layer | {name: weights.pop(prefix + name, None) for name in norms}


def take_inputs(weights: Weights, i: int) -> dict[str, Any]:
    """Pop the weights of layer i's per-layer input, and its factor on the stream; None for missing ones."""
    prefix, inputs = f"layers.{i}.", dict[str, Any]()
    for name in ("input_gate", "input_out"):
        inputs[name] = take_projection(weights, prefix, (name,)) if prefix + name in weights else None
    return inputs | {name: weights.pop(prefix + name, None) for name in ("input_norm", "scalar")}


class ExpertWeights(NamedTuple):
    """Weights of the experts of a sparse layer."""

    router: Tensor
    router_bias: Tensor | None
    correction: Tensor | None
    shared_scale: Tensor | None
    experts: list[dict[str, Any]]  # as of `take_mlp`
    latent: dict[str, Any] | None  # the projections `latent_in` and `latent_out`, whose biases are None
    # Only with `Experts.beside`: factors on the experts' weights, [num_experts], and the norms `NORMS_OF_EXPERTS`
    scales: Tensor | None
    norms: dict[str, Tensor]


NORMS_OF_EXPERTS = ("router_norm", "experts_norm", "experts_post_norm", "shared_post_norm")


def take_experts(weights: Weights, i: int, count: int, products: Products, joins: bool = True) -> ExpertWeights:
    """Pop the router of layer i and its `count` experts, without the shared one."""
    prefix = f"layers.{i}."
    names = ("router", "router_bias", "router_correction", "shared.scale")
    router, bias, correction, shared_scale = (weights.pop(prefix + name, None) for name in names)
    experts = [take_mlp(weights, f"{prefix}experts.{e}.", products, joins) for e in range(count)]
    latent = None
    if f"{prefix}latent_in" in weights:
        latent = {name: take_projection(weights, prefix, (name,)) for name in ("latent_in", "latent_out")}
        latent |= {"latent_in_bias": None, "latent_out_bias": None}
    norms = {name: weights.pop(prefix + name) for name in NORMS_OF_EXPERTS if prefix + name in weights}
    if norms:
        norms["router_norm"] = norms["router_norm"].float() * router.shape[1] ** -0.5
    scales = weights.pop(f"{prefix}expert_scales", None)
    return ExpertWeights(router, bias, correction, shared_scale, experts, latent, scales, norms)


class Layer:
    """Weights of one layer, from `take_layer`.

    `rope` and `query_rope` index the cos of keys and queries in `Pass.rotation`, `window` the plan in `Pass.attention`.
    """

    mixer: Any = None  # `StateMixer` or `ConvMixer` of a recurrent layer, instead of attention or beside it

    def __init__(self, weights: Weights, i: int, config: ModelConfig, make_linear: LinearMaker, min_rows: int):
        layer, experts = take_layer(weights, i, EAGER) | take_inputs(weights, i), config.shape.experts

        def linear(name: str, tensors: dict[str, Any] = layer) -> Any:  # None without a weight
            return None if tensors[name] is None else make_linear(tensors[name], tensors[f"{name}_bias"])

        def expert(tensors: dict[str, Any]) -> Expert:
            return Expert(linear("gate", tensors), linear("up", tensors), linear("down", tensors), config.activation)

        def norm(name: str, tensors: dict[str, Any] = layer) -> Norm | None:
            weight = tensors[name]
            return None if weight is None else STREAMS[config.rules.norm].take(weight, layer.get(f"{name}_bias"))

        self.attn_norm, self.mlp_norm = norm("attn_norm"), norm("mlp_norm")
        self.attn_post_norm, self.mlp_post_norm = norm("attn_post_norm"), norm("mlp_post_norm")
        self.qkv, self.o, self.mix_out = linear("qkv"), linear("o"), linear("mix_out")
        self.gate, self.up, self.down = linear("gate"), linear("up"), linear("down")
        self.sparse: SparseMlp | None = None
        if experts is not None and config.layers[i].sparse:
            taken = take_experts(weights, i, experts.count, EAGER)
            self.sparse = SparseMlp(
                experts,
                make_linear(taken.router.float() if experts.scoring == "sigmoid" else taken.router, taken.router_bias),
                taken.correction,
                [expert(tensors) for tensors in taken.experts],
                None if taken.shared_scale is None else make_linear(taken.shared_scale),
                None
                if taken.latent is None
                else (linear("latent_in", taken.latent), linear("latent_out", taken.latent)),
                min_rows,
                None if taken.scales is None else taken.scales.float(),
                {name: expert_norm for name in taken.norms if (expert_norm := norm(name, taken.norms)) is not None},
            )
        self.input_gate: Linear | CompiledLinear | None = None
        if layer["input_gate"] is not None:
            self.input_gate, self.input_out = (make_linear(layer[name]) for name in ("input_gate", "input_out"))
        self.input_norm = norm("input_norm")
        self.scalar = None if layer["scalar"] is None else float(layer["scalar"])
        sinks = weights.pop(f"layers.{i}.sinks", None)
        self.sinks = None if sinks is None else sinks.float()
        self.head_norm = take_head_norm(weights, i, config.shape)
        self.index, sizes = i, config.shape.layer(i)
        self.kv_heads, self.head_dim, self.owns_kv = sizes.num_kv_heads, sizes.head_dim, sizes.kv_of == i
        self.query_rope, self.rope = (2 * rope for rope in config.layers[i].ropes)
        self.window = config.windows.index(config.layers[i].window)

    @property
    def nbytes(self) -> int:
        return sum(getattr(weight, "nbytes", 0) for weight in vars(self).values())
