"""Pass layout: plans a tree-attention pass on the device, for trees that are never copied to the host.

A pass has a fixed shape, `num_requests` x `rows_per_request` rows, so that it can run in a captured CUDA graph. Rows
with depth -1 are padding; they may be anywhere in a tree, but only at the end of a chain. A request with only padding
rows is idle. There are two kinds of passes:

- *trees*: any rows of a request's token tree (a target pass, or one draft level);
- *chains*: row i of a request is the i-th of consecutive tokens (a draft pass over the accepted tokens); the number of
  rows may differ per request.

The layout reserves all work items that a pass of this shape may need. Unused items are written as empty, and their
programs exit immediately. Results are bit-identical to those of `plan_tree_attention` for the same pass, because both
cut the same positions into the same tiles and segments.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from treespec_kernels.attention.tree_attention_config import TreeAttentionConfig
from treespec_kernels.attention.tree_attention_plan import ITEM_FIELDS, AttentionShape, Partials, TreeAttentionPlan
from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.triton_launch import load_kernels, target_of

BLOCK_R = 64  # rows per program
BLOCK_S = 32  # segments per step of a program: 8192 positions in segments of 256
NUM_WARPS = 1

_NO_BOUND = 1 << 30  # greater than every position


class PassPlaces(NamedTuple):
    """Positions and cache slots of the rows of a pass."""

    positions: torch.Tensor  # [num_rows] int32, absolute; 0 for padding
    slots: torch.Tensor  # [num_rows] int64, page * page_size + offset of the row's own K/V; 0 for padding


def pass_layout_ref(
    context_lens: torch.Tensor,  # [num_requests] int32, number of committed positions L
    page_table: torch.Tensor,  # [num_requests, max_pages] int32
    depths: torch.Tensor,  # [num_requests, rows_per_request] int32, -1 for padding
    row_slots: torch.Tensor,  # [num_requests, rows_per_request] int32; a row's own K/V go to logical slot L + row_slots
    *,
    page_size: int = 64,  # slots per page
) -> PassPlaces:
    """Compute positions and slots of a pass (reference; `plan_tree_attention` is the reference of the plan)."""
    positions = torch.zeros(depths.numel(), dtype=torch.int32, device=depths.device)
    slots = torch.zeros(depths.numel(), dtype=torch.int64, device=depths.device)
    for row, depth in enumerate(depths.flatten().tolist()):
        if depth < 0:
            continue
        request = row // depths.shape[1]
        length = int(context_lens[request])
        slot = length + int(row_slots.flatten()[row])
        positions[row] = length + depth
        slots[row] = int(page_table[request, slot // page_size]) * page_size + slot % page_size
    return PassPlaces(positions, slots)


@dataclass(frozen=True)
class DeviceLayout:
    """Buffers of one pass shape, allocated by `allocate` and rewritten by `fill` for each pass."""

    num_requests: int
    rows_per_request: int
    width: int  # maximum depth + 1
    chain: bool
    max_context: int
    page_size: int
    positions: torch.Tensor  # [num_rows] int32, as in `PassPlaces`
    slots: torch.Tensor  # [num_rows] int64
    row_request: torch.Tensor  # [num_rows] int32, index of each row's request
    chain_slots: torch.Tensor  # [num_requests, rows_per_request] int32; row i of a chain has tree slot i
    chain_ancestors: torch.Tensor  # [num_rows, width] int32, earlier rows of a chain; a view of a single row
    plan: TreeAttentionPlan
    partials_per_pass: int  # number of partial results to allocate in every pass; 0 if the plan owns them

    @property
    def num_rows(self) -> int:
        """Number of rows of a pass, including padding."""
        return self.num_requests * self.rows_per_request

    @classmethod
    def allocate(
        cls,
        num_requests: int,  # shape of the pass, including idle requests and padding rows
        rows_per_request: int,
        width: int,  # number of columns of `ancestors`, greater than every depth; for a chain usually rows_per_request
        shape: AttentionShape,
        *,
        chain: bool,  # whether the passes are chains
        # Maximum number of committed positions of a request. Partial results take num_rows * segments * num_heads *
        # (head_dim + 2) * 4 bytes, and every launch has programs for all segments, so graphs of short contexts should
        # have their own layout
        max_context: int,
        device: torch.device | str,
        config: TreeAttentionConfig | None = None,
        page_size: int = 64,  # slots per page of the cache
        # Whether the layout owns the memory of partial results; False allocates it for each pass, so captured graphs
        # can share it
        keeps_partials: bool = True,
    ) -> Self:
        """Allocate a layout for passes of this shape."""
        assert min(num_requests, rows_per_request, width, page_size) >= 1 and max_context >= 0
        shape.check()
        config = config or TreeAttentionConfig.default(shape.dtype, shape.head_dim, target_of(device))
        num_rows = num_requests * rows_per_request
        bounds = _segment_bounds(config, rows_per_request, width, chain, max_context, shape)
        num_packed = bounds.packed * num_requests * -(-rows_per_request * shape.group // config.block_m)
        num_node = 0 if chain else bounds.node * num_rows * -(-shape.group // config.block_m)

        def integers(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        def numbers(count: int) -> torch.Tensor:
            return torch.arange(count, dtype=torch.int32, device=device)

        return cls(
            num_requests=num_requests,
            rows_per_request=rows_per_request,
            width=width,
            chain=chain,
            max_context=max_context,
            page_size=page_size,
            positions=integers(num_rows).zero_(),
            slots=torch.zeros(num_rows, dtype=torch.int64, device=device),
            row_request=numbers(num_requests).repeat_interleave(rows_per_request),
            chain_slots=numbers(rows_per_request).repeat(num_requests, 1),
            chain_ancestors=numbers(width).expand(num_rows, -1),
            plan=TreeAttentionPlan(
                config,
                shape,
                packed_items=integers(num_packed, len(ITEM_FIELDS)),
                node_items=integers(num_node, len(ITEM_FIELDS)),
                first_partial=numbers(num_rows) * bounds.row,
                first_segment=integers(num_rows),
                num_segments=integers(num_rows),
                partials=Partials.allocate(num_rows * bounds.row if keeps_partials else 0, shape, device),
            ),
            partials_per_pass=0 if keeps_partials else num_rows * bounds.row,
        )

    def fill(
        self,
        context_lens: torch.Tensor,
        page_table: torch.Tensor,
        depths: torch.Tensor,
        row_slots: torch.Tensor | None = None,
        ancestors: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """Plan a pass in one launch without a host sync. Allocates nothing if the layout keeps its partials.

        Args:
            context_lens, page_table, depths, row_slots: as in `pass_layout_ref`. A row whose slot or position exceeds
                the page table, `max_context` or `width` is treated as padding.
            ancestors: [num_requests, rows_per_request, width] int32, as in `tree_attention_ref`; arbitrary for padding.

        Chains may omit row_slots and ancestors: row i then has tree slot i, and all earlier rows as ancestors.

        Returns:
            The keyword arguments of `tree_attention_triton` for this pass, except `scale` and `out`.
        """
        assert self.chain or (row_slots is not None and ancestors is not None), "only a chain may omit them"
        row_slots = self.chain_slots if row_slots is None else row_slots
        sizes = {"num_requests": self.num_requests, "rows_per_request": self.rows_per_request, "width": self.width}
        check_arguments(
            sizes,
            slots=(self.slots, "_", torch.int64),
            context_lens=(context_lens, "num_requests", torch.int32),
            page_table=(page_table, "num_requests max_pages", torch.int32),
            depths=(depths, "[num_requests rows_per_request]", torch.int32),
            row_slots=(row_slots, "[num_requests rows_per_request]", torch.int32),
            ancestors=(ancestors, "[num_requests rows_per_request width]", torch.int32),
        )
        kernels = load_kernels("attention.pass_layout", context_lens)
        plan, config, shape = self.plan, self.plan.config, self.plan.shape
        group = shape.group
        num_tiles = -(-self.rows_per_request * group // config.block_m)
        tiles_of_group = -(-group // config.block_m)
        row_blocks = -(-self.rows_per_request // BLOCK_R)
        kernels.lay_out_pass[(self.num_requests, num_tiles + row_blocks)](
            *(context_lens, page_table, depths, row_slots, self.positions, self.slots),
            *(plan.first_segment, plan.num_segments, plan.packed_items, plan.node_items),
            self.num_requests,
            self.rows_per_request,
            self.width,
            self.max_context,
            page_table.shape[1] * self.page_size,
            num_tiles,
            len(plan.packed_items) // (self.num_requests * num_tiles),
            len(plan.node_items) // (self.num_rows * tiles_of_group),
            _NO_BOUND if shape.window is None else shape.window,
            page_table.stride(0),
            CHAIN=self.chain,
            GROUP=group,
            PAGE_SIZE=self.page_size,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            SHORT=config.partition.short,
            LONG=config.partition.long,
            LONG_FROM=config.partition.long_from,
            TILES_OF_GROUP=tiles_of_group,
            ROWS_OF_TILE=rows_of_tile(config, group),
            BLOCK_R=BLOCK_R,
            BLOCK_S=BLOCK_S,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
        seen = self.chain_ancestors if ancestors is None else ancestors.view(self.num_rows, self.width)
        if self.partials_per_pass:
            plan = replace(plan, partials=Partials.allocate(self.partials_per_pass, shape, context_lens.device))
        tables = {"row_request": self.row_request, "context_lens": context_lens, "page_table": page_table}
        return {**tables, "depths": depths.view(-1), "ancestors": seen, "window": shape.window, "plan": plan}


def rows_of_tile(config: TreeAttentionConfig, group: int) -> int:
    """Return the maximum number of rows in one M tile, rounded up to a power of two.

    A group that does not divide the tile adds a partial row.
    """
    most = -(-config.block_m // group) + (config.block_m % group > 0)
    return 1 << (most - 1).bit_length()


class _SegmentBounds(NamedTuple):
    """Maximum numbers of segments."""

    packed: int  # maximum for one M tile
    node: int  # maximum for one node, from the root's tile on
    row: int  # maximum for one row


def _segment_bounds(
    config: TreeAttentionConfig, rows_per_request: int, width: int, chain: bool, max_context: int, shape: AttentionShape
) -> _SegmentBounds:
    """Return the maximum number of segments that the keys of an M tile, a node or a row can span."""
    last_position = max_context + width - 1

    def up_to(position: int) -> int:
        return int(config.partition.segment_of(np.array(position))) + 1

    def touched(num_positions: int, alignment: int) -> int:
        """Return the maximum number of segments that `num_positions` consecutive positions span.

        The first position is a multiple of `alignment`.
        """
        smallest = min(config.partition.short, config.partition.long)
        return min(up_to(last_position), 1 + (smallest - alignment + num_positions - 1) // smallest)

    packed = up_to(last_position if chain else max(max_context - 1, 0))
    row = up_to(last_position)
    if shape.window is not None:
        # A tile starts up to block_n - 1 positions before the window of its first row.
        span = config.block_n + shape.window - 1
        span += min(rows_per_request, rows_of_tile(config, shape.group)) if chain else 0
        packed, row = min(packed, touched(span, config.block_n)), touched(shape.window, 1)
    return _SegmentBounds(packed, touched(config.block_n + width - 1, config.block_n), row)
