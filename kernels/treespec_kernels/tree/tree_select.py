"""Tree select: builds the target's tree from the root and the N - 1 best candidates.

The best are by (value descending, flat index ascending), among the candidates whose depth is at most `max_depths[b]`
and whose value is at least `least_values[b]`. Nodes are in the order of their flat index, so parents precede children.

The selected nodes form a tree. A candidate's parent was a frontier node and so a candidate. The parent's value is not
smaller, as probabilities are at most 1 and rounding is monotonic; its flat index and depth are smaller. So if a node is
eligible, or among the N - 1 best, so is its parent, ties included.
"""

from __future__ import annotations

import numpy as np
import torch

from treespec_kernels.launch.triton_launch import check_last_strides, check_launch, require_triton
from treespec_kernels.tree.device_trees import DeviceForest, DeviceTrees, block_of, check_per_request


def tree_select_ref(
    forest: DeviceForest,
    root_tokens: torch.Tensor,
    nodes: int | torch.Tensor,
    least_values: torch.Tensor,
    max_depths: torch.Tensor,
    *,
    out: DeviceTrees | None = None,
) -> DeviceTrees:
    """Selects the trees that the target scores. numpy on the host, any device.

    Args:
        forest: not changed.
        root_tokens: [B] int32, as passed to `tree_root`; the tree of a negative token has no nodes.
        nodes: the most nodes of a tree, root included, from 1 to the size of `out`; or an int32 tensor [B] of the
            number per request, clamped to that range, so that a captured graph can change it.
        least_values: [B] float32, the least value of a node below the root; NaN selects none.
        max_depths: [B] int32, 0 for only the root.
        out: written in place and returned; None allocates trees of `nodes` nodes, which must then be an int.

    Raises:
        ValueError: a shape, dtype, device or number of nodes that does not fit.
    """
    out = check_tree_select(forest, root_tokens, nodes, least_values, max_depths, out)
    state = {name: getattr(forest, name).cpu().numpy() for name in forest.__dataclass_fields__}
    trees = DeviceTrees.allocate(out.num_requests, nodes=out.max_nodes, max_depth=out.max_depth)
    wanted = per_request(nodes, out).clamp(1, out.max_nodes)
    for request, (token, most, least, deepest) in enumerate(
        zip(root_tokens.tolist(), wanted.tolist(), least_values.tolist(), max_depths.tolist(), strict=True)
    ):
        if token < 0:
            continue
        level = int(state["levels"][request])
        flat = {name: array[request].ravel() for name, array in state.items()}
        values = flat["cand_values"]
        usable = max(min(level, deepest), 0) * forest.candidates
        allowed = [i for i in range(usable) if values[i] >= 0 and values[i] >= np.float32(least)]
        chosen = sorted(sorted(allowed, key=lambda i: (-values[i], i))[: most - 1])
        node_of = {index: node for node, index in enumerate([-1, *chosen])}
        trees.num_nodes[request] = len(node_of)
        for index, node in node_of.items():
            is_root = index < 0
            parent = -1 if is_root else node_of[int(flat["cand_parents"][index])]
            depth = 0 if is_root else index // forest.candidates + 1
            trees.tokens[request, node] = token if is_root else int(flat["cand_tokens"][index])
            trees.parents[request, node] = parent
            trees.depths[request, node] = depth
            if not is_root:
                trees.ancestors[request, node, :depth] = trees.ancestors[request, parent, :depth]
            trees.masks[request, node] = 0 if is_root else int(flat["cand_masks"][index])
            trees.values[request, node] = 1.0 if is_root else float(values[index])
            slot = 0 if is_root else int(flat["cand_slots"][index])
            trees.slots[request, node] = slot if depth < level else -1  # the last frontier was never run
    for name in trees.__dataclass_fields__:
        getattr(out, name).copy_(getattr(trees, name))
    return out


