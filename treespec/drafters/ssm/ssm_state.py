"""Per-request state of the SSM group."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from treespec.drafters.ssm.scoring import Block, Rows
from treespec.mixture_weights import MixtureWeights
from treespec.tree import TokenTree
from treespec_kernels.attention.tree_batch import RequestRows


def open_mass(seed_tree: TokenTree) -> float:
    """Return the probability that the next token is not among the seeds below the root."""
    return max(1.0 - float(seed_tree.probs[seed_tree.parents == 0].sum()), 0.0) if len(seed_tree) > 1 else 1.0


def grown_masks(masks: np.ndarray, above: np.ndarray) -> np.ndarray:
    """Extend the ancestor mask of a tree's slots by a new level: bool [slots + new, slots + new].

    `masks` is the mask so far; `above`, int64 [new], is the slot of each new node's parent.
    """
    first, count = len(masks), len(above)
    grown = np.zeros((first + count, first + count), dtype=bool)
    grown[:first, :first] = masks
    grown[first:, :first] = masks[above]
    nodes = np.arange(first, first + count)
    grown[nodes, nodes] = True
    return grown


def rows_of_level(masks: np.ndarray, count: int, root: int, pages: np.ndarray, max_len: int) -> RequestRows:
    """Return the rows of a tree's newest level: the last `count` slots of `masks`, with the root at a position."""
    depths, first = masks.sum(1) - 1, len(masks) - count
    return RequestRows(root, np.arange(first, len(masks)), depths[first:], masks[first:], depths, pages, max_len)


@dataclass
class SsmState:
    """A request's state between rounds. Slots refer to the tree's expanded nodes in the SSMs' pools."""

    mixture: MixtureWeights  # mixture weights of the SSMs
    valid: np.ndarray  # int64 [num_ssms], number of leading positions with K/V in each SSM's pool
    max_lags: np.ndarray  # int64 [num_ssms], maximum lag: committed tokens that an SSM may miss before it catches up
    weights: np.ndarray  # float64 [num_ssms], mixture weights of this round; 0 for inactive SSMs
    active: list[int] = field(default_factory=list)  # SSMs that draft in this round, ascending
    scores: dict[int, list[Rows]] = field(default_factory=dict)  # scores of the slots in order, in parts, by active SSM
    blocks: dict[int, Block] = field(default_factory=dict)  # predictions below the root by active block draft
    slots: np.ndarray | None = None  # slots of the proposed tree's nodes, as in `TokenTree`; None without a tree
    seed_tree: TokenTree | None = None  # the seeds that the tree was grown over; None without a tree
    accepted: tuple[int, np.ndarray] | None = None  # root position and path slots, until SSMs are scored on the path
    # Each active SSM's probabilities of the tokens after the accepted slots, if C++ ran the round; None otherwise
    accepted_probs: dict[int, np.ndarray] | None = None
    captured_weights: np.ndarray | None = None  # float64 [num_ssms], for the next captured round, or None
    read_to: int | None = None  # in captured rounds, leading positions with K/V of all active SSMs; None if unknown

    def token_probs(self, ssm: int, slots: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """Return an active SSM's probability of `tokens[i]` after `slots[i]`, without temperature and noise.

        `slots` is int64, ascending. The result, [len(slots)], ends before the first slot that the SSM did not score.
        """
        scores = self.scores[ssm]
        slots = slots[: slots.searchsorted(sum([len(part.probs) for part in scores]))]
        probs = [np.empty(0, dtype=np.float32)]
        first = start = 0
        for part in scores:
            end = int(slots.searchsorted(first + len(part.probs)))
            if start < end:
                probs.append(part.plain_probs_of(slots[start:end] - first, tokens[start:end]))
            first, start = first + len(part.probs), end
        return np.concatenate(probs)


def outputs_of(scores: Sequence[Rows], slots: np.ndarray) -> Tensor:
    """Return a draft head's outputs at some slots, its inputs for their children: [len(slots), hidden_size]."""
    outputs = torch.cat([part.outputs for part in scores if part.outputs is not None])
    return outputs[torch.from_numpy(slots).to(outputs.device)]
