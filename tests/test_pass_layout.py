"""Pass layout: its sizes, and what is refused."""

from typing import Any

import pytest
import torch

from treespec_kernels.attention.pass_layout import DeviceLayout, pass_layout_ref
from treespec_kernels.attention.tree_attention import SegmentPartition, TreeAttentionConfig

MODEL: dict[str, Any] = {
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 16,
    "dtype": torch.float32,
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


def test_sizes_follow_the_shape_alone() -> None:
    layout = DeviceLayout.allocate(3, 10, 5, chain=False, **MODEL)
    # 40 (row, head) pairs of a request in 3 M tiles; positions below 100 in 3 segments; 4 depths more touch 3, too.
    # From the root's tile on a row touches at most 2 segments.
    assert layout.plan.capacity == (30, 3 * 3 * 3, 30 * 2, 30 * 3)
    chain = DeviceLayout.allocate(3, 10, 10, chain=True, **MODEL)
    assert chain.plan.capacity == (30, 3 * 3 * 3, 0, 30 * 3)
    windowed = DeviceLayout.allocate(3, 10, 5, chain=False, window=9, **(MODEL | {"max_context": 100_000}))
    assert windowed.plan.capacity == (30, 3 * 3 * 2, 30 * 2, 30 * 2)


def test_what_does_not_fit_is_refused() -> None:
    for change, message in [
        ({"num_requests": 0}, "num_requests is 0; it must be 1 or more"),
        ({"width": 0}, "width is 0; it must be 1 or more"),
        ({"max_context": -1}, "max_context is -1; it must not be negative"),
        ({"window": 0}, "window is 0; it must be 1 or more, or None"),
        ({"num_heads": 9}, "9 query heads are not a multiple of 2 KV heads"),
    ]:
        arguments = {"num_requests": 1, "rows_per_request": 2, "width": 2, "chain": False} | MODEL | change
        with pytest.raises(ValueError, match=message):
            DeviceLayout.allocate(**arguments)

    layout = DeviceLayout.allocate(2, 3, 4, chain=False, **MODEL)
    shapes = {"context_lens": (2,), "page_table": (2, 5), "depths": (2, 3), "row_slots": (2, 3), "ancestors": (2, 3, 4)}
    fitting = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    zeros = torch.zeros(2, 3, dtype=torch.int32)
    for name, tensor, message in [
        ("ancestors", None, "a layout of trees needs row_slots and ancestors"),
        ("depths", zeros.view(-1), r"depths has shape \[6\]; expected \[num_requests 2, rows_per_request 3\]"),
        ("row_slots", zeros.T.contiguous().T, r"row_slots has strides \[1, 2\] .*; make it contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            layout.fill(**(fitting | {name: tensor}))
