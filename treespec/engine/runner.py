"""Runs the target model: prefill chunks and tree passes."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from treespec.cache.kv_cache import KVCache
from treespec.errors import RequestError
from treespec.models.decoder import Decoder
from treespec.request import Request
from treespec.sampling.logprobs import logprobs_of
from treespec.tree import TokenTree
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.cpu.compiled_plan import TreeBatch, kv_pools

_SCORED_ROWS = 64  # prompt rows whose logits are computed at once: 20 MB in bfloat16 for a vocabulary of 152,000


class Choices(NamedTuple):
    """Target outputs for one request's tree."""

    # int64 [1 + accepted], root first: the accepted nodes; empty if a logit is not finite
    path: np.ndarray
    # The target's token after the path, whose K/V are then compacted already; None if the request's sampler must
    # continue the walk
    next_token: int | None
    pass_logits: Tensor  # [total nodes, vocab], of all requests of the pass
    first: int  # rows first to last - 1 are this request's
    last: int

    @property
    def finite(self) -> bool:
        return len(self.path) > 0

    @property
    def logits(self) -> Tensor:
        """Return the logits of the request's nodes, [num_nodes, vocab]."""
        return self.pass_logits[self.first : self.last]


def tree_rows(request: Request, tree: TokenTree) -> RequestRows:
    """Attention rows of a tree after the request's committed positions."""
    if len(tree) == 1:
        adapter_and_state = request.adapter, request.state_rows()
        return RequestRows.chain(request.context_len, 1, request.pages, request.max_len, *adapter_and_state)
    nodes = np.arange(len(tree))
    seen, adapter_and_state = (tree.depths, tree.visible, tree.depths), (request.adapter, request.state_rows())
    return RequestRows(request.context_len, nodes, *seen, request.pages, request.max_len, *adapter_and_state)


