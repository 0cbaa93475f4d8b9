"""Continuous batching: admission, chunked prefill and release of requests. Holds no tensors."""

import logging
import time
from collections import deque
from typing import NamedTuple

import numpy as np

from treespec.cache.kv_cache import NO_PAGES, KVCache
from treespec.cache.prefix_cache import Prefix, page_keys
from treespec.outputs import FinishReason
from treespec.request import PromptGroup, Request
from treespec_kernels.attention.tree_batch import PAGE_SIZE

logger = logging.getLogger("treespec")

NO_LENGTHS = np.zeros(1, dtype=np.int64)


class Batch(NamedTuple):
    """Work of one step.

    Attributes:
        prefill, counts: requests to prefill, `counts[i]` rows each.
        forked: samples admitted with a prompt that another sample prefilled.
        decode: requests to decode, including `forked`.
    """

    prefill: list[Request]
    counts: list[int]
    forked: list[Request]
    decode: list[Request]


class Scheduler:
    """Admits waiting requests, first come first served, as slots and pages become free.

    Args:
        cache: admission reserves all pages that a request can need, so that no preemption is necessary.
        max_num_seqs: maximum number of running requests.
        prefill_chunk: prompt rows per step.
        scratch: slots per request for the token tree.
        short_context: of the target, as in `ModelConfig`.
    """

    def __init__(self, cache: KVCache, max_num_seqs: int, prefill_chunk: int, scratch: int, short_context: int = 0):
        self._short_context, self._has_noted_factors = short_context, False
        self.cache, self.max_num_seqs, self.prefill_chunk, self.scratch = cache, max_num_seqs, prefill_chunk, scratch
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        group = request.group
        if group is not None:
            if group.waiting:
                other = next(other for other in reversed(self.waiting) if other.group is group)
                same = request.prompt_token_ids == other.prompt_token_ids and request.spec == other.spec
                same = same and self._is_long(request) == self._is_long(other)
                differs = f"{request.request_id} differs from {group.group_id} in prompt, spec or longrope's factors"
                assert same, differs
            group.waiting += 1
        self.waiting.append(request)
        if self.cache.prefixes is not None and request.params.prompt_logprobs is None:
            request.page_keys = page_keys(request.prompt_token_ids, self._salt(request))
        if self._is_long(request) and request.num_prompt <= self._short_context and not self._has_noted_factors:
            self._has_noted_factors = True
            logger.warning(
                "longrope: a prompt of %d tokens with max_tokens=%d may outgrow the original context of %d, so the "
                "request has the long factors from its first token on; if both together are at most %d, it has the "
                "short ones (logged once)",
                request.num_prompt,
                request.max_tokens,
                *[self._short_context] * 2,
            )

    def _is_long(self, request: Request) -> bool:
        """Whether the target computes a request with longrope's long factors."""
        return request.max_len > self._short_context

    def _salt(self, request: Request) -> bytes:
        return b"long" if self._is_long(request) else b""

    def slots_needed(self, request: Request) -> int:
        """Maximum number of slots of a request, tree included."""
        return request.max_len + self.scratch

    def next(self) -> Batch:
        """Admit requests in order of arrival, then schedule prefill chunks up to the budget and all decodes.

        A sample that waits for its leader's prefill is skipped, but keeps its place in the queue.
        """
        forked, place = [], 0
        while place < len(self.waiting) and len(self.running) < self.max_num_seqs:
            request = self.waiting[place]
            if request.group is not None and request.group.is_prefilling:
                place += 1
            elif not self._has_room(request):
                break
            else:
                del self.waiting[place]
                if self._admit(request):
                    forked.append(request)
        prefill, counts, budget = [], [], self.prefill_chunk
        for request in self.running:
            if request.needs_prefill and budget:
                count = min(request.num_prompt - 1 - request.context_len, budget)
                prefill.append(request)
                counts.append(count)
                budget -= count
        ready = [
            request
            for request in self.running
            if not request.needs_prefill
            or (request in prefill and request.context_len + counts[prefill.index(request)] == request.num_prompt - 1)
        ]
        return Batch(prefill, counts, forked, ready)

    @property
    def can_admit(self) -> bool:
        """Whether the next step may admit a request beside those that run."""
        return bool(self.waiting) and len(self.running) < self.max_num_seqs and self._has_room(self.waiting[0])

    def _has_room(self, request: Request) -> bool:
        """Whether the request's pages are free. An idle engine first reclaims the prompt pages that later groups keep;
        their next sample prefills the prompt again."""
        needed, shared = self.slots_needed(request), self._shared(request).pages
        if not self.running:
            for other in reversed(self.waiting):
                if self.cache.can_reserve(needed, shared):
                    break
                if other.group is not None and other.group is not request.group:
                    self._drop(other.group)
        return self.cache.can_reserve(needed, shared)

    def _shared(self, request: Request) -> Prefix:
        """Return the pages that a waiting request would share: of its group, or else of a cached prefix.

        Of a group, the full prompt pages of its leader, or all pages that it keeps.
        """
        group, prefixes = request.group, self.cache.prefixes
        if group is not None and group.kept is not None:
            return Prefix(group.kept, NO_LENGTHS)
        if group is not None and group.leader is not None:
            return Prefix(group.leader.pages[: (request.num_prompt - 1) // PAGE_SIZE], NO_LENGTHS)
        if prefixes is None:
            return Prefix(NO_PAGES, NO_LENGTHS)
        # The last token is left to decoding, and the leader of a group prefills at least one for the drafts.
        most = (request.num_prompt - 1 - (group is not None)) // PAGE_SIZE
        return prefixes.find(request.page_keys[: max(most, 0)])

    def _admit(self, request: Request) -> bool:
        """Reserve a request's pages, reusing what is in the cache. Return whether its group has the whole prompt."""
        shared, draft_lengths = self._shared(request)
        request.pages = self.cache.reserve(request.request_id, self.slots_needed(request), shared)
        self.running.append(request)
        request.admitted_at = time.perf_counter()
        group, prefix = request.group, request.num_prompt - 1
        leader = None if group is None else group.leader
        if group is not None:
            group.waiting -= 1
            group.leader = leader or request
        if leader is None:
            if group is not None and group.kept is not None:
                self._drop(group)
                request.context_len = prefix
                return prefix > 0
            request.context_len = request.num_cached = PAGE_SIZE * len(shared)
            request.draft_lengths = draft_lengths
            return False
        if prefix % PAGE_SIZE:
            tail = len(shared)
            self.cache.copy_slots(leader.pages[tail], request.pages[tail], prefix % PAGE_SIZE)
        request.context_len, request.poisoned = prefix, leader.poisoned
        return prefix > 0

    def cache_prefix(self, request: Request) -> None:
        """Let later requests share a request's full pages of committed positions, all of which are finite."""
        if self.cache.prefixes is None:
            return
        count = request.context_len // PAGE_SIZE
        keys = page_keys(request.tokens[: count * PAGE_SIZE], self._salt(request))
        self.cache.prefixes.insert(keys, request.pages[:count], request.draft_lengths)

    def _drop(self, group: PromptGroup) -> None:
        """Release the prompt pages that a group keeps."""
        if group.kept is not None:
            self.cache.release(group.group_id)
            group.kept = None

    def _leave(self, request: Request, scrub: bool) -> None:
        """Free a request's pages, or keep the prompt's for the waiting samples of its group."""
        group = request.group
        if group is not None and group.leader is request:
            group.leader = next((other for other in self.running if other.group is group), None)
            if group.leader is None and group.waiting and request.has_verified_prompt:
                prefix = request.num_prompt - 1
                group.kept = self.cache.transfer(request.request_id, group.group_id, prefix, scrub)
                return
        self.cache.release(request.request_id, scrub)

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a waiting or running request and free its slot and pages."""
        request.finish_reason, request.error, request.finished_at = reason, error, time.perf_counter()
        if request in self.running:
            self.running.remove(request)
            # A request that did not end by its own tokens may have left unchecked NaN in its pages.
            unchecked = request.poisoned or request.runs_ahead or reason not in ("stop", "length")
            if not unchecked:
                self.cache_prefix(request)
            self._leave(request, scrub=unchecked)
        elif request in self.waiting:
            self.waiting.remove(request)
            if request.group is not None:
                request.group.waiting -= 1
                if not request.group.waiting:
                    self._drop(request.group)

    def find(self, request_id: str) -> list[Request]:
        """The unfinished samples of a user's request."""
        return [request for request in [*self.running, *self.waiting] if request.output_id == request_id]

    def check_integrity(self) -> None:
        """Assert that group counts match the queues, and that groups keep pages only while samples wait and none
        runs."""
        for request in [*self.running, *self.waiting]:
            group = request.group
            if group is None:
                continue
            running = [other for other in self.running if other.group is group]
            assert group.waiting == sum(other.group is group for other in self.waiting), group.group_id
            assert (group.leader in running) == bool(running), f"{group.group_id} has no leader, or one that ended"
            assert group.kept is None or (group.waiting and not running), f"{group.group_id} keeps pages without need"
