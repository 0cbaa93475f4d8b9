"""Workload of RMSNorm after a linear layer with split K: adds the splits and the residual, then normalises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from treespec_kernels.linear.rms_norm import rms_norm_ref, rms_norm_triton

from .base import Setting, Tensors, Workload

SPLITS = 4
EPS = 1e-5


class NormInputs(NamedTuple):
    x: torch.Tensor  # [splits, rows, hidden] fp32
    weight: torch.Tensor
    residual: torch.Tensor
    before: torch.Tensor  # initial value of residual


class RmsNormWorkload(Workload[NormInputs]):
    """Partial sums of four splits, so small that a residual to which they are added repeatedly stays finite."""

    op = "rms_norm"

    def __init__(self, setting: Setting, rows: int):
        super().__init__(setting)
        hidden_size, itemsize = setting.shape.hidden_size, setting.dtype.itemsize
        self.rows, self.hidden_size = rows, hidden_size
        self.key = self.key_of(hidden_size=hidden_size, splits=SPLITS)
        self.load = f"rows {rows}"
        self.bytes = rows * hidden_size * (4 * SPLITS + 3 * itemsize) + hidden_size * itemsize
        self.flops = rows * hidden_size * (SPLITS + 5)

    def make(self, generator: torch.Generator) -> NormInputs:
        size = (self.rows, self.hidden_size)
        x = torch.randn((SPLITS, *size), generator=generator, device=self.device, dtype=torch.float32).mul_(1e-3)
        residual = self.random(generator, *size)
        return NormInputs(x, self.random(generator, self.hidden_size), residual, residual.clone())

    def reset(self, inputs: NormInputs) -> None:
        inputs.residual.copy_(inputs.before)

    def run(self, config: Any, copy: int = 0) -> Tensors:
        """Return the norm and the updated residual."""
        x, weight, residual, _ = self.inputs[copy]
        return rms_norm_triton(x, weight, EPS, residual=residual), residual

    def expected(self) -> Tensors:
        x, weight, residual, _ = self.inputs[0]
        residual = residual.clone()
        return rms_norm_ref(x, weight, EPS, residual=residual), residual

    def invariance_pairs(self, config: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        inputs = self.inputs[0]
        company = [part.clone() for part in self.run(config)]
        for row in {0, self.rows - 1}:
            residual = inputs.before[row : row + 1].clone()
            normed = rms_norm_triton(inputs.x[:, row : row + 1], inputs.weight, EPS, residual=residual)
            yield company[0][row : row + 1], normed
            yield company[1][row : row + 1], residual

    def baselines(self) -> dict[str, Callable[[int], Any]]:
        """Return eager torch operations."""

        def norm(copy: int) -> torch.Tensor:
            x, weight, residual, _ = self.inputs[copy]
            return F.rms_norm((residual + x.sum(0)).to(self.dtype), (self.hidden_size,), weight, EPS)

        return {"torch": norm}


def workloads(setting: Setting) -> list[Workload]:
    rows = dict.fromkeys((1, setting.nodes, setting.requests * setting.nodes))
    return [RmsNormWorkload(setting, n) for n in rows]
