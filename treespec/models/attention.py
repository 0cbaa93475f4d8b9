"""Tree attention backends of the decoder, selected by name."""

from typing import Any

import torch
from torch import Tensor

from treespec.errors import KernelError
from treespec.models.decoder import Attention
from treespec_kernels.attention.tree_attention_cpu import (
    AttentionMode,
    CpuAttentionPlan,
    plan_tree_attention_cpu,
    tree_attention_cpu,
)
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.tuning.tuned import KernelConfigs
from treespec_weights.rules import ModelShape


class CpuAttention:
    """Exact tree attention on a CPU. The cache is fp32, the dtype of the matrix products."""

    cache_dtype = torch.float32

    def __init__(self, num_heads: int, mode: AttentionMode = "packed"):
        self.num_heads, self.mode = num_heads, mode
        self.name = f"cpu-{mode}"

    def plan(self, requests: list[RequestRows], num_rows: int, window: int | None = None) -> CpuAttentionPlan:
        return plan_tree_attention_cpu(requests, self.num_heads, self.mode, window)

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Any, scale: float, cap: float | None = None
    ) -> Tensor:
        return tree_attention_cpu(q, k_cache, v_cache, plan, scale, cap)


def make_attention(
    kind: str,
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    configs: KernelConfigs | None = None,
) -> Attention:
    """Create a backend by name for a model of this shape. `configs` are tuned for the device."""
    if kind == "triton":
        from treespec.models.attention_triton import TritonAttention

        return TritonAttention(shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype, device, configs)
    if device.type != "cpu":
        raise KernelError(f"attention={kind!r} runs on a CPU, the device is {device}; use attention='triton'")
    return CpuAttention(shape.num_heads, "packed" if kind == "cpu-packed" else "gathered")
