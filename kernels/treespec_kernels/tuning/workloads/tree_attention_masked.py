"""Workloads of one layer's masked tree attention: a tree, and a batch of trees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from treespec_kernels.attention.tree_attention import TreeAttentionPlan
from treespec_kernels.attention.tree_attention_masked import ancestor_masks, tree_attention_masked_triton
from treespec_kernels.tuning.testing import TreeAttentionInputs

from .base import Setting, Workload
from .tree_attention import TreeAttentionWorkload


class MaskedTreeAttentionWorkload(TreeAttentionWorkload):
    """The trees of `TreeAttentionWorkload`, with the configuration tuned for exact attention."""

    op = "tree_attention_masked"

    def make(self, generator: torch.Generator) -> TreeAttentionInputs:
        inputs, trees = super().make(generator), self.trees(generator.initial_seed())
        words = torch.from_numpy(np.concatenate([ancestor_masks(parents) for parents in trees]))
        rows = {name: value for name, value in inputs.rows.items() if name != "ancestors"}
        slots = list(range(self.nodes)) * self.requests
        rows["ancestor_words"] = words.to(self.device)
        return replace(inputs, rows=rows, plan=inputs.plan | {"row_slots": slots})

    def expected(self) -> tuple[torch.Tensor, ...]:
        return self._by_reference(super().make(torch.Generator().manual_seed(0)))  # equal seeds give equal inputs

    @staticmethod
    def _attend(inputs: TreeAttentionInputs, plan: TreeAttentionPlan) -> torch.Tensor:
        return tree_attention_masked_triton(inputs.q, inputs.k_cache, inputs.v_cache, **inputs.rows, plan=plan)

    def invariance_pairs(self, config: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield nothing, because sums are in tree order and depend on the tree."""
        return iter(())


def workloads(setting: Setting) -> list[Workload]:
    counts = dict.fromkeys((1, setting.requests))
    return [MaskedTreeAttentionWorkload(setting, requests, setting.nodes) for requests in counts]
