"""Experts of a sparse layer in the layout of the compiled library (`experts_cpu.h`)."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treespec_kernels.cpu.decoder_library import STRUCTS, Weight

SCORINGS = ("softmax", "softmax_of_chosen", "sigmoid")  # in the order of the C++ enum

_LANES = 16
_LinearStruct = STRUCTS["Linear"]


class MlpWeights(NamedTuple):
    """Projections of an expert, as in `CompiledLayerWeights`."""

    gate_up: Weight | Sequence[Weight]
    gate_up_bias: Tensor | None
    down: Weight | Sequence[Weight]
    down_bias: Tensor | None


class CompiledExperts(NamedTuple):
    """Experts of a sparse layer, and the router that chooses among them."""

    router: Tensor  # [num_experts, hidden_size], in the model's dtype
    router_bias: Tensor | None
    correction: Tensor | None  # fp32 [num_experts], added to the scores by which experts are chosen
    shared_scale: Tensor | None  # [1, hidden_size]: the sigmoid of its product scales the shared expert's output
    experts: Sequence[MlpWeights]  # all in one form (`form_of`)
    top_k: int  # number of experts of each row
    scoring: str  # one of SCORINGS
    normalized: bool  # weights are divided by their sum
    scale: float  # factor on the weights
    groups: int  # number of groups of experts
    chosen_groups: int  # number of groups from which a row chooses
    latent: tuple[Weight, Weight] | None = None  # projections before and after the experts other than the shared one
    # Only of experts beside a dense MLP: factors on their weights, [num_experts], and norms by name
    scales: Tensor | None = None
    norms: Mapping[str, Tensor] = MappingProxyType({})

    def pack(
        self,
        linear: Callable[[Any, Tensor | None], ctypes.Structure],  # packs a weight and its bias, or None for no layer
        floats: Callable[[Tensor | None], int | None],  # returns the address of a tensor in fp32
        norm: Callable[[Tensor | None, None], ctypes.Structure],  # packs the weight of a norm
    ) -> list[Any]:
        """Return the struct of the experts, and the arrays to which it points."""
        gate_up, down = ((_LinearStruct * len(self.experts))() for _ in range(2))
        for e, expert in enumerate(self.experts):
            gate_up[e] = linear(expert.gate_up, expert.gate_up_bias)
            down[e] = linear(expert.down, expert.down_bias)
        struct = STRUCTS["Experts"](
            ctypes.addressof(gate_up),
            ctypes.addressof(down),
            linear(_padded(self.router), _padded(self.router_bias)),
            linear(_padded(self.shared_scale), None),
            *(linear(weight, None) for weight in self.latent or (None, None)),
            floats(_padded(self.correction)),
            len(self.experts),
            self.top_k,
            SCORINGS.index(self.scoring),
            self.normalized,
            self.groups,
            self.chosen_groups,
            self.scale,
            floats(self.scales),
            **{name: norm(weight, None) for name, weight in self.norms.items()},
        )
        return [struct, gate_up, down]


def _padded(tensor: Tensor | None) -> Tensor | None:
    """Append zeros, so that the number of outputs is a multiple of the lanes."""
    return tensor if tensor is None else torch.cat((tensor, tensor.new_zeros(-len(tensor) % _LANES, *tensor.shape[1:])))


def expert_linears(layer: ctypes.Structure) -> list[ctypes.Structure]:
    """Return the projections of a layer's experts, those of one expert after another."""
    if not layer.experts:
        return []
    experts = STRUCTS["Experts"].from_address(layer.experts)
    arrays = [(_LinearStruct * experts.count).from_address(start) for start in (experts.gate_up, experts.down)]
    return [linear for pair in zip(*arrays, strict=True) for linear in pair]
