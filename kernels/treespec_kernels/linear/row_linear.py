"""Row-invariant linear layer: y = x W^T, where a row's bits depend neither on the number of rows nor on its index.

With silu_gate, the weight has the rows of a gate projection, then those of an up projection, and y = act(gate) * up
with SiLU or another activation. Without silu_gate, an optional activation is applied to y. Sums, bias, activation and
residual are in fp32, with one rounding to the dtype at the end. Each sum runs over blocks of K in order; `split_k` cuts
K into parts that are summed separately and then added in order. A group is one of several layers of equal shape with
stacked weights.
"""

from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.rows import FLOAT_TYPES, aligned, alignment, group_stride, is_aligned, row_strides
from treespec_kernels.launch.triton_launch import launch_options, load_kernels, target_of
from treespec_kernels.linear.activations import ACTIVATIONS, clamped_swiglu
from treespec_kernels.linear.quantized import QuantizedWeight, dequantized
from treespec_kernels.linear.row_linear_config import RowLinearConfig as RowLinearConfig
from treespec_kernels.linear.row_linear_config import interpretable, quantized_default

REDUCE_BLOCK = 256  # features per program of `add_splits`: 16 programs for one row of 4,096
REDUCE_WARPS = 2  # 16 bytes of each split per thread


class ChosenRows(NamedTuple):
    """Rows of x by the group of weights that they chose; `group_rows` makes it without waiting for the device.

    Each row of x may choose several groups; a row and a group are a pair, and results have one row per pair.
    """

    chosen: Tensor  # [num_pairs] int32, the group of each pair; the number of groups or more for none
    tiles: Tensor  # [num_tiles] int32, the group of each tile of pairs; -1 for tiles without any
    members: Tensor  # [num_tiles, block_m] int32, the pairs of each tile; -1 for padding
    per_row: int  # number of consecutive pairs with the same row of x


def row_linear_ref(
    x: Tensor,  # [rows, in_features], or [groups, rows, in_features]; float32, bfloat16 or float16
    # [out_features, in_features], or [groups, out_features, in_features], in x's dtype; or a quantised weight of this
    # shape, with scales and zero points that have the same leading dimension
    weight: Tensor | QuantizedWeight,
    *,
    bias: Tensor | None = None,  # [out_features], or [groups, out_features], in x's dtype
    residual: Tensor | None = None,  # in the result's shape and dtype, added after the activation
    # Whether the first half of the weight (and bias) is a gate projection, and the second an up projection
    silu_gate: bool = False,
    # One of `ACTIVATIONS`, for the gate, or for y without a gate. None: SiLU with a gate, otherwise no activation
    activation: str | None = None,
) -> Tensor:
    """Apply the layer in fp32 with one rounding at the end (reference: eager torch, any device).

    Returns:
        [rows, features], or [groups, rows, features], in x's dtype; features is out_features, or half of it with
        silu_gate.
    """
    y = x.float() @ (dequantized(weight) if isinstance(weight, QuantizedWeight) else weight.float()).mT
    y = _activate(y, bias, silu_gate, activation)
    if residual is not None:
        y = y + residual.float()
    return y.to(x.dtype)


def _activate(y: Tensor, bias: Tensor | None, silu_gate: bool, activation: str | None) -> Tensor:
    """Add the bias to fp32 rows, and apply the activation."""
    if bias is not None:
        y = y + bias.float().unsqueeze(-2)
    if silu_gate:
        gate, up = y.chunk(2, dim=-1)
        if activation == "clamped_swiglu":
            return clamped_swiglu(gate, up)
        return ACTIVATIONS[activation or "silu"](gate) * up
    return y if activation is None else ACTIVATIONS[activation](y)


