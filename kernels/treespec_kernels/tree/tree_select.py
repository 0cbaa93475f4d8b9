"""Tree select: builds the target's tree from the root and the N - 1 best candidates.

Seeds that growth has not reached are candidates as well, after all others: their value is their parent's value times
their own probability, in float32, and their depth is one more than their parent's.

Candidates are ordered by (value descending, flat index ascending). Only candidates of the levels grown so far, and
seeds, are eligible, if their depth is at most `max_depths[b]` and their value at least `least_values[b]`. Nodes are
ordered by flat index, so parents precede children.

The selected set is connected. The parent of a candidate was a frontier node and so a candidate itself; the parent of a
seed is an earlier seed, the root or a candidate. A parent's value is no smaller than its child's, because probabilities
are at most 1 and rounding is monotonic, and its flat index and depth are smaller. So the parent of an eligible node is
eligible, and the parent of a node among the N - 1 best is among them, ties included.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.triton_launch import block_of, load_kernels
from treespec_kernels.tree.device_trees import SEED_BIT, DeviceForest, DeviceTrees, ProposedTrees


def tree_select_ref(
    forest: DeviceForest,  # not modified
    proposed: ProposedTrees,  # as passed to `tree_merge`
    root_tokens: Tensor,  # [B] int32, as passed to `tree_root`; the tree of a negative token has no nodes
    # Tree budget, the maximum number of nodes of a tree including the root, from 1 to the size of `out`; or an int32
    # tensor [B] with the number per request, clamped to that range, so that a captured graph can vary it
    nodes: int | Tensor,
    least_values: Tensor,  # [B] float32, minimum value of nodes below the root; NaN selects none
    max_depths: Tensor,  # [B] int32, 0 for only the root
    *,
    # Written in place and returned; None allocates trees of `nodes` nodes, which must then be an int
    out: DeviceTrees | None = None,
) -> DeviceTrees:
    """Select the trees that the target scores (reference: numpy on the host, any device)."""
    out = _new_trees(forest, nodes) if out is None else out
    state = {name: tensor.cpu().numpy() for name, tensor in forest.tensors.items()}
    seeds = [tensor.cpu().numpy() for tensor in proposed]
    trees = DeviceTrees.allocate(out.num_requests, nodes=out.max_nodes, max_depth=out.max_depth)
    wanted = torch.as_tensor(nodes, device="cpu").expand(out.num_requests).clamp(1, out.max_nodes)
    for request, (token, most, least, deepest) in enumerate(
        zip(root_tokens.tolist(), wanted.tolist(), least_values.tolist(), max_depths.tolist(), strict=True)
    ):
        if token < 0:
            continue
        level = int(state["levels"][request])
        flat = {name: array[request].ravel() for name, array in state.items()}
        count = forest.candidates
        tokens, parents, values, masks = (flat[f"cand_{name}"] for name in ("tokens", "parents", "values", "masks"))
        candidates = {
            i: _TreeCandidate(tokens[i], parents[i], values[i], masks[i], i // count + 1)
            for i in range(level * count)
            if values[i] >= 0
        }
        candidates |= _unreached(flat["seed_cands"], [array[request] for array in seeds], candidates, forest)
        allowed = [
            i
            for i, candidate in candidates.items()
            if candidate.depth <= min(deepest, out.max_depth) and candidate.value >= np.float32(least)
        ]
        selected = sorted(sorted(allowed, key=lambda i: (-candidates[i].value, i))[: most - 1])
        node_of = {index: node for node, index in enumerate([-1, *selected])}
        candidates[-1] = _TreeCandidate(token, -1, np.float32(1), 0, 0)
        trees.num_nodes[request] = len(node_of)
        for index, node in node_of.items():
            candidate = candidates[index]
            parent = node_of[int(candidate.parent)] if node else -1
            trees.tokens[request, node], trees.parents[request, node] = int(candidate.token), parent
            trees.depths[request, node] = candidate.depth
            if node:
                trees.ancestors[request, node, : candidate.depth] = trees.ancestors[request, parent, : candidate.depth]
            trees.masks[request, node], trees.values[request, node] = int(candidate.mask), float(candidate.value)
    for written, tensor in zip(out.tensors.values(), trees.tensors.values(), strict=True):
        written.copy_(tensor)
    return out


class _TreeCandidate(NamedTuple):
    token: int
    parent: int
    value: np.float32
    mask: int
    depth: int


def _unreached(
    reached: np.ndarray, proposed: Sequence[np.ndarray], candidates: dict[int, _TreeCandidate], forest: DeviceForest
) -> dict[int, _TreeCandidate]:
    """Return the seeds that growth has not reached, by flat index; `proposed`: one request's `ProposedTrees`."""
    tokens, parents, probs, _ = proposed
    first = forest.max_depth * forest.candidates
    unreached: dict[int, _TreeCandidate] = {}
    index_of = {-1: -1} | {s: int(i) if i >= 0 else first + s for s, i in enumerate(reached)}
    for s in np.flatnonzero((tokens >= 0) & (reached < 0)).tolist():
        parent = index_of[int(parents[s])]
        above = unreached.get(parent) or candidates.get(parent)
        value, depth = (above.value, above.depth) if above is not None else (np.float32(1), 0)
        unreached[first + s] = _TreeCandidate(tokens[s], parent, value * probs[s], 1 << SEED_BIT, depth + 1)
    return unreached


