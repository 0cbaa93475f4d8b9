"""Exact tree attention on a CPU: a tree node's result is bit-identical to the same token's in plain decoding.

A row sums over *position tiles*: tile t holds positions [64 t, 64 (t + 1)), independent of the tree. The row's global
maximum is subtracted from its scores (a maximum is exact in any order), each tile's weighted sum of V is one matrix
product over the tile, and tiles are added in a fixed order. Plain decoding is the same computation for a one-node tree.

The fast path relies on two properties of the fp32 matrix product (MKL through `torch.bmm`, measured on AVX-512), which
the engine's self-test verifies on every machine:

* an element's bits depend neither on the number of rows (in multiples of 4, from 4, 8 or 12 on: `_least_rows`) nor on
its column;
* up to 192 summands are accumulated in one chain, so summands that are exactly zero may be inserted anywhere.

Tree nodes therefore need not be gathered into position order: a parent's slot precedes its child's, so in slot order
the keys of a path are in position order, with masked slots of weight 0 in between. Mode `packed` computes all rows of a
request at once in slot order. Mode `gathered` copies each row's keys into position order and gives every product the
same shape, so it needs weaker properties; it also handles trees whose tail exceeds `MAX_CHAIN` slots. For trees that
both modes support, results are bit-identical.

In a layer with a *window*, a row attends only to the last positions of its path. A block then starts at the first tile
that any of its rows attends to, which depends on the other rows. Tiles are therefore added one by one: leading tiles
with weight 0 change nothing, whereas `torch.sum` would group tiles by index.
"""

import functools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treespec_kernels.attention.tree_attention_cpu_plan import (
    MAX_CHAIN,
    ROW_MULTIPLE,
    AttentionMode,
    CpuAttentionPlan,
    Gather,
    RowBlock,
    plan_tree_attention_cpu,
)
from treespec_kernels.attention.tree_batch import PAGE_SIZE

__all__ = ["MAX_CHAIN", "AttentionMode", "CpuAttentionPlan", "plan_tree_attention_cpu", "tree_attention_cpu"]

# Multiple of the columns in the sum over tiles: from 5 tiles on, torch adds a remainder in another order.
_FOLD_MULTIPLE = 64


class SplitCache:
    """K or V of a layer whose heads span planes of a cache; indexing returns whole heads in fp32."""

    def __init__(self, planes: Tensor, heads: int, head_dim: int):  # [num_planes, num_pages, H, PAGE_SIZE, D]
        self._planes, self.shape = planes, (planes.shape[1], heads, PAGE_SIZE, head_dim)

    @classmethod
    def of(cls, planes: Tensor, heads: int, head_dim: int, dtype: torch.dtype) -> Sequence["Tensor | SplitCache"]:
        """Return K and V of a layer with these planes, [num_planes, 2, num_pages, H, PAGE_SIZE, D].

        They are views if the planes are whole heads in `dtype`, that of the attention.
        """
        if len(planes) == 1 and planes.shape[-1] == head_dim and planes.dtype == dtype:
            return planes[0].unbind()
        return [cls(part, heads, head_dim) for part in planes.unbind(1)]

    def __getitem__(self, index: Any) -> Tensor:
        """Return pages [..., heads, PAGE_SIZE, head_dim], or for (pages, :, offsets) slots [..., heads, head_dim]."""
        _, heads, _, head_dim = self.shape
        if isinstance(index, tuple):
            return self._planes[:, *index].reshape(-1, heads, head_dim).float()
        parts = self._planes[:, index].transpose(0, 1).flatten(1, 2).unflatten(1, (heads, -1))
        return parts.transpose(2, 3).flatten(3).contiguous().float()


