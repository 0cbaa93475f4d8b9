"""Weights of the Triton kernels, with fused projections and models of one shape stacked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from treespec.errors import ModelError
from treespec.models.layer import NORMS_OF_EXPERTS, TRITON, take_experts, take_inputs, take_layer, take_projection
from treespec_kernels.launch.rows import aligned
from treespec_kernels.linear.experts import ExpertProducts
from treespec_kernels.linear.quantized import QuantizedWeight, dequantized, stacked
from treespec_weights.experts import Experts
from treespec_weights.rules import ModelShape

Weight = Tensor | QuantizedWeight


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply `change` to a tensor or to each tensor of a quantised weight or of experts; None stays None."""
    if isinstance(value, tuple):
        return type(value)(*(map_tensors(change, tensor) for tensor in value))
    return None if value is None else change(value)


class StackedExperts(NamedTuple):
    """Router and experts of a sparse layer of G = 1 models. The shared expert is the layer's MLP."""

    # [1, num_experts, hidden_size], and a row for the shared expert's gate, if it has one; fp32 for sigmoid scores
    router: Tensor
    router_bias: Tensor | None
    correction: Tensor | None
    products: ExpertProducts  # [1, num_experts, ...]
    scales: Tensor | None  # this and the norms as in `ExpertWeights`, only of experts beside a dense MLP
    router_norm: Tensor | None
    experts_norm: Tensor | None
    experts_post_norm: Tensor | None
    shared_post_norm: Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self[:3], *self.products, *self[4:]) if part is not None)

    @classmethod
    def take(cls, weights: dict[str, Tensor], i: int, experts: Experts) -> Self:
        """Pop the experts of layer i from decoder parameters by name."""
        taken = take_experts(weights, i, experts.count, TRITON)
        router = taken.router if taken.shared_scale is None else torch.cat((taken.router, taken.shared_scale))
        return cls(
            router.float() if experts.scoring == "sigmoid" else router,
            taken.router_bias,
            taken.correction,
            ExpertProducts(*(_stacked_parts(taken.experts, name, i) for name in ExpertProducts._fields)),
            None if taken.scales is None else taken.scales.float(),
            *(taken.norms.get(name) for name in NORMS_OF_EXPERTS),
        )


