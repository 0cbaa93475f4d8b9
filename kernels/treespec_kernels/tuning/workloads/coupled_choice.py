"""Workload of coupled choice: every row of a tree pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from treespec_kernels.sampling.coupled_choice import CoupledChoice, coupled_choice_ref, coupled_choice_triton

from .base import Setting, Tensors, Workload


class CoupledChoiceWorkload(Workload[Tensors]):
    """Rows of logits at temperature 0.8.

    `flops` is 0, because the noise uses integer arithmetic, about 40 instructions per token.
    """

    op, exact = "coupled_choice", CoupledChoice._fields

    def __init__(self, setting: Setting, rows: int):
        super().__init__(setting)
        self.rows, self.vocab_size = rows, setting.shape.vocab_size
        self.key = self.key_of(vocab_size=self.vocab_size)
        self.load = f"rows {rows}"
        self.bytes = rows * self.vocab_size * self.dtype.itemsize

    def make(self, generator: torch.Generator) -> Tensors:
        scores = self.random(generator, self.rows, self.vocab_size, scale=2.0)
        temperatures = torch.full((self.rows,), 0.8, device=self.device, dtype=torch.float32)
        positions = torch.arange(self.rows, device=self.device)
        return scores, temperatures, torch.full_like(positions, 7), torch.zeros_like(positions), positions

    def run(self, config: Any, copy: int = 0) -> Tensors:
        return tuple(coupled_choice_triton(*self.inputs[copy]))

    def expected(self) -> Tensors:
        return tuple(coupled_choice_ref(*self.inputs[0]))

    def invariance_pairs(self, config: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        tokens = self.run(config)[0]
        for row in {0, self.rows - 1}:
            yield tokens[row : row + 1], coupled_choice_triton(*(x[row : row + 1] for x in self.inputs[0])).tokens


def workloads(setting: Setting) -> list[Workload]:
    return [CoupledChoiceWorkload(setting, rows) for rows in (1, setting.nodes)]
