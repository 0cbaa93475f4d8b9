"""Cases of tree_root and tree_merge, by equality: with the specification in every tensor, and with a dictionary of
paths in what the next pass sees."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from tests.helpers.growth import (
    KINDS,
    Seed,
    Seeds,
    Sizes,
    Trie,
    as_proposed,
    assert_frontier,
    assert_trees,
    mixtures,
    poison,
    proposals,
    random_seeds,
)
from tests.interpreted.common import DEVICE, IMPLEMENTATION
from treespec_kernels.tree.device_trees import SEED_BIT, DeviceForest, ProposedTrees
from treespec_kernels.tree.tree_merge import tree_merge_ref, tree_merge_triton
from treespec_kernels.tree.tree_root import tree_root_ref, tree_root_triton
from treespec_kernels.tree.tree_select import tree_select_ref

tree_root = {"ref": tree_root_ref, "triton": tree_root_triton}[IMPLEMENTATION]
tree_merge = {"ref": tree_merge_ref, "triton": tree_merge_triton}[IMPLEMENTATION]

SHAPES = [
    Sizes(1, 1, 1, 1, 1),
    Sizes(1, 1, 1, 1, 5),  # a chain
    Sizes(2, 2, 1, 7, 1),  # a star
    Sizes(3, 3, 3, 2, 4),
    Sizes(2, 1, 5, 3, 3),
    Sizes(2, 5, 2, 3, 2),
    Sizes(1, 3, 8, 8, 3, 32),
    Sizes(2, 0, 3, 3, 3, 9),  # no SSM
    Sizes(1, 1, 3, 2, 8),  # deep
]
# The interpreter takes a second for the larger ones: every kind of one shape, and a kind of each other.
CASES = [
    pytest.param(sizes, kind, id=f"{sizes}-{kind}")
    for i, sizes in enumerate(SHAPES)
    for j, kind in enumerate(KINDS)
    if IMPLEMENTATION == "ref" or i == 3 or (i - j) % len(KINDS) == 0
]
INF, NAN = float("inf"), float("nan")


def assert_same(actual: DeviceForest, expected: DeviceForest) -> None:
    for field in dataclasses.fields(DeviceForest):
        a, e = getattr(actual, field.name).cpu(), getattr(expected, field.name)
        wrong = (a != e).nonzero()  # NaN differs from itself
        assert len(wrong) == 0, f"{field.name} differs at {wrong[:4].tolist()}: {a[*wrong[0]]}, expected {e[*wrong[0]]}"


class Growth:
    """The implementation, the specification and the model, side by side."""

    def __init__(self, sizes: Sizes, roots: list[int], seeds: list[Seeds] | None = None):
        self.forest, self.expected = sizes.forest(DEVICE), sizes.forest()
        seeds = seeds or [{} for _ in roots]
        self.proposed = as_proposed(sizes, seeds)
        self.tries = [Trie(root, sizes.frontier, own) for root, own in zip(roots, seeds, strict=True)]
        poison(self.forest)
        self.root_tokens = torch.tensor(roots, dtype=torch.int32)
        tree_root(self.forest, self.root_tokens.to(DEVICE))
        tree_root_ref(self.expected, self.root_tokens)
        self.check()

    def check(self) -> None:
        assert_same(self.forest, self.expected)
        assert_frontier(self.forest, self.tries)

    def merge(self, tokens: torch.Tensor, probs: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> None:
        self.by_ops(tokens, probs, weights, ends)
        for request, trie in enumerate(self.tries):
            own = set(ends[request].tolist())
            trie.merge(tokens[:, request].numpy(), probs[:, request].numpy(), weights[request].numpy(), own)
        self.check()

    def by_ops(self, *arguments: torch.Tensor) -> None:
        on_device = ProposedTrees(*(tensor.to(DEVICE) for tensor in self.proposed))
        tree_merge(self.forest, *(tensor.to(DEVICE) for tensor in arguments), on_device)
        tree_merge_ref(self.expected, *arguments, self.proposed)

    def all_candidates(self) -> None:
        """Every candidate, by the selection of all of them."""
        requests, count = len(self.tries), 1 + self.forest.max_depth * self.forest.candidates + self.forest.num_seeds
        least, deepest = torch.full((requests,), -INF), torch.full((requests,), 99, dtype=torch.int32)
        trees = tree_select_ref(self.expected, self.proposed, self.root_tokens, count, least, deepest)
        assert_trees(trees, self.tries, count, least, deepest)


@pytest.mark.parametrize(("sizes", "kind"), CASES)
def test_growth(sizes: Sizes, kind: str) -> None:
    """Of several requests one may sit the round out; the number of end tokens varies from none to two."""
    seed = KINDS.index(kind)
    rng = np.random.default_rng(seed)
    idle = seed % (sizes.requests + 1) if sizes.requests > 1 else None
    roots = [-1 if request == idle else 100 + request for request in range(sizes.requests)]
    growth = Growth(sizes, roots, random_seeds(sizes, rng))
    ends = torch.from_numpy(rng.integers(-1, sizes.proposals + 3, (sizes.requests, seed % 3)).astype(np.int32))
    for _ in range(sizes.depth):
        growth.merge(*proposals(sizes, kind, rng), mixtures(sizes, rng), ends)
    growth.all_candidates()


def test_a_forest_is_started_again() -> None:
    sizes, rng = Sizes(2, 2, 2, 2, 2), np.random.default_rng(0)
    growth = Growth(sizes, [5, 6])
    growth.merge(*proposals(sizes, "random", rng), mixtures(sizes, rng), torch.full((2, 1), -1, dtype=torch.int32))
    fresh = Growth(sizes, [7, -1])
    tree_root(growth.forest, fresh.root_tokens.to(DEVICE))
    assert_same(growth.forest, fresh.expected)


def test_a_forest_at_its_depth_stays() -> None:
    sizes, rng = Sizes(1, 2, 2, 2, 1), np.random.default_rng(0)
    growth, ends = Growth(sizes, [5]), torch.zeros(1, 0, dtype=torch.int32)
    growth.merge(*proposals(sizes, "random", rng), torch.full((1, 2), 0.5), ends)
    before = copy.deepcopy(growth.forest)
    growth.by_ops(*proposals(sizes, "random", rng), torch.full((1, 2), 0.5), ends)
    assert_same(growth.forest, growth.expected)
    for field in dataclasses.fields(DeviceForest):
        assert torch.equal(getattr(growth.forest, field.name), getattr(before, field.name))


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
    """Token 7: an SSM gives it a half, and being a seed makes it three times as likely; no SSM names 9, and the seed
    has more children than proposals."""
    children = [(7, 0.9, 3.0), (9, 0.2, 1.0), (4, 0.1, 1.0), (8, 0.3, 19.0)]
    seeds: Seeds = {(t,): Seed(i, np.float32(q), np.float32(r)) for i, (t, q, r) in enumerate(children)}
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


def test_proposals_may_be_views() -> None:
    """Every stack of equal SSMs writes its part of a larger tensor."""
    sizes, rng = Sizes(2, 3, 3, 2, 2), np.random.default_rng(0)
    growth, ends = Growth(sizes, [3, 4]), torch.full((2, 2), -1, dtype=torch.int32)
    for _ in range(2):
        tokens, probs = proposals(sizes, "random", rng)
        wide = torch.full((2, 3, 5, 4), NAN)
        wide[..., 1:3] = probs.permute(1, 0, 2, 3).repeat_interleave(2, 2)[:, :, :5]
        tokens_view = torch.full((3, 2, 3, 8), 99, dtype=torch.int32)
        tokens_view[..., 3:5] = tokens
        probs_view = wide.permute(1, 0, 2, 3)[:, :, ::2, 1:3]
        assert torch.equal(probs_view, probs) and not probs_view.is_contiguous()
        growth.merge(tokens_view[..., 3:5], probs_view, mixtures(sizes, rng), ends)
