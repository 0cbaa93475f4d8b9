"""Row-invariant experts of mixture-of-experts layers, with the interface of transformers' experts functions.

The other implementations compute the rows that chose an expert in one product, whose bits can depend on their number.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GATHERED_BYTES = 64 << 20  # maximum size of the matrices that one batched product reads


def run_experts(module: Any, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums of each row's experts, [num_rows, hidden_size].

    transformers' `use_experts_implementation` decorates the module's class. `hidden` is [num_rows, hidden_size],
    `experts`, int64, and `weights` are [num_rows, k].
    """
    row_experts = experts.reshape(-1)
    rows = hidden.repeat_interleave(experts.shape[1], 0)
    if module.has_gate:
        rows = module._apply_gate(_project(module, "gate_up_proj", rows, row_experts))
    else:
        rows = module.act_fn(_project(module, "up_proj", rows, row_experts))
    rows = _project(module, "down_proj", rows, row_experts)
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)
    return (rows * weights.reshape(-1, 1)).view(*experts.shape, -1).sum(1).to(hidden.dtype)


def _project(module: Any, name: str, rows: Tensor, row_experts: Tensor) -> Tensor:
    """Multiply each row by the matrix of its expert; returns [num_rows, out_features]."""
    matrices = getattr(module, name)  # [num_experts, out_features, in_features] unless transposed
    if module.is_transposed:
        matrices = matrices.transpose(1, 2)
    if rows.dtype == torch.bfloat16 and rows.device.type == "cpu":
        out = _multiply_by_expert(matrices, rows, row_experts)
    else:
        out = _multiply_by_row(matrices, rows, row_experts)
    return out + getattr(module, f"{name}_bias")[row_experts] if module.has_bias else out


def _multiply_by_expert(matrices: Tensor, rows: Tensor, row_experts: Tensor) -> Tensor:
    """Compute the rows of an expert together: a CPU's bfloat16 products are row-invariant from two rows on."""
    out = rows.new_empty(len(rows), matrices.shape[1])
    for expert in row_experts.unique().tolist():
        indices = (row_experts == expert).nonzero()[:, 0]
        inputs = rows[indices if len(indices) > 1 else indices.expand(2)]
        out[indices] = F.linear(inputs, matrices[expert])[: len(indices)]
    return out


def _multiply_by_row(matrices: Tensor, rows: Tensor, row_experts: Tensor) -> Tensor:
    """Compute every row alone, in batched products of at least two rows."""
    rows_per_product = max(4, GATHERED_BYTES // (matrices[0].numel() * matrices.element_size()))
    num_chunks = -(-len(rows) // rows_per_product)
    pieces = zip(rows.tensor_split(num_chunks), row_experts.tensor_split(num_chunks), strict=True)
    return torch.cat([torch.bmm(matrices[expert_ids], chunk[:, :, None])[:, :, 0] for chunk, expert_ids in pieces])


def has_routed_experts(model: nn.Module) -> bool:
    """Return whether a model has experts that look up their function in transformers' experts interface."""
    return any(hasattr(module, "is_transposed") and hasattr(module, "has_gate") for module in model.modules())
