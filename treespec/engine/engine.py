"""The engine: schedules requests and runs one round after another through its executors."""

import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from ctypes import CDLL
from functools import partial

import numpy as np
import torch

from treespec.cache.kv_cache import KVCache
from treespec.drafters.base import Failures
from treespec.drafters.draft_sources import DraftSources
from treespec.engine.executor import DeviceExecutor, Execution, Executor, StageClock, VerifiedRequest
from treespec.engine.host_executor import HostExecutor
from treespec.engine.metrics import Stats
from treespec.engine.round_record import RoundObservers, RoundRecord
from treespec.engine.runner import Runner
from treespec.engine.scheduler import Batch, Scheduler
from treespec.errors import RequestError, TreespecError
from treespec.outputs import FinishReason
from treespec.planning.round_costs import RoundSeconds
from treespec.request import Request
from treespec.sampling.logprobs import LogprobRows, packed_logprobs
from treespec.utils.torch_state import one_thread

logger = logging.getLogger("treespec")

# Maximum number of rounds whose updates run together: a pass over the weights evicts Python's code and objects from the
# processor's caches, and the updates of a group of rounds load them once.
DEFERRED_ROUNDS = 4


class Engine:
    """Decodes batches of requests: one target, its draft sources, a KV cache, a scheduler and executors."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        sources: DraftSources,
        host: HostExecutor,  # executes requests that no other executor serves
        captured: DeviceExecutor | None = None,  # runs whole rounds on the device; None without CUDA graphs
    ):
        self.runner, self.scheduler, self.sources = runner, scheduler, sources
        self.host, self.captured = host, captured
        self.executors: list[Executor] = [host] if captured is None else [captured, host]
        self.cache: KVCache = runner.cache
        self.stats = Stats()
        self.observers = RoundObservers()  # called after every round, once per request
        self.clock = StageClock()
        self._failures: Failures = {}  # drafter failures of this round, by request
        self._deferred: list[Callable[[], None]] = []  # post-round updates for `run_deferred`

    def step(self) -> list[Request]:
        """Run one round. Return its requests; finished ones have a `finish_reason`."""
        self.clock.enter("host")
        batch = self.scheduler.next()
        self.clock.enter("prefill")
        self.prefill(batch)
        remaining = batch.decode
        for executor in self.executors:
            served = [request for request in remaining if executor.serves(request)]
            if not served:
                continue
            self.clock.enter("host")
            began = self.clock.mark()
            execution = executor.run(served, bool(self.scheduler.waiting), self.clock, self.run_deferred)
            self.commit(execution, began)
            remaining = [request for request in remaining if request not in served or request in execution.undecided]
        self.clock.enter("update")
        self.update(batch.decode)
        self._grow()
        self._launch_next()
        self.clock.enter("update")
        self._detokenize(batch.decode)
        self.clock.enter("idle")
        return batch.decode

    def _grow(self) -> None:
        """Reserve the pages of the next round before its launch; preempt requests if too few are free."""
        while (request := self.scheduler.grow()) is not None:
            self.run_deferred()
            if (ssms := self.sources.ssms) is not None:
                request.draft_lengths = ssms.lengths(request)
            self.scheduler.preempt(request)
            for source in self.sources:
                source.evict(request)
            self.stats.num_preemptions += 1

    def _launch_next(self) -> None:
        """Launch the next round at the end of this one, so that the device computes while the caller reads the outputs.

        Does nothing if a waiting request could join the round, or a running one is not decoded by captured rounds.
        """
        captured, running = self.captured, self.scheduler.running
        if captured is None or not running or self.scheduler.can_admit:
            return
        if not any(request.needs_prefill or not captured.serves(request) for request in running):
            captured.launch(list(running), bool(self.scheduler.waiting), self.clock)

    def _detokenize(self, requests: Sequence[Request]) -> None:
        """Convert new tokens to text. A request ends with an error if the tokenizer fails."""
        for request in requests:
            try:
                request.decode()
            except RequestError as error:
                del request.tokens[len(request.tokens) - len(request.undecoded) :]
                self.finish(request, "error", error)

    def prefill(self, batch: Batch) -> None:
        """Run the prompt chunks of this step through the target and, for fixed trees, the SSMs.

        With `nodes="auto"`, SSMs prefill a prompt lazily, before they first draft for it. Samples of one prompt share
        pages that must not be written later, so their SSMs prefill now if the planner expects a gain, or never.

        A request whose requested prompt log-probabilities cannot be computed ends here and leaves `batch`.
        """
        if not batch.prefill and not batch.forked:
            return
        began = time.perf_counter()
        self.runner.prefill(batch.prefill, batch.counts)
        for request in batch.prefill:
            if request.error is not None:
                self.finish(request, "error", request.error)
            else:
                self.scheduler.keep_state(request)
        batch.decode[:] = [request for request in batch.decode if not request.finished]
        if (ssms := self.sources.ssms) is not None:
            computed = [r for r in batch.prefill if not r.finished and not r.spec.is_plain]
            for request in computed:
                group, adaptive = request.group, request.spec.is_adaptive
                # A preempted sample does not decide again: others may share the prompt by then, without the SSMs' K/V.
                if group is not None and group.mixture is None and adaptive and not request.num_generated:
                    group.without_ssms = not self._expects_ssms(request)
            ssms.fork(batch.forked)
            ssms.prefill([r for r in computed if not r.spec.is_adaptive or (r.group and not r.group.without_ssms)])
        if batch.prefill:
            self.runner.wait()  # keeps asynchronous prefill time out of the round that the planner learns from
            self.scheduler.observe_prefill(sum(batch.counts), time.perf_counter() - began)

    def _expects_ssms(self, request: Request) -> bool:
        """Return whether the executor expects SSMs to pay at the batch size that the queue will fill."""
        scheduler = self.scheduler
        together = [*scheduler.running, *itertools.islice(scheduler.waiting, scheduler.max_num_seqs)]
        executor = next(executor for executor in self.executors if executor.serves(request))
        return executor.expects_ssms(together[: scheduler.max_num_seqs])

    def commit(self, execution: Execution, began: tuple[float, ...]) -> None:
        """Append verified tokens to their requests, up to a stop, and update counters, drafters and planner."""
        self._failures |= execution.failures
        for request, error in execution.failed:
            self.finish(request, "error", error)
        emitted = [result.request.accept(result.tokens) for result in execution.verified]
        overlaps = execution.overlaps and not self.observers
        if not overlaps:
            self._notify_sources(execution, emitted)
        for result, tokens in zip(execution.verified, emitted, strict=True):
            request = result.request
            request.tokens.extend(tokens)
            request.context_len += len(tokens)
            request.num_rounds += 1
        self.clock.enter("commit")
        seconds, other = self.clock.since(began, execution.drafted.read_seconds)
        seconds = execution.seconds or seconds
        if overlaps:
            self._deferred.append(partial(self._notify_sources, execution, emitted))
        self._deferred.append(partial(self._update_from, execution, emitted, seconds))
        if not overlaps and (self.observers or len(self._deferred) >= DEFERRED_ROUNDS):
            self.run_deferred()
        if self.observers:
            for result, tokens in zip(execution.verified, emitted, strict=True):
                reasons = execution.plain_reasons(result)
                self.observers.notify(RoundRecord.of(result, len(tokens), seconds, other, reasons))

    def run_deferred(self) -> None:
        """Run the deferred post-round updates of counters and planner, and of drafters after captured rounds.

        These run while the device computes the next round, whose drafts therefore do not depend on them.
        """
        updates, self._deferred = self._deferred, []
        for update in updates:  # if one is interrupted, the others are dropped
            update()

    def _update_from(self, execution: Execution, emitted: Sequence[list[int]], seconds: RoundSeconds) -> None:
        """Update log-probabilities, counters and the planner from a round."""
        if any(result.path_logits is not None or result.logprobs is not None for result in execution.verified):
            with one_thread():
                _add_logprobs(execution.verified, emitted, self.runner.target.growth)
        for result, tokens in zip(execution.verified, emitted, strict=True):
            request, path = result.request, result.path
            request.nodes_verified += len(result.tree.tokens)
            self.stats.accepted_lengths[min(len(path) - 1, len(tokens))] += 1  # a stop may cut the path
            accepted = [result.tree.sources_of(node) for node in path[1 : 1 + len(tokens)].tolist()]
            request.count_accepted(accepted)
            self.stats.count_draft(result.tree, accepted)
        counts = [len(tokens) for tokens in emitted]
        if execution.updates_planner:
            requests = [result.request for result in execution.verified]
            trees = [result.tree for result in execution.verified]
            drafted, rows, planned = execution.drafted, execution.rows, execution.planned
            execution.planner.observe(requests, trees, counts, seconds, drafted, rows, planned)

    def _notify_sources(self, execution: Execution, emitted: Sequence[list[int]]) -> None:
        """Let the sources commit accepted nodes, and learn from the verified trees."""
        for proposed in execution.proposals:
            asked = [
                (result.request, proposed.trees[result.request.request_id].match(tokens))
                for result, tokens in zip(execution.verified, emitted, strict=True)
                if result.request.request_id in proposed.trees
            ]
            if asked:
                self._failures |= proposed.commit([r for r, _ in asked], [path for _, path in asked]) or {}
        if (ssms := self.sources.ssms) is not None:
            for result in execution.verified:
                if result.score_ssms is not None:
                    result.score_ssms()
                ssms.learn(result.request, result.tree, result.path, result.bonus)

    def update(self, requests: Sequence[Request]) -> None:
        """Finish requests that reached a stop, and those whose drafter failed."""
        self.stats.rounds += bool(requests)
        failures, self._failures = self._failures, {}
        for request in requests:
            failure = failures.get(request)
            if request.finished:
                continue
            if request.ended is not None:
                self.finish(request, request.ended, request.error)
                if failure is not None:
                    logger.error("%s; the request had its whole output", failure, exc_info=failure.__cause__)
            elif failure is not None:
                self.finish(request, "error", failure)
            elif request.num_rounds == 1 and not request.poisoned:
                self.scheduler.cache_prefix(request)

    def finish(self, request: Request, reason: FinishReason, error: TreespecError | None = None) -> None:
        """End a request and free its resources, even if a drafter fails to release it."""
        if request.finished:
            return
        self.run_deferred()
        if self.sources.ssms is not None:
            request.draft_lengths = self.sources.ssms.lengths(request)
        with ExitStack() as releases:
            for source in self.sources:
                releases.callback(source.release, request)
            self.scheduler.finish(request, reason, error)
            self.stats.add_finished(request)
        if self.captured is not None:
            self.captured.drop_finished()

    def check_integrity(self) -> None:
        """Assert the invariants between rounds: page counts add up, and cached positions match the tokens."""
        self.cache.check_integrity()
        self.scheduler.check_integrity()
        for request in self.scheduler.running:
            assert request.needs_prefill or request.context_len == len(request.tokens) - 1, request.request_id
        if self.scheduler.is_idle:
            assert self.cache.num_free == self.cache.num_pages, "an idle engine holds pages"
            assert self.cache.states is None or not self.cache.states.num_held, "an idle engine holds states"
            held = [request_id for source in self.sources for request_id in source.held]
            assert not held, f"the drafters of an idle engine hold {held}"


def _add_logprobs(verified: Sequence[VerifiedRequest], emitted: Sequence[list[int]], library: CDLL | None) -> None:
    """Append the log-probabilities of emitted tokens to the requests that ask for them, in one batch per `count`.

    `library` as in `packed_logprobs`.
    """
    asking = defaultdict[int, list[tuple[Request, torch.Tensor, list[int]]]](list)
    for result, tokens in zip(verified, emitted, strict=True):
        if (count := result.request.params.logprobs) is None:
            continue
        if result.logprobs is not None:
            _append_logprobs([(result.request, tokens)], result.logprobs[: len(tokens)], count)
        else:
            assert result.path_logits is not None
            asking[count].append((result.request, result.path_logits[: len(tokens)], tokens))
    for count, entries in asking.items():
        emitted_tokens = [token for _, _, tokens in entries for token in tokens]
        packed = packed_logprobs([rows for _, rows, _ in entries], emitted_tokens, count, library)
        _append_logprobs([(request, tokens) for request, _, tokens in entries], packed, count)


def _append_logprobs(emitted: Sequence[tuple[Request, list[int]]], packed: np.ndarray, count: int) -> None:
    """Append rows of `LogprobRows.packed` to the requests of these tokens, in order."""
    if any(request.packed_logprobs is None for request, _ in emitted):
        named = LogprobRows.unpacked(packed).named([token for _, tokens in emitted for token in tokens], count)
    start = 0
    for request, tokens in emitted:
        rows = slice(start, start := start + len(tokens))
        if request.packed_logprobs is None:
            request.logprobs += named[rows]
        else:
            request.packed_logprobs.append(packed[rows])
