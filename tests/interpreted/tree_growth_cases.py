"""Cases of tree_root, tree_merge and tree_select: every tensor is that of the specification, padding included."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.helpers.growth import KINDS, Seeds, Sizes, as_proposed, mixtures, poison, proposals, random_seeds
from tests.interpreted.common import DEVICE, INTERPRETED
from treespec_kernels.tree.device_trees import SEED_BIT, DeviceForest, DeviceTrees, ProposedTrees
from treespec_kernels.tree.tree_merge import tree_merge_ref, tree_merge_triton
from treespec_kernels.tree.tree_root import tree_root_ref, tree_root_triton
from treespec_kernels.tree.tree_select import tree_select_ref, tree_select_triton

SHAPES = [
    Sizes(1, 1, 1, 1, 1),
    Sizes(1, 1, 1, 1, 5),  # a chain
    Sizes(2, 2, 1, 7, 1),  # a star
    Sizes(3, 3, 3, 2, 4),
    Sizes(2, 1, 5, 3, 3),
    Sizes(2, 5, 2, 3, 2),
    Sizes(1, 3, 8, 8, 3, 32),  # a real size
    Sizes(2, 0, 3, 3, 3, 9),  # no SSM
    Sizes(1, 1, 3, 2, 8),  # deep
]
# The interpreter takes a second for the larger ones: every kind of one shape, and a kind of each other.
CASES = [
    pytest.param(sizes, kind, id=f"{sizes}-{kind}")
    for i, sizes in enumerate(SHAPES)
    for j, kind in enumerate(KINDS)
    if not INTERPRETED or i == 3 or (i - j) % len(KINDS) == 0
]
INF, NAN = float("inf"), float("nan")


def assert_same(actual: DeviceForest | DeviceTrees, expected: DeviceForest | DeviceTrees) -> None:
    for field in dataclasses.fields(actual):
        a, e = getattr(actual, field.name).cpu(), getattr(expected, field.name)
        wrong = (a != e).nonzero()  # NaN differs from itself
        assert len(wrong) == 0, f"{field.name} differs at {wrong[:4].tolist()}: {a[*wrong[0]]}, expected {e[*wrong[0]]}"


class Growth:
    """The implementation and the specification side by side."""

    def __init__(self, sizes: Sizes, roots: list[int], seeds: list[Seeds] | None = None):
        self.forest, self.expected = sizes.forest(DEVICE), sizes.forest()
        seeds = seeds or [{} for _ in roots]
        self.proposed = as_proposed(sizes, seeds)
        self.on_device = ProposedTrees(*(tensor.to(DEVICE) for tensor in self.proposed))
        poison(self.forest)
        self.root_tokens = torch.tensor(roots, dtype=torch.int32)
        tree_root_triton(self.forest, self.root_tokens.to(DEVICE))
        tree_root_ref(self.expected, self.root_tokens)
        assert_same(self.forest, self.expected)

    def merge(self, *arguments: torch.Tensor) -> None:
        """The arguments: tokens, probabilities, weights and ends."""
        tree_merge_triton(self.forest, *(tensor.to(DEVICE) for tensor in arguments), self.on_device)
        tree_merge_ref(self.expected, *arguments, self.proposed)
        assert_same(self.forest, self.expected)

    def grow(self, sizes: Sizes, kind: str, rng: np.random.Generator, levels: int, ends: torch.Tensor) -> None:
        for _ in range(levels):
            self.merge(*proposals(sizes, kind, rng), mixtures(sizes, rng), ends)

    def assert_selects(self, nodes: int | torch.Tensor, least: list[float], deepest: list[int], capacity: int) -> None:
        limits = torch.tensor(least), torch.tensor(deepest, dtype=torch.int32)
        count, max_depth = len(least), self.forest.max_depth
        trees = DeviceTrees.allocate(count, nodes=capacity, max_depth=max_depth, device=DEVICE)
        expected = DeviceTrees.allocate(count, nodes=capacity, max_depth=max_depth)
        poison(trees)
        on_device = [tensor.to(DEVICE) for tensor in (self.root_tokens, *limits)]
        wanted = nodes if isinstance(nodes, int) else nodes.to(DEVICE)
        assert tree_select_triton(self.forest, self.on_device, on_device[0], wanted, *on_device[1:], out=trees) is trees
        assert_same(
            trees, tree_select_ref(self.expected, self.proposed, self.root_tokens, nodes, *limits, out=expected)
        )


@pytest.mark.parametrize(("sizes", "kind"), CASES)
def test_growth(sizes: Sizes, kind: str) -> None:
    """One of several requests may sit out. All candidates are selected, the root alone, and some by limits."""
    seed, count = KINDS.index(kind), sizes.requests
    rng = np.random.default_rng(seed)
    idle = seed % (count + 1) if count > 1 else None
    growth = Growth(sizes, [-1 if i == idle else 100 + i for i in range(count)], random_seeds(sizes, rng))
    ends = torch.from_numpy(rng.integers(-1, sizes.proposals + 3, (count, seed % 3)).astype(np.int32))
    growth.grow(sizes, kind, rng, sizes.depth, ends)
    values = growth.expected.cand_values
    everything = 1 + int((values >= 0).sum((1, 2)).max()) + sizes.seeds
    for nodes in {1, everything, int(rng.integers(2, everything + 4))}:
        growth.assert_selects(nodes, [-INF] * count, [99] * count, capacity=nodes + 2 * (nodes % 2))
    limits = [*values[values >= 0].tolist(), NAN, INF]
    nodes, deepest = int(rng.integers(1, everything + 1)), rng.integers(-1, sizes.depth + 2, count).tolist()
    growth.assert_selects(nodes, rng.choice(limits, count).tolist(), deepest, capacity=nodes)


@pytest.mark.parametrize("levels", [0, 2])
def test_forests_that_are_not_grown_out(levels: int) -> None:
    """Levels that were not grown hold poison."""
    rng, sizes = np.random.default_rng(2), Sizes(2, 2, 3, 3, 3)
    growth = Growth(sizes, [100, 101])
    growth.grow(sizes, "random", rng, levels, torch.full((2, 1), -1, dtype=torch.int32))
    for field in (field.name for field in dataclasses.fields(DeviceForest) if field.name.startswith("cand_")):
        tensor = getattr(growth.forest, field)[:, levels:]
        tensor.fill_(0.5 if tensor.dtype == torch.float32 else 7)
    growth.assert_selects(12, [0.0, 0.0], [99, 99], capacity=12)


def test_each_request_may_want_another_number() -> None:
    """As data: what is out of range counts as the nearest number that is not."""
    sizes = Sizes(5, 2, 3, 3, 2)
    growth = Growth(sizes, list(range(100, 105)))
    growth.grow(sizes, "random", np.random.default_rng(6), 2, torch.full((5, 1), -1, dtype=torch.int32))
    growth.assert_selects(torch.tensor([1, 0, 5, 8, 99], dtype=torch.int32), [0.0] * 5, [9] * 5, capacity=8)


def level_of(tokens: list[int], probs: list[float], seeds: Seeds) -> DeviceForest:
    """The forest after one level of one request; tokens and probs: those of one SSM below the root."""
    sizes = Sizes(1, 1, 4, len(tokens), 2)
    said = torch.zeros(1, 1, 4, len(tokens), dtype=torch.int32)
    chance = torch.full(said.shape, NAN)  # no frontier node there: must not be heard
    said[0, 0, 0], chance[0, 0, 0] = torch.tensor(tokens, dtype=torch.int32), torch.tensor(probs)
    growth = Growth(sizes, [1], [seeds])
    growth.merge(said, chance, torch.ones(1, 1), torch.full((1, 1), -1, dtype=torch.int32))
    return growth.forest


def test_seeds_by_hand() -> None:
    """An SSM gives token 7 a half, being a seed three times that; no SSM names 9; more children than proposals."""
    children = [(7, 0.9, 3.0), (9, 0.2, 1.0), (4, 0.1, 1.0), (8, 0.3, 19.0)]
    seeds: Seeds = {(token,): (prob, ratio) for token, prob, ratio in children}
    forest = level_of([7, 8], [0.5, 0.25], seeds)
    assert forest.cand_tokens[0, 0, :4].tolist() == [7, 8, -1, 9]
    assert forest.cand_masks[0, 0, :4].tolist() == [1 | 1 << SEED_BIT, 1 | 1 << SEED_BIT, 0, 1 << SEED_BIT]
    told = np.float32(19) * np.float32(0.25)
    both = told / (told + np.float32(0.75))
    assert forest.cand_values[0, 0, :4].tolist() == [0.75, both, -INF, np.float32(0.05)]
    assert forest.frontier_seeds[0].tolist() == [3, 0, 1, -2]
    assert forest.seed_cands[0].tolist() == [0, 3, -1, 1]
    alone = level_of([-1, -1], [0.5, 0.25], seeds)
    assert alone.cand_values[0, 0, 2:4].tolist() == [np.float32(0.9), np.float32(0.2)]