def row_linear_triton(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu_gate: bool = False,
    activation: str | None = None,
    config: RowLinearConfig | None = None,  # None for the weight's default
    out: Tensor | None = None,  # memory for the result; may be `residual`, but not x, which other programs still read
    # float32, contiguous, at least `config.workspace_size(rows of all groups, out_features)` elements; used only with
    # split_k > 1 or a quantised weight. If it and `out` are given, nothing is allocated
    workspace: Tensor | None = None,
    pdl: bool = False,  # see `launch_options`
) -> Tensor:
    """Compute `row_linear_ref` on a GPU, in one launch, or two with split_k > 1 or a quantised weight.

    The bits of a row depend only on the row, the weight and `config`.

    The strides of rows and groups are arbitrary. If the size of a weight row is a multiple of 16 bytes, the rows of x
    must be aligned to 16 bytes; if the size of an output row is, the rows of out and residual must be.
    """
    if out is None:
        out = x.new_empty(*x.shape[:-1], weight.shape[-2] // (1 + silu_gate))
    _check(x, weight, bias, residual, silu_gate, out)
    assert x.is_meta or not x.numel() or out.data_ptr() != x.data_ptr(), "out must not share memory with x"
    config = config or default_config(weight, x.dtype, target_of(x.device), silu_gate)
    epilogue = _Epilogue.of(out, bias, residual, silu_gate, activation)
    if config.split_k == 1 and not isinstance(weight, QuantizedWeight):
        _multiply(x, weight, config, epilogue, False, pdl)
    else:
        partials = row_linear_partials_triton(x, weight, config=config, workspace=workspace, pdl=pdl)
        _add_splits(partials, epilogue, pdl)
    return out


def default_config(
    weight: Tensor | QuantizedWeight,
    dtype: torch.dtype,  # dtype of the rows
    target: str | None,  # as in `RowLinearConfig.default`
    silu_gate: bool = False,
    at_once: int = 1,  # number of such weights whose programs run at the same time
) -> RowLinearConfig:
    """Return the default configuration of a weight."""
    out_features, in_features = weight.shape[-2] * at_once, weight.shape[-1]
    if isinstance(weight, QuantizedWeight):
        return quantized_default(dtype, out_features, in_features, weight.group, target)
    return RowLinearConfig.default(dtype, out_features, in_features, silu_gate, target)


def chosen_linear_ref(
    x: Tensor,  # [rows, in_features]; float32, bfloat16 or float16
    weight: Tensor | QuantizedWeight,  # [groups, out_features, in_features], as in `row_linear_ref`
    chosen: Tensor,  # [pairs] integers, as in `ChosenRows`; pairs / rows consecutive ones are of one row
    *,
    bias: Tensor | None = None,  # [groups, out_features]
    residual: Tensor | None = None,  # as the result
    silu_gate: bool = False,
    activation: str | None = None,
) -> Tensor:
    """Apply to each row the layers of the groups that it chose (reference: eager torch); as in `row_linear_ref`.

    Returns:
        [pairs, features]; the residual, or 0, where no group was chosen.
    """
    num_groups, features = weight.shape[0], weight.shape[-2] // (1 + silu_gate)
    out = x.new_zeros(len(chosen), features) if residual is None else residual.clone()
    x = x.repeat_interleave(len(chosen) // max(len(x), 1), 0)
    dense = dequantized(weight) if isinstance(weight, QuantizedWeight) else weight
    for group in range(num_groups):
        rows = (chosen == group).nonzero()[:, 0]
        group_bias = None if bias is None else bias[group]
        y = _activate(x[rows].float() @ dense[group].float().mT, group_bias, silu_gate, activation)
        out[rows] = (y if residual is None else y + residual[rows].float()).to(out.dtype)
    return out


def chosen_linear_triton(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    rows: ChosenRows,
    *,
    config: RowLinearConfig,  # with the block_m of `rows`
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu_gate: bool = False,
    activation: str | None = None,
    out: Tensor | None = None,  # memory for the result, in x's dtype or float32; may be `residual`
    pdl: bool = False,
) -> Tensor:
    """Compute `chosen_linear_ref` on a GPU: the weight of a group is read once per tile of its rows.

    The bits of a result depend only on the row, the group's weight and `config`. Results of pairs without a group are
    not written.
    """
    num_pairs, features = len(rows.chosen), weight.shape[-2] // (1 + silu_gate)
    if out is None:
        out = x.new_empty(num_pairs, features)
    assert rows.members.shape[1] == config.block_m and num_pairs == len(x) * rows.per_row
    epilogue = _Epilogue.of(out, bias, residual, silu_gate, activation)
    if config.split_k == 1 and not isinstance(weight, QuantizedWeight):
        _multiply(x, weight, config, epilogue, False, pdl, rows)
        return out
    partials = torch.empty(config.split_k, num_pairs, weight.shape[-2], dtype=torch.float32, device=x.device)
    _multiply(x, weight, config, _Epilogue.of(partials, None, None, False, None), True, pdl, rows)
    _add_splits(partials, epilogue, pdl, rows.chosen)
    return out


class RowLinear:
    """A linear layer by `row_linear_triton` in the weight's default configuration, with its tile for few rows only."""

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None):
        self.weight: Tensor | QuantizedWeight
        if isinstance(weight, QuantizedWeight):
            zero = None if weight.zero is None else aligned(weight.zero)
            self.weight = QuantizedWeight(aligned(weight.values), aligned(weight.scale), zero)
        else:
            self.weight = aligned(weight)
        self.bias = bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._config: RowLinearConfig | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer to x [num_rows, in_features]; returns [num_rows, out_features]."""
        if self._config is None:
            config = default_config(self.weight, x.dtype, target_of(x.device))
            self._config = replace(interpretable(config), larger=())
        return row_linear_triton(x, self.weight, bias=self.bias, config=self._config)


def activated_ref(
    product: Tensor, *, bias: Tensor | None = None, silu_gate: bool = False, activation: str | None = None
) -> Tensor:
    """Add the bias to a product x W^T and apply the activation, in fp32 with one rounding (reference: eager torch).

    This is `row_linear_ref` without the product, for cuBLAS products.

    Args:
        product: [rows, out_features], or [groups, rows, out_features]; float32, bfloat16 or float16; contiguous.

    Returns:
        [rows, features], or [groups, rows, features], in the dtype of product, with features as in `row_linear_ref`.
    """
    return _activate(product.float(), bias, silu_gate, activation).to(product.dtype)


def activated_triton(
    product: Tensor, *, bias: Tensor | None = None, silu_gate: bool = False, activation: str | None = None
) -> Tensor:
    """Compute `activated_ref` on a GPU in one launch."""
    groups = "groups " * (product.dim() == 3)
    check_arguments(
        product=(product, f"[{groups}rows out_features]", FLOAT_TYPES),
        bias=(bias, f"{groups}out_features", product.dtype),
    )
    out_features = product.shape[-1]
    out = product.new_empty(*product.shape[:-1], out_features // (1 + silu_gate))
    epilogue = _Epilogue.of(out, bias, None, silu_gate, activation)
    _add_splits(product.view(1, -1, out_features), epilogue, False)
    return out


def row_linear_partials_triton(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    *,
    config: RowLinearConfig,
    workspace: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Compute the partial sums of every split of K in one launch, for a consumer that adds them in order.

    Arguments as in `row_linear_triton`; `workspace` is used with every split_k.

    Returns:
        [split_k, rows of all groups, out_features] float32, in `workspace` if given.
    """
    _check(x, weight)
    out_features, num_rows = weight.shape[-2], x.shape[:-1].numel()
    size = config.workspace_size(num_rows, out_features)
    if workspace is None:
        workspace = torch.empty(size, dtype=torch.float32, device=x.device)
    assert workspace.dtype == torch.float32 and workspace.numel() >= size and workspace.data_ptr() % 16 == 0
    partials = workspace[:size].view(config.split_k, num_rows, out_features)
    _multiply(x, weight, config, _Epilogue.of(partials, None, None, False, None), True, pdl)
    return partials


def add_splits_triton(
    partials: Tensor,  # fp32 [split_k, num_rows, out_features], or a product [num_rows, out_features] in out's dtype
    out: Tensor,  # [num_rows, features]; may be `residual`
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu_gate: bool = False,
    activation: str | None = None,
    pdl: bool = False,
) -> Tensor:
    """Add partial sums, and apply bias, activation and residual as in `row_linear_triton`; returns `out`."""
    partials = partials if partials.dim() == 3 else partials[None]
    _add_splits(partials, _Epilogue.of(out, bias, residual, silu_gate, activation), pdl)
    return out


class _Epilogue(NamedTuple):
    """Arguments of both kernels: bias, residual and out, their strides, and constants."""

    tensors: tuple[Tensor | None, Tensor | None, Tensor]
    strides: tuple[int, ...]
    constants: dict[str, Any]

    @classmethod
    def of(
        cls, out: Tensor, bias: Tensor | None, residual: Tensor | None, silu_gate: bool, activation: str | None
    ) -> Self:
        bytes_out = alignment(out.element_size(), out.shape[-1])
        assert is_aligned(bytes_out, out) and (residual is None or is_aligned(bytes_out, residual)), "misaligned rows"
        assert activation is None or activation in (*ACTIVATIONS, *("clamped_swiglu",) * silu_gate), activation
        constants = {
            "BYTES_OUT": bytes_out,
            "SILU_GATE": silu_gate,
            "ACTIVATION": activation or ("silu" if silu_gate else "none"),
        }
        stride_bias = 0 if bias is None else group_stride(bias, 2)
        return cls((bias, residual, out), (stride_bias, *row_strides(residual), *row_strides(out)), constants)


def _multiply(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    config: RowLinearConfig,
    to: _Epilogue,
    partials: bool,
    pdl: bool,
    rows: ChosenRows | None = None,
) -> None:
    """Multiply, then apply the epilogue or write the partial sums (always with a quantised weight)."""
    num_rows, num_groups = x.shape[-2], weight.shape[0] if len(weight.shape) == 3 else 1
    out_features, in_features = weight.shape[-2:]
    tiles = -(-out_features // config.block_n)
    if rows is None:
        config = config.for_rows(num_rows, tiles * num_groups * config.split_k)
        grid = (-(-num_rows // config.block_m), tiles, num_groups * config.split_k)
    else:
        num_rows, grid = len(rows.chosen), (len(rows.tiles), tiles, config.split_k)
    places = (None, None) if rows is None else (rows.tiles, rows.members)
    constants = {"OUT_FEATURES": out_features, "IN_FEATURES": in_features, **config.constants, **config.options}
    constants |= {"PER_ROW": 1 if rows is None else rows.per_row, **launch_options(pdl)}
    if isinstance(weight, QuantizedWeight):
        assert weight.group == in_features or weight.group % config.block_k == 0, "blocks of K must divide groups"
        bytes_in = alignment(x.element_size(), in_features)
        assert is_aligned(bytes_in, x) and all(
            tensor is None or (tensor.is_contiguous() and tensor.data_ptr() % 16 == 0) for tensor in weight
        )
        load_kernels("linear.quantized_row_linear", x).multiply_quantized[grid](
            x,
            *weight,
            to.tensors[2],
            *places,
            num_rows,
            *row_strides(x),
            BITS=weight.bits,
            GROUP=weight.group,
            BYTES_X=bytes_in,
            BYTES_VALUES=alignment(1, weight.values.shape[-1]),
            BYTES_OUT=to.constants["BYTES_OUT"],
            **constants,
        )
        return
    stride_group, stride_weight = row_strides(weight)
    bytes_in = alignment(x.element_size(), in_features, stride_weight, stride_group)
    assert is_aligned(bytes_in, x, weight), "misaligned rows"
    load_kernels("linear.row_linear", x).multiply_rows[grid](
        x,
        weight,
        *to.tensors,
        *places,
        num_rows,
        *row_strides(x),
        stride_group,
        *to.strides,
        **to.constants,
        PARTIALS=partials,
        STRIDE_WEIGHT=stride_weight,
        BYTES_IN=bytes_in,
        **constants,
    )


def _add_splits(partials: Tensor, to: _Epilogue, pdl: bool, chosen: Tensor | None = None) -> None:
    """Add partial sums [splits, rows of all groups, out_features], and apply the epilogue."""
    out, (num_splits, num_rows, out_features) = to.tensors[2], partials.shape
    kernels = load_kernels("linear.row_linear", out)
    bias = to.tensors[0]
    kernels.add_splits[(num_rows, -(-out.shape[-1] // REDUCE_BLOCK))](
        partials,
        *to.tensors,
        chosen,
        out.shape[-2],
        1 if bias is None or bias.dim() == 1 else len(bias),
        *to.strides,
        **to.constants,
        OUT_FEATURES=out_features,
        BYTES_PARTIAL=alignment(partials.element_size(), out.shape[-1]),
        SPLIT_K=num_splits,
        BLOCK_F=REDUCE_BLOCK,
        num_warps=REDUCE_WARPS,
        enable_fp_fusion=False,
        **launch_options(pdl),
    )


def _check(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu_gate: bool = False,
    out: Tensor | None = None,
) -> None:
    groups, values = "groups " * (len(weight.shape) == 3), None
    sizes = {"features": weight.shape[-2:][0] // (1 + silu_gate)}
    if isinstance(weight, QuantizedWeight):
        sizes |= dict(zip((*groups.split(), "out_features", "in_features"), weight.shape, strict=True))
        values, dense = weight.values, None
    else:
        dense = weight
    check_arguments(
        sizes,
        x=(x, f"{groups}rows in_features+", FLOAT_TYPES),
        weight=(dense, f"{groups}out_features+ in_features", x.dtype),
        values=(values, f"{groups}out_features _", (torch.int8, torch.uint8)),
        bias=(bias, f"{groups}out_features", x.dtype),
        residual=(residual, f"{groups}rows features", x.dtype),
        out=(out, f"{groups}rows features", x.dtype),
    )
