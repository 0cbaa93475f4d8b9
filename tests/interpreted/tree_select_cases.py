"""Cases of tree_select. Forests are grown by the specification of tree_merge; what is selected is compared with a
dictionary of paths, by equality and padding included."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.helpers.growth import (
    KINDS,
    Sizes,
    Trie,
    as_proposed,
    assert_trees,
    mixtures,
    poison,
    proposals,
    random_seeds,
)
from tests.interpreted.common import DEVICE, IMPLEMENTATION
from treespec_kernels.tree.device_trees import DeviceForest, DeviceTrees, ProposedTrees
from treespec_kernels.tree.tree_merge import tree_merge_ref
from treespec_kernels.tree.tree_root import tree_root_ref
from treespec_kernels.tree.tree_select import tree_select_ref, tree_select_triton

tree_select = {"ref": tree_select_ref, "triton": tree_select_triton}[IMPLEMENTATION]

SHAPES = [
    Sizes(1, 1, 1, 1, 1),
    Sizes(2, 1, 1, 1, 5),  # a chain
    Sizes(2, 2, 1, 7, 1),  # a star
    Sizes(3, 3, 3, 2, 4),
    Sizes(2, 1, 5, 3, 3),
    Sizes(2, 0, 2, 2, 3, 12),  # seeds alone
]
# The interpreter takes a second for the larger ones: a kind of most shapes.
CASES = [
    pytest.param(sizes, kind, id=f"{sizes}-{kind}")
    for i, sizes in enumerate(SHAPES)
    for j, kind in enumerate(KINDS)
    if IMPLEMENTATION == "ref" or (i - j) % len(KINDS) == 0 or (i == 3 and j < 4)
]
ROUNDS = 1 if IMPLEMENTATION == "triton" else 8
INF, NAN = float("inf"), float("nan")


class Grown(NamedTuple):
    """A forest, the same as tries, the root tokens and the seeds; on the host."""

    forest: DeviceForest
    tries: list[Trie]
    roots: torch.Tensor
    proposed: ProposedTrees

    @property
    def given(self) -> tuple[DeviceForest, ProposedTrees, torch.Tensor]:
        """What the implementation is given, on its device."""
        moved = {name: getattr(self.forest, name).to(DEVICE) for name in self.forest.__dataclass_fields__}
        return DeviceForest(**moved), ProposedTrees(*(part.to(DEVICE) for part in self.proposed)), self.roots.to(DEVICE)


def grown(
    sizes: Sizes, kind: str, rng: np.random.Generator, *, levels: int | None = None, roots: list[int] | None = None
) -> Grown:
    """A forest of so many levels, or of all."""
    roots = [100 + request for request in range(sizes.requests)] if roots is None else roots
    seeds, forest = random_seeds(sizes, rng), sizes.forest()
    tries = [Trie(root, sizes.frontier, own) for root, own in zip(roots, seeds, strict=True)]
    proposed = as_proposed(sizes, seeds)
    root_tokens = torch.tensor(roots, dtype=torch.int32)
    poison(forest)
    tree_root_ref(forest, root_tokens)
    ends = torch.from_numpy(rng.integers(-1, sizes.proposals + 3, (sizes.requests, 2)).astype(np.int32))
    for _ in range(sizes.depth if levels is None else levels):
        tokens, probs, weights = *proposals(sizes, kind, rng), mixtures(sizes, rng)
        tree_merge_ref(forest, tokens, probs, weights, ends, proposed)
        for request, trie in enumerate(tries):
            own = tokens[:, request].numpy(), probs[:, request].numpy(), weights[request].numpy()
            trie.merge(*own, set(ends[request].tolist()))
    return Grown(forest, tries, root_tokens, proposed)


def assert_selects(
    growth: Grown,
    nodes: int,
    least: list[float],
    deepest: list[int],
    capacity: int | None = None,
) -> DeviceTrees:
    forest = growth.forest
    trees = DeviceTrees.allocate(
        forest.num_requests, nodes=capacity or nodes, max_depth=forest.max_depth, device=DEVICE
    )
    poison(trees)
    limits = torch.tensor(least), torch.tensor(deepest, dtype=torch.int32)
    written = tree_select(*growth.given, nodes, *(limit.to(DEVICE) for limit in limits), out=trees)
    assert written is trees
    assert_trees(trees, growth.tries, nodes, *limits)
    return trees


@pytest.mark.parametrize(("sizes", "kind"), CASES)
def test_the_best_nodes(sizes: Sizes, kind: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    growth, count = grown(sizes, kind, rng), sizes.requests
    everything = 1 + max(len({**trie.nodes, **trie.seeds}) for trie in growth.tries)
    for nodes in sorted({1, everything, *rng.integers(2, everything + 4, ROUNDS).tolist()}):
        assert_selects(growth, nodes, [-INF] * count, [99] * count)


@pytest.mark.parametrize("kind", KINDS if IMPLEMENTATION == "ref" else ("random", "ties", "broken"))
def test_limits_of_each_request(kind: str) -> None:
    rng, sizes = np.random.default_rng(1), Sizes(4, 2, 4, 3, 4)
    growth = grown(sizes, kind, rng, roots=[5, -1, 0, 7])
    for _ in range(ROUNDS):
        values = [node.value for node in growth.tries[0].nodes.values()]
        least = [float(rng.choice(values)) for _ in range(4)] if values else [0.0] * 4  # at ties with the limit, too
        assert_selects(growth, int(rng.integers(1, 20)), least, rng.integers(-1, 6, 4).tolist(), capacity=20)
    assert_selects(growth, 9, [0.0, 0.0, NAN, INF], [99, 99, 99, 99])


@pytest.mark.parametrize("levels", [0, 2])
def test_forests_that_are_not_grown_out(levels: int) -> None:
    """Levels that were not grown hold poison."""
    rng, sizes = np.random.default_rng(2), Sizes(2, 2, 3, 3, 3)
    growth = grown(sizes, "random", rng, levels=levels)
    for name in (name for name in growth.forest.__dataclass_fields__ if name.startswith("cand_")):
        tensor = getattr(growth.forest, name)[:, levels:]
        tensor.fill_(0.5 if tensor.dtype == torch.float32 else 7)
    assert_selects(growth, 12, [0.0, 0.0], [99, 99])


def test_a_request_may_want_the_root_alone() -> None:
    growth = grown(Sizes(3, 2, 3, 3, 2), "random", np.random.default_rng(3), roots=[4, 5, -1])
    trees = assert_selects(growth, 8, [0.0, 0.0, 0.0], [0, 2, 2])
    assert trees.num_nodes.tolist() == [1, 8, 0]


def test_each_request_may_want_another_number() -> None:
    """As data: what is out of range counts as the nearest number that is not."""
    count, capacity = 5, 8
    growth = grown(Sizes(count, 2, 3, 3, 2), "random", np.random.default_rng(6))
    forest = growth.forest
    wanted = torch.tensor([1, 0, 5, 8, 99], dtype=torch.int32)
    limits = torch.zeros(count), torch.full((count,), 9, dtype=torch.int32)

    def select(nodes: torch.Tensor | int) -> DeviceTrees:
        trees = DeviceTrees.allocate(count, nodes=capacity, max_depth=forest.max_depth, device=DEVICE)
        return tree_select(*growth.given, nodes, *(limit.to(DEVICE) for limit in limits), out=trees)

    together = select(wanted.to(DEVICE))
    for request, nodes in enumerate([1, 1, 5, 8, 8]):
        alone = select(nodes)
        for name in together.__dataclass_fields__:
            assert torch.equal(getattr(together, name)[request], getattr(alone, name)[request]), (request, name)


@pytest.mark.parametrize("kind", ["ones", "tiny"])
def test_ties_and_underflow_at_real_size(kind: str) -> None:
    """At every number of nodes the tree is connected, by equal values, by values of 1 and by values of 0."""
    growth = grown(Sizes(1, 3, 8, 8, 4, 32), kind, np.random.default_rng(4))
    for nodes in (7, 64) if IMPLEMENTATION == "triton" else (*range(1, 40), *range(40, 256, 20)):
        assert_selects(growth, nodes, [0.0], [99], capacity=256)
