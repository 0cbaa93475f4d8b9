"""Recurrent layers in passes of fixed shape: which rows are computed, what is stored, and the commit of a path.

A pass has `width` rows per request for the tokens committed since its state was stored (replayed rows), of which it
uses `replayed[b]`, and then `nodes` rows per request for its tree. Both are data, so that one captured graph serves all
rounds. Rows with depth -1 are padding; a request whose root is padding is idle, and its state is not changed.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.rows import FLOAT_TYPES
from treespec_kernels.launch.triton_launch import block_of, load_kernels
from treespec_kernels.recurrent.state_update import StatePaths

_CHANNELS = 128  # channels per program
_NODES = 16  # number of nodes that are compared with all nodes at once


class RoundPlan(NamedTuple):
    """Rows of a pass of B requests: B * width replayed ones, then B * nodes of the trees."""

    paths: StatePaths
    # int64 [num_rows, history + 1], the inputs of each row's convolution: indices of `exchange_inputs_ref`'s result
    taps: Tensor

    @classmethod
    def allocate(cls, slots: Tensor, nodes: int, width: int, history: int, device: torch.device | str = "cpu") -> Self:
        """Allocate a plan for requests with states in `slots`, int32 [B], which the plan reads at each pass."""
        b, per_request = len(slots), width + nodes

        def integers(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        order, parents, kept = (integers(b * per_request) for _ in range(3))
        paths = StatePaths(slots, integers(b), integers(b), order, parents, kept, integers(b), b * width)
        return cls(paths, integers(b * per_request, history + 1, dtype=torch.int64))


def round_plan_ref(
    replayed: Tensor, depths: Tensor, ancestors: Tensor, spreads: Tensor | None = None, *, out: RoundPlan
) -> RoundPlan:
    """Plan a pass (reference: Python loops on the host, any device).

    The nodes of a tree are computed in preorder. A state that a later child needs is kept in the place of its depth,
    which the nodes below it do not use.

    Args:
        replayed: [B] int32, committed tokens since the stored states, at most `width`.
        depths: [B, nodes] int32, -1 for padding.
        ancestors: [B, nodes, width] int32, node indices by depth, ending with a node's own, which is repeated.
        spreads: [1] int32; unless 0, padding is computed as chains, as if there were requests, to measure costs.
        out: written in place and returned. Entries of `order` that belong to no row are not written.
    """
    paths, taps = out
    (b, nodes, width), history = ancestors.shape, taps.shape[1] - 1
    stored = b * (history + width)  # inputs
    for request, count in enumerate(replayed.tolist()):
        first_replayed, first, chain = request * width, b * width + request * nodes, request * (history + width)
        root = first_replayed + count - 1 if count else -1
        for row in range(width):
            paths.parents[first_replayed + row] = first_replayed + row - 1 if row else -1
            paths.kept[first_replayed + row] = -1
            taps[first_replayed + row] = chain + row + torch.arange(history + 1, dtype=torch.int64, device=taps.device)
        seen, depth_of = ancestors[request].tolist(), depths[request].tolist()
        is_measured = spreads is not None and bool(spreads)
        computed = [node for node in range(nodes) if is_measured or depth_of[node] >= 0]
        parents = [seen[node][depth_of[node] - 1] if depth_of[node] > 0 else -1 for node in range(nodes)]
        for node in range(nodes):
            above = node - 1 if is_measured and depth_of[node] < 0 else parents[node]
            paths.parents[first + node] = root if above < 0 else first + above
            is_kept = node in computed and parents.count(node) > 1
            paths.kept[first + node] = first_replayed + depth_of[node] if is_kept else -1
            for tap in range(history + 1):
                place = depth_of[node] + tap - history  # among the node's ancestors
                if depth_of[node] < 0:
                    taps[first + node, tap] = stored + request * nodes + node
                elif place >= 0:
                    taps[first + node, tap] = stored + request * nodes + seen[node][place]
                else:
                    taps[first + node, tap] = chain + history + count + place
        order = [first_replayed + row for row in range(count)] + [
            first + n for n in sorted(computed, key=lambda n: seen[n])
        ]
        start = request * (width + nodes)
        paths.starts[request], paths.ends[request] = start, start + len(order)
        paths.order[start : start + len(order)] = torch.tensor(order, dtype=torch.int32, device=paths.order.device)
        paths.last[request] = root
    return out


def round_plan_triton(
    replayed: Tensor, depths: Tensor, ancestors: Tensor, spreads: Tensor | None = None, *, out: RoundPlan
) -> RoundPlan:
    """Compute `round_plan_ref` on a GPU, in one launch without a host sync."""
    paths, taps = out
    sizes = check_arguments(
        replayed=(replayed, "[requests]", torch.int32),
        depths=(depths, "[requests nodes]", torch.int32),
        ancestors=(ancestors, "[requests nodes width]", torch.int32),
        spreads=(spreads, "[1]", torch.int32),
        taps=(taps, "[rows kernel]", torch.int64),
        slots=(paths.slots, "[requests]", torch.int32),
        order=(paths.order, "[rows]", torch.int32),
    )
    requests, nodes, width, kernel = (sizes[name] for name in ("requests", "nodes", "width", "kernel"))
    load_kernels("recurrent.round_states", replayed).plan_round[(requests,)](
        *(replayed, depths, ancestors, spreads, *paths[1:-1], taps, requests),
        NODES=nodes,
        WIDTH=width,
        HISTORY=kernel - 1,
        BLOCK_M=min(_NODES, block_of(nodes)),
        BLOCK_N=block_of(nodes),
        BLOCK_W=block_of(width),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def exchange_inputs_ref(
    kept: Tensor, new_inputs: Tensor, slots: Tensor, replayed: Tensor, depths: Tensor, width: int, history: int
) -> Tensor:
    """Store the inputs of a pass's rows, and return all that its rows read (reference: loops on the host, any device).

    Args:
        kept: [num_slots, at least history + max(width, nodes), channels], the stored inputs of each state, as in
            `RecurrentState.inputs`. Changed in place: first the last `history` of the inputs before the root, then
            those of the tree.
        new_inputs: [B * nodes, channels], inputs of the trees' nodes.
        slots, replayed: [B] int32. depths: [B, nodes] int32.

    Returns [B * (history + width) + B * nodes, channels]: the stored inputs of each request, 0 for those that it does
    not have, then `new_inputs`.
    """
    nodes, parts = depths.shape[1], []
    for request, count in enumerate(replayed.tolist()):
        stored = kept[int(slots[request]), : history + width].clone()
        stored[history + count :] = 0
        parts.append(stored)
    for request, count in enumerate(replayed.tolist()):
        if depths[request, 0] < 0:
            continue
        place = kept[int(slots[request])]
        place[:history] = parts[request][count : count + history]
        is_node = depths[request] >= 0
        place[history : history + nodes][is_node] = new_inputs[request * nodes : (request + 1) * nodes][is_node]
    return torch.cat((*parts, new_inputs))


def exchange_inputs_triton(
    kept: Tensor, new_inputs: Tensor, slots: Tensor, replayed: Tensor, depths: Tensor, width: int, history: int
) -> Tensor:
    """Compute `exchange_inputs_ref` on a GPU, in one launch without a host sync."""
    check_arguments(
        kept=(kept, "slots places channels+", FLOAT_TYPES),
        new_inputs=(new_inputs, "[rows channels]", kept.dtype),
        slots=(slots, "[requests]", torch.int32),
        replayed=(replayed, "[requests]", torch.int32),
        depths=(depths, "[requests nodes]", torch.int32),
    )
    (requests, nodes), channels = depths.shape, new_inputs.shape[1]
    assert history + max(nodes, width) <= kept.shape[1] and len(new_inputs) == requests * nodes
    inputs = new_inputs.new_empty(requests * (history + width + nodes), channels)
    load_kernels("recurrent.round_states", new_inputs).exchange_inputs[(requests, -(-channels // _CHANNELS))](
        *(kept, new_inputs, inputs, slots, replayed, depths, requests, kept.stride(0)),
        CHANNELS=channels,
        NODES=nodes,
        WIDTH=width,
        HISTORY=history,
        BLOCK_R=block_of(history + width),
        BLOCK_C=_CHANNELS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return inputs


def keep_path_ref(inputs: Tensor, slots: Tensor, paths: Tensor, path_lens: Tensor, history: int) -> None:
    """Compact the inputs of the trees' nodes to the accepted paths, in all layers (reference: any device).

    Args:
        inputs: [num_slots, num_layers, places, channels], as in `RecurrentState`, changed in place.
        slots: [B] int32.
        paths, path_lens: [B, width] and [B] int32, as in `kv_commit_ref`.
    """
    for slot, path, count in zip(slots.tolist(), paths.tolist(), path_lens.tolist(), strict=True):
        nodes = torch.tensor(path[:count], dtype=torch.int64, device=inputs.device)
        inputs[slot, :, history : history + count] = inputs[slot, :, history + nodes]


def keep_path_triton(inputs: Tensor, slots: Tensor, paths: Tensor, path_lens: Tensor, history: int) -> None:
    """Compute `keep_path_ref` on a GPU, in one launch without a host sync."""
    check_arguments(
        inputs=(inputs, "[slots layers places channels+]", FLOAT_TYPES),
        slots=(slots, "[requests]", torch.int32),
        paths=(paths, "[requests width]", torch.int32),
        path_lens=(path_lens, "[requests]", torch.int32),
    )
    (_, layers, places, channels), (requests, width) = inputs.shape, paths.shape
    blocks = -(-channels // _CHANNELS)
    load_kernels("recurrent.round_states", inputs).keep_path[(requests, layers * blocks)](
        *(inputs, slots, paths, path_lens, layers, places, width, history),
        CHANNELS=channels,
        BLOCKS=blocks,
        BLOCK_C=_CHANNELS,
        num_warps=1,
        enable_fp_fusion=False,
    )