def walk_rule(request: Request, is_drawn: bool) -> int:
    """Return how C++ walks a request's tree, as in `TreeRows.rules`; `is_drawn`: whether the tree has random draws."""
    if request.sampler is None:
        return 0
    return (None if is_drawn else request.sampler.native_choice) or -1


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
        # Storing hidden states for heads, or recurrent states, takes further calls.
        is_one_call = captured is None and cache.features is None and cache.states is None
        self._compiled = target.compiled if is_one_call else None
        self._pools = None if target.compiled is None else kv_pools(cache.target_pools)
        self._last: tuple[Sequence[TokenTree], TreeBatch | None] = (), None  # trees and rows of the last compiled pass

    def prefill(self, requests: Sequence[Request], counts: Sequence[int]) -> None:
        """Prefill the next `counts[i]` tokens of each request in one pass: of the prompt, or of a preempted request.

        The last token is left to decoding. Logits are computed only for `prompt_logprobs`. Sets `error` of a request
        whose logits are not finite.
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
                    request.error = error
            request.context_len += count
            request.prefill_passes += 1
            request.num_prefilled += count

    def score_prompt(self, request: Request, hidden: Tensor, count: int) -> None:
        """Append log-probabilities of the prompt tokens that follow these rows; logits are bit-identical to decoding's.

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
        logits = self.logits(requests, trees)
        paths, tokens = self.walk(requests, trees, logits)
        ends = [*accumulate([len(tree.tokens) for tree in trees], initial=0)]
        return [
            Choices(path, None if token < 0 else token, logits, ends[i], ends[i + 1])
            for i, (path, token) in enumerate(zip(paths, tokens, strict=True))
        ]

    def walk(
        self, requests: Sequence[Request], trees: Sequence[TokenTree], logits: Tensor
    ) -> tuple[list[np.ndarray], list[int]]:
        """Return `Choices.path` and the token after it, or -1, by request; compact the target's K/V to the paths.

        Takes the arguments and the result of `logits`. Runs in one C++ call for a compiled target.
        """
        if self.target.compiled is None or self._pools is None:
            return self.walk_ref(requests, trees, logits)
        of_trees, batch = self._last
        if batch is None or of_trees is not trees:
            batch = self._batch(requests, trees)
        return self.target.compiled.model.walk(batch, logits, self._pools)

    def walk_ref(
        self, requests: Sequence[Request], trees: Sequence[TokenTree], logits: Tensor
    ) -> tuple[list[np.ndarray], list[int]]:
        """The reference of `walk`, on any device.

        Leaves the tokens of requests with a sampler to the sampler. In their rows, only one logit is checked: a hidden
        state that is not finite makes all of its logits so, and samplers check the rows that they read.
        """
        paths, next_tokens, first = list[np.ndarray](), list[int](), 0
        ones, (best, tokens) = logits[:, 0].tolist(), (column.tolist() for column in self.target.best(logits))
        for request, tree in zip(requests, trees, strict=True):
            rows, first, is_greedy = slice(first, first + len(tree)), first + len(tree), request.sampler is None
            path = tree.follow(tokens[rows]) if is_greedy else np.zeros(1, dtype=np.int64)
            next_tokens.append(tokens[rows][path[-1]] if is_greedy else -1)
            paths.append(path if all(map(math.isfinite, (best if is_greedy else ones)[rows])) else path[:0])
        pages, contexts = [request.pages for request in requests], [request.context_len for request in requests]
        self.cache.commit_target(pages, contexts, paths)
        return paths, next_tokens

    def _batch(self, requests: Sequence[Request], trees: Sequence[TokenTree]) -> TreeBatch:
        """Return the rows of a pass in the form that C++ reads."""
        first_rows = [*accumulate([len(tree.tokens) for tree in trees], initial=0)]
        arrays = [(tree.tokens, tree.parents, tree.depths) for tree in trees]
        columns = [*arrays[0]] if len(arrays) == 1 else [*map(np.concatenate, zip(*arrays, strict=True))]
        contexts, pages = [request.context_len for request in requests], [request.pages for request in requests]
        first_rotations = [self.target.config.first_rotation(request.max_len) for request in requests]
        rules = [walk_rule(r, len(tree) > 1 and r.draws_at_random) for r, tree in zip(requests, trees, strict=True)]
        return TreeBatch([column.tolist() for column in columns], first_rows, contexts, pages, first_rotations, rules)

    def logits(self, requests: Sequence[Request], trees: Sequence[TokenTree]) -> Tensor:
        """Return the logits of a tree pass, [total nodes, vocab], in the model's dtype."""

        def launch() -> Tensor:  # all kernels one by one
            rows = [tree_rows(request, tree) for request, tree in zip(requests, trees, strict=True)]
            return self.target.logits(self.run_pass(rows, np.concatenate([tree.tokens for tree in trees])))

        if self.captured is not None:
            return self.captured.logits(requests, trees, launch)
        if self._compiled is None:
            return launch()
        adapters, batch = [request.adapter for request in requests], self._batch(requests, trees)
        self._last = trees, batch
        logits = self._compiled.tree_logits(batch, self.cache.pools[0], adapters)
        return launch() if logits is None else logits

    def round_arguments(self, num_positions: int) -> dict[str, Any] | None:
        """Return the target's fields of `Rounds` (rounds_cpu.h) for contexts of up to `num_positions`, or None."""
        compiled = self._compiled
        if compiled is None or not compiled.has_tree_logits or self.max_rows is not None or self._pools is None:
            return None
        num_positions += self.target.config.short_context  # rows of the rotations
        return compiled.model.round_arguments(compiled.rotations_to(num_positions), self.cache.pools[0], self._pools)

    def wait(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)

    def run_pass(self, rows: list[RequestRows], tokens: np.ndarray) -> Tensor:
        """Return final hidden states, [num tokens, hidden_size], and store features. Exact up to `max_rows` rows."""
        ids = torch.from_numpy(tokens).to(self.target.device)
        pool, features = self.cache.pools[0], self.cache.features
        layout = self.target.plan(rows, pool)
        if features is None:
            return self.target.forward(ids, layout, pool)[: len(tokens)]
        final, streams = self.target.forward_with_states(ids, layout, pool, features.layers)
        self.cache.write_features(rows, streams[: len(tokens)])
        return final[: len(tokens)]
