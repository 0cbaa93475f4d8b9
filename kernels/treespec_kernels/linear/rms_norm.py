"""RMSNorm or LayerNorm of rows, optionally fused with the preceding residual add.

y = x * rsqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, arXiv 1910.07467), in fp32 with one rounding at the end.
With a `residual`, x is first added to it in place: the sum is rounded to the dtype, and the rounded sum is normalised.
x may then be the partial sums of a split linear layer: the splits are added in order, then the layer's bias, then the
residual, as in the layer's own epilogue. The sum may be scaled before it is rounded (Gemma 4).

There are three kinds: "rms"; "rms_plus_one", whose weights are 1 + w in fp32 (Gemma; bf16 would lose the bits of w);
"layer", which subtracts the mean (Ba et al., arXiv 1607.06450). A *post* norm is applied to x before it is added to the
residual (Gemma 2).
"""

from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.rows import FLOAT_TYPES, by_row, rows_per_group, split_rows, sum_of_splits
from treespec_kernels.launch.triton_launch import block_of, launch_options, load_kernels

NormKind = Literal["rms", "rms_plus_one", "layer"]


class Norm(NamedTuple):
    """Parameters of a norm, [hidden] or [groups, hidden]; with groups, one row for rows / groups consecutive rows."""

    # In the dtype or float32, which "rms_plus_one" needs; None: the result is the residual stream
    weight: Tensor | None
    eps: float  # added to the mean of squares
    kind: NormKind = "rms"
    shift: Tensor | None = None  # like weight, added to the result (LayerNorm's bias); None for no shift
    # Like weight, for the post norm of x before the residual add; None for no post norm
    post_weight: Tensor | None = None
    scale: Tensor | None = None  # float32 [1] or [groups, 1], a factor on the sum with the residual

    def scaled(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalise fp32 rows and multiply them by a weight."""
        if self.kind == "layer":
            x = x - x.mean(dim=1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + self.eps) * by_row(weight, len(x))


def rms_norm_ref(x: Tensor, norm: Norm, *, residual: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Normalise rows, after adding x to the residual, if any (reference: eager torch in fp32, any device).

    Args:
        x: [rows, hidden] in the dtype (float32, bfloat16 or float16), or, with a residual, partial sums fp32
            [splits, rows, hidden].
        norm: the norm.
        residual: [rows, hidden] in the dtype; x (and bias) are added to it in place.
        bias: [hidden] or [groups, hidden] in the dtype, added to x; only with a residual.

    Returns:
        [rows, hidden] in the dtype.
    """
    num_rows = x.shape[-2]
    total = sum_of_splits(x)
    if bias is not None:
        total = total + by_row(bias, num_rows)
    if norm.post_weight is not None:
        total = norm.scaled(total, norm.post_weight)
    if residual is not None:
        total = residual.float() + total
        residual.copy_(total if norm.scale is None else total * by_row(norm.scale, num_rows))
        total = residual.float()
    normed = total if norm.weight is None else norm.scaled(total, norm.weight)
    if norm.shift is not None:
        normed = normed + by_row(norm.shift, num_rows)
    return normed.to((x if residual is None else residual).dtype)


def rms_norm_triton(
    x: Tensor,
    norm: Norm,
    *,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Compute `rms_norm_ref` on a GPU, in one launch.

    All tensors must be contiguous, except that splits may have any stride. Tensors of even width must be aligned to 16
    bytes: Triton specialises on alignment and vectorises aligned rows, which changes the order of their sums and so
    their bits. `out`, [rows, hidden] in the dtype, may be x itself; if it is given, nothing is allocated. The bits of a
    row depend neither on the number of rows nor on its index. `pdl`: see `launch_options`.
    """
    num_rows, hidden = x.shape[-2:]
    weight, eps, kind, shift, post_weight, scale = norm
    dtype: Any = (x if residual is None else residual).dtype
    if out is None:
        out = torch.empty(num_rows, hidden, dtype=dtype, device=x.device)
    dtype = dtype if dtype in FLOAT_TYPES else FLOAT_TYPES
    held = torch.float32 if kind == "rms_plus_one" else (torch.float32, dtype) if dtype in FLOAT_TYPES else FLOAT_TYPES
    check_arguments(
        weight=(weight, "[(groups+) hidden+]", held),
        x=(x, "(splits+) rows hidden", torch.float32 if x.dim() == 3 else dtype),
        residual=(residual, "[rows hidden]", dtype),
        bias=(bias, "[(bias_groups+) hidden]", dtype),
        shift=(shift, "[(groups) hidden]", FLOAT_TYPES if weight is None else weight.dtype),
        post_weight=(post_weight, "[(groups) hidden]", FLOAT_TYPES if weight is None else weight.dtype),
        scale=(scale, "[(groups) 1]", torch.float32),
        out=(out, "[rows hidden]", dtype),
    )
    assert kind in get_args(NormKind), kind
    with_residual = bias, post_weight, scale
    assert residual is not None or (x.dim() == 2 and all(tensor is None for tensor in with_residual)), "no residual"
    tensors = (x, weight, residual, bias, shift, post_weight, out)
    assert hidden % 2 or all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors), "misaligned rows"
    kernels = load_kernels("linear.rms_norm", out)
    block = block_of(hidden, 32)
    kernels.norm_rows[(num_rows,)](
        *tensors[:-1],
        scale,
        out,
        float(eps),
        split_rows(x),
        rows_per_group(post_weight if weight is None else weight, num_rows),
        rows_per_group(bias, num_rows),
        HIDDEN=hidden,
        NUM_SPLITS=x.shape[0] if x.dim() == 3 else 1,
        CENTRED=kind == "layer",
        BLOCK_H=block,
        num_warps=min(max(block // 128, 1), 16),
        enable_fp_fusion=False,
        **launch_options(pdl),
    )
    return out


def norm_heads(heads: Tensor, weight: Tensor, eps: float) -> None:
    """Apply RMSNorm to each head, fp32 [num_rows, num_heads, head_dim], in place; weight: [num_heads, head_dim]."""
    head_dim = heads.shape[-1]
    mirrored = F.layer_norm(torch.cat((heads, -heads), -1), (2 * head_dim,), None, None, eps)
    torch.mul(mirrored[..., :head_dim], weight, out=heads)
