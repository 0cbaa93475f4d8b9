"""Token trees on a device: the state of their growth, and the trees that the target scores.

A round of a batch is `tree_root`, then for each level one pass of the drafts and `tree_merge`, then `tree_select`, the
target pass and `tree_walk`. The host reads no tensor and a round allocates none, so that it can be captured in CUDA
graphs. One captured `tree_merge` is replayed for every level, because the level is data.

Sizes: B requests, F frontier nodes per request (which the drafts score next), G SSMs, C proposals of a source at a
node, D levels, S seeds (nodes of the tree proposed by sources without a model), N nodes of a tree, root included. The
seeds are source G. Each level of a request has P = F * (G + 1) * C candidates: proposal c of source g at frontier node
f has number (f * (G + 1) + g) * C + c in its level, and *flat index* level * P + number over all levels. Its depth in
the tree is level + 1, so a parent's flat index is always smaller. Seeds that growth did not reach are candidates too:
seed s has flat index D * P + s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.rows import check_contiguous
from treespec_kernels.tree.growth_limits import SEEDS

SEED_BIT = MAX_SSMS = 30  # an int32 mask has one bit per SSM, one for the seeds, and the sign
MAX_CANDIDATES = 4096  # of a request, over all levels; one program keeps them in registers, and 8,192 spill


class ProposedTrees(NamedTuple):
    """Trees proposed for a batch by sources without a draft model. Their nodes, without the root, are the seeds.

    Args:
        tokens: [B, S] int32, -1 for no seed. Siblings have different tokens.
        parents: [B, S] int32, index of an earlier seed, or -1 for the root.
        probs: [B, S] float32, probability of the token after its parent.
        ratios: [B, S] float32, positive and finite: evidence ratio, the factor on the odds of the token because it is a
            seed.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    probs: torch.Tensor
    ratios: torch.Tensor


