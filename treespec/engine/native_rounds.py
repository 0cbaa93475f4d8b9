"""Runs several rounds on a CPU in one C++ call, ahead of the engine.

C++ runs the next rounds of a batch one after another, with the planner's decisions for the first one. The engine then
commits them, learns from them and reports them one by one. A pass over the weights evicts Python's code and objects
from the processor's caches; several rounds per call reload them once.
"""

import copy
import ctypes
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from treespec.drafters.base import Proposals
from treespec.drafters.draft_sources import DraftSources
from treespec.drafters.evidence import MAX_PROB, MIN_PROB, SeedEvidence
from treespec.drafters.lookup.lookup_drafter import SEARCH_WINDOW, LookupDrafter, found_tree
from treespec.drafters.ssm.catch_up import MIN_LAG
from treespec.drafters.ssm.compiled_growth import CompiledGrowth, GrowthBatch
from treespec.drafters.ssm.forest import TreeLimits
from treespec.engine.executor import StageClock, VerifiedRequest
from treespec.engine.runner import Runner, walk_rule
from treespec.planning.draft_plan import Drafted
from treespec.planning.planner import EXPLORE_ROWS, Planner
from treespec.planning.round_costs import RoundSeconds
from treespec.request import Request
from treespec.tree import TokenTree
from treespec_kernels.cpu.compiled_plan import kv_pools
from treespec_kernels.cpu.cpu_library import address_of, packed
from treespec_kernels.cpu.growth_cpu import STRUCTS
from treespec_kernels.cpu.lookup_cpu import MATCHES, PAST_MATCHES, Matches
from treespec_kernels.tree.growth_limits import SEEDS

if TYPE_CHECKING:
    from treespec.engine.host_executor import HostExecution

MOST_ROUNDS = 8  # maximum number of rounds in a call
MOST_PAUSED = 64  # maximum number of rounds by the host's steps before C++ is tried again
AHEAD_SECONDS = 0.04  # expected time of a call, after which a stream gets the tokens of its rounds together

_BROKEN = 2  # `Rounds.declined` if an SSM's probabilities are not finite


class _Place(NamedTuple):
    """Progress of a request; rounds that C++ ran from another place are discarded."""

    context_len: int
    num_preemptions: int


class _Round(NamedTuple):
    """A round that C++ has run and the engine has not committed."""

    places: list[_Place]  # by request, before the round
    execution: "HostExecution"
    resumed: list["_Resumed"]


class _Resumed(NamedTuple):
    """Arguments of `SsmDrafter.resume` for a request for which SSMs drafted."""

    request: Request
    tree: TokenTree
    seed_tree: TokenTree
    scores: dict[int, tuple[np.ndarray, np.ndarray]]


class _Reader:
    """Reads the numbers that C++ recorded, in order."""

    def __init__(self, call: Any) -> None:
        self._ints = np.frombuffer(ctypes.string_at(call.ints, 8 * call.num_ints), np.int64)
        self._doubles = np.frombuffer(ctypes.string_at(call.doubles, 8 * call.num_doubles), np.float64)
        self._first_int = self._first_double = 0

    @property
    def has_round(self) -> bool:
        """Whether another round follows."""
        return bool(self._ints[self._first_int] >= 0)

    def ints(self, rows: int, columns: int) -> np.ndarray:
        """Return the next int64 numbers, [rows, columns]."""
        first, self._first_int = self._first_int, self._first_int + rows * columns
        return self._ints[first : self._first_int].reshape(rows, columns)

    def doubles(self, rows: int, columns: int) -> np.ndarray:
        """Return the next float64 numbers, [rows, columns]."""
        first, self._first_double = self._first_double, self._first_double + rows * columns
        return self._doubles[first : self._first_double].reshape(rows, columns)


