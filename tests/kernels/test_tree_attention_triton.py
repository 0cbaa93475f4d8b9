"""Tree attention in Triton: the specification, the places of rows in pages, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from treespec_kernels.attention.pass_layout import pass_layout_ref
from treespec_kernels.attention.tree_attention import (
    AttentionShape,
    SegmentPartition,
    TreeAttentionConfig,
    TreeAttentionPlan,
    plan_tree_attention,
    tree_attention_ref,
)
from treespec_kernels.comparison import assert_close
from treespec_kernels.tuning.testing import path_to, tree_attention_inputs, tree_parents

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


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: TreeAttentionConfig(16, 24, 4, 2), "block_n is 24"),
        (lambda: TreeAttentionConfig(16, 64, 4, 2, SegmentPartition(32, 64, 64)), "not a multiple of block_n 64"),
        (lambda: TreeAttentionConfig.default(torch.int8, 64), r"torch.int8 is not supported; use float16"),
        (lambda: TreeAttentionConfig.default(torch.float16, 513), "head_dim 513 is not supported; use 1 to 512"),
        (lambda: planned(SHAPE._replace(window=0)), "window is 0; it must be 1 or more, or None for all positions"),
        (lambda: planned(SHAPE._replace(num_heads=9)), "9 query heads are not a multiple of 2 KV heads"),
    ],
)
def test_what_does_not_fit_is_refused(made: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()


def planned(shape: AttentionShape) -> TreeAttentionPlan:
    return plan_tree_attention([3], [1], [0], shape, device="cpu")


def test_assert_close_sees_nan() -> None:
    right, wrong = torch.ones(2), torch.tensor([1.0, torch.nan])
    for pair in ((wrong, right), (wrong, wrong)):
        with pytest.raises(AssertionError, match="is not finite"):
            assert_close(*pair, max_error=0.1, rms_error=1)
