"""Tree attention backends of the decoder, selected by name."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from treespec.errors import KernelError
from treespec.models.decoder import Attention
from treespec_kernels.attention.tree_attention import (
    AttentionShape,
    TreeAttentionConfig,
    plan_tree_attention,
    tree_attention_triton,
)
from treespec_kernels.attention.tree_attention_cpu import (
    AttentionMode,
    CpuAttentionPlan,
    plan_tree_attention_cpu,
    tree_attention_cpu,
)
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.launch.triton_launch import is_interpreted, target_of
from treespec_kernels.tuning.tuned import KernelConfigs, Key
from treespec_weights.rules import ModelShape


class CpuAttention:
    """Exact tree attention on a CPU. The cache is fp32, the dtype of the matrix products."""

    cache_dtype = torch.float32

    def __init__(self, num_heads: int, mode: AttentionMode = "packed"):
        self.num_heads, self.mode = num_heads, mode
        self.name = f"cpu-{mode}"

    def plan(self, requests: list[RequestRows], num_rows: int, window: int | None = None) -> CpuAttentionPlan:
        return plan_tree_attention_cpu(requests, self.num_heads, self.mode, window)

    __call__ = staticmethod(tree_attention_cpu)


class TritonAttention:
    """Tree attention on a GPU, with the KV cache in the model's dtype."""

    name = "triton"

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        configs: KernelConfigs | None = None,  # tuned for the device
    ):
        if device.type != "cuda" and not is_interpreted():
            raise KernelError(
                f"attention='triton' needs a GPU, the device is {device}; use attention='auto', or set "
                "TRITON_INTERPRET=1 to run the kernels in Triton's interpreter"
            )
        self.shape = AttentionShape(num_heads, num_kv_heads, head_dim, dtype)
        self.cache_dtype, self.device, self._configs = dtype, device, configs
        self._found: dict[AttentionShape, TreeAttentionConfig] = {}

    def config(self, shape: AttentionShape) -> TreeAttentionConfig:
        """Return the configuration for layers of a shape."""
        if shape not in self._found:
            default = TreeAttentionConfig.default(shape.dtype, shape.head_dim, target_of(self.device))
            if self._configs is not None:
                key: Key = {"dtype": shape.dtype, "head_dim": shape.head_dim, "group": shape.group}
                default = self._configs.get("tree_attention", key, default)
            self._found[shape] = default
        return self._found[shape]

    def plan(self, requests: list[RequestRows], num_rows: int, window: int | None = None) -> dict[str, Any]:
        return self.plan_of(requests, num_rows, self.shape._replace(window=window))

    def plan_of(self, requests: list[RequestRows], num_rows: int, shape: AttentionShape) -> dict[str, Any]:
        """Return the kernel arguments of layers of a shape, other than q and the KV cache."""
        lengths = [rows.context_len for rows in requests]
        depths = np.concatenate([rows.path_lengths - 1 for rows in requests])
        counts = [rows.num_rows for rows in requests]
        chains = [rows.is_chain for rows in requests]
        placed: dict[str, Any] = {"device": self.device, "config": self.config(shape), "num_rows": num_rows}
        plan = plan_tree_attention(lengths, counts, depths.tolist(), shape, chains=chains, **placed)
        table = np.zeros((len(requests), max(len(rows.pages) for rows in requests)), dtype=np.int32)
        for i, rows in enumerate(requests):
            table[i, : len(rows.pages)] = rows.pages
        ancestors = np.zeros((num_rows, int(depths.max()) + 1), dtype=np.int32)
        first = 0
        for rows in requests:
            ancestors[first : first + rows.num_rows, : rows.ancestors.shape[1]] = rows.ancestors
            first += rows.num_rows
        return {
            "row_request": self._tensor(np.pad(np.repeat(np.arange(len(requests)), counts), (0, num_rows - first))),
            "context_lens": self._tensor(np.array(lengths)),
            "page_table": self._tensor(table),
            "depths": self._tensor(np.pad(depths, (0, num_rows - first))),
            "ancestors": self._tensor(ancestors),
            "window": shape.window,
            "plan": plan,
        }

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).to(self.device)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: dict[str, Any],
        scale: float,
        cap: float | None = None,
        sinks: Tensor | None = None,
        pdl: bool = False,
    ) -> Tensor:
        return tree_attention_triton(q, k_cache, v_cache, scale=scale, score_cap=cap, sinks=sinks, pdl=pdl, **plan)


def make_attention(
    kind: str,
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    configs: KernelConfigs | None = None,
) -> Attention:
    """Create a backend by name for a model of this shape. `configs` are tuned for the device."""
    if kind == "triton":
        return TritonAttention(shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype, device, configs)
    if device.type != "cpu":
        raise KernelError(f"attention={kind!r} runs on a CPU, the device is {device}; use attention='triton'")
    return CpuAttention(shape.num_heads, "packed" if kind == "cpu-packed" else "gathered")
