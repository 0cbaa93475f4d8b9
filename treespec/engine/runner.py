"""Runs the target model: prefill chunks and tree passes."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from treespec.cache.kv_cache import KVCache
from treespec.errors import RequestError
from treespec.models.decoder import Decoder
from treespec.request import Request
from treespec.sampling.logprobs import logprobs_of
from treespec.tree import TokenTree
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows

_SCORED_ROWS = 64  # prompt rows whose logits are computed at once: 20 MB in bfloat16 for a vocabulary of 152,000


class Choices(NamedTuple):
    """Target outputs for one request's tree."""

    tokens: list[int] | None  # by node, the argmax; None if the request has a sampler
    finite: bool  # no NaN or infinity
    logits: Tensor  # [num_nodes, vocab]


def tree_rows(request: Request, tree: TokenTree) -> RequestRows:
    """Attention rows of a tree after the request's committed positions."""
    if len(tree) == 1:
        own = request.adapter, request.state_rows()
        return RequestRows.chain(request.context_len, 1, request.pages, request.max_len, *own)
    nodes = np.arange(len(tree))
    seen, own = (tree.depths, tree.visible, tree.depths), (request.adapter, request.state_rows())
    return RequestRows(request.context_len, nodes, *seen, request.pages, request.max_len, *own)


class CapturedPasses(Protocol):
    """Tree passes that are replayed from CUDA graphs."""

    has_captured: bool  # whether the last pass captured its graph, so that its time says nothing about later ones

    def logits(self, requests: Sequence[Request], trees: Sequence[TokenTree], run: Callable[[], Tensor]) -> Tensor:
        """Return the logits of a tree pass, [total nodes, vocab]; `run` runs it without a graph."""


class Runner:
    """Runs the target model over its KV pool."""

    def __init__(
        self,
        target: Decoder,
        cache: KVCache,  # whose pool 0 belongs to the target
        max_rows: int | None = None,  # row limit of a pass, if every pass is padded to a fixed size; None = no limit
        captured: CapturedPasses | None = None,  # captured tree passes; None to launch all kernels one by one
    ):
        self.target, self.cache, self.max_rows, self.captured = target, cache, max_rows, captured
        # Hidden states that heads read, and states of recurrent layers, take further calls.
        is_one_call = captured is None and cache.features is None and cache.states is None
        self._compiled = target.compiled if is_one_call else None

    def prefill(self, requests: Sequence[Request], counts: Sequence[int]) -> None:
        """Prefill the next `counts[i]` tokens of each request in one pass: of the prompt, or of a preempted request.

        Computes logits only for requests with `prompt_logprobs`, which get those of the following tokens. The last
        token is left to decoding. Sets `error` of a request whose logits are not finite.
        """
        if not requests:
            return
        rows = [
            RequestRows.chain(r.context_len, count, r.pages, r.max_len, r.adapter, r.state_rows(count))
            for r, count in zip(requests, counts, strict=True)
        ]
        tokens = [t for r, n in zip(requests, counts, strict=True) for t in r.tokens[r.context_len : r.context_len + n]]
        hidden = self.run_pass(rows, np.array(tokens))
        for request, count, states in zip(requests, counts, hidden.split(list(counts)), strict=True):
            if request.params.prompt_logprobs is not None and not request.num_generated:
                try:
                    self.score_prompt(request, states, request.params.prompt_logprobs)
                except RequestError as error:
                    request.error = str(error)
            request.context_len += count
            request.prefill_passes += 1
            request.num_prefilled += count

    def score_prompt(self, request: Request, hidden: Tensor, count: int) -> None:
        """Append log-probabilities of the prompt tokens that follow these rows, from logits with the bits of decoding.

        `hidden`, [num_rows, hidden_size], are the final states from `context_len` on. RequestError: non-finite logits.
        """
        position = request.context_len
        for rows in hidden.split(min(_SCORED_ROWS, self.max_rows or _SCORED_ROWS)):
            logits = self.target.logits(rows)
            finite = logits.amax(1).isfinite()
            if not bool(finite.all()):
                raise RequestError(
                    f"the target computed NaN or infinity at position {position + int(finite.int().argmin())}"
                )
            following = request.tokens[position + 1 : position + 1 + len(rows)]
            request.prompt_logprobs += logprobs_of(logits, following, count, self.target.growth)
            position += len(rows)

    def forward(self, requests: Sequence[Request], trees: Sequence[TokenTree]) -> list[Choices]:
        """Run one pass over all nodes of all requests, or several if they exceed `max_rows`."""
        if not requests:
            return []
        if self.max_rows is not None and len(requests) > 1 and sum(map(len, trees)) > self.max_rows:
            half = len(requests) // 2
            return self.forward(requests[:half], trees[:half]) + self.forward(requests[half:], trees[half:])
        logits, sizes = self.logits(requests, trees), [len(tree) for tree in trees]
        # A non-finite hidden state makes all of its logits non-finite, so one column suffices; samplers check the rows
        # they read.
        best, choices = logits[:, 0], list[int]()
        if any(request.sampler is None for request in requests):
            best, tokens = self.target.best(logits)
            choices = tokens.tolist()
        finite, results = [*map(math.isfinite, best.tolist())], list[Choices]()
        parts = [logits] if len(trees) == 1 else logits.split(sizes)  # a slice takes 5 us after a pass
        for request, rows, first, size in zip(requests, parts, accumulate(sizes, initial=0), sizes, strict=False):
            part = slice(first, first + size)
            wanted = choices[part] if request.sampler is None else None
            results.append(Choices(wanted, all(finite[part]), rows))
        return results

    def logits(self, requests: Sequence[Request], trees: Sequence[TokenTree]) -> Tensor:
        """[total nodes, vocab] logits of a tree pass, in the model's dtype."""
        for request, tree in zip(requests, trees, strict=True):
            outgrown = request.context_len + len(tree) > len(request.pages) * PAGE_SIZE
            assert not outgrown, "a tree outgrew its request's pages"

        def launch() -> Tensor:  # all kernels one by one
            rows = [tree_rows(request, tree) for request, tree in zip(requests, trees, strict=True)]
            return self.target.logits(self.run_pass(rows, np.concatenate([tree.tokens for tree in trees])))

        if self.captured is not None:
            return self.captured.logits(requests, trees, launch)
        if self._compiled is None:
            return launch()
        columns = [
            getattr(trees[0], name) if len(trees) == 1 else np.concatenate([getattr(tree, name) for tree in trees])
            for name in ("tokens", "parents", "depths")
        ]
        first_rows = [*accumulate(map(len, trees), initial=0)]
        contexts, lengths = [request.context_len for request in requests], [request.max_len for request in requests]
        pages, adapters = [request.pages for request in requests], [request.adapter for request in requests]
        arguments = columns, first_rows, contexts, pages, lengths, self.cache.pools[0], adapters
        logits = self._compiled.tree_logits(*arguments)
        return launch() if logits is None else logits

    def wait(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)

    def run_pass(self, rows: list[RequestRows], tokens: np.ndarray) -> Tensor:
        """Return final hidden states, [num tokens, hidden_size], and write what heads read. Exact up to `max_rows`."""
        ids = torch.from_numpy(tokens).to(self.target.device)
        pool, features = self.cache.pools[0], self.cache.features
        layout = self.target.plan(rows, pool)
        if features is None:
            return self.target.forward(ids, layout, pool)[: len(tokens)]
        final, streams = self.target.forward_with_states(ids, layout, pool, features.layers)
        self.cache.write_features(rows, streams[: len(tokens)])
        return final[: len(tokens)]
