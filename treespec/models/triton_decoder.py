"""Decoder on Triton kernels, without host synchronisation.

A layer takes ten kernel launches, nine for chains; parallel attention and MLP take one or two more, a layer's own
inputs four. Stacked models (SSMs of one shape) run as one pass in which the rows of model g follow those of model
g - 1. Only linear layers, norm weights and embeddings depend on the model of a row.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from treespec.models.adapter_slots import NO_ADAPTER, AdapterSlots, FusedUpdates, SlotLimits
from treespec.models.attention import TritonAttention
from treespec.models.decoder import Decoder, Pass, StreamInput
from treespec.models.layer import TRITON, LinearMaker
from treespec.models.low_rank import LowRank, fused_updates
from treespec.models.model_config import ModelConfig
from treespec.models.per_layer import TritonPerLayerInputs
from treespec.models.recurrent import ConvMixer, StateMixer, make_mixer
from treespec.models.state_pass import RequestStates
from treespec.models.triton_weights import LayerWeights, ModelWeights, StackedExperts, Weight, map_tensors
from treespec_kernels.attention.qkv_rope import HeadNorm, qkv_rope_triton
from treespec_kernels.attention.tree_attention import AttentionShape
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows
from treespec_kernels.launch.triton_launch import LaunchConfig, is_interpreted, takes_pdl, target_of
from treespec_kernels.linear.activations import sigmoid
from treespec_kernels.linear.experts import ExpertConfigs, Routing, experts_triton
from treespec_kernels.linear.lm_head import LmHead, LmHeadConfig, lm_head_triton
from treespec_kernels.linear.quantized import QuantizedWeight
from treespec_kernels.linear.rms_norm import Norm, rms_norm_triton
from treespec_kernels.linear.row_linear import (
    ChosenRows,
    RowLinearConfig,
    activated_triton,
    add_splits_triton,
    default_config,
    row_linear_partials_triton,
    row_linear_triton,
)
from treespec_kernels.linear.row_linear_config import interpretable
from treespec_kernels.linear.row_tiles import RowTile, proven
from treespec_kernels.tuning.tuned import KernelConfigs

RopeTables = tuple[Tensor, ...]
"""Whole tables of cos and signed sin, fp32 [num_positions, 2, head_dim], of each of the model's ropes."""


@dataclass(frozen=True, eq=False)
class TritonPass(Pass):
    """Plan of a pass on the device, with kernel arguments for each of `PassKernels.shapes` as `attention`."""

    rotation: RopeTables
    slots: Tensor  # int64 [num_rows]
    positions: Tensor  # int32 [num_rows]
    adapters: ChosenRows | None = None  # rows of each slot of `AdapterSlots`; None if no row has an adapter


