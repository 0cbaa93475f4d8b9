"""The SSM group: small speculative models that grow one token tree in lockstep.

At each depth the SSMs score the whole frontier; each proposes its likeliest tokens at each node; their union goes on,
together with what other sources have proposed there. A child's probability is the mean of the SSMs' probabilities,
weighted by how well each has foretold the request's text so far. So the SSMs share one topology and one slot table, and
hold the K/V of every node that was expanded: after a commit they catch up on one or two tokens. An SSM that the text
does not speak for rests, and reads what it missed in one pass now and then.
"""

import time
from collections.abc import Sequence

import numpy as np

from treespec.cache import KVCache
from treespec.drafters.evidence import GrownTree, SeedEvidence
from treespec.drafters.ssm.compiled_forest import CompiledForest
from treespec.drafters.ssm.drawn_forest import DrawnForest
from treespec.drafters.ssm.forest import Forest, Shape, SsmProbs
from treespec.drafters.ssm.levels import CompiledLevels, Levels, levels_for
from treespec.drafters.ssm.scoring import Guess, Rows, score_rows, softmax_at
from treespec.drafters.ssm.ssm_state import SsmState, open_mass, places_of
from treespec.drafters.trust import WINDOW, Trust
from treespec.models.compiled import CompiledDecoder
from treespec.models.decoder import Decoder, Pass
from treespec.planning.draft_plan import Drafted, DraftPlan, GrowthRule
from treespec.request import Request
from treespec.tree import TokenTree
from treespec.verification.oracle import RandomOracle
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.cpu.growth_cpu import DraftPasses
from treespec_kernels.tree.growth_limits import FRONTIER, MAX_EXPANDED

CATCH_UP = 256  # committed tokens that the SSMs take in at once after a pause
NULL_PAGE = np.zeros(1, dtype=np.int64)
REST = 16  # verified tokens after which a resting SSM reads what it missed


