"""Exact tree attention on a CPU: a tree node gets the bits that plain decoding gives the same token.

A row sums over *position tiles*: positions [64 t, 64 (t + 1)) form tile t whatever the tree looks like. Its scores are
taken against its global maximum (exact in any order), each tile's weighted sum of V is one matrix product over the
tile, and tiles are added in one fixed order. Plain decoding is the same computation for a one-node tree.

Two facts about the fp32 matrix product (MKL through `torch.bmm`, measured on AVX-512) carry the fast path, and the
engine's self-test proves them anew on every machine before it relies on them:

* an element's bits depend neither on the number of rows (in multiples of 4) nor on its column;
* up to 192 summands are accumulated in one chain, so summands that are exactly zero may stand anywhere in between.

Hence tree nodes need not be gathered into position order: a parent's slot precedes its child's, so in slot order a
path's keys stand in position order with masked slots between them, and masked slots weigh exactly 0. `packed` computes
all rows of a request at once in slot order. `gathered` copies each row's keys into position order and gives every
product the same shape, so that it holds under weaker facts; it is also what trees use whose tail passes `MAX_CHAIN`
slots. Both give equal bits where both hold.
"""

import functools
import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec_kernels.tree_batch import PAGE_SIZE, RequestRows

AttentionMode = Literal["packed", "gathered"]

MAX_CHAIN = 2 * PAGE_SIZE
"""Summands of one matrix product in slot order; one chain was measured up to 192."""

_ROW_MULTIPLE = 4  # rows of a product
_FOLD_MULTIPLE = 64  # columns of the sum over tiles: torch adds a remainder of fewer in another order from 5 tiles on
_SCORE_BYTES = 16 << 20  # rows of a long prefill chunk are taken in blocks whose scores fit in the last-level cache


class _Block(NamedTuple):
    """Some rows of one request, with the tiles they attend to."""

    first_row: int  # rows of the pass
    last_row: int
    pages: slice | Tensor  # a slice of the pool where the pages are consecutive: no copy
    num_full: int  # tiles whose positions are all committed and seen by every row
    num_tail: int
    hidden: Tensor  # bool [num_tail, 1, num_rows, 1, PAGE_SIZE]
    slot_order: bool  # tail slots cross into another tile, out of position order
    position_tiles: tuple[Tensor, ...]  # fp32 [num_tail * PAGE_SIZE] each: 1 where a tail slot lies in the tile


class _Workspace(NamedTuple):
    """Buffers of one block and their views, made once for all layers: views cost as much as the arithmetic on them."""

    q: Tensor  # to fill: [num_tiles, Hkv, num_rows, group, D]
    q_flat: Tensor  # [num_tiles * Hkv, padded rows, D], 0 in the padding
    scores: Tensor  # [num_tiles, Hkv, padded rows, PAGE_SIZE]
    scores_flat: Tensor
    tail: Tensor  # of the scores: [num_tail, Hkv, num_rows, group, PAGE_SIZE]
    peak: Tensor  # [1, Hkv, padded rows, 1]
    ones: Tensor  # [num_tiles * Hkv, PAGE_SIZE, 16]
    summed: Tensor  # [num_parts, Hkv, padded rows, D], weighted V by tile of positions
    summed_flat: Tensor  # of the tiles that stand alone: [num * Hkv, padded rows, D]
    mass: Tensor  # [num_parts, Hkv, padded rows, 16]
    mass_flat: Tensor
    total: Tensor  # [Hkv, padded rows, D]
    value: Tensor  # of the total, as the output has it: [num_rows, Hkv, group, D]
    total_mass: Tensor  # [Hkv, padded rows, 16]
    divisor: Tensor  # [num_rows, Hkv, group, 1]


class _Gather(NamedTuple):
    first_row: int
    last_row: int
    slots: Tensor  # int64 [num_rows, num_tiles * PAGE_SIZE], page * PAGE_SIZE + offset by position
    hidden: Tensor  # bool [num_rows, num_tiles, 1, 1, PAGE_SIZE]