def tree_select_triton(
    forest: DeviceForest,
    root_tokens: torch.Tensor,
    nodes: int | torch.Tensor,
    least_values: torch.Tensor,
    max_depths: torch.Tensor,
    *,
    out: DeviceTrees | None = None,
) -> DeviceTrees:
    """`tree_select_ref` on a GPU, in one launch and without a host sync.

    Raises:
        ValueError: a shape, dtype, stride, device or number of nodes that does not fit, or triton that cannot run here.
    """
    out = check_tree_select(forest, root_tokens, nodes, least_values, max_depths, out)
    check_last_strides(root_tokens=root_tokens, least_values=least_values, max_depths=max_depths)
    require_triton("tree_select")
    from treespec_kernels.tree import tree_select_kernels as kernels

    check_launch("tree_select", kernels.select_nodes, least_values)
    constants = blocks_of(forest.candidates, forest.max_depth, out.max_nodes)
    kernels.select_nodes[(forest.num_requests,)](
        forest.cand_tokens,
        forest.cand_parents,
        forest.cand_values,
        forest.cand_masks,
        forest.cand_slots,
        forest.levels,
        root_tokens,
        least_values,
        max_depths,
        per_request(nodes, out),
        out.tokens,
        out.parents,
        out.depths,
        out.ancestors,
        out.num_nodes,
        out.masks,
        out.values,
        out.slots,
        **constants,
        num_warps=warps_of(constants),
        enable_fp_fusion=False,
    )
    return out


def per_request(nodes: int | torch.Tensor, out: DeviceTrees) -> torch.Tensor:
    """[B] int32: the most nodes of each tree."""
    return nodes if isinstance(nodes, torch.Tensor) else torch.full_like(out.num_nodes, nodes)


def blocks_of(candidates: int, max_depth: int, max_nodes: int) -> dict[str, int]:
    """The kernel's constexpr arguments, from P, D and N."""
    block_q = block_of(max_depth * candidates)
    return {
        "CANDIDATES": candidates,
        "MAX_DEPTH": max_depth,
        "MAX_NODES": max_nodes,
        "BLOCK_Q": block_q,
        "BLOCK_N": block_of(max_nodes),
        "BLOCK_W": block_of(max_depth + 1),
        "LOG_BLOCK_Q": block_q.bit_length() - 1,
    }


def warps_of(constants: dict[str, int]) -> int:
    """8 candidates per thread, up to the largest block of threads."""
    return min(max(constants["BLOCK_Q"] // 256, 1), 16)


def check_tree_select(
    forest: DeviceForest,
    root_tokens: torch.Tensor,
    nodes: int | torch.Tensor,
    least_values: torch.Tensor,
    max_depths: torch.Tensor,
    out: DeviceTrees | None,
) -> DeviceTrees:
    """Host-side checks; values on a device are never read. Returns `out`, or new trees if it is None."""
    requests, device = forest.num_requests, forest.levels.device
    check_per_request(
        requests,
        device,
        root_tokens=(root_tokens, torch.int32),
        least_values=(least_values, torch.float32),
        max_depths=(max_depths, torch.int32),
    )
    if isinstance(nodes, torch.Tensor):
        check_per_request(requests, device, nodes=(nodes, torch.int32))
        if out is None:
            raise ValueError(
                "nodes is a tensor, whose values the host does not read; pass out, which sets the most nodes"
            )
    elif nodes < 1:
        raise ValueError(f"nodes is {nodes}; expected 1 or more, as the root counts")
    elif out is None:
        return DeviceTrees.allocate(requests, nodes=nodes, max_depth=forest.max_depth, device=device)
    elif nodes > out.max_nodes:
        raise ValueError(f"nodes is {nodes}; out holds {out.max_nodes}")
    if (out.num_requests, out.max_depth) != (requests, forest.max_depth):
        raise ValueError(
            f"out has {out.num_requests} requests and depth {out.max_depth}; expected {requests} and "
            f"{forest.max_depth} as in the forest"
        )
    if out.ancestors.device != device:
        raise ValueError(f"out is on {out.ancestors.device} and the forest on {device}; move it there")
    return out
