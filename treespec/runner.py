"""Runs the target: prefill chunks and tree passes."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.cache import KVCache
from treespec.models.decoder import Decoder
from treespec.request import Request
from treespec.tree import TokenTree
from treespec_kernels.tree_batch import PAGE_SIZE, RequestRows


class Choices(NamedTuple):
    """What the target says after each node of one request's tree.

    `tokens`: int64 [num_nodes], the argmax; None where the request's sampler chooses. `finite`: whether the pass
    computed finite numbers. `logits`: [num_nodes, vocab].
    """

    tokens: np.ndarray | None
    finite: bool
    logits: Tensor


def tree_rows(request: Request, tree: TokenTree) -> RequestRows:
    """A tree's rows behind the request's committed positions."""
    assert request.context_len + len(tree) <= len(request.pages) * PAGE_SIZE, "a tree outgrew its request's pages"
    if len(tree) == 1:
        return RequestRows.chain(request.context_len, 1, request.pages)
    return RequestRows(
        request.context_len, np.arange(len(tree)), tree.depths, tree.visible, tree.depths, request.pages
    )  # fmt: skip


class Runner:
    """The target model over its pool of the cache.

    Args:
        target, cache: the model, and the cache whose pool 0 is its own.
        max_rows: the most rows of a pass, where every pass is padded to one size; None = any number.
    """

    def __init__(self, target: Decoder, cache: KVCache, max_rows: int | None = None):
        self.target, self.cache, self.max_rows = target, cache, max_rows

    def prefill(self, requests: Sequence[Request], counts: Sequence[int]) -> None:
        """Compute the next `counts[i]` prompt tokens of each request, in one pass. They need no logits."""
        if not requests:
            return
        rows = [
            RequestRows.chain(r.context_len, count, r.pages) for r, count in zip(requests, counts, strict=True)
        ]  # fmt: skip
        tokens = [t for r, n in zip(requests, counts, strict=True) for t in r.tokens[r.context_len : r.context_len + n]]
        self._hidden(rows, np.array(tokens))
        for request, count in zip(requests, counts, strict=True):
            request.context_len += count
            request.prefill_passes += 1

    def forward(self, requests: Sequence[Request], trees: Sequence[TokenTree]) -> list[Choices]:
        """One pass over all nodes of all requests; several where `max_rows` does not hold them."""
        if not requests:
            return []
        if self.max_rows is not None and len(requests) > 1 and sum(map(len, trees)) > self.max_rows:
            half = len(requests) // 2
            return self.forward(requests[:half], trees[:half]) + self.forward(requests[half:], trees[half:])
        logits = self.logits(requests, trees)
        bounds = list(itertools.pairwise(np.cumsum([0] + [len(tree) for tree in trees]).tolist()))
        # Where a hidden state is not finite, none of its logits is: one column tells, and the rows that a sampler
        # looks at it checks itself.
        best, chosen = logits[:, 0], None
        if any(request.sampler is None for request in requests):
            best, tokens = logits.max(dim=-1)  # the first of equal logits
            chosen = tokens.cpu().numpy()
        finite = np.isfinite(best.float().cpu().numpy())
        return [
            Choices(
                chosen[start:stop] if chosen is not None and request.sampler is None else None,
                bool(finite[start:stop].all()),
                logits[start:stop],
            )
            for request, (start, stop) in zip(requests, bounds, strict=True)
        ]

    def logits(self, requests: Sequence[Request], trees: Sequence[TokenTree]) -> Tensor:
        """[total nodes, vocab] logits of a tree pass, in the model's dtype."""
        rows = [tree_rows(request, tree) for request, tree in zip(requests, trees, strict=True)]
        tokens = np.concatenate([tree.tokens for tree in trees])
        return self.target.logits(self._hidden(rows, tokens)[: len(tokens)])

    def _hidden(self, rows: list[RequestRows], tokens: np.ndarray) -> Tensor:
        ids = torch.from_numpy(tokens).to(self.target.device)
        assert self.max_rows is None or len(tokens) <= self.max_rows, "a pass outgrew the fixed number of rows"
        return self.target.forward(ids, self.target.plan(rows, self.cache.pools[0]), self.cache.pools[0])
