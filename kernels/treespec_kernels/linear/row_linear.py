"""Row-invariant linear layer: y = x W^T, where a row's bits depend neither on the number of rows nor on its index.

With silu_gate, the weight has the rows of a gate projection, then those of an up projection, and y = act(gate) * up
with SiLU or another activation. Without silu_gate, an optional activation is applied to y. Sums, bias, activation and
residual are in fp32, with one rounding to the dtype at the end. Each sum runs over blocks of K in order; `split_k` cuts
K into parts that are summed separately and then added in order. A group is one of several layers of equal shape whose
weights are stacked.
"""

from __future__ import annotations

from typing import Any

import torch

from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.rows import FLOAT_TYPES, alignment, check_alignment, group_stride, row_strides
from treespec_kernels.launch.triton_launch import (
    check_last_strides,
    check_launch,
    launch_options,
    require_triton,
    target_of,
)
from treespec_kernels.linear.activations import ACTIVATIONS
from treespec_kernels.linear.quantized import QuantizedWeight, dequantized
from treespec_kernels.linear.quantized_row_linear import multiply_quantized_triton, quantized_default
from treespec_kernels.linear.row_linear_config import RowLinearConfig as RowLinearConfig

REDUCE_BLOCK = 256  # features per program of `add_splits`: 16 programs for one row of 4,096
REDUCE_WARPS = 2  # 16 bytes of each split per thread


def row_linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    silu_gate: bool = False,
    activation: str | None = None,
) -> torch.Tensor:
    """Apply the layer in fp32 with one rounding at the end (reference: eager torch, any device).

    Args:
        x: [rows, in_features], or [groups, rows, in_features]; float32, bfloat16 or float16.
        weight: [out_features, in_features], or [groups, out_features, in_features], in x's dtype; or a quantised
            weight of this shape, whose scales and zero points also have the leading dimension.
        bias: [out_features], or [groups, out_features], in x's dtype.
        residual: of the result's shape and dtype, added after the activation.
        silu_gate: whether the first half of the weight (and bias) is a gate's, and the second an up projection's.
        activation: one of `ACTIVATIONS`, for the gate, or for y without a gate. None: SiLU with a gate, else no
            activation.

    Returns:
        [rows, features], or [groups, rows, features], in x's dtype; features is out_features, or half of it with
        silu_gate.

    Raises:
        ValueError: a shape, dtype or device does not match.
    """
    check_row_linear(x, weight, bias=bias, residual=residual, silu_gate=silu_gate, activation=activation)
    y = x.float() @ (dequantized(weight) if isinstance(weight, QuantizedWeight) else weight.float()).mT
    y = _activate(y, bias, silu_gate, activation)
    if residual is not None:
        y = y + residual.float()
    return y.to(x.dtype)


def _activate(y: torch.Tensor, bias: torch.Tensor | None, silu_gate: bool, activation: str | None) -> torch.Tensor:
    """Add the bias to fp32 rows, and apply the activation."""
    if bias is not None:
        y = y + bias.float().unsqueeze(-2)
    if silu_gate:
        gate, up = y.chunk(2, dim=-1)
        return (gate / (1 + torch.exp(-gate)) if activation is None else ACTIVATIONS[activation](gate)) * up
    return y if activation is None else ACTIVATIONS[activation](y)