class PassKernels:
    """Kernels of a pass over stacked models, with fixed configurations."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,  # stacked
        attention: TritonAttention,  # attention backend for the same shape
        configs: KernelConfigs,  # tuned for this device
        exact: bool = True,  # False uses cuBLAS for unquantised weights; its bits depend on the number of rows
    ):
        shape = config.shape
        self.config, self.weights, self.attention, self.exact = config, weights, attention, exact
        self.dtype = weights.embed.dtype
        self._numbers: Sequence[int] = range(len(config.layers))  # indices of the layers in the whole model
        self.mixers: list[StateMixer | ConvMixer | None] = [None] * len(config.layers)  # set for recurrent layers
        self.inputs: TritonPerLayerInputs | None = None
        kinds, dtype = config.attentions, attention.cache_dtype
        # Distinct shapes of the layers' attention; a pass has a plan for each.
        self.shapes = [AttentionShape(shape.num_heads, heads, size, dtype, window) for heads, size, window in kinds]
        for attention_shape in self.shapes:
            attention.config(attention_shape)  # records untuned shapes in `configs`
        of_layers = [config.attention_of(i) for i in self._numbers]
        self._plans = [kinds.index(kind) if kind in kinds else 0 for kind in of_layers]  # 0: without attention
        self.caches = shape.cache_places(self._numbers)  # planes that each layer reads
        self._first_scale = config.embed_scale_in(self.dtype) / config.stream_scale
        learned = shape.learned_positions - config.rules.extra_positions  # per model; below 1 = none
        self._last_position = learned - 1
        self._first_positions = torch.arange(weights.groups, device=weights.embed.device)[:, None] * learned
        # The weights of a single model have no group dimension.
        self._layers = [layer.map(self._squeezed) for layer in weights.layers]
        self._linear = [
            {
                name: self._linear_config(name, getattr(layer, name), configs)
                for name in ("qkv", "attn_gate", "o", "gate_up", "down", "input_gate", "input_out")
                if getattr(layer, name) is not None
            }
            for layer in self._layers
        ]
        self._experts = [self._expert_configs(layer) for layer in self._layers]
        self.adapters: AdapterSlots | None = None
        # 1 while costs are measured: padding rows then choose experts too, and passes take as long as with requests
        self.spreads = torch.zeros(1, dtype=torch.int32, device=weights.embed.device)
        vocab, hidden = weights.head.shape[1:]
        key = self._key() | {"vocab_size": vocab, "hidden_size": hidden}
        default = LmHeadConfig.default(self.dtype, vocab, hidden, target_of(weights.head.device))
        if is_interpreted():  # the interpreter computes dot with BLAS, whose time grows with the block size
            default = replace(default, block_m=16, block_n=64, block_k=64, larger=())
        self._head = configs.get("lm_head", key, default)
        can_overlap = takes_pdl(weights.embed.device)
        launch = configs.get("programmatic_launch", self._key() | {"hidden_size": hidden}, LaunchConfig(can_overlap))
        # Programmatic dependent launch: where the device has it, unless tuning found it wrong or slower, and never
        # together with cuBLAS, which tuning does not cover.
        self.pdl = launch.pdl and exact and can_overlap
        if exact:
            self._prove_tiles()

    def _prove_tiles(self) -> None:
        """Keep the tiles of many rows that have the bits of those of few rows on this device.

        Layers of equal shape and configuration are computed by the same binaries, and are compared once.
        """
        proved: dict[object, RowLinearConfig] = {}

        def prove(layer: LayerWeights, name: str, config: RowLinearConfig) -> RowLinearConfig:
            weight = getattr(layer, name)
            form = (weight.bits, weight.group) if isinstance(weight, QuantizedWeight) else None
            key = (name, tuple(weight.shape), form, config)
            if key not in proved:
                label = f"{name} of shape {list(weight.shape)}"
                proved[key] = proven(config, lambda tiled: self._some_rows(layer, name, tiled, config), label)
            return proved[key]

        self._linear = [
            {name: prove(layer, name, config) for name, config in linear.items()}
            for layer, linear in zip(self._layers, self._linear, strict=True)
        ]

        def logits(config: LmHeadConfig) -> tuple[Tensor, ...]:
            result = self._logits(self._random_rows(self._head.tiles[-1], self.weights.head.shape[-1]), config)
            return (result.logits, *result.stats)

        self._head = proven(self._head, logits, "the LM head")

    def _some_rows(
        self, layer: LayerWeights, name: str, config: RowLinearConfig, all_tiles: RowLinearConfig
    ) -> tuple[Tensor, ...]:
        """Compute a linear layer for random rows, as in a pass."""
        weight = getattr(layer, name)
        x = self._random_rows(all_tiles.tiles[-1], weight.shape[-1])
        if name in ("gate_up", "attn_gate", "input_gate"):
            return (self._linear_rows(x, weight, config, **self._epilogue(layer, name)),)
        if name == "o" and self.config.parallel:
            stream = self._random_rows(all_tiles.tiles[-1], weight.shape[-2])
            return (self._linear_rows(x, weight, config, stream, bias=layer.o_bias),)
        return (self._partials(x, weight, config),)

    def _random_rows(self, largest: RowTile, width: int) -> Tensor:
        """Return the same rows in every call, more than the largest tile has, [G * rows, width]."""
        device, rows = self.weights.embed.device, self.weights.groups * (largest.block_m + 65)
        generator = torch.Generator(device).manual_seed(0)
        return torch.randn(rows, width, generator=generator, device=device, dtype=torch.float32).to(self.dtype)

    def _key(self) -> dict[str, int | torch.dtype]:
        return {"dtype": self.dtype, "groups": self.weights.groups}

    def _linear_config(self, name: str, weight: Weight, configs: KernelConfigs) -> RowLinearConfig:
        """Return the configuration of one layer. Layers may differ in quantisation."""
        (out_features, in_features), target = weight.shape[-2:], target_of(self.weights.embed.device)
        key = self._key() | {"out_features": out_features, "in_features": in_features}
        if isinstance(weight, QuantizedWeight):
            op, silu_gate = "quantized_row_linear", False
            key |= {"bits": weight.bits, "group": weight.group, "zero": int(weight.zero is not None)}
        else:
            op, silu_gate = "row_linear", name == "gate_up" and self.config.shape.gated
            key |= {"silu_gate": int(silu_gate)}
        return configs.get(op, key, interpretable(default_config(weight, self.dtype, target, silu_gate)))

    def _expert_configs(self, layer: LayerWeights) -> tuple[RowLinearConfig, ExpertConfigs] | None:
        """Return the configurations of the router and of the experts' products, which are not tuned."""
        shape, target = self.config.shape.experts, target_of(self.weights.embed.device)
        if layer.experts is None or shape is None:
            return None
        router, products = layer.experts.router, layer.experts.products
        config = interpretable(default_config(router, router.dtype, target))
        return replace(config, larger=()), ExpertConfigs.default(products, shape.top_k, self.dtype, target)

    def hidden(
        self,
        tokens: Tensor,  # int64 [G * rows], with g * vocab_size added for model g; not read with `start`
        layout: TritonPass,  # plan of these rows
        kv: Tensor,  # pool of all G models, [num_planes, 2, num_pages, num_kv_heads, PAGE_SIZE, head_dim]
        num_layers: int | None = None,  # number of layers to run; None = all
        states: dict[int, Tensor | None] | None = None,  # receives residual streams, as in `record_states`
        start: StreamInput | None = None,  # residual stream that the pass begins with
    ) -> Tensor:
        """Write the rows' K/V to their slots and return hidden states after the final norm, [G * rows, hidden_size]."""
        weights, states = self.weights, states if states is not None else {}
        layers, qkv = self._layers[:num_layers], None if start is None else start.qkv
        stream = self._embed(tokens, layout) if start is None else start.rows.clone()  # passes add to it in place
        fused = partial(Norm, eps=self.config.norm_eps, kind=self.config.rules.norm)
        kinds = [self.config.layers[i] for i in self._numbers[: len(layers)]]
        norms = [
            fused(layer.mlp_norm, shift=layer.mlp_norm_bias)
            if kind.mlp_only
            else fused(layer.attn_norm, shift=layer.attn_norm_bias)
            for layer, kind in zip(layers, kinds, strict=True)
        ]
        norms.append(fused(weights.final_norm, shift=weights.final_norm_bias))
        h = stream if qkv is not None or norms[0].weight is None else self._norm(stream, norms[0])
        inputs = None if self.inputs is None else self.inputs(tokens, stream)
        each_layer = zip(layers, kinds, self._experts, self.mixers, norms[1:], strict=False)
        recurrent = itertools.count()
        for i, (layer, kind, experts, mixer, norm) in enumerate(each_layer):
            if i in states:
                states[i] = stream.clone()
            mixed = None
            if mixer is not None:
                mixed = self._mix(i, mixer, h, layout, next(recurrent))
            elif not kind.mlp_only:
                product = self._updated(i, "qkv", h, layout) if i or qkv is None else qkv
                mixed = self._attend(i, product, layout, kv[self.caches[i]])
                if layer.attn_gate is not None:
                    mixed = (mixed.float() * sigmoid(self._activated("attn_gate", h, i, layout))).to(self.dtype)
            if mixed is not None:
                inner = norm if kind.without_mlp else fused(layer.mlp_norm, shift=layer.mlp_norm_bias)
                h = self._add(i, mixed, inner._replace(post_weight=layer.attn_post_norm), stream, layout)
            if kind.without_mlp:
                continue
            update: Any = None
            last = norm._replace(post_weight=layer.mlp_post_norm, scale=layer.scalar)
            if layer.down is not None:
                update = self._updated(i, "down", self._activated("gate_up", h, i, layout), layout)
            if experts is not None:
                update = self._mix_experts(h, stream, layer.experts, experts, layout.slots, update)
            if inputs is not None:
                h = self._norm(update, last._replace(weight=None, shift=None, scale=None), stream, layer.down_bias)
                gate = self._activated("input_gate", h, i, layout)
                update = self._updated(i, "input_out", gate.mul_(inputs[self._numbers[i]]), layout)
                last = last._replace(post_weight=layer.input_norm)
            h = self._norm(update, last, stream, None if inputs is not None else layer.down_bias)
        if layout.states is not None:
            layout.states.finish()
        if len(layers) in states:
            states[len(layers)] = stream.clone()
        return h

    def slots_of(self, adapters: Sequence[FusedUpdates | None]) -> list[int]:
        """Return the slots of the adapters of a batch, as `AdapterSlots.of`."""
        return [NO_ADAPTER] * len(adapters) if self.adapters is None else self.adapters.of(adapters)

    def select_layers(self, layers: Sequence[int], windows: tuple[int | None, ...]) -> "PassKernels":
        """Return the kernels of some layers, and of other windows in place of `ModelConfig.windows`."""
        subset, changed = copy.copy(self), dict(zip(self.config.windows, windows, strict=True))
        subset.weights = replace(self.weights, layers=tuple(self.weights.layers[i] for i in layers))
        subset.shapes = [shape._replace(window=changed[shape.window]) for shape in self.shapes]
        subset._plans, subset.caches = [self._plans[i] for i in layers], self.config.shape.cache_places(layers)
        subset._layers, subset._linear = [self._layers[i] for i in layers], [self._linear[i] for i in layers]
        subset._numbers, subset.mixers = layers, [self.mixers[i] for i in layers]
        subset._experts = [self._experts[i] for i in layers]
        return subset

    def logits(self, hidden: Tensor) -> LmHead:
        """Compute the logits of rows of `hidden`, [G * rows, hidden_size], and the maximum of each vocabulary block."""
        return self._logits(hidden, self._head)

    def _logits(self, hidden: Tensor, config: LmHeadConfig) -> LmHead:
        head, cap = self._squeezed(self.weights.head), self.config.logit_cap
        return lm_head_triton(self._grouped(hidden), head, config=config, logit_cap=cap, pdl=self.pdl)

    def _embed(self, tokens: Tensor, layout: TritonPass) -> Tensor:
        stream = F.embedding(tokens, self.weights.embed)
        if self._first_scale != 1.0:
            stream.mul_(self._first_scale)
        if self.weights.positions is not None:  # drafts beyond the last position are never accepted
            positions = layout.positions.clamp(max=self._last_position).view(self.weights.groups, -1)
            stream.add_(F.embedding((positions + self._first_positions).flatten(), self.weights.positions))
        return stream

    def _norm(self, x: Tensor, norm: Norm, stream: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Return the norm of x; with a stream, add x and bias, or their post-norm, to it in place, and norm it."""
        return rms_norm_triton(x, norm, residual=stream, bias=bias, pdl=self.pdl)

    def _add(self, i: int, mixed: Tensor, norm: Norm, stream: Tensor, layout: TritonPass) -> Tensor:
        """Add the output projection of mixed rows to the stream in place; return the next block's normed input.

        In a parallel block, that is the MLP's input, without the attention output.
        """
        layer = self._layers[i]
        if not self.config.parallel:
            return self._norm(self._updated(i, "o", mixed, layout), norm, stream, layer.o_bias)
        h = self._norm(stream, norm)
        if self.adapters is None:
            self._linear_rows(mixed, layer.o, self._linear[i]["o"], stream, bias=layer.o_bias)
        else:
            product = self._updated(i, "o", mixed, layout)
            add_splits_triton(product, stream, residual=stream, bias=layer.o_bias, pdl=self.pdl)
        return h

    def _attend(
        self,
        i: int,
        qkv: Tensor,
        layout: TritonPass,
        planes: Tensor,  # cache of the layer whose K/V it reads
    ) -> Tensor:
        """Return the heads' outputs, [rows, num_heads * head_dim], of projections or their partial sums."""
        layer, config, norm, rows = self._layers[i], self.config, None, layout.num_rows
        number, plan = self._numbers[i], self._plans[i]
        shape, ropes = self.shapes[plan], config.layers[number].ropes
        q = torch.empty(rows, shape.num_heads, shape.head_dim, dtype=shape.dtype, device=qkv.device)
        if layer.q_norm is not None:
            norm = HeadNorm(
                layer.q_norm,
                layer.q_norm if layer.k_norm is None else layer.k_norm,  # any for a layer without keys
                config.norm_eps,
                config.shape.wide_qk_norm,
                config.rules.norm_after_rope,
                config.shape.value_norm,
            )
        is_whole = planes.shape[0] == 1 and planes.shape[-1] == shape.head_dim
        cache = planes[0] if is_whole else planes
        of_queries, of_keys = (layout.rotation[rope] for rope in ropes) if layout.rotation else (None, None)
        options: dict[str, Any] = {"bias": layer.qkv_bias, "norm": norm}
        options["q_rotation"] = None if of_queries is of_keys else of_queries
        owns_kv = config.shape.layer(number).kv_of == number
        places = layout.positions, layout.slots, cache if owns_kv else None
        qkv_rope_triton(qkv, of_keys, *places, q, **options, pdl=self.pdl)
        scores = config.query_scale, config.score_cap, layer.sinks
        k_cache, v_cache = cache.unbind(-5)
        return self.attention(q, k_cache, v_cache, layout.attention[plan], *scores, pdl=self.pdl).view(rows, -1)

    def _activated(self, name: str, h: Tensor, i: int, layout: TritonPass) -> Tensor:
        """Compute a product and its activation, such as the MLP's, the input of the down projection."""
        layer, epilogue = self._layers[i], self._epilogue(self._layers[i], name)
        if self.adapters is None:
            return self._linear_rows(h, getattr(layer, name), self._linear[i][name], **epilogue)
        product = self._updated(i, name, h, layout)
        out = h.new_empty(len(h), product.shape[-1] // (1 + epilogue.get("silu_gate", False)))
        return add_splits_triton(product, out, **epilogue, pdl=self.pdl)

    def _epilogue(self, layer: LayerWeights, name: str) -> dict[str, Any]:
        if name == "attn_gate":
            return {}
        gated, activation = self.config.shape.gated and name == "gate_up", self.config.activation
        return {"bias": layer.gate_up_bias if name == "gate_up" else None, "silu_gate": gated, "activation": activation}

    def _updated(self, i: int, name: str, x: Tensor, layout: TritonPass, product: Tensor | None = None) -> Tensor:
        """Return a layer's product, by default its `_partials`, with adapters' updates added (to the first of them)."""
        if product is None:
            product = self._partials(x, getattr(self._layers[i], name), self._linear[i][name])
        if self.adapters is not None and layout.adapters is not None:
            out = product if product.dim() == 2 else product[0]
            self.adapters.add(self._numbers[i], name, x, layout.adapters, out, self.pdl)
        return product

    def _mix(self, i: int, mixer: StateMixer | ConvMixer, h: Tensor, layout: TritonPass, number: int) -> Tensor:
        """Return the outputs of a layer's mixer before their projection; `number` is that of a recurrent layer."""
        return mixer(lambda name: self._updated(i, name, h, layout, getattr(mixer, name)(h)), layout.states, number)

    def _mix_experts(
        self,
        h: Tensor,
        stream: Tensor,
        experts: StackedExperts | None,
        configs: tuple[RowLinearConfig, ExpertConfigs],
        slots: Tensor,  # cache slot of each row, 0 for padding
        shared: Tensor | None,  # partial sums of the shared expert, or its product by cuBLAS
    ) -> Tensor:
        """Return the output of a sparse layer's MLP, [rows, hidden_size].

        `h` is the normalised `stream`, which experts beside a dense MLP normalise themselves.
        """
        shape = self.config.shape.experts
        assert experts is not None and shape is not None
        router, products = configs
        norm = partial(Norm, eps=self.config.norm_eps, kind=self.config.rules.norm)
        of_router = h.to(experts.router.dtype)
        if shape.beside:
            assert shared is not None
            total = torch.full_like(stream, 0.0)  # a kernel, not a memset, because a launch with PDL follows
            self._norm(shared, norm(None, post_weight=experts.shared_post_norm), total)
            of_router, h = (self._norm(stream, norm(w)) for w in (experts.router_norm, experts.experts_norm))
            shared = None
        routed = experts_triton(
            h,
            row_linear_partials_triton(of_router, experts.router, config=router, pdl=self.pdl),
            experts.products,
            Routing.of(shape),
            bias=experts.router_bias,
            correction=experts.correction,
            scales=experts.scales,
            slots=slots,
            shared=shared if shared is None or shared.dim() == 3 else shared.float()[None],
            spreads=self.spreads,
            gated=shape.shared_gate,
            activation=self.config.activation,
            config=products,
            pdl=self.pdl,
        )
        return self._norm(routed, norm(None, post_weight=experts.experts_post_norm), total) if shape.beside else routed

    def _linear_rows(
        self, x: Tensor, weight: Any, config: RowLinearConfig, stream: Tensor | None = None, **epilogue: Any
    ) -> Tensor:
        """Apply a linear layer to rows; with a stream, add the result to it in place."""
        x, out = self._grouped(x), None if stream is None else self._grouped(stream)
        if self._is_exact(weight):
            y = row_linear_triton(x, weight, residual=out, out=out, config=config, pdl=self.pdl, **epilogue)
        else:
            y = activated_triton(torch.matmul(x, weight.mT), **epilogue)
            y = y if out is None else out.add_(y)
        return y.flatten(0, -2)

    def _partials(self, x: Tensor, weight: Any, config: RowLinearConfig) -> Tensor:
        """Return the partial sums of x W^T, or the product by cuBLAS, for a kernel that adds them."""
        if self._is_exact(weight):
            return row_linear_partials_triton(self._grouped(x), weight, config=config, pdl=self.pdl)
        return torch.matmul(self._grouped(x), weight.mT).flatten(0, -2)

    def _is_exact(self, weight: Weight) -> bool:
        return self.exact or isinstance(weight, QuantizedWeight)

    def _grouped(self, x: Tensor) -> Tensor:
        """Reshape [G * rows, n] to [G, rows, n]. Returns `x` unchanged for one model."""
        groups = self.weights.groups
        return x if groups == 1 else x.view(groups, len(x) // groups, -1)

    def _squeezed(self, weight: Any) -> Any:
        return map_tensors(lambda tensor: tensor[0], weight) if self.weights.groups == 1 else weight


class TritonDecoder(Decoder):
    """A `Decoder` on Triton kernels, row-invariant for any number of rows."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        attention: TritonAttention,  # Triton backend for the same shape
        configs: KernelConfigs,  # tuned for this device
        exact: bool,  # False uses cuBLAS
        num_positions: int,  # maximum number of positions
        adapters: SlotLimits | None = None,  # limits of LoRA adapters; None without adapters
    ):
        self._configs, self._exact, self.triton_attention = configs, exact, attention
        super().__init__(config, weights, attention, "triton", min_rows=1)
        # Fixed tables: captured graphs contain their addresses.
        self.tables: RopeTables = tuple(
            rotation.table(num_positions)[..., : 2 * len(rope.inv_freq)].contiguous()
            for rope, rotation in zip(config.ropes, self.rotations, strict=True)
        )
        self.rotations = ()  # drop the duplicate tables
        if adapters is not None:
            self.kernels.adapters = AdapterSlots(config, adapters, self.dtype, self.device)

    def _take(self, weights: dict[str, Tensor]) -> None:
        config, make_linear, inputs = self.config, LinearMaker("triton", self.dtype), None
        kinds = enumerate(config.layers)
        mixers = [make_mixer(weights, i, config, make_linear) if kind.recurrent else None for i, kind in kinds]
        if config.shape.per_layer_size:
            inputs = TritonPerLayerInputs(weights, config, make_linear)
        self.set_weights(ModelWeights.take(self.embed, weights, config.shape, self.positions))
        self.kernels.mixers, self.kernels.inputs = mixers, inputs

    def set_weights(self, weights: ModelWeights) -> None:
        """Replace the weights by equal ones, such as views of a stack."""
        assert weights.groups == 1
        self.weights, self.embed, self.positions = weights, weights.embed, weights.positions
        self.kernels = PassKernels(self.config, weights, self.triton_attention, self._configs, self._exact)

    @property
    def nbytes(self) -> int:
        kernels = self.kernels
        stored: list[Any] = [self.weights, *self.tables, *kernels.mixers, kernels.inputs, kernels.adapters]
        return sum(weights.nbytes for weights in stored if weights is not None)

    def updates(self, matrices: Mapping[str, LowRank]) -> FusedUpdates:
        return FusedUpdates(fused_updates(self.config, matrices, TRITON))

    def _select_layers(self, layers: Sequence[int]) -> None:
        self.kernels = self.kernels.select_layers(layers, self.windows)

    def plan(self, requests: list[RequestRows], kv: Tensor) -> TritonPass:
        positions = np.concatenate([self._positions(rows) for rows in requests])
        pages, offsets = (np.concatenate(arrays) for arrays in zip(*(rows.slots for rows in requests), strict=True))

        def uploaded(values: np.ndarray, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(values).to(self.device, dtype)

        adapter_slots, adapters = self.kernels.slots_of([rows.adapter for rows in requests]), None
        if self.kernels.adapters is not None and min(adapter_slots) < NO_ADAPTER:
            of_rows = np.repeat(adapter_slots, [rows.num_rows for rows in requests])
            adapters = self.kernels.adapters.rows(uploaded(of_rows, torch.int32))
        return TritonPass(
            len(positions),
            self.tables,
            uploaded(pages * PAGE_SIZE + offsets, torch.int64),
            [self.triton_attention.plan_of(requests, len(positions), shape) for shape in self.kernels.shapes],
            uploaded(positions, torch.int32),
            adapters=adapters,
            states=None if self.config.shape.recurrent is None else RequestStates(requests, len(positions), True),
        )

    def _forward(
        self,
        tokens: Tensor,
        layout: Pass,
        kv: Tensor,
        num_layers: int | None,
        states: dict[int, Tensor | None],
        start: StreamInput | None = None,
    ) -> Tensor:
        assert isinstance(layout, TritonPass) and len(tokens) == layout.num_rows
        return self.kernels.hidden(tokens.to(self.device), layout, kv, num_layers, states, start)

    def logits(self, hidden: Tensor, rows: Sequence[int] | Tensor | None = None) -> Tensor:
        if rows is not None:
            hidden = hidden[torch.as_tensor(rows, device=self.device)]
        logits = self.kernels.logits(hidden.contiguous()).logits  # with the soft cap
        return logits if self.head_vocabulary is None else self.head_vocabulary.expand(logits, -torch.inf)


def stacked(models: Sequence[TritonDecoder], configs: KernelConfigs) -> PassKernels:
    """Stack models of one shape, with equal RoPE tables and configurations; the models keep views of the stack."""
    assert len({(model.plan_key, model.config.compute_key) for model in models}) == 1, "stacked models differ in shape"
    first = models[0]
    if len(models) == 1:
        return first.kernels
    weights = ModelWeights.stack([model.weights for model in models])
    for group, model in enumerate(models):
        model.set_weights(weights.select(group))
    return PassKernels(first.config, weights, first.triton_attention, configs, first._exact)
