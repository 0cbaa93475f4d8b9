"""Base class of cross-tokenizer drafts: drafts whose tokenizer differs from the target's.

A drafter has its own KV cache, keeps each request's text in its own tokens, and runs a pass only if it pays off.
"""

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.cache.kv_cache import KVCache
from treespec.drafters.base import DraftSource, Proposals
from treespec.drafters.cross_tokenizer.retokenize import Context, Translation
from treespec.models.decoder import Decoder
from treespec.planning.planner import Planner
from treespec.request import Request
from treespec.tree import TokenTree
from treespec_kernels.attention.tree_batch import RequestRows

CHUNK = 256  # maximum tokens of a request per prefill pass
MAX_TIMED_TOKENS = 16  # passes that also prefill more tokens of a request are excluded from pass timing
CAPACITY_FACTOR = 1.5  # draft tokens reserved per target token; requests with longer draft texts are skipped
_CALIBRATION_RATE = 0.1  # weight of a new observation in the calibration
_SECONDS_RATE = 0.1  # weight of a new measurement in the mean pass time
_RECOVERY_RATE = 0.002  # step of the calibration towards 1 per round without a draft, so that drafting is retried


@dataclass
class CrossTokenizerState:
    """A request's state between rounds."""

    context: Context  # request text in draft tokens
    pages: np.ndarray  # page ids in the draft's KV cache, int64
    max_len: int  # maximum number of draft tokens of the request
    valid: int = 0  # number of leading context tokens with K/V
    ahead: list[int] = field(default_factory=list)  # accepted or generated tokens that follow the context and have K/V
    poisoned: bool = False  # whether its K/V may contain NaN
    masks: np.ndarray = field(default_factory=lambda: np.ones((1, 1), dtype=bool))  # ancestor mask, bool [slots, slots]
    proposed: TokenTree | None = None  # this round's tree, or None
    accepted_alone: int = 0  # number of accepted tokens that no other source proposed

    @property
    def is_timed(self) -> bool:
        """Whether the next pass prefills few enough tokens to be timed."""
        return len(self.context.tokens) - self.valid <= MAX_TIMED_TOKENS

    def update(self, tokens: Sequence[int]) -> None:
        """Append new target tokens, and invalidate the K/V of re-encoded positions."""
        context, before = self.context, len(self.context.tokens)
        same = context.extend(tokens[context.num_encoded :])
        if same < before or self.valid < before:
            self.valid = min(self.valid, same)
        else:
            for old, new in zip(self.ahead, context.tokens[before:], strict=False):
                if old != new:
                    break
                self.valid += 1
        self.ahead = []


class Drafting(NamedTuple):
    """A request to draft for."""

    request: Request
    max_depth: int
    state: CrossTokenizerState


class PassValue:
    """Decides whether a draft pass pays off for adaptive trees.

    A pass pays off if its calibrated number of expected tokens exceeds the number of tokens that the engine would
    otherwise generate in the same time. The calibration is a running ratio of accepted to expected tokens.
    """

    def __init__(self, prices: Planner):
        self._prices = prices
        self._calibration, self._seconds, self._passes = 1.0, 0.0, 0

    def pays(self, expected: float) -> bool:
        """Return whether a pass with this uncalibrated number of expected tokens pays off."""
        return self._calibration * expected > self._prices.rate * self._seconds

    @contextmanager
    def timed(self, counts: bool = True) -> Iterator[None]:
        """Time a pass and, if it `counts`, update the mean pass time, clipping outliers to twice the mean.

        Like the planner's costs, the time is that on a machine which is as fast as when they were measured.

        The first pass is skipped, because it also computes RoPE tables and other state once.
        """
        began = time.perf_counter()
        yield
        if not counts:
            return
        took, self._passes = (time.perf_counter() - began) / self._prices.costs.slowdown, self._passes + 1
        if self._passes == 2:
            self._seconds = took
        elif self._passes > 2:
            self._seconds += _SECONDS_RATE * (min(took, 2 * self._seconds) - self._seconds)

    def observe(self, tree: TokenTree, accepted_alone: int) -> None:
        """Update the calibration from a proposed tree and the accepted tokens that no other source proposed."""
        expected = float(tree.values[1:].sum())
        error = accepted_alone - self._calibration * expected
        updated = self._calibration + _CALIBRATION_RATE * error / max(expected, 1.0)
        self._calibration = min(max(updated, 0.05), 1.2)

    def skip_round(self) -> None:
        """Move the calibration towards 1 after a round without a draft."""
        self._calibration += _RECOVERY_RATE * (1.0 - self._calibration)


