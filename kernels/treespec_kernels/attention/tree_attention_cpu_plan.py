"""Plan of exact tree attention on a CPU, built once per pass for all layers with the same window.

`tree_attention_cpu.py` describes the computation and why a row's bits do not depend on other rows.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows

AttentionMode = Literal["packed", "gathered"]

MAX_CHAIN = 2 * PAGE_SIZE
"""Summands of one matrix product in slot order; a single accumulation chain was measured up to 192."""

ROW_MULTIPLE = 4  # products have a multiple of this number of rows
_SCORE_BYTES = (
    16 << 20
)  # score bytes per block of rows: a long prefill chunk's scores should fit in the last-level cache


class RowBlock(NamedTuple):
    """Consecutive rows of one request, and the tiles they attend to."""

    first_row: int  # rows [first_row, last_row) of the pass
    last_row: int
    pages: slice | Tensor  # a slice of the pool for consecutive pages, to avoid a copy
    num_full: int  # tiles whose positions are all committed
    num_tail: int
    hidden: Tensor  # bool [tiles, 1, num_rows, 1, PAGE_SIZE], mask of the tail; with a window, of all tiles
    slot_order: bool  # whether some tail slots belong to another position tile
    position_tiles: tuple[Tensor, ...]  # fp32 [num_tail * PAGE_SIZE] each, 1 for a tail slot in the tile
    windowed: bool


class Gather(NamedTuple):
    """Rows of one request whose keys are gathered into position order."""

    first_row: int
    last_row: int
    slots: Tensor  # int64 [num_rows, num_tiles * PAGE_SIZE], page * PAGE_SIZE + offset of each position
    hidden: Tensor  # bool [num_rows, num_tiles, 1, 1, PAGE_SIZE]
    windowed: bool


@dataclass(frozen=True)
class CpuAttentionPlan:
    """Work of one pass, shared by its layers. `num_rows` does not count padding."""

    num_rows: int
    blocks: tuple[RowBlock | Gather, ...]
    # Workspaces by block, number of KV heads and head size, created in the first such layer
    workspaces: dict[tuple[int, int, int], Any] = field(default_factory=dict)


def _page_index(pages: np.ndarray) -> slice | Tensor:
    if len(pages) == 1 or bool((pages[1:] - pages[:-1] == 1).all()):
        return slice(int(pages[0]), int(pages[0]) + len(pages))
    return torch.from_numpy(np.ascontiguousarray(pages, dtype=np.int64))


def plan_tree_attention_cpu(
    requests: list[RequestRows], num_heads: int, mode: AttentionMode = "packed", window: int | None = None
) -> CpuAttentionPlan:
    """Plan a pass over the rows of all requests, in order.

    With `window`, a row at position p attends to positions of its path greater than p - window; None for all.
    """
    blocks: list[RowBlock | Gather] = []
    first = 0
    for rows in requests:
        tail_slots = rows.context_len % PAGE_SIZE + rows.num_slots
        if mode == "gathered" or (not rows.is_chain and tail_slots > MAX_CHAIN):
            blocks.append(_plan_gathered(rows, first, window))
        elif rows.is_chain:
            blocks.extend(_plan_chain(rows, first, num_heads, window))
        else:
            blocks.append(_plan_packed_tree(rows, first, window))
        first += rows.num_rows
    return CpuAttentionPlan(first, tuple(blocks))


def _first_tile(position: int, window: int | None) -> int:
    """Return the first tile that a row at this position attends to."""
    return 0 if window is None else max(position - window + 1, 0) // PAGE_SIZE


def _plan_chain(rows: RequestRows, first: int, num_heads: int, window: int | None) -> list[RowBlock]:
    """Plan a chain: slots equal positions, so tiles are independent. Cuts long chains into row blocks."""
    blocks = []
    num_tiles = (rows.context_len + rows.num_rows - 1) // PAGE_SIZE + 1 - _first_tile(rows.context_len, window)
    step = max(ROW_MULTIPLE, _SCORE_BYTES // (num_tiles * num_heads * PAGE_SIZE * 4))
    full = rows.context_len // PAGE_SIZE
    for start in range(0, rows.num_rows, step):
        stop = min(start + step, rows.num_rows)
        begin, tiles = _first_tile(rows.context_len + start, window), (rows.context_len + stop - 1) // PAGE_SIZE + 1
        masked = min(full, tiles) if window is None else begin  # first masked tile
        columns, positions = np.arange(masked * PAGE_SIZE, tiles * PAGE_SIZE), rows.positions[start:stop, None]
        hidden = columns[None, :] > positions
        if window is not None:
            hidden |= columns[None, :] <= positions - window
        mask = torch.from_numpy(hidden.reshape(stop - start, tiles - masked, PAGE_SIZE)).transpose(0, 1)
        whole = max(full - begin, 0)
        blocks.append(
            RowBlock(
                first + start,
                first + stop,
                _page_index(rows.pages[begin:tiles]),
                whole,
                tiles - begin - whole,
                mask[:, None, :, None, :],
                False,
                (),
                window is not None,
            )
        )
    return blocks


def _plan_packed_tree(rows: RequestRows, first: int, window: int | None) -> RowBlock:
    full = rows.context_len // PAGE_SIZE
    begin = min(_first_tile(int(rows.positions.min()), window), full)
    tail = (rows.context_len + rows.num_slots - 1) // PAGE_SIZE + 1 - full
    assert rows.slot_depths is not None
    masked = full if window is None else begin  # first masked tile
    tiles = full + tail - masked
    hidden = rows.hidden_mask(tiles * PAGE_SIZE, masked * PAGE_SIZE)
    position_tiles: tuple[Tensor, ...] = ()
    if tail > 1 or window is not None:
        position = np.arange(masked * PAGE_SIZE, (full + tail) * PAGE_SIZE)  # by slot; -1 for unused slots
        start = rows.context_len - masked * PAGE_SIZE
        position[start:] = -1
        position[start : start + rows.num_slots] = rows.context_len + rows.slot_depths
        if window is not None:
            hidden |= position[None, :] <= rows.positions[:, None] - window
        if tail > 1:
            in_tile = position[(full - masked) * PAGE_SIZE :] // PAGE_SIZE
            position_tiles = tuple(
                torch.from_numpy((in_tile == tile).astype(np.float32)) for tile in range(full, int(in_tile.max()) + 1)
            )
    mask = torch.from_numpy(hidden.reshape(rows.num_rows, tiles, PAGE_SIZE)).transpose(0, 1)[:, None, :, None, :]
    return RowBlock(
        first,
        first + rows.num_rows,
        _page_index(rows.pages[begin : full + tail]),
        full - begin,
        tail,
        mask,
        tail > 1,
        position_tiles,
        window is not None,
    )


def _plan_gathered(rows: RequestRows, first: int, window: int | None) -> Gather:
    last = rows.context_len + rows.path_lengths - 1  # last position of each row's path
    begin, end = _first_tile(int(last.min()), window), int(last.max()) // PAGE_SIZE + 1
    columns = np.arange(end * PAGE_SIZE)
    logical = np.repeat(columns[None, :], rows.num_rows, axis=0)
    paths = rows.context_len + rows.ancestors
    logical[:, rows.context_len : rows.context_len + paths.shape[1]] = paths[:, : len(columns) - rows.context_len]
    logical, columns = logical[:, begin * PAGE_SIZE :], columns[begin * PAGE_SIZE :]
    hidden = columns[None, :] > last[:, None]
    if window is not None:
        hidden |= columns[None, :] <= last[:, None] - window
    logical[hidden] = 0
    slots = rows.pages[logical // PAGE_SIZE] * PAGE_SIZE + logical % PAGE_SIZE
    shape = (rows.num_rows, end - begin, 1, 1, PAGE_SIZE)
    return Gather(
        first,
        first + rows.num_rows,
        torch.from_numpy(slots),
        torch.from_numpy(hidden.reshape(shape)),
        window is not None,
    )
