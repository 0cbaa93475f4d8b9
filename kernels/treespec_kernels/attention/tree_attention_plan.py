"""Work items of a tree-attention pass, built on the host once for all layers.

A fixed partition cuts absolute positions into segments, and each segment is processed in tiles of `block_n` positions.
The boundaries do not depend on rows, trees or batches. A work item is one M tile of (row, head) pairs and one range of
positions within a segment:

- a *packed* item computes all rows of a request, from the segment's start up to the tile with the root;
- a *node* item computes one row from the root's tile on, and continues the packed item of that segment;
- a chain (for example a single row) needs only packed items, because all its rows read the same slots.

As the root advances, a position moves from node items to packed items; both run the same compiled kernel.

With a sliding window, a row at position p reads positions p - window + 1 .. p. An item starts at the first tile that
any of its rows reads. Positions before a row's own window are masked; a fully masked tile changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch

from treespec_kernels.attention.tree_attention_config import TreeAttentionConfig, check_supported
from treespec_kernels.launch.triton_launch import target_of

# Columns of a work item. Rows and heads form one axis: m = row * group + head within the KV group.
ITEM_FIELDS = ("request", "slot_row", "m_lo", "m_hi", "key_lo", "key_hi", "segment", "continues")


class AttentionShape(NamedTuple):
    """Sizes of tree attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None  # number of positions that a row reads, including its own; None for all

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def check(self) -> None:
        """Raise ValueError for an unsupported dtype or head_dim, a fractional group, or an empty window."""
        check_supported(self.dtype, self.head_dim)
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} KV heads")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; it must be 1 or more, or None for all positions")


class Partials(NamedTuple):
    """Unnormalised results of segments, overwritten by every layer."""

    acc: torch.Tensor  # [num_partials, num_heads, head_dim] float32
    max: torch.Tensor  # [num_partials, num_heads] float32, in units of log2
    sum: torch.Tensor  # [num_partials, num_heads] float32

    @classmethod
    def allocate(cls, count: int, shape: AttentionShape, device: torch.device | str) -> Self:
        sizes = (count, shape.num_heads, shape.head_dim), (count, shape.num_heads), (count, shape.num_heads)
        return cls(*(torch.empty(size, dtype=torch.float32, device=device) for size in sizes))


@dataclass(frozen=True)
class TreeAttentionPlan:
    """Work items of a pass on the device, and buffers of partial results. Some items may have no keys."""

    config: TreeAttentionConfig
    shape: AttentionShape
    packed_items: torch.Tensor  # [num_packed, 8] int32, columns ITEM_FIELDS
    node_items: torch.Tensor  # [num_node, 8] int32
    first_partial: torch.Tensor  # [num_rows] int32, index of a row's first partial
    first_segment: torch.Tensor  # [num_rows] int32, first segment that a row reads
    num_segments: torch.Tensor  # [num_rows] int32, number of segments that a row reads; 0 for padding
    partials: Partials


def plan_tree_attention(
    context_lens: Sequence[int],  # number of committed positions L of each request
    rows_per_request: Sequence[int],  # number of rows of each request, in row order; may be 0
    depths: Sequence[int],  # depth of each row
    shape: AttentionShape,
    *,
    device: torch.device | str,  # device of the attention
    # Per request, whether every row is an ancestor of the next one (a prefill chunk). Such rows share all keys and need
    # no gathering. None: only requests with one row. Affects speed, not bits
    chains: Sequence[bool] | None = None,
    config: TreeAttentionConfig | None = None,  # None for the device's `TreeAttentionConfig.default`
    # Number of rows of the pass, including padding after the planned rows; None for no padding
    num_rows: int | None = None,
) -> TreeAttentionPlan:
    """Build the work items of one pass."""
    shape.check()
    config = config or TreeAttentionConfig.default(shape.dtype, shape.head_dim, target_of(device))
    packed, node, *by_row = _work_items(context_lens, rows_per_request, depths, chains, shape, config)
    padding = 0 if num_rows is None else num_rows - len(depths)
    arrays = packed, node, *(np.pad(values, (0, padding)) for values in by_row)
    packed_items, node_items, *of_rows = (torch.from_numpy(array.astype(np.int32)).to(device) for array in arrays)
    partials = Partials.allocate(int(by_row[2].sum()), shape, device)
    first_partial, first_segment, num_segments = of_rows
    columns = packed_items, node_items, first_partial, first_segment, num_segments
    return TreeAttentionPlan(config, shape, *columns, partials)


