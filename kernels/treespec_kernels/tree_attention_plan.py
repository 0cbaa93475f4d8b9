"""The plan of a tree-attention pass: which rows read which positions together. Built on the host, once for all layers.

Absolute positions are cut by one fixed partition into segments, and each segment is processed in tiles of `block_n`
positions, never along borders that depend on a row, a tree or a batch. A work item is one M tile of (row, head) pairs
and one range of positions inside one segment:

- a *packed* item serves all rows of a request at once, from the segment's start up to the tile that holds the root;
- a *node* item serves one row from the root's tile on, and continues from what the packed item of that segment left;
- a request that is a chain (a single row is one) needs packed items alone: all its rows see the same slots.

As the root advances, a position moves from node items to packed items; both run the same compiled kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

# Columns of a work item. Rows and heads are one axis: m = row * group + head within the KV group.
ITEM_FIELDS = ("request", "slot_row", "m_lo", "m_hi", "key_lo", "key_hi", "segment", "continues")


@dataclass(frozen=True)
class SegmentPartition:
    """Segments of `short` positions below `long_from`, of `long` positions from there on."""

    short: int = 256
    long: int = 1024
    long_from: int = 8192

    def __post_init__(self) -> None:
        if self.short < 1 or self.long < 1 or self.long_from < 0 or self.long_from % self.short:
            raise ValueError(f"{self}: sizes must be positive and long_from a multiple of short")

    def segment_of(self, position: np.ndarray) -> np.ndarray:
        beyond = np.maximum(position - self.long_from, 0)
        return np.minimum(position, self.long_from) // self.short + beyond // self.long

    def start_of(self, segment: np.ndarray) -> np.ndarray:
        num_short = self.long_from // self.short
        return np.minimum(segment, num_short) * self.short + np.maximum(segment - num_short, 0) * self.long


@dataclass(frozen=True)
class TreeAttentionConfig:
    """What the bits depend on beside the inputs: frozen for an engine's life. Launch options are part of it, because
    another number of warps may reduce a tile in another order."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    partition: SegmentPartition = field(default_factory=SegmentPartition)
    fixed_order_dot: bool = False  # for tests in the interpreter, whose dot is BLAS and not row-invariant

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} is {size}; it must be a power of two, 16 or more")
        for name in ("short", "long", "long_from"):
            if getattr(self.partition, name) % self.block_n:
                raise ValueError(f"{name} of {self.partition} is not a multiple of block_n {self.block_n}")

    @classmethod
    def default(cls, dtype: torch.dtype, head_dim: int) -> TreeAttentionConfig:
        """The shipped configuration. M = 64 is one `wgmma` on sm_90: 16 nodes of a group of 4 heads in one tile.
        float32 has no exact matrix instruction; its tiles are the largest that spill on neither sm_80 nor sm_90."""
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(f"dtype {dtype} is not supported; use float16, bfloat16 or float32")
        if not 1 <= head_dim <= 256:
            raise ValueError(f"head_dim {head_dim} is not supported; use 1 to 256")
        if dtype == torch.float32 and head_dim <= 128:
            return cls(block_m=16, block_n=16, num_warps=4, num_stages=2)
        if dtype == torch.float32:
            return cls(block_m=16, block_n=32, num_warps=8, num_stages=2)
        if head_dim <= 64:
            return cls(block_m=64, block_n=64, num_warps=4, num_stages=3)
        return cls(block_m=64, block_n=64 if head_dim <= 128 else 32, num_warps=8, num_stages=3)


class PlanCapacity(NamedTuple):
    """Sizes of a plan's buffers, for a plan that is refilled under a captured CUDA graph."""

    rows: int
    packed_items: int
    node_items: int
    partials: int


