"""The engine: one round after another."""

import itertools
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treespec.cache import KVCache
from treespec.drafters.base import Drafter
from treespec.drafters.calls import Failures, ask, release, tell
from treespec.drafters.forced import forced_tree
from treespec.drafters.foreign.foreign_drafter import ForeignDrafter
from treespec.drafters.lookup.lookup_drafter import LookupDrafter
from treespec.drafters.ssm.ssm_drafter import SsmDrafter
from treespec.errors import DraftError, RequestError, TreespecError
from treespec.metrics import Stats
from treespec.outputs import FinishReason
from treespec.planning.draft_plan import Drafted, DraftPlan
from treespec.planning.planner import Planner
from treespec.planning.round_costs import RoundSeconds
from treespec.request import Request
from treespec.round_record import RoundObservers, RoundRecord
from treespec.runner import Choices, Runner
from treespec.sampling.transforms import logprobs_of
from treespec.scheduler import Batch, Scheduler
from treespec.tree import TokenTree, merge
from treespec.verification.verify import Verified, verify_greedy

logger = logging.getLogger("treespec")


class Scored(NamedTuple):
    """A request's tree and what the target says after each of its nodes."""

    request: Request
    tree: TokenTree
    choices: Choices


class Decided(NamedTuple):
    """A scored tree and what verification made of it."""

    scored: Scored
    verified: Verified


@dataclass
class _Clock:
    """Measures a round from the first draft to the commit, in seconds."""

    began: float
    draft: float = 0.0
    foreign: float = 0.0  # of drafts that decide for themselves whether a pass pays
    forward: float = 0.0

    def stop(self, read: float) -> RoundSeconds:
        """The round's parts. `read`: what of `draft` was reading."""
        host = time.perf_counter() - self.began - self.draft - self.foreign - self.forward
        return RoundSeconds(self.draft - read, read, self.forward, host)


