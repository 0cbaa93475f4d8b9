"""Workload of tree growth: the root and the levels of every tree of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from treespec_kernels.tree.device_trees import DeviceForest, ProposedTrees, tensors_of

from .base import Setting, Tensors, Workload
from .forests import ForestInputs, forest_inputs, forest_key, num_bytes

MERGED = 2  # levels: the first, which has one frontier node, and one that is like all later levels


class TreeMergeWorkload(Workload[ForestInputs]):
    """`tree_root`, and `tree_merge` for each of `MERGED` levels."""

    op, exact = "tree_merge", tuple(DeviceForest.__dataclass_fields__)

    def __init__(self, setting: Setting, requests: int):
        super().__init__(setting)
        self.requests = requests
        self.key = forest_key()
        self.load = f"requests {requests}, levels {MERGED}"
        made = forest_inputs(requests, torch.Generator().manual_seed(0), MERGED)
        self.bytes = num_bytes((made.tokens, made.probs, *made.proposed, *tensors_of(made.forest)))

    def make(self, generator: torch.Generator) -> ForestInputs:
        return forest_inputs(self.requests, generator, MERGED)

    def run(self, config: Any, copy: int = 0) -> Tensors:
        self.inputs[copy].grow()
        return tensors_of(self.inputs[copy].forest)

    def expected(self) -> Tensors:
        return tensors_of(self.inputs[0].grown_by_reference())

    def invariance_pairs(self, config: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the last request's results, in the batch and by itself."""
        inputs = self.inputs[0]
        company = [part.clone() for part in self.run(config)]
        last = slice(self.requests - 1, self.requests)
        single = inputs._replace(
            forest=forest_inputs(1, torch.Generator(self.device).manual_seed(0)).forest,
            roots=inputs.roots[last],
            tokens=inputs.tokens[:, :, last],
            probs=inputs.probs[:, :, last],
            weights=inputs.weights[last],
            end_tokens=inputs.end_tokens[last],
            proposed=ProposedTrees(*(part[last] for part in inputs.proposed)),
        )
        single.grow()
        yield from zip((part[last] for part in company), tensors_of(single.forest), strict=True)


def workloads(setting: Setting) -> list[Workload]:
    return [TreeMergeWorkload(setting, requests) for requests in dict.fromkeys((1, setting.requests))]
