"""Pass layout: its sizes, and what is refused."""

from typing import Any

import pytest
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


def test_what_does_not_fit_is_refused() -> None:
    for change, message in [
        ({"shape": SHAPE._replace(window=0)}, "window is 0; it must be 1 or more, or None"),
        ({"shape": SHAPE._replace(num_heads=9)}, "9 query heads are not a multiple of 2 KV heads"),
    ]:
        sizes = {"num_requests": 1, "rows_per_request": 2, "width": 2, "shape": SHAPE, "chain": False}
        with pytest.raises(ValueError, match=message):
            DeviceLayout.allocate(**(sizes | OPTIONS | change))

    layout = DeviceLayout.allocate(2, 3, 4, SHAPE, chain=False, **OPTIONS)
    shapes = {"context_lens": (2,), "page_table": (2, 5), "depths": (2, 3), "row_slots": (2, 3), "ancestors": (2, 3, 4)}
    fitting = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    zeros = torch.zeros(2, 3, dtype=torch.int32)
    for name, tensor, message in [
        ("depths", zeros.view(-1), r"depths has shape \[6\]; expected \[num_requests 2, rows_per_request 3\]"),
        ("row_slots", zeros.T.contiguous().T, r"row_slots has strides \[1, 2\] .*; make it contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            layout.fill(**(fitting | {name: tensor}))