@dataclass(frozen=True)
class TreeAttentionPlan:
    """Work items on the device, and the partial results that every layer of the pass writes anew.

    Grids have the size of the buffers; programs past the device-side counts exit at once, so `refill` changes a pass
    under a captured graph.
    """

    config: TreeAttentionConfig
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    packed_items: torch.Tensor  # [capacity.packed_items, 8] int32, columns ITEM_FIELDS
    num_packed_items: torch.Tensor  # [1] int32
    node_items: torch.Tensor  # [capacity.node_items, 8] int32
    num_node_items: torch.Tensor  # [1] int32
    first_partial: torch.Tensor  # [capacity.rows + 1] int32: row r has partials first_partial[r] + segment
    partial_acc: torch.Tensor  # [capacity.partials, num_heads, head_dim] float32, not normalised
    partial_max: torch.Tensor  # [capacity.partials, num_heads] float32, in units of log2
    partial_sum: torch.Tensor  # [capacity.partials, num_heads] float32

    @property
    def capacity(self) -> PlanCapacity:
        return PlanCapacity(
            self.first_partial.numel() - 1, len(self.packed_items), len(self.node_items), len(self.partial_max)
        )

    def refill(
        self,
        context_lens: Sequence[int],
        rows_per_request: Sequence[int],
        depths: Sequence[int],
        chains: Sequence[bool] | None = None,
    ) -> None:
        """Plans another pass into the same buffers; arguments as in `plan_tree_attention`.

        Raises:
            ValueError: the pass does not fit the capacity, which it names.
        """
        work = _work_items(
            context_lens, rows_per_request, depths, chains, self.num_heads // self.num_kv_heads, self.config
        )
        if any(needed > held for needed, held in zip(work.capacity, self.capacity, strict=True)):
            raise ValueError(f"the pass needs {work.capacity} and the plan holds {self.capacity}; plan with more")
        self.packed_items[: len(work.packed)].copy_(torch.from_numpy(work.packed))
        self.node_items[: len(work.node)].copy_(torch.from_numpy(work.node))
        self.num_packed_items.fill_(len(work.packed))
        self.num_node_items.fill_(len(work.node))
        self.first_partial[: len(work.first_partial)].copy_(torch.from_numpy(work.first_partial))
        self.first_partial[len(work.first_partial) :].fill_(work.capacity.partials)


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
    config: TreeAttentionConfig | None = None,
    capacity: PlanCapacity | None = None,
) -> TreeAttentionPlan:
    """Builds the work items of one pass.

    Args:
        context_lens: committed positions L per request.
        rows_per_request: rows of the pass per request, in row order; 0 is allowed.
        depths: depth of every row.
        num_heads, num_kv_heads, head_dim, dtype: of the model; they choose the default configuration.
        device: where the attention runs.
        chains: per request, whether every row is an ancestor of the next one (a prefill chunk). Such rows share all
            keys and are not gathered one by one. None: only requests of one row. It changes the cost, never the bits.
        config: None takes `TreeAttentionConfig.default(dtype, head_dim)`.
        capacity: sizes of the buffers; None takes exactly what this pass needs.

    Raises:
        ValueError: lengths that do not fit each other, negative values, a chain whose depths do not ascend.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    config = config or TreeAttentionConfig.default(dtype, head_dim)
    if capacity is None:
        capacity = _work_items(
            context_lens, rows_per_request, depths, chains, num_heads // num_kv_heads, config
        ).capacity

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    plan = TreeAttentionPlan(
        config=config,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        packed_items=empty(capacity.packed_items, len(ITEM_FIELDS), dtype=torch.int32),
        num_packed_items=empty(1, dtype=torch.int32),
        node_items=empty(capacity.node_items, len(ITEM_FIELDS), dtype=torch.int32),
        num_node_items=empty(1, dtype=torch.int32),
        first_partial=empty(capacity.rows + 1, dtype=torch.int32),
        partial_acc=empty(capacity.partials, num_heads, head_dim, dtype=torch.float32),
        partial_max=empty(capacity.partials, num_heads, dtype=torch.float32),
        partial_sum=empty(capacity.partials, num_heads, dtype=torch.float32),
    )
    plan.refill(context_lens, rows_per_request, depths, chains)
    return plan


class _WorkItems(NamedTuple):
    packed: np.ndarray  # [num_packed, 8] int32
    node: np.ndarray  # [num_node, 8] int32
    first_partial: np.ndarray  # [num_rows + 1] int32
    capacity: PlanCapacity


def _work_items(
    context_lens: Sequence[int],
    rows_per_request: Sequence[int],
    depths: Sequence[int],
    chains: Sequence[bool] | None,
    group: int,
    config: TreeAttentionConfig,
) -> _WorkItems:
    """Vectorised over all requests, rows and segments: a pass may have thousands of items."""
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
    first_partial = np.concatenate([[0], np.cumsum(config.partition.segment_of(position) + 1)])

    # Packed: M tiles over all rows of a request; a chain's tile reaches up to its own last row.
    first_m = (np.cumsum(num_rows_of) - num_rows_of) * group
    of_tile, i_tile = _enumerate((num_rows_of * group + config.block_m - 1) // config.block_m)
    m_lo = first_m[of_tile] + i_tile * config.block_m
    m_hi = np.minimum(m_lo + config.block_m, first_m[of_tile] + num_rows_of[of_tile] * group)
    last_row = (m_hi - 1) // group
    root_tile = lengths // config.block_n * config.block_n
    key_hi = np.where(chain[of_tile], position[last_row] + 1, root_tile[of_tile])
    packed = _cut(of_tile, last_row, m_lo, m_hi, np.zeros_like(key_hi), key_hi, config)
    # M tiles of one segment follow each other, so that they find its keys in L2.
    packed = packed[np.argsort(packed[:, ITEM_FIELDS.index("segment")], kind="stable")]

    # Node: every row of a tree, from the root's tile on. A group of more heads than block_m takes several M tiles.
    tree_rows = np.flatnonzero(~chain[request])
    of_row, i_tile = _enumerate(np.full(len(tree_rows), (group + config.block_m - 1) // config.block_m))
    row = tree_rows[of_row]
    m_lo = row * group + i_tile * config.block_m
    m_hi = np.minimum(m_lo + config.block_m, (row + 1) * group)
    node = _cut(request[row], row, m_lo, m_hi, root_tile[request[row]], position[row] + 1, config)

    capacity = PlanCapacity(len(depth), len(packed), len(node), int(first_partial[-1]))
    return _WorkItems(packed.astype(np.int32), node.astype(np.int32), first_partial.astype(np.int32), capacity)


def _enumerate(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[2, 0, 3] -> owners [0, 0, 2, 2, 2] and indices within the owner [0, 1, 0, 1, 2]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def _cut(
    request: np.ndarray,
    slot_row: np.ndarray,
    m_lo: np.ndarray,
    m_hi: np.ndarray,
    key_lo: np.ndarray,
    key_hi: np.ndarray,
    config: TreeAttentionConfig,
) -> np.ndarray:
    """Cuts [key_lo, key_hi) of every entry at the segment borders. Returns items, [num_items, 8] int64."""
    first = config.partition.segment_of(key_lo)
    owner, offset = _enumerate(np.where(key_hi > key_lo, config.partition.segment_of(key_hi - 1) - first + 1, 0))
    segment = first[owner] + offset
    start, end = config.partition.start_of(segment), config.partition.start_of(segment + 1)
    lo, hi = np.maximum(key_lo[owner], start), np.minimum(key_hi[owner], end)
    return np.stack([request[owner], slot_row[owner], m_lo[owner], m_hi[owner], lo, hi, segment, lo > start], axis=1)
