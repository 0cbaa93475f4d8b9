"""Tree root: starts a round by resetting every tree to its root, the first frontier.

The root of request b has token `root_tokens[b]`, value 1, depth 0 and scratch slot 0. A negative token marks an idle
request, whose frontier is empty. The candidates of the previous round are cleared.
"""

import torch
from torch import Tensor

from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.triton_launch import block_of, load_kernels
from treespec_kernels.tree.device_trees import DeviceForest

BLOCK_Q = 1024  # candidates cleared per program
NUM_WARPS = 4


def tree_root_ref(forest: DeviceForest, root_tokens: Tensor) -> None:
    """Reset every tensor of the forest (reference: eager torch, any device).

    Args:
        forest: changed in place.
        root_tokens: [B] int32, the last committed token of each request; negative for an idle request.
    """
    for name, tensor in forest.tensors.items():
        tensor.fill_(forest.FORMS[name][1])
    busy = root_tokens >= 0
    forest.frontier[busy, 0] = forest.max_depth * forest.candidates
    forest.frontier_tokens[busy, 0] = root_tokens[busy]
    forest.frontier_values[busy, 0] = 1.0
    forest.frontier_depths[busy, 0] = 0
    forest.frontier_seeds[busy, 0] = -1


def tree_root_triton(forest: DeviceForest, root_tokens: Tensor) -> None:
    """Compute `tree_root_ref` on a GPU, in one launch without a host sync."""
    check_arguments(levels=(forest.levels, "B", torch.int32), root_tokens=(root_tokens, "B", torch.int32))
    kernels = load_kernels("tree.tree_root", root_tokens)
    candidates = forest.max_depth * forest.candidates
    kernels.start_round[(forest.num_requests, -(-candidates // BLOCK_Q))](
        root_tokens,
        *forest.tensors.values(),
        CANDIDATES=candidates,
        FRONTIER=forest.frontier_width,
        WIDTH=forest.max_depth + 1,
        SEEDS=forest.num_seeds,
        BLOCK_Q=BLOCK_Q,
        BLOCK_F=block_of(forest.frontier_width),
        BLOCK_W=block_of(forest.max_depth + 1),
        BLOCK_S=block_of(forest.num_seeds),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
