"""Who runs next: admission, prefill budget, ends. No tensors."""

import time
from collections import deque
from typing import NamedTuple

from treespec.cache import KVCache
from treespec.request import FinishReason, Request


class Batch(NamedTuple):
    """One step's work: prompt chunks to compute (`counts` rows each), and requests that decode."""

    prefill: list[Request]
    counts: list[int]
    decode: list[Request]


class Scheduler:
    """Continuous batching: a waiting request enters whenever a slot and its pages are free.

    Args:
        cache: pages are reserved at admission for all that a request can need, so that nothing fails later.
        max_num_seqs: requests that run at once.
        prefill_chunk: prompt rows of one step.
        scratch: slots behind the committed ones, for the token tree.
    """

    def __init__(self, cache: KVCache, max_num_seqs: int, prefill_chunk: int, scratch: int):
        self.cache, self.max_num_seqs, self.prefill_chunk, self.scratch = cache, max_num_seqs, prefill_chunk, scratch
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def slots_needed(self, request: Request) -> int:
        """Slots for all that a request can ever hold, its tree included."""
        return request.num_prompt + request.max_tokens + self.scratch

    def next(self) -> Batch:
        """Admit what fits, in order of arrival; then prompt chunks up to the budget, and all that can decode."""
        while self.waiting and len(self.running) < self.max_num_seqs:
            needed = self.slots_needed(self.waiting[0])
            if not self.cache.can_reserve(needed):
                break
            request = self.waiting.popleft()
            request.pages = self.cache.reserve(request.request_id, needed)
            self.running.append(request)
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
        return Batch(prefill, counts, ready)

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request wherever it is, and free its slot and pages."""
        request.finish_reason, request.error, request.finished_at = reason, error, time.perf_counter()
        if request in self.running:
            self.running.remove(request)
            # Whoever did not end by its own tokens may have left NaN behind, computed and never looked at.
            self.cache.release(request.request_id, scrub=request.poisoned or reason not in ("stop", "length"))
        elif request in self.waiting:
            self.waiting.remove(request)

    def find(self, request_id: str) -> list[Request]:
        """The open samples of a user's request."""
        return [request for request in [*self.running, *self.waiting] if request.output_id == request_id]
