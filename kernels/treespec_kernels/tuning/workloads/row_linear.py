"""Workloads of the linear layers of a model: QKV, output, gate and up with SiLU, down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from treespec_kernels.launch.triton_launch import target_of
from treespec_kernels.linear.quantized import QuantizedWeight
from treespec_kernels.linear.row_linear import RowLinearConfig, row_linear_ref, row_linear_triton

from .base import Setting, Tensors, Workload

# Weights in the mean time that tuning minimises: of a pass over one tree, of plain decoding, and of a batch of trees.
TREE, PLAIN, BATCH = 0.6, 0.2, 0.2
PREFILL = 0.01  # one chunk of a prompt for a hundred passes


class LinearInputs(NamedTuple):
    """Inputs of a linear layer."""

    x: torch.Tensor  # [rows, in] or [groups, rows, in]
    weight: torch.Tensor | QuantizedWeight  # [out, in] or [groups, out, in]


class RowLinearWorkload(Workload[LinearInputs]):
    """One layer of `rows` rows per group. With silu_gate, out_features counts gates and ups."""

    op = "row_linear"

    def __init__(
        self,
        setting: Setting,
        out_features: int,
        in_features: int,
        rows: int,
        silu_gate: bool = False,
        weight: float = 1.0,
    ):
        super().__init__(setting)
        self.sizes = (setting.dtype, out_features, in_features, silu_gate)
        self.rows, self.groups, self.silu_gate, self.weight = rows, setting.groups, silu_gate, weight
        self.key = self.key_of(
            out_features=out_features, in_features=in_features, silu_gate=int(silu_gate), groups=setting.groups
        )
        self.load = f"rows {rows}"
        written = rows * (out_features // 2 if silu_gate else out_features)
        moved = out_features * in_features + rows * in_features + written
        self.bytes = setting.groups * moved * setting.dtype.itemsize
        self.flops = 2 * setting.groups * rows * out_features * in_features

    def shipped(self) -> list[Any]:
        return RowLinearConfig.candidates(*self.sizes, target_of(self.device))

    def make(self, generator: torch.Generator) -> LinearInputs:
        _, out_features, in_features, _ = self.sizes
        stack = self.setting.stack
        x = self.random(generator, *stack, self.rows, in_features)
        return LinearInputs(x, self.random(generator, *stack, out_features, in_features, scale=in_features**-0.5))

    def _run(self, inputs: LinearInputs, config: Any) -> torch.Tensor:
        return row_linear_triton(*inputs, silu_gate=self.silu_gate, config=config)

    def run(self, config: Any, copy: int = 0) -> Tensors:
        return (self._run(self.inputs[copy], config),)

    def expected(self) -> Tensors:
        return (row_linear_ref(*self.inputs[0], silu_gate=self.silu_gate),)

    def invariance_pairs(self, config: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield a row by itself, the rows in reverse order, the rows followed by `rows` + 1 others, and every tile."""
        x, weight = self.inputs[0]
        (company,) = self.run(config)
        for row in {0, self.rows // 2, self.rows - 1}:
            own = slice(row, row + 1)
            yield company[..., own, :], self._run(LinearInputs(x[..., own, :].contiguous(), weight), config)
        yield company.flip(-2), self._run(LinearInputs(x.flip(-2), weight), config)
        more = x.repeat(*(1,) * (x.dim() - 2), 3, 1)[..., : 2 * self.rows + 1, :].contiguous()
        yield company, self._run(LinearInputs(more, weight), config)[..., : self.rows, :]
        for tile in config.larger:
            yield company, self._run(LinearInputs(more, weight), config.with_tile(tile))[..., : self.rows, :]

    def baselines(self) -> dict[str, Callable[[int], Any]]:
        """Return torch's matrix product without the activation, whose bits depend on the number of rows."""

        def product(copy: int) -> torch.Tensor:
            x, weight = self.inputs[copy]
            assert isinstance(weight, torch.Tensor)
            return F.linear(x, weight) if x.dim() == 2 else torch.bmm(x, weight.mT)

        return {"torch": product}


def row_counts(setting: Setting, prefill: int = 0) -> dict[int, float]:
    """Return the numbers of rows that a layer is tuned for, and their weights. `prefill`: rows of a prefill pass."""
    weights: dict[int, float] = {}
    counts = [(setting.nodes, TREE), (1, PLAIN), (setting.requests * setting.nodes, BATCH)]
    counts += [(prefill, PREFILL)] if prefill else []
    for rows, weight in counts:
        weights[rows] = weights.get(rows, 0.0) + weight
    return weights


def layers_of(setting: Setting, kind: type[RowLinearWorkload]) -> list[Workload]:
    """Return the workloads of a model's linear layers; layers of equal size count once."""
    layers = {layer[1:] for layer in setting.shape.linear_layers}
    return [
        kind(setting, out_features, in_features, rows, silu_gate, weight)
        for out_features, in_features, silu_gate in sorted(layers)
        for rows, weight in row_counts(setting, setting.prefill).items()
    ]


def workloads(setting: Setting) -> list[Workload]:
    return layers_of(setting, RowLinearWorkload) if setting.shape.quantized is None else []
