"""Helpers of ops over the rows of a pass: parameters per group, strides and alignment.

Models of equal shape run stacked: a parameter then has a leading dimension of groups, and the rows of a pass are
divided evenly among the groups, in order.
"""

import torch

FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def by_row(parameter: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Expand a parameter [width] or [groups, width] to fp32 [num_rows, width]."""
    stacked = parameter.float().reshape(-1, parameter.shape[-1])
    return stacked.repeat_interleave(num_rows // len(stacked), dim=0)


def rows_per_group(parameter: torch.Tensor | None, num_rows: int) -> int:
    """Return the number of consecutive rows that use the same row of `parameter`, [width] or [groups, width]."""
    groups = 1 if parameter is None or parameter.dim() == 1 else parameter.shape[0]
    assert num_rows % groups == 0, f"{groups} groups do not divide {num_rows} rows"
    return num_rows // groups


def sum_of_splits(x: torch.Tensor) -> torch.Tensor:
    """Return rows as fp32 [rows, width]; add partial sums [splits, rows, width] in order."""
    if x.dim() == 2:
        return x.float()
    total = x[0].clone()
    for partial in x[1:]:
        total += partial
    return total


def split_rows(x: torch.Tensor) -> int:
    """Return the stride between the splits of partials [splits, rows, width], in rows; 0 for rows without splits.

    The rows of a split must be contiguous; a split may be part of a larger buffer.
    """
    assert (x if x.dim() == 2 else x[0]).is_contiguous(), f"rows with strides {x.stride()}"
    if x.dim() == 2 or x.shape[0] == 1:
        return 0
    assert x.stride(0) % x.shape[2] == 0, f"splits with strides {x.stride()}"
    return x.stride(0) // x.shape[2]


def alignment(element_size: int, *sizes: int) -> int:
    """Return the alignment in bytes: 16 if all sizes (in elements) are multiples of 16 bytes, otherwise one element."""
    return 16 if all(size * element_size % 16 == 0 for size in sizes) else element_size


def group_stride(tensor: torch.Tensor, dims_with_groups: int) -> int:
    """Return the stride between groups; 0 for a single group."""
    return tensor.stride(0) if tensor.dim() == dims_with_groups and tensor.shape[0] > 1 else 0


def row_strides(tensor: torch.Tensor | None) -> tuple[int, int]:
    """Return the strides of groups and rows; 0 for a dimension of size 1, which has an arbitrary stride in torch."""
    if tensor is None:
        return 0, 0
    return group_stride(tensor, 3), tensor.stride(-2) if tensor.shape[-2] > 1 else 0


def is_aligned(multiple: int, *tensors: torch.Tensor) -> bool:
    """Return whether all rows and groups start at multiples of `multiple` bytes."""
    starts = ((t.data_ptr(), *(stride * t.element_size() for stride in row_strides(t))) for t in tensors)
    return all(start % multiple == 0 for tensor_starts in starts for start in tensor_starts)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor contiguous and 16-byte aligned, as the kernels require. Mapped files may have any offset."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
