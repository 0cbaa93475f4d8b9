"""RoPE and KV cache write: rotates Q and K by their positions, and writes K and V to their cache slots.

RoPE is rotate-half (Su et al., arXiv 2104.09864, in the layout of Llama's checkpoints): dimension d is paired with
d + head_dim / 2, y = x * cos + roll(x, head_dim / 2) * sin, with the sines of the first half negated. The computation
is in fp32, without fused multiply-adds, and results are rounded to the dtype once, when they are stored.

An optional RMSNorm per head of Q and K comes first (Qwen 3, Gemma 3) or last (Hunyuan), or is over all heads of Q, and
over all of K (OLMo 2); it may include V (Gemma 4). Models with learned positions skip the rotation.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.rows import FLOAT_TYPES, by_row, rows_per_group, split_rows, sum_of_splits
from treespec_kernels.launch.triton_launch import block_of, launch_options, load_kernels

TILE = 512  # elements per program: 12 programs per row of an 8B model
NUM_WARPS = 2  # 4 elements of each half per thread; with 8 elements, ptxas spilled at 8 splits on sm_90


class HeadNorm(NamedTuple):
    """RMSNorm of each head of Q and K. Weights are [head_dim] or [groups, head_dim], in the dtype or in float32.

    If it is `wide`, the heads of Q are one, as are those of K: [num_heads * head_dim] and [num_kv_heads * head_dim].
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    wide: bool = False
    last: bool = False  # after the rotation
    of_values: bool = False  # whether V is normalised like K, without a weight; not `wide`

    def __call__(self, turned: Tensor, num_heads: int) -> Tensor:
        """Normalise fp32 rows of Q and K, [num_rows, num_heads + num_kv_heads, head_dim] (reference)."""
        num_rows, parts = len(turned), []
        for part, weight in zip(turned.tensor_split([num_heads], 1), self[:2], strict=True):
            rows = part.flatten(1).unflatten(1, (-1, weight.shape[-1]))
            scale = torch.rsqrt(rows.square().mean(dim=2, keepdim=True) + self.eps)
            parts.append((rows * scale * by_row(weight, num_rows)[:, None]).view(part.shape))
        return torch.cat(parts, 1)


