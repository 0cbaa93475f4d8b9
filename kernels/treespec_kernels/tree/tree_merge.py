"""Tree merge: merges the SSMs' proposals for one level of every tree into candidates, and picks the next frontier.

The candidates of a level are the new nodes of a trie: of several proposals with the same token below one frontier node,
only the first in the order of (SSM, proposal) is a candidate, for all of them.

A proposal is valid if its token is not negative, its frontier node exists, and its share, weight * probability, is
finite and not negative. So NaN and infinity from a draft that overflowed are ignored, and an SSM proposes nothing with
token -1. If an SSM proposes a token twice below one node, the larger share counts.

In float32, with every operation rounded and in this order: a candidate's probability is the sum of its SSMs' shares,
from SSM 0 on, clipped to 1; its value is the frontier node's value times that. Since such a product never exceeds its
first factor, values never increase along a path.

The next frontier is the F best of this level's candidates that are not end tokens, by (value descending, flat index
ascending). After D levels the merge does nothing.
"""

from __future__ import annotations

import numpy as np
import torch

from treespec_kernels.launch.triton_launch import check_last_strides, check_launch, require_triton
from treespec_kernels.tree.device_trees import MAX_SSMS, DeviceForest, block_of, check_tensor


def tree_merge_ref(
    forest: DeviceForest,
    tokens: torch.Tensor,
    probs: torch.Tensor,
    weights: torch.Tensor,
    end_tokens: torch.Tensor,
) -> None:
    """Grows every tree by one level. numpy on the host, any device.

    Args:
        forest: changed in place.
        tokens: [G, B, F, C] int32, the proposals of each SSM at each frontier node; -1 for none.
        probs: [G, B, F, C] float32, the SSM's probabilities of them.
        weights: [B, G] float32, mixture weights of the SSMs; they sum to 1 if all SSMs take part.
        end_tokens: [B, E] int32, tokens that are never expanded; padded with -1.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """
    check_tree_merge(forest, tokens, probs, weights, end_tokens)
    state = {name: getattr(forest, name).cpu().numpy() for name in forest.__dataclass_fields__}
    proposed, probability, weight = tokens.cpu().numpy(), probs.cpu().numpy(), weights.cpu().numpy()
    for request, ends in enumerate(end_tokens.tolist()):
        if state["levels"][request] < forest.max_depth:
            own = {name: array[request : request + 1] for name, array in state.items()}
            with np.errstate(all="ignore"):  # a NaN share is dropped, a sum above 1 is clipped
                _merge_one(own, proposed[:, request], probability[:, request], weight[request], ends)
    for name, array in state.items():
        getattr(forest, name).copy_(torch.from_numpy(array))


