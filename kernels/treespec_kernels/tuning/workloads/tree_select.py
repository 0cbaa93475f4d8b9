"""Workload of tree select: the target's trees from all candidates."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from treespec_kernels.tree.device_trees import DeviceForest, DeviceTrees, ProposedTrees, tensors_of
from treespec_kernels.tree.growth_limits import MAX_DEPTH
from treespec_kernels.tree.tree_select import tree_select_ref, tree_select_triton

from .base import Setting, Tensors, Workload
from .forests import forest_inputs, forest_key, num_bytes


class SelectInputs(NamedTuple):
    forest: DeviceForest
    proposed: ProposedTrees
    roots: torch.Tensor
    nodes: int
    least_values: torch.Tensor
    max_depths: torch.Tensor
    out: DeviceTrees

    def select(self) -> DeviceTrees:
        return tree_select_triton(*self[:6], out=self.out)

    def selected_by_reference(self) -> DeviceTrees:
        return tree_select_ref(*self[:6])


def select_inputs(requests: int, nodes: int, generator: torch.Generator) -> SelectInputs:
    """Create forests grown by the reference, and buffers for trees of `nodes` nodes."""
    made = forest_inputs(requests, generator)
    device = generator.device
    return SelectInputs(
        made.grown_by_reference(),
        made.proposed,
        made.roots,
        nodes,
        torch.zeros(requests, device=device, dtype=torch.float32),
        torch.full((requests,), MAX_DEPTH, dtype=torch.int32, device=device),
        DeviceTrees.allocate(requests, nodes=nodes, max_depth=MAX_DEPTH, device=device),
    )


class TreeSelectWorkload(Workload[SelectInputs]):
    """Trees of `nodes` nodes from the candidates of all levels."""

    op, exact = "tree_select", tuple(DeviceTrees.__dataclass_fields__)

    def __init__(self, setting: Setting, requests: int):
        super().__init__(setting)
        self.requests, self.nodes = requests, setting.nodes
        self.key = forest_key() | {"nodes": setting.nodes}
        self.load = f"requests {requests}"
        made = select_inputs(requests, setting.nodes, torch.Generator().manual_seed(0))
        self.bytes = num_bytes((*tensors_of(made.forest)[:5], *tensors_of(made.out)))

    def make(self, generator: torch.Generator) -> SelectInputs:
        return select_inputs(self.requests, self.nodes, generator)

    def run(self, config: Any, copy: int = 0) -> Tensors:
        return tensors_of(self.inputs[copy].select())

    def expected(self) -> Tensors:
        return tensors_of(self.inputs[0].selected_by_reference())


def workloads(setting: Setting) -> list[Workload]:
    return [TreeSelectWorkload(setting, requests) for requests in dict.fromkeys((1, setting.requests))]
