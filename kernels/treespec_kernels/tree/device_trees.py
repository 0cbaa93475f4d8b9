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

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from treespec_kernels.launch.arguments import Argument, check_arguments
from treespec_kernels.tree.growth_limits import SEEDS

SEED_BIT = MAX_SSMS = 30  # an int32 mask has one bit per SSM, one for the seeds, and the sign
MAX_CANDIDATES = 4096  # maximum of a request over all levels; one program keeps them in registers, and 8,192 spill


class ProposedTrees(NamedTuple):
    """Trees proposed for a batch by model-free sources. Their nodes, without the root, are the seeds."""

    tokens: Tensor  # [B, S] int32, -1 for no seed. Siblings have different tokens
    parents: Tensor  # [B, S] int32, index of an earlier seed, or -1 for the root
    probs: Tensor  # [B, S] float32, probability of the token after its parent
    # [B, S] float32, positive and finite: evidence ratios, factors on the odds of seeds
    ratios: Tensor

    @property
    def arguments(self) -> dict[str, Argument]:
        """The tensors as arguments of `check_arguments`."""
        forms = zip(self._asdict().items(), (torch.int32, torch.int32, torch.float32, torch.float32), strict=True)
        return {f"proposed.{name}": (tensor, "[B S]", dtype) for (name, tensor), dtype in forms}


class DeviceState:
    """Base class of dataclasses of contiguous device tensors; checks them on creation.

    Their order matches the kernels' arguments. Tensors named "values" are float32, and the others int32.

    Attributes:
        FORMS: by name, a tensor's shape (as in `check_arguments`) and initial value.
    """

    FORMS: ClassVar[dict[str, tuple[str, float]]]

    def __init_subclass__(cls) -> None:
        cls.FORMS = {name: declared.__metadata__ for name, declared in cls.__annotations__.items()}

    def __post_init__(self) -> None:
        check_arguments(**{n: (t, f"[{self.FORMS[n][0]}]", _dtype_of(n)) for n, t in self.tensors.items()})

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.FORMS}

    @classmethod
    def _allocate(cls, device: torch.device | str, **sizes: int) -> Self:
        def filled(name: str, shape: str, value: float) -> Tensor:
            size = [sizes[letter.strip("+")] for letter in shape.split()]
            return torch.full(size, value, dtype=_dtype_of(name), device=device)

        return cls(**{name: filled(name, *form) for name, form in cls.FORMS.items()})


def _dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name.endswith("values") else torch.int32


@dataclass(frozen=True)
class DeviceForest(DeviceState):
    """Growing trees of a batch: allocated by `allocate`, started by `tree_root`, grown by `tree_merge`.

    A candidate entry is empty if there is no proposal, or if an earlier one at the same node has the same token.
    """

    cand_tokens: Annotated[Tensor, "B+ D+ P+", -1]  # -1 if empty
    cand_parents: Annotated[Tensor, "B D P", -1]  # flat index of the parent; -1 for the root and if empty
    cand_values: Annotated[Tensor, "B D P", -torch.inf]  # product of probabilities along the path; -inf if empty
    cand_masks: Annotated[Tensor, "B D P", 0]  # bit g: proposed by SSM g; bit `SEED_BIT`: a seed; 0 if empty
    # Flat index of each frontier node, best value first; D * P for the root; -1 if empty.
    frontier: Annotated[Tensor, "B F+", -1]
    frontier_tokens: Annotated[Tensor, "B F", 0]  # 0, a valid token, if empty
    frontier_values: Annotated[Tensor, "B F", 0]  # 0 if empty
    frontier_depths: Annotated[Tensor, "B F", -1]  # -1 if empty
    # Scratch slots: 0 for the root, 1 + (level - 1) * F + i for node i of a later level; 0 if empty.
    frontier_slots: Annotated[Tensor, "B F", 0]
    frontier_seeds: Annotated[Tensor, "B F", -2]  # index of the node among the seeds; -1 for the root, -2 for no seed
    # Scratch slots of a node's ancestors by depth, ending with its own, which is repeated; W is D + 1. 0 if empty.
    frontier_ancestors: Annotated[Tensor, "B F W", 0]
    seed_cands: Annotated[Tensor, "B S", -1]  # flat index of each seed's candidate; -1 for unreached seeds
    # Number of levels grown, equal for all requests. Each request has its own copy, because a program must not read a
    # number that another program of the same launch increments.
    levels: Annotated[Tensor, "B", 0]

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
    ) -> Self:
        """Allocate an idle forest; sizes in the order B, F, G, C, D, S."""
        candidates = frontier * (num_ssms + 1) * proposals
        assert num_ssms <= MAX_SSMS and max_depth * candidates + seeds <= MAX_CANDIDATES
        sizes = {"B": num_requests, "D": max_depth, "P": candidates, "F": frontier, "W": max_depth + 1, "S": seeds}
        return cls._allocate(device, **sizes)

    @property
    def level(self) -> Tensor:
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


@dataclass(frozen=True)
class DeviceTrees(DeviceState):
    """Trees of a batch to be scored by the target. Node 0 is the root; parents precede their children.

    Nodes from `num_nodes[b]` on are padding, with depth -1.
    """

    tokens: Annotated[Tensor, "B N", 0]  # 0, a valid token, for padding
    parents: Annotated[Tensor, "B N", -1]  # -1 for the root and for padding
    depths: Annotated[Tensor, "B N", -1]  # -1 for padding
    # Node indices by depth, ending with its own, which is repeated; W is D + 1. Padding has its own.
    ancestors: Annotated[Tensor, "B+ N+ W+", 0]
    num_nodes: Annotated[Tensor, "B", 0]  # 0 for an idle request
    masks: Annotated[Tensor, "B N", 0]  # bit g: proposed by SSM g; bit `SEED_BIT`: a seed; 0 for the root and padding
    values: Annotated[Tensor, "B N", 0]  # estimated acceptance probability of the node: 1 for the root, 0 for padding

    @classmethod
    def allocate(cls, num_requests: int, *, nodes: int, max_depth: int, device: torch.device | str = "cpu") -> Self:
        """Allocate trees without nodes; sizes in the order B, N, D."""
        trees = cls._allocate(device, B=num_requests, N=nodes, W=max_depth + 1)
        trees.ancestors.copy_(torch.arange(nodes, dtype=torch.int32, device=device)[None, :, None])
        return trees

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
