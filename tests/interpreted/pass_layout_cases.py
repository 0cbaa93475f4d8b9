"""Cases of pass_layout. Attention over a layout has the bits of attention over the host's plan."""

import math
import random
from dataclasses import replace

import pytest
import torch

from tests.interpreted.common import DEVICE, NAN
from treespec_kernels.attention.pass_layout import DeviceLayout, pass_layout_ref
from treespec_kernels.attention.tree_attention import (
    AttentionShape,
    SegmentPartition,
    TreeAttentionConfig,
    plan_tree_attention,
    tree_attention_triton,
)
from treespec_kernels.tuning.testing import tree_attention_inputs, tree_parents

PAGE = 16

# Segments [0, 32), [32, 64), [64, 128), [128, 192) ... in tiles of 16 positions: every border lies near. Segments of
# one tile, and long ones that are shorter than the short ones.
PARTITIONS = [SegmentPartition(32, 64, 64), SegmentPartition(16, 48, 32), SegmentPartition(64, 32, 128)]
SMALL = TreeAttentionConfig(16, 16, 4, 2, PARTITIONS[0])
GARBAGE = 1 << 20  # a tree slot in no page table: to read it is an error


class Padded:
    """The pass of some nodes of `trees`, with padding rows strewn in, and what the host's plan computes for it."""

    def __init__(
        self,
        lengths: list[int],
        trees: list[list[int]],
        nodes: list[list[int]],
        rows_per_request: int,
        width: int,
        *,
        heads: tuple[int, int] = (2, 1),
        head_dim: int = 16,
        dtype: torch.dtype = torch.float32,
        strewn: bool = True,
        seed: int = 0,
    ) -> None:
        choose, by_request = random.Random(seed), (len(lengths), rows_per_request)
        self.shape = AttentionShape(*heads, head_dim, dtype)
        inputs = tree_attention_inputs(
            lengths, trees, self.shape, nodes=nodes, device=DEVICE, page_size=PAGE, seed=seed
        )
        rows = []
        for request, chosen in enumerate(nodes):
            places = sorted(choose.sample(range(rows_per_request), len(chosen))) if strewn else range(len(chosen))
            rows += [request * rows_per_request + place for place in places]
        self.inputs, self.rows = inputs, torch.tensor(rows, dtype=torch.long, device=DEVICE)

        def padded(values: torch.Tensor, padding: float) -> torch.Tensor:
            whole = values.new_full((math.prod(by_request), *values.shape[1:]), padding)
            whole[self.rows] = values
            return whole

        self.q = padded(inputs.q, NAN)
        self.depths = padded(inputs.rows["depths"], -1).view(by_request)
        own = torch.tensor([node for chosen in nodes for node in chosen], dtype=torch.int32, device=DEVICE)
        self.row_slots = padded(own, GARBAGE).view(by_request)
        ancestors = inputs.rows["ancestors"][:, :width]
        ancestors = torch.nn.functional.pad(ancestors, (0, width - ancestors.shape[1]))
        self.ancestors = padded(ancestors, GARBAGE).view(*by_request, width)
        self.context_lens, self.page_table = inputs.rows["context_lens"], inputs.rows["page_table"]

    def planned(self, config: TreeAttentionConfig, chain: bool, window: int | None = None) -> torch.Tensor:
        """The rows by the host's plan; padding is 0."""
        inputs, shape = self.inputs, self.shape._replace(window=window)
        chains = [chain] * len(self.context_lens)
        plan = plan_tree_attention(**inputs.plan, shape=shape, device=DEVICE, config=config, chains=chains)
        rows, out = inputs.rows | {"window": window}, torch.zeros_like(self.q)
        out[self.rows] = tree_attention_triton(inputs.q, inputs.k_cache, inputs.v_cache, **rows, plan=plan)
        return out

    def laid_out(self, layout: DeviceLayout, *, given: bool = True) -> torch.Tensor:
        """The rows by the layout, from poisoned buffers."""
        plan, inputs = layout.plan, self.inputs
        integers = (plan.packed_items, plan.node_items, plan.first_segment, plan.num_segments)
        for buffer in (*integers, layout.positions, layout.slots):
            buffer.fill_(-77)
        for buffer in plan.partials:
            buffer.fill_(NAN)
        tree = (self.row_slots, self.ancestors) if given else ()
        rows = layout.fill(self.context_lens, self.page_table, self.depths, *tree) | {"scale": inputs.rows["scale"]}
        assert all((items >= 0).all() for items in integers[:2]), "every item is written"
        out = torch.full_like(self.q, NAN)
        return tree_attention_triton(self.q, inputs.k_cache, inputs.v_cache, **rows, out=out)

    def layout(
        self, config: TreeAttentionConfig, chain: bool, max_context: int, window: int | None = None
    ) -> DeviceLayout:
        options = {"device": DEVICE, "config": config, "page_size": PAGE, "chain": chain, "max_context": max_context}
        sizes = *self.depths.shape, self.ancestors.shape[2]
        return DeviceLayout.allocate(*sizes, self.shape._replace(window=window), **options)


