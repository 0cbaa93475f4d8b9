"""Mixtures of experts of the eager decoder, whose rows are independent of one another."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from treespec.models.norms import LayerStream, Norm, RmsStream
from treespec_kernels.cpu.compiled_linear import CompiledLinear
from treespec_kernels.linear.activations import clamped_swiglu, sigmoid
from treespec_kernels.linear.experts import Routing, route_ref
from treespec_kernels.linear.linear import Linear
from treespec_weights.experts import Experts

AnyLinear = Linear | CompiledLinear


class Expert(NamedTuple):
    """MLP of an expert, with or without a gate."""

    gate: AnyLinear | None
    up: AnyLinear
    down: AnyLinear
    activation: str

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x [num_rows, hidden_size]; returns the same shape."""
        if self.gate is None:
            return self.down(self.up.activated(x, self.activation))
        if self.activation == "clamped_swiglu":
            return self.down(clamped_swiglu(self.gate(x), self.up(x)))
        return self.down(self.gate.activated(x, self.activation).mul_(self.up(x)))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.gate, self.up, self.down) if part is not None)


class SparseMlp(NamedTuple):
    """A mixture of experts (arXiv 2101.03961). Each expert is computed once for all rows that chose it.

    The products of an expert's rows are row-invariant, and a row's outputs are added in the order of their scores in
    float32, so a row's bits do not depend on the choices of others.
    """

    config: Experts
    router: Linear
    correction: Tensor | None  # fp32 [num_experts]
    experts: list[Expert]
    shared_scale: Linear | None
    latent: tuple[AnyLinear, AnyLinear] | None  # projections before and after the experts other than the shared one
    min_rows: int  # as in `Decoder`
    scales: Tensor | None = None  # fp32 [num_experts], factors on the weights
    norms: Mapping[str, Norm] = MappingProxyType({})  # with `Experts.beside`, as in `ExpertWeights`

    def __call__(self, x: Tensor, num_rows: int, stream: RmsStream | LayerStream, shared: Tensor | None) -> Tensor:
        """Compute the first `num_rows` rows of x [num_rows or more, hidden_size]; the others, padding, become 0.

        `x` is the normalised `stream`, which experts beside a dense MLP normalise themselves. `shared` are the outputs
        of the shared expert, or of that MLP.
        """
        if not self.norms:
            return self._sum(x, x, num_rows, shared)
        assert shared is not None
        routed = self._sum(stream.norm(self.norms["experts_norm"]), stream.norm(self.norms["router_norm"]), num_rows)
        dense = stream.norm_of(shared, self.norms["shared_post_norm"])
        return dense + stream.norm_of(routed, self.norms["experts_post_norm"])

    def _sum(self, x: Tensor, router_x: Tensor, num_rows: int, shared: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the outputs of each row's experts, plus those of the shared one."""
        chosen, weights = self._route(router_x)
        chosen, weights = chosen[:num_rows], weights[:num_rows].float()
        inner = x if self.latent is None else self.latent[0](x)
        out = x.new_empty(*chosen.shape, inner.shape[1])
        for expert in chosen.unique().tolist():
            rows, ranks = (chosen == expert).nonzero(as_tuple=True)
            padded = F.pad(rows, (0, max(self.min_rows - len(rows), 0)))
            out[rows, ranks] = self.experts[expert](inner[padded])[: len(rows)]
        total = out[:, 0].float() * weights[:, :1]
        for rank in range(1, self.config.top_k):
            total += out[:, rank].float() * weights[:, rank : rank + 1]
        total = F.pad(total, (0, 0, 0, len(x) - num_rows))
        if self.latent is not None:
            total = self.latent[1](total.to(x.dtype)).float()
        if shared is not None:
            shared = shared.float()
            total += shared if self.shared_scale is None else shared * sigmoid(self.shared_scale(x))
        return total.to(x.dtype)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each row, int64 [num_rows, top_k], and their weights, as in transformers."""
        logits = self.router(x.float() if self.config.scoring == "sigmoid" else x)
        chosen, weights = route_ref(logits, self.correction, Routing.of(self.config))
        return chosen, weights if self.scales is None else weights * self.scales[chosen]

    @property
    def nbytes(self) -> int:
        linears = [self.router, *self.experts, *(self.latent or ())]
        return sum(linear.nbytes for linear in linears) + (0 if self.shared_scale is None else self.shared_scale.nbytes)