@dataclass(frozen=True)
class CpuAttentionPlan:
    """Work of one pass, the same for all layers. `num_rows` are the requests' own, padding not counted."""

    num_rows: int
    blocks: tuple[_Block | _Gather, ...]
    workspaces: dict[int, _Workspace] = field(default_factory=dict)  # by block, made by the first layer


@functools.cache
def _ones() -> Tensor:
    """fp32 [1, MAX_CHAIN, 16]: row sums are matrix products too, so that they follow the same chain."""
    with torch.inference_mode(False):
        return torch.ones(1, MAX_CHAIN, 16)


def _page_index(pages: np.ndarray) -> slice | Tensor:
    if len(pages) == 1 or bool((pages[1:] - pages[:-1] == 1).all()):
        return slice(int(pages[0]), int(pages[0]) + len(pages))
    return torch.from_numpy(np.ascontiguousarray(pages, dtype=np.int64))


def plan_tree_attention_cpu(
    requests: list[RequestRows], num_heads: int, num_kv_heads: int, mode: AttentionMode = "packed"
) -> CpuAttentionPlan:
    """Lay out the work of a pass over the rows of all requests, in their order."""
    blocks: list[_Block | _Gather] = []
    first = 0
    for rows in requests:
        tail_slots = rows.context_len % PAGE_SIZE + rows.num_slots
        if mode == "gathered" or (not rows.is_chain and tail_slots > MAX_CHAIN):
            blocks.append(_plan_gathered(rows, first))
        elif rows.is_chain:
            blocks.extend(_plan_chain(rows, first, num_heads))
        else:
            blocks.append(_plan_packed_tree(rows, first))
        first += rows.num_rows
    return CpuAttentionPlan(first, tuple(blocks))


