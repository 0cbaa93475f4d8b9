"""Whole rounds of a batch on the device; on a GPU, each step is replayed from a graph that was captured once."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.growth import Sizes, Trie, as_proposed, assert_trees, mixtures, proposals, random_seeds
from tests.interpreted.common import DEVICE, IMPLEMENTATION
from treespec.tree import TokenTree
from treespec_kernels.tree.device_trees import DeviceTrees
from treespec_kernels.tree.tree_merge import tree_merge_ref, tree_merge_triton
from treespec_kernels.tree.tree_root import tree_root_ref, tree_root_triton
from treespec_kernels.tree.tree_select import tree_select_ref, tree_select_triton
from treespec_kernels.tree.tree_walk import Walk, tree_walk_ref, tree_walk_triton

tree_root, tree_merge, tree_select, tree_walk = {
    "ref": (tree_root_ref, tree_merge_ref, tree_select_ref, tree_walk_ref),
    "triton": (tree_root_triton, tree_merge_triton, tree_select_triton, tree_walk_triton),
}[IMPLEMENTATION]
NODES = 12


class Round:
    """The static buffers of a round and its steps, each a function without arguments."""

    def __init__(self, sizes: Sizes):
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=DEVICE)

        shape = (sizes.ssms, sizes.requests, sizes.frontier, sizes.proposals)
        self.forest = sizes.forest(DEVICE)
        self.trees = DeviceTrees.allocate(sizes.requests, nodes=NODES, max_depth=sizes.depth, device=DEVICE)
        self.walked = Walk.allocate(sizes.requests, max_depth=sizes.depth, device=DEVICE)
        self.roots, self.max_depths = zeros(sizes.requests), zeros(sizes.requests)
        self.tokens, self.probs = zeros(*shape), zeros(*shape, dtype=torch.float32)
        self.weights = zeros(sizes.requests, sizes.ssms, dtype=torch.float32)
        self.ends, self.least = zeros(sizes.requests, 2), zeros(sizes.requests, dtype=torch.float32)
        self.choices = zeros(sizes.requests, NODES, dtype=torch.int64)
        self.finite = zeros(sizes.requests, NODES, dtype=torch.bool)
        self.proposed = sizes.unproposed(DEVICE)
        self.root = captured(lambda: tree_root(self.forest, self.roots))
        said = self.tokens, self.probs, self.weights, self.ends
        self.merge = captured(lambda: tree_merge(self.forest, *said, self.proposed))
        self.select = captured(
            lambda: tree_select(
                self.forest, self.proposed, self.roots, NODES, self.least, self.max_depths, out=self.trees
            )
        )
        self.walk = captured(lambda: tree_walk(self.trees, self.choices, self.finite, out=self.walked))


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """On a GPU the step's replay, elsewhere the step. The first call compiles, which cannot be captured."""
    if DEVICE != "cuda":
        return step
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def choices_of(trie: Trie, path: tuple[int, ...], rng: np.random.Generator) -> int:
    """Mostly a child's token, where there is one."""
    below = [child[-1] for child in trie.nodes if child[:-1] == path]
    return int(rng.choice(below)) if below and rng.random() < 0.9 else 9999


@pytest.mark.parametrize("levels", [3, 2])
def test_rounds(levels: int) -> None:
    """Several rounds on the same buffers; the requests' depths, limits and idleness change."""
    sizes = Sizes(3, 3, 4, 3, 3)
    rng, batch = np.random.default_rng(levels), Round(sizes)
    lengths: list[int] = []
    for number in range(2 if IMPLEMENTATION == "triton" else 20):
        roots = [-1 if (request + number) % 4 == 3 else 50 + request for request in range(3)]
        seeds = random_seeds(sizes, rng)
        tries = [Trie(root, sizes.frontier, own) for root, own in zip(roots, seeds, strict=True)]
        least, deepest = torch.tensor([0.0, 0.001, 0.05]), torch.tensor([3, number % 4, 2], dtype=torch.int32)
        ends = torch.tensor([[1, -1], [-1, -1], [0, 2]], dtype=torch.int32)
        for buffer, tensor in (
            (batch.roots, torch.tensor(roots, dtype=torch.int32)),
            (batch.least, least),
            (batch.max_depths, deepest),
            (batch.ends, ends),
            *zip(batch.proposed, as_proposed(sizes, seeds), strict=True),
        ):
            buffer.copy_(tensor)
        batch.root()
        for _ in range(levels):
            tokens, probs, weights = *proposals(sizes, "random", rng), mixtures(sizes, rng)
            for buffer, tensor in ((batch.tokens, tokens), (batch.probs, probs), (batch.weights, weights)):
                buffer.copy_(tensor)
            batch.merge()
            for request, trie in enumerate(tries):
                own = tokens[:, request].numpy(), probs[:, request].numpy(), weights[request].numpy()
                trie.merge(*own, set(ends[request].tolist()))
        batch.select()
        assert_trees(batch.trees, tries, NODES, least, deepest)

        choices, finite = torch.zeros(3, NODES, dtype=torch.int64), torch.ones(3, NODES, dtype=torch.bool)
        finite[number % 3, 0] = number % 5 != 4
        paths = [
            trie.select(NODES, *limits) for trie, *limits in zip(tries, least.tolist(), deepest.tolist(), strict=True)
        ]
        for request, (trie, nodes) in enumerate(zip(tries, paths, strict=True)):
            choices[request, : len(nodes)] = torch.tensor([choices_of(trie, path, rng) for path in nodes])
        batch.choices.copy_(choices)
        batch.finite.copy_(finite)
        batch.walk()
        for request, (trie, nodes) in enumerate(zip(tries, paths, strict=True)):
            length = int(batch.walked.path_lens[request])
            if not nodes or not finite[request, 0]:
                assert length == 0
                continue
            parents = [nodes.index(path[:-1]) if path else -1 for path in nodes]
            tree = TokenTree.from_parents([path[-1] if path else trie.root for path in nodes], parents, 1.0, "any")
            chosen = choices[request, : len(nodes)].tolist()
            path = tree.follow(chosen)
            expected = [*tree.tokens[path[1:]].tolist(), chosen[path[-1]]]
            assert batch.walked.paths[request, :length].tolist() == path.tolist()
            assert batch.walked.tokens[request, :length].tolist() == expected
            lengths.append(length)
    assert max(lengths) > 1
