"""Work items of a tree-attention pass, built on the host once for all layers.

A fixed partition cuts absolute positions into segments, and each segment is processed in tiles of `block_n` positions.
No boundary depends on a row, a tree or a batch. A work item is one M tile of (row, head) pairs and one range of
positions within a segment:

- a *packed* item computes all rows of a request, from the segment's start up to the tile with the root;
- a *node* item computes one row from the root's tile on, and continues the packed item of that segment;
- a chain (for example a single row) needs only packed items, because all its rows read the same slots.

As the root advances, a position moves from node items to packed items; both run the same compiled kernel.

With a sliding window, a row at position p reads positions p - window + 1 .. p. An item starts at the first tile that
any of its rows reads. Positions before a row's own window are masked; a fully masked tile changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from treespec_kernels.attention.tree_attention_config import TreeAttentionConfig, check_supported
from treespec_kernels.launch.triton_launch import target_of

# Columns of a work item. Rows and heads form one axis: m = row * group + head within the KV group.
ITEM_FIELDS = ("request", "slot_row", "m_lo", "m_hi", "key_lo", "key_hi", "segment", "continues")


class PlanCapacity(NamedTuple):
    """Buffer sizes of a plan that is refilled for a captured CUDA graph."""

    rows: int
    packed_items: int
    node_items: int
    partials: int


@dataclass(frozen=True)
class TreeAttentionPlan:
    """Work items of a pass on the device, and buffers of partial results that every layer overwrites.

    Launch grids have the size of the buffers, and programs past the device-side counts exit at once, so `refill` can
    change the pass of a captured graph.
    """

    config: TreeAttentionConfig
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None  # positions that a row reads, its own included; None for all
    packed_items: torch.Tensor  # [capacity.packed_items, 8] int32, columns ITEM_FIELDS
    num_packed_items: torch.Tensor  # [1] int32
    node_items: torch.Tensor  # [capacity.node_items, 8] int32
    num_node_items: torch.Tensor  # [1] int32
    first_partial: torch.Tensor  # [capacity.rows] int32, index of a row's first partial
    first_segment: torch.Tensor  # [capacity.rows] int32, first segment that a row reads
    num_segments: torch.Tensor  # [capacity.rows] int32, number of segments that a row reads; 0 for padding
    partial_acc: torch.Tensor  # [capacity.partials, num_heads, head_dim] float32, not normalised
    partial_max: torch.Tensor  # [capacity.partials, num_heads] float32, in units of log2
    partial_sum: torch.Tensor  # [capacity.partials, num_heads] float32

    @property
    def capacity(self) -> PlanCapacity:
        return PlanCapacity(
            len(self.first_partial), len(self.packed_items), len(self.node_items), len(self.partial_max)
        )

    @classmethod
    def allocate(
        cls,
        capacity: PlanCapacity,
        config: TreeAttentionConfig,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        window: int | None,
    ) -> TreeAttentionPlan:
        """Allocate uninitialised buffers of these sizes; arguments as in `plan_tree_attention`.

        Raises:
            ValueError: the dtype or head_dim is not supported, num_heads is no multiple of num_kv_heads, or the window
                is empty.
        """
        check_supported(dtype, head_dim)
        group_of(num_heads, num_kv_heads)
        check_window(window)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            config=config,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            window=window,
            packed_items=empty(capacity.packed_items, len(ITEM_FIELDS)),
            num_packed_items=empty(1),
            node_items=empty(capacity.node_items, len(ITEM_FIELDS)),
            num_node_items=empty(1),
            first_partial=empty(capacity.rows),
            first_segment=empty(capacity.rows),
            num_segments=empty(capacity.rows),
            partial_acc=empty(capacity.partials, num_heads, head_dim, dtype=torch.float32),
            partial_max=empty(capacity.partials, num_heads, dtype=torch.float32),
            partial_sum=empty(capacity.partials, num_heads, dtype=torch.float32),
        )

    def with_partials(self, count: int) -> TreeAttentionPlan:
        """Return this plan with new buffers for `count` partial results."""

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=self.partial_acc.device)

        heads = self.num_heads
        return replace(
            self,
            partial_acc=empty(count, heads, self.head_dim),
            partial_max=empty(count, heads),
            partial_sum=empty(count, heads),
        )

    def refill(
        self,
        context_lens: Sequence[int],
        rows_per_request: Sequence[int],
        depths: Sequence[int],
        chains: Sequence[bool] | None = None,
    ) -> None:
        """Plan another pass into the same buffers; arguments as in `plan_tree_attention`.

        Raises:
            ValueError: the pass exceeds the capacity.
        """
        group = group_of(self.num_heads, self.num_kv_heads)
        work = _work_items(context_lens, rows_per_request, depths, chains, group, self.config, self.window)
        if any(size > limit for size, limit in zip(work.capacity, self.capacity, strict=True)):
            raise ValueError(f"the pass needs {work.capacity} and the plan holds {self.capacity}; plan with more")
        self.packed_items[: len(work.packed)].copy_(torch.from_numpy(work.packed))
        self.node_items[: len(work.node)].copy_(torch.from_numpy(work.node))
        self.num_packed_items.fill_(len(work.packed))
        self.num_node_items.fill_(len(work.node))
        for name in ("first_partial", "first_segment", "num_segments"):
            buffer, values = getattr(self, name), getattr(work, name)
            buffer[: len(values)].copy_(torch.from_numpy(values))
            buffer[len(values) :].zero_()


def plan_tree_attention(
    context_lens: Sequence[int],
    rows_per_request: Sequence[int],
    depths: Sequence[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    chains: Sequence[bool] | None = None,
    window: int | None = None,
    config: TreeAttentionConfig | None = None,
    capacity: PlanCapacity | None = None,
) -> TreeAttentionPlan:
    """Build the work items of one pass.

    Args:
        context_lens: number of committed positions L of each request.
        rows_per_request: number of rows of each request, in row order; may be 0.
        depths: depth of each row.
        num_heads, num_kv_heads, head_dim, dtype: of the model; they choose the default configuration.
        device: where the attention runs.
        chains: per request, whether every row is an ancestor of the next one (a prefill chunk). Such rows share all
            keys and need no gathering. None marks only requests of one row. Affects speed, not bits.
        window: number of positions that a row reads, its own included; None for all.
        config: None for `TreeAttentionConfig.default` of the device.
        capacity: buffer sizes; None for the sizes of this pass.

    Raises:
        ValueError: lengths are inconsistent, values are negative, or the depths of a chain do not ascend.
    """
    config = config or TreeAttentionConfig.default(dtype, head_dim, target_of(device))
    if capacity is None:
        check_window(window)
        group = group_of(num_heads, num_kv_heads)
        work = _work_items(context_lens, rows_per_request, depths, chains, group, config, window)
        capacity = work.capacity
    plan = TreeAttentionPlan.allocate(
        capacity,
        config,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        window=window,
    )
    plan.refill(context_lens, rows_per_request, depths, chains)
    return plan


def group_of(num_heads: int, num_kv_heads: int) -> int:
    """Return the number of query heads per KV head. Raises ValueError if it is no integer."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    return num_heads // num_kv_heads