def tree_select_triton(
    forest: DeviceForest,
    proposed: ProposedTrees,
    root_tokens: Tensor,
    nodes: int | Tensor,
    least_values: Tensor,
    max_depths: Tensor,
    *,
    out: DeviceTrees | None = None,
) -> DeviceTrees:
    """Compute `tree_select_ref` on a GPU, in one launch without a host sync."""
    out = _new_trees(forest, nodes) if out is None else out
    wanted = torch.full_like(out.num_nodes, nodes) if isinstance(nodes, int) else nodes
    check_arguments(
        {"S": forest.num_seeds, "width": forest.max_depth + 1},
        levels=(forest.levels, "B", torch.int32),
        root_tokens=(root_tokens, "B", torch.int32),
        least_values=(least_values, "B", torch.float32),
        max_depths=(max_depths, "B", torch.int32),
        nodes=(wanted, "B", torch.int32),
        ancestors=(out.ancestors, "B _ width", torch.int32),
        **proposed.arguments,
    )
    kernels = load_kernels("tree.tree_select", least_values)
    max_depth, max_nodes = forest.max_depth, out.max_nodes
    block_q = block_of(max_depth * forest.candidates + forest.num_seeds)
    kernels.select_nodes[(forest.num_requests,)](
        *list(forest.tensors.values())[:4],  # the candidates
        forest.seed_cands,
        *proposed[:3],
        forest.levels,
        root_tokens,
        least_values,
        max_depths,
        wanted,
        *out.tensors.values(),
        CANDIDATES=forest.candidates,
        SEEDS=forest.num_seeds,
        MAX_DEPTH=max_depth,
        MAX_NODES=max_nodes,
        BLOCK_Q=block_q,
        BLOCK_N=block_of(max_nodes),
        BLOCK_W=block_of(max_depth + 1),
        BLOCK_S=block_of(forest.num_seeds),
        LOG_BLOCK_Q=block_q.bit_length() - 1,
        num_warps=min(max(block_q // 256, 1), 16),  # 8 candidates per thread
        enable_fp_fusion=False,
    )
    return out


def _new_trees(forest: DeviceForest, nodes: int | Tensor) -> DeviceTrees:
    assert isinstance(nodes, int), "allocation would read a tensor on the host"
    device = forest.levels.device
    return DeviceTrees.allocate(forest.num_requests, nodes=nodes, max_depth=forest.max_depth, device=device)
