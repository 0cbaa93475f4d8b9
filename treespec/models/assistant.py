"""Assistants of Gemma 4: drafts that read the target's K/V instead of keeping their own.

A row combines a token's embedding with the state of the token before it, the target's or, below a root, the
assistant's own. All rows below a root have the root's position, and attend to the committed tokens before it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from treespec.errors import ModelError
from treespec.models.attention import CpuAttention
from treespec.models.decoder import Decoder, Pass, StreamInput
from treespec.models.feature_head import FeatureHead
from treespec.models.model_config import ModelConfig
from treespec.models.per_layer import table_rows
from treespec.models.triton_decoder import TritonDecoder
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.linear.linear import Linear, LinearImpl
from treespec_weights.assistants import AssistantForm, AssistantWeights

_KV_OF_TARGET = -1  # `LayerSizes.kv_of` of layers that read the target's K/V


def assistant_config(form: AssistantForm, target: object, max_model_len: int | None) -> ModelConfig:
    """Return the config of an assistant's layers. Raises ModelError for a target whose K/V they cannot read."""
    if not isinstance(target, ModelConfig):
        raise ModelError(
            f"{form.folder} reads the K/V of Gemma 4 in treespec's own passes; transformers' code runs this target: "
            "leave this draft out"
        )
    config = ModelConfig.from_raw(form.folder, form.config, form.rules, max_model_len)
    if config.shape.vocab_size != target.shape.vocab_size:
        raise ModelError(
            f"{form.folder}: vocab_size is {config.shape.vocab_size}, that of the target {target.shape.vocab_size}; "
            "use the assistant of this target"
        )
    sizes = tuple(layer._replace(kv_of=_KV_OF_TARGET) for layer in config.shape.sizes)
    # As in transformers, windows have one more key, because queries have no key of their own.
    layers = tuple(kind._replace(window=kind.window and kind.window + 1) for kind in config.layers)
    config = replace(config, shape=replace(config.shape, sizes=sizes), layers=layers)
    for i in range(config.shape.num_layers):
        _planes_of(target, config, i)
    return config


def _planes_of(target: ModelConfig, config: ModelConfig, i: int) -> slice:
    """Return the planes of the target's cache that layer i reads: those of the last layer of its type."""
    shape, wanted, rope = target.shape, config.shape.layer(i), config.ropes[config.layers[i].rope].key
    for source in reversed(range(shape.num_layers)):
        sizes, planes = shape.layer(source), shape.num_planes(source)
        alike = (sizes.num_kv_heads, sizes.head_dim) == (wanted.num_kv_heads, wanted.head_dim)
        if planes and alike and target.ropes and target.ropes[target.layers[source].rope].key == rope:
            first = shape.planes(range(shape.num_layers))[source]
            return slice(first, first + planes)
    raise ModelError(
        f"{config.folder}: layer {i} reads keys of {wanted.num_kv_heads} heads of {wanted.head_dim}, and no layer of "
        f"{target.folder} has such keys with its rotation; use the assistant of this target"
    )


class _AssistantLayers(Decoder):
    """Base of an assistant's decoders, whose layers read K/V of the target."""

    _target: ModelConfig

    def _cache_places(self, layers: Sequence[int]) -> list[slice]:
        return [_planes_of(self._target, self.config, i) for i in layers]

    def _positions(self, rows: RequestRows) -> np.ndarray:
        return super()._positions(rows) + 1  # the root's position follows those of the tokens that are read

    def plan(self, requests: list[RequestRows], kv: Tensor) -> Any:
        """Plan a pass whose rows attend to the tokens before their roots only; `kv` is the target's pool."""
        planned = list[RequestRows]()
        for rows in requests:
            if rows.is_chain:  # every row is a root
                planned += [RequestRows.chain(last, 1, rows.pages, rows.max_len) for last in rows.positions.tolist()]
            else:  # nodes below one root: all attend to the same tokens, the last of which is in tree slot 0
                same, sees = np.zeros(rows.num_rows, dtype=np.int64), np.ones((rows.num_rows, 1), dtype=bool)
                planned.append(RequestRows(rows.context_len, same, same, sees, same[:1], rows.pages, rows.max_len))
        return super().plan(planned, kv)


class AssistantDecoder(_AssistantLayers):
    """An assistant's layers in eager passes."""

    def __init__(self, target: ModelConfig, config: ModelConfig, weights: dict[str, Tensor], impl: LinearImpl):
        self._target = target
        super().__init__(config, weights, CpuAttention(config.shape.num_heads), impl)


class TritonAssistantDecoder(_AssistantLayers, TritonDecoder):
    """An assistant's layers on Triton kernels; arguments as in `TritonDecoder`."""

    def __init__(self, target: ModelConfig, config: ModelConfig, *arguments: Any):
        self._target = target
        super().__init__(config, *arguments)
        self.kernels.caches = self._cache_places(range(config.shape.num_layers))


class TokenGroups(NamedTuple):
    """Groups of tokens; the head scores only the groups whose centroids have the largest scores."""

    centroids: Linear
    tokens: Tensor  # int64 [groups, tokens of each]
    num_scored: int

    def logits(self, hidden: Tensor, embed: Tensor) -> Tensor:
        """Return logits [num_rows, vocab_size], -inf for tokens of other groups."""
        tokens = self.tokens[self.centroids(hidden).topk(self.num_scored).indices].flatten(1)
        scores = torch.bmm(F.embedding(tokens, embed), hidden[:, :, None])[:, :, 0]
        return hidden.new_full((len(hidden), len(embed)), -torch.inf).scatter_(1, tokens, scores)


class AssistantHead(FeatureHead):
    """An assistant as a draft head."""

    kind = "gemma4_assistant"
    keeps_kv = False

    def __init__(
        self,
        form: AssistantForm,
        weights: AssistantWeights,
        decoder: AssistantDecoder | TritonAssistantDecoder,  # built from `weights.decoder` and `assistant_config`
        target: Decoder,
        pool: Tensor,  # the target's K/V
        columns: Sequence[int],  # as in `FeatureHead`
        impl: LinearImpl,
    ):
        super().__init__(decoder, None, columns)
        self.plan_key = (self.kind, id(decoder))
        self._table = target.embed if target.embed_blocks is None else target.embed_blocks
        self._embed_scale, self._pool = target.embed_scale, pool
        self._before, self._after = (Linear(weight, None, impl) for weight in (weights.before, weights.after))
        self._groups: TokenGroups | None = None
        if weights.centroids is not None and weights.groups is not None:
            self._groups = TokenGroups(Linear(weights.centroids, None, impl), weights.groups, form.top_centroids)

    @property
    def nbytes(self) -> int:
        return self.decoder.nbytes + self._before.nbytes + self._after.nbytes

    def plan(self, requests: list[RequestRows], kv: Tensor) -> Pass:
        return self.decoder.plan(requests, self._pool)

    def forward_features(self, tokens: Tensor, features: Tensor, layout: Pass, kv: Tensor) -> tuple[Tensor, Tensor]:
        embedded = table_rows(self._table, tokens, self.dtype) * self._embed_scale
        rows = self._before(torch.cat((embedded, features), 1))
        final = self.decoder.forward_stream(StreamInput(rows, None), layout, self._pool).final[: len(tokens)]
        return final, self._after(final)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden) if self._groups is None else self._groups.logits(hidden, self.decoder.embed)

    def probs(self, hidden: Tensor) -> Tensor:
        return super().probs(hidden) if self._groups is None else torch.softmax(self.logits(hidden).float(), -1)
