"""Workload of tree walk: verification of every tree of a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from treespec_kernels.tree.device_trees import DeviceTrees, tensors_of
from treespec_kernels.tree.growth_limits import MAX_DEPTH
from treespec_kernels.tree.tree_walk import Walk, tree_walk_ref, tree_walk_triton

from .base import Setting, Tensors, Workload
from .forests import num_bytes
from .tree_select import select_inputs


class WalkInputs(NamedTuple):
    trees: DeviceTrees
    choices: torch.Tensor
    finite: torch.Tensor
    out: Walk


class TreeWalkWorkload(Workload[WalkInputs]):
    """The target chooses the first child of every node, so that paths are long."""

    op, exact = "tree_walk", Walk._fields

    def __init__(self, setting: Setting, requests: int):
        super().__init__(setting)
        self.requests, self.nodes = requests, setting.nodes
        self.key = {"levels": MAX_DEPTH, "nodes": setting.nodes}
        self.load = f"requests {requests}"
        out = DeviceTrees.allocate(requests, nodes=setting.nodes, max_depth=MAX_DEPTH)
        self.bytes = num_bytes(tensors_of(out))

    def make(self, generator: torch.Generator) -> WalkInputs:
        trees = select_inputs(self.requests, self.nodes, generator).selected_by_reference()
        choices = torch.full((self.requests, self.nodes), -7, dtype=torch.int64, device="cpu")
        for request, (parents, tokens) in enumerate(zip(trees.parents.tolist(), trees.tokens.tolist(), strict=True)):
            for node in reversed(range(1, self.nodes)):
                if parents[node] >= 0:
                    choices[request, parents[node]] = tokens[node]
        finite = torch.ones(self.requests, self.nodes, dtype=torch.bool, device=self.device)
        walk = Walk.allocate(self.requests, max_depth=MAX_DEPTH, device=self.device)
        return WalkInputs(trees, choices.to(self.device), finite, walk)

    def run(self, config: Any, copy: int = 0) -> Tensors:
        trees, choices, finite, out = self.inputs[copy]
        return tuple(tree_walk_triton(trees, choices, finite, out=out))

    def expected(self) -> Tensors:
        return tuple(tree_walk_ref(*self.inputs[0][:3]))


def workloads(setting: Setting) -> list[Workload]:
    return [TreeWalkWorkload(setting, requests) for requests in dict.fromkeys((1, setting.requests))]
