"""Draft passes of captured rounds: over the tokens that the last round emitted, and over a frontier."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from treespec.cache.kv_cache import load_features, store_features
from treespec.graphs.round_inputs import RoundInputs
from treespec.graphs.stack_passes import HeadStack, ModelStack, StackPasses
from treespec.models.triton_decoder import TritonPass
from treespec_kernels.attention.tree_batch import PAGE_SIZE
from treespec_kernels.tree.device_trees import DeviceForest
from treespec_kernels.tree.growth_limits import FRONTIER


class FeaturePool(NamedTuple):
    """Pool of the target's hidden states that draft heads read.

    Attributes:
        layers: of the target, as in `Decoder.forward_with_states`.
        pool: [num layers, 2, num_pages, heads, PAGE_SIZE, width], as in `KVCache`.
    """

    layers: tuple[int, ...]
    pool: Tensor

    def write(self, slots: Tensor, states: Tensor) -> None:
        """Write states [num_rows, num layers, hidden_size] to physical slots, int64 [num_rows]."""
        store_features(self.pool, slots // PAGE_SIZE, slots % PAGE_SIZE, states)

    def read(self, slots: Tensor) -> Tensor:
        """Return the states at physical slots, [num_rows, num layers, hidden_size]."""
        return load_features(self.pool, slots // PAGE_SIZE, slots % PAGE_SIZE)


class DraftPasses(ABC):
    """Passes of a stack of drafts, which return hidden states for its `logits`."""

    def __init__(self, stack: ModelStack, inputs: RoundInputs):
        self._inputs = inputs
        self._chain = StackPasses(stack, inputs, inputs.limits.width, chain=True)
        self._level = StackPasses(stack, inputs, FRONTIER, chain=False)

    @abstractmethod
    def read(self, tokens: Tensor, first: Tensor, depths: Tensor) -> Tensor:
        """Read the tokens emitted in the last round, up to the roots; returns [G * B * (D + 1), hidden_size].

        Args:
            tokens: int32 [B, D + 1].
            first: int32 [B], position of the first token.
            depths: int32 [B, D + 1], index of each token; -1 for padding.
        """

    @abstractmethod
    def score(self, forest: DeviceForest) -> Tensor:
        """Score the frontier; returns [G * B * FRONTIER, hidden_size]."""


def num_tree_slots(max_depth: int) -> int:
    """Return the number of slots of a tree of drafted tokens: the root's, and those of every frontier but the last."""
    return 1 + (max_depth - 1) * FRONTIER


class SsmPasses(DraftPasses):
    """Passes of a stack of SSMs."""

    def read(self, tokens: Tensor, first: Tensor, depths: Tensor) -> Tensor:
        return self._chain.hidden(tokens, first, depths)

    def score(self, forest: DeviceForest) -> Tensor:
        placed = forest.frontier_depths, forest.frontier_slots, forest.frontier_ancestors
        return self._level.hidden(forest.frontier_tokens, self._inputs["context_lens"], *placed)


class HeadPasses(DraftPasses):
    """Passes of a draft head, whose rows also read the feature of the token before theirs (see `FeatureHead`).

    The feature is the target's after a verified token, and the head's own output after a drafted one.
    """

    def __init__(self, stack: HeadStack, inputs: RoundInputs, features: FeaturePool):
        super().__init__(stack, inputs)
        self._stack, self._features = stack, features
        # Outputs at the nodes by their slot; those of an empty place in the frontier go to the last one.
        size = inputs.num_requests, num_tree_slots(inputs.limits.max_depth) + 1, stack.head.config.shape.hidden_size
        self._outputs = torch.zeros(size, dtype=stack.head.dtype, device=inputs.device)

    def read(self, tokens: Tensor, first: Tensor, depths: Tensor) -> Tensor:
        # A token's K/V have the slot of its feature, one before its position. A request without a committed token has
        # no feature; its heads have no weight, and what they compute in its first slot is overwritten.
        rows = self._chain.place((first - 1).clamp(min=0), depths)
        features = self._stack.head.features_of(self._features.read(rows.slots))
        hidden, outputs = self._forward(tokens, features, rows)
        roots = (self._inputs["new_lens"] - 1).clamp(min=0).long()
        outputs = outputs.view(*tokens.shape, -1)
        self._outputs[:, 0] = outputs.gather(1, roots[:, None, None].expand(-1, 1, outputs.shape[2]))[:, 0]
        return hidden

    def score(self, forest: DeviceForest) -> Tensor:
        slots, depths, ancestors = forest.frontier_slots, forest.frontier_depths, forest.frontier_ancestors
        rows = self._level.place((self._inputs["context_lens"] - 1).clamp(min=0), depths, slots, ancestors)
        parents = ancestors.gather(2, (depths - 1).clamp(min=0).long()[..., None])[..., 0].long()
        width = self._outputs.shape[2]
        features = self._outputs.gather(1, parents[..., None].expand(-1, -1, width))
        hidden, outputs = self._forward(forest.frontier_tokens, features.flatten(0, 1), rows)
        places = torch.where(depths < 0, self._outputs.shape[1] - 1, slots).long()
        self._outputs.scatter_(1, places[..., None].expand(-1, -1, width), outputs.view(*slots.shape, width))
        return hidden

    def _forward(self, tokens: Tensor, features: Tensor, rows: TritonPass) -> tuple[Tensor, Tensor]:
        ids = tokens.clamp(min=0).long().flatten()
        return self._stack.head.forward_features(ids, features, rows, self._stack.pool)
