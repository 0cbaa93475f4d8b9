"""The engine whose rounds run from captured graphs, for what they can serve; the rest goes step by step."""

import time
from collections.abc import Sequence

import numpy as np

from treespec.drafters.base import Drafter
from treespec.drafters.calls import may_draft
from treespec.drafters.lookup.lookup_drafter import LookupDrafter
from treespec.drafters.ssm.ssm_drafter import SsmDrafter
from treespec.engine import Engine, follow
from treespec.graphs.capture import Rounds
from treespec.graphs.graph_planner import PLAIN, RoundPlan, RoundPlanner
from treespec.graphs.round_inputs import MAX_ENDS, RoundInput
from treespec.graphs.verify_stage import RoundResult
from treespec.planning.planner import Planner
from treespec.request import Request
from treespec.round_record import RoundRecord
from treespec.runner import Runner
from treespec.scheduler import Scheduler
from treespec.tree import TokenTree

_LEAST_VALUE = 1e-6  # of a node; below is what only silent SSMs named


class GraphEngine(Engine):
    """An `Engine` with captured rounds.

    Args:
        runner, scheduler, planner, ssms, lookup, drafters, max_model_len: as the engine's.
        rounds: captured.
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
        rounds: Rounds,
    ):
        super().__init__(runner, scheduler, planner, ssms, lookup, drafters, max_model_len)
        self.rounds = rounds

    def step(self) -> list[Request]:
        """One round, from graphs where they can; what they cannot decide or do not know goes step by step."""
        batch = self.scheduler.next()
        self.prefill(batch)
        captured = [request for request in batch.decode if self.serves(request)]
        undecided = self.decode(captured)
        stepwise = [request for request in batch.decode if request in undecided or request not in captured]
        trees = self.propose(stepwise)
        scored = self.forward(stepwise, trees)
        decided = self.verify(scored)
        self.commit(decided)
        self.update(batch.decode)
        return batch.decode

    def expects_ssms(self) -> bool:
        """Always: what drafting takes in captured rounds the step-by-step planner does not learn."""
        return True

    def serves(self, request: Request) -> bool:
        """Whether captured rounds know all that a request asks for.

        The answer follows from its parameters alone, never from the batch: so all of its tokens are chosen one way.
        """
        params, spec = request.params, request.spec
        if params.transforms_logits or params.logprobs is not None or len(request.end_tokens) > MAX_ENDS:
            return False
        if request.is_sampled and params.truncates:
            return False
        if spec.is_plain:
            return True
        largest = self.rounds.limits.nodes[-1]
        if largest == 1 or (not spec.is_adaptive and spec.max_nodes > largest):
            return False  # the engine was built for smaller trees
        if any(may_draft(drafter, request) for drafter in self.drafters):
            return False
        return not (request.draws_at_random or spec.branching)

    def decode(self, requests: Sequence[Request]) -> list[Request]:
        """A captured round of these requests. Returns those whose target computed NaN or infinity: nothing of them was
        committed, and their slots are clean again."""
        if not requests:
            return []
        began = time.perf_counter()
        size = self.rounds.size_for(len(requests))
        planner = self.rounds.planners[size]
        plan, shapes = self._plan(requests, planner)
        if plan.levels:
            began += self._catch_up(requests, shapes)
        seeds = self._seeds(requests, [depth for depth, _ in shapes])
        if plan.levels and not self._has_sources(requests, shapes, seeds):
            plan, shapes = PLAIN, [(0, 1)] * len(requests)
        rows = zip(requests, shapes, seeds, strict=True)
        batch = self.rounds.round_for(size, max(request.context_len for request in requests))
        results = batch.run([self._input(request, *shape, seed) for request, shape, seed in rows], *plan)
        undecided, emitted = [], []
        for request, (depth, _), seed, result in zip(requests, shapes, seeds, results, strict=True):
            request.target_passes += 1
            request.nodes_verified += len(result.depths)
            if not result.tokens:
                self.cache.scrub_slots(0, request.pages, request.context_len, plan.nodes)
                undecided.append(request)
                emitted.append(0)
            else:
                emitted.append(self._emit(request, result, seed, drafted=depth > 0))
        speculated = [r for r, (depth, _) in zip(results, shapes, strict=True) if depth and r.tokens]
        trees = [(result.values, result.depths) for result in speculated]
        accepted = [len(result.tokens) - 1 for result in speculated]
        seconds = time.perf_counter() - began
        planner.observe(plan, trees, accepted, seconds)
        if self.observers and any(emitted):
            read = batch.trees(len(requests), plan.nodes)
            names = self.ssms.names if self.ssms is not None else ()
            for request, result, count, tree, seed in zip(requests, results, emitted, read, seeds, strict=True):
                if count:
                    whole, bonus = tree.token_tree(names, seed), result.tokens[-1]
                    self.observers.notify(RoundRecord.of(request, whole, tree.path, bonus, count, seconds))
        return undecided

    def _has_sources(
        self, requests: Sequence[Request], shapes: Sequence[tuple[int, int]], seeds: Sequence[TokenTree | None]
    ) -> bool:
        """Whether anybody has anything to propose."""
        ssms = self.ssms
        drafting = [request for request, (depth, _) in zip(requests, shapes, strict=True) if depth]
        return any(seed is not None for seed in seeds) or (ssms is not None and any(map(ssms.may_draft, drafting)))

    def _plan(self, requests: Sequence[Request], planner: RoundPlanner) -> tuple[RoundPlan, list[tuple[int, int]]]:
        """The round's plan, and the depth and nodes of each request's tree in it."""
        depths, fixed, free = [], [PLAIN], []
        for request in requests:
            deepest = 0 if request.spec.is_plain else min(request.spec.max_depth, self.rounds.limits.max_depth)
            depth = max(min(deepest, request.room(self.max_model_len)), 0)
            depths.append(depth)
            if depth and request.spec.is_adaptive:
                free.append(depth)
            elif depth:
                most = request.spec.max_nodes
                fixed.append(RoundPlan(min(depth, most - 1), planner.fitting(most)))
        chosen = planner.choose(max(free), self.rounds.limits.nodes[-1]) if free else PLAIN
        plan = RoundPlan(*(max(parts) for parts in zip(chosen, *fixed, strict=True)))
        shapes = []
        for request, depth in zip(requests, depths, strict=True):
            most = chosen.nodes if request.spec.is_adaptive else request.spec.max_nodes
            speculates = depth > 0 and most > 1
            shapes.append((min(depth, plan.levels, most - 1), most) if speculates else (0, 1))
        return plan, shapes

    def _catch_up(self, requests: Sequence[Request], shapes: Sequence[tuple[int, int]]) -> float:
        """Let the SSMs read what they have missed. Returns how long that took, in seconds: a prompt, or what rounds
        without drafts have emitted, is read once, so it says nothing of what drafting takes in every round."""
        if self.ssms is None:
            return 0.0
        began = time.perf_counter()
        drafting = [request for request, (depth, _) in zip(requests, shapes, strict=True) if depth]
        if self.ssms.catch_up(drafting, self.rounds.limits.width):
            self.runner.wait()
        return time.perf_counter() - began

    def _seeds(self, requests: Sequence[Request], depths: Sequence[int]) -> list[TokenTree | None]:
        """What sources without a pass propose."""
        if self.lookup is None:
            return [None] * len(requests)
        trees = self.lookup.propose(requests, depths, _LEAST_VALUE)
        return [tree if len(tree) > 1 else None for tree in trees]

    def _input(self, request: Request, depth: int, nodes: int, seeds: TokenTree | None) -> RoundInput:
        sampler, spec = request.sampler, request.spec
        temperature = sampler.temperature if sampler is not None else 0.0
        weights, new = np.zeros(0), request.tokens[-1:]
        if self.ssms is not None and depth and self.ssms.may_draft(request):
            weights, new = self.ssms.round_weights(request), request.tokens[self.ssms.first_unread(request) :]
        return RoundInput(
            request.context_len,
            new,
            request.pages,
            request.end_tokens,
            temperature,
            temperature if spec.verification == "coupled" else 0.0,
            sampler.noise.seed if sampler is not None else 0,
            request.sample,
            weights,
            seeds,
            depth,
            nodes,
            _LEAST_VALUE,
        )

    def _emit(self, request: Request, result: RoundResult, seeds: TokenTree | None, drafted: bool) -> int:
        """Take over what a round made of a request. Returns how many tokens it emitted."""
        tokens = request.accept(result.tokens)
        path = np.zeros(1, dtype=np.int64) if seeds is None else follow(seeds, tokens)
        if drafted:
            named = enumerate(result.sources[: len(tokens)], start=1)
            request.count_accepted([self._sources(bits, seeds, path, depth) for depth, bits in named])
            if self.ssms is not None:
                self.ssms.learn_round(request, result.foretold)
        if seeds is not None and self.lookup is not None:
            self.lookup.commit([request], [path])
        request.tokens.extend(tokens)
        request.context_len += len(tokens)
        request.num_rounds += 1
        return len(tokens)

    def _sources(self, bits: int, seeds: TokenTree | None, path: np.ndarray, depth: int) -> tuple[str, ...]:
        """Who proposed the token at `depth`: the device has a bit for each SSM, and one for all seeds."""
        names = self.ssms.names if self.ssms is not None else ()
        own = tuple(name for i, name in enumerate(names) if bits >> i & 1)
        if seeds is None or not bits >> len(names) & 1:
            return own
        return (*own, *seeds.sources_of(int(path[depth])))