class Engine:
    """Target, drafts, cache and scheduler, put together.

    Args:
        runner: the target.
        scheduler: admission.
        planner: what to draft and how much of it to verify.
        ssms: the SSM group, or None.
        lookup: what followed the same tokens before, or None.
        drafters: further sources: from outside, and drafts with other tokenizers.
        max_model_len: positions of the longest request.

    Attributes:
        observers: called after every round for each of its requests.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        planner: Planner,
        ssms: SsmDrafter | None,
        lookup: LookupDrafter | None,
        drafters: Sequence[Drafter],
        max_model_len: int,
    ):
        self.runner, self.scheduler, self.planner = runner, scheduler, planner
        self.ssms, self.lookup, self.drafters = ssms, lookup, list(drafters)
        self.max_model_len = max_model_len
        self.cache: KVCache = runner.cache
        self.stats = Stats()
        self.observers = RoundObservers()
        self._failures: Failures = {}  # requests of this round that a drafter failed for
        self._clock = _Clock(0.0)
        self._proposed: list[tuple[Drafter | SsmDrafter, dict[str, TokenTree]]] = []

    def step(self) -> list[Request]:
        """One round. Returns the requests that took part in it; those that ended have a `finish_reason`."""
        batch = self.scheduler.next()
        self.prefill(batch)
        trees = self.propose(batch.decode)
        scored = self.forward(batch.decode, trees)
        decided = self.verify(scored)
        self.commit(decided)
        self.update(batch.decode)
        return batch.decode

    def prefill(self, batch: Batch) -> None:
        """The prompt chunks of this step, through the target and its SSMs.

        Where the planner decides, the SSMs read the prompt when they draft for the first time: they may never. But what
        several samples share is not written later, so one of them reads it for all, or the SSMs draft for none of them.

        A request whose prompt has no log-probabilities, where it asks for them, ends here and leaves `batch`.
        """
        self.runner.prefill(batch.prefill, batch.counts)
        for request in batch.prefill:
            if request.error is not None:
                self.finish(request, "error", request.error)
        batch.decode[:] = [request for request in batch.decode if not request.finished]
        if self.ssms is not None:
            computed = [r for r in batch.prefill if not r.finished and not r.spec.is_plain]
            for request in computed:
                if request.spec.is_adaptive and request.group is not None and request.group.trust is None:
                    request.group.without_ssms = not self.expects_ssms()
            self.ssms.prefill([r for r in computed if not r.spec.is_adaptive or _shares_ssms(r)])
            self.ssms.fork(batch.forked)
        if batch.prefill:
            self.runner.wait()  # or the round behind it would take its time too, and the planner learn from that

    def expects_ssms(self) -> bool:
        """Whether SSMs seem worth their time for as many requests as will run side by side."""
        scheduler = self.scheduler
        together = [*scheduler.running, *itertools.islice(scheduler.waiting, scheduler.max_num_seqs)]
        return self.planner.expects_ssms(together[: scheduler.max_num_seqs])

    def propose(self, requests: Sequence[Request]) -> list[TokenTree]:
        """Every source drafts; one merged tree per request, cut to what is worth verifying.

        Sources that cost no pass, and drafts with other tokenizers, come first; the SSMs grow their trees over them.
        """
        self._proposed = []
        self._clock = _Clock(time.perf_counter())
        if not requests:
            return []
        unread = self.ssms.unread if self.ssms is not None else None
        plans = self.planner.draft_plans(requests, self.max_model_len, unread, bool(self.scheduler.waiting))
        forced = [self._forced(request, plan) for request, plan in zip(requests, plans, strict=True)]
        if not any(plan.max_depth or plan.levels for plan in plans) and all(len(tree) == 1 for tree in forced):
            return forced
        ids, depths = [request.request_id for request in requests], [plan.max_depth for plan in plans]
        proposals: list[tuple[Drafter | SsmDrafter, dict[str, TokenTree]]] = []
        for drafter in self.drafters:
            began = time.perf_counter()
            trees, failures = ask(drafter, requests, depths, self.runner.target.vocab_size)
            if isinstance(drafter, ForeignDrafter):
                self._clock.foreign += time.perf_counter() - began
            self._failures |= failures
            proposals.append((drafter, trees))
        if self.lookup is not None:
            found = self.lookup.propose(requests, depths, self.planner.least_value)
            if any(len(tree) > 1 for tree in found):
                proposals.append((self.lookup, dict(zip(ids, found, strict=True))))
        merged = []
        for request, tree in zip(requests, forced, strict=True):
            own = [trees[request.request_id] for _, trees in proposals if request.request_id in trees]
            merged.append(self._merged(request, [tree, *own]))
        if self.ssms is not None:
            began = time.perf_counter()
            merged = self.ssms.propose(requests, plans, self.planner, merged)
            self._clock.draft = time.perf_counter() - began
            if self.ssms.drafted.levels:
                proposals.append((self.ssms, dict(zip(ids, merged, strict=True))))
        self._proposed = proposals
        cut = self.planner.cut(requests, merged, self.ssms.drafted if self.ssms is not None else Drafted(0, 0))
        # Fixed trees have guesses of probability 0, too, where there are no others.
        return [_pruned(request, tree) for request, tree in zip(requests, cut, strict=True)]

    def _merged(self, request: Request, trees: Sequence[TokenTree]) -> TokenTree:
        """What sources without a pass propose for a request; the first tree alone where they drew too much."""
        try:
            return _merged(request, trees)
        except DraftError as error:
            self._failures.setdefault(request, error)
            return trees[0]

    def _forced(self, request: Request, plan: DraftPlan) -> TokenTree:
        """What must follow a request's text: the guess that costs nothing, so it is made even where sources rest."""
        adaptive = request.spec.is_adaptive
        depth = min(request.spec.max_depth, request.room(self.max_model_len)) if adaptive else plan.max_depth
        return forced_tree(request, depth)

    def forward(self, requests: Sequence[Request], trees: Sequence[TokenTree]) -> list[Scored]:
        """ONE target pass over all nodes of all requests. A request that computes NaN ends here, alone.

        A drafted token may overflow where the target's own would not, and one NaN in a tree reaches the other nodes as
        0 * NaN. So such a tree is passed again as plain decoding would: its root, on clean slots. (A tree of random
        draws is thereby dropped for what was drawn: in all of "rejection" and "traversal" this alone moves the law.)
        """
        scored = []
        began = time.perf_counter()
        chosen = self.runner.forward(requests, trees)
        self._clock.forward = time.perf_counter() - began
        for request, tree, choices in zip(requests, trees, chosen, strict=True):
            request.target_passes += 1
            request.nodes_verified += len(tree)
            if not choices.finite and len(tree) > 1:
                self.cache.scrub_slots(0, request.pages, request.context_len, len(tree))
                tree = TokenTree.root(request.tokens[-1])
                choices = self.runner.forward([request], [tree])[0]
                request.target_passes += 1
                request.nodes_verified += 1
            if choices.finite:
                scored.append(Scored(request, tree, choices))
            else:
                self.finish(request, "error", f"the target computed NaN or infinity at position {request.context_len}")
        return scored

    def verify(self, scored: Sequence[Scored]) -> list[Decided]:
        """Which nodes are accepted, by each request's rule. A request that cannot be decided ends here, alone."""
        decided = []
        for each in scored:
            try:
                decided.append(Decided(each, _verify(*each)))
            except RequestError as error:
                self.finish(each.request, "error", str(error))
        return decided

    def commit(self, decided: Sequence[Decided]) -> None:
        """Emit what was verified, up to a stop, and compact every cache to it."""
        requests, paths, emitted = [each.scored.request for each in decided], [], []
        for (request, tree, choices), (path, bonus) in decided:
            tokens = request.accept([*tree.tokens[path[1:]].tolist(), bonus])
            emitted.append(tokens)
            paths.append(path[: len(tokens)])
            request.count_accepted([tree.sources_of(node) for node in path[1 : 1 + len(tokens)]])
            if (count := request.params.logprobs) is not None:
                rows = choices.logits[paths[-1].tolist()]
                request.logprobs += [logprobs_of(row, token, count) for row, token in zip(rows, tokens, strict=True)]
        self.cache.commit(0, [r.pages for r in requests], [r.context_len for r in requests], paths)
        for drafter, trees in self._proposed:
            asked = [(r, tokens) for r, tokens in zip(requests, emitted, strict=True) if r.request_id in trees]
            if asked:
                own = [follow(trees[r.request_id], tokens) for r, tokens in asked]
                self._failures |= tell(drafter, [r for r, _ in asked], own)
        for request, tokens in zip(requests, emitted, strict=True):
            request.tokens.extend(tokens)
            request.context_len += len(tokens)
            request.num_rounds += 1
        drafted = self.ssms.drafted if self.ssms is not None else Drafted(0, 0)
        seconds = self._clock.stop(drafted.read_seconds)
        self.planner.observe(
            requests, [each.scored.tree for each in decided], [len(tokens) for tokens in emitted], seconds
        )
        if self.observers:
            whole = sum(seconds) + self._clock.foreign
            for ((request, tree, _), (path, bonus)), tokens in zip(decided, emitted, strict=True):
                self.observers.notify(
                    RoundRecord.of(request, tree, path, bonus, len(tokens), whole, self._clock.forward)
                )

    def update(self, requests: Sequence[Request]) -> None:
        """Let go of what has ended, and of the requests that a drafter failed for."""
        self.stats.rounds += bool(requests)
        failures, self._failures = self._failures, {}
        for request in requests:
            failure = failures.get(request)
            if request.finished:
                continue
            if request.ended is not None:
                self.finish(request, request.ended, request.failure)
                if failure is not None:
                    logger.error("%s; the request had its whole output", failure, exc_info=failure.__cause__)
            elif failure is not None:
                self.finish(request, "error", failure)

    def finish(self, request: Request, reason: FinishReason, error: str | TreespecError | None = None) -> None:
        """End a request and free all that it holds, whatever a drafter does about it."""
        if request.finished:
            return
        if isinstance(error, TreespecError):
            request.failure, error = error, str(error)
        with ExitStack() as releases:
            for drafter in [self.ssms, self.lookup, *self.drafters]:
                if drafter is not None:
                    releases.callback(release, drafter, request)
            self.scheduler.finish(request, reason, error)
            self.stats.add_finished(request)

    def check_integrity(self) -> None:
        """Assert what must hold between rounds: pages add up, and caches agree with the tokens."""
        self.cache.check_integrity()
        self.scheduler.check_integrity()
        for request in self.scheduler.running:
            assert request.needs_prefill or request.context_len == len(request.tokens) - 1, request.request_id
        if self.scheduler.is_idle:
            assert self.cache.num_free == self.cache.num_pages, "an idle engine holds pages"


