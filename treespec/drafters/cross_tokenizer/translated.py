"""Token-level intersection (TLI, arXiv 2502.05202): a cross-tokenizer draft proposes shared tokens.

The draft encodes the text with its own tokenizer. Its logits are restricted to the intersection of the vocabularies
*before* tokens are selected or drawn, which gives a distribution over target ids, with the same noise, draws and
verification as any other source. Each proposed token exists in both vocabularies, so trees grow in the draft's own KV
cache like those of an SSM.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treespec.drafters.cross_tokenizer.cross_tokenizer_drafter import (
    CrossTokenizerDrafter,
    CrossTokenizerState,
    Drafting,
)
from treespec.drafters.evidence import SeedEvidence
from treespec.drafters.ssm.drawn_forest import DrawnForest
from treespec.drafters.ssm.forest import Forest, GrowingForest, SsmProbs, TreeLimits
from treespec.drafters.ssm.ssm_state import grown_masks, rows_of_level
from treespec.request import Request
from treespec.tree import TokenTree

_ONE = np.ones(1)


class TranslatedDrafter(CrossTokenizerDrafter):
    """Grows trees of tokens that target and draft share.

    Children are the top tokens, proposed deterministically. If `draws_for` returns True for a request, they are drawn
    from the draft's distribution instead, for verification rules that use random draws.
    """

    def __init__(
        self,
        *arguments: Any,  # arguments of `CrossTokenizerDrafter`
        # Whether this source samples its tokens for a request. At most one source may, because random draws cannot be
        # pruned to a node budget. The result must depend only on the request, not on drawn tokens
        draws_for: Callable[[Request], bool],
    ):
        super().__init__(*arguments)
        self._draws_for = draws_for
        to_draft = torch.from_numpy(self.translation.to_draft).to(self.model.device)
        self._columns, self._masked = to_draft.clamp(min=0), to_draft < 0
        self._first_level_mass = 0.7  # running mean of the first level's probability mass

    def _draft(self, batch: Sequence[Drafting]) -> None:
        random = [request.draws_at_random and self._draws_for(request) for request, *_ in batch]
        for kind in (False, True):
            group = [row for row, draws in zip(batch, random, strict=True) if draws == kind]
            if group and self._begins(group, self._first_level_mass):
                self._grow(group, forest := self._forest(group, kind))
                for (_, _, state), tree in zip(group, forest.finish((self.name,)), strict=True):
                    state.proposed = tree

    def _commit(self, requests: Sequence[Request], paths: Sequence[np.ndarray]) -> None:
        pages, lengths, moved = [], [], []
        for request, path in zip(requests, paths, strict=True):
            state = self._states.get(request.request_id)
            if state is None or state.proposed is None:
                continue
            assert state.proposed.slots is not None
            kept = state.proposed.slots[path]
            kept = kept[np.logical_and.accumulate(kept >= 0)]
            state.ahead = self.translation.to_draft[state.proposed.tokens[path[1 : len(kept)]]].tolist()
            pages.append(state.pages)
            lengths.append(len(state.context.tokens) - 1)
            moved.append(kept)
        self.cache.commit(0, pages, lengths, moved)
        super()._commit(requests, paths)

    def _forest(self, batch: Sequence[Drafting], random: bool) -> GrowingForest:
        """Create trees that contain only their roots."""
        requests, roots = [row.request for row in batch], [TokenTree.root(row.request.tokens[-1]) for row in batch]
        limits = [
            TreeLimits(depth, request.spec.max_nodes, request.spec.branching, request.end_tokens)
            for request, depth, _ in batch
        ]
        if not random:
            return Forest(roots, limits, SeedEvidence())
        adaptive = [request.spec.is_adaptive for request in requests]
        return DrawnForest(requests, roots, limits, adaptive, self.prices.least_value)

    def _grow(self, batch: Sequence[Drafting], forest: GrowingForest) -> None:
        requests, states = [row.request for row in batch], [row.state for row in batch]
        adaptive = np.array([request.spec.is_adaptive for request in requests], dtype=bool)
        last_open_mass = forest.open_mass()
        while len(forest.frontier.nodes):
            if forest.depth:
                last_open_mass = self._stop_unprofitable(forest, adaptive, last_open_mass)
                if not len(forest.frontier.nodes):
                    break
            tree_ids = forest.frontier.tree_ids
            with self.pass_value.timed(forest.depth > 0 or all(state.is_timed for state in states)):
                logits = self._score(states, forest) if forest.depth else self._score_roots(states)
                probs = self._probs(logits, requests, forest)
            scored = SsmProbs(0, np.arange(len(probs)), probs.numpy())
            broken = forest.extend([scored], [_ONE] * len(requests))
            for tree_id in tree_ids[broken]:
                states[tree_id].poisoned = True
            # Static trees may have children of probability 0, including tokens that the draft lacks.
            shared = self.translation.to_draft[forest.frontier.tokens] >= 0
            forest.frontier = forest.frontier.select(shared)

    def _stop_unprofitable(self, forest: GrowingForest, adaptive: np.ndarray, last_open_mass: np.ndarray) -> np.ndarray:
        """Stop all trees if they are adaptive and another level does not pay off; return the current open mass."""
        current = forest.open_mass()
        growing = np.unique(forest.frontier.tree_ids)
        if not adaptive[growing].all():
            return current
        level_mass = forest.level_mass(0.0)[growing]
        reached = np.minimum(level_mass / np.maximum(last_open_mass[growing], 1e-9), 1.0)
        if forest.depth == 1:
            self._first_level_mass += 0.1 * (float(reached.mean()) - self._first_level_mass)
        if not self.pass_value.pays(float((current[growing] * reached).sum())):
            forest.stop(np.ones(len(adaptive), dtype=bool))
        return current

    def _score(self, states: Sequence[CrossTokenizerState], forest: GrowingForest) -> Tensor:
        """Return the next-token logits of the frontier's nodes, float32 [num_rows, draft vocab]."""
        frontier, rows = forest.frontier, []
        for tree_id, part in frontier.slices().items():
            state = states[tree_id]
            state.masks, root = grown_masks(state.masks, frontier.parent_slots[part]), len(state.context.tokens) - 1
            rows.append(rows_of_level(state.masks, part.stop - part.start, root, state.pages, state.max_len))
        return self._forward(rows, self.translation.to_draft[frontier.tokens].tolist())

    def _probs(self, logits: Tensor, requests: Sequence[Request], forest: GrowingForest) -> Tensor:
        """Return each request's sampling probabilities over the shared tokens, float32 [num_rows, target vocab]."""
        logits = logits.index_select(1, self._columns).masked_fill_(self._masked, -torch.inf)
        paths = forest.paths() if any(request.restriction for request in requests) else []
        for tree_id, part in forest.frontier.slices().items():
            request = requests[tree_id]
            if request.restriction is not None:
                request.restriction.narrow(logits[part], request.tokens, paths[part])
            if request.is_sampled:
                assert request.sampler is not None
                position = request.context_len + 1 + forest.depth
                request.sampler.temper(logits[part], position, request.spec.verification)
        return torch.softmax(logits, -1).cpu()
