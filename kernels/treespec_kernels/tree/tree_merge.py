"""Tree merge: turns proposals of SSMs and seeds for one level of every tree into candidates and the next frontier.

This is the reference for growing trees. Growth in numpy (the drafters' forest.py) merges with the same function, and
growth_cpu is bit-identical to it.

Proposals of the same token at one frontier node are merged: the first one, in the order of (source, proposal), becomes
the candidate, and the others are dropped. The seeds are the last source. If a frontier node is the root or a seed (its
path is a path of the proposed tree), its first C children among the seeds are proposed.

A proposal of an SSM is valid if its token is not negative, its frontier node exists, and its share, weight *
probability, is finite and at least 0. Hence NaN and infinity of a draft that overflowed are ignored, and token -1 means
no proposal. If an SSM proposes a token twice at one node, the larger share counts.

The following is in float32, with each operation rounded once and in this order:

- the mixture m is the sum of the shares of the SSMs that propose the token, from SSM 0 on, clamped to at most 1;
- a candidate that is not a seed has probability m. For a seed (any child of the node's seed, not only the first C), the
  odds of the mixture are multiplied by the seed's evidence ratio: p = scaled / (scaled + (1 - prior)), with prior = m
  clamped to [`MIN_MIXTURE`, `MAX_MIXTURE`] and scaled = ratio * prior. If no SSM has a valid proposal at the node, the
  seed has its own probability;
- the candidate's value is the frontier node's value times its probability. The product never exceeds its first factor,
  so values never increase along a path.

The next frontier has the best candidates of this level that are not end tokens and have a value above 0, by (value
descending, flat index ascending): at most `frontier_width` of their depth, and at most F. If all D levels are grown
already, nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.triton_launch import block_of, load_kernels
from treespec_kernels.tree.device_trees import SEED_BIT, DeviceForest, ProposedTrees
from treespec_kernels.tree.growth_limits import MAX_MIXTURE, MIN_MIXTURE, frontier_width

_ZERO, _ONE, _MIN_PRIOR, _MAX_PRIOR = map(np.float32, (0, 1, MIN_MIXTURE, MAX_MIXTURE))


def merge_children(
    shares: Sequence[Mapping[int, np.float32]],  # by SSM, the shares of its proposed tokens, in order
    seeds: Mapping[int, int],  # indices of the node's seeds by token, in order
    most_seeds: int,  # number of these seeds to propose
    seed_probs: np.ndarray,  # float32, probabilities of all seeds
    seed_ratios: np.ndarray,  # float32, their evidence ratios
) -> dict[int, tuple[np.float32, int]]:
    """Merge the proposals of SSMs and seeds at one node.

    Returns:
        By token, in the order of first proposals, its probability and seed index, -1 for none.
    """
    merged: dict[int, tuple[np.float32, int]] = {}
    has_mixture = any(shares)
    for token in dict.fromkeys(chain(*shares, islice(seeds, most_seeds))):
        prob = _ZERO
        for of_ssm in shares:
            if token in of_ssm:
                prob = prob + of_ssm[token]
        prob, seed = min(prob, _ONE), seeds.get(token, -1)
        if seed >= 0 and has_mixture:
            prior = min(max(prob, _MIN_PRIOR), _MAX_PRIOR)
            scaled = seed_ratios[seed] * prior
            prob = scaled / (scaled + (_ONE - prior))
        elif seed >= 0:
            prob = seed_probs[seed]
        merged[token] = prob, seed
    return merged


def tree_merge_ref(
    forest: DeviceForest, tokens: Tensor, probs: Tensor, weights: Tensor, end_tokens: Tensor, proposed: ProposedTrees
) -> None:
    """Grow every tree by one level (reference: numpy on the host, any device).

    Args:
        forest: changed in place.
        tokens: [G, B, F, C] int32, proposals of each SSM at each frontier node; -1 for none.
        probs: [G, B, F, C] float32, the SSM's probability of each proposal.
        weights: [B, G] float32, mixture weights; they sum to 1 if every SSM drafts.
        end_tokens: [B, E] int32, tokens that are not expanded; padded with -1.
        proposed: trees of model-free sources; the same in every level of a round.
    """
    state = {name: tensor.cpu().numpy() for name, tensor in forest.tensors.items()}
    ssm_tokens, ssm_probs, weight = tokens.cpu().numpy(), probs.cpu().numpy(), weights.cpu().numpy()
    seeds = [tensor.cpu().numpy() for tensor in proposed]
    for request, ends in enumerate(end_tokens.tolist()):
        if state["levels"][request] < forest.max_depth:
            request_state = {name: array[request : request + 1] for name, array in state.items()}
            trees = ProposedTrees(*(array[request] for array in seeds))
            with np.errstate(all="ignore"):  # invalid shares are dropped, and sums above 1 are clamped
                _merge_one(request_state, ssm_tokens[:, request], ssm_probs[:, request], weight[request], ends, trees)
    for name, array in state.items():
        getattr(forest, name).copy_(torch.from_numpy(array))


def _merge_one(
    state: dict[str, Any], ssm_tokens: Any, ssm_probs: Any, weight: Any, ends: list[int], proposed: Any
) -> None:
    """Merge the proposals of one request; every array of `state` has a first dimension of 1."""
    _, max_depth, candidates = state["cand_tokens"].shape
    num_ssms, width, proposals = ssm_tokens.shape
    level = int(state["levels"][0])
    frontier, old_ancestors = state["frontier"][0].copy(), state["frontier_ancestors"][0].copy()
    for name in ("tokens", "parents", "values", "masks"):
        state[f"cand_{name}"][0, level] = DeviceForest.FORMS[f"cand_{name}"][1]
    shares = weight[:, None, None] * ssm_probs
    valid = (ssm_tokens >= 0) & (shares >= 0) & (shares < np.inf) & (frontier >= 0)[:, None]
    seed_of = np.full(candidates, -2)
    for f, seed_parent in enumerate(state["frontier_seeds"][0].tolist()):
        first: dict[int, int] = {}  # index of each token's first proposal
        shares_of: list[dict[int, np.float32]] = [{} for _ in range(num_ssms)]
        for ssm, of_ssm in enumerate(shares_of):
            for c in np.flatnonzero(valid[ssm, f]).tolist():
                token, share = int(ssm_tokens[ssm, f, c]), shares[ssm, f, c]
                first.setdefault(token, (f * (num_ssms + 1) + ssm) * proposals + c)
                of_ssm[token] = max(of_ssm.get(token, share), share)
        children = np.flatnonzero((proposed.tokens >= 0) & (proposed.parents == seed_parent)).tolist()
        seeds = {int(proposed.tokens[child]): child for child in children}
        for c, token in enumerate(islice(seeds, proposals)):
            first.setdefault(token, (f * (num_ssms + 1) + num_ssms) * proposals + c)
        merged = merge_children(shares_of, seeds, proposals, proposed.probs, proposed.ratios)
        for token, (prob, seed) in merged.items():
            number, mask = first[token], sum(1 << ssm for ssm, of_ssm in enumerate(shares_of) if token in of_ssm)
            if seed >= 0:
                mask |= 1 << SEED_BIT
                seed_of[number], state["seed_cands"][0, seed] = seed, level * candidates + number
            state["cand_tokens"][0, level, number] = token
            state["cand_parents"][0, level, number] = -1 if frontier[f] == max_depth * candidates else frontier[f]
            state["cand_values"][0, level, number] = state["frontier_values"][0, f] * prob
            state["cand_masks"][0, level, number] = mask

    level_tokens, values = state["cand_tokens"][0, level], state["cand_values"][0, level]
    expandable = [n for n in range(candidates) if values[n] > 0 and level_tokens[n] not in ends]
    best = sorted(expandable, key=lambda n: (-values[n], n))[: frontier_width(level + 1, width)]
    for name, (_, empty) in DeviceForest.FORMS.items():
        if name.startswith("frontier"):
            state[name][0] = empty
    for i, number in enumerate(best):
        slot = 1 + level * width + i
        state["frontier"][0, i] = level * candidates + number
        state["frontier_tokens"][0, i] = level_tokens[number]
        state["frontier_values"][0, i] = values[number]
        state["frontier_depths"][0, i] = level + 1
        state["frontier_slots"][0, i] = slot
        state["frontier_seeds"][0, i] = seed_of[number]
        state["frontier_ancestors"][0, i] = old_ancestors[number // ((num_ssms + 1) * proposals)]
        state["frontier_ancestors"][0, i, level + 1 :] = slot
    state["levels"][0] = level + 1


def tree_merge_triton(
    forest: DeviceForest, tokens: Tensor, probs: Tensor, weights: Tensor, end_tokens: Tensor, proposed: ProposedTrees
) -> None:
    """Compute `tree_merge_ref` on a GPU, in one launch without a host sync."""
    sizes = check_arguments(
        {"F": forest.frontier_width, "S": forest.num_seeds},
        levels=(forest.levels, "B", torch.int32),
        tokens=(tokens, "G B F C", torch.int32),
        probs=(probs, "G B F C", torch.float32),
        weights=(weights, "B G", torch.float32),
        end_tokens=(end_tokens, "B _", torch.int32),
        **proposed.arguments,
    )
    assert (sizes["G"] + 1) * sizes["F"] * sizes["C"] == forest.candidates
    kernels = load_kernels("tree.tree_merge", probs)
    num_ssms, _, frontier, proposals = tokens.shape
    num_ends, block_p, block_c = end_tokens.shape[1], block_of(forest.candidates), block_of(proposals)
    kernels.merge_level[(forest.num_requests,)](
        tokens,
        probs,
        weights,
        end_tokens,
        *proposed,
        *forest.tensors.values(),
        *tokens.stride()[:3],
        *probs.stride()[:3],
        weights.stride(0),
        end_tokens.stride(0),
        SSMS=num_ssms,
        FRONTIER=frontier,
        PROPOSALS=proposals,
        ENDS=num_ends,
        SEEDS=forest.num_seeds,
        MAX_DEPTH=forest.max_depth,
        BLOCK_P=block_p,
        BLOCK_F=block_of(frontier),
        BLOCK_C=block_c,
        BLOCK_E=block_of(max(num_ends, 1)),
        BLOCK_S=block_of(forest.num_seeds),
        BLOCK_W=block_of(forest.max_depth + 1),
        num_warps=min(max(block_p * block_c // 256, 1), 16),  # about 8 comparisons per thread with one SSM's proposals
        enable_fp_fusion=False,
    )