def _shares_ssms(request: Request) -> bool:
    """Whether samples of its prompt share what SSMs read of that."""
    return request.group is not None and not request.group.without_ssms


def _verify(request: Request, tree: TokenTree, choices: Choices) -> Verified:
    """One request's tree by its rule."""
    sampler = request.sampler
    if sampler is None:
        assert choices.tokens is not None
        return verify_greedy(tree, choices.tokens)
    if request.draws_at_random and len(tree) > 1:
        return sampler.verify_drawn(request.spec.verification, tree, choices.logits, request.tokens)
    return sampler.walk(tree, choices.logits, request.tokens, request.tokens_left)


def _merged(request: Request, trees: Sequence[TokenTree]) -> TokenTree:
    """What sources without a pass propose for a request, as far as it may write that. Random draws stay whole, so
    others give way to them.

    Raises:
        DraftError: there are more of them than the request's nodes. Nothing has reached the cache.
    """
    tree = _pruned(request, merge(trees))
    if tree.draws.rows is None or len(tree) <= request.spec.max_nodes:
        return tree
    tree = merge([each for each in trees if each.draws.rows is not None])
    if len(tree) > request.spec.max_nodes:
        raise DraftError(
            f"{', '.join(tree.source_names)} drew {len(tree)} nodes at random for request {request.request_id}, none "
            f"of which may be left out; nodes={request.spec.max_nodes} allows so many, the root included"
        )
    return tree


def _pruned(request: Request, tree: TokenTree) -> TokenTree:
    """A request's tree as far as it may write that."""
    return tree if request.restriction is None else request.restriction.prune(tree, request.tokens)


def follow(tree: TokenTree, tokens: Sequence[int]) -> np.ndarray:
    """The longest path of `tree` that `tokens` follow below its root, int64 node indices from the root on."""
    path, parents, own = [0], tree.parents.tolist(), tree.tokens.tolist()
    for node in range(1, len(tree)):  # parents precede their children
        if len(path) > len(tokens):
            break
        if parents[node] == path[-1] and own[node] == tokens[len(path) - 1]:
            path.append(node)
    return np.array(path, dtype=np.int64)
