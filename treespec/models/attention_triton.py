"""The Triton tree-attention kernel as the decoder calls it."""

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treespec.errors import KernelError
from treespec_kernels.tree_attention import (
    PlanCapacity,
    TreeAttentionConfig,
    TreeAttentionPlan,
    plan_tree_attention,
    tree_attention_triton,
)
from treespec_kernels.tree_batch import RequestRows


@dataclass(frozen=True, eq=False)
class _Pass:
    """What the kernel reads beside q and the cache."""

    plan: TreeAttentionPlan
    row_request: Tensor
    context_lens: Tensor
    page_table: Tensor
    depths: Tensor
    ancestors: Tensor


class TritonAttention:
    """Exact tree attention on a GPU. The cache has the model's dtype.

    Raises:
        KernelError: no GPU, and triton's interpreter is not on (TRITON_INTERPRET=1 before triton is imported).
    """

    name = "triton"

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if device.type != "cuda" and not interpreted:
            raise KernelError(
                f"attention='triton' needs a GPU, the device is {device}; use attention='auto', or set "
                "TRITON_INTERPRET=1 to run the kernels in Triton's interpreter"
            )
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.cache_dtype, self.device = dtype, device
        # The interpreter's dot is BLAS, whose bits depend on the number of rows.
        self.config = replace(TreeAttentionConfig.default(dtype, head_dim), fixed_order_dot=interpreted)

    def plan(self, requests: list[RequestRows], num_rows: int) -> _Pass:
        lengths = [rows.context_len for rows in requests]
        depths = np.concatenate([rows.depths for rows in requests])
        counts = [rows.num_rows for rows in requests]
        arguments: dict[str, Any] = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "dtype": self.cache_dtype,
            "device": self.device,
            "chains": [rows.is_chain for rows in requests],
            "config": self.config,
        }
        plan = plan_tree_attention(lengths, counts, depths.tolist(), **arguments)
        if num_rows > len(depths):
            capacity = plan.capacity
            padded = PlanCapacity(num_rows, capacity.packed_items, capacity.node_items, capacity.partials)
            plan = plan_tree_attention(lengths, counts, depths.tolist(), capacity=padded, **arguments)
        table = np.zeros((len(requests), max(len(rows.pages) for rows in requests)), dtype=np.int32)
        for i, rows in enumerate(requests):
            table[i, : len(rows.pages)] = rows.pages
        ancestors = np.zeros((num_rows, int(depths.max()) + 1), dtype=np.int32)
        first = 0
        for rows in requests:
            ancestors[first : first + rows.num_rows, : rows.ancestors.shape[1]] = rows.ancestors
            first += rows.num_rows
        return _Pass(
            plan,
            self._tensor(np.pad(np.repeat(np.arange(len(requests)), counts), (0, num_rows - first))),
            self._tensor(np.array(lengths)),
            self._tensor(table),
            self._tensor(np.pad(depths, (0, num_rows - first))),
            self._tensor(ancestors),
        )

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).to(self.device)

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: _Pass, scale: float) -> Tensor:
        return tree_attention_triton(
            q,
            k_cache,
            v_cache,
            row_request=plan.row_request,
            context_lens=plan.context_lens,
            page_table=plan.page_table,
            depths=plan.depths,
            ancestors=plan.ancestors,
            scale=scale,
            plan=plan.plan,
        )
