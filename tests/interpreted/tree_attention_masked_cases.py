"""Cases of tree_attention_masked_triton, run by tests/test_tree_attention_masked.py: in Triton's interpreter in a
process of its own, and on a GPU where there is one."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.interpreted.common import DEVICE, NAN, assert_near, attention_inputs, each_dtype, poisoned_plan
from treespec_kernels.attention.tree_attention import SegmentPartition, TreeAttentionConfig, tree_attention_ref
from treespec_kernels.attention.tree_attention_masked import ancestor_masks, tree_attention_masked_triton
from treespec_kernels.tuning.testing import TreeAttentionInputs, tree_parents

SMALL = TreeAttentionConfig(16, 16, 4, 2, SegmentPartition(short=32, long=64, long_from=64))
WIDE = TreeAttentionConfig(16, 64, 4, 2, SegmentPartition(short=128, long=64, long_from=128))


def attend(
    inputs: TreeAttentionInputs, nodes: list[list[int]], words: np.ndarray, config: TreeAttentionConfig
) -> torch.Tensor:
    """The rows from poisoned buffers."""
    row_slots = [node for chosen in nodes for node in chosen]
    plan = poisoned_plan(inputs, config, row_slots=row_slots, window=inputs.rows.get("window"))
    assert plan.capacity.node_items == 0
    rows: dict[str, Any] = {name: value for name, value in inputs.rows.items() if name != "ancestors"}
    out = torch.full_like(inputs.q, NAN)
    ancestor_words = torch.from_numpy(words).to(DEVICE)
    caches = (inputs.q, inputs.k_cache, inputs.v_cache)
    assert tree_attention_masked_triton(*caches, **rows, ancestor_words=ancestor_words, plan=plan, out=out) is out
    return out


def assert_matches_ref(
    lengths: list[int],
    trees: list[list[int]],
    nodes: list[list[int]],
    config: TreeAttentionConfig,
    *,
    window: int | None = None,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
) -> None:
    inputs = attention_inputs(lengths, trees, num_heads, num_kv_heads, head_dim, dtype, nodes=nodes, page_size=16)
    inputs.rows["window"] = window
    width = max(ancestor_masks(tree).shape[1] for tree in trees)
    words = [ancestor_masks(tree, window)[chosen] for tree, chosen in zip(trees, nodes, strict=True)]
    padded = np.concatenate([np.pad(own, ((0, 0), (0, width - own.shape[1]))) for own in words])
    expected = tree_attention_ref(inputs.q, inputs.k_cache, inputs.v_cache, **inputs.rows)
    assert_near(attend(inputs, nodes, padded, config), expected)


def random_trees(sizes: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(sizes))
    return [tree_parents(("random", "star", "chain")[i % 3], size, generator) for i, size in enumerate(sizes)]


@each_dtype
@pytest.mark.parametrize("head_dim, num_heads, num_kv_heads", [(64, 6, 2), (24, 5, 1)])
def test_against_ref(dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int) -> None:
    sizes = [7, 3, 5]
    shape = {"head_dim": head_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "dtype": dtype}
    assert_matches_ref([33, 0, 64], random_trees(sizes), [list(range(n)) for n in sizes], SMALL, **shape)


@pytest.mark.parametrize("config", [SMALL, WIDE], ids=["16", "64"])
@pytest.mark.parametrize("window", [None, 1, 6, 40])
def test_lengths_around_borders(config: TreeAttentionConfig, window: int | None) -> None:
    lengths = [1, 15, 16, 31, 33, 63, 64, 130]
    sizes = [4] * len(lengths)
    assert_matches_ref(
        lengths, random_trees(sizes), [list(range(4))] * len(lengths), config, window=window, num_heads=2
    )


@pytest.mark.parametrize("config", [SMALL, WIDE], ids=["16", "64"])
def test_every_bit_of_every_word(config: TreeAttentionConfig) -> None:
    """Some rows of trees with as many nodes as fit: bits 31, 32, 63 and 64, and words that straddle tiles."""
    trees = random_trees([256, 256, 130])
    nodes = [[0, 31, 63, 64, 127, 128, 255], [32, 64, 192, 255], [30, 31, 33, 65, 129]]
    assert_matches_ref([37, 0, 100], trees, nodes, config, num_heads=2)


def test_a_slot_that_no_row_sees_may_hold_nan() -> None:
    """All slots but those of the rows' ancestors: siblings of a padded frontier are stale."""
    parents, nodes = [-1, 0, 0, 1, 2, 2], [[0, 2, 5]]
    inputs = attention_inputs([21], [parents], nodes=nodes)
    words = ancestor_masks(parents)[nodes[0]]
    clean = attend(inputs, nodes, words, SMALL)
    assert clean.isfinite().all()
    for node in (1, 3, 4):
        for cache in (inputs.k_cache, inputs.v_cache):
            cache[int(inputs.rows["page_table"][0, 0]), :, 21 + node] = NAN
    assert torch.equal(attend(inputs, nodes, words, SMALL), clean)
