"""Workload of the pass layout: planning a pass over trees on the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from treespec_kernels.attention.pass_layout import DeviceLayout, PassPlaces, pass_layout_ref
from treespec_kernels.tuning.testing import scattered_page_table, tree_parents

from .base import Setting, Tensors, Workload


class LayoutInputs(NamedTuple):
    layout: DeviceLayout
    context_lens: torch.Tensor
    page_table: torch.Tensor
    depths: torch.Tensor
    row_slots: torch.Tensor
    ancestors: torch.Tensor


class PassLayoutWorkload(Workload[LayoutInputs]):
    """Layout of random trees of `nodes` nodes. It checks positions and slots; tests of attention check the plan."""

    op, exact = "pass_layout", PassPlaces._fields

    def __init__(self, setting: Setting, requests: int):
        super().__init__(setting)
        self.requests = requests
        self.key = self.key_of(head_dim=setting.shape.head_dim, group=setting.shape.group)
        self.load = f"requests {requests}, nodes {setting.nodes}, context {setting.context}"
        plan = self._layout(torch.device("cpu")).plan
        self.bytes = plan.packed_items.nbytes + plan.node_items.nbytes + requests * setting.nodes * (8 + 4)

    def _layout(self, device: torch.device) -> DeviceLayout:
        setting = self.setting
        sizes = (self.requests, setting.nodes, setting.nodes)
        return DeviceLayout.allocate(
            *sizes, chain=False, max_context=setting.context, **setting.shape.attention, device=device
        )

    def make(self, generator: torch.Generator) -> LayoutInputs:
        setting, host = self.setting, torch.Generator().manual_seed(generator.initial_seed())
        depths = torch.zeros(self.requests, setting.nodes, dtype=torch.int32, device="cpu")
        ancestors = torch.zeros(self.requests, setting.nodes, setting.nodes, dtype=torch.int32, device="cpu")
        for request in range(self.requests):
            for node, parent in enumerate(tree_parents("random", setting.nodes, host)):
                if node:
                    depths[request, node] = depths[request, parent] + 1
                    ancestors[request, node] = ancestors[request, parent]
                    ancestors[request, node, depths[request, node] :] = node
        page_table = scattered_page_table(self.requests, -(-(setting.context + setting.nodes) // 64), host)
        lengths = torch.full((self.requests,), setting.context, dtype=torch.int32, device="cpu")
        slots = torch.arange(setting.nodes, dtype=torch.int32, device="cpu").repeat(self.requests, 1)
        rest = (tensor.to(self.device) for tensor in (lengths, page_table, depths, slots, ancestors))
        return LayoutInputs(self._layout(self.device), *rest)

    def run(self, config: Any, copy: int = 0) -> Tensors:
        layout, *rest = self.inputs[copy]
        layout.fill(*rest)
        return layout.positions, layout.slots

    def expected(self) -> Tensors:
        return tuple(pass_layout_ref(*self.inputs[0][1:5]))


def workloads(setting: Setting) -> list[Workload]:
    return [PassLayoutWorkload(setting, requests) for requests in dict.fromkeys((1, setting.requests))]
