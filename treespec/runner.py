"""Runs the target: prefill chunks and tree passes."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.cache import KVCache
from treespec.errors import RequestError
from treespec.models.decoder import Decoder
from treespec.request import Request
from treespec.sampling.transforms import logprobs_of
from treespec.tree import TokenTree
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows

_SCORED_ROWS = 64  # of a prompt, whose logits are computed at once: 20 MB in bfloat16 where there are 152,000 tokens


class Choices(NamedTuple):
    """What the target says after each node of one request's tree.

    `tokens`: int64 [num_nodes], the argmax; None where the request's sampler chooses. `finite`: whether the pass
    computed finite numbers. `logits`: [num_nodes, vocab]. `hidden`: [num_nodes, number of layers, hidden_size], the
    states of the runner's `hidden_of`; None where it has none.
    """

    tokens: np.ndarray | None
    finite: bool
    logits: Tensor
    hidden: Tensor | None = None


def tree_rows(request: Request, tree: TokenTree) -> RequestRows:
    """A tree's rows behind the request's committed positions."""
    assert request.context_len + len(tree) <= len(request.pages) * PAGE_SIZE, "a tree outgrew its request's pages"
    if len(tree) == 1:
        return RequestRows.chain(request.context_len, 1, request.pages)
    return RequestRows(request.context_len, np.arange(len(tree)), tree.depths, tree.visible, tree.depths, request.pages)


class Runner:
    """The target model over its pool of the cache.

    Args:
        target, cache: the model, and the cache whose pool 0 is its own.
        max_rows: the most rows of a pass, where every pass is padded to one size; None = any number.
        hidden_of: layers whose hidden states `prefill` and `forward` hand out, as `Decoder.check_states` takes them:
            l = what enters layer l, the number of layers = what leaves the last one, before the final norm. A drafter
            that reads the target's features asks for them here.

    Raises:
        ConfigError: `hidden_of` names no layer. KernelError: the target's passes hand no states out.
    """

    def __init__(self, target: Decoder, cache: KVCache, max_rows: int | None = None, hidden_of: Sequence[int] = ()):
        if hidden_of:
            target.check_states(hidden_of)
        self.target, self.cache, self.max_rows, self.hidden_of = target, cache, max_rows, tuple(hidden_of)

    def prefill(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Tensor]:
        """Compute the next `counts[i]` prompt tokens of each request, in one pass.

        They need no logits, but for a request with `prompt_logprobs`: then each gives those of the token behind it. The
        prompt's last token is no part of this, and what it predicts none of the prompt. A request whose logits are not
        finite has an `error` afterwards.

        Returns:
            [counts[i], number of layers, hidden_size] of each request; empty where `hidden_of` is.
        """
        if not requests:
            return []
        rows = [RequestRows.chain(r.context_len, count, r.pages) for r, count in zip(requests, counts, strict=True)]
        tokens = [t for r, n in zip(requests, counts, strict=True) for t in r.tokens[r.context_len : r.context_len + n]]
        hidden, states = self._pass(rows, np.array(tokens))
        for request, count, part in zip(requests, counts, hidden.split(list(counts)), strict=True):
            if request.params.prompt_logprobs is not None:
                try:
                    self._score_prompt(request, part, request.params.prompt_logprobs)
                except RequestError as error:
                    request.error = str(error)
            request.context_len += count
            request.prefill_passes += 1
        return [] if states is None else list(states.split(list(counts)))

    def _score_prompt(self, request: Request, hidden: Tensor, count: int) -> None:
        """Log-probabilities of the prompt tokens behind the next rows, as decoding has them: from logits of the same
        bits, a row at a time.

        Args:
            hidden: [num_rows, hidden_size], final states from `context_len` on.
            count: how many of the likeliest tokens.

        Raises:
            RequestError: NaN or infinity.
        """
        position = request.context_len
        for rows in hidden.split(min(_SCORED_ROWS, self.max_rows or _SCORED_ROWS)):
            logits = self.target.logits(rows)
            for row, finite in zip(logits, logits.amax(1).isfinite().tolist(), strict=True):
                if not finite:
                    raise RequestError(f"the target computed NaN or infinity at position {position}")
                position += 1
                request.prompt_logprobs.append(logprobs_of(row, request.tokens[position], count))

    def forward(self, requests: Sequence[Request], trees: Sequence[TokenTree]) -> list[Choices]:
        """One pass over all nodes of all requests; several where `max_rows` does not hold them."""
        if not requests:
            return []
        if self.max_rows is not None and len(requests) > 1 and sum(map(len, trees)) > self.max_rows:
            half = len(requests) // 2
            return self.forward(requests[:half], trees[:half]) + self.forward(requests[half:], trees[half:])
        logits, states = self._scored(requests, trees) if self.hidden_of else (self.logits(requests, trees), None)
        bounds = list(itertools.pairwise(np.cumsum([0] + [len(tree) for tree in trees]).tolist()))
        # Where a hidden state is not finite, none of its logits is: one column tells, and the rows that a sampler
        # looks at it checks itself.
        best, chosen = logits[:, 0], None
        if any(request.sampler is None for request in requests):
            best, tokens = self.target.best(logits)
            chosen = tokens.cpu().numpy()
        finite = np.isfinite(best.float().cpu().numpy())
        return [
            Choices(
                chosen[start:stop] if chosen is not None and request.sampler is None else None,
                bool(finite[start:stop].all()),
                logits[start:stop],
                None if states is None else states[start:stop],
            )
            for request, (start, stop) in zip(requests, bounds, strict=True)
        ]

    def logits(self, requests: Sequence[Request], trees: Sequence[TokenTree]) -> Tensor:
        """[total nodes, vocab] logits of a tree pass, in the model's dtype."""
        return self._scored(requests, trees)[0]

    def _scored(self, requests: Sequence[Request], trees: Sequence[TokenTree]) -> tuple[Tensor, Tensor | None]:
        rows = [tree_rows(request, tree) for request, tree in zip(requests, trees, strict=True)]
        tokens = np.concatenate([tree.tokens for tree in trees])
        hidden, states = self._pass(rows, tokens)
        return self.target.logits(hidden), states

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)

    def _pass(self, rows: list[RequestRows], tokens: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Final hidden states of the tokens, and those of `hidden_of`."""
        ids = torch.from_numpy(tokens).to(self.target.device)
        assert self.max_rows is None or len(tokens) <= self.max_rows, "a pass outgrew the fixed number of rows"
        pool = self.cache.pools[0]
        layout = self.target.plan(rows, pool)
        if not self.hidden_of:
            return self.target.forward(ids, layout, pool)[: len(tokens)], None
        found = self.target.forward_with_states(ids, layout, pool, self.hidden_of)
        return found.final[: len(tokens)], found.chosen[: len(tokens)]
