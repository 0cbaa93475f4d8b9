"""Tree walk: verifies the trees of a batch by following the target's choices from the root.

At each node the walk continues with the child whose token is the target's choice, and ends if there is none. The
emitted tokens are the target's choices along the path: the accepted tokens, then the bonus token. A path of
`path_lens[b]` nodes, including the root, emits the same number of tokens.

A request emits nothing (length 0) if it is idle, or if the logits of any of its nodes are not finite, because then none
of its results can be trusted.
"""

from dataclasses import dataclass
from typing import Annotated, Self

import torch
from torch import Tensor

from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.triton_launch import block_of, load_kernels
from treespec_kernels.tree.device_trees import DeviceState, DeviceTrees


@dataclass(frozen=True)
class Walk(DeviceState):
    """Accepted paths of one target pass."""

    paths: Annotated[Tensor, "B+ W+", 0]  # accepted node indices, root first; padded with 0
    path_lens: Annotated[Tensor, "B", 0]  # number of nodes of the path, including the root; also of emitted tokens
    tokens: Annotated[Tensor, "B W", -1]  # accepted tokens, then the bonus token; padded with -1

    @classmethod
    def allocate(cls, num_requests: int, *, max_depth: int, device: torch.device | str = "cpu") -> Self:
        """Allocate paths of length 0; sizes in the order B, D; W is D + 1."""
        return cls._allocate(device, B=num_requests, W=max_depth + 1)


def tree_walk_ref(trees: DeviceTrees, choices: Tensor, finite: Tensor, *, out: Walk | None = None) -> Walk:
    """Walk every tree (reference: Python loops on the host, any device).

    Args:
        trees: verified trees; siblings have different tokens.
        choices: [B, N] int32 or int64, the target's choice after each node; arbitrary for padding.
        finite: [B, N] bool, whether a node's logits are finite; arbitrary for padding.
        out: written in place and returned; None allocates.
    """
    walk = Walk.allocate(trees.num_requests, max_depth=trees.max_depth)
    host = {name: getattr(trees, name).tolist() for name in ("tokens", "parents", "num_nodes")}
    next_tokens, is_finite = choices.tolist(), finite.tolist()
    for request, size in enumerate(host["num_nodes"]):
        if size == 0 or not all(is_finite[request][:size]):
            continue
        parents, tokens, path = host["parents"][request], host["tokens"][request], [0]
        for node in range(1, size):  # parents precede their children
            if parents[node] == path[-1] and tokens[node] == next_tokens[request][path[-1]]:
                path.append(node)
        walk.path_lens[request] = len(path)
        for depth, node in enumerate(path):
            walk.paths[request, depth], walk.tokens[request, depth] = node, next_tokens[request][node]
    out = _new_walk(trees) if out is None else out
    for name, written in walk.tensors.items():
        out.tensors[name].copy_(written)
    return out


def tree_walk_triton(trees: DeviceTrees, choices: Tensor, finite: Tensor, *, out: Walk | None = None) -> Walk:
    """Compute `tree_walk_ref` on a GPU, in one launch without a host sync."""
    out = _new_walk(trees) if out is None else out
    check_arguments(
        ancestors=(trees.ancestors, "B N W", torch.int32),
        choices=(choices, "B N", (torch.int32, torch.int64)),
        finite=(finite, "B N", torch.bool),
        paths=(out.paths, "B W", torch.int32),
    )
    kernels = load_kernels("tree.tree_walk", choices)
    block_n, block_w = block_of(trees.max_nodes), block_of(trees.max_depth + 1)
    kernels.walk_down[(trees.num_requests,)](
        trees.tokens,
        trees.depths,
        trees.ancestors,
        trees.num_nodes,
        choices,
        finite,
        *out.tensors.values(),
        choices.stride(0),
        finite.stride(0),
        MAX_DEPTH=trees.max_depth,
        MAX_NODES=trees.max_nodes,
        BLOCK_N=block_n,
        BLOCK_W=block_w,
        num_warps=min(max(block_n * block_w // 512, 1), 8),  # 16 edges per thread
        enable_fp_fusion=False,
    )
    return out


def _new_walk(trees: DeviceTrees) -> Walk:
    return Walk.allocate(trees.num_requests, max_depth=trees.max_depth, device=trees.ancestors.device)
