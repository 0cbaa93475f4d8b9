"""Cases of tree_seeds, for the implementation that TREESPEC_TREE_SEEDS names: run by tests/test_tree_seeds.py."""

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch

from treespec_kernels.tree.device_trees import DeviceForest
from treespec_kernels.tree.tree_merge import tree_merge_ref
from treespec_kernels.tree.tree_root import tree_root_ref
from treespec_kernels.tree.tree_seeds import DeviceSeeds, tree_seeds_ref, tree_seeds_triton

IMPLEMENTATION = os.environ["TREESPEC_TREE_SEEDS"]
DEVICE = "cpu" if IMPLEMENTATION != "triton" or os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
B, F, C, D, VOCAB = 3, 4, 3, 4, 6
propose: Callable[..., None] = {"ref": tree_seeds_ref, "triton": tree_seeds_triton}[IMPLEMENTATION]


def random_seeds(rng: np.random.Generator, size: int) -> DeviceSeeds:
    """Small trees over few tokens, the second request without any; siblings have different tokens."""
    tokens, parents = np.full((B, size), -1, dtype=np.int32), np.full((B, size), -1, dtype=np.int32)
    for request in (0, 2):
        taken: set[tuple[int, int]] = set()
        for seed in range(int(rng.integers(1, size + 1))):
            parent, token = int(rng.integers(-1, seed)) if seed else -1, int(rng.integers(VOCAB))
            if (parent, token) in taken:
                break
            taken.add((parent, token))
            tokens[request, seed], parents[request, seed] = token, parent
    probs = rng.random((B, size)).astype(np.float32)
    places = np.full((B, F), 77, dtype=np.int32)
    return DeviceSeeds(*(torch.from_numpy(each).to(DEVICE) for each in (tokens, parents, probs, places)))


def paths_of(forest: DeviceForest, request: int) -> list[tuple[int, ...] | None]:
    """The tokens from the root down to each frontier node, by following parents; None where there is none."""
    tokens, parents = forest.cand_tokens[request].flatten().tolist(), forest.cand_parents[request].flatten().tolist()
    paths: list[tuple[int, ...] | None] = []
    for flat in forest.frontier[request].tolist():
        path: list[int] = []
        if flat >= 0 and flat < len(tokens):
            while flat >= 0:
                path.insert(0, tokens[flat])
                flat = parents[flat]
        paths.append(tuple(path) if flat != -1 or path else None)
    return paths


@pytest.mark.parametrize("size", [1, 5, 16])
@pytest.mark.parametrize("seed", range(3))
def test_children_of_the_seeds_on_the_same_path(size: int, seed: int) -> None:
    rng = np.random.default_rng(100 * size + seed)
    seeds = random_seeds(rng, size)
    forest = DeviceForest.allocate(B, frontier=F, num_ssms=2, proposals=C, max_depth=D, device=DEVICE)
    roots = torch.tensor([1, 2, 3], dtype=torch.int32, device=DEVICE)
    tree_root_ref(forest, roots)
    weights, ends = torch.ones(B, 2, device=DEVICE), torch.full((B, 1), -1, dtype=torch.int32, device=DEVICE)
    found = 0
    for _ in range(D):
        tokens = torch.full((2, B, F, C), 99, dtype=torch.int32, device=DEVICE)
        probs = torch.full((2, B, F, C), float("nan"), device=DEVICE)
        propose(forest, seeds, tokens[1], probs[1])
        for request in range(B):
            own = (seeds.tokens[request].tolist(), seeds.parents[request].tolist(), seeds.probs[request].tolist())
            children: dict[tuple[int, ...], list[tuple[int, float]]] = {}
            seed_paths: list[tuple[int, ...]] = []
            for token, parent, prob in zip(*own, strict=True):
                above = seed_paths[parent] if parent >= 0 else ()
                seed_paths.append((*above, token))
                if token >= 0:
                    children.setdefault(above, []).append((token, prob))
            for node, path in enumerate(paths_of(forest, request)):
                expected = children.get(path, [])[:C] if path is not None else []
                said = list(zip(tokens[1, request, node].tolist(), probs[1, request, node].tolist(), strict=True))
                assert said == [*expected, *[(-1, 0.0)] * (C - len(expected))]
                found += len(expected)
        tokens[0] = torch.from_numpy(rng.integers(-1, VOCAB, (B, F, C)).astype(np.int32))
        probs[0] = torch.from_numpy(rng.random((B, F, C)).astype(np.float32) / 2)
        tree_merge_ref(forest, tokens, probs, weights, ends)
    assert found


def test_refused() -> None:
    forest = DeviceForest.allocate(B, frontier=F, num_ssms=2, proposals=C, max_depth=D, device=DEVICE)
    seeds = random_seeds(np.random.default_rng(0), 4)
    tokens, probs = torch.zeros(B, F, C, dtype=torch.int32, device=DEVICE), torch.zeros(B, F, C, device=DEVICE)
    with pytest.raises(ValueError, match=r"tokens has shape \[3, 3, 3\]; expected \[3, 4, C\]"):
        propose(forest, seeds, tokens[:, :3], probs[:, :3])
    with pytest.raises(ValueError, match=r"probs has dtype torch.float64; convert it to torch.float32"):
        propose(forest, seeds, tokens, probs.double())
    with pytest.raises(ValueError, match=r"seeds.tokens has shape \[2, 4\]; expected \[3, S\]"):
        propose(forest, DeviceSeeds(seeds.tokens[:2], seeds.parents, seeds.probs, seeds.places), tokens, probs)
