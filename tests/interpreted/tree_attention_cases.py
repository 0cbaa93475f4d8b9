"""Cases of tree_attention: the kernels against the reference."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from tests.interpreted.common import assert_near, attention_inputs, each_dtype, normal, poisoned_plan
from treespec_kernels.attention.tree_attention import (
    SegmentPartition,
    TreeAttentionConfig,
    tree_attention_ref,
    tree_attention_triton,
)
from treespec_kernels.tuning.testing import TreeAttentionInputs, in_planes, path_to, tree_parents

# Segments [0, 32), [32, 64), [64, 128), [128, 192) ... in tiles of 16 positions: every border lies near.
SMALL = TreeAttentionConfig(
    block_m=16, block_n=16, num_warps=4, num_stages=2, partition=SegmentPartition(short=32, long=64, long_from=64)
)
# Results of 16 segments, or of 8 of heads above 128 and 4 of those above 256, are combined at once.
MANY = replace(SMALL, partition=SegmentPartition(short=16, long=16, long_from=64))


def attend(inputs: TreeAttentionInputs, config: TreeAttentionConfig, **options: Any) -> torch.Tensor:
    out = torch.full_like(inputs.q, float("nan"))
    plan = poisoned_plan(inputs, config, **options)
    assert tree_attention_triton(inputs.q, inputs.k_cache, inputs.v_cache, **inputs.rows, plan=plan, out=out) is out
    return out


def assert_matches_ref(inputs: TreeAttentionInputs, config: TreeAttentionConfig, **options: Any) -> torch.Tensor:
    out = attend(inputs, config, **options)
    assert_near(out, tree_attention_ref(inputs.q, inputs.k_cache, inputs.v_cache, **inputs.rows))
    return out


def trees(kinds: str, num_nodes: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(num_nodes))
    return [tree_parents(kind, n, generator) for kind, n in zip(kinds.split(), num_nodes, strict=True)]


class Case(NamedTuple):
    head_dim: int
    num_heads: int
    num_kv_heads: int
    trees: str  # kind:nodes@context
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    config: TreeAttentionConfig | None = SMALL

    def inputs(self, dtype: torch.dtype) -> tuple[TreeAttentionInputs, list[list[int]]]:
        """Of a pass, and the parents of its trees."""
        parts = [tree.replace(":", "@").split("@") for tree in self.trees.split()]
        parents = trees(" ".join(kind for kind, _, _ in parts), [int(nodes) for _, nodes, _ in parts])
        lengths, shape = [int(length) for _, _, length in parts], (self.num_heads, self.num_kv_heads, self.head_dim)
        inputs = attention_inputs(lengths, parents, *shape, dtype, page_size=16)
        sinks = normal(3)(self.num_heads) if self.sinks else None
        inputs.rows.update(window=self.window, score_cap=self.cap, sinks=sinks)
        return inputs, parents


CASES = [
    Case(64, 4, 1, "random:5@0 chain:5@15 star:3@33 random:1@64"),
    Case(48, 8, 1, "random:6@63 star:3@31"),
    Case(128, 2, 2, "random:4@65 chain:2@128"),
    Case(16, 20, 1, "random:3@20"),  # a group of more heads than one tile
    Case(16, 1, 1, "random:17@59 chain:20@30"),
    Case(64, 4, 1, "random:3@40", config=None),
    Case(16, 4, 2, "random:5@64 chain:5@30 star:3@79 random:3@3", window=17),
    Case(16, 2, 1, "random:4@37", window=2),
    Case(16, 2, 1, "random:4@37", cap=1.5),
    Case(16, 4, 2, "random:4@37", sinks=True),
    Case(16, 2, 1, "random:3@530 star:2@15", config=MANY),
    Case(256, 1, 1, "chain:2@200", config=MANY),
    Case(512, 2, 1, "chain:2@90", config=MANY),
]


@each_dtype
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:-1])))
def test_a_node_has_the_bits_of_plain_decoding(case: Case, dtype: torch.dtype) -> None:
    """And is near the reference. Of larger trees every third node is decoded alone."""
    inputs, parents = case.inputs(dtype)
    config = case.config or TreeAttentionConfig.default(dtype, case.head_dim)
    out = assert_matches_ref(inputs, config)
    row, different = 0, []
    for request, tree in enumerate(parents):
        for node in range(len(tree)):
            if len(tree) <= 4 or node % 3 == 2:
                if not torch.equal(out[row], decoded_alone(inputs, request, tree, node, row, config)):
                    length = inputs.plan["context_lens"][request]
                    different.append(f"node {node} behind {length} positions, path {path_to(tree, node)}")
            row += 1
    assert not different, f"{len(different)} of {row} rows differ in bits:\n" + "\n".join(different)


PASSES = [  # lengths of contexts, kinds of trees, their nodes, windows
    ([0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128], "chain star random " * 4, [3] * 12, None),
    ([27, 60], "chain chain", [50, 9], None),
    # Windows that begin before the root's tile, in it, inside the tree; of one tile, across segments, of a position.
    *(([64, 30, 79, 3], "random chain star random", [7, 5, 3, 3], window) for window in (1, 7, 17, 33, 200)),
]


@pytest.mark.parametrize("lengths, kinds, nodes, window", PASSES)
def test_borders_and_windows(lengths: list[int], kinds: str, nodes: list[int], window: int | None) -> None:
    inputs = attention_inputs(lengths, trees(kinds, nodes), page_size=8)
    inputs.rows["window"] = window
    out = assert_matches_ref(inputs, SMALL)
    assert torch.equal(attend(inputs, SMALL, chains=[kind == "chain" for kind in kinds.split()]), out)


def decoded_alone(
    inputs: TreeAttentionInputs, request: int, parents: list[int], node: int, row: int, config: TreeAttentionConfig
) -> torch.Tensor:
    """The row's token in a one-row pass over a compacted cache, in other pages, all other slots NaN."""
    length, page_size, device = inputs.plan["context_lens"][request], inputs.k_cache.shape[2], inputs.q.device
    source = torch.tensor([*range(length), *(length + above for above in path_to(parents, node))], device=device)
    (_, num_heads, head_dim), num_kv_heads = inputs.q.shape, inputs.k_cache.shape[1]
    shape = (num_heads, num_kv_heads, head_dim, inputs.q.dtype)
    alone = attention_inputs([len(source) - 1], [[-1]], *shape, page_size=page_size, seed=node)
    target = torch.arange(len(source), device=device)
    pages = alone.rows["page_table"][0, target // page_size].long()
    from_pages = inputs.rows["page_table"][request, source // page_size].long()
    for own, cache in ((alone.k_cache, inputs.k_cache), (alone.v_cache, inputs.v_cache)):
        own[pages, :, target % page_size] = cache[from_pages, :, source % page_size]
    alone.rows.update({name: inputs.rows[name] for name in ("window", "score_cap", "sinks")})
    return attend(replace(alone, q=inputs.q[row : row + 1]), config)[0]


def test_bits_do_not_follow_the_batch_the_rows_or_the_chain_flag() -> None:
    inputs = attention_inputs([45, 30], trees("random chain", [11, 19]), 4, 2, 32, page_size=16)
    config = SMALL
    out = attend(inputs, config)
    assert torch.equal(attend(inputs, config, chains=[False, True]), out)

    kept = [0, 3, 4, 9, 12, 20, 29]  # rows of a pass over some of the nodes
    some = TreeAttentionInputs(
        inputs.q[kept],
        inputs.k_cache,
        inputs.v_cache,
        inputs.rows | {name: inputs.rows[name][kept] for name in ("row_request", "depths", "ancestors")},
        inputs.plan | {"rows_per_request": [4, 3], "depths": [inputs.plan["depths"][row] for row in kept]},
    )
    assert torch.equal(attend(some, config), out[kept])
    assert torch.equal(attend(some, config, chains=[False, True]), out[kept])


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "planes"),
    [(2, 24, (1, 8)), (4, 16, (2, 16)), (2, 32, (4, 16)), (3, 16, (1, 16)), (2, 48, (3, 16))],
    ids=str,
)
def test_planes_have_the_bits_of_whole_heads(kv_heads: int, head_dim: int, planes: tuple[int, int]) -> None:
    inputs = attention_inputs([37, 5], trees("random star", [4, 2]), 2 * kv_heads, kv_heads, head_dim, page_size=16)
    plan, whole = poisoned_plan(inputs, SMALL), attend(inputs, SMALL)
    caches = [in_planes(cache, *planes) for cache in (inputs.k_cache, inputs.v_cache)]
    assert torch.equal(tree_attention_triton(inputs.q, *caches, **inputs.rows, plan=plan), whole)
    near = tree_attention_ref(inputs.q, *caches, **inputs.rows)
    assert torch.equal(near, tree_attention_ref(inputs.q, inputs.k_cache, inputs.v_cache, **inputs.rows))