def row_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    silu_gate: bool = False,
    activation: str | None = None,
    config: RowLinearConfig | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Compute `row_linear_ref` on a GPU, in one launch, or two with split_k > 1 or a quantised weight.

    The bits of a row depend only on the row, the weight and `config`.

    Last dimensions must be contiguous; the strides of rows and groups are arbitrary. If the size of a weight row is a
    multiple of 16 bytes, the rows of x must be aligned to 16 bytes; if that of an output row is, those of out and
    residual must be.

    Args:
        x, weight, bias, residual, silu_gate, activation: as in `row_linear_ref`.
        config: None for the default of the weight.
        out: memory of the result; may be `residual`, but not x.
        workspace: float32, contiguous, at least `config.workspace_size(rows of all groups, out_features)` elements;
            only used with split_k > 1 or a quantised weight. With it and `out`, nothing is allocated.
        pdl: see `launch_options`.

    Raises:
        ValueError: a shape, dtype, stride, alignment or device does not match, or triton cannot run on the tensors.
    """
    check_row_linear(x, weight, bias=bias, residual=residual, silu_gate=silu_gate, activation=activation, out=out)
    out_features, in_features = weight.shape[-2:]
    if config is None and isinstance(weight, QuantizedWeight):
        target = target_of(x.device)
        config = quantized_default(x.dtype, out_features, in_features, weight.group, weight.bits, target)
    config = config or RowLinearConfig.default(x.dtype, out_features, in_features, silu_gate, target_of(x.device))
    if out is None:
        out = x.new_empty(*x.shape[:-1], out_features // (1 + silu_gate))
    elif out.numel() and 0 != out.data_ptr() == x.data_ptr():  # 0 on "meta"
        raise ValueError("out starts where x does, which other programs still read; pass separate memory")
    epilogue = _epilogue(bias, residual, silu_gate, activation, out)
    if config.split_k == 1 and not isinstance(weight, QuantizedWeight):
        # An absent argument is never read; pass any tensor of the same dtype.
        added = (x if bias is None else bias, x if residual is None else residual)
        _multiply(x, weight, config, *added, out, _strides(bias, residual, out), epilogue | {"PARTIALS": False}, pdl)
        return out
    partials = row_linear_partials_triton(x, weight, config=config, workspace=workspace, pdl=pdl)
    _add_splits(partials, bias, residual, out, epilogue, pdl)
    return out


def activated_ref(
    product: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    silu_gate: bool = False,
    activation: str | None = None,
) -> torch.Tensor:
    """Add the bias to a product x W^T and apply the activation, in fp32 with one rounding (reference: eager torch).

    This is `row_linear_ref` without the product, for products of cuBLAS.

    Args:
        product: [rows, out_features], or [groups, rows, out_features]; float32, bfloat16 or float16.
        bias, silu_gate, activation: as in `row_linear_ref`, with bias in the dtype of product.

    Returns:
        [rows, features], or [groups, rows, features], in the dtype of product, with features as in `row_linear_ref`.

    Raises:
        ValueError: a shape, dtype or device does not match.
    """
    _check_activated(product, bias, silu_gate, activation)
    return _activate(product.float(), bias, silu_gate, activation).to(product.dtype)


def activated_triton(
    product: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    silu_gate: bool = False,
    activation: str | None = None,
) -> torch.Tensor:
    """Compute `activated_ref` on a GPU in one launch. The product must be contiguous.

    Raises:
        ValueError: a shape, dtype, stride, alignment or device does not match, or triton cannot run on the tensors.
    """
    _check_activated(product, bias, silu_gate, activation)
    if not product.is_contiguous():
        raise ValueError(f"product has strides {list(product.stride())}; pass a contiguous tensor")
    require_triton("row_linear")
    from treespec_kernels.linear import row_linear_kernels as kernels

    check_launch("row_linear", kernels.add_splits, product)
    out_features = product.shape[-1]
    out = product.new_empty(*product.shape[:-1], out_features // 2 if silu_gate else out_features)
    epilogue = _epilogue(bias, None, silu_gate, activation, out)
    _add_splits(product.view(1, -1, out_features), bias, None, out, epilogue, False)
    return out


def row_linear_partials_triton(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    *,
    config: RowLinearConfig,
    workspace: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Compute the partial sums of every split of K in one launch, for a consumer that adds them in order.

    Arguments and errors as in `row_linear_triton`; `workspace` is used with every split_k.

    Returns:
        [split_k, rows of all groups, out_features] float32, in `workspace` if given.
    """
    check_row_linear(x, weight)
    out_features = weight.shape[-2]
    num_rows = x.numel() // x.shape[-1]
    size = config.workspace_size(num_rows, out_features)
    if workspace is None:
        workspace = torch.empty(size, dtype=torch.float32, device=x.device)
    _check_workspace(workspace, x, size)
    partials = workspace.view(-1)[:size].view(config.split_k, num_rows, out_features)
    if isinstance(weight, QuantizedWeight):
        check_last_strides(x=x)
        multiply_quantized_triton(x, weight, config, partials, pdl)
        return partials
    constants = {
        "PARTIALS": True,
        "BYTES_OUT": alignment(4, out_features),
        "SILU_GATE": False,
        "ACTIVATION": "none",
        "HAS_BIAS": False,
        "HAS_RESIDUAL": False,
    }
    _multiply(x, weight, config, x, x, partials, (0,) * 5, constants, pdl)
    return partials


