"""Workload of the LM head, with the block summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from treespec_kernels.launch.triton_launch import target_of
from treespec_kernels.linear.lm_head import LmHeadConfig, block_stats_ref, lm_head_triton

from .base import Setting, Tensors, Workload, equal
from .row_linear import LinearInputs, row_counts


class LmHeadWorkload(Workload[LinearInputs]):
    """The LM head of `rows` rows per group."""

    op = "lm_head"

    def __init__(self, setting: Setting, rows: int, weight: float = 1.0):
        super().__init__(setting)
        shape = setting.shape
        self.sizes = (setting.dtype, shape.vocab_size, shape.hidden_size)
        self.rows, self.groups, self.weight = rows, setting.groups, weight
        self.key = self.key_of(vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, groups=setting.groups)
        self.load = f"rows {rows}"
        moved = shape.vocab_size * shape.hidden_size + rows * (shape.hidden_size + shape.vocab_size)
        self.bytes = setting.groups * moved * setting.dtype.itemsize
        self.flops = 2 * setting.groups * rows * shape.vocab_size * shape.hidden_size

    def shipped(self) -> list[Any]:
        return LmHeadConfig.candidates(*self.sizes, target_of(self.device))

    def make(self, generator: torch.Generator) -> LinearInputs:
        _, vocab, hidden = self.sizes
        x = self.random(generator, *self.setting.stack, self.rows, hidden)
        return LinearInputs(x, self.random(generator, *self.setting.stack, vocab, hidden, scale=hidden**-0.5))

    def run(self, config: Any, copy: int = 0) -> Tensors:
        """Return the logits, and the blocks' values, tokens and sums."""
        return self._run(self.inputs[copy], config)

    @staticmethod
    def _run(inputs: LinearInputs, config: Any) -> Tensors:
        logits, stats = lm_head_triton(*inputs, config=config)
        return (logits, *stats)

    def expected(self) -> Tensors:
        x, weight = self.inputs[0]
        return ((x.float() @ weight.float().mT).to(x.dtype).reshape(-1, weight.shape[-2]),)

    def compare(self, actual: Tensors, expected: Tensors, config: Any) -> None:
        """Raise AssertionError if the logits are wrong, or if the summary is not that of the actual logits."""
        logits, values, tokens, sums = actual
        self.near(logits, expected[0])
        stats = block_stats_ref(logits, config.block_n)
        equal(values, stats.values, "the blocks' maxima")
        equal(tokens, stats.tokens, "the blocks' best tokens")
        torch.testing.assert_close(sums, stats.sums, rtol=1e-4, atol=0.0)

    def invariance_pairs(self, config: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield all results of a row by itself, of the rows in reverse order, and of every tile."""
        x, weight = self.inputs[0]
        company = [part.view(self.groups, self.rows, -1) for part in self.run(config)]
        for row in {0, self.rows - 1}:
            single = self._run(LinearInputs(x[..., row : row + 1, :].contiguous(), weight), config)
            yield from zip((p[:, row] for p in company), (p.view(self.groups, -1) for p in single), strict=True)
        reverse = self._run(LinearInputs(x.flip(-2), weight), config)
        yield from zip(
            (p.flip(1) for p in company), (p.view_as(c) for p, c in zip(reverse, company, strict=True)), strict=True
        )
        for tile in config.larger:
            results = self._run(self.inputs[0], config.with_tile(tile))
            yield from zip(company, (p.view_as(c) for p, c in zip(results, company, strict=True)), strict=True)

    def baselines(self) -> dict[str, Callable[[int], Any]]:
        """Return torch's product with argmax and log-sum-exp over the logits."""

        def product(copy: int) -> Any:
            x, weight = self.inputs[copy]
            logits = F.linear(x, weight) if x.dim() == 2 else torch.bmm(x, weight.mT)
            return logits.argmax(-1), logits.float().logsumexp(-1)

        return {"torch with argmax and logsumexp": product}


def workloads(setting: Setting) -> list[Workload]:
    return [LmHeadWorkload(setting, rows, weight) for rows, weight in row_counts(setting).items()]