def test_padding_rows_become_zero() -> None:
    inputs = attention_inputs([33, 0], trees("random chain", [5, 2]), page_size=16)
    num_rows, padding = len(inputs.q), 5
    plan = poisoned_plan(inputs, SMALL, num_rows=num_rows + padding)
    q = torch.cat([inputs.q, torch.full_like(inputs.q[:1], float("nan")).repeat(padding, 1, 1)])
    rows = inputs.rows | {
        name: torch.cat([inputs.rows[name], inputs.rows[name][:1].expand(padding, *inputs.rows[name].shape[1:])])
        for name in ("row_request", "depths", "ancestors")
    }
    out = tree_attention_triton(q, inputs.k_cache, inputs.v_cache, **rows, plan=plan)
    assert torch.equal(out[:num_rows], attend(inputs, SMALL))
    assert torch.equal(out[num_rows:], torch.zeros_like(out[num_rows:]))


def test_a_nan_of_its_own_request_reaches_only_the_rows_that_see_it() -> None:
    inputs = attention_inputs([17, 5], trees("star random", [3, 4]), page_size=16)
    clean = attend(inputs, SMALL)
    slot = 17 + 2
    inputs.v_cache[int(inputs.rows["page_table"][0, slot // 16]), :, slot % 16] = float("nan")
    out = attend(inputs, SMALL)
    assert out[2].isnan().all()
    others = [0, 1, 3, 4, 5, 6]
    assert torch.equal(out[others], clean[others])