@dataclass(frozen=True)
class DeviceForest:
    """Growing trees of a batch: allocated by `allocate`, started by `tree_root`, grown by `tree_merge`.

    A candidate entry is empty if there is no proposal, or if an earlier one at the same node has the same token.

    Args:
        cand_tokens: [B, D, P] int32; -1 if empty.
        cand_parents: [B, D, P] int32, flat index of the parent; -1 for the root, and if empty.
        cand_values: [B, D, P] float32, product of probabilities along the path; -inf if empty.
        cand_masks: [B, D, P] int32, bit g: proposed by SSM g; bit `SEED_BIT`: a seed; 0 if empty.
        cand_slots: [B, D, P] int32, the drafts' scratch slot; -1 for a candidate that is not expanded.
        frontier: [B, F] int32, flat index of each frontier node, best value first; D * P for the root; -1 if empty.
        frontier_tokens: [B, F] int32; 0, a valid token, if empty.
        frontier_values: [B, F] float32; 0 if empty.
        frontier_depths: [B, F] int32; -1 if empty.
        frontier_slots: [B, F] int32, scratch slots: 0 for the root, 1 + (level - 1) * F + i for node i of a later
            level; 0 if empty.
        frontier_seeds: [B, F] int32, index of the node among the seeds; -1 for the root, -2 for no seed.
        frontier_ancestors: [B, F, D + 1] int32, scratch slots of a node's ancestors by depth, its own last and then
            repeated; 0 if empty.
        seed_cands: [B, S] int32, flat index of each seed's candidate; -1 for a seed that growth did not reach.
        levels: [B] int32, number of levels grown, equal for all requests. Each request has its own copy, because a
            program must not read a number that another request's program of the same launch increments.

    Raises:
        ValueError: a shape, dtype, device or stride does not match.
    """

    cand_tokens: torch.Tensor
    cand_parents: torch.Tensor
    cand_values: torch.Tensor
    cand_masks: torch.Tensor
    cand_slots: torch.Tensor
    frontier: torch.Tensor
    frontier_tokens: torch.Tensor
    frontier_values: torch.Tensor
    frontier_depths: torch.Tensor
    frontier_slots: torch.Tensor
    frontier_seeds: torch.Tensor
    frontier_ancestors: torch.Tensor
    seed_cands: torch.Tensor
    levels: torch.Tensor

    def __post_init__(self) -> None:
        if self.cand_tokens.dim() != 3 or self.frontier.dim() != 2 or 0 in self.cand_tokens.shape:
            raise ValueError(
                f"cand_tokens has shape {list(self.cand_tokens.shape)} and frontier {list(self.frontier.shape)}; "
                "expected [B, D, P] and [B, F], none of them 0"
            )
        _, depth, candidates = self.cand_tokens.shape
        if depth * candidates + self.num_seeds > MAX_CANDIDATES:
            raise ValueError(
                f"{depth} levels of {candidates} candidates and {self.num_seeds} seeds are more than {MAX_CANDIDATES}; "
                "grow less"
            )
        shapes = _shapes_of_forest(*self.cand_tokens.shape, self.frontier_width, self.num_seeds)
        _check(self, shapes)

    @classmethod
    def allocate(
        cls,
        num_requests: int,
        *,
        frontier: int,
        num_ssms: int,
        proposals: int,
        max_depth: int,
        seeds: int = SEEDS,
        device: torch.device | str = "cpu",
    ) -> DeviceForest:
        """Allocate an idle forest from the sizes B, F, G, C, D and S, in this order.

        Raises:
            ValueError: a size is below 1 (num_ssms may be 0), or there are more than `MAX_SSMS` SSMs, or more than
                `MAX_CANDIDATES` candidates of a request.
        """
        sizes = {
            "num_requests": num_requests,
            "frontier": frontier,
            "num_ssms": num_ssms + 1,
            "proposals": proposals,
            "max_depth": max_depth,
            "seeds": seeds,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}; expected 1 or more")
        if num_ssms > MAX_SSMS:
            raise ValueError(f"num_ssms is {num_ssms}; masks hold at most {MAX_SSMS}")
        candidates = frontier * (num_ssms + 1) * proposals
        shapes = _shapes_of_forest(num_requests, max_depth, candidates, frontier, seeds)
        return cls(
            **{
                name: torch.full(shapes[name], empty, dtype=_dtype_of(name), device=device)
                for name, empty in EMPTY_FOREST.items()
            }
        )

    @property
    def level(self) -> torch.Tensor:
        """Number of levels grown, a view [1] int32."""
        return self.levels[:1]

    @property
    def num_requests(self) -> int:
        return self.cand_tokens.shape[0]

    @property
    def max_depth(self) -> int:
        """D, the maximum number of levels."""
        return self.cand_tokens.shape[1]

    @property
    def candidates(self) -> int:
        """P, the number of candidates per request and level."""
        return self.cand_tokens.shape[2]

    @property
    def frontier_width(self) -> int:
        """F, the maximum number of nodes per request that a level expands."""
        return self.frontier.shape[1]

    @property
    def num_seeds(self) -> int:
        """S, the maximum number of seeds of a request."""
        return self.seed_cands.shape[1]


EMPTY_FOREST = {
    "cand_tokens": -1,
    "cand_parents": -1,
    "cand_values": -torch.inf,
    "cand_masks": 0,
    "cand_slots": -1,
    "frontier": -1,
    "frontier_tokens": 0,
    "frontier_values": 0,
    "frontier_depths": -1,
    "frontier_slots": 0,
    "frontier_seeds": -2,
    "frontier_ancestors": 0,
    "seed_cands": -1,
    "levels": 0,
}
"""Value of all entries of each tensor of an idle `DeviceForest`, in the order of its fields."""