def _plan_chain(rows: RequestRows, first: int, num_heads: int) -> list[_Block]:
    """A chain's slots are its positions, so every tile stands alone; long ones are cut into blocks of rows."""
    blocks = []
    num_tiles = (rows.context_len + rows.num_rows - 1) // PAGE_SIZE + 1
    step = max(_ROW_MULTIPLE, _SCORE_BYTES // (num_tiles * num_heads * PAGE_SIZE * 4))
    full = rows.context_len // PAGE_SIZE
    for start in range(0, rows.num_rows, step):
        stop = min(start + step, rows.num_rows)
        tiles = (rows.context_len + stop - 1) // PAGE_SIZE + 1
        columns = np.arange(full * PAGE_SIZE, tiles * PAGE_SIZE)
        hidden = columns[None, :] > rows.positions[start:stop, None]
        mask = torch.from_numpy(hidden.reshape(stop - start, tiles - full, PAGE_SIZE)).transpose(0, 1)
        blocks.append(
            _Block(
                first + start, first + stop, _page_index(rows.pages[:tiles]), full, tiles - full,
                mask[:, None, :, None, :], False, (),
            )
        )  # fmt: skip
    return blocks


def _plan_packed_tree(rows: RequestRows, first: int) -> _Block:
    full = rows.context_len // PAGE_SIZE
    begin = full * PAGE_SIZE
    tail = (rows.context_len + rows.num_slots - 1) // PAGE_SIZE + 1 - full
    hidden = rows.hidden_mask(tail * PAGE_SIZE, begin)
    mask = torch.from_numpy(hidden.reshape(rows.num_rows, tail, PAGE_SIZE)).transpose(0, 1)[:, None, :, None, :]
    tiles: tuple[Tensor, ...] = ()
    if tail > 1:
        position = np.full(tail * PAGE_SIZE, -1)
        position[: rows.context_len - begin] = np.arange(begin, rows.context_len)
        assert rows.slot_depths is not None
        start = rows.context_len - begin
        position[start : start + rows.num_slots] = rows.context_len + rows.slot_depths
        last = int(position.max()) // PAGE_SIZE
        tiles = tuple(
            torch.from_numpy((position // PAGE_SIZE == tile).astype(np.float32)) for tile in range(full, last + 1)
        )
    return _Block(
        first, first + rows.num_rows, _page_index(rows.pages[: full + tail]), full, tail, mask, tail > 1, tiles
    )  # fmt: skip


def _plan_gathered(rows: RequestRows, first: int) -> _Gather:
    num_tiles = int(rows.positions.max()) // PAGE_SIZE + 1
    columns = np.arange(num_tiles * PAGE_SIZE)
    logical = np.repeat(columns[None, :], rows.num_rows, axis=0)
    own = rows.context_len + rows.ancestors
    logical[:, rows.context_len : rows.context_len + own.shape[1]] = own[:, : len(columns) - rows.context_len]
    hidden = columns[None, :] > rows.positions[:, None]
    logical[hidden] = 0
    slots = rows.pages[logical // PAGE_SIZE] * PAGE_SIZE + logical % PAGE_SIZE
    shape = (rows.num_rows, num_tiles, 1, 1, PAGE_SIZE)
    return _Gather(first, first + rows.num_rows, torch.from_numpy(slots), torch.from_numpy(hidden.reshape(shape)))


def tree_attention_cpu(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: CpuAttentionPlan, scale: float) -> Tensor:
    """Attention of the rows of a pass to their own paths.

    Args:
        q: fp32 [num_rows, num_heads, head_dim], rotated. Rows beyond the plan's are passed over.
        k_cache, v_cache: fp32 [num_pages, num_kv_heads, PAGE_SIZE, head_dim] of one layer, contiguous. Slots that no
            row sees may hold any *finite* value.
        plan: from `plan_tree_attention_cpu`.
        scale: factor on the scores, 1 / sqrt(head_dim) as a rule.

    Returns:
        fp32 [num_rows, num_heads, head_dim].
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if len(q) > plan.num_rows:
        out[plan.num_rows :] = 0
    for i, block in enumerate(plan.blocks):
        if isinstance(block, _Gather):
            _attend_gathered(q * scale, k_cache, v_cache, block, out)
        else:
            if i not in plan.workspaces:
                plan.workspaces[i] = _workspace(block, q.shape[1], k_cache.shape[1], q.shape[2])
            _attend_packed(q, k_cache, v_cache, block, plan.workspaces[i], scale, out)
    return out


def _padded_rows(rows: int, width: int) -> int:
    """Rows to compute for `rows`, so that neither a product nor the sum over tiles has a remainder."""
    step = max(_ROW_MULTIPLE, _FOLD_MULTIPLE // math.gcd(_FOLD_MULTIPLE, width))
    return -(-rows // step) * step


def _workspace(block: _Block, heads: int, kv_heads: int, head_dim: int) -> _Workspace:
    rows, group, full = block.last_row - block.first_row, heads // kv_heads, block.num_full
    num_tiles, m = full + block.num_tail, rows * group
    padded = _padded_rows(m, kv_heads * head_dim)
    alone = full if block.slot_order else num_tiles
    num_parts = full + len(block.position_tiles) if block.slot_order else num_tiles

    q = torch.empty(num_tiles, kv_heads, padded, head_dim)
    if padded > m:
        q[:, :, m:] = 0
    scores = torch.empty(num_tiles, kv_heads, padded, PAGE_SIZE)
    summed, mass = torch.empty(num_parts, kv_heads, padded, head_dim), torch.empty(num_parts, kv_heads, padded, 16)
    total, total_mass = torch.empty(kv_heads, padded, head_dim), torch.empty(kv_heads, padded, 16)
    return _Workspace(
        q=q[:, :, :m].view(num_tiles, kv_heads, rows, group, head_dim),
        q_flat=q.view(-1, padded, head_dim),
        scores=scores,
        scores_flat=scores.view(-1, padded, PAGE_SIZE),
        tail=scores[full:, :, :m].view(block.num_tail, kv_heads, rows, group, PAGE_SIZE),
        peak=torch.empty(1, kv_heads, padded, 1),
        ones=_ones()[:, :PAGE_SIZE].expand(alone * kv_heads, -1, -1),
        summed=summed,
        summed_flat=summed[:alone].view(-1, padded, head_dim),
        mass=mass,
        mass_flat=mass[:alone].view(-1, padded, 16),
        total=total,
        value=total[:, :m].view(kv_heads, rows, group, head_dim).transpose(0, 1),
        total_mass=total_mass,
        divisor=total_mass[:, :m, :1].view(kv_heads, rows, group, 1).transpose(0, 1),
    )


def _attend_packed(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block: _Block, work: _Workspace, scale: float, out: Tensor
) -> None:
    k, v = k_cache[block.pages], v_cache[block.pages]  # [num_tiles, Hkv, PAGE_SIZE, D], a view where pages are in line
    _, kv_heads, _, head_dim = k.shape
    own = slice(block.first_row, block.last_row)
    q_rows = q[own].view(work.value.shape).transpose(0, 1)
    torch.mul(q_rows.expand(work.q.shape), scale, out=work.q)
    torch.bmm(work.q_flat, k.view(-1, PAGE_SIZE, head_dim).transpose(1, 2), out=work.scores_flat)
    work.tail.masked_fill_(block.hidden, float("-inf"))
    torch.amax(work.scores, (0, 3), keepdim=True, out=work.peak)
    work.scores.sub_(work.peak).exp_()  # the weights

    alone = len(work.summed_flat)  # tiles whose slots stand in position order, times KV heads
    if alone:
        weights = work.scores_flat[:alone]
        torch.bmm(weights, v.view(-1, PAGE_SIZE, head_dim)[:alone], out=work.summed_flat)
        torch.bmm(weights, work.ones, out=work.mass_flat)
    if block.slot_order:
        columns, full = block.num_tail * PAGE_SIZE, block.num_full
        w_tail = work.scores[full:].permute(1, 2, 0, 3).reshape(kv_heads, -1, columns)
        v_tail = v[full:].permute(1, 0, 2, 3).reshape(kv_heads, columns, head_dim)
        ones = _ones()[:, :columns].expand(kv_heads, -1, -1)
        for part, in_tile in enumerate(block.position_tiles, start=full):
            w_tile = w_tail * in_tile
            torch.bmm(w_tile, v_tail, out=work.summed[part])
            torch.bmm(w_tile, ones, out=work.mass[part])
    torch.sum(work.summed, 0, out=work.total)
    torch.sum(work.mass, 0, out=work.total_mass)
    torch.div(work.value, work.divisor, out=out[own].view(work.value.shape))


def _attend_gathered(q: Tensor, k_cache: Tensor, v_cache: Tensor, block: _Gather, out: Tensor) -> None:
    """Every row alone: each product has the same shape [4 or more, D] x [D, PAGE_SIZE], whatever the pass."""
    _, kv_heads, _, head_dim = k_cache.shape
    rows, columns = block.slots.shape
    num_tiles, heads = columns // PAGE_SIZE, q.shape[1]
    group = heads // kv_heads
    padded = _padded_rows(group, kv_heads * head_dim)
    page, offset = block.slots // PAGE_SIZE, block.slots % PAGE_SIZE
    for row in range(rows):  # one row at a time: the batch count of a product is then the row's own
        index = (page[row], slice(None), offset[row])
        k = (
            k_cache[index]
            .view(num_tiles, PAGE_SIZE, kv_heads, head_dim)
            .transpose(1, 2)
            .reshape(-1, PAGE_SIZE, head_dim)
        )
        v = (
            v_cache[index]
            .view(num_tiles, PAGE_SIZE, kv_heads, head_dim)
            .transpose(1, 2)
            .reshape(-1, PAGE_SIZE, head_dim)
        )
        q_tiles = torch.zeros(num_tiles, kv_heads, padded, head_dim)
        q_tiles[:, :, :group] = q[block.first_row + row].view(kv_heads, group, head_dim)
        scores = torch.bmm(q_tiles.view(-1, padded, head_dim), k.transpose(1, 2))
        scores = scores.view(num_tiles, kv_heads, padded, PAGE_SIZE).masked_fill_(block.hidden[row], float("-inf"))
        weights = scores.sub_(scores.amax(dim=(0, 3), keepdim=True)).exp_().view(-1, padded, PAGE_SIZE)
        summed = torch.bmm(weights, v).view(num_tiles, kv_heads, padded, head_dim).sum(0)
        mass = (
            torch.bmm(weights, _ones()[:, :PAGE_SIZE].expand(len(weights), -1, -1))
            .view(num_tiles, kv_heads, padded, 16)
            .sum(0)
        )
        out[block.first_row + row] = (summed / mass[..., :1])[:, :group].reshape(heads, head_dim)