def _work_items(
    context_lens: Sequence[int],
    rows_per_request: Sequence[int],
    depths: Sequence[int],
    chains: Sequence[bool] | None,
    shape: AttentionShape,
    config: TreeAttentionConfig,
) -> tuple[np.ndarray, ...]:
    """Compute the work items and the per-row numbers, vectorised because a pass may have thousands of items.

    Returns:
        packed and node items, [num_items, 8], then first_partial, first_segment and num_segments, [num_rows].
    """
    group, window = shape.group, shape.window
    lengths, num_rows_of, depth = (np.array(x, dtype=np.int64) for x in (context_lens, rows_per_request, depths))
    assert len(lengths) == len(num_rows_of) and num_rows_of.sum() == len(depth)
    chain = num_rows_of <= 1
    if chains is not None:
        chain = chain | np.array(chains, dtype=bool)
    request = np.repeat(np.arange(len(lengths)), num_rows_of)
    same_chain = chain[request[1:]] & (request[1:] == request[:-1])
    assert not (same_chain & (depth[1:] <= depth[:-1])).any(), "the depths of a chain ascend"

    position = lengths[request] + depth
    start = np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)
    start_tile = start // config.block_n * config.block_n
    first_segment = config.partition.segment_of(start)
    num_segments = config.partition.segment_of(position) + 1 - first_segment
    first_partial = np.cumsum(num_segments) - num_segments

    # Packed items: M tiles over all rows of a request. A chain's tile extends to its last position.
    first_m = (np.cumsum(num_rows_of) - num_rows_of) * group
    tile_request, i_tile = _enumerate((num_rows_of * group + config.block_m - 1) // config.block_m)
    m_lo = first_m[tile_request] + i_tile * config.block_m
    m_hi = np.minimum(m_lo + config.block_m, first_m[tile_request] + num_rows_of[tile_request] * group)
    first_row, last_row = m_lo // group, (m_hi - 1) // group
    spans = np.stack([first_row, last_row + 1], axis=1).ravel()
    key_lo = np.minimum.reduceat(np.append(start_tile, 0), spans)[::2]  # rows of a tile are unordered
    root_tile = lengths // config.block_n * config.block_n
    key_hi = np.where(
        chain[tile_request], np.maximum.reduceat(np.append(position, 0), spans)[::2] + 1, root_tile[tile_request]
    )
    packed = _cut(tile_request, last_row, m_lo, m_hi, key_lo, key_hi, np.zeros_like(key_lo), config)
    # M tiles of one segment are adjacent, so that all but the first read its keys from L2.
    packed = packed[np.argsort(packed[:, ITEM_FIELDS.index("segment")], kind="stable")]

    # Node items: every row of a tree, from the root's tile on. A group of more than block_m heads has several M tiles.
    tree_rows = np.flatnonzero(~chain[request])
    tree_row, i_tile = _enumerate(np.full(len(tree_rows), (group + config.block_m - 1) // config.block_m))
    row = tree_rows[tree_row]
    m_lo = row * group + i_tile * config.block_m
    m_hi = np.minimum(m_lo + config.block_m, (row + 1) * group)
    key_lo = np.maximum(root_tile[request[row]], start_tile[row])
    # A row whose window starts at the root's tile or later has no packed item to continue.
    shared = start[row] < root_tile[request[row]]
    node = _cut(request[row], row, m_lo, m_hi, key_lo, position[row] + 1, shared, config)
    return packed, node, first_partial, first_segment, num_segments


def _enumerate(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Expand counts: [2, 0, 3] returns owners [0, 0, 2, 2, 2] and indices within each owner [0, 1, 0, 1, 2]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def _cut(
    request: np.ndarray,
    slot_row: np.ndarray,
    m_lo: np.ndarray,
    m_hi: np.ndarray,
    key_lo: np.ndarray,
    key_hi: np.ndarray,
    shared: np.ndarray,
    config: TreeAttentionConfig,
) -> np.ndarray:
    """Cut the range [key_lo, key_hi) of every entry at segment boundaries into items, [num_items, 8] int64.

    An item of a `shared` entry that starts inside its segment continues that segment's packed item.
    """
    first = config.partition.segment_of(key_lo)
    owner, offset = _enumerate(np.where(key_hi > key_lo, config.partition.segment_of(key_hi - 1) - first + 1, 0))
    segment = first[owner] + offset
    start, end = config.partition.start_of(segment), config.partition.start_of(segment + 1)
    lo, hi = np.maximum(key_lo[owner], start), np.minimum(key_hi[owner], end)
    continues = (lo > start) & shared[owner].astype(bool)
    return np.stack([request[owner], slot_row[owner], m_lo[owner], m_hi[owner], lo, hi, segment, continues], axis=1)
