"""Pass layout: its sizes, and what is refused."""

from typing import Any

import torch

from treespec_kernels.attention.pass_layout import DeviceLayout, pass_layout_ref
from treespec_kernels.attention.tree_attention import AttentionShape, SegmentPartition, TreeAttentionConfig

SHAPE = AttentionShape(8, 2, 16, torch.float32)
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_context": 100,
    "config": TreeAttentionConfig(16, 16, 4, 2, SegmentPartition(32, 64, 64)),
}


def test_ref_places_rows_in_pages() -> None:
    def integers(*values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    places = pass_layout_ref(
        integers(5, 8),
        integers([3, 9, 7], [1, 2, 4]),
        integers([0, 2], [-1, 1]),
        integers([0, 4], [99, 0]),
        page_size=4,
    )
    assert places.positions.tolist() == [5, 7, 0, 9]
    assert places.slots.tolist() == [9 * 4 + 1, 7 * 4 + 1, 0, 4 * 4]


def sizes_of(layout: DeviceLayout) -> tuple[int, ...]:
    """Rows, packed items, node items and partial results."""
    plan = layout.plan
    return tuple(map(len, (plan.first_partial, plan.packed_items, plan.node_items, plan.partials.acc)))


def test_sizes_follow_the_shape_alone() -> None:
    layout = DeviceLayout.allocate(3, 10, 5, SHAPE, chain=False, **OPTIONS)
    # 40 (row, head) pairs of a request in 3 M tiles; positions below 100 in 3 segments; 4 depths more touch 3, too.
    # From the root's tile on a row touches at most 2 segments.
    assert sizes_of(layout) == (30, 3 * 3 * 3, 30 * 2, 30 * 3)
    chain = DeviceLayout.allocate(3, 10, 10, SHAPE, chain=True, **OPTIONS)
    assert sizes_of(chain) == (30, 3 * 3 * 3, 0, 30 * 3)
    options = OPTIONS | {"max_context": 100_000}
    windowed = DeviceLayout.allocate(3, 10, 5, SHAPE._replace(window=9), chain=False, **options)
    assert sizes_of(windowed) == (30, 3 * 3 * 2, 30 * 2, 30 * 2)
