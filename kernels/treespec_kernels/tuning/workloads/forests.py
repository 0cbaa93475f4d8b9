"""Random proposals of SSMs, as inputs of the tree workloads."""

from __future__ import annotations

from typing import NamedTuple

import torch

from treespec_kernels.tree.device_trees import DeviceForest, ProposedTrees
from treespec_kernels.tree.growth_limits import CHILDREN, FRONTIER, MAX_DEPTH, SEEDS
from treespec_kernels.tree.tree_merge import tree_merge_ref, tree_merge_triton
from treespec_kernels.tree.tree_root import tree_root_ref, tree_root_triton

SSMS = 3
VOCAB = 12  # so small that SSMs often propose the same token


class ForestInputs(NamedTuple):
    forest: DeviceForest
    roots: torch.Tensor  # [B] int32
    tokens: torch.Tensor  # [levels, G, B, F, C] int32
    probs: torch.Tensor
    weights: torch.Tensor
    end_tokens: torch.Tensor
    proposed: ProposedTrees

    def grow(self) -> None:
        """Start the round and merge every level."""
        tree_root_triton(self.forest, self.roots)
        for tokens, probs in zip(self.tokens, self.probs, strict=True):
            tree_merge_triton(self.forest, tokens, probs, self.weights, self.end_tokens, self.proposed)

    def grown_by_reference(self) -> DeviceForest:
        """Return another forest, grown by the reference implementations."""
        forest = empty_forest(len(self.roots), self.roots.device)
        tree_root_ref(forest, self.roots)
        for tokens, probs in zip(self.tokens, self.probs, strict=True):
            tree_merge_ref(forest, tokens, probs, self.weights, self.end_tokens, self.proposed)
        return forest


def empty_forest(requests: int, device: torch.device) -> DeviceForest:
    return DeviceForest.allocate(
        requests, frontier=FRONTIER, num_ssms=SSMS, proposals=CHILDREN, max_depth=MAX_DEPTH, device=device
    )


def forest_inputs(requests: int, generator: torch.Generator, levels: int = MAX_DEPTH) -> ForestInputs:
    """Create proposals with low probabilities, for the first `levels` levels."""
    device = generator.device
    size = (levels, SSMS, requests, FRONTIER, CHILDREN)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device, dtype=torch.float32)

    tokens = uniform(*size[:-1], VOCAB).argsort(-1)[..., :CHILDREN]
    probs = uniform(*size).sort(-1, descending=True).values / CHILDREN
    return ForestInputs(
        forest=empty_forest(requests, device),
        roots=torch.full((requests,), 3, dtype=torch.int32, device=device),
        tokens=tokens.int().contiguous(),
        probs=probs.contiguous(),
        weights=torch.full((requests, SSMS), 1 / SSMS, device=device, dtype=torch.float32),
        end_tokens=torch.full((requests, 1), VOCAB - 1, dtype=torch.int32, device=device),
        proposed=proposed_trees(requests, generator),
    )


def proposed_trees(requests: int, generator: torch.Generator) -> ProposedTrees:
    """Return two chains for each request, which start with different tokens."""
    device = generator.device
    tokens = torch.randint(VOCAB, (requests, SEEDS), generator=generator, device=device, dtype=torch.int32)
    tokens[:, SEEDS // 2] = (tokens[:, 0] + 1) % VOCAB
    parents = torch.arange(-1, SEEDS - 1, dtype=torch.int32, device=device).repeat(requests, 1)
    parents[:, SEEDS // 2] = -1
    probs = torch.rand(requests, SEEDS, generator=generator, device=device, dtype=torch.float32)
    return ProposedTrees(tokens, parents, probs, 1 + 8 * probs)


def forest_key() -> dict[str, int]:
    return {"levels": MAX_DEPTH, "frontier": FRONTIER, "ssms": SSMS, "proposals": CHILDREN, "seeds": SEEDS}


def num_bytes(tensors: tuple[torch.Tensor, ...]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