def assert_same(padded: Padded, layout: DeviceLayout, window: int | None = None, *, given: bool = True) -> None:
    out = padded.laid_out(layout, given=given)
    expected = padded.planned(layout.plan.config, layout.chain, window)
    different = (out != expected).flatten(1).any(1) | out.isnan().flatten(1).any(1)
    assert not different.any(), (
        f"rows {different.nonzero().flatten().tolist()} differ; context_lens {padded.context_lens.tolist()}, "
        f"depths {padded.depths.tolist()}"
    )
    places = pass_layout_ref(padded.context_lens, padded.page_table, padded.depths, padded.row_slots, page_size=PAGE)
    assert torch.equal(layout.positions, places.positions) and torch.equal(layout.slots, places.slots)


def random_trees(sizes: list[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    kinds = ["random", "star", "chain"]
    return [tree_parents(kinds[i % 3], max(size, 1), generator) for i, size in enumerate(sizes)]


BORDERS = [0, 1, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 79, 80, 127, 128, 129]


@pytest.mark.parametrize("chain", [False, True], ids=["trees", "chains"])
@pytest.mark.parametrize("first, partition", list(enumerate(PARTITIONS)), ids=["32-64", "16-48", "64-32"])
def test_rows_around_borders(first: int, partition: SegmentPartition, chain: bool) -> None:
    """Every third length, each time from another one on: together all of them."""
    sizes, rows = ([1, 7, 0, 3, 4, 9], 9) if chain else ([5, 3, 4, 1, 4, 6], 6)
    trees, nodes = [list(range(-1, 8))] * 6 if chain else random_trees(sizes, first), [list(range(n)) for n in sizes]
    padded = Padded(BORDERS[first::3], trees, nodes, rows, rows, strewn=not chain, seed=first)
    layout = padded.layout(replace(SMALL, partition=partition), chain, max(BORDERS))
    assert not chain or len(layout.plan.node_items) == 0
    assert_same(padded, layout, given=not chain or first == 0)


def test_deep_trees_cross_segments() -> None:
    trees = [list(range(-1, 49)), random_trees([50], 3)[0], list(range(-1, 39))]
    padded = Padded([27, 61, 0], trees, [[0, 1, 20, 49, 37], [5, 49, 33], [38]], 5, 50)
    assert_same(padded, padded.layout(SMALL, False, 70))


@pytest.mark.parametrize("chain", [False, True], ids=["trees", "chains"])
def test_one_layout_serves_every_pass(chain: bool) -> None:
    """As under a captured graph: nothing of an earlier pass is left, idle requests and all of them included."""
    layout = None
    for seed in range(3):
        choose = random.Random(seed)
        lengths = [choose.choice([choose.randrange(140), *BORDERS]) for _ in range(3)]
        sizes = [choose.choice([0, 1, choose.randint(1, 7)]) for _ in range(3)] if seed else [0, 0, 0]
        trees = [list(range(-1, 6))] * 3 if chain else random_trees([7] * 3, seed)
        nodes = [list(range(n)) if chain else sorted(choose.sample(range(7), n)) for n in sizes]
        if sum(sizes) == 0:
            nodes[0] = [0]  # the host's plan needs a row; the layout below gets none
        padded = Padded(lengths, trees, nodes, 7, 7, strewn=not chain, seed=seed)
        layout = layout or padded.layout(SMALL, chain, 140)
        if sum(sizes) == 0:
            padded.depths.fill_(-1)
            assert torch.equal(padded.laid_out(layout), torch.zeros_like(padded.q))
            assert not layout.slots.any() and not layout.positions.any()
        else:
            assert_same(padded, layout)


@pytest.mark.parametrize(
    ("window", "heads", "head_dim"),
    [(None, (3, 1), 24), (None, (20, 1), 16), (1, (2, 1), 16), (17, (2, 1), 16), (100, (2, 1), 16)],
)
@pytest.mark.parametrize("chain", [False, True], ids=["trees", "chains"])
def test_groups_and_windows(window: int | None, heads: tuple[int, int], head_dim: int, chain: bool) -> None:
    lengths, sizes = [0, 17, 64, 79, 130], [2, 6, 3, 0, 6]
    trees = [list(range(-1, 5))] * 5 if chain else random_trees([6] * 5, window or 2)
    nodes, dtype = [list(range(n)) for n in sizes], torch.float32 if window else torch.float16
    padded = Padded(lengths, trees, nodes, 6, 6, heads=heads, head_dim=head_dim, dtype=dtype, strewn=not chain)
    assert_same(padded, padded.layout(SMALL, chain, 130, window=window), window)


def test_rows_that_do_not_fit_count_as_padding() -> None:
    """Past the page table, past the layout's context, past its width: nothing is read or written there."""
    padded = Padded([20, 60, 20, 20], random_trees([4] * 4, 0), [[0, 1, 2, 3]] * 4, 4, 4, strewn=False)
    layout = padded.layout(SMALL, False, 40)
    padded.row_slots[2, 3] = padded.page_table.shape[1] * PAGE - 20  # the first slot behind the table
    padded.depths[3, 1] = 4
    out = padded.laid_out(layout)
    gone = [4, 5, 6, 7, 11, 13]
    kept = [row for row in range(16) if row not in gone]
    assert torch.equal(out[kept], padded.planned(SMALL, False)[kept])
    assert not out[gone].any() and not layout.slots[gone].any()
