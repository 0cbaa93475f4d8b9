"""Workload of tree seeds: proposals below the roots of a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from treespec_kernels.tree.device_trees import DeviceForest
from treespec_kernels.tree.tree_root import tree_root_ref
from treespec_kernels.tree.tree_seeds import DeviceSeeds, tree_seeds_ref, tree_seeds_triton

from .base import Setting, Tensors, Workload, equal
from .forests import FRONTIER, PROPOSALS, VOCAB, empty_forest, forest_key

SEEDS = 32


class SeedInputs(NamedTuple):
    forest: DeviceForest  # at its roots, where proposals do not depend on earlier ones
    seeds: DeviceSeeds
    tokens: torch.Tensor  # [B, F, C]
    probs: torch.Tensor


def seed_inputs(requests: int, generator: torch.Generator) -> SeedInputs:
    """Seeds of two chains per request, the second one from the root's second child on."""
    device = generator.device
    forest = empty_forest(requests, device)
    tree_root_ref(forest, torch.full((requests,), 3, dtype=torch.int32, device=device))
    parents = torch.arange(-1, SEEDS - 1, dtype=torch.int32, device=device).repeat(requests, 1)
    parents[:, SEEDS // 2] = -1
    shape = (requests, FRONTIER, PROPOSALS)
    return SeedInputs(
        forest,
        DeviceSeeds(
            torch.randint(VOCAB, (requests, SEEDS), generator=generator, device=device, dtype=torch.int32),
            parents,
            torch.rand(requests, SEEDS, generator=generator, device=device, dtype=torch.float32),
            torch.full((requests, FRONTIER), -1, dtype=torch.int32, device=device),
        ),
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(shape, device=device, dtype=torch.float32),
    )


class TreeSeedsWorkload(Workload[SeedInputs]):
    """The children of the root in 32 seeds."""

    op = "tree_seeds"

    def __init__(self, setting: Setting, requests: int):
        super().__init__(setting.device, setting.dtype)
        self.requests = requests
        self.key = forest_key() | {"seeds": SEEDS}
        self.load = f"requests {requests}"
        self.bytes = requests * (3 * SEEDS + FRONTIER * (4 + 2 * PROPOSALS)) * 4
        self.flops = 0

    def make(self, generator: torch.Generator) -> SeedInputs:
        return seed_inputs(self.requests, generator)

    def run(self, config: Any, copy: int = 0) -> Tensors:
        inputs = self.inputs[copy]
        tree_seeds_triton(*inputs)
        return inputs.tokens, inputs.probs, inputs.seeds.places

    def expected(self) -> Tensors:
        forest, seeds, tokens, probs = self.inputs[0]
        own = DeviceSeeds(seeds.tokens, seeds.parents, seeds.probs, torch.full_like(seeds.places, -1))
        tokens, probs = torch.empty_like(tokens), torch.empty_like(probs)
        tree_seeds_ref(forest, own, tokens, probs)
        return tokens, probs, own.places

    def compare(self, actual: Tensors, expected: Tensors, config: Any) -> None:
        for name, own, right in zip(("tokens", "probs", "places"), actual, expected, strict=True):
            equal(own, right, name)


def workloads(setting: Setting) -> list[Workload]:
    return [TreeSeedsWorkload(setting, requests) for requests in dict.fromkeys((1, setting.requests))]
