"""Scores the frontiers of growing trees with each draft, level by level."""

from collections.abc import Callable, Sequence

import numpy as np

from treespec.drafters.ssm.forest import SsmProbs
from treespec.drafters.ssm.group_draft import GroupDraft, GrowingTrees
from treespec.request import Request

CATCH_UP_CHUNK = 256  # maximum committed tokens of a request per catch-up pass


class LevelScorer:
    """Scores the frontiers of one round's trees.

    Args:
        drafts: of the group.
        trees: that grow.
        read: reads the committed tokens of requests with a draft.
    """

    def __init__(
        self, drafts: Sequence[GroupDraft], trees: GrowingTrees, read: Callable[[GroupDraft, Sequence[Request]], None]
    ):
        self._drafts, self._trees, self._read = drafts, trees, read
        self._weights, self._weights_depth = [state.weights for state in trees.states], 0

    def score(self) -> list[SsmProbs]:
        """Score the frontier with each active draft."""
        trees, frontier, depth = self._trees, self._trees.forest.frontier, self._trees.forest.depth
        if not depth:
            return self._score_roots()
        trees.levels.extend(frontier, depth)
        slices_of_trees = frontier.slices()
        paths = trees.forest.paths() if any(trees.requests[tree].restriction for tree in slices_of_trees) else []
        results: list[SsmProbs] = []
        for draft in self._drafts:
            slices = {tree: part for tree, part in slices_of_trees.items() if draft.ssm in trees.states[tree].active}
            if slices and (draft.max_depth is None or depth < draft.max_depth):
                results.append(draft.score_level(trees, slices, paths))
        return results

    def weights(self) -> list[np.ndarray]:
        """Return the mixture weights of the drafts that score the frontier, by tree; sum 1, or 0 if there is none."""
        depth = self._trees.forest.depth
        ends = {draft.max_depth for draft in self._drafts}
        if depth != self._weights_depth and depth in ends:  # the same list as long as the weights are the same
            scores = np.array([draft.max_depth is None or depth < draft.max_depth for draft in self._drafts])
            remaining = [state.weights * scores for state in self._trees.states]
            self._weights = [weights / max(float(weights.sum()), 1e-9) for weights in remaining]
            self._weights_depth = depth
        return self._weights

    def _score_roots(self) -> list[SsmProbs]:
        """Score the roots with each active draft, in the same pass as the committed tokens that it missed."""
        trees, owners = self._trees, self._trees.forest.frontier.owners.tolist()
        for tree in owners:
            trees.states[tree].begin_tree()
        results: list[SsmProbs] = []
        for draft in self._drafts:
            rows = [row for row, tree in enumerate(owners) if draft.ssm in trees.states[tree].active]
            if rows:
                chains = [trees.unread(draft.ssm, owners[row]) for row in rows]
                self._read(draft, [request for request, start, root in chains if root - 1 - start >= CATCH_UP_CHUNK])
                results.append(draft.score_roots(trees, rows))
        return results
