"""Draft heads that read hidden states of the target: EAGLE-1 to 3 (arXiv 2401.15077, 2406.16858, 2503.01840).

A token's row combines its embedding with the *feature* of the token before it. After verified tokens the feature comes
from the target's hidden states; after a drafted node it is the head's own output at that node.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from treespec.models.decoder import Decoder, Pass, StreamInput
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.cpu.compiled_linear import CompiledLinear
from treespec_kernels.cpu.decoder_cpu import PairInputs, PassEntries
from treespec_kernels.linear.linear import Linear

AnyLinear = Linear | CompiledLinear


class DecoderWrapper:
    """Base of drafts around a decoder, with the vocabulary head of `target`, if given."""

    block: int | None = None
    keeps_kv = True
    max_depth: int | None = None  # number of levels that it predicts; None for any number
    entries: PassEntries | None = None  # entry points for the call that grows trees
    plan_key: tuple[object, ...]

    def __init__(self, decoder: Decoder, target: Decoder | None = None):
        self.decoder, self.vocabulary_head = decoder, decoder if target is None else target
        self.config, self.vocab_size, self.head_vocabulary = decoder.config, decoder.vocab_size, decoder.head_vocabulary
        self.device, self.dtype, self.backend = decoder.device, decoder.dtype, decoder.backend
        self.quantization, self.growth, self.compiled = decoder.quantization, decoder.growth, decoder.compiled

    def plan(self, requests: list[RequestRows], kv: Tensor) -> Pass:
        return self.decoder.plan(requests, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits of the target's vocabulary, [num_rows, vocab_size]."""
        return self.vocabulary_head.logits(hidden)

    def probs(self, hidden: Tensor) -> Tensor:
        return self.vocabulary_head.probs(hidden)


