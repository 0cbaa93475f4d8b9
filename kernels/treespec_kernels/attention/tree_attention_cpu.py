"""Exact tree attention in plain torch: a tree node's result is bit-identical to that of the token in plain decoding.

A row's keys are gathered in position order, from the tile where its window begins to the end of the tile of its last
position. Tiles are positions [64 t, 64 (t + 1)). Products have the shape of one tile, because MKL divides larger ones
among threads, depending on their number; tiles are added in order. So a row's bits depend only on its position. Rows
with equal tiles are one batch on a CPU, and those of a chain, such as a prompt, share their keys. On a GPU, where torch
may choose another kernel for another batch, every row is a batch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows

_MOST_KEYS = 1 << 14  # of a batch, so that gathered keys take tens of megabytes


class RowBatch(NamedTuple):
    """Rows of one request that attend to the same tiles of positions.

    Attributes:
        rows: int64 [num_rows], their indices in the pass.
        pages, offsets: int64 [num_rows, 1, num_keys], cache slot of each position; [1, 1, num_keys] if rows share them.
        hidden: bool [num_rows, 1, 1, num_keys], positions that a row does not attend to.
    """

    rows: Tensor
    pages: Tensor
    offsets: Tensor
    hidden: Tensor


def plan_tree_attention_cpu(
    requests: Sequence[RequestRows],
    window: int | None = None,
    visible: Callable[[Tensor, Tensor], Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> list[RowBatch]:
    """Plan the attention of a pass over the rows of all requests, in order.

    Args:
        requests: the rows.
        window: number of positions of its path that a row attends to, its own included; None = all.
        visible: mask within the window: of the positions of rows and of keys, int64 [num_rows] and [num_keys], bool
            [num_rows, num_keys]. None = all.
        device: of the cache.
    """
    batches, first, on_cpu = [], 0, torch.device(device).type == "cpu"
    for request in requests:
        context, ancestors = request.context_len, request.ancestors
        last = context + request.path_lengths - 1  # position that ends each row's path
        begin = np.zeros_like(last) if window is None else np.maximum(last - window + 1, 0) // PAGE_SIZE
        tiles, tiles_of = np.unique(np.stack((begin, last // PAGE_SIZE + 1)), axis=1, return_inverse=True)
        for i, (start, end) in enumerate(tiles.T):
            positions = np.arange(start * PAGE_SIZE, end * PAGE_SIZE)
            depths = np.clip(positions - context, 0, ancestors.shape[1] - 1)
            alike = np.flatnonzero(tiles_of.reshape(-1) == i)
            shared = request.is_chain and on_cpu
            most = len(alike) if shared else max(1, _MOST_KEYS // len(positions)) if on_cpu else 1
            for rows in np.split(alike, range(most, len(alike), most)):
                # the last row of a chain has the paths of all
                paths = ancestors[rows[-1:] if shared else rows][:, depths]
                logical = np.where(positions < context, positions, context + paths)
                ends = last[rows, None]
                hidden = (positions > ends) | (positions <= ends - (window or np.inf))
                slots = request.pages[logical // PAGE_SIZE], logical % PAGE_SIZE
                index, pages, offsets, mask = (torch.from_numpy(x).to(device) for x in (first + rows, *slots, hidden))
                if visible is not None:
                    at = (torch.from_numpy(x).to(device) for x in (last[rows], positions))
                    mask |= ~visible(*at)
                batches.append(RowBatch(index, pages[:, None], offsets[:, None], mask[:, None, None]))
        first += request.num_rows
    return batches


def _products(x: Tensor, y: Tensor) -> Tensor:
    """Multiply matrices as `torch.bmm`, a single one twice: MKL would divide it among threads, which changes bits."""
    return torch.bmm(x, y) if len(x) > 1 else torch.bmm(x.expand(2, -1, -1), y.expand(2, -1, -1))[:1]


def _products_of_tiles(x: Tensor, y: Tensor) -> Tensor:
    """Multiply x [num_rows, num_kv_heads, tiles, group, n] by y, also of every row, or [1, ..] for all rows."""
    if len(x) == len(y):
        return _products(x.flatten(0, 2), y.flatten(0, 2)).view(*x.shape[:4], -1)
    out = x.new_empty(*x.shape[:4], y.shape[-1])
    for head in range(x.shape[1]):
        for tile in range(x.shape[2]):
            out[:, head, tile] = _products(x[:, head, tile], y[0, head, tile].expand(len(x), -1, -1))
    return out


def tree_attention_cpu(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Sequence[RowBatch],
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the attention of every row of a pass to its own path, in float32.

    Args:
        q: [num_rows, num_heads, head_dim], rotated. Rows beyond the plan's are padding; their output is 0.
        k_cache, v_cache: [num_pages, num_kv_heads, PAGE_SIZE, head_dim] of one layer. Slots that no row attends to may
            hold any *finite* value.
        plan: from `plan_tree_attention_cpu`.
        scale: factor on the scores, usually 1 / sqrt(head_dim).
        cap: soft cap: scores x become cap tanh(x / cap); None for no cap.
        sinks: [num_heads], attention sink scores.

    Returns:
        float32 [num_rows, num_heads, head_dim].
    """
    heads, kv_heads = q.shape[1], k_cache.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    queries = (q.float() * scale).view(len(q), kv_heads, heads // kv_heads, -1)
    of_head = torch.arange(kv_heads, device=q.device)[:, None]
    for rows, pages, offsets, hidden in plan:
        tiles = pages.shape[-1] // PAGE_SIZE
        # contiguous, because the layout of an indexed tensor depends on the number of rows
        gathered = (cache[pages, of_head, offsets].float().contiguous() for cache in (k_cache, v_cache))
        keys, values = (part.unflatten(2, (tiles, PAGE_SIZE)) for part in gathered)
        of_tiles = queries[rows, :, None].expand(-1, -1, tiles, -1, -1)
        scores = _products_of_tiles(of_tiles, keys.transpose(3, 4))
        scores = scores.transpose(2, 3).flatten(3)  # [num_rows, num_kv_heads, group, num_keys]
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        scores.masked_fill_(hidden, -torch.inf)
        if sinks is not None:
            sink = sinks.float().view(kv_heads, -1, 1).expand(len(rows), -1, -1, -1)
            scores = torch.cat((scores, sink), -1)
        weights = torch.softmax(scores, -1)[..., : hidden.shape[-1]].unflatten(-1, (tiles, PAGE_SIZE)).transpose(2, 3)
        summed = _products_of_tiles(weights.contiguous(), values)
        out[rows] = functools.reduce(torch.add, summed.unbind(2)).flatten(1, 2)
    return out
