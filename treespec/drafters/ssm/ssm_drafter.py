"""The SSM group: small speculative models that grow one token tree in lockstep.

At each depth all active SSMs score the whole frontier and propose their top tokens at each node. The next level is the
union of these and the other sources' proposals. A child's probability is the mixture of the SSMs' probabilities,
weighted by how well each SSM predicted the request's text so far.

The SSMs share one tree topology and one slot table, and each has the K/V of every expanded node, so only one or two
tokens are left to read after a commit. Inactive SSMs read the tokens that they missed less often.
"""

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from treespec.cache.kv_cache import KVCache
from treespec.cache.state_pool import StatePool
from treespec.drafters.evidence import SeedEvidence
from treespec.drafters.ssm.additions import Additions
from treespec.drafters.ssm.catch_up import MIN_LAG, CatchUpPolicy
from treespec.drafters.ssm.compiled_growth import CompiledGrowth, DraftReads, GrowthBatch
from treespec.drafters.ssm.drawn_forest import DrawnForest
from treespec.drafters.ssm.forest import Forest, GrowingForest, TreeLimits
from treespec.drafters.ssm.group_draft import CATCH_UP_CHUNK, GroupDraft, GrowingTrees, group_draft
from treespec.drafters.ssm.levels import PlannedLevels, stop_unprofitable
from treespec.drafters.ssm.scoring import Rows
from treespec.drafters.ssm.ssm_state import SsmState, open_mass
from treespec.mixture_weights import WINDOW, MixtureWeights
from treespec.models.group_model import GroupModel
from treespec.planning.draft_plan import Drafted, DraftPlan
from treespec.request import Request
from treespec.tree import TokenTree
from treespec_kernels.cpu.growth_cpu import DraftModels
from treespec_kernels.tree.level_rule import LevelRule

MIN_READ = 32  # minimum tokens per read, as each pass reads all weights
NULL_PAGE = np.zeros(1, dtype=np.int64)


