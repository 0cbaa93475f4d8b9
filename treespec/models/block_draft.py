"""Block drafts: one pass over a block of rows at the root predicts the tokens of several depths.

The predictions of a depth do not depend on the tokens drafted above it, so a tree grows from one pass.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from treespec.models.decoder import Decoder, StreamInput
from treespec.models.layers_draft import LayersDraft
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.linear.compiled_linear import CompiledLinear
from treespec_kernels.linear.linear import Linear


class Unread(NamedTuple):
    """The tokens of a request that a block draft has not read.

    Attributes:
        tokens: committed tokens and, last, the root.
        start: position of the first of them.
        pages: of the request.
        states: the target's states of the committed ones, [num tokens - 1, number of layers, hidden_size]; None for
            drafts that read none.
    """

    tokens: Sequence[int]
    start: int
    pages: np.ndarray
    states: Tensor | None

    @property
    def root(self) -> int:
        """Position of the root."""
        return self.start + len(self.tokens) - 1


class BlockDraft(LayersDraft):
    """Base of block drafts.

    Args:
        decoder, target: as in `LayersDraft`.
        block: number of depths that one pass predicts.
        mask: embedding of the rows below the root, [hidden_size].
    """

    offset = 0
    kept: int
    columns: Sequence[int] = ()
    entries = None

    def __init__(self, decoder: Decoder, target: Decoder | None, block: int, mask: Tensor):
        super().__init__(decoder, target)
        self.block, self._mask = block, mask

    @property
    def max_depth(self) -> int:
        """Number of levels that the draft predicts."""
        return self.block

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in memory, without the target's."""
        return self.decoder.nbytes

    @property
    def plan_key(self) -> tuple[object, ...]:
        return ("block", *self.decoder.plan_key)

    def read(self, unread: Sequence[Unread], kv: Tensor) -> None:
        """Write the K/V of committed tokens.

        Args:
            unread: by request.
            kv: as in `Decoder.forward`.
        """
        raise NotImplementedError

    def forward_block(self, unread: Sequence[Unread], kv: Tensor) -> Tensor:
        """Run `read`, and the pass over the blocks.

        Returns:
            Hidden states for `logits`, [len(unread) * block, hidden_size]: row d of a request predicts depth d + 1.
        """
        raise NotImplementedError

    def _embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings, [num tokens, hidden_size]."""
        raise NotImplementedError

    def _block_rows(self, tokens: Sequence[Sequence[int]], num_masks: int) -> Tensor:
        """Return the inputs of requests' tokens, each followed by masks: [num_rows, hidden_size]."""
        parts = []
        for own in tokens:
            parts.append(self._embed(torch.tensor(own, dtype=torch.int64, device=self.device)))
            parts.append(self._mask.expand(num_masks, -1))
        return torch.cat(parts)


class DFlashDraft(BlockDraft):
    """A DFlash draft (arXiv 2602.06036).

    K and V of committed positions are projections of the target's hidden states. The root and the mask tokens after it
    attend to these, and to each other in both directions.

    Args:
        decoder, target: the draft's layers; a target, unless the draft has its own vocabulary head.
        embed: embeddings [vocab_size, hidden_size], and the factor on them.
        mask_token: id of the mask token.
        block_size: number of rows of a block.
        predicts_next: a row predicts the token after its position; otherwise the one at its position, and the root's
            row predicts nothing.
        columns: indices of the states that it reads among the features.
        fc: projection of the target's states.
        state_norm: weight of the RMSNorm after `fc`, [hidden_size].
    """

    kept = 0

    def __init__(
        self,
        decoder: Decoder,
        target: Decoder | None,
        embed: tuple[Tensor, float],
        mask_token: int,
        block_size: int,
        predicts_next: bool,
        columns: Sequence[int],
        fc: Linear | CompiledLinear,
        state_norm: Tensor,
    ):
        self._embedding, self._rows, self._first = embed, block_size, 0 if predicts_next else 1
        super().__init__(decoder, target, block_size - self._first, embed[0][mask_token] * embed[1])
        self.columns, self._fc, self._state_norm = list(columns), fc, state_norm
        order = np.arange(block_size)
        self._tree = order, order, np.ones((block_size, block_size), dtype=bool), order

    @property
    def nbytes(self) -> int:
        return self.decoder.nbytes + self._fc.nbytes

    def _embed(self, tokens: Tensor) -> Tensor:
        embed, scale = self._embedding
        return F.embedding(tokens, embed) * scale

    def read(self, unread: Sequence[Unread], kv: Tensor) -> None:
        chains = [RequestRows.chain(each.start, each.root - each.start, each.pages) for each in unread]
        states = [each.states for each in unread if each.states is not None]
        if not any(map(len, states)):
            return
        rows = torch.cat(states)[:, self.columns].to(self.dtype).flatten(1)
        context = F.rms_norm(self._fc(rows), self._state_norm.shape, self._state_norm, self.config.norm_eps)
        planned = [chain for chain in chains if chain.num_rows]
        self.decoder.write_context(context, self.decoder.plan(planned, kv), kv)

    def forward_block(self, unread: Sequence[Unread], kv: Tensor) -> Tensor:
        self.read(unread, kv)
        rows = [RequestRows(each.root, *self._tree, each.pages) for each in unread]
        inputs = self._block_rows([each.tokens[-1:] for each in unread], self._rows - 1)
        final = self.decoder.forward_stream(StreamInput(inputs, None), self.decoder.plan(rows, kv), kv).final
        blocks = final[: len(inputs)].view(len(unread), self._rows, -1)
        return blocks[:, self._first :].flatten(0, 1)


class ParallelDraft(BlockDraft):
    """A parallel draft (PARD, arXiv 2504.18583): a causal model that predicts several tokens after mask tokens.

    Args:
        decoder: the model.
        block: number of depths, one more than there are mask tokens.
        mask: embedding of the mask token, [hidden_size].
    """

    kept = 1

    def __init__(self, decoder: Decoder, block: int, mask: Tensor):
        super().__init__(decoder, None, block, mask)

    def _embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.decoder.embed) * self.decoder.embed_scale

    def read(self, unread: Sequence[Unread], kv: Tensor) -> None:
        chains = [RequestRows.chain(each.start, each.root - each.start, each.pages) for each in unread]
        tokens = [token for each in unread for token in each.tokens[:-1]]
        if tokens:
            planned = [chain for chain in chains if chain.num_rows]
            ids = torch.tensor(tokens, dtype=torch.int64, device=self.device)
            self.decoder.forward(ids, self.decoder.plan(planned, kv), kv)

    def forward_block(self, unread: Sequence[Unread], kv: Tensor) -> Tensor:
        counts = [len(each.tokens) + self.block - 1 for each in unread]
        rows = [RequestRows.chain(each.start, n, each.pages) for each, n in zip(unread, counts, strict=True)]
        inputs = self._block_rows([each.tokens for each in unread], self.block - 1)
        final = self.decoder.forward_stream(StreamInput(inputs, None), self.decoder.plan(rows, kv), kv).final
        ends = np.cumsum(counts)
        scored = np.concatenate([np.arange(end - self.block, end) for end in ends])
        return final[torch.from_numpy(scored).to(final.device)]
