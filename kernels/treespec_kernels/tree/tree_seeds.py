"""Tree seeds: merges trees that need no draft pass, such as earlier continuations of the same tokens, level by level.

Each request has a small tree of its own, its *seeds*, which shares the root of the growing tree. If a frontier node's
path is a path of the seeds, the children of that seed are proposals at the node, like those of another SSM. So
`tree_merge` merges them with the SSMs' proposals of the same tokens, and the SSMs continue below them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from treespec_kernels.launch.triton_launch import check_last_strides, check_launch, require_triton
from treespec_kernels.tree.device_trees import DeviceForest, block_of, check_tensor

NUM_WARPS = 1


@dataclass(frozen=True)
class DeviceSeeds:
    """The seeds of a batch, at most S per request, without the root.

    Args:
        tokens: [B, S] int32, -1 for no seed.
        parents: [B, S] int32, an earlier seed, or -1 for the root.
        probs: [B, S] float32, of the token after its parent.
        places: [B, F] int32, the seed of each frontier node; S for the root, -1 for none. Written by `tree_seeds`.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    probs: torch.Tensor
    places: torch.Tensor

    @property
    def width(self) -> int:
        """S."""
        return self.tokens.shape[1]


def tree_seeds_ref(forest: DeviceForest, seeds: DeviceSeeds, tokens: torch.Tensor, probs: torch.Tensor) -> None:
    """Writes the seeds' proposals at the frontier. numpy on the host, any device.

    Args:
        forest: after `tree_root` or `tree_merge`, not changed.
        seeds: `places` are read and written.
        tokens: [B, F, C] int32, written: the first C children of each node's seed, padded with -1.
        probs: [B, F, C] float32, written: their probabilities, padded with 0.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """
    check_tree_seeds(forest, seeds, tokens, probs)
    state = {name: getattr(forest, name).cpu().numpy() for name in forest.__dataclass_fields__}
    own = {name: getattr(seeds, name).cpu().numpy() for name in ("tokens", "parents", "probs")}
    before, places = seeds.places.cpu().numpy(), np.full(seeds.places.shape, -1, dtype=np.int32)
    width, frontier_width = seeds.width, forest.frontier_width
    tokens.fill_(-1)
    probs.zero_()
    for request in range(forest.num_requests):
        level = int(state["levels"][request])
        for node in range(frontier_width):
            flat = int(state["frontier"][request, node])
            if flat < 0:
                continue
            if level == 0:
                places[request, node] = width
            else:
                parent = int(state["cand_parents"][request].flat[flat])
                slot = 0 if parent < 0 else int(state["cand_slots"][request].flat[parent])
                above = int(before[request, 0 if parent < 0 else slot - 1 - (level - 2) * frontier_width])
                if above >= 0:
                    token = int(state["frontier_tokens"][request, node])
                    same = (own["tokens"][request] == token) & _below(own, request, above, width)
                    places[request, node] = int(np.flatnonzero(same)[0]) if same.any() else -1
            place = int(places[request, node])
            if place < 0:
                continue
            children = np.flatnonzero(_below(own, request, place, width))[: tokens.shape[2]]
            for c, child in enumerate(children):
                tokens[request, node, c] = int(own["tokens"][request, child])
                probs[request, node, c] = float(own["probs"][request, child])
    seeds.places.copy_(torch.from_numpy(places))


def _below(own: dict[str, np.ndarray], request: int, place: int, width: int) -> np.ndarray:
    """bool [S]: the children of a seed, or of the root."""
    parent = -1 if place == width else place
    return (own["tokens"][request] >= 0) & (own["parents"][request] == parent)


def tree_seeds_triton(forest: DeviceForest, seeds: DeviceSeeds, tokens: torch.Tensor, probs: torch.Tensor) -> None:
    """`tree_seeds_ref` on a GPU, in one launch and without a host sync.

    Raises:
        ValueError: a shape, dtype, stride or device that does not fit, or triton that cannot run here.
    """
    check_tree_seeds(forest, seeds, tokens, probs)
    check_last_strides(tokens=tokens, probs=probs)
    require_triton("tree_seeds")
    from treespec_kernels.tree import tree_seeds_kernels as kernels

    check_launch("tree_seeds", kernels.propose_seeds, probs)
    kernels.propose_seeds[(forest.num_requests,)](
        seeds.tokens,
        seeds.parents,
        seeds.probs,
        seeds.places,
        forest.cand_parents,
        forest.cand_slots,
        forest.frontier,
        forest.frontier_tokens,
        forest.levels,
        tokens,
        probs,
        *tokens.stride()[:2],
        *probs.stride()[:2],
        **blocks_of(forest, seeds.width, tokens.shape[2]),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )


def blocks_of(forest: DeviceForest, width: int, proposals: int) -> dict[str, int]:
    """The kernel's constexpr arguments."""
    return {
        "SEEDS": width,
        "FRONTIER": forest.frontier_width,
        "PROPOSALS": proposals,
        "CANDIDATES": forest.max_depth * forest.candidates,
        "BLOCK_S": block_of(width),
        "BLOCK_F": block_of(forest.frontier_width),
    }


def check_tree_seeds(forest: DeviceForest, seeds: DeviceSeeds, tokens: torch.Tensor, probs: torch.Tensor) -> None:
    """Host-side checks of shapes, dtypes and devices; values on a device are never read."""
    requests, nodes, device = forest.num_requests, forest.frontier_width, forest.levels.device
    if seeds.tokens.dim() != 2 or len(seeds.tokens) != requests or seeds.width < 1:
        raise ValueError(f"seeds.tokens has shape {list(seeds.tokens.shape)}; expected [{requests}, S], S at least 1")
    shapes = dict.fromkeys(("tokens", "parents", "probs"), tuple(seeds.tokens.shape)) | {"places": (requests, nodes)}
    for name, shape in shapes.items():
        tensor = getattr(seeds, name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"seeds.{name} has shape {list(tensor.shape)}; expected {list(shape)}")
        if not tensor.is_contiguous():
            raise ValueError(f"seeds.{name} has strides {tensor.stride()}; make it contiguous")
        check_tensor(f"seeds.{name}", tensor, device, torch.float32 if name == "probs" else torch.int32)
    if tokens.dim() != 3 or tuple(tokens.shape[:2]) != (requests, nodes) or tokens.shape[2] < 1:
        raise ValueError(f"tokens has shape {list(tokens.shape)}; expected [{requests}, {nodes}, C], C at least 1")
    if probs.shape != tokens.shape:
        raise ValueError(f"probs has shape {list(probs.shape)}; expected {list(tokens.shape)} as tokens")
    check_tensor("tokens", tokens, device, torch.int32)
    check_tensor("probs", probs, device, torch.float32)
