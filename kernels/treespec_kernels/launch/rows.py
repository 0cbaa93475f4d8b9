"""Helpers of ops over the rows of a pass: parameters per group, and checks of shapes, strides and alignment.

Models of equal shape run stacked: a parameter then has a leading dimension of groups, and the rows of a pass are
divided evenly among the groups, in order.
"""

from __future__ import annotations

import torch

FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def by_row(parameter: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Expand a parameter [width] or [groups, width] to fp32 [num_rows, width]."""
    stacked = parameter.float().reshape(-1, parameter.shape[-1])
    return stacked.repeat_interleave(num_rows // len(stacked), dim=0)


def rows_per_group(parameter: torch.Tensor, num_rows: int) -> int:
    """Return the number of consecutive rows that use the same row of `parameter`, [width] or [groups, width]."""
    return num_rows if parameter.dim() == 1 else num_rows // parameter.shape[0]


def sum_of_splits(x: torch.Tensor) -> torch.Tensor:
    """Return rows as fp32 [rows, width]; add partial sums [splits, rows, width] in order."""
    if x.dim() == 2:
        return x.float()
    total = x[0].clone()
    for partial in x[1:]:
        total += partial
    return total


def check_groups(num_rows: int, *groups: int | None) -> None:
    """Raise ValueError if the rows cannot be divided evenly among the groups of a parameter."""
    for count in groups:
        if count is not None and num_rows % count:
            raise ValueError(f"a parameter has {count} groups, which do not divide {num_rows} rows")


def check_contiguous(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError if a tensor is not contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{name} has strides {list(tensor.stride())} for shape {list(tensor.shape)}; make it contiguous"
            )


def split_rows(name: str, x: torch.Tensor) -> int:
    """Return the stride between the splits of partials [splits, rows, width], in rows; 0 for rows without splits.

    The rows of a split must be contiguous; a split may be part of a larger buffer.

    Raises:
        ValueError: rows that are not contiguous, or splits that are not a whole number of rows apart.
    """
    if x.dim() == 2 or x.shape[0] == 1:
        check_contiguous(**{name: x if x.dim() == 2 else x[0]})
        return 0
    if not x[0].is_contiguous() or x.stride(0) % x.shape[2]:
        raise ValueError(
            f"{name} has strides {list(x.stride())} for shape {list(x.shape)}; "
            "expected contiguous rows, and splits a number of rows apart"
        )
    return x.stride(0) // x.shape[2]


def alignment(element_size: int, *sizes: int) -> int:
    """Return the alignment in bytes: 16 if all sizes (in elements) are multiples of 16 bytes, else one element."""
    return 16 if all(size * element_size % 16 == 0 for size in sizes) else element_size


def group_stride(tensor: torch.Tensor, dims_with_groups: int) -> int:
    """Return the stride between groups; 0 for a single group."""
    return tensor.stride(0) if tensor.dim() == dims_with_groups and tensor.shape[0] > 1 else 0


def row_strides(tensor: torch.Tensor | None) -> tuple[int, int]:
    """Return the strides of groups and rows; 0 for a dimension of size 1, whose stride in torch is arbitrary."""
    if tensor is None:
        return 0, 0
    return group_stride(tensor, 3), tensor.stride(-2) if tensor.shape[-2] > 1 else 0


def check_alignment(multiple: int, **tensors: torch.Tensor) -> None:
    """Raise ValueError if rows or groups do not start at multiples of `multiple` bytes."""
    for name, tensor in tensors.items():
        size = tensor.element_size()
        starts = (tensor.data_ptr(), *(stride * size for stride in row_strides(tensor)))
        if multiple > size and any(start % multiple for start in starts):
            raise ValueError(
                f"{name} has rows that do not start at multiples of {multiple} bytes (address {starts[0]:#x}, strides "
                f"{list(tensor.stride())} of {size} bytes); make it contiguous"
            )