def qkv_rope_ref(
    # [rows, (num_heads + 2 * num_kv_heads) * head_dim], the heads of Q, of K, then of V, in the dtype (float32,
    # bfloat16 or float16), or a split linear layer's partial sums fp32 [splits, rows, ..], added in order
    qkv: Tensor,
    # [max_positions, 2, head_dim] fp32: cosines, and sines whose first half is negated. None: no rotation
    rotation: Tensor | None,
    positions: Tensor,  # [rows] int32, below max_positions
    # [rows] int64, page * page_size + offset. Rows with the same slot overwrite each other in any order; all padding
    # rows point to a slot that is never read
    slots: Tensor,
    # [2, num_pages, num_kv_heads, page_size, head_dim] in the dtype, K then V; any outer strides. Or planes,
    # [num_planes, 2, num_pages, heads, page_size, part_dim], as in `tree_attention_ref`. None: the rows have only Q
    kv_layer: Tensor | None,
    q_out: Tensor,  # [rows, num_heads, head_dim] in the dtype
    *,
    # [(num_heads + 2 * num_kv_heads) * head_dim] or [groups, ..] in the dtype, added first; with groups, each one
    # applies to rows / groups consecutive rows
    bias: Tensor | None = None,
    norm: HeadNorm | None = None,  # norm of each head of Q and K, applied after the bias
    q_rotation: Tensor | None = None,  # like rotation, of Q; None: that of K
) -> None:
    """Write rotated Q to `q_out`, and rotated K and V to their slots of `kv_layer` (reference: eager torch, fp32)."""
    num_rows, num_heads, head_dim = q_out.shape
    num_kv_heads = _num_kv_heads(kv_layer, head_dim)
    total = sum_of_splits(qkv)
    if bias is not None:
        total = total + by_row(bias, num_rows)
    heads = total.view(num_rows, num_heads + 2 * num_kv_heads, head_dim)
    turned, values = heads.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    if norm is not None and norm.of_values:
        values = values * torch.rsqrt(values.square().mean(dim=2, keepdim=True) + norm.eps)
    if norm is not None and not norm.last:
        turned = norm(turned, num_heads)
    if rotation is not None:
        tables = (rotation if q_rotation is None else q_rotation, rotation)
        of_heads = [
            table[positions.long()]
            for table, count in zip(tables, (num_heads, num_kv_heads), strict=True)
            for _ in range(count)
        ]
        cos, sin = torch.stack(of_heads, 1).unbind(2)
        turned = turned * cos + turned.roll(head_dim // 2, -1) * sin
    if norm is not None and norm.last:
        turned = norm(turned, num_heads)
    q_out.copy_(turned[:, :num_heads])
    if kv_layer is None:
        return
    planes = kv_layer if kv_layer.dim() == 6 else kv_layer[None]
    pages, offsets = slots // planes.shape[4], slots % planes.shape[4]
    for cache, new in zip(planes.unbind(1), (turned[:, num_heads:], values), strict=True):
        parts = new.reshape(num_rows, len(planes), *cache.shape[2::2])
        for plane, part in zip(cache, parts.unbind(1), strict=True):
            plane[pages, :, offsets] = part.to(cache.dtype)


def _num_kv_heads(kv_layer: Tensor | None, head_dim: int) -> int:
    """Return the number of KV heads of a layer's cache, whole or in planes."""
    if kv_layer is None:
        return 0
    return kv_layer.shape[:-5].numel() * kv_layer.shape[-3] * kv_layer.shape[-1] // head_dim


def qkv_rope_triton(
    qkv: Tensor,
    rotation: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    kv_layer: Tensor | None,
    q_out: Tensor,
    *,
    bias: Tensor | None = None,
    norm: HeadNorm | None = None,
    q_rotation: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Compute `qkv_rope_ref` on a GPU, in one launch and without allocations; without a norm, bit-identical to it.

    All tensors must be contiguous, except that `kv_layer` may have any outer strides, and splits any stride. Slots and
    positions are read on the device and not checked. `pdl`: see `launch_options`.
    """
    dtype, (q_weight, k_weight) = q_out.dtype, (None, None) if norm is None else norm[:2]
    in_planes = kv_layer is not None and kv_layer.dim() == 6
    num_kv_heads, part = _num_kv_heads(kv_layer, max(q_out.shape[-1], 1)), "part_dim" if in_planes else "head_dim"
    heads = q_out.shape[1] + 2 * num_kv_heads if q_out.dim() == 3 else 0
    norm_dtype = torch.float32 if q_weight is not None and q_weight.dtype == torch.float32 else dtype
    head_dim, wide = q_out.shape[-1], norm is not None and norm.wide
    normed = (q_out.shape[1], num_kv_heads) if heads and wide else (1, 1)  # heads that share a norm
    widths = {"width": heads, "q_width": normed[0], "k_width": normed[1]}
    check_arguments(
        {name: count * head_dim for name, count in widths.items()},
        q_out=(q_out, "[rows num_heads head_dim+]", FLOAT_TYPES),
        kv_layer=(kv_layer, f"(num_planes) 2 num_pages plane_heads page_size {part}", dtype),
        qkv=(qkv, "(splits+) rows width", torch.float32 if qkv.dim() == 3 else dtype),
        bias=(bias, "[(groups+) width]", dtype),
        q_weight=(q_weight, "[(norm_groups+) q_width]", norm_dtype),
        k_weight=(k_weight, "[(norm_groups) k_width]", norm_dtype),
        rotation=(rotation, "[max_positions 2 head_dim]", torch.float32),
        q_rotation=(q_rotation, "[max_positions 2 head_dim]", torch.float32),
        positions=(positions, "rows", torch.int32),
        slots=(slots, "rows", torch.int64),
    )
    num_rows, num_heads, head_dim = q_out.shape
    assert norm is None or not (norm.wide and (norm.last or norm.of_values))
    assert head_dim % 2 == 0, "the head dimension must be even"
    kernels = load_kernels("attention.qkv_rope", q_out)
    block_d = block_of(head_dim // 2)
    block_h = max(TILE // (2 * block_d), 1)
    kernels.rotate_and_write[(num_rows, -(-heads // block_h))](
        *(qkv, bias, q_weight, k_weight, rotation, q_rotation, positions, slots, kv_layer, q_out),
        None if norm is None else float(norm.eps),
        split_rows(qkv),
        rows_per_group(bias, num_rows),
        rows_per_group(q_weight, num_rows),
        *(None,) * (not in_planes),
        *((None,) * 4 if kv_layer is None else kv_layer.stride()[:-1]),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=0 if kv_layer is None else kv_layer.shape[-2],
        PART_DIM=head_dim if kv_layer is None else kv_layer.shape[-1],
        PLANE_HEADS=kv_layer.shape[-3] if kv_layer is not None and in_planes else 0,
        NUM_SPLITS=qkv.shape[0] if qkv.dim() == 3 else 1,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        WIDE=wide,
        NORM_LAST=norm is not None and norm.last,
        NORM_VALUES=norm is not None and norm.of_values,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
        **launch_options(pdl),
    )
