"""The graph executor: runs whole rounds on the device by replaying CUDA graphs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from treespec.drafters.draft_sources import DraftSources
from treespec.drafters.ssm.captured_ssms import CapturedSsms
from treespec.engine.executor import DeviceExecutor, Execution, StageClock, VerifiedRequest
from treespec.engine.runner import Runner
from treespec.graphs.batch_round import BatchRound
from treespec.graphs.capture import Rounds
from treespec.graphs.round_inputs import MAX_ENDS, RoundInput
from treespec.graphs.sampling_state import RequestTransforms
from treespec.graphs.verify_stage import MAX_LOGPROBS, RoundResult
from treespec.models.adapter_slots import NO_ADAPTER
from treespec.models.triton_decoder import TritonDecoder
from treespec.planning.draft_plan import Drafted, DraftPlan
from treespec.planning.planner import PLAIN
from treespec.planning.round_costs import RoundSeconds
from treespec.request import Request
from treespec.sampling.transforms import runs_by_kernels
from treespec.tree import TokenTree, merge
from treespec_kernels.tree.growth_limits import SEEDS

LEAST_VALUE = 1e-6  # minimum node value; only SSMs with weight 0 propose nodes below it
STEADY_ROUNDS = 4  # rounds of the same requests before rounds are launched ahead


@dataclass
class GraphExecution(Execution):
    """A round computed on the device."""

    began: float = 0.0  # start time of planning
    seed_trees: list[TokenTree | None] = field(default_factory=list)  # proposals of model-free sources
    batch: BatchRound = field(init=False)
    results: Callable[[], list[RoundResult]] = field(init=False)  # waits for the device; results by request
    runs_ahead: bool = False  # whether the next target pass is launched; it replays the tokens committed in this one
    host_seconds: float = 0.0  # seconds that the device waited for the launch
    decided: list[RoundResult] = field(default_factory=list)  # results of this round


class GraphExecutor(DeviceExecutor):
    """Runs captured rounds for the requests whose parameters they support."""

    def __init__(self, runner: Runner, sources: DraftSources, rounds: Rounds, max_model_len: int):
        self.runner, self.sources, self.rounds, self.max_model_len = runner, sources, rounds, max_model_len
        self.ssms = None if sources.ssms is None else CapturedSsms(sources.ssms)
        self._launched: GraphExecution | None = None  # the round that the next `run` ends
        self._steady, self._last = 0, list[Request]()  # number of rounds since the batch changed, and the batch
        self._waited: float | None = None  # arrival time of the last round's results, for a `launch` in the same step

    def serves(self, request: Request) -> bool:
        params, spec = request.params, request.spec
        if not runs_by_kernels(params) or len(request.end_tokens) > MAX_ENDS:
            return False
        if params.logprobs is not None and not 0 <= params.logprobs <= MAX_LOGPROBS:
            return False
        if request.num_replayed > self.rounds.limits.width:
            return False  # step by step, a deeper tree was accepted than a captured round can replay
        if spec.is_plain:
            return True
        largest = self.rounds.limits.nodes[-1]
        if largest == 1 or (not spec.is_adaptive and spec.max_nodes > largest):
            return False  # the engine was built for smaller trees
        if any(source.may_draft(request) for source in self.sources.others if not source.is_captured):
            return False
        return not (request.draws_at_random or spec.branching)

    def expects_ssms(self, requests: Sequence[Request]) -> bool:
        """Return True: drafting is a small part of a captured round, so SSMs prefill every prompt."""
        return True

    def run(
        self, requests: Sequence[Request], others_wait: bool, clock: StageClock, meanwhile: Callable[[], None]
    ) -> GraphExecution:
        self._waited = None
        if self._launched is None:
            self.launch(requests, others_wait, clock)
        execution, self._launched = self._launched, None
        assert execution is not None
        clock.enter("merge")
        meanwhile()
        self._launch_following(execution, others_wait)
        self.verify(execution, clock)
        self.commit(execution, clock)
        return execution

    def launch(self, requests: Sequence[Request], others_wait: bool, clock: StageClock) -> None:
        assert self._launched is None, "a round is in flight"
        execution = self.plan(list(requests), others_wait, clock)
        self.propose(execution, clock)
        self.forward(execution, clock)
        self._launched = execution

    def plan(self, requests: Sequence[Request], others_wait: bool, clock: StageClock) -> GraphExecution:
        """Let the planner of the batch's size limit the trees."""
        began = clock.now()
        clock.enter("merge")
        planner = self.rounds.planners[self.rounds.size_for(len(requests))]
        plans = planner.draft_plans(requests, self.max_model_len, others_wait=others_wait)
        return GraphExecution(requests, plans, planner, planner.round, overlaps=True, began=began)

    def propose(self, execution: GraphExecution, clock: StageClock) -> None:
        """Let the SSMs read missing tokens, and launch the draft levels over the other sources' proposals."""
        requests = execution.requests

        def search() -> Sequence[TokenTree | None]:
            if not execution.seed_trees:
                execution.seed_trees = self._search(execution)
            return execution.seed_trees

        read_seconds = 0.0
        if drafting := [request for request, plan in zip(requests, execution.plans, strict=True) if plan.levels]:
            clock.enter("draft")
            read_seconds = self._catch_up(drafting, clock)
            if (ssms := self.sources.ssms) is None or not any(map(ssms.may_draft, drafting)):
                clock.enter("search")  # otherwise the search overlaps with the first level
                if not any(search()):
                    execution.plans, drafting = [PLAIN] * len(requests), []
            clock.enter("merge")
        levels, nodes = (max(getattr(plan, limit) for plan in execution.plans) for limit in ("levels", "nodes"))
        execution.rows = self.rounds.limits.fitting(nodes)
        execution.drafted = Drafted(levels, levels, levels, read_seconds=read_seconds)
        rows = zip(
            requests, execution.plans, self._slots(requests), self.rounds.sampling.rows_of(requests), strict=True
        )
        inputs = [self._input(*row) for row in rows]
        size, context = self.rounds.size_for(len(requests)), max(request.context_len for request in requests)
        execution.batch = self.rounds.round_for(size, context)
        logprobs = any(request.params.logprobs is not None for request in requests)
        execution.batch.draft(inputs, levels, execution.rows, logprobs, search if drafting else None)
        execution.seed_trees = execution.seed_trees or [None] * len(requests)

    def forward(self, execution: GraphExecution, clock: StageClock) -> None:
        """Launch the target pass, verification and commit."""
        batch, read_seconds = execution.batch, execution.drafted.read_seconds
        execution.results = batch.verify()
        if batch.has_captured:
            execution.updates_planner = False
        if not batch.has_followed:  # otherwise the device did not wait, or waited between draft levels
            began = execution.began if self._waited is None else self._waited
            execution.host_seconds = clock.now() - began - read_seconds

    def verify(self, execution: GraphExecution, clock: StageClock) -> None:
        """Wait for the accepted paths, and divide the waiting time among the stages."""
        began = clock.now()
        execution.decided = execution.results()
        self._waited = clock.now()
        clock.enter("commit")
        draft, forward = execution.batch.seconds()
        execution.seconds = RoundSeconds(draft, execution.drafted.read_seconds, forward, execution.host_seconds)
        waited = min((self._waited - began) / max(draft + forward, 1e-9), 1.0)  # the rest passed in other stages
        clock.move("merge", draft=waited * draft, forward=waited * forward)

    def commit(self, execution: GraphExecution, clock: StageClock) -> None:
        """Record the committed results. Requests with NaN or infinity stay undecided, with their slots zeroed."""
        rows = zip(execution.requests, execution.plans, execution.seed_trees, execution.decided, strict=True)
        for request, plan, seed_tree, result in rows:
            if request.finished:  # finished while the device computed; the planner ignores such rounds
                execution.updates_planner = False
                continue
            request.target_passes += 1
            if request.state is not None:
                request.state.length = request.context_len + (len(result.path) if execution.runs_ahead else 0)
            if not len(result.path):
                assert execution.rows is not None
                request.nodes_verified += result.num_nodes
                self.runner.cache.scrub_slots(0, request.pages, request.context_len, execution.rows)
                execution.undecided.append(request)
                continue
            captured, score_ssms = self.ssms, None
            build_tree = partial(result.tree, () if captured is None else captured.ssms.names, seed_tree)
            if captured is not None and plan.levels:
                grown_over = seed_tree if captured.ssms.may_draft(request) else None
                score_ssms = captured.end_round(request, result.read_probs, grown_over)
            execution.verified.append(
                VerifiedRequest(request, result.path, result.tokens, build_tree, None, result.logprobs, score_ssms)
            )

    def _launch_following(self, execution: GraphExecution, others_wait: bool) -> None:
        """Launch the beginning of the next round if it is likely to have the same requests.

        If a launched plain round has other requests, it is lost, so some rounds of the same requests must precede it.
        """
        requests, batch = list(execution.requests), execution.batch
        for request in requests:
            request.runs_ahead = False
        self._steady = self._steady + 1 if requests == self._last else 0
        self._last = requests
        max_new_tokens = self.rounds.limits.width if execution.drafted.levels else 1  # maximum tokens of this round
        if others_wait or self._steady < STEADY_ROUNDS:
            return
        if any(request.finished or request.tokens_left <= max_new_tokens for request in requests):
            return
        if any(request.reserved_len <= len(request.tokens) + max_new_tokens for request in requests):
            return  # its pages change before the next round
        size, context = self.rounds.size_for(len(requests)), max(request.context_len for request in requests)
        if self.rounds.round_for(size, min(context + max_new_tokens, self.max_model_len)) is batch:
            execution.runs_ahead = batch.launch_following()
            for request in requests:
                request.runs_ahead = True

    def drop_finished(self) -> None:
        if self._launched is not None:
            if all(request.finished for request in self._launched.requests):
                self._launched.results()
                self._launched = None
        elif any(request.runs_ahead for request in self._last) and all(request.finished for request in self._last):
            self._last = []
            self.runner.wait()

    def _catch_up(self, requests: Sequence[Request], clock: StageClock) -> float:
        """Prefill the SSMs with prompts or the output of plain rounds; return the seconds, 0 if nothing was missing."""
        ssms, began = self.ssms, clock.now()
        if ssms is None or not requests or not ssms.catch_up(requests, self.rounds.limits.width):
            return 0.0
        self.runner.wait()
        return clock.now() - began

    def _search(self, execution: GraphExecution) -> list[TokenTree | None]:
        """Return and record the proposals of the sources other than SSMs, None for empty ones."""
        requests, depths = execution.requests, [plan.max_depth for plan in execution.plans]
        for source in self.sources.others:
            execution.add(source.propose(requests, depths, LEAST_VALUE))
        by_request = [[tree for tree in execution.trees_of(request) if len(tree) > 1] for request in requests]
        return [merge(trees).best(1 + SEEDS) if trees else None for trees in by_request]

    def _slots(self, requests: Sequence[Request]) -> list[int]:
        """Return the slots of the requests' adapters."""
        if all(request.adapter is None for request in requests):
            return [NO_ADAPTER] * len(requests)
        assert isinstance(self.runner.target, TritonDecoder)
        return self.runner.target.kernels.slots_of([request.adapter for request in requests])

    def _input(
        self, request: Request, plan: DraftPlan, adapter: int, transforms: RequestTransforms | None
    ) -> RoundInput:
        sampler, spec, captured = request.sampler, request.spec, self.ssms
        temperature = sampler.temperature if sampler is not None else 0.0
        weights, new = np.zeros(0), request.tokens[-1:]
        if captured is not None and plan.levels and captured.ssms.may_draft(request):
            weights, new = captured.weights(request), request.tokens[captured.first_unread(request) :]
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
            plan.levels,
            plan.nodes if plan.levels else 1,
            LEAST_VALUE,
            request.max_len,
            adapter,
            0 if request.state is None else request.state.slot,
            request.num_replayed,
            transforms,
        )
