"""Workloads of one layer's tree attention: plain decoding, a tree, and a batch of trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from treespec_kernels.attention.tree_attention import (
    TreeAttentionConfig,
    TreeAttentionPlan,
    plan_tree_attention,
    tree_attention_ref,
    tree_attention_triton,
)
from treespec_kernels.launch.triton_launch import target_of
from treespec_kernels.tuning.testing import TreeAttentionInputs, tree_attention_inputs, tree_parents

from .base import Setting, Tensors, Workload


class TreeAttentionWorkload(Workload[TreeAttentionInputs]):
    """`requests` random trees of `nodes` nodes, each after `context` committed positions."""

    op = "tree_attention"

    def __init__(self, setting: Setting, requests: int, nodes: int, weight: float = 1.0):
        super().__init__(setting)
        shape = setting.shape
        self.shape, self.requests, self.nodes, self.context = shape, requests, nodes, setting.context
        self.key = self.key_of(head_dim=shape.head_dim, group=shape.group)
        self.load = f"requests {requests}, nodes {nodes}, context {setting.context}"
        self.weight = weight
        positions = 2 * shape.num_kv_heads * (setting.context + nodes)
        self.bytes = requests * (positions + 2 * nodes * shape.num_heads) * shape.head_dim * shape.dtype.itemsize
        keys = setting.context + nodes // 2
        self.flops = 4 * requests * nodes * shape.num_heads * shape.head_dim * keys
        self._plans: dict[tuple[int, TreeAttentionConfig], TreeAttentionPlan] = {}

    def shipped(self) -> list[Any]:
        return TreeAttentionConfig.candidates(self.dtype, self.shape.head_dim, target_of(self.device))

    def make(self, generator: torch.Generator) -> TreeAttentionInputs:
        seed, lengths = generator.initial_seed(), [self.context + 5 * i for i in range(self.requests)]
        return tree_attention_inputs(lengths, self.trees(seed), **self.shape.attention, device=self.device, seed=seed)

    def trees(self, seed: int) -> list[list[int]]:
        """Return the parents of every request's tree."""
        host = torch.Generator().manual_seed(seed)
        return [tree_parents("random", self.nodes, host) for _ in range(self.requests)]

    def release(self) -> None:
        super().release()
        self._plans = {}

    def run(self, config: Any, copy: int = 0) -> Tensors:
        inputs = self.inputs[copy]
        if (copy, config) not in self._plans:  # each copy has its own trees
            self._plans[copy, config] = self._plan(inputs, config)
        return (self._attend(inputs, self._plans[copy, config]),)

    def _plan(self, inputs: TreeAttentionInputs, config: TreeAttentionConfig) -> TreeAttentionPlan:
        return plan_tree_attention(**inputs.plan, **self.shape.attention, device=self.device, config=config)

    @staticmethod
    def _attend(inputs: TreeAttentionInputs, plan: TreeAttentionPlan) -> torch.Tensor:
        return tree_attention_triton(inputs.q, inputs.k_cache, inputs.v_cache, **inputs.rows, plan=plan)

    def expected(self) -> Tensors:
        return self._by_reference(self.inputs[0])

    @staticmethod
    def _by_reference(inputs: TreeAttentionInputs) -> Tensors:
        return (tree_attention_ref(inputs.q, inputs.k_cache, inputs.v_cache, **inputs.rows),)

    def invariance_pairs(self, config: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield a node as the only row of its request, as in plain decoding."""
        inputs = self.inputs[0]
        (company,) = self.run(config)
        starts = torch.tensor(inputs.plan["rows_per_request"], dtype=torch.int64, device="cpu").cumsum(0) - self.nodes
        for row in {0, self.nodes // 2, self.requests * self.nodes - 1}:
            request = int((starts <= row).sum()) - 1
            rows = {name: value for name, value in inputs.rows.items() if name not in ("context_lens", "page_table")}
            rows = {name: value if name == "scale" else value[row : row + 1] for name, value in rows.items()}
            rows["row_request"] = torch.zeros_like(rows["row_request"])
            rows |= {name: inputs.rows[name][request : request + 1] for name in ("context_lens", "page_table")}
            plan = {
                "context_lens": inputs.plan["context_lens"][request : request + 1],
                "rows_per_request": [1],
                "depths": inputs.plan["depths"][row : row + 1],
            }
            single = TreeAttentionInputs(inputs.q[row : row + 1], inputs.k_cache, inputs.v_cache, rows, plan)
            yield company[row : row + 1], self._attend(single, self._plan(single, config))

    def baselines(self) -> dict[str, Callable[[int], Any]]:
        """Return torch's attention over as many contiguous keys, without a mask."""
        length = self.context + self.nodes
        shape = (self.requests, self.shape.num_kv_heads, length, self.shape.head_dim)
        keys = [torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(2 * len(self.inputs))]

        def sdpa(copy: int) -> torch.Tensor:
            q = self.inputs[copy].q.view(self.requests, self.nodes, -1, self.shape.head_dim).transpose(1, 2)
            return F.scaled_dot_product_attention(q, keys[2 * copy], keys[2 * copy + 1], enable_gqa=True)

        return {"torch sdpa, no mask": sdpa}


def workloads(setting: Setting) -> list[Workload]:
    """Return workloads of one tree, with half of the weight, of plain decoding, and of a batch of trees."""
    return [
        TreeAttentionWorkload(setting, 1, setting.nodes, 0.5),
        TreeAttentionWorkload(setting, 1, 1, 0.25),
        TreeAttentionWorkload(setting, setting.requests, setting.nodes, 0.25),
    ]
