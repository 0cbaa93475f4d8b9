"""Target pass over token trees, on the device."""

from functools import partial

import torch
from torch import Tensor

from treespec.graphs.draft_passes import FeaturePool
from treespec.graphs.round_inputs import DeviceInputs
from treespec.graphs.stack_passes import ModelStack, StackPasses
from treespec.models.decoder import record_states
from treespec_kernels.linear.lm_head import LmHead


class TreePass:
    """Target pass over trees of at most N nodes in each of B requests; stores the hidden states that heads read."""

    def __init__(self, target: ModelStack, inputs: DeviceInputs, nodes: int, features: FeaturePool | None):
        self._target, self._inputs, self._features = target, inputs, features
        self._passes = StackPasses(target, inputs, nodes, chain=nodes == 1)
        self._slots = None
        if nodes > 1:
            slots = torch.arange(nodes, dtype=torch.int32, device=inputs.device)
            self._slots = slots.expand(inputs.num_requests, nodes)

    @property
    def positions(self) -> Tensor:
        """Positions of the last pass's rows, int32 [B * N]."""
        return self._passes.positions

    def logits(self, tokens: Tensor, depths: Tensor, ancestors: Tensor) -> LmHead:
        """Write the nodes' K/V to the slots behind the contexts and return their logits.

        Args:
            tokens, depths: int32 [B, N]; depth -1 for padding.
            ancestors: int32 [B, N, D + 1], indices of a node's ancestors by depth, its own last and then repeated.
        """
        of_trees = (self._slots, None if self._slots is None else ancestors)
        run = partial(self._passes.hidden, tokens, self._inputs["context_lens"], depths, *of_trees)
        kernels = self._target.kernels
        if self._features is None:
            return kernels.logits(run())
        hidden, states = record_states(self._features.layers, len(kernels.weights.layers), run)
        self._features.write(self._passes.slots, states)
        return kernels.logits(hidden)