class SsmDrafter:
    """A group of SSMs that drafts as one source; attribution names each SSM.

    Args:
        models: the SSMs, their embeddings and heads fitted to the target's vocabulary.
        names: of each, for attribution.
        cache: the engine's; pool i + 1 belongs to SSM i.
        known: how many tokens each has of its own; it never guesses one from there on. None: the whole vocabulary.
    """

    name = "ssm"

    def __init__(
        self, models: Sequence[Decoder], names: Sequence[str], cache: KVCache, known: Sequence[int] | None = None
    ):
        self.models, self.names, self.cache = list(models), tuple(names), cache
        self.known = tuple(known if known is not None else [model.vocab_size for model in models])
        self.evidence = SeedEvidence()  # of what other sources proposed
        self.drafted = Drafted(0, 0)  # in the last round
        self._passes = self._request_passes = self._read_tokens = 0
        self._read_seconds = 0.0
        self._states: dict[str, SsmState] = {}
        self._by_sources: dict[tuple[str, ...] | None, list[int]] = {}

    def propose(
        self,
        requests: Sequence[Request],
        plans: Sequence[DraftPlan],
        rule: GrowthRule,
        seeds: Sequence[TokenTree] | None = None,
    ) -> list[TokenTree]:
        """One tree per request over its last token; the seed alone where the plan's depth is 0.

        Args:
            requests: prefilled, with their pages.
            plans: what to grow, by request.
            rule: asked before each level of the adaptive trees.
            seeds: what other sources proposed, by request.
        """
        if seeds is None:
            seeds = [TokenTree.root(request.tokens[-1]) for request in requests]
        self._passes = self._request_passes = self._read_tokens = 0
        self._read_seconds = 0.0
        drafting = [p.levels > 0 and bool(self._allowed(r)) for r, p in zip(requests, plans, strict=True)]
        asked = np.array([i for i, plan in enumerate(plans) if plan.adaptive and drafting[i]], dtype=np.int64)
        if len(asked):
            grows = rule.worth_a_level(asked, np.array([open_mass(seeds[i]) for i in asked]), None)
            for i in asked[~grows]:
                drafting[i] = False
        if not any(drafting):
            self.drafted = Drafted(0, 0)
            return list(seeds)
        self._choose([(r, self._state(r), p) for r, p, drafts in zip(requests, plans, drafting, strict=True) if drafts])
        places = np.arange(len(requests))
        random = np.array([request.draws_at_random for request in requests], dtype=bool)
        trees, levels = list(seeds), 0
        for group in (places[~random], places[random]):
            if not any(drafting[i] for i in group):
                continue
            states = [self._state(requests[i]) for i in group]
            own = [requests[i] for i in group]
            shapes = [
                Shape(plans[i].levels if drafting[i] else 0, plans[i].nodes, plans[i].branching, requests[i].end_tokens)
                for i in group
            ]
            forest = self._forest(own, states, [plans[i] for i in group], shapes, [seeds[i] for i in group], rule)
            self._grow(own, states, forest, group, np.array([plan.adaptive for plan in plans], dtype=bool), rule)
            levels += forest.depth
            for i, state, (tree, slot_of_node) in zip(group, states, forest.finish(self.names), strict=True):
                state.slot_of_node, state.seed = (slot_of_node, seeds[i]) if drafting[i] else (None, None)
                trees[i] = tree
        self.drafted = Drafted(levels, self._passes, self._request_passes, self._read_tokens, self._read_seconds)
        return trees

    def _forest(
        self,
        requests: Sequence[Request],
        states: Sequence[SsmState],
        plans: Sequence[DraftPlan],
        shapes: Sequence[Shape],
        seeds: Sequence[TokenTree],
        rule: GrowthRule,
    ) -> Forest | DrawnForest:
        """The trees of requests that all draw at random, or none of them, before their first level."""
        if not requests[0].draws_at_random:
            parts, model = (seeds, shapes, len(self.models), self.evidence), self.models[0]
            return CompiledForest(*parts, model.growth) if isinstance(model, CompiledDecoder) else Forest(*parts)
        for request, state in zip(requests, states, strict=True):
            if state.oracle is None and request.sampler is not None:
                state.oracle = RandomOracle(request.sampler.draft_generator())
        oracles = [state.oracle for state in states if state.oracle is not None]
        modes = [request.spec.draws for request in requests]
        # A tree of a fixed number of nodes has about that many draws with a chance of more than its share.
        leasts = [rule.least_value if plan.adaptive else 1 / plan.nodes for plan in plans]
        fills = [not plan.adaptive for plan in plans]
        return DrawnForest(seeds, shapes, oracles, modes, leasts, fills, FRONTIER, MAX_EXPANDED)

    def _grow(
        self,
        requests: Sequence[Request],
        states: Sequence[SsmState],
        forest: Forest | DrawnForest,
        places: np.ndarray,
        adaptive: np.ndarray,
        rule: GrowthRule,
    ) -> None:
        """Score and extend level by level. `places`: of these requests in the batch; `adaptive`: of the batch."""
        before, levels = forest.open_mass(), levels_for(self.models, self.cache, requests)
        weights = [state.weights for state in states]
        passes = self._passes_of(requests, states, forest, levels)
        while len(forest.frontier.nodes):
            if forest.depth and adaptive[places].any():
                before = self._stop_where_nothing_pays(forest, places, adaptive[places], rule, before)
                if not len(forest.frontier.nodes):
                    break
            owners = forest.frontier.owners
            if not forest.depth:
                broken = forest.extend(self._score_roots(requests, states, forest), weights)
            elif passes is not None and isinstance(forest, CompiledForest):
                broken = self._draft(states, forest, levels, passes, weights)
            else:
                broken = forest.extend(self._score(requests, states, forest, levels), weights)
            for owner in owners[broken]:  # what overflowed must not reach the next holder of its slots
                requests[owner].poisoned = True
            if broken.any():  # a row that padded the pass may have left the same there
                self.cache.scrub(NULL_PAGE)

    def _passes_of(
        self, requests: Sequence[Request], states: Sequence[SsmState], forest: Forest | DrawnForest, levels: Levels
    ) -> DraftPasses | None:
        """What runs a level in one call; None where that takes more: noise or temperatures, or tokens left out."""
        if not isinstance(forest, CompiledForest) or not isinstance(levels, CompiledLevels):
            return None
        if any(request.is_sampled or request.restriction is not None for request in requests):
            return None
        if min(self.known) < self.models[0].vocab_size:
            return None
        depth = max(shape.max_depth for shape in forest.shapes)
        if depth == 1:
            return None  # roots alone are scored
        active = np.zeros((len(requests), len(self.models)), dtype=bool)
        for tree, state in enumerate(states):
            active[tree, state.active] = True
        return levels.passes(self.cache.pools[1:], active, depth)

    def _draft(
        self,
        states: Sequence[SsmState],
        forest: CompiledForest,
        levels: Levels,
        passes: DraftPasses,
        weights: Sequence[np.ndarray],
    ) -> np.ndarray:
        """A level below the roots, from its slots to its nodes; returns what `Forest.extend` does."""
        parts = forest.frontier.parts()
        broken, probs = forest.draft(passes, weights)
        for owner in parts:
            states[owner].begin_level(levels.first_slot(owner))
        for draft, own in zip(passes.drafts, probs, strict=True):
            places = places_of(draft.ssm, states, parts)
            for owner, place in places.items():
                states[owner].scores[-1][draft.ssm] = own[place]
            self._passes, self._request_passes = self._passes + bool(places), self._request_passes + len(places)
        return broken

    def _stop_where_nothing_pays(
        self,
        forest: Forest | DrawnForest,
        places: np.ndarray,
        adaptive: np.ndarray,
        rule: GrowthRule,
        before: np.ndarray,
    ) -> np.ndarray:
        """Stop trees whose next level does not pay. `before`: the open masses of the last one; returns this one's."""
        growing = np.unique(forest.frontier.owners)
        growing = growing[adaptive[growing]]
        opened = forest.open_mass()
        reached = forest.level_mass(rule.least_value)[growing] / np.maximum(before[growing], 1e-9)
        if len(growing):
            stops = np.zeros(len(adaptive), dtype=bool)
            stops[growing] = ~rule.worth_a_level(places[growing], opened[growing], reached)
            if stops.any():
                forest.stop(stops)
        return opened

    def prefill(self, requests: Sequence[Request]) -> None:
        """Compute the SSMs' K/V of all committed positions, and score their predictions of the tokens read."""
        for ssm in range(len(self.models)):
            self._read(ssm, [request for request in requests if ssm in self._allowed(request)])
        for request in requests:
            if request.group is not None:
                request.group.trust = self._state(request).trust.copy()

    def fork(self, requests: Sequence[Request]) -> None:
        """Begin samples whose pages hold the prompt: as read by the leader of their group, with the trust it had then.

        So no SSM writes to the prompt's pages again.
        """
        for request in requests:
            assert request.group is not None
            if request.spec.is_plain or request.group.without_ssms:
                continue
            assert request.group.trust is not None, "nobody has read the prompt"
            state = self._state(request)
            state.trust = request.group.trust.copy()
            state.valid[self._allowed(request)] = request.num_prompt - 1

    def commit(self, requests: Sequence[Request], paths: Sequence[np.ndarray]) -> None:
        """Keep the K/V of accepted nodes. `paths[i]`: accepted nodes of the proposed tree, from the root on."""
        moves: list[tuple[SsmState, Request, np.ndarray]] = []
        for request, path in zip(requests, paths, strict=True):
            state = self._states.get(request.request_id)
            if state is not None and state.slot_of_node is not None:
                kept = state.slot_of_node[path]
                kept = kept[np.logical_and.accumulate(kept >= 0)]  # up to the first node that was not expanded
                state.slot_of_node, state.settled = None, (request.context_len, kept)
                moves.append((state, request, kept))
        for ssm in range(len(self.models)):
            own = [(request, kept) for state, request, kept in moves if ssm in state.active]
            pages, lengths = [request.pages for request, _ in own], [request.context_len for request, _ in own]
            self.cache.commit(1 + ssm, pages, lengths, [kept for _, kept in own])
        for state, request, kept in moves:
            state.valid[state.active] = request.context_len + len(kept)

    def learn(self, request: Request, tree: GrownTree, path: np.ndarray, bonus: int) -> None:
        """Learn from a verified tree how far other sources' proposals hold; arguments as of `SeedEvidence.observe`."""
        if (state := self._states.get(request.request_id)) is None:
            return
        seed, state.seed = state.seed, None
        if seed is not None and len(seed) > 1 and not request.draws_at_random:
            self.evidence.observe(tree, seed, path, bonus)

    def release(self, request: Request) -> None:
        self._states.pop(request.request_id, None)

    def assume_context(self, request: Request) -> None:
        """Take the K/V of all committed positions as computed: measuring repeats a round without committing it."""
        self._state(request).valid[:] = request.context_len

    def unread(self, request: Request) -> int:
        """Committed tokens that SSMs must read before they can draft, summed over the SSMs; 0 where they keep up."""
        valid, allowed = self._state(request).valid, self._allowed(request)
        return sum(max(request.context_len - int(valid[ssm]) - REST, 0) for ssm in allowed)

    def may_draft(self, request: Request) -> bool:
        """Whether any SSM may draft for a request."""
        return bool(self._allowed(request))

    def catch_up(self, requests: Sequence[Request], width: int) -> bool:
        """Before a captured round: read what the SSMs have missed, but for the `width` tokens that it reads itself.
        Returns whether there was anything."""
        for request in requests:
            self._state(request).active = self._allowed(request)
        missed = False
        for ssm in range(len(self.models)):
            states = [(request, self._state(request)) for request in requests]
            behind = [r for r, s in states if ssm in s.active and r.context_len + 1 - s.valid[ssm] > width]
            self._read(ssm, behind)
            missed = missed or bool(behind)
        return missed

    def first_unread(self, request: Request) -> int:
        """The first position that one of the drafting SSMs has not read; the root's at most."""
        state = self._state(request)
        return min(int(state.valid[state.active].min()), request.context_len)

    def round_weights(self, request: Request) -> np.ndarray:
        """float64 [num_ssms]: the mixture's weights in a captured round, 0 for who is silent."""
        state = self._state(request)
        trust = state.trust.weights(state.active)
        if request.spec.max_ssms is not None:
            trust[np.argsort(-trust, kind="stable")[request.spec.max_ssms :]] = 0.0
        weights = np.zeros(len(self.models))
        weights[state.active] = trust / trust.sum()
        return weights

    def learn_round(self, request: Request, foretold: np.ndarray, proposed: TokenTree | None) -> None:
        """After a captured round, before `request.tokens` grows: the SSMs have read all of them.

        Args:
            request: that took part.
            foretold: [num_ssms, n], probabilities of its last n tokens.
            proposed: the tree of other sources that the round was given.
        """
        state = self._state(request)
        for ssm in state.active:
            seen = np.nan_to_num(foretold[ssm], nan=0.0)
            state.trust.observe(ssm, len(request.tokens) - len(seen), seen)
        state.valid[state.active] = len(request.tokens)
        state.slot_of_node, state.settled, state.seed = None, None, proposed

    def weights(self, request: Request) -> dict[str, float]:
        """How far each SSM is trusted with a running request, by name; sum 1."""
        allowed = self._allowed(request)
        trust = self._state(request).trust.weights(allowed)
        return {self.names[ssm]: float(weight) for ssm, weight in zip(allowed, trust, strict=True)}

    def _state(self, request: Request) -> SsmState:
        if request.request_id not in self._states:
            count = len(self.models)
            state = SsmState(Trust(count), np.zeros(count, dtype=np.int64), np.zeros(count))
            self._states[request.request_id] = state
        return self._states[request.request_id]

    def _allowed(self, request: Request) -> list[int]:
        """The SSMs that may draft for a request."""
        if request.group is not None and request.group.without_ssms:
            return []
        sources = request.spec.sources
        if sources not in self._by_sources:
            self._by_sources[sources] = [i for i, name in enumerate(self.names) if request.spec.allows("ssm", name)]
        return self._by_sources[sources]

    def _choose(self, rows: Sequence[tuple[Request, SsmState, DraftPlan]]) -> None:
        """Score the SSMs on the tokens verified since, and choose which draft for each request."""
        for request, state, _ in rows:
            self._settle(request, state)
        for ssm in range(len(self.models)):
            missed = [r for r, s, _ in rows if ssm in self._allowed(r) and r.context_len - s.valid[ssm] >= REST]
            self._read(ssm, missed)
        for request, state, plan in rows:
            allowed = self._allowed(request)
            weights = state.trust.weights(allowed)
            order = np.argsort(-weights, kind="stable")[: plan.max_ssms]
            worth = order[(weights[order] > plan.min_trust) | (order == order[0])]
            state.active = [allowed[i] for i in np.sort(worth)]
            state.weights = np.zeros(len(self.models))
            state.weights[state.active] = weights[np.sort(worth)] / weights[worth].sum()

    def _settle(self, request: Request, state: SsmState) -> None:
        """Score the SSMs that drafted in the last round on the tokens that followed the accepted nodes."""
        if state.settled is None or len(self.models) == 1:
            return
        (root, kept), state.settled = state.settled, None
        for ssm in state.active:
            levels = zip(state.scores, state.first_slots, kept.tolist(), request.tokens[root + 1 :], strict=False)
            rows = [(scores[ssm][slot - first], token) for scores, first, slot, token in levels]
            # Not what was drafted by, into which the noise of that very token may have gone.
            seen = [softmax_at(row, token) if request.is_sampled else row[token] for row, token in rows]
            state.trust.observe(ssm, root + 1, np.array(seen))

    def _read(self, ssm: int, requests: Sequence[Request]) -> None:
        """Compute an SSM's K/V up to the committed positions of these requests, and score it on the tokens read."""
        began = time.perf_counter()
        while behind := [r for r in requests if self._state(r).valid[ssm] < r.context_len]:
            starts = [int(self._state(r).valid[ssm]) for r in behind]
            stops = [min(start + CATCH_UP, r.context_len) for start, r in zip(starts, behind, strict=True)]
            chains = list(zip(behind, starts, stops, strict=True))
            # Only the last positions count.
            several = len(self.models) > 1
            wanted = [max(stop - max(start, r.context_len - WINDOW), 0) if several else 0 for r, start, stop in chains]
            ends = np.cumsum([stop - start for _, start, stop in chains])
            scored = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, wanted, strict=True)])
            rows = [RequestRows.chain(start, stop - start, r.pages) for r, start, stop in chains]
            tokens = np.array([token for r, start, stop in chains for token in r.tokens[start:stop]])
            layout = self.models[ssm].plan(rows, self.cache.pools[1 + ssm])
            probs = self._score_rows(ssm, layout, tokens, scored).probs
            first = 0
            for (request, _, stop), count in zip(chains, wanted, strict=True):
                state = self._state(request)
                state.valid[ssm] = stop
                following = request.tokens[stop - count + 1 : stop + 1]
                seen = probs[np.arange(first, first + count), following]
                state.trust.observe(ssm, stop - count + 1, seen)
                first += count
            self._read_tokens += len(tokens)
        self._read_seconds += time.perf_counter() - began

    def _score_roots(
        self, requests: Sequence[Request], states: Sequence[SsmState], forest: Forest | DrawnForest
    ) -> list[SsmProbs]:
        """Each SSM's probabilities after the roots, having caught up on committed tokens."""
        owners = forest.frontier.owners.tolist()
        for owner in owners:
            states[owner].begin_tree()
        results: list[SsmProbs] = []
        layouts: dict[object, Pass] = {}
        for ssm, model in enumerate(self.models):
            own = [row for row, owner in enumerate(owners) if ssm in states[owner].active]
            if not own:
                continue
            served = [(requests[owners[row]], states[owners[row]]) for row in own]
            self._read(ssm, [r for r, state in served if r.context_len - state.valid[ssm] >= CATCH_UP])
            # The bonus token may be among the expanded nodes, but the root is always scored anew.
            starts = [min(int(state.valid[ssm]), r.context_len) for r, state in served]
            tokens = np.array([t for (r, _), start in zip(served, starts, strict=True) for t in r.tokens[start:]])
            key = model.plan_key, tuple(own), tuple(starts)
            if key not in layouts:
                chains = [
                    RequestRows.chain(start, r.context_len + 1 - start, r.pages)
                    for (r, _), start in zip(served, starts, strict=True)
                ]
                layouts[key] = model.plan(chains, self.cache.pools[1 + ssm])
            last = np.cumsum([r.context_len + 1 - start for (r, _), start in zip(served, starts, strict=True)]) - 1
            scored = last if len(self.models) == 1 else np.arange(len(tokens))
            rows = np.arange(len(own)) if len(self.models) == 1 else last
            guesses = [
                Guess(request, slice(row, row + 1), request.context_len + 1, [()])
                for (request, _), row in zip(served, rows.tolist(), strict=True)
            ]
            probs, logits = self._score_rows(ssm, layouts[key], tokens, scored, guesses)
            self._passes, self._request_passes = self._passes + 1, self._request_passes + len(own)
            if len(self.models) > 1:
                for (request, state), start, end in zip(served, starts, last, strict=True):
                    read = probs[end - request.context_len + start : end]
                    following = request.tokens[start + 1 :]
                    state.trust.observe(ssm, start + 1, read[np.arange(len(read)), following])
                probs, logits = probs[last], logits[last]
            for row, (request, state) in enumerate(served):
                state.valid[ssm] = request.context_len
                state.scores[0][ssm] = (logits if request.is_sampled else probs)[row : row + 1]
            results.append(SsmProbs(ssm, np.array(own), probs))
        return results

    def _score(
        self, requests: Sequence[Request], states: Sequence[SsmState], forest: Forest | DrawnForest, levels: Levels
    ) -> list[SsmProbs]:
        """Each SSM's probabilities after the nodes of the frontier."""
        at = forest.frontier
        levels.extend(at, forest.depth)
        parts = at.parts()
        for owner in parts:
            states[owner].begin_level(levels.first_slot(owner))
        paths = forest.paths() if any(requests[owner].restriction for owner in parts) else []
        results: list[SsmProbs] = []
        for ssm in range(len(self.models)):
            places = places_of(ssm, states, parts)
            if not places:
                continue
            rows = np.concatenate([np.arange(parts[owner].start, parts[owner].stop) for owner in places])
            guesses = [
                Guess(requests[owner], place, requests[owner].context_len + 1 + forest.depth, paths[parts[owner]])
                for owner, place in places.items()
            ]
            probs, logits = self._score_rows(
                ssm, levels.plan(ssm, rows), at.tokens[rows], np.arange(len(rows)), guesses
            )
            self._passes, self._request_passes = self._passes + 1, self._request_passes + len(places)
            for owner, place in places.items():
                states[owner].scores[-1][ssm] = (logits if requests[owner].is_sampled else probs)[place]
            results.append(SsmProbs(ssm, rows, probs))
        return results

    def _score_rows(
        self,
        ssm: int,
        layout: Pass,
        tokens: np.ndarray,
        scored: np.ndarray,
        guesses: Sequence[Guess] = (),
    ) -> Rows:
        model, pool = self.models[ssm], self.cache.pools[1 + ssm]
        return score_rows(model, pool, self.known[ssm], layout, tokens, scored, guesses)
