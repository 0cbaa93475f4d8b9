"""The SSM group: small speculative models that grow one token tree in lockstep.

At each depth all active SSMs score the whole frontier and propose their top tokens at each node. The union of these
and of the other sources' proposals forms the next level. A child's probability is the mixture of the SSMs'
probabilities, weighted by how well each SSM predicted the request's text so far.

The SSMs therefore share one tree topology and one slot table, and each has the K/V of every expanded node, so that
after a commit only one or two tokens have to be caught up. Inactive SSMs read the tokens that they missed more rarely.
"""

import time
from collections.abc import Sequence

import numpy as np

from treespec.cache import KVCache
from treespec.draft_plan import Drafted, DraftPlan, LevelRule
from treespec.drafters.evidence import GrownTree, SeedEvidence
from treespec.drafters.ssm.catch_up import MIN_LAG, CatchUpPolicy
from treespec.drafters.ssm.compiled_forest import CompiledForest
from treespec.drafters.ssm.drawn_forest import DrawnForest
from treespec.drafters.ssm.forest import Forest, Shape
from treespec.drafters.ssm.group_draft import CallInputs, DraftCounts, GroupDraft, GrowingTrees, group_draft
from treespec.drafters.ssm.level_scorer import CATCH_UP_CHUNK, LevelScorer
from treespec.drafters.ssm.levels import DraftModelCache, levels_for, stop_unprofitable
from treespec.drafters.ssm.scoring import Rows
from treespec.drafters.ssm.ssm_state import ReadTokens, SsmState, open_mass
from treespec.models.group_model import GroupModel
from treespec.request import Request
from treespec.tree import TokenTree
from treespec.trust import WINDOW, Trust
from treespec.verification.oracle import RandomOracle
from treespec_kernels.cpu.growth_cpu import DraftPasses, DraftSampling, StopRule, TreePlaces
from treespec_kernels.tree.growth_limits import FRONTIER, MAX_EXPANDED

NULL_PAGE = np.zeros(1, dtype=np.int64)
MAX_SCORES = 1 << 27  # maximum probabilities of one SSM that a compiled call has room for