class _Workspace(NamedTuple):
    """Buffers of one block and their views.

    They are created once for all layers, because creating the views takes as long as the arithmetic.
    """

    q: Tensor  # [num_tiles, Hkv, num_rows, group, D], view to write q to
    q_flat: Tensor  # [num_tiles * Hkv, padded rows, D], 0 in the padding
    scores: Tensor  # [num_tiles, Hkv, padded rows, PAGE_SIZE]
    scores_flat: Tensor
    masked: Tensor  # [tiles, Hkv, num_rows, group, PAGE_SIZE], view of the scores masked by the block's `hidden`
    peak: Tensor  # [1, Hkv, padded rows, 1]
    ones: Tensor  # [num_tiles * Hkv, PAGE_SIZE, 16]
    summed: Tensor  # [num_parts, Hkv, padded rows, D], weighted V per tile of positions
    summed_flat: Tensor  # view of the independent tiles: [num * Hkv, padded rows, D]
    mass: Tensor  # [num_parts, Hkv, padded rows, 16]
    mass_flat: Tensor
    total: Tensor  # [Hkv, padded rows, D]
    value: Tensor  # [num_rows, Hkv, group, D], view of the total in the output's shape
    total_mass: Tensor  # [Hkv, padded rows, 16]
    divisor: Tensor  # [num_rows, Hkv, group, 1]


@functools.cache
def _ones() -> Tensor:
    """Return ones, fp32 [1, MAX_CHAIN, 16].

    Row sums are matrix products with ones, which accumulate in the same order as the products with V.
    """
    with torch.inference_mode(False):
        return torch.ones(1, MAX_CHAIN, 16, dtype=torch.float32, device="cpu")


