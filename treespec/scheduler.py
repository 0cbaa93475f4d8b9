"""Who runs next: admission, prefill budget, ends. No tensors."""

import time
from collections import deque
from typing import NamedTuple

import numpy as np

from treespec.cache import NO_PAGES, KVCache
from treespec.outputs import FinishReason
from treespec.request import PromptGroup, Request
from treespec_kernels.attention.tree_batch import PAGE_SIZE


class Batch(NamedTuple):
    """One step's work.

    Attributes:
        prefill, counts: prompt chunks to compute, `counts[i]` rows of each.
        forked: samples that have entered with a prompt that another one computed.
        decode: requests that decode, those that `forked` among them.
    """

    prefill: list[Request]
    counts: list[int]
    forked: list[Request]
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
        group = request.group
        if group is not None:
            if group.waiting:
                other = next(other for other in reversed(self.waiting) if other.group is group)
                same = request.prompt_token_ids == other.prompt_token_ids and request.spec == other.spec
                assert same, f"{request.request_id} has not the prompt and spec of {group.group_id}"
            group.waiting += 1
        self.waiting.append(request)

    def slots_needed(self, request: Request) -> int:
        """Slots for all that a request can ever hold, its tree included."""
        return request.num_prompt + request.max_tokens + self.scratch

    def next(self) -> Batch:
        """Admit what fits, in order of arrival; then prompt chunks up to the budget, and all that can decode.

        A sample whose prompt is being computed lets others pass; as soon as it is computed it stands before them again.
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
                self._admit(request)
                if request.context_len:
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

    def _has_room(self, request: Request) -> bool:
        """Whether the request's pages are free. An idle engine takes back what groups of requests behind it keep: their
        next sample computes the prompt anew."""
        needed, shared = self.slots_needed(request), len(_shared_pages(request))
        if not self.running:
            for other in reversed(self.waiting):
                if self.cache.can_reserve(needed, shared):
                    break
                if other.group is not None and other.group is not request.group:
                    self._drop(other.group)
        return self.cache.can_reserve(needed, shared)

    def _admit(self, request: Request) -> None:
        """Give a request its pages; where its group has the prompt in the cache, with the prompt."""
        shared = _shared_pages(request)
        request.pages = self.cache.reserve(request.request_id, self.slots_needed(request), shared)
        self.running.append(request)
        group, prefix = request.group, request.num_prompt - 1
        if group is None:
            return
        group.waiting -= 1
        leader = group.leader
        if leader is None:
            group.leader = request
            if group.kept is not None:
                self._drop(group)
                request.context_len = prefix
            return
        if prefix % PAGE_SIZE:
            tail = len(shared)
            self.cache.copy_slots(leader.pages[tail], request.pages[tail], prefix % PAGE_SIZE)
        request.context_len, request.poisoned = prefix, leader.poisoned

    def _drop(self, group: PromptGroup) -> None:
        """Let go of the pages that a group keeps, if it does."""
        if group.kept is not None:
            self.cache.release(group.group_id)
            group.kept = None

    def _leave(self, request: Request, scrub: bool) -> None:
        """Free a request's pages, or leave the prompt to those of its group that come after it."""
        group = request.group
        if group is not None and group.leader is request:
            group.leader = next((other for other in self.running if other.group is group), None)
            if group.leader is None and group.waiting and request.has_verified_prompt:
                prefix = request.num_prompt - 1
                group.kept = self.cache.transfer(request.request_id, group.group_id, prefix, scrub)
                return
        self.cache.release(request.request_id, scrub)

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request wherever it is, and free its slot and pages."""
        request.finish_reason, request.error, request.finished_at = reason, error, time.perf_counter()
        if request in self.running:
            self.running.remove(request)
            # Whoever did not end by its own tokens may have left NaN behind, computed and never looked at.
            self._leave(request, scrub=request.poisoned or reason not in ("stop", "length"))
        elif request in self.waiting:
            self.waiting.remove(request)
            if request.group is not None:
                request.group.waiting -= 1
                if not request.group.waiting:
                    self._drop(request.group)

    def find(self, request_id: str) -> list[Request]:
        """The open samples of a user's request."""
        return [request for request in [*self.running, *self.waiting] if request.output_id == request_id]

    def check_integrity(self) -> None:
        """Assert that every group knows its samples, and holds pages only where one of them waits and none runs."""
        for request in [*self.running, *self.waiting]:
            group = request.group
            if group is None:
                continue
            running = [other for other in self.running if other.group is group]
            assert group.waiting == sum(other.group is group for other in self.waiting), group.group_id
            assert (group.leader in running) == bool(running), f"{group.group_id} is led by nobody, or one that is gone"
            assert group.kept is None or (group.waiting and not running), f"{group.group_id} keeps pages for nobody"


def _shared_pages(request: Request) -> np.ndarray:
    """The pages with which a waiting request would enter: of its leader the full ones of the prompt, of those that the
    group keeps all."""
    group, prefix = request.group, request.num_prompt - 1
    if group is None:
        return NO_PAGES
    if group.kept is not None:
        return group.kept
    return NO_PAGES if group.leader is None else group.leader.pages[: prefix // PAGE_SIZE]