def _stacked_parts(experts: list[dict[str, Any]], name: str, layer: int) -> Any:
    """Pop a part of every expert, and return them stacked."""
    matrices = [expert.pop(name) for expert in experts]
    if len({(matrix.bits, matrix.group) if isinstance(matrix, QuantizedWeight) else None for matrix in matrices}) > 1:
        raise ModelError(f"the experts of layer {layer} are not all quantised alike; use device='cpu'")
    if not isinstance(matrices[0], QuantizedWeight):
        return None if matrices[0] is None else torch.stack(matrices)
    return stacked([map_tensors(lambda tensor: tensor[None], matrix) for matrix in matrices], dim=0)


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """Weights of one layer of G stacked models.

    Projections are [G, out_features, in_features], optionally quantised; biases and norms are [G, size]. Parts that the
    family lacks are None. The first layer of a draft head has no `qkv`: the head computes these projections.
    """

    attn_norm: Tensor | None
    attn_norm_bias: Tensor | None
    qkv: Weight | None
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Weight
    o_bias: Tensor | None
    attn_post_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp_norm_bias: Tensor | None
    gate_up: Weight | None  # rows of the gate, if any, then of the up projection; of the shared expert in sparse layers
    gate_up_bias: Tensor | None
    down: Weight | None
    down_bias: Tensor | None
    mlp_post_norm: Tensor | None
    sinks: Tensor | None
    attn_gate: Weight | None  # the sigmoid of its product scales the attention output
    experts: StackedExperts | None
    input_gate: Weight | None  # this and the next two: of the layer's own inputs (`PerLayerInputs`)
    input_out: Weight | None
    input_norm: Tensor | None
    scalar: Tensor | None  # fp32 [G, 1], factor on the residual stream after the layer

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in vars(self).values() if weight is not None)

    def map(self, change: Callable[[Any], Any]) -> "LayerWeights":
        """Return the layer with every weight changed, quantised ones as a whole."""
        changed: list[Any] = [None if value is None else change(value) for value in vars(self).values()]
        return LayerWeights(*changed)

    def select(self, group: int) -> "LayerWeights":
        """Return views of one of the models, with G = 1."""
        return self.map(lambda value: map_tensors(lambda tensor: aligned(tensor[group : group + 1]), value))

    @classmethod
    def take(cls, weights: dict[str, Tensor], i: int, shape: ModelShape) -> Self:
        """Pop layer i from decoder parameters by name."""
        layer = take_layer(weights, i, TRITON) | take_inputs(weights, i)
        assert layer.pop("attn_gate_bias") is None, "products with an output gate have no bias"
        layer |= {name: weights.pop(f"layers.{i}.{name}", None) for name in ("q_norm", "k_norm", "sinks")}
        layer |= {name: map_tensors(torch.Tensor.float, layer[name]) for name in ("sinks", "scalar")}
        experts = shape.experts
        is_sparse = experts is not None and i in experts.layers
        layer["experts"] = StackedExperts.take(weights, i, experts) if experts is not None and is_sparse else None
        return cls(**{name: map_tensors(lambda x: aligned(x)[None], value) for name, value in layer.items()})

    @classmethod
    def stack(cls, layers: Sequence["LayerWeights"]) -> Self:
        """Stack the same layer of several models."""
        weights: list[Any] = []
        for field in fields(cls):
            values = [getattr(layer, field.name) for layer in layers]
            assert not isinstance(values[0], StackedExperts), "models with experts are not stacked"
            if isinstance(values[0], QuantizedWeight):
                weights.append(stacked(values, dim=0))
            else:
                weights.append(None if values[0] is None else torch.cat(values))
        return cls(*weights)


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """Weights of G stacked models of one shape."""

    embed: Tensor  # [G * vocab_size, hidden_size]; token t of model g is row g * vocab_size + t
    layers: tuple[LayerWeights, ...]  # layers of all models
    final_norm: Tensor  # [G, hidden_size]
    final_norm_bias: Tensor | None
    head: Tensor  # [G, vocab_size, hidden_size]; a view of `embed` if tied
    positions: Tensor | None  # learned position embeddings, [G * P, hidden_size], or None

    @property
    def groups(self) -> int:
        return len(self.final_norm)

    @property
    def nbytes(self) -> int:
        """Bytes in memory. A tied head counts once."""
        tied = self.head.data_ptr() == self.embed.data_ptr()
        weights = self.embed, self.final_norm, self.final_norm_bias, self.positions, None if tied else self.head
        return sum(weight.nbytes for weight in (*weights, *self.layers) if weight is not None)

    def select(self, group: int) -> "ModelWeights":
        """Return views of one of the models, with G = 1."""

        def group_rows(rows: Tensor | None) -> Tensor | None:
            return None if rows is None else rows.view(self.groups, -1, rows.shape[1])[group]

        bias, embed = self.final_norm_bias, group_rows(self.embed)
        assert embed is not None
        return ModelWeights(
            embed,
            tuple(layer.select(group) for layer in self.layers),
            aligned(self.final_norm[group : group + 1]),
            None if bias is None else aligned(bias[group : group + 1]),
            aligned(self.head[group : group + 1]),
            group_rows(self.positions),
        )

    @classmethod
    def take(
        cls, embed: Tensor, weights: dict[str, Tensor], shape: ModelShape, positions: Tensor | None = None
    ) -> Self:
        """Build one model from decoder parameters by name, emptying the dict, and its learned positions."""
        layers = tuple(LayerWeights.take(weights, i, shape) for i in range(shape.num_layers))
        head = take_projection(weights, "", ("lm_head",)) if "lm_head" in weights else embed
        if isinstance(head, QuantizedWeight):  # the LM head's kernel has no quantised form
            head = dequantized(head).to(embed.dtype)
        head = aligned(head)
        bias = map_tensors(lambda x: aligned(x)[None], weights.pop("final_norm_bias", None))
        return cls(embed, layers, aligned(weights.pop("final_norm"))[None], bias, head[None], positions)

    @classmethod
    def stack(cls, models: Sequence["ModelWeights"]) -> Self:
        """Stack models of one shape by copying."""
        tied = models[0].head.data_ptr() == models[0].embed.data_ptr()
        embed = torch.cat([model.embed for model in models])
        head = embed.view(len(models), -1, embed.shape[1]) if tied else torch.cat([model.head for model in models])
        layers = tuple(LayerWeights.stack([model.layers[i] for model in models]) for i in range(len(models[0].layers)))
        biases = [model.final_norm_bias for model in models if model.final_norm_bias is not None]
        tables = [model.positions for model in models if model.positions is not None]
        final_norm, bias = torch.cat([model.final_norm for model in models]), torch.cat(biases) if biases else None
        return cls(embed, layers, final_norm, bias, head, torch.cat(tables) if tables else None)
