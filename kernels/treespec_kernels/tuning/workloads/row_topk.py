"""Workloads of row top-k over the logits of a draft pass, with and without noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from treespec_kernels.sampling.row_topk import RowTopk, row_topk_ref, row_topk_triton

from .base import Setting, Tensors, Workload, equal

K = 4


class RowTopkWorkload(Workload[Tensors]):
    """The K best tokens of rows of logits at a temperature; 0 means no noise. `flops` is 0."""

    op = "row_topk"

    def __init__(self, setting: Setting, rows: int, temperature: float):
        super().__init__(setting)
        self.rows, self.vocab_size, self.temperature = rows, setting.shape.vocab_size, temperature
        self.key = self.key_of(vocab_size=self.vocab_size, k=min(K, self.vocab_size))
        self.load = f"rows {rows}, temperature {temperature:g}"
        self.bytes = rows * self.vocab_size * self.dtype.itemsize

    def make(self, generator: torch.Generator) -> Tensors:
        """Create logits, temperatures, seeds, samples and positions."""
        logits = self.random(generator, self.rows, self.vocab_size, scale=2.0)
        temperatures = torch.full((self.rows,), self.temperature, device=self.device, dtype=torch.float32)
        positions = torch.arange(self.rows, device=self.device)
        return logits, temperatures, torch.full_like(positions, 7), torch.zeros_like(positions), positions

    def _run(self, inputs: Tensors) -> RowTopk:
        return row_topk_triton(inputs[0], self.key["k"], **self._noise(inputs))

    def _noise(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        if not self.temperature:
            return {}
        return dict(zip(("temperatures", "seeds", "samples", "positions"), inputs[1:], strict=True))

    def run(self, config: Any, copy: int = 0) -> Tensors:
        return tuple(self._run(self.inputs[copy]))

    def expected(self) -> Tensors:
        inputs = self.inputs[0]
        return tuple(row_topk_ref(inputs[0], self.key["k"], **self._noise(inputs)))

    def compare(self, actual: Tensors, expected: Tensors, config: Any) -> None:
        for name, own, right in zip(RowTopk._fields, actual, expected, strict=True):
            if name in ("tokens", "finite"):
                equal(own, right, name)
            else:  # logarithms may differ in their last bits
                torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-4)

    def invariance_pairs(self, config: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        company = self.run(config)
        for row in {0, self.rows - 1}:
            single = self._run(tuple(part[row : row + 1] for part in self.inputs[0]))
            yield from zip((part[row : row + 1] for part in company), single, strict=True)

    def baselines(self) -> dict[str, Callable[[int], Any]]:
        """Return torch's top-k and log-sum-exp of the logits, without noise."""

        def topk(copy: int) -> Any:
            logits = self.inputs[copy][0]
            return logits.topk(self.key["k"], dim=1), logits.float().logsumexp(1)

        return {"torch topk and logsumexp": topk}


def workloads(setting: Setting) -> list[Workload]:
    return [RowTopkWorkload(setting, rows, noise) for noise in (0.0, 0.8) for rows in (1, setting.nodes)]