class NativeRounds:
    """Runs rounds whose steps are all compiled: lookup, SSMs, the target's pass, and a walk that returns no logits.

    Other requests, sources and models take the steps of `HostExecutor`, as do rounds that C++ declines.
    """

    def __init__(self, runner: Runner, sources: DraftSources, most_rounds: int = MOST_ROUNDS):
        self.runner, self.sources, self.most_rounds = runner, sources, most_rounds
        self._without_ssms = CompiledGrowth(["ssm"], SeedEvidence())
        self._ahead = deque[_Round]()
        self._batch: Sequence[Request] = ()  # the requests of these rounds
        self._seconds = 0.0  # mean duration of these rounds
        self.has_declined = False  # whether C++ has just declined a round
        # Number of rounds that Python runs after C++ has declined one; it doubles each time
        self._pause_left = self._pause = 0

    @property
    def _lookup(self) -> LookupDrafter | None:
        return next((source for source in self.sources.others if isinstance(source, LookupDrafter)), None)

    def next(self, requests: Sequence[Request]) -> "HostExecution | None":
        """Return the next round that C++ has run, of all or some of these requests; None if there is none.

        Requests that joined the batch since then wait for the rounds ahead, which are already computed.
        """
        if not self._ahead:
            return None
        batch = [request for request in requests if request in self._batch]
        if batch != self._batch or _places(batch) != self._ahead[0].places:
            self._ahead.clear()
            return None
        _, execution, resumed = self._ahead.popleft()
        for arguments in resumed:
            assert self.sources.ssms is not None
            self.sources.ssms.resume(*arguments)
        if (lookup := self._lookup) is not None:
            lookup.count_round(batch, [plan.max_depth for plan in execution.plans])
        for verified in execution.verified:
            request = verified.request
            request.target_passes += 1
            if request.sampler is not None:
                request.sampler.noise.forget(len(request.tokens) + len(verified.path) - 1)
        return execution

    def run(self, execution: "HostExecution", max_model_len: int, clock: StageClock) -> "HostExecution | None":
        """Run a planned round, and maybe further ones; return it, or None if `HostExecutor` must run its steps."""
        self._ahead.clear()
        self.has_declined = False
        if self._pause_left:
            self._pause_left -= 1
            return None
        began = clock.now()
        if (prepared := self._prepare(execution, max_model_len)) is None:
            return None
        call, growth, _ = prepared
        clock.enter("forward")
        called = clock.now()
        assert self.runner.target.growth is not None
        self.runner.target.growth.treespec_rounds(ctypes.byref(call))
        clock.enter("merge")
        returned = clock.now()
        execution.planner.num_cuts, self._batch = call.num_cut, list(execution.requests)
        self._read(execution, call, growth, clock)
        self._pause = min(2 * self._pause or 1, MOST_PAUSED) if call.declined else 0
        self.has_declined = not self._ahead
        self._pause_left = self._pause - self.has_declined
        self._seconds = (returned - called) / max(len(self._ahead), 1)
        if self.has_declined:
            return None
        read, reading = self._ahead[0].execution.drafted, 0.0
        if (ssms := self.sources.ssms) is not None and growth is ssms.growth:
            read.read_tokens, read.read_seconds = ssms.drafted.read_tokens, (reading := ssms.drafted.read_seconds)
            clock.move("merge", draft=reading)
        host = (clock.now() - began - (returned - called) - reading) / len(self._ahead)
        for _, ran, _ in self._ahead:
            assert ran.seconds is not None
            ran.seconds = ran.seconds._replace(read=ran.drafted.read_seconds, host=ran.seconds.host + host)
        return self.next(execution.requests)

    def _prepare(self, execution: "HostExecution", max_model_len: int) -> tuple[Any, CompiledGrowth, Any] | None:
        """Return a call's arguments, the growth of its trees and owners of their memory; None if C++ cannot run it."""
        requests, plans, planner, ssms = execution.requests, execution.plans, execution.planner, self.sources.ssms
        if (
            (lookup := self._lookup) is None
            or any(plan.branching for plan in plans)
            or not all(map(_is_native, requests))
        ):
            return None
        for source in self.sources.others:
            asked = [request for request, plan in zip(requests, plans, strict=True) if plan.max_depth]
            if source is not lookup and any(map(source.may_draft, asked)):
                return None
        rounds, depths = self._count(requests, planner), [plan.max_depth for plan in plans]
        most_new = 1 + max(max(plan.max_depth, plan.levels) for plan in plans)  # tokens that a round adds
        most_rows = sum(plan.nodes for plan in plans)
        most_found = 1 + (MATCHES + PAST_MATCHES) * max(depths)
        num_positions = max(request.context_len for request in requests) + rounds * most_new + most_rows
        if (arguments := self.runner.round_arguments(num_positions)) is None:
            return None
        rule, growth, models, pools = planner.level_rule(), self._without_ssms, None, None
        if ssms is not None and any(plan.levels and ssms.allowed(r) for r, plan in zip(requests, plans, strict=True)):
            models = ssms.prepare_rounds(requests, plans, rule, num_positions, len(requests) * most_found)
            if models is None:
                return None
            growth, pools = ssms.growth, kv_pools([self.runner.cache.pools[1 + draft.ssm] for draft in models.drafts])
        else:
            roots = [TokenTree.root(request.tokens[-1]) for request in requests]
            limits = [TreeLimits(0, plan.nodes, None, r.end_tokens) for r, plan in zip(requests, plans, strict=True)]
            adaptive = [plan.adaptive for plan in plans]
            weights = [np.ones(1)] * len(requests)
            growth.prepare(None, (), GrowthBatch(requests, roots, limits, weights, adaptive, rule))
        searches = lookup.prepare_rounds(requests, depths, planner.least_value, rounds, most_new)
        if searches is None:
            return None
        seconds = planner.costs.verify_each(np.arange(most_rows + 1))
        numbers, addresses = packed(
            searches.searched,
            [walk_rule(request, request.draws_at_random) for request in requests],
            [self.runner.target.config.first_rotation(request.max_len) for request in requests],
            depths,
            [request.room(max_model_len) for request in requests],
            [request.reserved_len for request in requests],
            searches.texts,
        )
        names = "searched", "rules", "first_rotations", "search_depths", "room", "reserved", "texts"
        call = STRUCTS["Rounds"](
            num_rounds=rounds,
            lookup=searches.function,
            searches=ctypes.addressof(searches.structs),
            most_found=most_found,
            window=SEARCH_WINDOW,
            max_seeds=SEEDS,
            trees=ctypes.addressof(growth.trees),
            drafts=None if models is None else ctypes.addressof(models.drafts),
            draft_pools=None if pools is None else ctypes.addressof(pools),
            max_lag=MIN_LAG,
            rule=ctypes.addressof(growth.rule),
            first_gain=rule.first_gain,
            start_cost=rule.start_cost,
            rate=planner.rate,
            seconds=address_of(seconds, np.float64),
            num_cut=planner.num_cuts,
            explore=EXPLORE_ROWS,
            bias=growth.evidence.bias,
            slope=growth.evidence.slope,
            least_prob=MIN_PROB,
            most_prob=MAX_PROB,
            **arguments,
            **dict(zip(names, addresses, strict=True)),
        )
        return call, growth, (searches, numbers, seconds, pools)

    def _count(self, requests: Sequence[Request], planner: Planner) -> int:
        """Return the number of rounds to run: one for a first token, otherwise those that fit into AHEAD_SECONDS."""
        if not all(request.num_rounds for request in requests):
            return 1
        seconds = self._seconds if requests == self._batch else planner.costs.plain
        return max(min(self.most_rounds, int(AHEAD_SECONDS / max(seconds, 1e-6))), 1)

    def _read(self, execution: "HostExecution", call: Any, growth: CompiledGrowth, clock: StageClock) -> None:
        """Read the rounds that C++ has run."""
        requests, reader, places = execution.requests, _Reader(call), _places(execution.requests)
        roots = [request.tokens[-1] for request in requests]
        while reader.has_round:
            [[decided, levels, passes, tree_passes]] = reader.ints(1, 4).tolist()
            searches, verified, resumed = dict[str, tuple[TokenTree, Matches]](), list[VerifiedRequest](), []
            for i, request in enumerate(requests):
                [[drafts, found, nodes, draws, kept, length]] = reader.ints(1, 6).tolist()
                tree = seed_tree = TokenTree.root(roots[i])
                if found:
                    ints, floats = reader.ints(7, found), reader.doubles(2, found)
                    matches = Matches(ints[3:5], ints[5:])
                    tree = seed_tree = found_tree([*ints[:3], *floats], matches)
                    searches[request.request_id] = seed_tree, matches
                if nodes:
                    tree = _grown(reader, nodes, draws, growth.names + seed_tree.source_names)
                chosen = reader.ints(1, kept)[0]
                [path], [tokens] = reader.ints(1, length), reader.ints(1, length).tolist()
                if not length:  # NaN in K/V must not reach later rounds, or the next owner of these slots
                    self.runner.cache.scrub_slots(0, request.pages, places[i].context_len, kept)
                cut = tree if kept == len(tree.tokens) else tree.keep(chosen)
                verified.append(VerifiedRequest(request, path, tokens, cut))
                if drafts:
                    resumed.append(_Resumed(request, tree, seed_tree, self._scores(request, reader) if decided else {}))
            [[draft, forward, walk, whole]] = reader.doubles(1, 4).tolist()
            if not decided:
                break
            proposals = [lookup.proposals(searches)] if searches and (lookup := self._lookup) is not None else []
            if self.sources.ssms is not None and resumed:
                trees = {of.request.request_id: of.tree for of in resumed}
                proposals.append(Proposals(trees, partial(self.sources.ssms.commit, is_moved=True)))
            ran = copy.copy(execution)
            ran.verified, ran.proposals, ran.drafted = verified, proposals, Drafted(levels, passes, tree_passes)
            ran.seconds = RoundSeconds(draft, 0.0, forward, whole - draft - forward)
            clock.move("forward", draft=draft, verify=walk, merge=ran.seconds.host)
            self._ahead.append(_Round(places, ran, resumed))
            roots = [result.tokens[-1] for result in verified]
            places = [
                _Place(place.context_len + len(result.path), place.num_preemptions)
                for place, result in zip(places, verified, strict=True)
            ]
        if call.declined == _BROKEN:
            for index in growth.broken:
                requests[index].poisoned = True

    def _scores(self, request: Request, reader: _Reader) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Read the SSMs' probabilities of committed tokens, if there are several SSMs."""
        ssms, scores = self.sources.ssms, dict[int, tuple[np.ndarray, np.ndarray]]()
        assert ssms is not None
        for ssm in ssms.state(request).active if len(ssms.models) > 1 else ():
            [[read, accepted]] = reader.ints(1, 2).tolist()
            probs = reader.doubles(1, read + accepted)[0].astype(np.float32)
            scores[ssm] = probs[:read], probs[read:]
        return scores


def _places(requests: Sequence[Request]) -> list[_Place]:
    return [_Place(request.context_len, request.num_preemptions) for request in requests]


def _is_native(request: Request) -> bool:
    """Return whether C++ can verify a request's trees: the host needs no logits, and there is no adapter."""
    is_walked = walk_rule(request, request.draws_at_random) >= 0 and request.params.logprobs is None
    return is_walked and request.adapter is None and request.restriction is None


def _grown(reader: _Reader, nodes: int, draws: int, names: tuple[str, ...]) -> TokenTree:
    """Read a tree grown by an SSM."""
    tokens, parents, depths, slots = reader.ints(4, nodes)
    drawn, sources = reader.ints(2, draws)
    (probs, values), [draw_probs] = reader.doubles(2, nodes), reader.doubles(1, draws)
    tree = TokenTree(tokens, parents, depths, probs, drawn, sources, draw_probs, names, slots=slots)
    return tree.with_values(values)