def _merge_one(
    own: dict[str, np.ndarray], proposed: np.ndarray, probability: np.ndarray, weight: np.ndarray, ends: list[int]
) -> None:
    """`tree_merge_ref` for one request; every array of `own` has a first dimension of 1."""
    _, max_depth, candidates = own["cand_tokens"].shape
    num_ssms, width, proposals = proposed.shape
    level = int(own["levels"][0])
    frontier, old_ancestors = own["frontier"][0].copy(), own["frontier_ancestors"][0].copy()
    for name, empty in (("tokens", -1), ("parents", -1), ("values", -np.inf), ("masks", 0), ("slots", -1)):
        own[f"cand_{name}"][0, level] = empty
    shares = weight[:, None, None] * probability
    counts = (proposed >= 0) & (shares >= 0) & (shares < np.inf) & (frontier >= 0)[:, None]
    for f in range(width):
        first: dict[int, int] = {}
        total: dict[int, np.float32] = {}
        for ssm in range(num_ssms):
            said: dict[int, np.float32] = {}
            for c in np.flatnonzero(counts[ssm, f]).tolist():
                token, share = int(proposed[ssm, f, c]), shares[ssm, f, c]
                first.setdefault(token, (f * num_ssms + ssm) * proposals + c)
                said[token] = max(said.get(token, share), share)
            for token, share in said.items():
                total[token] = total.get(token, np.float32(0)) + share
                own["cand_masks"][0, level, first[token]] |= 1 << ssm
        for token, number in first.items():
            own["cand_tokens"][0, level, number] = token
            own["cand_parents"][0, level, number] = -1 if frontier[f] == max_depth * candidates else frontier[f]
            own["cand_values"][0, level, number] = own["frontier_values"][0, f] * min(total[token], np.float32(1))

    level_tokens, values = own["cand_tokens"][0, level], own["cand_values"][0, level]
    going = [n for n in range(candidates) if level_tokens[n] >= 0 and level_tokens[n] not in ends]
    best = sorted(going, key=lambda n: (-values[n], n))[:width]
    for name, empty in (("", -1), ("_tokens", 0), ("_values", 0), ("_depths", -1), ("_slots", 0), ("_ancestors", 0)):
        own[f"frontier{name}"][0] = empty
    for i, number in enumerate(best):
        slot = 1 + level * width + i
        own["cand_slots"][0, level, number] = slot
        own["frontier"][0, i] = level * candidates + number
        own["frontier_tokens"][0, i] = level_tokens[number]
        own["frontier_values"][0, i] = values[number]
        own["frontier_depths"][0, i] = level + 1
        own["frontier_slots"][0, i] = slot
        own["frontier_ancestors"][0, i] = old_ancestors[number // (num_ssms * proposals)]
        own["frontier_ancestors"][0, i, level + 1 :] = slot
    own["levels"][0] = level + 1


def tree_merge_triton(
    forest: DeviceForest,
    tokens: torch.Tensor,
    probs: torch.Tensor,
    weights: torch.Tensor,
    end_tokens: torch.Tensor,
) -> None:
    """`tree_merge_ref` on a GPU, in one launch and without a host sync.

    The last dimensions must be contiguous; outer strides are free.

    Raises:
        ValueError: a shape, dtype, stride or device that does not fit, or triton that cannot run here.
    """
    check_tree_merge(forest, tokens, probs, weights, end_tokens)
    check_last_strides(tokens=tokens, probs=probs, weights=weights, end_tokens=end_tokens)
    require_triton("tree_merge")
    from treespec_kernels.tree import tree_merge_kernels as kernels

    check_launch("tree_merge", kernels.merge_level, probs)
    constants = blocks_of(tokens.shape[0], forest.frontier_width, tokens.shape[3], end_tokens.shape[1])
    kernels.merge_level[(forest.num_requests,)](
        tokens,
        probs,
        weights,
        end_tokens,
        forest.cand_tokens,
        forest.cand_parents,
        forest.cand_values,
        forest.cand_masks,
        forest.cand_slots,
        forest.frontier,
        forest.frontier_tokens,
        forest.frontier_values,
        forest.frontier_depths,
        forest.frontier_slots,
        forest.frontier_ancestors,
        forest.levels,
        *tokens.stride()[:3],
        *probs.stride()[:3],
        weights.stride(0),
        end_tokens.stride(0),
        MAX_DEPTH=forest.max_depth,
        BLOCK_W=block_of(forest.max_depth + 1),
        **constants,
        num_warps=warps_of(constants),
        enable_fp_fusion=False,
    )


def blocks_of(num_ssms: int, frontier: int, proposals: int, num_ends: int) -> dict[str, int]:
    """The kernel's constexpr arguments that depend on G, F, C and E."""
    return {
        "SSMS": num_ssms,
        "FRONTIER": frontier,
        "PROPOSALS": proposals,
        "ENDS": num_ends,
        "BLOCK_P": block_of(frontier * num_ssms * proposals),
        "BLOCK_F": block_of(frontier),
        "BLOCK_C": block_of(proposals),
        "BLOCK_E": block_of(max(num_ends, 1)),
    }


def warps_of(constants: dict[str, int]) -> int:
    """About 16 comparisons in flight per thread: every proposal is compared with one SSM's at a time."""
    return min(max(constants["BLOCK_P"] * constants["BLOCK_C"] // 512, 1), 16)


def check_tree_merge(
    forest: DeviceForest,
    tokens: torch.Tensor,
    probs: torch.Tensor,
    weights: torch.Tensor,
    end_tokens: torch.Tensor,
) -> None:
    """Host-side checks of shapes, dtypes and devices; values on a device are never read."""
    requests, width = forest.num_requests, forest.frontier_width
    shape = tuple(tokens.shape)
    if len(shape) != 4 or shape[1:3] != (requests, width) or shape[0] * width * shape[3] != forest.candidates:
        raise ValueError(
            f"tokens has shape {list(shape)}; expected [G, {requests}, {width}, C] with G * {width} * C = "
            f"{forest.candidates} candidates as in the forest"
        )
    if shape[0] > MAX_SSMS:
        raise ValueError(f"tokens has shape {list(shape)}, of {shape[0]} SSMs; masks hold at most {MAX_SSMS}")
    if tuple(probs.shape) != shape:
        raise ValueError(f"probs has shape {list(probs.shape)}; expected {list(shape)} as in tokens")
    if tuple(weights.shape) != (requests, shape[0]):
        raise ValueError(f"weights has shape {list(weights.shape)}; expected {[requests, shape[0]]}, [B, G]")
    if end_tokens.dim() != 2 or end_tokens.shape[0] != requests:
        raise ValueError(f"end_tokens has shape {list(end_tokens.shape)}; expected [{requests}, E]")
    device = forest.levels.device
    for name, tensor in (("tokens", tokens), ("end_tokens", end_tokens)):
        check_tensor(name, tensor, device, torch.int32)
    for name, tensor in (("probs", probs), ("weights", weights)):
        check_tensor(name, tensor, device, torch.float32)