def tree_attention_cpu(
    q: Tensor,
    k_cache: Tensor | SplitCache,
    v_cache: Tensor | SplitCache,
    plan: CpuAttentionPlan,
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the attention of every row of a pass to its own path.

    Args:
        q: fp32 [num_rows, num_heads, head_dim], rotated. Rows after the plan's are padding; their output is 0.
        k_cache, v_cache: fp32 [num_pages, num_kv_heads, PAGE_SIZE, head_dim] of one layer, contiguous. Slots that no
            row attends to may hold any *finite* value.
        plan: from `plan_tree_attention_cpu`.
        scale: factor on the scores, usually 1 / sqrt(head_dim).
        cap: soft cap: scores x become cap tanh(x / cap); None for no cap.
        sinks: fp32 [num_heads], scores that add to the sum of a row's weights but weigh no value; None for no sinks.

    Returns:
        fp32 [num_rows, num_heads, head_dim].
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if len(q) > plan.num_rows:
        out[plan.num_rows :] = 0
    for i, block in enumerate(plan.blocks):
        if isinstance(block, Gather):
            _attend_gathered(q * scale, k_cache, v_cache, block, cap, sinks, out)
        else:
            key = i, k_cache.shape[1], q.shape[2]
            if key not in plan.workspaces:
                plan.workspaces[key] = _workspace(block, q.shape[1], *key[1:])
            _attend_packed(q, k_cache, v_cache, block, plan.workspaces[key], scale, cap, sinks, out)
    return out


@functools.cache
def _least_rows(head_dim: int, threads: int) -> int:
    """Measure the smallest number of rows whose scores are bit-identical to those in a product with more rows.

    It is 4 on AVX-512 without AMX. On a Sapphire Rapids, MKL uses another kernel for 4 rows from 96 summands on, and
    for 8 rows from 192 on. `threads`, torch's number of threads, may affect MKL's choice of kernel and is part of the
    cache key.
    """
    generator = torch.Generator().manual_seed(0)
    random = partial(torch.randn, dtype=torch.float32, device="cpu", generator=generator)
    q, k = random(8, 32, head_dim), random(8, PAGE_SIZE, head_dim).transpose(1, 2)
    whole, least = torch.bmm(q, k), ROW_MULTIPLE
    for rows in range(ROW_MULTIPLE, 32, ROW_MULTIPLE):
        if not torch.equal(torch.bmm(q[:, :rows].contiguous(), k), whole[:, :rows]):
            least = rows + ROW_MULTIPLE
    return least


def _padded_rows(rows: int, kv_heads: int, head_dim: int) -> int:
    """Return `rows` rounded up so that neither the products nor the sum over tiles have a remainder."""
    step = max(ROW_MULTIPLE, _FOLD_MULTIPLE // math.gcd(_FOLD_MULTIPLE, kv_heads * head_dim))
    return -(-max(rows, _least_rows(head_dim, torch.get_num_threads())) // step) * step


def _workspace(block: RowBlock, heads: int, kv_heads: int, head_dim: int) -> _Workspace:
    rows, group, full = block.last_row - block.first_row, heads // kv_heads, block.num_full
    num_tiles, m = full + block.num_tail, rows * group
    padded = _padded_rows(m, kv_heads, head_dim)
    num_ordered = full if block.slot_order else num_tiles
    num_parts = full + len(block.position_tiles) if block.slot_order else num_tiles

    def fp32(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device="cpu")

    q = fp32(num_tiles, kv_heads, padded, head_dim)
    if padded > m:
        q[:, :, m:] = 0
    scores = fp32(num_tiles, kv_heads, padded, PAGE_SIZE)
    summed, mass = fp32(num_parts, kv_heads, padded, head_dim), fp32(num_parts, kv_heads, padded, 16)
    total, total_mass = fp32(kv_heads, padded, head_dim), fp32(kv_heads, padded, 16)
    return _Workspace(
        q=q[:, :, :m].view(num_tiles, kv_heads, rows, group, head_dim),
        q_flat=q.view(-1, padded, head_dim),
        scores=scores,
        scores_flat=scores.view(-1, padded, PAGE_SIZE),
        masked=scores[-len(block.hidden) :, :, :m].view(-1, kv_heads, rows, group, PAGE_SIZE),
        peak=fp32(1, kv_heads, padded, 1),
        ones=_ones()[:, :PAGE_SIZE].expand(num_ordered * kv_heads, -1, -1),
        summed=summed,
        summed_flat=summed[:num_ordered].view(-1, padded, head_dim),
        mass=mass,
        mass_flat=mass[:num_ordered].view(-1, padded, 16),
        total=total,
        value=total[:, :m].view(kv_heads, rows, group, head_dim).transpose(0, 1),
        total_mass=total_mass,
        divisor=total_mass[:, :m, :1].view(kv_heads, rows, group, 1).transpose(0, 1),
    )


def _attend_packed(
    q: Tensor,
    k_cache: Tensor | SplitCache,
    v_cache: Tensor | SplitCache,
    block: RowBlock,
    work: _Workspace,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    k, v = k_cache[block.pages], v_cache[block.pages]  # [num_tiles, Hkv, PAGE_SIZE, D], a view if pages are consecutive
    _, kv_heads, _, head_dim = k.shape
    rows = slice(block.first_row, block.last_row)
    q_rows = q[rows].view(work.value.shape).transpose(0, 1)
    torch.mul(q_rows.expand(work.q.shape), scale, out=work.q)
    torch.bmm(work.q_flat, k.view(-1, PAGE_SIZE, head_dim).transpose(1, 2), out=work.scores_flat)
    if cap is not None:
        _cap_scores(work.scores, cap)
    work.masked.masked_fill_(block.hidden, float("-inf"))
    torch.amax(work.scores, (0, 3), keepdim=True, out=work.peak)
    work.scores.sub_(work.peak).exp_()  # now weights

    num_ordered = len(work.summed_flat)  # tiles with slots in position order, times KV heads
    if num_ordered:
        weights = work.scores_flat[:num_ordered]
        torch.bmm(weights, v.view(-1, PAGE_SIZE, head_dim)[:num_ordered], out=work.summed_flat)
        torch.bmm(weights, work.ones, out=work.mass_flat)
    if block.slot_order:
        columns, full = block.num_tail * PAGE_SIZE, block.num_full
        w_tail = work.scores[full:].permute(1, 2, 0, 3).reshape(kv_heads, -1, columns)
        v_tail = v[full:].permute(1, 0, 2, 3).reshape(kv_heads, columns, head_dim)
        ones = _ones()[:, :columns].expand(kv_heads, -1, -1)
        for i, in_tile in enumerate(block.position_tiles, start=full):
            w_tile = w_tail * in_tile
            torch.bmm(w_tile, v_tail, out=work.summed[i])
            torch.bmm(w_tile, ones, out=work.mass[i])
    add_tiles(work.summed, block.windowed, work.total)
    add_tiles(work.mass, block.windowed, work.total_mass)
    if sinks is not None:
        kv_heads, group = work.value.shape[1:3]
        peak = work.peak[0, :, : len(work.value) * group].view(kv_heads, -1, group, 1).transpose(0, 1)
        work.divisor.add_((sinks.view(kv_heads, group, 1) - peak).exp_())
    torch.div(work.value, work.divisor, out=out[rows].view(work.value.shape))


def _cap_scores(scores: Tensor, cap: float) -> None:
    scores.div_(cap).tanh_().mul_(cap)  # row-invariant: torch computes tanh in whole vectors, without a scalar tail


def add_tiles(tile_sums: Tensor, windowed: bool, total: Tensor) -> None:
    """Sum over the first dimension; with a window, one part at a time, so that leading zeros change nothing."""
    if not windowed:
        torch.sum(tile_sums, 0, out=total)
        return
    total.copy_(tile_sums[0])
    for tile_sum in tile_sums[1:]:
        total.add_(tile_sum)


def _attend_gathered(
    q: Tensor,
    k_cache: Tensor | SplitCache,
    v_cache: Tensor | SplitCache,
    block: Gather,
    cap: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Compute rows one by one, so that all products of all passes have the shape [padded rows, D] x [D, PAGE_SIZE]."""
    _, kv_heads, _, head_dim = k_cache.shape
    rows, columns = block.slots.shape
    num_tiles, heads = columns // PAGE_SIZE, q.shape[1]
    group = heads // kv_heads
    padded = _padded_rows(group, kv_heads, head_dim)
    page, offset = block.slots // PAGE_SIZE, block.slots % PAGE_SIZE
    for row in range(rows):  # one by one, so that a product's batch size depends only on the row
        index = (page[row], slice(None), offset[row])
        tiles = [cache[index].view(num_tiles, PAGE_SIZE, kv_heads, head_dim) for cache in (k_cache, v_cache)]
        k, v = (tile.transpose(1, 2).reshape(-1, PAGE_SIZE, head_dim) for tile in tiles)
        q_tiles = torch.zeros(num_tiles, kv_heads, padded, head_dim, dtype=torch.float32, device="cpu")
        q_tiles[:, :, :group] = q[block.first_row + row].view(kv_heads, group, head_dim)
        scores = torch.bmm(q_tiles.view(-1, padded, head_dim), k.transpose(1, 2))
        scores = scores.view(num_tiles, kv_heads, padded, PAGE_SIZE)
        if cap is not None:
            _cap_scores(scores, cap)
        scores.masked_fill_(block.hidden[row], float("-inf"))
        peak = scores.amax(dim=(0, 3), keepdim=True)
        weights = scores.sub_(peak).exp_().view(-1, padded, PAGE_SIZE)
        summed = torch.bmm(weights, v).view(num_tiles, kv_heads, padded, head_dim)
        mass = torch.bmm(weights, _ones()[:, :PAGE_SIZE].expand(len(weights), -1, -1))
        mass = mass.view(num_tiles, kv_heads, padded, 16)
        total, total_mass = torch.empty_like(summed[0]), torch.empty_like(mass[0])
        add_tiles(summed, block.windowed, total)
        add_tiles(mass, block.windowed, total_mass)
        total, mass = total[:, :group], total_mass[:, :group, :1]
        if sinks is not None:
            mass = mass + (sinks.view(kv_heads, group, 1) - peak[0, :, :group]).exp_()
        out[block.first_row + row] = (total / mass).reshape(heads, head_dim)