def _shapes_of_forest(requests: int, depth: int, candidates: int, width: int, seeds: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a `DeviceForest` from B, D, P, F and S."""
    of_candidates, of_nodes = (requests, depth, candidates), (requests, width)
    shapes = {name: of_candidates if name.startswith("cand_") else of_nodes for name in EMPTY_FOREST}
    return shapes | {
        "frontier_ancestors": (*of_nodes, depth + 1),
        "seed_cands": (requests, seeds),
        "levels": (requests,),
    }


@dataclass(frozen=True)
class DeviceTrees:
    """Trees of a batch that the target scores. Node 0 is the root; parents precede their children.

    Nodes from `num_nodes[b]` on are padding, with depth -1.

    Args:
        tokens: [B, N] int32; 0, a valid token, for padding.
        parents: [B, N] int32; -1 for the root and for padding.
        depths: [B, N] int32; -1 for padding.
        ancestors: [B, N, D + 1] int32, node indices by depth, its own last and then repeated; padding has its own.
        num_nodes: [B] int32; 0 for an idle request.
        masks: [B, N] int32, bit g: proposed by SSM g; bit `SEED_BIT`: a seed; 0 for the root and padding.
        values: [B, N] float32, estimated probability that the node is accepted: 1 for the root, 0 for padding.
        slots: [B, N] int32, the drafts' scratch slot of the node's K/V; -1 for a node that no draft has computed.

    Raises:
        ValueError: a shape, dtype, device or stride does not match.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    num_nodes: torch.Tensor
    masks: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor

    def __post_init__(self) -> None:
        if self.ancestors.dim() != 3 or 0 in self.ancestors.shape:
            raise ValueError(f"ancestors has shape {list(self.ancestors.shape)}; expected [B, N, D + 1], none 0")
        requests, nodes, _ = self.ancestors.shape
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(self.__dataclass_fields__, (requests, nodes))
        shapes |= {"ancestors": tuple(self.ancestors.shape), "num_nodes": (requests,)}
        _check(self, shapes)

    @classmethod
    def allocate(
        cls, num_requests: int, *, nodes: int, max_depth: int, device: torch.device | str = "cpu"
    ) -> DeviceTrees:
        """Allocate trees without nodes from the sizes B, N and D, in this order.

        Raises:
            ValueError: `num_requests` or `nodes` below 1, or `max_depth` below 0.
        """
        for name, size, least in (("num_requests", num_requests, 1), ("nodes", nodes, 1), ("max_depth", max_depth, 0)):
            if size < least:
                raise ValueError(f"{name} is {size}; expected {least} or more")
        shape = (num_requests, nodes)

        def filled(value: float, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        own = torch.arange(nodes, dtype=torch.int32, device=device)[None, :, None]
        return cls(
            tokens=filled(0),
            parents=filled(-1),
            depths=filled(-1),
            ancestors=own.repeat(num_requests, 1, max_depth + 1),
            num_nodes=torch.zeros(num_requests, dtype=torch.int32, device=device),
            masks=filled(0),
            values=filled(0, torch.float32),
            slots=filled(-1),
        )

    @property
    def num_requests(self) -> int:
        return self.ancestors.shape[0]

    @property
    def max_nodes(self) -> int:
        """N, the maximum number of nodes of a tree."""
        return self.ancestors.shape[1]

    @property
    def max_depth(self) -> int:
        """D, the maximum depth of a node."""
        return self.ancestors.shape[2] - 1


def tensors_of(state: DeviceForest | DeviceTrees) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a state in the order of its fields, which is also that of the kernels' arguments."""
    return tuple(getattr(state, name) for name in state.__dataclass_fields__)


def _dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name.endswith("values") else torch.int32


def _check(state: DeviceForest | DeviceTrees, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError if a tensor of the state does not match.

    This runs once, at construction, so that the launches of a round need no checks.
    """
    tensors = {name: getattr(state, name) for name in shapes}
    sizes = {name: " ".join(map(str, shape)) for name, shape in shapes.items()}
    check_arguments(**{name: (tensor, sizes[name], _dtype_of(name)) for name, tensor in tensors.items()})
    check_contiguous(**tensors)


def block_of(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def check_proposed(forest: DeviceForest, proposed: ProposedTrees) -> None:
    """Raise ValueError if proposed trees do not match the forest."""
    shape = "requests seeds"
    check_arguments(
        {"requests": forest.num_requests, "seeds": forest.num_seeds},
        levels=(forest.levels, "requests", torch.int32),
        tokens=(proposed.tokens, shape, torch.int32),
        parents=(proposed.parents, shape, torch.int32),
        probs=(proposed.probs, shape, torch.float32),
        ratios=(proposed.ratios, shape, torch.float32),
    )
    check_contiguous(**proposed._asdict())
