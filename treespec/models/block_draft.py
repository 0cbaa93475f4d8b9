"""Block drafts: one pass over a block of rows at the root predicts the tokens of several depths.

The predictions of a depth do not depend on the tokens drafted above it, so one pass suffices for a tree. A DSpark draft
adds a bias by the node's token.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from treespec.models.decoder import Decoder, StreamInput
from treespec.models.feature_head import AnyLinear, DecoderWrapper, Eagle3Head
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.cpu.decoder_cpu import PassEntries


class Unread(NamedTuple):
    """The tokens of a request that a block draft has not read."""

    tokens: Sequence[int]  # committed tokens and, last, the root
    start: int  # position of the first token
    pages: np.ndarray
    # The target's states from position `start` - `BlockDraft.offset` to that before the root, [num states, number of
    # layers, hidden_size]; None for drafts that read none
    states: Tensor | None
    max_len: int  # as in `RequestRows`

    @property
    def root(self) -> int:
        return self.start + len(self.tokens) - 1


class BlockDraft(DecoderWrapper, ABC):
    """Base of block drafts."""

    offset = 0
    kept_nodes: int
    columns: Sequence[int] = ()
    block: int  # number of depths that one pass predicts

    def __init__(self, decoder: Decoder, target: Decoder | None, block: int, uses_node_tokens: bool = False):
        super().__init__(decoder, target)
        self.block = self.max_depth = block
        self.plan_key = ("block", *decoder.plan_key)
        self.uses_node_tokens = uses_node_tokens  # whether predictions also depend on the node's; see `for_tokens`
        # Compiled growth runs no pass of the draft: its predictions are inputs.
        self.entries = None if uses_node_tokens else PassEntries(0, 0, 0, 0, 0, 0, 0, 0)

    @property
    def cost_key(self) -> list[object]:
        return [type(self).__name__, self.block, len(self.columns), *self.decoder.cost_key]

    @property
    def nbytes(self) -> int:
        return self.decoder.nbytes

    @abstractmethod
    def read(self, unread: Sequence[Unread], kv: Tensor) -> None:
        """Write the K/V of committed tokens."""

    @abstractmethod
    def forward_block(self, unread: Sequence[Unread], kv: Tensor) -> Tensor:
        """Read the committed tokens, and predict the depths below the roots.

        Returns hidden states for `logits`, [len(unread) * block, hidden_size]; a request's row d predicts depth d + 1.
        """

    def for_tokens(self, tokens: np.ndarray) -> Self:
        """Return the draft with `logits` and `probs` for nodes of these tokens, int64 [num_rows]."""
        return self

    def _chain_blocks(self, unread: Sequence[Unread], kv: Tensor, stream: StreamInput) -> Tensor:
        """Return the outputs of `forward_block` by a causal pass over the unread tokens and the masks after them."""
        counts = [len(request.tokens) + self.block - 1 for request in unread]
        starts = [request.start - self.offset for request in unread]
        chains = zip(starts, counts, unread, strict=True)
        rows = [RequestRows.chain(start, n, request.pages, request.max_len) for start, n, request in chains]
        final = self.decoder.forward_stream(stream, self.decoder.plan(rows, kv), kv).final
        scored = np.concatenate([np.arange(end - self.block, end) for end in np.cumsum(counts)])
        return final[torch.from_numpy(scored).to(final.device)]

    def _committed(self, unread: Sequence[Unread]) -> tuple[list[RequestRows], Tensor]:
        """Return the rows of the unread committed tokens, and these tokens, int64 [num_rows]."""
        chains = [
            RequestRows.chain(request.start - self.offset, len(request.tokens) - 1, request.pages, request.max_len)
            for request in unread
        ]
        tokens = [token for request in unread for token in request.tokens[:-1]]
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.device)
        return [chain for chain in chains if chain.num_rows], ids


def _with_masks(groups: Sequence[Tensor], mask: Tensor, count: int) -> Tensor:
    """Concatenate the rows of some requests, each followed by `count` rows `mask`."""
    return torch.cat([rows for group in groups for rows in (group, mask.expand(count, *mask.shape))])


class MarkovBias:
    """Low-rank bias of a DSpark draft (arXiv 2607.05147): added to the logits below a node, by the node's token."""

    def __init__(
        self,
        embed: Tensor,  # embeddings of the target's tokens, [vocab_size, rank]
        out: AnyLinear,  # projects [rank] to the rows of the vocabulary head
        gate: AnyLinear | None,  # projects hidden state and embedding, [hidden_size + rank], to [rank]
    ):
        self._embed, self._out, self._gate = embed, out, gate
        self.nbytes = embed.nbytes + out.nbytes + (0 if gate is None else gate.nbytes)

    def __call__(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the bias of some rows, [num_rows, rows of the head]."""
        x = F.embedding(tokens, self._embed)
        return self._out(x if self._gate is None else torch.sigmoid(self._gate(torch.cat((hidden, x), 1))) * x)


class StateProjection(NamedTuple):
    """Projection of the target's hidden states, which a DFlash draft attends to."""

    columns: Sequence[int]  # indices of the states that it reads among the features
    fc: AnyLinear  # the projection
    norm: Tensor  # weight of the RMSNorm after it, [hidden_size]


class DFlashDraft(BlockDraft):
    """A DFlash draft (arXiv 2602.06036).

    K and V of committed positions are projections of the target's hidden states. The root and the mask tokens after it
    attend to these, and to each other in both directions.
    """

    kept_nodes = 0

    def __init__(
        self,
        decoder: Decoder,
        target: Decoder | None,
        embed: tuple[Tensor, float],  # embeddings [vocab_size, hidden_size], and the factor on them
        mask_token: int,  # id of the mask token
        block_size: int,  # number of rows of a block
        # A row predicts the token after its position; otherwise the one at its position, and the root's row predicts
        # nothing
        predicts_next: bool,
        states: StateProjection,
        bias: MarkovBias | None = None,  # only DSpark drafts have one
    ):
        self._embedding, self._rows, self._first = embed, block_size, 0 if predicts_next else 1
        super().__init__(decoder, target, block_size - self._first, uses_node_tokens=bias is not None)
        self._mask = embed[0][mask_token] * embed[1]
        self.columns, self._fc, self._state_norm = list(states.columns), states.fc, states.norm
        self._bias, self._tokens = bias, torch.empty(0, dtype=torch.int64, device=self.device)
        order = np.arange(block_size)
        self._tree = order, order, np.ones((block_size, block_size), dtype=bool), order

    @property
    def nbytes(self) -> int:
        return self.decoder.nbytes + self._fc.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def for_tokens(self, tokens: np.ndarray) -> Self:
        result = copy.copy(self)
        result._tokens = torch.from_numpy(tokens).to(self.device)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        logits, head = super().logits(hidden), self.head_vocabulary
        if self._bias is None:
            return logits
        bias = self._bias(self._tokens, hidden)
        return logits + (bias if head is None else head.expand(bias, 0.0))

    def probs(self, hidden: Tensor) -> Tensor:
        if self._bias is None:
            return super().probs(hidden)
        logits, head = self.logits(hidden).float(), self.head_vocabulary
        return torch.softmax(logits if head is None else logits[:, head.index], -1)

    def _embed(self, tokens: Tensor) -> Tensor:
        embed, scale = self._embedding
        return F.embedding(tokens, embed) * scale

    def read(self, unread: Sequence[Unread], kv: Tensor) -> None:
        chains, _ = self._committed(unread)
        if not chains:
            return
        states = torch.cat([request.states for request in unread if request.states is not None])
        rows = states[:, self.columns].to(self.dtype).flatten(1)
        context = F.rms_norm(self._fc(rows), self._state_norm.shape, self._state_norm, self.config.norm_eps)
        self.decoder.write_context(context, self.decoder.plan(chains, kv), kv)

    def forward_block(self, unread: Sequence[Unread], kv: Tensor) -> Tensor:
        self.read(unread, kv)
        rows = [RequestRows(request.root, *self._tree, request.pages, request.max_len) for request in unread]
        roots = torch.tensor([request.tokens[-1] for request in unread], dtype=torch.int64, device=self.device)
        inputs = _with_masks(self._embed(roots).split(1), self._mask, self._rows - 1)
        final = self.decoder.forward_stream(StreamInput(inputs, None), self.decoder.plan(rows, kv), kv).final
        return final[: len(inputs)].view(len(unread), self._rows, -1)[:, self._first :].flatten(0, 1)


class ParallelDraft(BlockDraft):
    """A parallel draft (PARD, arXiv 2504.18583): a causal model that predicts several tokens after mask tokens.

    There are `block` - 1 masks. `mask` is the embedding of the mask token, [hidden_size].
    """

    kept_nodes = 1

    def __init__(self, decoder: Decoder, block: int, mask: Tensor):
        super().__init__(decoder, None, block)
        self._mask = mask

    def read(self, unread: Sequence[Unread], kv: Tensor) -> None:
        chains, tokens = self._committed(unread)
        if chains:
            self.decoder.forward(tokens, self.decoder.plan(chains, kv), kv)

    def forward_block(self, unread: Sequence[Unread], kv: Tensor) -> Tensor:
        tokens = [torch.tensor(request.tokens, dtype=torch.int64, device=self.device) for request in unread]
        embedded = [F.embedding(ids, self.decoder.embed) * self.decoder.first_scale for ids in tokens]
        return self._chain_blocks(unread, kv, StreamInput(_with_masks(embedded, self._mask, self.block - 1), None))


class ParallelEagle(BlockDraft):
    """A parallel EAGLE head (P-EAGLE): an EAGLE-3 head that predicts several tokens after `block` - 1 mask pairs.

    `mask_states`, [number of layers, hidden_size], replace the target's states in a mask pair.
    """

    offset = 1
    kept_nodes = 1

    def __init__(self, head: Eagle3Head, block: int, mask_token: int, mask_states: Tensor):
        super().__init__(head.decoder, None, block)
        self._head, self.columns = head, head.columns
        self._mask_token = torch.tensor(mask_token, dtype=torch.int64, device=self.device)
        self._mask_feature = head.project(mask_states[None])[0]

    @property
    def nbytes(self) -> int:
        return self._head.nbytes

    def read(self, unread: Sequence[Unread], kv: Tensor) -> None:
        chains, tokens = self._committed(unread)
        if chains:
            features = torch.cat([rows[:-1] for rows in self._features(unread)])
            self._head.forward_features(tokens, features, self.decoder.plan(chains, kv), kv)

    def forward_block(self, unread: Sequence[Unread], kv: Tensor) -> Tensor:
        ids = [torch.tensor(request.tokens, dtype=torch.int64, device=self.device) for request in unread]
        tokens = _with_masks(ids, self._mask_token, self.block - 1)
        features = _with_masks(self._features(unread), self._mask_feature, self.block - 1)
        return self._chain_blocks(unread, kv, StreamInput(*self._head.pairs(tokens, features)))

    def _features(self, unread: Sequence[Unread]) -> tuple[Tensor, ...]:
        """Return the features before the tokens of each request, [num tokens, hidden_size] each."""
        states = torch.cat([request.states for request in unread if request.states is not None])
        return self._head.features_of(states).split([len(request.tokens) for request in unread])
