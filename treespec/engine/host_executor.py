"""The steps of a round on the host, which reads trees, scores and paths between them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from treespec.drafters.base import Proposals
from treespec.drafters.draft_sources import DraftSources
from treespec.engine.executor import Execution, Executor, StageClock, VerifiedRequest
from treespec.engine.native_rounds import NativeRounds
from treespec.engine.runner import Choices, Runner
from treespec.errors import DraftError, RequestError
from treespec.planning.planner import Planner
from treespec.request import Request
from treespec.tree import TokenTree, merge


@dataclass
class HostExecution(Execution):
    """A round on the host."""

    trees: list[TokenTree] = field(default_factory=list)  # by request, the merged and cut proposals
    choices: list[Choices] = field(default_factory=list)  # by request, the target's outputs for its tree
    uncompacted: list[VerifiedRequest] = field(default_factory=list)  # paths to which the target's K/V must be moved


class HostExecutor(Executor):
    """Runs rounds for any request on any device; reads trees, scores and paths between the steps."""

    def __init__(self, runner: Runner, planner: Planner, sources: DraftSources, max_model_len: int):
        self.runner, self.planner, self.sources, self.max_model_len = runner, planner, sources, max_model_len
        # Runs whole rounds in C++; None: Python runs every step
        self.rounds: NativeRounds | None = NativeRounds(runner, sources)

    def run(
        self, requests: Sequence[Request], others_wait: bool, clock: StageClock, meanwhile: Callable[[], None]
    ) -> HostExecution:
        if self.rounds is not None and (execution := self.rounds.next(requests)) is not None:
            self.planner.round = execution.planned
            self.planner.count_pauses()
            return execution
        execution = self.plan(requests, others_wait, clock)
        if self.rounds is not None and (ran := self.rounds.run(execution, self.max_model_len, clock)) is not None:
            return ran
        began = clock.mark()
        self.propose(execution, clock)
        self.forward(execution, clock)
        self.verify(execution, clock)
        self.commit(execution, clock)
        if self.rounds is not None and self.rounds.has_declined:  # the planner's costs exclude the declined call
            execution.seconds, _ = clock.since(began, execution.drafted.read_seconds)
        return execution

    def serves(self, request: Request) -> bool:
        return True

    def expects_ssms(self, requests: Sequence[Request]) -> bool:
        return self.planner.expects_ssms(requests)

    def plan(self, requests: Sequence[Request], others_wait: bool, clock: StageClock) -> HostExecution:
        """Let the planner limit the trees."""
        clock.enter("merge")
        if (plans := self.planner.last_plans(requests, self.max_model_len, others_wait)) is None:
            unread = self.sources.ssms.unread if self.sources.ssms is not None else None
            plans = self.planner.draft_plans(requests, self.max_model_len, unread, others_wait)
        return HostExecution(requests, plans, self.planner, self.planner.round)

    def propose(self, execution: HostExecution, clock: StageClock) -> None:
        """Draft with every source, and merge the proposals into one tree per request, cut to the nodes worth verifying.

        Model-free sources and cross-tokenizer drafts propose first; the SSMs then extend the merged proposals.
        """
        ssms, planner = self.sources.ssms, self.planner
        requests, plans = execution.requests, execution.plans
        forced = [forced_tree(r, plan.max_depth, self.max_model_len) for r, plan in zip(requests, plans, strict=True)]
        if not any(plan.max_depth or plan.levels for plan in plans) and all(len(tree) == 1 for tree in forced):
            execution.trees = forced
            return
        ids, depths = [request.request_id for request in requests], [plan.max_depth for plan in plans]
        for source in self.sources.others:
            clock.enter(source.stage)
            execution.add(source.propose(requests, depths, planner.least_value))
        clock.enter("merge")
        merged = []
        for request, tree in zip(requests, forced, strict=True):
            try:
                merged.append(merge_proposals(request, [tree, *execution.trees_of(request)]))
            except DraftError as error:
                execution.failures.setdefault(request, error)
                merged.append(tree)
        if ssms is not None:
            clock.enter("draft")
            merged = ssms.propose(requests, plans, planner.level_rule(), merged)
            clock.enter("merge")
            execution.drafted = ssms.drafted
            if execution.drafted.levels:
                execution.add(Proposals(dict(zip(ids, merged, strict=True)), ssms.commit))
        cut = planner.cut(requests, merged)
        # Fixed trees may be filled up with nodes of probability 0, which a restriction may forbid.
        execution.trees = [_pruned(request, tree) for request, tree in zip(requests, cut, strict=True)]
        if ssms is not None:
            rows = zip(requests, plans, execution.trees, strict=True)
            execution.reading = [r for r, plan, tree in rows if plan.levels and len(tree) == 1 and ssms.unread(r)]

    def forward(self, execution: HostExecution, clock: StageClock) -> None:
        """Run one target pass over all nodes of all requests. A request with non-finite logits fails alone.

        A drafted token may overflow where the target's own tokens would not, and its NaN reaches other nodes as
        0 * NaN. Such a tree is therefore dropped, and its root is recomputed on zeroed slots, as in plain decoding.
        Under "rejection" and "traversal" this conditions on the drawn tokens; it is the only case that changes their
        distribution.
        """
        clock.enter("forward")
        requests, trees = execution.requests, execution.trees
        execution.choices = choices = self.runner.forward(requests, trees)
        for i, request in enumerate(requests):
            request.target_passes += 1
            if not choices[i].finite and len(trees[i]) > 1:
                request.nodes_verified += len(trees[i])
                self.runner.cache.scrub_slots(0, request.pages, request.context_len, len(trees[i]))
                trees[i] = TokenTree.root(request.tokens[-1])
                [choices[i]] = self.runner.forward([request], [trees[i]])
                request.target_passes += 1
            if not choices[i].finite:
                request.nodes_verified += len(trees[i])
                error = f"the target computed NaN or infinity at position {request.context_len}"
                execution.failed.append((request, RequestError(error)))
        if self.runner.captured is not None and self.runner.captured.has_captured:
            execution.updates_planner = False

    def verify(self, execution: HostExecution, clock: StageClock) -> None:
        """Apply each request's verification rule. A request that raises RequestError fails alone."""
        clock.enter("verify")
        for request, tree, choices in zip(execution.requests, execution.trees, execution.choices, strict=True):
            if not choices.finite:
                continue
            try:
                path, bonus = verify_request(request, tree, choices)
            except RequestError as error:
                request.nodes_verified += len(tree)
                # Its traceback would keep the round's tensors as long as the request.
                execution.failed.append((request, error.with_traceback(None)))
                continue
            logits = None
            if request.params.logprobs is not None:  # a chain's rows need no copy
                is_chain = path[-1] == len(path) - 1
                logits = choices.logits[: len(path)] if is_chain else choices.logits[path.tolist()]
            tokens = [*tree.tokens[path[1:]].tolist(), bonus] if len(path) > 1 else [bonus]
            execution.verified.append(verified := VerifiedRequest(request, path, tokens, tree, logits))
            if choices.next_token is None:
                execution.uncompacted.append(verified)

    def commit(self, execution: HostExecution, clock: StageClock) -> None:
        """Compact the target's K/V to the paths that samplers chose, and commit recurrent states."""
        clock.enter("commit")
        if uncompacted := execution.uncompacted:
            pages = [verified.request.pages for verified in uncompacted]
            lengths = [verified.request.context_len for verified in uncompacted]
            self.runner.cache.commit_target(pages, lengths, [verified.path for verified in uncompacted])
        for verified in execution.verified:
            if verified.request.state is not None:
                verified.request.state.commit(verified.path)


