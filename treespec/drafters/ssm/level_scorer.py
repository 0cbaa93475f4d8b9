"""Scores the frontiers of growing trees with each draft, level by level."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from treespec.cache import KVCache
from treespec.drafters.ssm.blocks import Block, level_probs, score_blocks
from treespec.drafters.ssm.drawn_forest import DrawnForest
from treespec.drafters.ssm.forest import Forest, SsmProbs
from treespec.drafters.ssm.levels import Levels
from treespec.drafters.ssm.scoring import Rows, ScoredSlice, inputs_of, rows_of, score_rows
from treespec.drafters.ssm.ssm_state import SsmState, outputs_of, scored_rows
from treespec.models.block_draft import BlockDraft
from treespec.models.decoder import Pass
from treespec.models.feature_head import FeatureHead
from treespec.models.group_model import GroupModel, StepModel
from treespec.models.state_head import StateHead
from treespec.request import Request

CATCH_UP_CHUNK = 256  # maximum committed tokens of a request per catch-up pass


@dataclass
class DraftCounts:
    """Work of a round; see `Drafted`. A block draft's levels count as passes, too."""

    passes: int = 0
    request_passes: int = 0
    read_tokens: int = 0
    read_seconds: float = 0.0

    def add(self, requests: int) -> None:
        """Count a draft pass over trees of this many requests."""
        self.passes, self.request_passes = self.passes + 1, self.request_passes + requests