class SsmDrafter:
    """A group of SSMs that drafts one tree per request; attribution names each SSM.

    Args:
        models: the SSMs, with embeddings and heads resized to the target's vocabulary.
        names: by SSM, for attribution.
        cache: the engine's; pool i + 1 belongs to SSM i.

    Attributes:
        evidence: evidence ratios of the other sources' proposals.
        drafted: statistics of the last round.
    """

    name = "ssm"

    def __init__(self, models: Sequence[GroupModel], names: Sequence[str], cache: KVCache):
        self.models, self.names, self.cache = list(models), tuple(names), cache
        self.evidence = SeedEvidence()
        self.drafted = Drafted(0, 0)
        self._counts = DraftCounts()
        self._states: dict[str, SsmState] = {}
        self._catch_up_policy = CatchUpPolicy(len(models))
        self._by_sources: dict[Sequence[str] | None, list[int]] = {}
        self._draft_models = DraftModelCache(models, cache)
        self._drafts = [group_draft(ssm, model, cache, len(models) > 1) for ssm, model in enumerate(models)]

    def propose(
        self,
        requests: Sequence[Request],
        plans: Sequence[DraftPlan],
        rule: LevelRule,
        seeds: Sequence[TokenTree] | None = None,
    ) -> list[TokenTree]:
        """Return one tree per request, rooted at its last token and merged with its seeds.

        Args:
            requests: prefilled requests.
            plans: by request; with 0 levels, the result is the seed tree.
            rule: decides before each level whether the adaptive trees grow.
            seeds: by request, proposals of other sources; None = none.
        """
        if seeds is None:
            seeds = [TokenTree.root(request.tokens[-1]) for request in requests]
        self._counts = DraftCounts()
        drafting = [p.levels > 0 and bool(self._allowed(r)) for r, p in zip(requests, plans, strict=True)]
        asked = np.array([i for i, plan in enumerate(plans) if plan.adaptive and drafting[i]], dtype=np.int64)
        if len(asked):
            grows = rule.worth_a_level(asked, np.array([open_mass(seeds[i]) for i in asked]), None)
            for i in asked[~grows]:
                drafting[i] = False
        if not any(drafting):
            self.drafted = Drafted(0, 0)
            return list(seeds)
        self._select([(r, self._state(r), p) for r, p, drafts in zip(requests, plans, drafting, strict=True) if drafts])
        random = [request.draws_at_random for request in requests]
        trees, levels = list(seeds), 0
        for kind in (False, True):
            group = [i for i, own in enumerate(random) if own == kind]
            if not any(drafting[i] for i in group):
                continue
            states = [self._state(requests[i]) for i in group]
            own = [requests[i] for i in group]
            shapes = [
                Shape(plans[i].levels if drafting[i] else 0, plans[i].nodes, plans[i].branching, requests[i].end_tokens)
                for i in group
            ]
            forest = self._forest(own, states, [plans[i] for i in group], shapes, [seeds[i] for i in group], rule)
            self._grow(own, states, forest, group, [plans[i].adaptive for i in group], rule)
            levels += forest.depth
            for i, state, (tree, slot_of_node) in zip(group, states, forest.finish(self.names), strict=True):
                state.slot_of_node, state.seed = (slot_of_node, seeds[i]) if drafting[i] else (None, None)
                trees[i] = tree
        work = self._counts
        self.drafted = Drafted(levels, work.passes, work.request_passes, work.read_tokens, work.read_seconds)
        return trees

    def _forest(
        self,
        requests: Sequence[Request],
        states: Sequence[SsmState],
        plans: Sequence[DraftPlan],
        shapes: Sequence[Shape],
        seeds: Sequence[TokenTree],
        rule: LevelRule,
    ) -> Forest | DrawnForest:
        """Create the trees with their roots only, for requests that all draw at random or all do not."""
        if not requests[0].draws_at_random:
            parts = seeds, shapes, len(self.models), self.evidence
            library = self.models[0].growth
            return Forest(*parts) if library is None else CompiledForest(*parts, library)
        for request, state in zip(requests, states, strict=True):
            if state.oracle is None and request.sampler is not None:
                state.oracle = RandomOracle(request.sampler.draft_generator())
        oracles = [state.oracle for state in states if state.oracle is not None]
        modes = [request.spec.draws for request in requests]
        # With a fixed number of nodes n, about n draws have a value above 1 / n.
        min_values = [rule.least_value if plan.adaptive else 1 / plan.nodes for plan in plans]
        fills = [not plan.adaptive for plan in plans]
        return DrawnForest(seeds, shapes, oracles, modes, min_values, fills, FRONTIER, MAX_EXPANDED)

    def _grow(
        self,
        requests: Sequence[Request],
        states: Sequence[SsmState],
        forest: Forest | DrawnForest,
        places: Sequence[int],
        adaptive: Sequence[bool],
        rule: LevelRule,
    ) -> None:
        """Score and extend the trees, in one compiled call if possible, else level by level.

        Args:
            requests, states: of the trees.
            forest: the trees, roots only.
            places: indices of these requests in the batch.
            adaptive: by tree, whether its depth is chosen by `rule`.
            rule: decides whether another level pays.
        """
        if isinstance(forest, CompiledForest) and (passes := self._compiled_passes(requests, states, forest)):
            self._draft_compiled(requests, states, forest, passes, places, adaptive, rule)
            return
        active = {ssm for owner in forest.frontier.owners.tolist() for ssm in states[owner].active}
        levels = levels_for(self.models, active, self.cache, requests)
        trees = GrowingTrees(requests, states, forest, levels, self._counts)
        scorer = LevelScorer(self._drafts, trees, self._read)
        last_open_mass = forest.open_mass()
        while len(forest.frontier.nodes):
            if forest.depth and any(adaptive):
                last_open_mass = stop_unprofitable(forest, np.array(places), np.array(adaptive), rule, last_open_mass)
                if not len(forest.frontier.nodes):
                    break
            weights, owners = scorer.weights(), forest.frontier.owners
            if (ended := np.array([not own.any() for own in weights]))[owners].any():
                forest.stop(ended)
                continue
            broken = forest.extend(scorer.score(), weights)
            self._mark_broken(requests, owners[broken])

    def _mark_broken(self, requests: Sequence[Request], owners: np.ndarray) -> None:
        """Mark the requests, at these indices, of nodes whose probabilities are not finite."""
        for owner in owners:  # NaN in K/V must not reach the next request that gets these slots
            requests[owner].poisoned = True
        if len(owners):  # padding rows of the pass may have written NaN to the null page
            self.cache.scrub(NULL_PAGE)

    def _compiled_passes(
        self, requests: Sequence[Request], states: Sequence[SsmState], forest: CompiledForest
    ) -> DraftPasses | None:
        """Return the passes of all levels for one compiled call, after reading all but the last unread tokens.

        None with restricted requests, models without entry points, or too much memory for probabilities.
        """
        if any(request.restriction is not None for request in requests):
            return None
        roots = set(forest.frontier.owners.tolist())
        ssms = tuple(sorted({ssm for owner in roots for ssm in states[owner].active}))
        depth = max(shape.max_depth for shape in forest.shapes)
        models = self._draft_models.get(ssms, max(r.context_len for r in requests) + 1 + depth)
        if models is None or forest.room[1] * max(draft.width for draft in models.drafts) > MAX_SCORES:
            return None
        trees = {ssm: [owner for owner in sorted(roots) if ssm in states[owner].active] for ssm in ssms}
        for ssm in ssms:
            behind = [requests[owner] for owner in trees[ssm]]
            self._read(
                self._drafts[ssm], [r for r in behind if r.context_len - self._state(r).valid[ssm] >= CATCH_UP_CHUNK]
            )
        # The bonus token may be an expanded node with valid K/V, but the root is always scored again.
        valid = [np.minimum(state.valid, r.context_len) for r, state in zip(requests, states, strict=True)]
        inputs: list[CallInputs] = []
        for ssm in ssms:
            chains = [(requests[owner], int(valid[owner][ssm]), requests[owner].context_len) for owner in trees[ssm]]
            inputs.append(self._drafts[ssm].call_inputs(chains, trees[ssm], len(requests)))
            if not inputs[-1].reads:
                for owner in trees[ssm]:
                    valid[owner][ssm] = requests[owner].context_len
        tokens, starts = list[int](), [0]
        for owner, request in enumerate(requests):
            unread = [int(valid[owner][ssm]) for ssm in ssms if owner in trees[ssm]]
            tokens += request.tokens[min(unread, default=request.context_len) :]
            starts.append(len(tokens))
        return DraftPasses(
            models,
            TreePlaces(models.library, [r.context_len for r in requests], [r.pages for r in requests]),
            [[owner in trees[ssm] for owner in range(len(requests))] for ssm in ssms],
            [[int(lengths[ssm]) for lengths in valid] for ssm in ssms],
            [[self.models[ssm].config.first_rotation(request.max_len) for request in requests] for ssm in ssms],
            tokens,
            starts,
            len(self.models) > 1,
            [draft_inputs.features for draft_inputs in inputs],
            [draft_inputs.block_probs for draft_inputs in inputs],
            _sampling_of(requests),
        )

    def _draft_compiled(
        self,
        requests: Sequence[Request],
        states: Sequence[SsmState],
        forest: CompiledForest,
        passes: DraftPasses,
        places: Sequence[int],
        adaptive: Sequence[bool],
        rule: LevelRule,
    ) -> None:
        """Score and extend the trees by all levels in one compiled call; arguments as in `_grow`."""
        roots, stop = forest.frontier.owners.tolist(), None
        for owner in roots:
            states[owner].begin_tree()
        if any(adaptive):
            weights = [rule.token_weights[place] for place in places]
            stop = StopRule(rule.calibration, rule.level_cost, rule.marginal_cost, rule.least_value, adaptive, weights)
        drafted = forest.draft(passes, [state.weights for state in states], stop)
        parts = list(drafted.parts())
        for draft, scores, block_probs in zip(passes.models.drafts, drafted.scores, passes.block_probs, strict=True):
            ssm, first = draft.ssm, 0
            found = Rows(scores, head=self.models[ssm].head_vocabulary)
            self._counts.passes += draft.passes
            self._counts.request_passes += draft.tree_passes
            for owner in roots:
                request, state = requests[owner], states[owner]
                if ssm not in state.active:
                    continue
                start = min(int(state.valid[ssm]), request.context_len)
                state.valid[ssm] = request.context_len
                if passes.reads and start < request.context_len and block_probs is None:
                    last = first + request.context_len - start
                    probs = found.probs_of(np.arange(first, last), request.tokens[start + 1 :])
                    state.trust.observe(ssm, start + 1, probs)
                    first = last
            for owner, count in parts:
                if ssm in states[owner].active:
                    states[owner].scores[ssm].append(found.select(slice(first, first := first + count)))
        self._mark_broken(requests, drafted.row_owners[drafted.broken])

    def prefill(self, requests: Sequence[Request]) -> None:
        """Compute the SSMs' K/V of all committed positions, and score the SSMs on these tokens."""
        for draft in self._drafts:
            self._read(draft, [request for request in requests if draft.ssm in self._allowed(request)])
        for request in requests:
            if request.group is not None:
                request.group.trust = self._state(request).trust.copy()

    def fork(self, requests: Sequence[Request]) -> None:
        """Initialise samples whose pages already hold the prompt's K/V, with the group's trust after the prompt.

        The prompt counts as read, so no SSM writes to its shared pages again.
        """
        for request in requests:
            assert request.group is not None
            if request.spec.is_plain or request.group.without_ssms:
                continue
            assert request.group.trust is not None, "the group's prompt is not prefilled"
            state = self._state(request)
            state.trust = request.group.trust.copy()
            state.valid = np.maximum(state.valid, request.num_prompt - 1)

    def commit(self, requests: Sequence[Request], paths: Sequence[np.ndarray]) -> None:
        """Keep the K/V of accepted nodes.

        Args:
            requests: of the round.
            paths: by request, accepted nodes of the proposed tree, root first.
        """
        moves: list[tuple[SsmState, Request, np.ndarray]] = []
        for request, path in zip(requests, paths, strict=True):
            state = self._states.get(request.request_id)
            if state is not None and state.slot_of_node is not None:
                kept = state.slot_of_node[path]
                kept = kept[np.logical_and.accumulate(kept >= 0)]  # up to the first node that was not expanded
                state.slot_of_node, state.accepted = None, (request.context_len, kept)
                moves.append((state, request, kept))
        for ssm, model in enumerate(self.models):
            own = [(s, r, kept[: model.kept_nodes]) for s, r, kept in moves if ssm in s.active]
            pages, lengths = [r.pages for _, r, _ in own], [r.context_len - model.offset for _, r, _ in own]
            self.cache.commit(1 + ssm, pages, lengths, [kept for _, _, kept in own])
            for state, request, kept in own:
                state.valid[ssm] = request.context_len + len(kept)

    def learn(self, request: Request, tree: GrownTree, path: np.ndarray, bonus: int) -> None:
        """Update the evidence ratios from a verified tree; arguments as in `SeedEvidence.observe`."""
        if (state := self._states.get(request.request_id)) is None:
            return
        seed, state.seed = state.seed, None
        if seed is not None and len(seed) > 1 and not request.draws_at_random:
            self.evidence.observe(tree, seed, path, bonus)

    def lengths(self, request: Request) -> np.ndarray:
        """Return the number of leading positions with K/V in each SSM's pool."""
        state = self._states.get(request.request_id)
        return request.draft_lengths if state is None else state.valid

    def release(self, request: Request) -> None:
        """Release a request's state."""
        self._states.pop(request.request_id, None)

    def assume_context(self, request: Request) -> None:
        """Mark the K/V of all committed positions as computed, for measurements that repeat an uncommitted round."""
        self._state(request).valid[:] = request.context_len

    def unread(self, request: Request) -> int:
        """Return the committed tokens that the leading SSM must read before drafting, beyond its lag."""
        return self._catch_up_policy.unread(self._state(request), self._allowed(request), request.context_len)

    def may_draft(self, request: Request) -> bool:
        """Return whether any SSM may draft for a request."""
        return bool(self._allowed(request))

    def catch_up(self, requests: Sequence[Request], width: int) -> bool:
        """Read the tokens that the SSMs missed, before a captured round.

        With a draft head, the round does not read the first token, at whose position a head has no row.

        Args:
            requests: of the round.
            width: number of last tokens that the round reads itself.

        Returns:
            Whether any SSM missed more than `width` tokens.
        """
        caught_up = True
        for request in requests:
            state, allowed = self._state(request), self._allowed(request)
            if state.active != allowed:
                state.active, state.next_weights, caught_up = allowed, None, False
            caught_up = caught_up and state.read_to is not None and request.context_len < state.read_to + width
        if caught_up:
            return False
        for request in requests:
            self._state(request).read_to = None
        missed = False
        for ssm in range(len(self.models)):
            behind = []
            for request in requests:
                state = self._state(request)
                if ssm not in state.active:
                    continue
                unread, first_row = (
                    request.context_len + 1 - state.valid[ssm],
                    max(self.models[i].offset for i in state.active),
                )
                if unread > width or state.valid[ssm] < first_row:
                    behind.append(request)
                    state.next_weights = None
            self._read(self._drafts[ssm], behind)
            missed = missed or bool(behind)
        return missed

    def first_unread(self, request: Request) -> int:
        """Return the first position that an active SSM has not read, at most the root's."""
        state = self._state(request)
        if state.read_to is None:
            state.read_to = int(state.valid[state.active].min())
        return min(state.read_to, request.context_len)

    def round_weights(self, request: Request) -> np.ndarray:
        """Return the mixture weights for a captured round: float64 [num_ssms], NaN for SSMs that do not draft."""
        state = self._state(request)
        if state.next_weights is None:
            state.next_weights = state.round_weights(request.spec.max_ssms)
        return state.next_weights

    def end_round(self, request: Request, probs: np.ndarray, proposed: TokenTree | None) -> ReadTokens:
        """Update a request's state after a captured round, in which the SSMs read all of `request.tokens`.

        Args:
            request: of the round, before its tokens grow.
            probs: float32 [num_ssms, n], each SSM's probabilities of the last n tokens.
            proposed: the round's seed tree, or None.

        Returns:
            What `score` takes.
        """
        state, end = self._state(request), len(request.tokens)
        state.valid[state.active] = state.read_to = end
        state.slot_of_node, state.accepted, state.seed = None, None, proposed
        return ReadTokens(state.active, end - probs.shape[1], probs)

    def score(self, request: Request, read: ReadTokens) -> None:
        """Score the SSMs on tokens that they read in a captured round, and weigh them for the next one."""
        state = self._state(request)
        for ssm in read.ssms:
            state.trust.observe(ssm, read.first, read.probs[ssm])
        state.next_weights = state.round_weights(request.spec.max_ssms) if state.active else None

    def weights(self, request: Request) -> dict[str, float]:
        """Return the mixture weights of a running request by SSM name; sum 1."""
        allowed = self._allowed(request)
        trust = self._state(request).trust.weights(allowed)
        return {self.names[ssm]: float(weight) for ssm, weight in zip(allowed, trust, strict=True)}

    def _state(self, request: Request) -> SsmState:
        if request.request_id not in self._states:
            count, first = len(self.models), np.array([model.offset for model in self.models])
            valid = np.maximum(first, request.draft_lengths)
            state = SsmState(Trust(count), valid, np.full(count, MIN_LAG), np.zeros(count))
            self._states[request.request_id] = state
            self._catch_up_policy.begin_request()
        return self._states[request.request_id]

    def _allowed(self, request: Request) -> list[int]:
        """Return the SSMs that may draft for a request, ascending. Heads need a token that the target has read."""
        if request.group is not None and request.group.without_ssms:
            return []
        sources = request.spec.sources
        if sources not in self._by_sources:
            self._by_sources[sources] = [i for i, name in enumerate(self.names) if request.spec.allows("ssm", name)]
        found = self._by_sources[sources]
        return found if request.context_len else [ssm for ssm in found if not self.models[ssm].offset]

    def _select(self, rows: Sequence[tuple[Request, SsmState, DraftPlan]]) -> None:
        """Score the SSMs on newly verified tokens, and select the active SSMs of each request.

        An SSM that lags behind, because reading would not pay, is not a candidate.
        """
        for request, state, _ in rows:
            self._score_accepted(request, state)
        lagging: dict[int, list[Request]] = {}
        for request, state, plan in rows:
            allowed = self._allowed(request)
            for ssm in self._catch_up_policy.readers(state, allowed, request.context_len, plan.time_left):
                lagging.setdefault(ssm, []).append(request)
        for ssm in sorted(lagging):
            self._read(self._drafts[ssm], lagging[ssm])
        self._catch_up_policy.learn()
        for request, state, plan in rows:
            behind = (request.context_len - state.valid).tolist()
            candidates = [ssm for ssm in self._allowed(request) if behind[ssm] < state.max_lags[ssm]]
            weights = state.trust.weights(candidates)
            order = np.argsort(-weights, kind="stable")[: plan.max_ssms]
            selected = order[(weights[order] > plan.min_trust) | (order == order[0])]
            state.active = [candidates[i] for i in sorted(selected.tolist())]
            state.max_lags[state.active] = MIN_LAG
            state.weights = np.zeros(len(self.models))
            state.weights[state.active] = weights[np.sort(selected)] / weights[selected].sum()

    def _score_accepted(self, request: Request, state: SsmState) -> None:
        """Score the last round's active SSMs on the tokens that follow the accepted nodes."""
        if state.accepted is None or len(self.models) == 1:
            return
        (root, kept), state.accepted = state.accepted, None
        following = request.tokens[root + 1 : root + 1 + len(kept)]
        for ssm in state.active:
            probs = state.token_probs(ssm, kept[: len(following)], following)
            state.trust.observe(ssm, root + 1, probs)

    def _read(self, draft: GroupDraft, requests: Sequence[Request]) -> None:
        """Compute a draft's K/V of all committed positions of these requests, and score it on the tokens read."""
        began, ssm = time.perf_counter(), draft.ssm
        while behind := [r for r in requests if self._state(r).valid[ssm] < r.context_len]:
            starts = [int(self._state(r).valid[ssm]) for r in behind]
            stops = [min(start + CATCH_UP_CHUNK, r.context_len) for start, r in zip(starts, behind, strict=True)]
            chains = list(zip(behind, starts, stops, strict=True))
            # Only positions within the trust window, and none for a single draft, which needs no weights.
            counts = [
                max(stop - max(start, r.context_len - WINDOW), 0) if draft.is_compared else 0
                for r, start, stop in chains
            ]
            scores = draft.read(chains, counts)
            first = 0
            for (request, start, stop), count in zip(chains, counts, strict=True):
                state = self._state(request)
                state.valid[ssm] = stop
                self._counts.read_tokens += stop - start
                if scores is not None:
                    following = request.tokens[stop - count + 1 : stop + 1]
                    probs = scores.probs_of(np.arange(first, first + count), following)
                    state.trust.observe(ssm, stop - count + 1, probs)
                    first += count
        self._counts.read_seconds += time.perf_counter() - began


def _sampling_of(requests: Sequence[Request]) -> DraftSampling | None:
    """Return how the targets of the requests' trees choose; None if none of them samples."""
    if not any(request.is_sampled for request in requests):
        return None
    samplers = [request.sampler for request in requests]
    keys = [(0, 0) if sampler is None else sampler.key for sampler in samplers]
    return DraftSampling(
        [0.0 if sampler is None else sampler.temperature for sampler in samplers],
        [request.spec.verification == "coupled" for request in requests],
        [seed for seed, _ in keys],
        [sample for _, sample in keys],
    )