class CrossTokenizerDrafter(DraftSource):
    """A draft with another tokenizer, selected in `SpecConfig.sources` by its own name or by "ssm"."""

    stage, is_captured = "cross_tokenizer", False

    def __init__(
        self,
        name: str,  # draft name for `SpecConfig.sources` and attribution
        model: Decoder,
        cache: KVCache,  # the draft's own cache: one pool, with pages for all concurrent requests
        translation: Translation,  # mapping between the two tokenizers
        capacity: int,  # maximum draft tokens of a request; longer requests are skipped
        scratch: int,  # tree slots after the `capacity` positions
        prices: Planner,  # planner whose costs decide whether a pass pays off
    ):
        self.name, self.model, self.cache, self.translation = name, model, cache, translation
        self.capacity, self.scratch, self.prices = capacity, scratch, prices
        self.pass_value = PassValue(prices)
        self._states: dict[str, CrossTokenizerState] = {}
        self._fallback = next((t for t in model.config.eos_token_ids if t < model.vocab_size), 0)

    def propose(self, requests: Sequence[Request], max_depths: Sequence[int], least_value: float) -> Proposals:
        if batch := self._update_contexts(requests, max_depths):
            self._draft(batch)
        trees = {request.request_id: state.proposed for request, _, state in batch if state.proposed is not None}
        return Proposals(trees, self._commit)

    @abstractmethod
    def _draft(self, batch: Sequence[Drafting]) -> None:
        """Set `proposed` of the requests for which a draft pays off; at least one request is given."""

    def _commit(self, requests: Sequence[Request], paths: Sequence[np.ndarray]) -> None:
        """Update the pass value from verified trees. Call it after updating the requests' counters."""
        for request in requests:
            state = self._states.get(request.request_id)
            if state is not None and state.proposed is not None:
                alone = request.accepted_only_by_source.get(self.name, 0)
                self.pass_value.observe(state.proposed, alone - state.accepted_alone)
                state.accepted_alone, state.proposed = alone, None

    @property
    def held(self) -> set[str]:
        return set(self._states)

    def may_draft(self, request: Request) -> bool:
        return request.spec.allows("ssm", self.name)

    def release(self, request: Request) -> None:
        self.evict(request)

    def evict(self, request: Request) -> None:
        """Release a preempted request's pages. The next draft prefills its context again."""
        state = self._states.pop(request.request_id, None)
        if state is not None:
            self.cache.release(request.request_id, scrub=state.poisoned)

    def _update_contexts(self, requests: Sequence[Request], max_depths: Sequence[int]) -> list[Drafting]:
        """Update the contexts of this draft's requests; return the requests to draft for."""
        batch = []
        for request, depth in zip(requests, max_depths, strict=True):
            if depth <= 0 or not self.may_draft(request):
                continue
            state = self._states.get(request.request_id)
            if state is None:
                pages = self.cache.reserve(request.request_id, self.capacity + self.scratch)
                max_len = min(int(CAPACITY_FACTOR * request.max_len), self.capacity)
                alone = request.accepted_only_by_source.get(self.name, 0)
                context = Context(self.translation, self._fallback)
                state = CrossTokenizerState(context, pages, max_len, accepted_alone=alone)
                self._states[request.request_id] = state
            state.update(request.tokens)
            state.proposed = None
            if len(state.context.tokens) + depth <= self.capacity:
                batch.append(Drafting(request, depth, state))
        return batch

    def _begins(self, batch: Sequence[Drafting], expected: float) -> bool:
        """Return whether to draft: a tree is static, or the first pass pays off at `expected` tokens per request."""
        adaptive = all(request.spec.is_adaptive for request, *_ in batch)
        begins = not adaptive or self.pass_value.pays(expected * len(batch))
        if not begins:
            self.pass_value.skip_round()
        return begins

    def _score_roots(self, states: Sequence[CrossTokenizerState]) -> Tensor:
        """Prefill new context tokens; return the logits after each context, float32 [len(states), draft vocab]."""
        while late := [state for state in states if len(state.context.tokens) - state.valid > CHUNK]:
            rows = [RequestRows.chain(state.valid, CHUNK, state.pages, state.max_len) for state in late]
            tokens = [t for state in late for t in state.context.tokens[state.valid : state.valid + CHUNK]]
            self._hidden(rows, tokens)
            for state in late:
                state.valid += CHUNK
        starts = [min(state.valid, len(state.context.tokens) - 1) for state in states]
        rows = [
            RequestRows.chain(start, len(state.context.tokens) - start, state.pages, state.max_len)
            for state, start in zip(states, starts, strict=True)
        ]
        tokens = [t for state, start in zip(states, starts, strict=True) for t in state.context.tokens[start:]]
        last = torch.from_numpy(np.cumsum([chain.num_rows for chain in rows]) - 1)
        logits = self.model.logits(self._hidden(rows, tokens), last).float()
        for state in states:
            state.valid, state.masks = len(state.context.tokens), np.ones((1, 1), dtype=bool)
        return logits

    def _forward(self, rows: list[RequestRows], tokens: Sequence[int]) -> Tensor:
        """Run one pass and return float32 logits [num_rows, draft vocab]."""
        return self.model.logits(self._hidden(rows, tokens)[: len(tokens)]).float()

    def _hidden(self, rows: list[RequestRows], tokens: Sequence[int]) -> Tensor:
        """Run one pass and return final hidden states, padding rows last."""
        pool = self.cache.pools[0]
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.model.device)
        return self.model.forward(ids, self.model.plan(rows, pool), pool)