class SsmDrafter:
    """A group of SSMs that drafts one tree per request; attribution names each SSM.

    Embeddings and heads of the models are resized to the target's vocabulary. Pool i + 1 of the cache belongs to SSM i.
    """

    name = "ssm"

    def __init__(
        self,
        models: Sequence[GroupModel],
        names: Sequence[str],
        cache: KVCache,
        state_pools: Mapping[int, StatePool] | None = None,  # by index of a model with recurrent layers
    ):
        self.models, self.names, self.cache = list(models), tuple(names), cache
        self.evidence = SeedEvidence()  # evidence ratios of the other sources' proposals
        self.additions = Additions(len(models))
        self.drafted = Drafted()  # work counters of the last round
        self._states: dict[str, SsmState] = {}
        self._evicted: dict[str, MixtureWeights] = {}  # mixture weights of preempted requests by id
        self._catch_up_policy = CatchUpPolicy(len(models))
        self._by_sources: dict[Sequence[str] | None, list[int]] = {}
        self._compiled_models: dict[tuple[int, ...], DraftModels] = {}  # cached between rounds
        self.growth = CompiledGrowth(names, self.evidence)
        self.state_pools = {} if state_pools is None else state_pools
        self.drafts = [
            group_draft(ssm, model, cache, len(models) > 1, self.state_pools.get(ssm))
            for ssm, model in enumerate(models)
        ]

    def propose(
        self,
        requests: Sequence[Request],
        plans: Sequence[DraftPlan],  # plans by request; a plan with 0 levels returns the seed tree
        rule: LevelRule,  # decides before each level whether adaptive trees grow
        seed_trees: Sequence[TokenTree] | None = None,  # proposals of other sources by request, or None
    ) -> list[TokenTree]:
        """Return one tree per request, rooted at its last token and merged with its seeds."""
        if seed_trees is None:
            seed_trees = [TokenTree.root(request.tokens[-1]) for request in requests]
        self.drafted = Drafted()
        drafting = [p.levels > 0 and bool(self.allowed(r)) for r, p in zip(requests, plans, strict=True)]
        asked = np.array([i for i, plan in enumerate(plans) if plan.adaptive and drafting[i]], dtype=np.int64)
        if len(asked):
            grows = rule.worth_a_level(asked, np.array([open_mass(seed_trees[i]) for i in asked]), None)
            for i in asked[~grows]:
                drafting[i] = False
        if not any(drafting):
            return list(seed_trees)
        self._select([(r, self.state(r), p) for r, p, drafts in zip(requests, plans, drafting, strict=True) if drafts])
        drafting = [drafts and bool(self.state(r).active) for r, drafts in zip(requests, drafting, strict=True)]
        trees = list(seed_trees)
        for draws_at_random in (False, True):
            group = [i for i, request in enumerate(requests) if request.draws_at_random == draws_at_random]
            if not any(drafting[i] for i in group):
                continue
            states = [self.state(requests[i]) for i in group]
            batch = GrowthBatch(
                [requests[i] for i in group],
                [seed_trees[i] for i in group],
                [_limits(requests[i], plans[i], drafting[i]) for i in group],
                [state.weights for state in states],
                [plans[i].adaptive for i in group],
                rule if len(group) == len(requests) else rule.select(group),
            )
            self._prepare(batch, states)
            grown = None if draws_at_random else self._grow_compiled(batch, states)
            if grown is None:
                grown = self._grow(batch, states, draws_at_random)
            for i, state, tree in zip(group, states, grown, strict=True):
                state.slots, state.seed_tree = (tree.slots, seed_trees[i]) if drafting[i] else (None, None)
                trees[i] = tree
        return trees

    def _prepare(self, batch: GrowthBatch, states: Sequence[SsmState]) -> None:
        """Prefill tokens beyond the limit of a growing tree's first pass, and drop the last round's scores."""
        rows = zip(batch.requests, states, batch.limits, strict=True)
        growing = [(request, state) for request, state, limit in rows if limit.max_depth]
        for draft in self.drafts:
            ssm = draft.ssm
            unread = [r for r, s in growing if ssm in s.active and r.context_len - s.valid[ssm] >= CATCH_UP_CHUNK]
            if unread:
                self.read(draft, unread)
        for _, state in growing:
            state.scores, state.blocks, state.accepted_probs = {ssm: [] for ssm in state.active}, {}, None

    def _grow(self, batch: GrowthBatch, states: Sequence[SsmState], draws_at_random: bool) -> list[TokenTree]:
        """Score and extend trees level by level; return them."""
        forest: GrowingForest
        if draws_at_random:
            arguments = batch.requests, batch.seed_trees, batch.limits, batch.adaptive
            forest = DrawnForest(*arguments, batch.rule.least_value)
        else:
            forest = Forest(batch.seed_trees, batch.limits, self.evidence)
        levels = PlannedLevels(self.models, self.cache, batch.requests)
        trees, adaptive = GrowingTrees(batch.requests, states, forest, levels, self.drafted), np.array(batch.adaptive)
        last_open_mass = forest.open_mass()
        while len(forest.frontier.nodes):
            if forest.depth and adaptive.any():
                last_open_mass = stop_unprofitable(forest, adaptive, batch.rule, last_open_mass)
                if not len(forest.frontier.nodes):
                    break
            weights, tree_ids = trees.weights(self.drafts), forest.frontier.tree_ids
            if (ended := np.array([not tree_weights.any() for tree_weights in weights]))[tree_ids].any():
                forest.stop(ended)
                continue
            broken = forest.extend(trees.score(self.drafts), weights)
            self._mark_broken([batch.requests[tree_id] for tree_id in tree_ids[broken]])
        self.drafted.levels += forest.depth
        return forest.finish(self.names)

    def _mark_broken(self, requests: Sequence[Request]) -> None:
        """Mark requests with nodes whose probabilities are not finite."""
        for request in requests:  # NaN in K/V must not reach the next owner of these slots
            request.poisoned = True
        if requests:  # padding rows of the pass may have written NaN to the null page
            self.cache.scrub(NULL_PAGE)

    def _grow_compiled(self, batch: GrowthBatch, states: Sequence[SsmState]) -> list[TokenTree] | None:
        """Grow all levels in one compiled call; return the trees.

        Returns None, before any pass, if a model has no compiled pass or the scores take too much memory.
        """
        requests, depth = batch.requests, max(limit.max_depth for limit in batch.limits)
        if (call := self._prepare_call(batch, states, max(r.context_len for r in requests) + 1 + depth)) is None:
            return None
        models, reads = call
        trees, scored = self.growth.grow(models, reads, batch)
        self.drafted.levels += self.growth.num_levels
        for draft, read, probs in zip(models.drafts, reads, scored.scores, strict=True):
            self.drafted.passes += draft.passes
            self.drafted.request_passes += draft.tree_passes
            self._keep_scores(draft.ssm, requests, states, read, scored.tree_ids, probs)
        self._mark_broken([requests[i] for i in scored.broken])
        return trees

    def _prepare_call(
        self, batch: GrowthBatch, states: Sequence[SsmState], num_positions: int
    ) -> tuple[DraftModels, list[DraftReads]] | None:
        """Return the active SSMs and their inputs of a compiled call; None if it cannot run them or lacks memory."""
        grows = [limit.max_depth > 0 for limit in batch.limits]
        active = {ssm for state, drafts in zip(states, grows, strict=True) if drafts for ssm in state.active}
        models = self._models_for_call(tuple(sorted(active)), num_positions)
        if models is None or not self.growth.has_room(models, batch.limits):
            return None
        return models, [self._reads(draft.ssm, batch.requests, states, grows) for draft in models.drafts]

    def _reads(
        self, ssm: int, requests: Sequence[Request], states: Sequence[SsmState], grows: Sequence[bool]
    ) -> DraftReads:
        """Return the inputs of an SSM's first pass in a compiled call."""
        active = [drafts and ssm in state.active for state, drafts in zip(states, grows, strict=True)]
        # The bonus token may be an expanded node with valid K/V, but the root is always recomputed.
        valid = [min(int(state.valid[ssm]), r.context_len) for r, state in zip(requests, states, strict=True)]
        tree_ids = [i for i, drafts in enumerate(active) if drafts]
        chains = [(requests[i], valid[i], requests[i].context_len) for i in tree_ids]
        inputs = self.drafts[ssm].call_inputs(chains, tree_ids, len(requests))
        if inputs.block_probs is not None:
            valid = [r.context_len if drafts else n for r, n, drafts in zip(requests, valid, active, strict=True)]
        rotations = [self.models[ssm].config.first_rotation(request.max_len) for request in requests]
        return DraftReads(active, valid, rotations, inputs)

    def _keep_scores(
        self,
        ssm: int,
        requests: Sequence[Request],
        states: Sequence[SsmState],
        read: DraftReads,
        tree_ids: np.ndarray,
        probs: np.ndarray,
    ) -> None:
        """Store an SSM's scores of a compiled call; arguments as in `ScoredRows`."""
        rows, first = Rows(probs, head=self.models[ssm].head_vocabulary), 0
        for request, state, start, drafts in zip(requests, states, read.valid, read.active, strict=True):
            if not drafts:
                continue
            state.valid[ssm] = request.context_len
            if len(self.models) > 1 and start < request.context_len:
                last = first + request.context_len - start
                read_probs = rows.probs_of(np.arange(first, last), request.tokens[start + 1 :])
                state.mixture.observe(ssm, start + 1, read_probs)
                first = last
        if len(self.models) > 1:
            rows_of_ssm = tree_ids[np.array(read.active)[tree_ids]]
            rows_of_ssm = rows_of_ssm[: len(probs) - first]  # a block draft has fewer levels than the others
            for i, (state, drafts) in enumerate(zip(states, read.active, strict=True)):
                if drafts:
                    state.scores[ssm].append(rows.select(first + (rows_of_ssm == i).nonzero()[0]))

    def _models_for_call(self, ssms: tuple[int, ...], num_positions: int) -> DraftModels | None:
        """Return these SSMs for passes at positions below `num_positions`; None if any has no compiled pass."""
        if self.models[0].growth is None:
            return None
        models = [self.models[ssm] for ssm in ssms]
        num_positions += max(model.config.short_context for model in models)  # now in rows of `rotations`
        if ssms not in self._compiled_models or self._compiled_models[ssms].num_positions < num_positions:
            decoders = [decoder for model in models if (decoder := model.compiled) is not None]
            entries = [entry for model in models if (entry := model.entries) is not None]
            if len(decoders) < len(ssms) or len(entries) < len(ssms):
                return None
            heads = [model.vocab_size if (head := model.head_vocabulary) is None else head.tokens for model in models]
            rotations = [decoder.rotations_to(num_positions) for decoder in decoders]
            pools = [self.cache.pools[1 + ssm] for ssm in ssms]
            self._compiled_models[ssms] = DraftModels(decoders[0].growth, ssms, entries, rotations, pools, heads)
        return self._compiled_models[ssms]

    def prefill(self, requests: Sequence[Request]) -> None:
        """Compute the SSMs' K/V of all committed positions, and score the SSMs on the tokens there."""
        for draft in self.drafts:
            self.read(draft, [request for request in requests if draft.ssm in self.allowed(request)])
        for request in requests:
            if (group := request.group) is not None and not request.num_generated:
                group.mixture = self.state(request).mixture.copy()
                if group.waiting and request.context_len == request.num_prompt - 1:
                    for ssm in self.state_pools.keys() & self.allowed(request):
                        pool = self.state_pools[ssm]
                        pool.keep(group.group_id.encode(), pool.of(request.request_id))

    def fork(self, requests: Sequence[Request]) -> None:
        """Initialise samples that share the prompt's pages, with the group's mixture weights after the prompt.

        The prompt is marked as read, so no SSM writes to its shared pages. A preempted sample keeps its own weights.
        SSMs with recurrent layers start from a copy of the state after the prompt. If that copy has been evicted, they
        read the prompt again, and write the values that its pages already hold.
        """
        for request in requests:
            assert request.group is not None
            if request.spec.is_plain or request.group.without_ssms:
                continue
            assert request.group.mixture is not None, "the group's prompt has not been prefilled"
            state = self.state(request)
            if not request.num_generated:
                state.mixture = request.group.mixture.copy()
            state.valid = np.maximum(state.valid, request.num_prompt - 1)
            for ssm, pool in self.state_pools.items():
                if (kept := pool.find(request.group.group_id.encode())) is None:
                    state.valid[ssm] = 0
                else:
                    pool.of(request.request_id).copy_from(kept)

    def prepare_rounds(
        self,
        requests: Sequence[Request],
        plans: Sequence[DraftPlan],
        rule: LevelRule,
        num_positions: int,  # greater than all positions of the rounds
        num_seeds: int,  # maximum number of seeds of all trees of a round
    ) -> DraftModels | None:
        """Select SSMs, and set `growth` for the next rounds, in which C++ grows trees; None if it cannot."""
        if self.state_pools or not all(model.keeps_kv and model.kept_nodes is None for model in self.models):
            return None
        self.drafted = Drafted()
        states = [self.state(request) for request in requests]
        drafts = [plan.levels > 0 and bool(self.allowed(r)) for r, plan in zip(requests, plans, strict=True)]
        columns = requests, states, plans, drafts
        rows = [(request, state, plan) for request, state, plan, asked in zip(*columns, strict=True) if asked]
        self._select([(request, state, plan) for request, state, plan in rows if not self.unread(request)])
        for request, state, _ in rows:
            if self.unread(request):  # the round in which this SSM must read first is declined
                state.active = [self._catch_up_policy.leader(state, self.allowed(request))]
                state.weights = np.eye(len(self.models))[state.active[0]]
        if not all(state.active for state, asked in zip(states, drafts, strict=True) if asked):
            return None
        limits = [_limits(request, plan, asked) for request, plan, asked in zip(requests, plans, drafts, strict=True)]
        roots = [TokenTree.root(request.tokens[-1]) for request in requests]
        weights, adaptive = [state.weights for state in states], [plan.adaptive for plan in plans]
        batch = GrowthBatch(requests, roots, limits, weights, adaptive, rule)
        if (call := self._prepare_call(batch, states, num_positions)) is None:
            return None
        models, reads = call
        self.growth.prepare(models, reads, batch, num_seeds, MIN_LAG * len(requests))
        return models

    def resume(
        self,
        request: Request,
        tree: TokenTree,
        seed_tree: TokenTree,
        # By active SSM, its probabilities of the tokens after those that it read, and after the accepted slots
        scores: Mapping[int, tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """Update a request's state after C++ has grown its tree in a prepared round."""
        state = self.state(request)
        self._score_accepted(request, state)
        for ssm, (read_probs, _) in scores.items():
            state.mixture.observe(ssm, request.context_len - len(read_probs) + 1, read_probs)
        state.accepted_probs = {ssm: accepted_probs for ssm, (_, accepted_probs) in scores.items()}
        state.valid[state.active] = request.context_len
        state.slots, state.seed_tree = tree.slots, seed_tree

    def commit(self, requests: Sequence[Request], paths: Sequence[np.ndarray], is_moved: bool = False) -> None:
        """Keep the K/V of accepted nodes, which C++ has already moved if `is_moved`."""
        moves: list[tuple[SsmState, Request, np.ndarray]] = []
        for request, path in zip(requests, paths, strict=True):
            state = self._states.get(request.request_id)
            if state is not None and state.slots is not None:
                kept = state.slots[path]
                kept = kept[np.logical_and.accumulate(kept >= 0)]  # stops at the first unexpanded node
                state.slots, state.accepted = None, (request.context_len, kept)
                moves.append((state, request, kept))
        for ssm, model in enumerate(self.models):
            moves_of_ssm = [(s, r, kept[: model.kept_nodes]) for s, r, kept in moves if ssm in s.active]
            pages = [request.pages for _, request, _ in moves_of_ssm]
            lengths = [request.context_len - model.offset for _, request, _ in moves_of_ssm]
            if not is_moved:
                self.cache.commit(1 + ssm, pages, lengths, [kept for _, _, kept in moves_of_ssm])
            for state, request, kept in moves_of_ssm:
                state.valid[ssm] = request.context_len + len(kept)
                if ssm in self.state_pools and len(kept):
                    self.state_pools[ssm].of(request.request_id).commit(kept)

    def learn(self, request: Request, tree: TokenTree, path: np.ndarray, bonus: int) -> None:
        """Update evidence ratios and additions from a verified tree; arguments as in `SeedEvidence.observe`."""
        if (state := self._states.get(request.request_id)) is None:
            return
        if len(self.models) > 1:
            self.additions.observe(tree, path, self.names, state.weights)
        seed_tree, state.seed_tree = state.seed_tree, None
        if seed_tree is not None and len(seed_tree) > 1 and not request.draws_at_random:
            self.evidence.observe(tree, seed_tree, path, bonus)

    @property
    def held(self) -> set[str]:
        """Ids of the requests with state in this drafter."""
        return {*self._states, *self._evicted}.union(*(pool.holders for pool in self.state_pools.values()))

    def lengths(self, request: Request) -> np.ndarray:
        """Return the number of leading positions with K/V in each SSM's pool."""
        state = self._states.get(request.request_id)
        return request.draft_lengths if state is None else state.valid

    def release(self, request: Request) -> None:
        self.evict(request)
        self._evicted.pop(request.request_id, None)

    def evict(self, request: Request) -> None:
        """Release a preempted request's state that depends on its pages."""
        if (state := self._states.pop(request.request_id, None)) is not None:
            self._evicted[request.request_id] = state.mixture
        for pool in self.state_pools.values():
            pool.release(request.request_id)

    def assume_context(self, request: Request) -> None:
        """Forget earlier rounds, and mark the K/V of all committed positions as computed, for repeated measurements."""
        self._states.pop(request.request_id, None)
        self.state(request).valid[:] = request.context_len
        for pool in self.state_pools.values():
            pool.of(request.request_id).length = request.context_len

    def unread(self, request: Request) -> int:
        """Return how many committed tokens beyond its maximum lag the leading SSM must read to draft."""
        return self._catch_up_policy.unread(self.state(request), self.allowed(request), request.context_len)

    def may_draft(self, request: Request) -> bool:
        return bool(self.allowed(request))

    def state(self, request: Request) -> SsmState:
        """Return a request's state; create it on the first call."""
        if request.request_id not in self._states:
            count, first = len(self.models), np.array([model.offset for model in self.models])
            valid = np.maximum(first, request.draft_lengths)
            valid[[*self.state_pools]] = 0  # cached prefixes have no states of drafts
            mixture = self._evicted.pop(request.request_id, None) or MixtureWeights(count)
            self._states[request.request_id] = SsmState(mixture, valid, np.full(count, MIN_LAG), np.zeros(count))
            self._catch_up_policy.begin_request()
        return self._states[request.request_id]

    def allowed(self, request: Request) -> list[int]:
        """Return the SSMs that may draft for a request, ascending. Heads need at least one token read by the target."""
        if request.group is not None and request.group.without_ssms:
            return []
        sources = request.spec.sources
        if sources not in self._by_sources:
            self._by_sources[sources] = [i for i, name in enumerate(self.names) if request.spec.allows("ssm", name)]
        ssms = self._by_sources[sources]
        return ssms if request.context_len else [ssm for ssm in ssms if not self.models[ssm].offset]

    def _select(self, rows: Sequence[tuple[Request, SsmState, DraftPlan]]) -> None:
        """Score SSMs on newly verified tokens; select each request's active SSMs among those within their maximum lag.

        No SSM is active if the plan's read limit keeps all of them lagging; they continue reading in the next round.
        """
        for request, state, _ in rows:
            self._score_accepted(request, state)
        lagging: dict[int, dict[Request, float]] = {}  # by SSM, token limit of each request to read
        for request, state, plan in rows:
            allowed = self.allowed(request)
            for ssm in self._catch_up_policy.readers(state, allowed, request.context_len, plan.time_left):
                lagging.setdefault(ssm, {})[request] = plan.max_read
        num_readers = sum(map(len, lagging.values()))
        for ssm in sorted(lagging):
            self.read(self.drafts[ssm], [*lagging[ssm]], [limit / num_readers for limit in lagging[ssm].values()])
        self._catch_up_policy.learn()
        for request, state, plan in rows:
            behind = (request.context_len - state.valid).tolist()
            candidates = [ssm for ssm in self.allowed(request) if behind[ssm] < state.max_lags[ssm]]
            state.weights = np.zeros(len(self.models))
            if len(candidates) <= 1:  # most rounds; the rest would take 10 us
                state.active = candidates
                state.max_lags[candidates] = MIN_LAG
                state.weights[candidates] = 1.0
                continue
            weights = state.mixture.weights(candidates)
            order = np.argsort(-weights, kind="stable")[: plan.max_ssms]
            adds = weights[order] * self.additions.shares[candidates][order]
            selected = order[(adds > plan.least_addition) | (order == order[0])]
            state.active = [candidates[i] for i in sorted(selected.tolist())]
            state.max_lags[state.active] = MIN_LAG
            state.weights[state.active] = weights[np.sort(selected)] / weights[selected].sum()

    def _score_accepted(self, request: Request, state: SsmState) -> None:
        """Score the last round's active SSMs on the tokens that follow the accepted nodes."""
        if state.accepted is None or len(self.models) == 1:
            return
        (root, kept), state.accepted = state.accepted, None
        following = request.tokens[root + 1 : root + 1 + len(kept)]
        for ssm in state.active:
            if state.accepted_probs is None:
                probs = state.token_probs(ssm, kept[: len(following)], following)
            else:
                probs = state.accepted_probs[ssm][: len(following)]
            state.mixture.observe(ssm, root + 1, probs)

    def read(self, draft: GroupDraft, requests: Sequence[Request], limits: Sequence[float] | None = None) -> None:
        """Compute a draft's K/V of the committed positions of these requests, and score it on the tokens read.

        `limits` are the maximum tokens to read by request, raised to `MIN_READ`; None reads all.
        """
        began, ssm = time.perf_counter(), draft.ssm
        ends = {
            r: int(min(r.context_len, self.state(r).valid[ssm] + max(limit, MIN_READ)))
            for r, limit in zip(requests, limits or [math.inf] * len(requests), strict=True)
        }
        while behind := [r for r, end in ends.items() if self.state(r).valid[ssm] < end]:
            starts = [int(self.state(r).valid[ssm]) for r in behind]
            stops = [min(start + CATCH_UP_CHUNK, ends[r]) for start, r in zip(starts, behind, strict=True)]
            chains = list(zip(behind, starts, stops, strict=True))
            # Only positions within the window of mixture weights; none for a single draft, whose weight is 1.
            counts = [
                max(stop - max(start, r.context_len - WINDOW), 0) if draft.is_compared else 0
                for r, start, stop in chains
            ]
            scores = draft.read(chains, counts)
            first = 0
            for (request, start, stop), count in zip(chains, counts, strict=True):
                state = self.state(request)
                state.valid[ssm] = stop
                self.drafted.read_tokens += stop - start
                if scores is not None:
                    following = request.tokens[stop - count + 1 : stop + 1]
                    probs = scores.probs_of(np.arange(first, first + count), following)
                    state.mixture.observe(ssm, stop - count + 1, probs)
                    first += count
        self.drafted.read_seconds += time.perf_counter() - began


def _limits(request: Request, plan: DraftPlan, grows: bool) -> TreeLimits:
    """Return the limits of a request's tree; nothing is drafted unless it `grows`."""
    return TreeLimits(plan.levels * grows, plan.nodes, plan.branching, request.end_tokens)