class FeatureHead(DecoderWrapper, ABC):
    """Base of draft heads, whose rows are pairs of a token and a feature.

    The row of the token at position p has slot p - 1, because there is no row without a feature. Rotations are
    relative, so the distributions are those of the published implementations. `columns` are the indices of the states
    that it reads among the features.
    """

    kind: str
    offset = 1
    kept_nodes = 1  # drafted tokens are read again, with the target's states in place of the head's own outputs

    def __init__(self, decoder: Decoder, target: Decoder | None, columns: Sequence[int]):
        super().__init__(decoder, target)
        self.columns = list(columns)
        self._columns = torch.tensor(self.columns, dtype=torch.int64, device=decoder.device)
        self.plan_key = ("head", *decoder.plan_key)

    @property
    def cost_key(self) -> list[object]:
        return [self.kind, len(self.columns), *self.decoder.cost_key]

    def features_of(self, states: Tensor) -> Tensor:
        """Return features [num_rows, hidden_size] from the target's states [num_rows, number of layers, hidden].

        By default, the one state that the head reads.
        """
        return states.index_select(1, self._columns).flatten(1).to(self.dtype)

    def at_depth(self, depth: int) -> Self:
        """Return the head with the weights for nodes of a depth, the root's being 0."""
        return self

    @abstractmethod
    def forward_features(self, tokens: Tensor, features: Tensor, layout: Pass, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Run a pass: write the rows' K/V to their slots.

        Tokens are int64 [num_rows], the features those of the tokens before them. Returns hidden states for `logits`,
        and the features of these tokens, [num_rows, hidden_size] each.
        """


class PairHead(FeatureHead):
    """Base of heads that normalise both parts of a pair.

    `pairs` returns the inputs of the layers; if these include projections, the first layer has no `qkv`. With
    `norm_output`, features of drafted tokens are outputs after the final norm.
    """

    def __init__(
        self,
        decoder: Decoder,
        target: Decoder | None,  # as in `FeatureHead`
        columns: Sequence[int],
        pairs: "TorchPairs | PairInputs",
        norm_output: bool,
    ):
        super().__init__(decoder, target, columns)
        self.pairs, self._norm_output = pairs, norm_output
        scorer = self.vocabulary_head.entries
        if decoder.entries is not None and scorer is not None and isinstance(pairs, PairInputs):
            self.entries = pairs.add_to(decoder.entries, norm_output)._replace(probs=scorer.probs, head=scorer.head)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in memory, without the target's embeddings and vocabulary head."""
        return self.decoder.nbytes + self.pairs.nbytes

    def forward_features(self, tokens: Tensor, features: Tensor, layout: Pass, kv: Tensor) -> tuple[Tensor, Tensor]:
        final, streams = self.decoder.forward_stream(StreamInput(*self.pairs(tokens, features)), layout, kv)
        final = final[: len(tokens)]
        return final, final if self._norm_output else streams[: len(tokens), 0]


class PredictorHead(PairHead):
    """The MTP layer of a native target's checkpoint: its features are the target's output states, and its own."""

    kind = "mtp"


class Eagle3Head(PairHead):
    """An EAGLE-3 head, or a state SSM."""

    kind = "eagle3"

    def __init__(
        self,
        decoder: Decoder,  # its layers and its head
        columns: Sequence[int],
        fc: AnyLinear,  # projection of the target's states to a feature
        pairs: "TorchPairs | PairInputs",
        norm_output: bool,
        state_norms: Tensor | None = None,  # weights of norms of the states, as in `HeadWeights`
    ):
        super().__init__(decoder, None, columns, pairs, norm_output)
        self._fc, self._state_norms = fc, state_norms

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._fc.nbytes

    def features_of(self, states: Tensor) -> Tensor:
        return self.project(states.index_select(1, self._columns))

    def project(self, states: Tensor) -> Tensor:
        """Return features [num_rows, hidden_size] of the states that the head reads, [num_rows, number, hidden]."""
        states = states.to(self.dtype)
        if (norms := self._state_norms) is not None:
            states = F.rms_norm(states.view(-1, *norms.shape), norms.shape[1:], None, self.config.norm_eps) * norms
        return self._fc(states.reshape(len(states), -1))


class EagleHead(FeatureHead):
    """An EAGLE-1 or EAGLE-2 head: its features are the target's output states, and its vocabulary head the target's.

    Without a `target`, `decoder` has a copy of some rows of that head. `fc` projects [embedding, feature] to the
    residual stream; the embeddings are [vocab_size, hidden_size].
    """

    kind = "eagle"

    def __init__(
        self,
        decoder: Decoder,
        target: Decoder | None,
        columns: Sequence[int],
        embed: Tensor,
        fc: AnyLinear,
        qkv: AnyLinear,
    ):
        super().__init__(decoder, target, columns)
        self._embedding, self._fc, self._qkv = embed, fc, qkv

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in memory, without the target's embeddings and vocabulary head."""
        return self.decoder.nbytes + self._fc.nbytes + self._qkv.nbytes

    def forward_features(self, tokens: Tensor, features: Tensor, layout: Pass, kv: Tensor) -> tuple[Tensor, Tensor]:
        rows = self._fc(torch.cat((F.embedding(tokens, self._embedding).to(features.dtype), features), 1))
        output = self.decoder.forward_stream(StreamInput(rows, self._qkv(rows)), layout, kv).streams[: len(tokens), 0]
        return output, output


class TorchPairs:
    """Inputs of a head's layers, with the interface of `PairInputs`."""

    def __init__(self, product: AnyLinear, embed: Tensor, norms: Sequence[Tensor], eps: float, stream: str):
        self.embed, self.nbytes = embed, product.nbytes
        self._product, self._norms, self._eps, self._stream = product, [norm.float() for norm in norms], eps, stream

    def __call__(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream before the first layer, and this layer's projections, as `PairInputs`."""
        pair = F.embedding(tokens, self.embed).to(features.dtype), features
        normed = [self._norm(tensor, weight) for tensor, weight in zip(pair, self._norms, strict=True)]
        product = self._product(torch.cat(normed, 1))
        if self._stream == "product":
            return product, None
        return features if self._stream == "feature" else normed[1], product

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[1],), weight, self._eps).to(x.dtype)
