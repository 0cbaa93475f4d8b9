"""Draft heads without attention: Medusa (arXiv 2401.10774) and MLPSpeculator (arXiv 2404.19124).

They read the target's output state before a root. Each depth of the tree has weights of its own.
"""

import copy
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from treespec.models.decoder import Decoder, Pass
from treespec.models.feature_head import AnyLinear, FeatureHead
from treespec.models.head_vocabulary import HeadVocabulary
from treespec_kernels.attention.tree_batch import RequestRows


class DepthHeads(NamedTuple):
    """Vocabulary heads of the depths, and the target whose state they read."""

    target: Decoder
    columns: Sequence[int]  # as in `FeatureHead`: of the output of the target's final norm
    heads: Sequence[AnyLinear]  # by depth
    vocabulary: HeadVocabulary | None  # tokens of the heads' rows; None for the whole vocabulary


class StateHead(FeatureHead):
    """Base of heads without attention, which need no plan and keep no K/V."""

    keeps_kv = False

    def __init__(self, heads: DepthHeads):
        super().__init__(heads.target, None, heads.columns)
        self.head_vocabulary, self.quantization = heads.vocabulary, None
        self.max_depth, self.plan_key = len(heads.heads), (self.kind,)
        self._heads, self._depth = heads.heads, 0

    @property
    def cost_key(self) -> list[object]:
        return [self.kind, self.max_depth, self.nbytes]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in memory; heads may be shared between depths."""
        return sum({id(head): head.nbytes for head in self._heads}.values())

    def at_depth(self, depth: int) -> Self:
        result = copy.copy(self)
        result._depth = depth
        return result

    def plan(self, requests: list[RequestRows], kv: Tensor) -> Pass:
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        return Pass(sum(rows.num_rows for rows in requests), nothing, nothing, None)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._heads[self._depth](hidden)
        return logits if self.head_vocabulary is None else self.head_vocabulary.expand(logits, -torch.inf)

    def probs(self, hidden: Tensor) -> Tensor:
        return torch.softmax(self._heads[self._depth](hidden).float(), -1)


class MedusaHeads(StateHead):
    """Medusa heads: head d predicts depth d + 1 from the state before the root, whatever is drafted above."""

    kind = "medusa"

    def __init__(self, heads: DepthHeads, blocks: Sequence[Sequence[AnyLinear]]):
        super().__init__(heads)
        self._blocks = blocks  # by depth, linear layers of the residual blocks

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(layer.nbytes for block in self._blocks for layer in block)

    def forward_features(self, tokens: Tensor, features: Tensor, layout: Pass, kv: Tensor) -> tuple[Tensor, Tensor]:
        hidden = features
        for layer in self._blocks[self._depth]:
            hidden = hidden + F.silu(layer(hidden))
        return hidden, features


class SpeculatorStep(NamedTuple):
    """Weights of an MLPSpeculator for one depth."""

    embed: Tensor  # [vocab_size, inner]
    project: AnyLinear  # projects the previous state to [inner]
    gain: Tensor  # weight of the norm, [inner]
    shift: Tensor


class MlpSpeculator(StateHead):
    """An MLPSpeculator: a state of its own, updated by the token of each depth."""

    kind = "mlp_speculator"
    EPS = 1e-6

    def __init__(self, heads: DepthHeads, steps: Sequence[SpeculatorStep], scale_input: bool):
        super().__init__(heads)
        self._steps = steps  # by depth
        self._scale_input = scale_input  # whether to normalise the target's state first
        state_weight = 0.5 ** (0.5 / len(steps))
        self._embed_scale = ((1 - state_weight**2) * len(steps[0].gain) / 2) ** 0.5 / state_weight

    @property
    def nbytes(self) -> int:
        tensors = [tensor for step in self._steps for tensor in step]
        return super().nbytes + sum({id(tensor): tensor.nbytes for tensor in tensors}.values())

    def forward_features(self, tokens: Tensor, features: Tensor, layout: Pass, kv: Tensor) -> tuple[Tensor, Tensor]:
        step = self._steps[self._depth]
        if not self._depth and self._scale_input:
            features = F.rms_norm(features, features.shape[1:], None, self.EPS) * 0.5**0.5
        state = step.project(features) + F.embedding(tokens, step.embed) * self._embed_scale
        state = F.gelu(F.rms_norm(state, step.gain.shape, step.gain, self.EPS) + step.shift)
        return state, state
