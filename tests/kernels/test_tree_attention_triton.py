"""Tree attention in Triton: the plan, its layout on the device, and what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from treespec_kernels.attention.pass_layout import DeviceLayout, pass_layout_ref
from treespec_kernels.attention.tree_attention import (
    AttentionShape,
    SegmentPartition,
    TreeAttentionConfig,
    TreeAttentionPlan,
    plan_tree_attention,
    tree_attention_ref,
)
from treespec_kernels.tuning.testing import assert_close, path_to, tree_attention_inputs, tree_parents

SMALL = TreeAttentionConfig(16, 16, 4, 2, SegmentPartition(short=32, long=64, long_from=64))
SHAPE = AttentionShape(8, 2, 16, torch.float32)


@pytest.mark.parametrize("kind", ["chain", "star", "random"])
def test_ref_is_masked_softmax_attention(kind: str) -> None:
    """The specification itself, against scaled_dot_product_attention over the whole cache under a dense tree mask."""
    parents = tree_parents(kind, 9, torch.Generator().manual_seed(1))
    inputs = tree_attention_inputs([37], [parents], AttentionShape(4, 2, 24, torch.float32))
    slots = torch.arange(37 + 9)
    pages = inputs.rows["page_table"][0, slots // 64].long()
    keys, values = (cache[pages, :, slots % 64].transpose(0, 1) for cache in (inputs.k_cache, inputs.v_cache))
    mask = torch.zeros(9, len(slots), dtype=torch.bool)
    mask[:, :37] = True
    for node in range(9):
        mask[node, [37 + ancestor for ancestor in path_to(parents, node)]] = True
    expected = torch.nn.functional.scaled_dot_product_attention(
        inputs.q.transpose(0, 1), keys, values, attn_mask=mask, scale=inputs.rows["scale"], enable_gqa=True
    )
    actual = tree_attention_ref(inputs.q, inputs.k_cache, inputs.v_cache, **inputs.rows)
    assert_close(actual, expected.transpose(0, 1), max_error=1e-5, rms_error=1e-6)


def test_partition_borders() -> None:
    partition = SegmentPartition(short=256, long=1024, long_from=8192)
    positions = np.array([0, 255, 256, 8191, 8192, 9215, 9216, 131072])
    segments = partition.segment_of(positions)
    assert segments.tolist() == [0, 0, 1, 31, 32, 32, 33, 152]
    every = np.arange(20000)
    start, end = partition.start_of(partition.segment_of(every)), partition.start_of(partition.segment_of(every) + 1)
    assert bool(((start <= every) & (every < end)).all())


@pytest.mark.parametrize("chains", [None, [False, True, False]])
def test_items_cover_every_key_of_every_row_once(chains: list[bool] | None) -> None:
    lengths, depths = [70, 15, 0], [0, 1, 1, 2, 0, 1, 2, 0]
    plan = plan_tree_attention(lengths, [4, 3, 1], depths, SHAPE, device="cpu", config=SMALL, chains=chains)
    group = 4
    request_of_row = [0, 0, 0, 0, 1, 1, 1, 2]
    seen: dict[int, list[int]] = {m: [] for m in range(len(depths) * group)}
    for items in (plan.packed_items, plan.node_items):
        for request, slot_row, m_lo, m_hi, key_lo, key_hi, segment, continues in items.tolist():
            start, end = SMALL.partition.start_of(np.array([segment, segment + 1])).tolist()
            assert start <= key_lo < key_hi <= end and key_lo % SMALL.block_n == 0
            assert 0 < m_hi - m_lo <= SMALL.block_m
            assert bool(continues) == (key_lo > start)
            for m in range(m_lo, m_hi):
                assert request_of_row[m // group] == request == request_of_row[slot_row]
                position = lengths[request] + depths[m // group]
                seen[m] += range(key_lo, min(key_hi, position + 1))
                if key_hi > lengths[request] and chains is None:
                    assert m // group == slot_row
    for m, keys in seen.items():
        row = m // group
        assert sorted(keys) == list(range(lengths[request_of_row[row]] + depths[row] + 1))


def test_a_layout_places_rows_in_pages() -> None:
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


def test_sizes_of_a_layout_follow_the_shape_alone() -> None:
    options: dict[str, Any] = {"device": "cpu", "max_context": 100, "config": SMALL}
    layout = DeviceLayout.allocate(3, 10, 5, SHAPE, chain=False, **options)
    # 40 (row, head) pairs of a request in 3 M tiles; positions below 100 in 3 segments; 4 depths more touch 3, too.
    # From the root's tile on a row touches at most 2 segments.
    assert sizes_of(layout) == (30, 3 * 3 * 3, 30 * 2, 30 * 3)
    chain = DeviceLayout.allocate(3, 10, 10, SHAPE, chain=True, **options)
    assert sizes_of(chain) == (30, 3 * 3 * 3, 0, 30 * 3)
    options["max_context"] = 100_000
    windowed = DeviceLayout.allocate(3, 10, 5, SHAPE._replace(window=9), chain=False, **options)
    assert sizes_of(windowed) == (30, 3 * 3 * 2, 30 * 2, 30 * 2)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: TreeAttentionConfig(16, 24, 4, 2), "block_n is 24"),
        (lambda: TreeAttentionConfig(16, 64, 4, 2, SMALL.partition), "not a multiple of block_n 64"),
        (lambda: TreeAttentionConfig.default(torch.int8, 64), r"torch.int8 is not supported; use float16"),
        (lambda: TreeAttentionConfig.default(torch.float16, 512), "head_dim 512 is not supported; use 1 to 256"),
        (lambda: planned(SHAPE._replace(head_dim=512), config=SMALL), "head_dim 512 is not supported; use 1 to 256"),
        (lambda: planned(SHAPE._replace(window=0)), "window is 0; it must be 1 or more, or None for all positions"),
        (lambda: planned(SHAPE._replace(num_heads=9)), "9 query heads are not a multiple of 2 KV heads"),
    ],
)
def test_what_does_not_fit_is_refused(made: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()


def planned(shape: AttentionShape, **options: Any) -> TreeAttentionPlan:
    return plan_tree_attention([3], [1], [0], shape, device="cpu", **options)


@pytest.mark.parametrize(
    ("value", "changed", "message"),
    [
        (float("nan"), 1, r"actual is not finite at 1 places, first \[\[1, 2\]\]"),
        (float("nan"), 2, "expected is not finite"),
        (1.5, 1, r"\(1, 2\): 1.5, expected 1"),
    ],
)
def test_assert_close_sees_nan_and_names_the_place(value: float, changed: int, message: str) -> None:
    tensors = [torch.ones(2, 3) for _ in range(2)]
    for tensor in tensors[:changed]:
        tensor[1, 2] = value
    with pytest.raises(AssertionError, match=message):
        assert_close(*tensors, max_error=0.1, rms_error=1)