def verify_request(request: Request, tree: TokenTree, choices: Choices) -> tuple[np.ndarray, int]:
    """Return the accepted path, int64 [1 + accepted], root first, and the token after it, by the request's rule."""
    sampler, path = request.sampler, choices.path
    if choices.next_token is not None:
        if sampler is not None:
            sampler.noise.forget(len(request.tokens) + len(path) - 1)
        return path, choices.next_token
    assert sampler is not None
    if request.draws_at_random and len(tree) > 1:
        return sampler.verify_drawn(request.spec.verification, tree, choices.logits, request.tokens)
    return sampler.walk(tree, choices.logits, request.tokens, request.tokens_left, path.tolist())


def merge_proposals(request: Request, trees: Sequence[TokenTree]) -> TokenTree:
    """Merge the proposals of all sources other than SSMs, without tokens that the request's restriction forbids.

    Trees of random draws cannot be cut, so if the merged tree exceeds the budget, only they are kept.

    Raises:
        DraftError: the draws alone exceed `spec.max_nodes`. Nothing has been written to the cache.
    """
    tree = _pruned(request, merge(trees))
    if tree.draw_rows is None or len(tree) <= request.spec.max_nodes:
        return tree
    tree = merge([drawn for drawn in trees if drawn.draw_rows is not None])
    if len(tree) > request.spec.max_nodes:
        raise DraftError(
            f"{', '.join(tree.source_names)} drew {len(tree)} nodes at random for request {request.request_id}, none "
            f"of which may be left out; nodes={request.spec.max_nodes} is the limit, the root included"
        )
    return tree


def _pruned(request: Request, tree: TokenTree) -> TokenTree:
    """Return the tree without the nodes that the request's restriction forbids."""
    return tree if request.restriction is None else request.restriction.prune(tree, request.tokens)


def forced_tree(request: Request, max_depth: int, max_model_len: int) -> TokenTree:
    """Return a chain of the tokens that the request's grammar forces next; only the root without forced tokens.

    `max_depth` limits fixed trees only: forced tokens cost nothing, so adaptive trees keep them while drafting pauses.
    """
    root = request.tokens[-1]
    grammar = request.restriction.grammar if request.restriction is not None else None
    if grammar is None or not request.spec.allows("grammar", "grammar"):
        return TokenTree.root(root)
    if request.spec.is_adaptive:
        max_depth = min(request.spec.max_depth, request.room(max_model_len))
    forced = grammar.forced(request.tokens)[:max_depth] if max_depth > 0 else []
    return TokenTree.from_parents([root, *forced], range(-1, len(forced)), 1.0, "grammar")
