"""Weights as the Triton kernels take them: projections fused, and models of one shape stacked."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from treespec_weights.rules import ModelShape


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and from a multiple of 16 bytes on, as the kernels load it; a mapped file may start
    anywhere."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer of G stacked models. Projections are [G, out_features, in_features]; biases and norms [G, size]."""

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor  # the gate's rows, then the up projection's
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    def tensors(self) -> list[Tensor]:
        """All that there are."""
        values = [getattr(self, field.name) for field in fields(self)]
        return [value for value in values if value is not None]

    def one(self, group: int) -> "LayerWeights":
        """Views of one of the models, G = 1."""
        values: list[Any] = [getattr(self, field.name) for field in fields(self)]
        views: list[Any] = [None if value is None else _aligned(value[group : group + 1]) for value in values]
        return LayerWeights(*views)

    @classmethod
    def take(cls, weights: dict[str, Tensor], i: int) -> Self:
        """Layer i of decoder parameters by name, which is emptied of it."""

        def joined(*names: str) -> Tensor | None:
            parts = [weights.pop(f"layers.{i}.{name}", None) for name in names]
            present = [part for part in parts if part is not None]
            if not present:
                return None
            return _aligned(torch.cat(present) if len(present) > 1 else present[0])[None]

        def needed(*names: str) -> Tensor:
            tensor = joined(*names)
            assert tensor is not None, names
            return tensor

        return cls(
            needed("attn_norm"),
            needed("q", "k", "v"), joined("q_bias", "k_bias", "v_bias"),
            needed("o"), joined("o_bias"),
            needed("mlp_norm"),
            needed("gate", "up"), joined("gate_bias", "up_bias"),
            needed("down"), joined("down_bias"),
        )  # fmt: skip

    @classmethod
    def stack(cls, layers: Sequence["LayerWeights"]) -> Self:
        """The same layer of several models."""
        parts: list[Any] = []
        for field in fields(cls):
            values = [getattr(layer, field.name) for layer in layers]
            parts.append(None if values[0] is None else torch.cat(values))
        return cls(*parts)


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """G stacked models of one shape.

    Args:
        embed: [G * vocab_size, hidden_size]; token t of model g is row g * vocab_size + t.
        layers: of all models.
        final_norm: [G, hidden_size].
        head: [G, vocab_size, hidden_size]; a view of `embed` where it is tied.
    """

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor

    @property
    def groups(self) -> int:
        """G."""
        return len(self.final_norm)

    @property
    def nbytes(self) -> int:
        """Bytes held, a tied head not counted twice."""
        tied = self.head.data_ptr() == self.embed.data_ptr()
        parts = [self.embed, self.final_norm, *([] if tied else [self.head])]
        return sum(part.nbytes for part in [*parts, *(each for layer in self.layers for each in layer.tensors())])

    def one(self, group: int) -> "ModelWeights":
        """Views of one of the models, G = 1."""
        vocab = self.head.shape[1]
        return ModelWeights(
            self.embed[group * vocab : (group + 1) * vocab],
            tuple(layer.one(group) for layer in self.layers),
            _aligned(self.final_norm[group : group + 1]),
            _aligned(self.head[group : group + 1]),
        )

    @classmethod
    def take(cls, embed: Tensor, weights: dict[str, Tensor], shape: ModelShape) -> Self:
        """One model from decoder parameters by name, which is emptied."""
        layers = tuple(LayerWeights.take(weights, i) for i in range(shape.num_layers))
        head = embed if shape.tied else _aligned(weights.pop("lm_head"))
        return cls(embed, layers, _aligned(weights.pop("final_norm"))[None], head[None])

    @classmethod
    def stack(cls, models: Sequence["ModelWeights"]) -> Self:
        """Several models of one shape, copied next to each other."""
        tied = models[0].head.data_ptr() == models[0].embed.data_ptr()
        embed = torch.cat([model.embed for model in models])
        head = embed.view(len(models), -1, embed.shape[1]) if tied else torch.cat([model.head for model in models])
        layers = tuple(
            LayerWeights.stack([model.layers[i] for model in models]) for i in range(len(models[0].layers))
        )  # fmt: skip
        return cls(embed, layers, torch.cat([model.final_norm for model in models]), head)
