"""Several small speculative models (SSMs) that grow one token tree in lockstep.

At each depth the SSMs score the whole frontier; each proposes its likeliest tokens at each node; their union goes on,
together with what other sources have proposed there. A child's probability is the mean of the SSMs' probabilities,
weighted by how well each has foretold the request's text so far. So the SSMs share one topology and one slot table, and
hold the K/V of every node that was expanded: after a commit they catch up on one or two tokens. An SSM that the text
does not speak for rests, and reads what it missed in one pass now and then.
"""

import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from treespec.cache import KVCache
from treespec.drafters.drawn import DrawnForest, Laws
from treespec.drafters.forest import Candidates, Forest, Shape
from treespec.drafters.plan import Drafted, DraftPlan, GrowthRule
from treespec.drafters.ssm_state import Rows, Scored, SsmState, grown_masks, open_mass, softmax_at
from treespec.drafters.trust import WINDOW, Trust
from treespec.models.decoder import Decoder, Pass
from treespec.oracle import RandomOracle
from treespec.request import Request
from treespec.sampling import topk_rows
from treespec.tree import TokenTree
from treespec_kernels.tree_batch import RequestRows

MAX_CHILDREN = 8  # proposals of one SSM at one node
MAX_FRONTIER = 8  # nodes of one depth that the dynamic policy expands
CATCH_UP = 256  # committed tokens that the SSMs take in at once after a pause
MAX_SLOTS = 64  # nodes of one tree that the dynamic policy expands; more would leave the packed attention's reach
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
                state.slot_of_node = slot_of_node if drafting[i] else None
                trees[i] = tree
        self.drafted = Drafted(levels, self._passes, self._request_passes, self._read_tokens, self._read_seconds)
        return trees

    def _forest(
        self, requests: Sequence[Request], states: Sequence[SsmState], plans: Sequence[DraftPlan],
        shapes: Sequence[Shape], seeds: Sequence[TokenTree], rule: GrowthRule,
    ) -> Forest | DrawnForest:  # fmt: skip
        """The trees of requests that all draw at random, or none of them, before their first level."""
        if not requests[0].draws_at_random:
            return Forest(seeds, shapes, len(self.models), MAX_CHILDREN, MAX_FRONTIER, MAX_SLOTS)
        for request, state in zip(requests, states, strict=True):
            if state.oracle is None and request.sampler is not None:
                state.oracle = RandomOracle(request.sampler.draft_generator())
        oracles = [state.oracle for state in states if state.oracle is not None]
        modes = [request.spec.draws for request in requests]
        # A tree of a fixed number of nodes has about that many draws with a chance of more than its share.
        leasts = [rule.least_value if plan.adaptive else 1 / plan.nodes for plan in plans]
        fills = [not plan.adaptive for plan in plans]
        return DrawnForest(seeds, shapes, oracles, modes, leasts, fills, MAX_FRONTIER, MAX_SLOTS)

    def _grow(
        self, requests: Sequence[Request], states: Sequence[SsmState], forest: Forest | DrawnForest,
        places: np.ndarray, adaptive: np.ndarray, rule: GrowthRule,
    ) -> None:  # fmt: skip
        """Score and extend level by level. `places`: of these requests in the batch; `adaptive`: of the batch."""
        before = forest.open_mass()
        while len(forest.frontier.nodes):
            if forest.depth and adaptive[places].any():
                before = self._stop_where_nothing_pays(forest, places, adaptive[places], rule, before)
                if not len(forest.frontier.nodes):
                    break
            score = self._score if forest.depth else self._score_roots
            scored = score(requests, states, forest)
            if isinstance(forest, Forest):
                forest.extend(self._candidates(requests, states, forest, scored))
            else:
                for each in scored:  # what overflowed stays silent, and must not reach the next holder of its slots
                    broken = ~torch.isfinite(each.probs).all(1).numpy()
                    for owner in forest.frontier.owners[each.rows[broken]]:
                        requests[owner].poisoned = True
                laws = [Laws(each.ssm, each.rows, each.probs.numpy()) for each in scored]
                forest.extend(laws, [state.weights for state in states])

    def _stop_where_nothing_pays(
        self, forest: Forest | DrawnForest, places: np.ndarray, adaptive: np.ndarray, rule: GrowthRule,
        before: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """Ask the rule about the next level. `before`: the open masses of the last one; returns this one's."""
        growing = np.unique(forest.frontier.owners)
        growing = growing[adaptive[growing]]
        opened = forest.open_mass()
        reached = forest.level_mass(rule.least_value)[growing] / np.maximum(before[growing], 1e-9)
        if len(growing):
            stops = np.zeros(len(adaptive), dtype=bool)
            stops[growing] = ~rule.worth_a_level(places[growing], opened[growing], reached)
            forest.stop(stops)
        return opened

    def prefill(self, requests: Sequence[Request]) -> None:
        """Compute the SSMs' K/V of all positions that the target has committed, and score them on what they read."""
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
            if request.spec.is_plain:
                continue
            assert request.group is not None and request.group.trust is not None, "nobody has read the prompt"
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

    def catch_up(self, requests: Sequence[Request], width: int) -> None:
        """Before a captured round: read what the SSMs have missed, but for the `width` tokens that it reads itself."""
        for request in requests:
            self._state(request).active = self._allowed(request)
        for ssm in range(len(self.models)):
            states = [(request, self._state(request)) for request in requests]
            self._read(ssm, [r for r, s in states if ssm in s.active and r.context_len + 1 - s.valid[ssm] > width])

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

    def learn_round(self, request: Request, foretold: np.ndarray) -> None:
        """After a captured round, before `request.tokens` grows: the SSMs have read all of them.

        Args:
            request: that took part.
            foretold: [num_ssms, n], probabilities of its last n tokens.
        """
        state = self._state(request)
        for ssm in state.active:
            seen = np.nan_to_num(foretold[ssm], nan=0.0)
            state.trust.observe(ssm, len(request.tokens) - len(seen), seen)
        state.valid[state.active] = len(request.tokens)
        state.slot_of_node = state.settled = None

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
        sources = request.spec.sources
        if sources not in self._by_sources:
            self._by_sources[sources] = [i for i, name in enumerate(self.names) if request.spec.allows("ssm", name)]
        return self._by_sources[sources]

    def _choose(self, rows: Sequence[tuple[Request, SsmState, DraftPlan]]) -> None:
        """Score what was verified since, and decide who drafts for each request."""
        for request, state, _ in rows:
            self._settle(request, state)
        for ssm in range(len(self.models)):
            missed = [r for r, s, _ in rows if ssm in self._allowed(r) and r.context_len - s.valid[ssm] >= REST]
            self._read(ssm, missed)
        for request, state, plan in rows:
            allowed = self._allowed(request)
            weights = state.trust.weights(allowed)
            order = np.argsort(-weights, kind="stable")[: plan.max_ssms]
            worth = order[(weights[order] > plan.price) | (order == order[0])]
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
        """Bring an SSM to the committed positions of these requests, and score it on the tokens it reads."""
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
            probs = self._forward(ssm, rows, tokens, scored, {}).probs.numpy()
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
    ) -> list[Scored]:
        """Each SSM's probabilities after the roots, having caught up on committed tokens."""
        owners = forest.frontier.owners.tolist()
        for owner in owners:
            states[owner].masks = np.ones((1, 1), dtype=bool)
            states[owner].first_slots, states[owner].scores = [0], [{}]
        results: list[Scored] = []
        layouts: dict[object, Pass] = {}
        for ssm in range(len(self.models)):
            own = [row for row, owner in enumerate(owners) if ssm in states[owner].active]
            if not own:
                continue
            served = [(requests[owners[row]], states[owners[row]]) for row in own]
            self._read(ssm, [r for r, state in served if r.context_len - state.valid[ssm] >= CATCH_UP])
            # The bonus token may be among the expanded nodes, but the root is always scored anew.
            starts = [min(int(state.valid[ssm]), r.context_len) for r, state in served]
            chains = [
                RequestRows.chain(start, r.context_len + 1 - start, r.pages)
                for (r, _), start in zip(served, starts, strict=True)
            ]
            tokens = np.array([t for (r, _), start in zip(served, starts, strict=True) for t in r.tokens[start:]])
            last = np.cumsum([chain.num_rows for chain in chains]) - 1
            scored = last if len(self.models) == 1 else np.arange(len(tokens))
            rows = np.arange(len(own)) if len(self.models) == 1 else last
            guessed = [
                (request, slice(row, row + 1), request.context_len + 1)
                for (request, _), row in zip(served, rows.tolist(), strict=True)
            ]
            probs, logits = self._forward(ssm, chains, tokens, scored, layouts, guessed, (tuple(own), tuple(starts)))
            self._passes, self._request_passes = self._passes + 1, self._request_passes + len(own)
            if len(self.models) > 1:
                for (request, state), start, end in zip(served, starts, last, strict=True):
                    read = probs[end - request.context_len + start : end].numpy()
                    following = request.tokens[start + 1 :]
                    state.trust.observe(ssm, start + 1, read[np.arange(len(read)), following])
                probs, logits = probs[last], logits[last]
            for row, (request, state) in enumerate(served):
                state.valid[ssm] = request.context_len
                state.scores[0][ssm] = (logits if request.is_sampled else probs)[row : row + 1].numpy()
            results.append(Scored(ssm, np.array(own), probs))
        return results

    def _score(
        self, requests: Sequence[Request], states: Sequence[SsmState], forest: Forest | DrawnForest
    ) -> list[Scored]:
        """Each SSM's probabilities after the nodes of the frontier."""
        at = forest.frontier
        owners, starts = np.unique(at.owners, return_index=True)
        bounds = pairwise([*starts.tolist(), len(at.owners)])
        parts = {owner: slice(*bound) for owner, bound in zip(owners.tolist(), bounds, strict=True)}
        rows = {}
        for owner, part in parts.items():
            state, request = states[owner], requests[owner]
            first, count = len(state.masks), part.stop - part.start
            grown = state.masks = grown_masks(state.masks, at.above[part])
            nodes = np.arange(first, first + count)
            state.first_slots.append(first)
            state.scores.append({})
            depths = grown.sum(1) - 1
            rows[owner] = RequestRows(
                request.context_len, nodes, depths[first:], grown[first:], depths, request.pages
            )  # fmt: skip
        results: list[Scored] = []
        layouts: dict[object, Pass] = {}
        for ssm in range(len(self.models)):
            own = [owner for owner in parts if ssm in states[owner].active]
            if not own:
                continue
            index = np.concatenate([np.arange(parts[owner].start, parts[owner].stop) for owner in own])
            everything = np.arange(len(index))
            served = [rows[owner] for owner in own]
            bounds = pairwise(np.cumsum([0] + [each.num_rows for each in served]).tolist())
            own_rows = {owner: slice(*bound) for owner, bound in zip(own, bounds, strict=True)}
            guessed = [(requests[o], part, requests[o].context_len + 1 + forest.depth) for o, part in own_rows.items()]
            probs, logits = self._forward(ssm, served, at.tokens[index], everything, layouts, guessed, tuple(own))
            self._passes, self._request_passes = self._passes + 1, self._request_passes + len(own)
            for owner, part in own_rows.items():
                states[owner].scores[-1][ssm] = (logits if requests[owner].is_sampled else probs)[part].numpy()
            results.append(Scored(ssm, index, probs))
        return results

    def _candidates(
        self, requests: Sequence[Request], states: Sequence[SsmState], forest: Forest, scored: Sequence[Scored]
    ) -> Candidates:
        """The union of the SSMs' proposals and the seeds' below each row of the frontier."""
        at = forest.frontier
        widest = max(forest.children_at(owner) for owner in at.owners.tolist())
        seeds = forest.seed_tokens()
        best = []
        for each in scored:
            values, columns = topk_rows(each.probs, widest)
            if not torch.isfinite(values).all():  # NaN is the largest of values: an SSM that overflowed stays silent
                each.probs.nan_to_num_(0.0, 0.0, 0.0)
                values, columns = topk_rows(each.probs, widest)
                for owner in at.owners[each.rows]:
                    requests[owner].poisoned = True
            best.append((values.numpy(), columns.numpy()))
        ssms = [each.ssm for each in scored]
        if len(scored) == 1 and not seeds.shape[1]:
            probs, ids = best[0]
            alone = np.ones((1, *ids.shape), dtype=bool)
            return Candidates(ssms, ids, probs[None].astype(np.float64), alone, None, True)
        width = best[0][1].shape[1]
        tokens = np.full((len(at.nodes), len(scored) * width + seeds.shape[1]), -1)
        tokens[:, len(scored) * width :] = seeds
        for i, (each, (_, ids)) in enumerate(zip(scored, best, strict=True)):
            tokens[each.rows, i * width : (i + 1) * width] = ids
        ssm_probs = np.zeros((len(scored), *tokens.shape))
        proposed = np.zeros(ssm_probs.shape, dtype=bool)
        for i, (each, (probs, _)) in enumerate(zip(scored, best, strict=True)):
            asked = tokens[each.rows]
            found = np.take_along_axis(each.probs.numpy(), np.maximum(asked, 0), 1) * (asked >= 0)
            ssm_probs[i, each.rows] = found
            proposed[i, each.rows] = (found >= probs[:, -1:]) & (asked >= 0)
        weights = None
        if len(scored) > 1:
            weights = np.stack([state.weights[ssms] for state in states])[at.owners]
        return Candidates(ssms, tokens, ssm_probs, proposed, weights, False)

    def _forward(
        self,
        ssm: int,
        rows: list[RequestRows],
        tokens: np.ndarray,
        scored: np.ndarray,
        layouts: dict[object, Pass],
        guessed: Sequence[tuple[Request, slice, int]] = (),
        key: object = None,
    ) -> Rows:
        """One pass of an SSM over some rows; the scores of the scored ones.

        SSMs of one shape share a plan where `key` says that their rows are the same: it takes a tenth of their pass.
        `guessed` names, for a part of the scored rows, the request and the position of the token that they guess: its
        temperature and noise go into their probabilities.
        """
        model, pool = self.models[ssm], self.cache.pools[1 + ssm]
        if (model.plan_key, key) not in layouts:
            layouts[model.plan_key, key] = model.plan(rows, pool)
        hidden = model.forward(torch.from_numpy(tokens).to(model.device), layouts[model.plan_key, key], pool)
        if not len(scored):
            return Rows(torch.empty(0, model.vocab_size), torch.empty(0, model.vocab_size))
        every = len(scored) == len(tokens)
        logits = model.logits(hidden[: len(tokens)] if every else hidden, None if every else torch.from_numpy(scored))
        logits = logits.float()
        if self.known[ssm] < model.vocab_size:
            logits[:, self.known[ssm] :] = -torch.inf
        sampled = [guess for guess in guessed if guess[0].is_sampled]
        tempered = logits.clone() if sampled else logits
        for request, part, position in sampled:
            assert request.sampler is not None
            request.sampler.temper(tempered[part], position, request.spec.verification)
        return Rows(torch.softmax(tempered, -1).cpu(), logits.cpu() if sampled else logits)