class LevelScorer:
    """Scores the frontiers of one round's trees.

    Args:
        models, cache: drafts of the group, and the engine's cache; pool i + 1 belongs to draft i.
        requests, states: of the trees.
        forest: the trees, roots only.
        levels: of the trees.
        read: reads the committed tokens of requests with a draft.
        counts: of the round; updated.
    """

    def __init__(
        self,
        models: Sequence[GroupModel],
        cache: KVCache,
        requests: Sequence[Request],
        states: Sequence[SsmState],
        forest: Forest | DrawnForest,
        levels: Levels,
        read: Callable[[int, Sequence[Request]], None],
        counts: DraftCounts,
    ):
        self._models, self._cache, self._requests, self._states = models, cache, requests, states
        self._forest, self._levels, self._read, self._counts = forest, levels, read, counts
        self._blocks: dict[tuple[int, int], Block] = {}  # by draft and tree
        self._weights, self._weights_depth = [state.weights for state in states], 0

    def score(self) -> list[SsmProbs]:
        """Score the frontier with each active draft."""
        at, depth = self._forest.frontier, self._forest.depth
        if not depth:
            return self._score_roots()
        self._levels.extend(at, depth)
        parts = at.parts()
        paths = self._forest.paths() if any(self._requests[owner].restriction for owner in parts) else []
        results: list[SsmProbs] = []
        for ssm, model in enumerate(self._models):
            own = scored_rows(ssm, self._states, parts)
            if not own or (model.max_depth is not None and depth >= model.max_depth):
                continue
            if isinstance(model, BlockDraft):
                results.append(self._score_block(ssm, model, parts, own, paths))
            else:
                at_depth = model.at_depth(depth) if isinstance(model, StateHead) else model
                results.append(self._score_level(ssm, at_depth, parts, own, paths))
        return results

    def weights(self) -> list[np.ndarray]:
        """Return the mixture weights of the drafts that score the frontier, by tree; sum 1, or 0 if there is none."""
        depth = self._forest.depth
        ends = {model.max_depth for model in self._models}
        if depth != self._weights_depth and depth in ends:  # the same list as long as the weights are the same
            scores = np.array([model.max_depth is None or depth < model.max_depth for model in self._models])
            left = [state.weights * scores for state in self._states]
            self._weights = [own / max(float(own.sum()), 1e-9) for own in left]
            self._weights_depth = depth
        return self._weights

    def _score_roots(self) -> list[SsmProbs]:
        """Score the roots with each active draft, in the same pass as the committed tokens that it missed."""
        owners = self._forest.frontier.owners.tolist()
        for owner in owners:
            self._states[owner].begin_tree()
        results: list[SsmProbs] = []
        layouts: dict[object, Pass] = {}
        for ssm, model in enumerate(self._models):
            rows = [row for row, owner in enumerate(owners) if ssm in self._states[owner].active]
            if not rows:
                continue
            served = [(self._requests[owners[row]], self._states[owners[row]]) for row in rows]
            self._read(ssm, [r for r, state in served if r.context_len - state.valid[ssm] >= CATCH_UP_CHUNK])
            if isinstance(model, BlockDraft):
                results.append(self._score_block_roots(ssm, model, [owners[row] for row in rows]))
                continue
            found = self._score_chains(ssm, model, served, layouts)
            for i, (request, state) in enumerate(served):
                state.valid[ssm] = request.context_len
                state.scores[ssm].append(found.select(slice(i, i + 1)))
            results.append(SsmProbs(ssm, np.array(rows), found.probs, found.tokens))
        return results

    def _score_chains(
        self,
        ssm: int,
        model: StepModel,
        served: Sequence[tuple[Request, SsmState]],
        layouts: dict[object, Pass],
    ) -> Rows:
        """Score the roots of some requests, and the draft itself on the tokens that it reads before them."""
        pool, several = self._cache.pools[1 + ssm], len(self._models) > 1
        # The bonus token may be an expanded node with valid K/V, but the root is always scored again.
        starts = [min(int(state.valid[ssm]), request.context_len) for request, state in served]
        chains = [(r, start, r.context_len + 1) for (r, _), start in zip(served, starts, strict=True)]
        tokens, features = inputs_of(model, self._cache, chains)
        key = model.plan_key, tuple(request.request_id for request, _ in served), tuple(starts)
        if key not in layouts:
            layouts[key] = model.plan(rows_of(model, chains), pool)
        last = np.cumsum([r.context_len + 1 - start for (r, _), start in zip(served, starts, strict=True)]) - 1
        scored = np.arange(len(tokens)) if several else last
        rows = last if several else np.arange(len(served))
        slices = [
            ScoredSlice(request, slice(row, row + 1), request.context_len + 1, [()])
            for (request, _), row in zip(served, rows.tolist(), strict=True)
        ]
        found = score_rows(model, pool, layouts[key], tokens, scored, slices, features)
        self._counts.add(len(served))
        if several:
            for (request, state), start, end in zip(served, starts, last, strict=True):
                read = np.arange(end - request.context_len + start, end)
                state.trust.observe(ssm, start + 1, found.probs_of(read, request.tokens[start + 1 :]))
            found = found.select(last)
        return found

    def _score_level(
        self,
        ssm: int,
        model: StepModel,
        parts: dict[int, slice],
        own: dict[int, slice],
        paths: Sequence[Sequence[int]],
    ) -> SsmProbs:
        """Score the nodes of the frontier in a pass.

        Args:
            ssm, model: the draft.
            parts: each tree's slice of the frontier.
            own: each tree's slice of the rows that the draft scores.
            paths: by frontier row, if a request has a restriction.
        """
        at, requests = self._forest.frontier, self._requests
        rows = np.concatenate([np.arange(parts[owner].start, parts[owner].stop) for owner in own])
        slices = [
            ScoredSlice(
                requests[owner], part, requests[owner].context_len + 1 + self._forest.depth, paths[parts[owner]]
            )
            for owner, part in own.items()
        ]
        features = None
        if isinstance(model, FeatureHead):
            above = [outputs_of(self._states[owner].scores[ssm], at.above[parts[owner]]) for owner in own]
            features = torch.cat(above)
        pool, scored = self._cache.pools[1 + ssm], np.arange(len(rows))
        found = score_rows(model, pool, self._levels.plan(ssm, rows), at.tokens[rows], scored, slices, features)
        self._counts.add(len(own))
        for owner, part in own.items():
            self._states[owner].scores[ssm].append(found.select(part))
        return SsmProbs(ssm, rows, found.probs, found.tokens)

    def _score_block_roots(self, ssm: int, model: BlockDraft, owners: Sequence[int]) -> SsmProbs:
        """Run a block draft's pass over these trees, and score their roots."""
        requests = [self._requests[owner] for owner in owners]
        starts = [min(int(self._states[owner].valid[ssm]), self._requests[owner].context_len) for owner in owners]
        chains = [(r, start, r.context_len + 1) for r, start in zip(requests, starts, strict=True)]
        for owner, block in zip(
            owners, score_blocks(model, self._cache, self._cache.pools[1 + ssm], chains), strict=True
        ):
            self._states[owner].valid[ssm], self._blocks[ssm, owner] = self._requests[owner].context_len, block
        parts = self._forest.frontier.parts()
        paths: list[Sequence[int]] = [()] * len(self._forest.frontier.nodes)
        return self._score_block(ssm, model, parts, scored_rows(ssm, self._states, parts), paths)

    def _score_block(
        self,
        ssm: int,
        model: BlockDraft,
        parts: dict[int, slice],
        own: dict[int, slice],
        paths: Sequence[Sequence[int]],
    ) -> SsmProbs:
        """Score the frontier by the rows of a block draft's pass; arguments as in `_score_level`."""
        depth, tokens, scored = self._forest.depth, self._forest.frontier.tokens, dict[int, tuple[np.ndarray, Rows]]()
        for owner in own:
            rows, request = np.arange(parts[owner].start, parts[owner].stop), self._requests[owner]
            found = self._blocks[ssm, owner].at(model, request, depth, tokens[rows], paths[parts[owner]])
            self._states[owner].scores[ssm].append(found)
            scored[owner] = rows, found
        self._counts.add(len(own))
        differ = model.uses_node_tokens or any(self._requests[owner].restriction for owner in own)
        most = max(map(self._forest.children_at, own)) if isinstance(self._forest, Forest) else None
        return level_probs(ssm, scored, differ, most)