def check_window(window: int | None) -> None:
    """Raise ValueError for a window below 1."""
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be 1 or more, or None for all positions")


class _WorkItems(NamedTuple):
    packed: np.ndarray  # [num_packed, 8] int32
    node: np.ndarray  # [num_node, 8] int32
    first_partial: np.ndarray  # [num_rows] int32, as the next two
    first_segment: np.ndarray
    num_segments: np.ndarray
    capacity: PlanCapacity


def _work_items(
    context_lens: Sequence[int],
    rows_per_request: Sequence[int],
    depths: Sequence[int],
    chains: Sequence[bool] | None,
    group: int,
    config: TreeAttentionConfig,
    window: int | None,
) -> _WorkItems:
    """Compute the work items, vectorised because a pass may have thousands of them."""
    lengths, num_rows_of, depth = (np.array(x, dtype=np.int64) for x in (context_lens, rows_per_request, depths))
    if len(lengths) != len(num_rows_of) or num_rows_of.sum() != len(depth):
        raise ValueError(
            f"{len(lengths)} context_lens, {len(num_rows_of)} rows_per_request that sum to {num_rows_of.sum()}, "
            f"{len(depth)} depths: one length and row count per request and one depth per row are needed"
        )
    for name, values in (("context_lens", lengths), ("rows_per_request", num_rows_of), ("depths", depth)):
        if (values < 0).any():
            raise ValueError(f"{name} holds {values.min()}; it must not be negative")
    chain = num_rows_of <= 1
    if chains is not None:
        if len(chains) != len(lengths):
            raise ValueError(f"chains has {len(chains)} entries; expected {len(lengths)}, one per request")
        chain = chain | np.array(chains, dtype=bool)
    request = np.repeat(np.arange(len(lengths)), num_rows_of)
    same_chain = chain[request[1:]] & (request[1:] == request[:-1])
    if (same_chain & (depth[1:] <= depth[:-1])).any():
        raise ValueError(f"depths {depth.tolist()} of a chain must ascend")

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

    capacity = PlanCapacity(len(depth), len(packed), len(node), int(num_segments.sum()))
    arrays = (packed, node, first_partial, first_segment, num_segments)
    return _WorkItems(*(array.astype(np.int32) for array in arrays), capacity)


def _enumerate(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Expand counts: [2, 0, 3] gives owners [0, 0, 2, 2, 2] and indices within the owner [0, 1, 0, 1, 2]."""
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
