"""Continuous batching: admission, chunked prefill, preemption and release of requests. Holds no tensors."""

import logging
import math
import time
from bisect import insort
from typing import NamedTuple

import numpy as np

from treespec.cache.kv_cache import NO_PAGES, KVCache, pages_for
from treespec.cache.prefix_cache import Prefix, page_keys
from treespec.errors import TreespecError
from treespec.outputs import FinishReason
from treespec.planning.draft_plan import MAX_STALL
from treespec.request import PromptGroup, Request
from treespec_kernels.attention.tree_batch import PAGE_SIZE

logger = logging.getLogger("treespec")

NO_LENGTHS = np.zeros(1, dtype=np.int64)
MOST_PASSED = 16  # later requests that may be admitted before one whose pages are not free
MIN_CHUNK = 32  # prompt rows of a step, even if they take longer: each pass reads all weights


class Batch(NamedTuple):
    """Work of one step."""

    prefill: list[Request]
    counts: list[int]  # rows of each to prefill
    forked: list[Request]  # admitted with a prompt that another sample prefilled; preempted ones are in `prefill`, too
    decode: list[Request]  # including `forked`


def rank(request: Request) -> tuple[int, int]:
    """Return the place of a request among others: by priority, then first come first served."""
    return request.priority, request.order


class Scheduler:
    """Admits waiting requests in the order of `rank`, as slots and pages become free.

    A request that would fit into the cache `max_num_seqs` times reserves all pages that it can need. A longer one
    reserves those of its next round, and grows page by page. If no page is free, the running request of the last rank
    is preempted: it frees its pages, and recomputes its tokens once it is readmitted.
    """

    def __init__(
        self,
        cache: KVCache,
        max_num_seqs: int,
        prefill_chunk: int,  # prompt rows per step
        scratch: int,  # slots per request for the token tree
        short_context: int = 0,  # the target's `ModelConfig.short_context`
        max_loras: int = 1,  # different adapters of running requests
    ):
        self.max_loras = max_loras
        self._short_context, self._has_noted_factors = short_context, False
        self.cache, self.max_num_seqs, self.prefill_chunk, self.scratch = cache, max_num_seqs, prefill_chunk, scratch
        self.waiting: list[Request] = []  # by rank
        self.running: list[Request] = []
        self._num_added = 0
        self._row_seconds = math.inf  # time per prompt row in the last prefill; at first unknown, so chunks are small

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        group = request.group
        if group is not None:
            if group.waiting:
                other = next(other for other in reversed(self.waiting) if other.group is group)
                shared, of_other = ((r.prompt_token_ids, r.spec, self._salt(r)) for r in (request, other))
                differs = f"{request.request_id} differs from {group.group_id} in prompt, spec, adapter or rope factors"
                assert shared == of_other, differs
            group.waiting += 1
        self._num_added += 1
        request.order = self._num_added
        self._wait(request)
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
        """Return a salt for `page_keys`: the rope factors and the adapter that a request's K/V depend on."""
        return (b"long" if self._is_long(request) else b"") + (b"" if request.lora is None else request.lora.digest)

    def _wait(self, request: Request) -> None:
        """Insert a request into the queue by its rank."""
        insort(self.waiting, request, key=rank)
        if self.cache.prefixes is not None and (request.params.prompt_logprobs is None or request.num_generated):
            request.page_keys = page_keys(request.tokens, self._salt(request))

    def slots_needed(self, request: Request) -> int:
        """Number of slots to reserve for a request now, tree included."""
        most = request.max_len + self.scratch
        if pages_for(most) * self.max_num_seqs <= self.cache.num_pages:
            return most
        return _next_len(request) + self.scratch

    def next(self) -> Batch:
        """Admit requests, then schedule prefill chunks up to the budget and all decodes."""
        forked = []
        while (request := self._admissible()) is not None:
            place = self.waiting.index(request)
            del self.waiting[place]
            for other in self.waiting[:place]:
                other.passed += 1
            if self._admit(request):
                forked.append(request)
        counts = self._chunks()
        ready = [r for r in self.running if r.context_len + counts.get(r, 0) >= r.prefill_len]
        return Batch(list(counts), list(counts.values()), forked, ready)

    def _chunks(self) -> dict[Request, int]:
        """Divide the prompt rows of a step: one half goes to the request that came first, the other to the shortest
        prompts, so that neither waits long for the other.

        While other requests decode, there are only as many rows as take `MAX_STALL` at the last measured speed.
        """
        if not any(request.needs_prefill for request in self.running):
            return {}
        prefilling = sorted((request for request in self.running if request.needs_prefill), key=rank)
        unprefilled = {request: self._prefill_end(request) - request.context_len for request in prefilling}
        shortest_first = sorted(prefilling, key=lambda request: (request.priority, unprefilled[request]))
        counts, budget = dict.fromkeys(prefilling, 0), self.prefill_chunk
        if len(prefilling) < len(self.running):
            budget = min(budget, max(int(MAX_STALL / self._row_seconds), MIN_CHUNK))
        shares = [(request, (budget + 1) // 2) for request in prefilling[:1]]
        for request, most in [*shares, *((request, budget) for request in shortest_first)]:
            count = min(unprefilled[request] - counts[request], most, budget)
            counts[request] += count
            budget -= count
        return {request: count for request, count in counts.items() if count}

    def _prefill_end(self, request: Request) -> int:
        """Return where the next prefill chunk of a request must end at the latest.

        States of recurrent layers are kept after passes, so the prompt's last page ends one if prefixes are cached.
        """
        end = request.prefill_len // PAGE_SIZE * PAGE_SIZE
        if self.cache.states is None or self.cache.prefixes is None or request.context_len >= end:
            return request.prefill_len
        return end

    def observe_prefill(self, num_rows: int, seconds: float) -> None:
        """Record the time of a step's prefill, which bounds the next chunks."""
        self._row_seconds = seconds / num_rows

    @property
    def can_admit(self) -> bool:
        """Whether the next step may admit a request beside those that run."""
        return self._admissible() is not None

    def _admissible(self) -> Request | None:
        """Return the waiting request to admit next, or None.

        Samples that wait for their leader's prefill are skipped. Later requests of the same priority may pass one whose
        pages are not free, but not more than `MOST_PASSED`.
        """
        if len(self.running) >= self.max_num_seqs:
            return None
        blocked: list[Request] = []
        for request in self.waiting:
            if blocked and (request.priority != blocked[0].priority or len(blocked) == MOST_PASSED):
                break
            if request.group is not None and request.group.is_prefilling:
                continue
            if self._has_room(request):
                return request
            if request.passed >= MOST_PASSED:
                break
            blocked.append(request)
        return None

    def _has_room(self, request: Request) -> bool:
        """Whether the request's pages are free, and one more for each running request that may grow.

        There is no room for an adapter beside `max_loras` others.
        """
        others = {other.lora for other in self.running} - {None, request.lora}
        if request.lora is not None and len(others) >= self.max_loras:
            return False
        slots, shared = self.slots_needed(request), self._shared(request).pages
        if not self.running:
            self._reclaim(slots, shared, request.group)
        slots += PAGE_SIZE * sum(other.reserved_len < other.max_len for other in self.running)
        return self.cache.can_reserve(slots, shared)

    def _reclaim(self, slots: int, held: np.ndarray, group: PromptGroup | None) -> bool:
        """Drop prompt pages kept by other groups, latest group first, until enough are free; return whether they are.

        The next sample of such a group prefills the prompt again.
        """
        for other in reversed(self.waiting):
            if other.group is not None and other.group.kept is not None and other.group is not group:
                if self.cache.can_reserve(slots, held):
                    break
                self._drop(other.group)
        return self.cache.can_reserve(slots, held)

    def grow(self) -> Request | None:
        """Reserve the pages of the running requests' next round. Return a request to preempt if they are too few."""
        growing = [request for request in self.running if request.reserved_len < _next_len(request)]
        for request in sorted(growing, key=rank):
            slots = self.slots_needed(request)
            if not self._reclaim(slots, request.pages, None):
                return max(self.running, key=rank)
            self._hold(request, self.cache.grow(request.request_id, slots))
        return None

    def preempt(self, request: Request) -> None:
        unchecked = request.poisoned or request.runs_ahead or not request.has_verified_prompt
        if not unchecked:
            self.cache_prefix(request)
        self.running.remove(request)
        if request.group is not None:
            request.group.waiting += 1
        self._leave(request, scrub=unchecked)
        self._hold(request, NO_PAGES)
        request.context_len, request.prefill_len, request.draft_lengths = 0, len(request.tokens) - 1, NO_LENGTHS
        request.poisoned = request.runs_ahead = False
        request.num_preemptions += 1
        if not request.num_generated:
            del request.prompt_logprobs[1:]
        self._wait(request)

    def _hold(self, request: Request, pages: np.ndarray) -> None:
        request.pages, request.reserved_len = pages, len(pages) * PAGE_SIZE - self.scratch

    def keep_state(self, request: Request) -> None:
        """Keep a copy of the recurrent state after a prefill pass, which the request itself goes on to change.

        At the end of a group's prompt it is for waiting samples, at the end of a page for later requests.
        """
        group, states, length = request.group, self.cache.states, request.context_len
        if states is None or request.state is None:
            return
        if group is not None and group.leader is request and group.waiting and length == request.num_prompt - 1:
            states.keep(group.group_id, request.state)
        if self.cache.prefixes is not None and length % PAGE_SIZE == 0 and request.page_keys:
            states.keep(request.page_keys[length // PAGE_SIZE - 1], request.state)

    def _forks(self, group: PromptGroup | None) -> bool:
        """Whether the next sample of a group finds its prompt computed; its recurrent state may have been dropped."""
        if group is None or group.leader is None:
            return False
        return self.cache.states is None or self.cache.states.find(group.group_id) is not None

    def _shared(self, request: Request) -> Prefix:
        """Return the full pages that a waiting request would share: its leader's, its group's, or a cached prefix's."""
        group, prefixes = request.group, self.cache.prefixes
        if group is not None and group.kept is not None:
            return Prefix(group.kept, NO_LENGTHS)
        if group is not None and group.leader is not None and self._forks(group):
            return Prefix(group.leader.pages[: (request.num_prompt - 1) // PAGE_SIZE], NO_LENGTHS)
        if prefixes is None:
            return Prefix(NO_PAGES, NO_LENGTHS)
        # The last token is left to decoding, and the leader of a group prefills at least one for the drafts.
        most = (request.prefill_len - (group is not None)) // PAGE_SIZE
        prefix, states = prefixes.find(request.page_keys[: max(most, 0)]), self.cache.states
        if states is None:
            return prefix
        ends = (count for count in range(len(prefix.pages), 0, -1) if states.find(request.page_keys[count - 1]))
        count = next(ends, 0)
        return Prefix(prefix.pages[:count], np.minimum(prefix.draft_lengths, count * PAGE_SIZE))

    def _admit(self, request: Request) -> bool:
        """Reserve a request's pages, reusing what is in the cache. Return whether its group has the whole prompt."""
        shared, draft_lengths = self._shared(request)
        forks, states = self._forks(request.group), self.cache.states
        self._hold(request, self.cache.reserve(request.request_id, self.slots_needed(request), shared))
        request.state = self.cache.reserve_state(request.request_id)
        self.running.append(request)
        if request.admitted_at is None:
            request.admitted_at = time.perf_counter()
        group, prefix = request.group, request.num_prompt - 1
        leader = None if group is None else group.leader
        if group is not None:
            group.waiting -= 1
            group.leader = leader or request
        if leader is None or not forks:
            if group is not None and group.kept is not None:
                self._drop(group)
                request.context_len = prefix
                return prefix > 0
            request.context_len, request.draft_lengths = PAGE_SIZE * len(shared), draft_lengths
            if states is not None and request.state is not None and len(shared):
                kept = states.find(key := request.page_keys[len(shared) - 1])
                assert kept is not None
                request.state.copy_from(kept)
                states.keep(key, kept)  # used last
            if not request.num_preemptions:
                request.num_cached = request.context_len
            return False
        if prefix % PAGE_SIZE:
            tail = len(shared)
            self.cache.copy_slots(leader.pages[tail], request.pages[tail], prefix % PAGE_SIZE)
        request.context_len, request.poisoned = prefix, leader.poisoned
        if states is not None and group is not None and request.state is not None:
            kept = states.find(group.group_id)
            assert kept is not None
            request.state.copy_from(kept)
            if not group.waiting:
                self._drop(group)
        return prefix > 0

    def cache_prefix(self, request: Request) -> None:
        """Let later requests share a request's full pages of committed positions, all of which are finite."""
        if self.cache.prefixes is None:
            return
        count = request.context_len // PAGE_SIZE
        keys = page_keys(request.tokens[: count * PAGE_SIZE], self._salt(request))
        self.cache.prefixes.insert(keys, request.pages[:count], request.draft_lengths)

    def _drop(self, group: PromptGroup) -> None:
        """Free what a group keeps for its waiting samples."""
        if group.kept is not None:
            self.cache.release(group.group_id)
            group.kept = None
        elif self.cache.states is not None:
            self.cache.states.drop(group.group_id)

    def _leave(self, request: Request, scrub: bool) -> None:
        """Free a request's pages, or keep the prompt's for the waiting samples of its group.

        The recurrent state after the prompt is kept only while a sample runs, which bounds the number of states.
        """
        group, request.state = request.group, None
        if group is not None and group.leader is request:
            group.leader = next((other for other in self.running if other.group is group), None)
            prefix = request.num_prompt - 1
            last = request.pages[prefix // PAGE_SIZE : pages_for(prefix)]  # the prompt's last page, unless it is full
            if group.leader is None and self.cache.states is not None:
                self._drop(group)
            is_kept = group.leader is None and group.waiting and request.has_verified_prompt
            is_kept = is_kept and self.cache.states is None
            if is_kept and (self.cache.num_holders(last) == 1).all():
                group.kept = self.cache.transfer(request.request_id, group.group_id, prefix, scrub)
                return
        self.cache.release(request.request_id, scrub)

    def finish(self, request: Request, reason: FinishReason, error: TreespecError | None = None) -> None:
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
        """Return the unfinished samples of a user's request."""
        return [request for request in [*self.running, *self.waiting] if request.output_id == request_id]

    def check_integrity(self) -> None:
        """Assert that running requests have the pages of their next round, that group counts match the queues, and that
        groups keep pages only while samples wait and none runs."""
        assert self.waiting == sorted(self.waiting, key=rank), "the queue is out of order"
        for request in [*self.running, *self.waiting]:
            enough = not len(request.pages) if request in self.waiting else request.reserved_len >= _next_len(request)
            assert enough, f"{request.request_id} has {len(request.pages)} pages"
            group = request.group
            if group is None:
                continue
            running = [other for other in self.running if other.group is group]
            assert group.waiting == sum(other.group is group for other in self.waiting), group.group_id
            assert (group.leader in running) == bool(running), f"{group.group_id} has no leader, or one that ended"
            assert group.kept is None or (group.waiting and not running), f"{group.group_id} keeps pages without need"


def _next_len(request: Request) -> int:
    """Return the number of tokens for which a request needs pages in its next round."""
    return min(len(request.tokens) + 1, request.max_len)