def _add_splits(
    partials: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    epilogue: dict[str, Any],
    pdl: bool,
) -> None:
    """Add partial sums [splits, rows of all groups, out_features], and apply the epilogue."""
    if out.numel() == 0:
        return
    from treespec_kernels.linear import row_linear_kernels as kernels

    num_splits, num_rows, out_features = partials.shape
    kernels.add_splits[(num_rows, -(-out.shape[-1] // REDUCE_BLOCK))](
        partials,
        # An absent argument is never read; pass any tensor of the same dtype.
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        out.shape[-2],
        *_strides(bias, residual, out),
        **epilogue,
        OUT_FEATURES=out_features,
        BYTES_PARTIAL=alignment(partials.element_size(), out.shape[-1]),
        SPLIT_K=num_splits,
        BLOCK_F=REDUCE_BLOCK,
        num_warps=REDUCE_WARPS,
        enable_fp_fusion=False,
        **launch_options(pdl),
    )


def _strides(bias: torch.Tensor | None, residual: torch.Tensor | None, out: torch.Tensor) -> tuple[int, ...]:
    return (0 if bias is None else group_stride(bias, 2), *row_strides(residual), *row_strides(out))


def _epilogue(
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    silu_gate: bool,
    activation: str | None,
    out: torch.Tensor,
) -> dict[str, Any]:
    """Return the constants of an epilogue, after checking the strides and alignment of its tensors."""
    bytes_out = alignment(out.element_size(), out.shape[-1])
    tensors = {"out": out} if residual is None else {"out": out, "residual": residual}
    check_last_strides(**tensors, **({} if bias is None else {"bias": bias}))
    check_alignment(bytes_out, **tensors)
    return {
        "BYTES_OUT": bytes_out,
        "SILU_GATE": silu_gate,
        "ACTIVATION": activation or ("silu" if silu_gate else "none"),
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
    }


def _multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: RowLinearConfig,
    bias: torch.Tensor,
    residual: torch.Tensor,
    out: torch.Tensor,
    strides: tuple[int, ...],
    constants: dict[str, Any],
    pdl: bool,
) -> None:
    check_last_strides(x=x, weight=weight)
    num_groups = weight.shape[0] if weight.dim() == 3 else 1
    out_features, in_features = weight.shape[-2:]
    stride_group, stride_weight = row_strides(weight)
    bytes_in = alignment(x.element_size(), in_features, stride_weight, stride_group)
    check_alignment(bytes_in, x=x, weight=weight)
    require_triton("row_linear")
    from treespec_kernels.linear import row_linear_kernels as kernels

    check_launch("row_linear", kernels.multiply_rows, x)
    num_rows = x.shape[-2]
    if num_rows * num_groups == 0:
        return
    tiles = -(-out_features // config.block_n)
    config = config.for_rows(num_rows, tiles * num_groups * config.split_k)
    programs = (-(-num_rows // config.block_m), tiles, num_groups * config.split_k)
    kernels.multiply_rows[programs](
        x,
        weight,
        bias,
        residual,
        out,
        num_rows,
        *row_strides(x),
        stride_group,
        *strides,
        **constants,
        STRIDE_WEIGHT=stride_weight,
        OUT_FEATURES=out_features,
        IN_FEATURES=in_features,
        BYTES_IN=bytes_in,
        **config.constants,
        **config.options,
        **launch_options(pdl),
    )


def _check_activated(product: torch.Tensor, bias: torch.Tensor | None, silu_gate: bool, activation: str | None) -> None:
    groups = "groups " * (product.dim() == 3)
    check_arguments(
        product=(product, f"{groups}rows out_features", FLOAT_TYPES),
        bias=(bias, f"{groups}out_features", product.dtype),
    )
    _check_activation(product.shape[-1], silu_gate, activation)


def _check_workspace(workspace: torch.Tensor, x: torch.Tensor, size: int) -> None:
    if workspace.dtype != torch.float32 or workspace.device != x.device or not workspace.is_contiguous():
        raise ValueError(
            f"workspace is {workspace.dtype} on {workspace.device} with strides {list(workspace.stride())}; "
            f"expected contiguous torch.float32 on {x.device}"
        )
    if workspace.numel() < size:
        raise ValueError(f"workspace has {workspace.numel()} elements and {size} are needed; see workspace_size")
    check_alignment(16, workspace=workspace.view(1, -1))


def check_row_linear(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    silu_gate: bool = False,
    activation: str | None = None,
    out: torch.Tensor | None = None,
) -> None:
    """Raise ValueError if a shape, dtype or device does not match."""
    groups, known = "groups " * (len(weight.shape) == 3), {"features": weight.shape[-2:][0] // (1 + silu_gate)}
    held: torch.Tensor | None = None
    if isinstance(weight, QuantizedWeight):
        weight.check()
        held = weight.values
        known |= dict(zip((*groups.split(), "out_features", "in_features"), weight.shape, strict=True))
    check_arguments(
        known,
        x=(x, f"{groups}rows in_features+", FLOAT_TYPES),
        weight=(weight if held is None else None, f"{groups}out_features+ in_features", x.dtype),
        values=(held, "..", (torch.int8, torch.uint8)),
        bias=(bias, f"{groups}out_features", x.dtype),
        residual=(residual, f"{groups}rows features", x.dtype),
        out=(out, f"{groups}rows features", x.dtype),
    )
    _check_activation(weight.shape[-2], silu_gate, activation)


def _check_activation(out_features: int, silu_gate: bool, activation: str | None) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; use one of {', '.join(ACTIVATIONS)}, or None")
    if silu_gate and out_features % 2:
        raise ValueError(f"silu_gate needs as many gates as ups, and the weight has {out_features} rows")
