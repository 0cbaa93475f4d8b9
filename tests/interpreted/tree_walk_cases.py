"""Cases of tree_walk, by equality with `TokenTree.follow`, which knows no padding."""

import random

import pytest
import torch

from tests.helpers.growth import poison
from tests.interpreted.common import DEVICE, IMPLEMENTATION
from treespec.tree import TokenTree
from treespec_kernels.tree.device_trees import DeviceTrees
from treespec_kernels.tree.tree_walk import Walk, tree_walk_ref, tree_walk_triton
from treespec_kernels.tuning.testing import tree_parents

tree_walk = {"ref": tree_walk_ref, "triton": tree_walk_triton}[IMPLEMENTATION]
ROUNDS = 6 if IMPLEMENTATION == "triton" else 100
TOO_LARGE = 2**31 - 1


def tree_of(parents: list[int], vocab: int, choose: random.Random) -> TokenTree:
    """A tree whose siblings carry different tokens, few enough that they come up elsewhere too."""
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        taken = {tokens[other] for other in range(node) if parents[other] == parent}
        tokens.append(choose.choice([token for token in range(vocab + len(parents)) if token not in taken][:vocab]))
    return TokenTree.from_parents(tokens, parents, 1.0, "any")


def device_trees(trees: list[TokenTree | None], nodes: int, max_depth: int) -> DeviceTrees:
    """The same on the device; None is idle. What padding may hold anything holds nonsense."""
    made = DeviceTrees.allocate(len(trees), nodes=nodes, max_depth=max_depth)
    for tensor in (made.tokens, made.parents):
        tensor.fill_(0)
    for request, tree in enumerate(trees):
        size = made.num_nodes[request] = 0 if tree is None else len(tree)
        if tree is None:
            continue
        for name in ("tokens", "parents", "depths"):
            getattr(made, name)[request, :size] = torch.from_numpy(getattr(tree, name))
        for node in range(len(tree)):
            path = torch.from_numpy(tree.path_to(node))
            made.ancestors[request, node, : len(path)] = path
    return DeviceTrees(**{name: getattr(made, name).to(DEVICE) for name in made.__dataclass_fields__})


def walk(trees: DeviceTrees, choices: torch.Tensor, finite: torch.Tensor) -> Walk:
    out = Walk.allocate(trees.num_requests, max_depth=trees.max_depth, device=DEVICE)
    poison(out)
    assert tree_walk(trees, choices.to(DEVICE), finite.to(DEVICE), out=out) is out
    return Walk(*(tensor.cpu() for tensor in out.tensors.values()))


def assert_walks(
    trees: list[TokenTree | None], choices: torch.Tensor, finite: torch.Tensor, max_depth: int
) -> list[int]:
    """Compares with `TokenTree.follow`, and what must stand beyond each path; returns the lengths."""
    apart = [torch.nn.functional.pad(tensor, (2, 3)) for tensor in (choices, finite)]  # rows in wider ones
    walked = walk(device_trees(trees, choices.shape[1], max_depth), *(wide[:, 2:-3] for wide in apart))
    for request, tree in enumerate(trees):
        length = int(walked.path_lens[request])
        path, emitted = walked.paths[request].tolist(), walked.tokens[request].tolist()
        assert path[length:] == [0] * (max_depth + 1 - length)
        assert emitted[length:] == [-1] * (max_depth + 1 - length)
        if tree is None or not finite[request, : len(tree)].all():
            assert length == 0
            continue
        chosen = choices[request, : len(tree)].tolist()
        expected = tree.follow(chosen)
        assert path[:length] == expected.tolist()
        assert emitted[:length] == [*tree.tokens[expected[1:]].tolist(), chosen[expected[-1]]]
    return walked.path_lens.tolist()


def all_choices(trees: list[TokenTree | None], kind: str, nodes: int, choose: random.Random) -> torch.Tensor:
    """[B, nodes] int64: "accepted": along a path to a leaf, "rejected": no child's, "random": a child's or not."""
    choices = torch.full((len(trees), nodes), TOO_LARGE)
    for request, tree in enumerate(trees):
        for node in range(0 if tree is None else len(tree)):
            below = tree.tokens[tree.parents == node].tolist()
            stops = kind == "rejected" or not below or (kind == "random" and choose.random() < 0.25)
            choices[request, node] = 999 if stops else choose.choice(below)
    return choices


@pytest.mark.parametrize("kind, dtype", [("accepted", torch.int32), ("rejected", torch.int64), ("random", torch.int64)])
def test_fuzz(kind: str, dtype: torch.dtype) -> None:
    for seed in range(ROUNDS):
        choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        trees: list[TokenTree | None] = []
        for _ in range(choose.randint(1, 4)):
            shape, size = choose.choice(["chain", "star", "random", "idle"]), choose.choice([1, 2, 5, 13])
            parents = [] if shape == "idle" else tree_parents(shape, size, generator)
            trees.append(tree_of(parents, 4 if shape != "star" else 16, choose) if parents else None)
        max_depth = max([int(tree.depths.max()) for tree in trees if tree] or [0]) + choose.randint(0, 2)
        nodes = max([len(tree) for tree in trees if tree] or [1]) + choose.randint(0, 2)
        choices = all_choices(trees, kind, nodes, choose).to(dtype)
        finite = torch.ones(len(trees), nodes, dtype=torch.bool)
        for request, tree in enumerate(trees):
            finite[request, len(tree) if tree else 0 :] = False  # padding may be anything
        if choose.random() < 0.3:
            finite[choose.randrange(len(trees)), choose.randrange(nodes)] = False
        try:
            lengths = assert_walks(trees, choices, finite, max_depth)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        for request, tree in enumerate(trees):
            if kind == "rejected" and tree is not None and finite[request, : len(tree)].all():
                assert lengths[request] == 1
