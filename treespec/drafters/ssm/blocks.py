"""Scores of block drafts: a pass at the root, and the rows of a level read from it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from treespec.cache.kv_cache import KVCache
from treespec.drafters.ssm.forest import SsmProbs
from treespec.drafters.ssm.reference_forest import top_tokens
from treespec.drafters.ssm.scoring import Chain, Rows, ScoredSlice, draft_probs
from treespec.models.block_draft import BlockDraft, Unread
from treespec.request import Request


class Block(NamedTuple):
    """Predictions of a block draft below one root; row d is of the tokens at depth d + 1.

    Attributes:
        hidden: [block, hidden_size], hidden states for `BlockDraft.logits`.
        rows: scores, without a request's restriction; None if they depend on the nodes' tokens.
    """

    hidden: Tensor
    rows: Rows | None

    def at(
        self, model: BlockDraft, request: Request, depth: int, tokens: np.ndarray, paths: Sequence[Sequence[int]]
    ) -> Rows:
        """Return the scores of the nodes of one depth: int64 `tokens`, with their paths for a restriction."""
        count = len(tokens)
        if self.rows is None or request.restriction is not None:
            hidden = self.hidden[depth].expand(count, -1)
            scored_slice = ScoredSlice(request, slice(0, count), request.context_len + 1 + depth, paths)
            return draft_probs(model.for_tokens(tokens), hidden, [scored_slice])
        row = self.rows.select(slice(depth, depth + 1))
        return row.select(np.zeros(count, dtype=np.int64))


def unread_of(model: BlockDraft, cache: KVCache, chains: Sequence[Chain]) -> list[Unread]:
    """Return the unread tokens of some requests: the last position of a chain is the root's."""
    unread = []
    for request, start, stop in chains:
        states = None
        if model.columns:
            states = cache.read_features(request.pages, start - model.offset, stop - 1)
        unread.append(Unread(request.tokens[start:stop], start, request.pages, states, request.max_len))
    return unread


def score_blocks(
    model: BlockDraft, cache: KVCache, pool: Tensor, chains: Sequence[Chain], plain: bool = False
) -> list[Block]:
    """Run a block draft's pass at the roots of some requests, after reading the tokens before them.

    Each chain ends with the root's position. `plain` scores are without the requests' temperature and noise.
    """
    block, slices = model.block, []
    hidden = model.forward_block(unread_of(model, cache, chains), pool)
    slices_of_roots = [slice(i * block, (i + 1) * block) for i in range(len(chains))]
    if model.uses_node_tokens:
        return [Block(hidden[part], None) for part in slices_of_roots]
    for i, (request, _, _) in enumerate(chains):
        if not plain and request.is_sampled and request.restriction is None:
            for depth in range(block):
                row = i * block + depth
                slices.append(ScoredSlice(request, slice(row, row + 1), request.context_len + 1 + depth, [()]))
    rows = draft_probs(model, hidden, slices)
    return [Block(hidden[part], rows.select(part)) for part in slices_of_roots]


def level_probs(ssm: int, scored: Mapping[int, tuple[np.ndarray, Rows]], differ: bool, most: int | None) -> SsmProbs:
    """Return a block draft's probabilities of a level.

    Args:
        ssm: index of the draft.
        scored: by tree, its rows of the frontier, and their scores.
        differ: whether the rows of a tree may differ.
        most: number of the most likely tokens that matter in each row; None for all.
    """
    rows, scores = [of_tree for of_tree, _ in scored.values()], [part for _, part in scored.values()]
    if any(part.head is None for part in scores):  # restricted rows cover the vocabulary, others a reduced one
        scores = [part.expanded() for part in scores]
    tokens = scores[0].tokens
    if differ or most is None:
        return SsmProbs(ssm, np.concatenate(rows), np.concatenate([part.probs for part in scores]), tokens)
    # Rows of a tree are equal: only the columns of their best tokens are repeated, not the vocabulary.
    columns = np.unique(np.concatenate([top_tokens(part.probs[:1].copy(), most)[1][0] for part in scores]))
    probs = [np.repeat(part.probs[:1, columns], len(of_tree), 0) for of_tree, part in zip(rows, scores, strict=True)]
    return SsmProbs(ssm, np.concatenate(rows), np.concatenate(probs), columns if tokens is None else tokens[columns])
