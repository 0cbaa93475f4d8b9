"""Drafts of the SSM group: reading committed tokens, scoring roots and scoring levels.

A `StepDraft` scores each level in a pass; a `OnePassDraft` predicts all depths in one pass at the root.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import torch

from treespec.cache.kv_cache import KVCache
from treespec.cache.state_pool import StatePool
from treespec.drafters.ssm.forest import Forest, GrowingForest, SsmProbs
from treespec.drafters.ssm.levels import PlannedLevels
from treespec.drafters.ssm.scoring import (
    NO_FEATURES,
    Chain,
    Rows,
    ScoredSlice,
    inputs_of,
    level_probs,
    score_blocks,
    score_rows,
    unread_of,
)
from treespec.drafters.ssm.ssm_state import SsmState, outputs_of
from treespec.models.block_draft import BlockDraft
from treespec.models.decoder import Pass
from treespec.models.group_model import GroupModel, StepModel
from treespec.planning.draft_plan import Drafted
from treespec.request import Request
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.cpu.compiled_plan import state_addresses
from treespec_kernels.cpu.growth_cpu import STRUCTS, DraftInputs
from treespec_kernels.recurrent.request_state import StateRows

CATCH_UP_CHUNK = 256  # maximum committed tokens of a request per catch-up pass


@dataclass
class GrowingTrees:
    """The trees of a round that grow level by level."""

    requests: Sequence[Request]
    states: Sequence[SsmState]
    forest: GrowingForest  # trees that contain only their roots
    levels: PlannedLevels  # slots and layouts of the newest level
    drafted: Drafted  # work counters of the round; updated
    layouts: dict[object, Pass] = field(default_factory=dict)  # layouts over the roots by plan key

    def unread(self, ssm: int, tree: int) -> Chain:
        """Return the positions without K/V in an SSM's pool, the root's last."""
        request = self.requests[tree]
        # The bonus token may be an expanded node with valid K/V, but the root is always recomputed.
        return request, min(int(self.states[tree].valid[ssm]), request.context_len), request.context_len + 1

    def weights(self, drafts: Sequence["GroupDraft"]) -> list[np.ndarray]:
        """Return, by tree, the weights of the drafts that score the frontier; sum 1 or 0."""
        scores = np.array([draft.scores_at(self.forest.depth) for draft in drafts])
        if scores.all():
            return [state.weights for state in self.states]
        remaining = [state.weights * scores for state in self.states]
        return [weights / max(float(weights.sum()), 1e-9) for weights in remaining]

    def score(self, drafts: Sequence["GroupDraft"]) -> list[SsmProbs]:
        """Score the frontier with each active draft; at roots, the same pass reads the tokens that a draft missed."""
        frontier, depth, results = self.forest.frontier, self.forest.depth, list[SsmProbs]()
        slices_of_trees = frontier.slices()
        if depth:
            self.levels.extend(frontier, depth)
        paths = self.forest.paths() if any(self.requests[tree].restriction for tree in slices_of_trees) else []
        for draft in drafts:
            slices = {tree: part for tree, part in slices_of_trees.items() if draft.ssm in self.states[tree].active}
            if slices and not depth:
                results.append(draft.score_roots(self, [part.start for part in slices.values()]))
            elif slices and draft.scores_at(depth):
                results.append(draft.score_level(self, slices, paths))
        return results


class GroupDraft(ABC):
    """A draft of the group."""

    def __init__(
        self,
        ssm: int,  # index of the draft in the group
        model: GroupModel,
        cache: KVCache,  # the engine's cache; pool `ssm` + 1 is the draft's
        is_compared: bool,  # whether to score the draft on the tokens that it reads, because the group has other drafts
        states: StatePool | None = None,  # states of its recurrent layers; None without such layers
    ):
        self.ssm, self.cache, self.pool, self.states = ssm, cache, cache.pools[1 + ssm], states
        self.model, self.is_compared, self.max_depth = model, is_compared, model.max_depth

    def scores_at(self, depth: int) -> bool:
        """Return whether the draft predicts children of nodes at this depth."""
        return self.max_depth is None or depth < self.max_depth

    @abstractmethod
    def read(self, chains: Sequence[Chain], counts: Sequence[int]) -> Rows | None:
        """Compute K/V of committed positions; return scores after the last `counts[i]` tokens of each chain, if any."""

    @abstractmethod
    def score_roots(self, trees: GrowingTrees, rows: Sequence[int]) -> SsmProbs:
        """Score the roots in these frontier rows, in a pass that also reads the tokens before them."""

    @abstractmethod
    def score_level(self, trees: GrowingTrees, slices: dict[int, slice], paths: Sequence[Sequence[int]]) -> SsmProbs:
        """Score these trees' slices of the frontier; `paths`, by row, are needed for restrictions only."""

    @abstractmethod
    def call_inputs(self, chains: Sequence[Chain], trees: Sequence[int], num_trees: int) -> DraftInputs:
        """Return this draft's inputs of the compiled call for `trees`; chains end before their roots' positions."""


class StepDraft(GroupDraft):
    """An SSM or a draft head, which runs one pass per level."""

    model: StepModel

    def read(self, chains: Sequence[Chain], counts: Sequence[int]) -> Rows | None:
        if not self.model.keeps_kv:  # compute only the rows to score
            chains = [(r, stop - count, stop) for (r, _, stop), count in zip(chains, counts, strict=True) if count]
            counts = [count for count in counts if count]
        if not chains:
            return None
        ends = np.cumsum([stop - start for _, start, stop in chains])
        scored = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
        tokens, features = inputs_of(self.model, self.cache, chains)
        layout = self.model.plan(self._rows(chains, has_roots=False), self.pool)
        return score_rows(self.model, self.pool, layout, tokens, features, scored)

    def score_roots(self, trees: GrowingTrees, rows: Sequence[int]) -> SsmProbs:
        tree_ids = trees.forest.frontier.tree_ids[rows].tolist()
        chains = [trees.unread(self.ssm, tree) for tree in tree_ids]
        tokens, features = inputs_of(self.model, self.cache, chains)
        key = self.model.plan_key, *((request.request_id, start) for request, start, _ in chains)
        if key not in trees.layouts:
            trees.layouts[key] = self.model.plan(self._rows(chains, has_roots=True), self.pool)
        last = np.cumsum([stop - start for _, start, stop in chains]) - 1
        scored = np.arange(len(tokens)) if self.is_compared else last
        root_rows = last if self.is_compared else np.arange(len(chains))
        slices = [
            ScoredSlice(request, slice(row, row + 1), stop, [()])
            for (request, _, stop), row in zip(chains, root_rows.tolist(), strict=True)
        ]
        scores = score_rows(self.model, self.pool, trees.layouts[key], tokens, features, scored, slices)
        trees.drafted.add_pass(len(chains))
        roots = scores.select(root_rows)
        for i, (tree, (request, start, _), end) in enumerate(zip(tree_ids, chains, last, strict=True)):
            state = trees.states[tree]
            if self.is_compared:
                probs = scores.probs_of(np.arange(end - request.context_len + start, end), request.tokens[start + 1 :])
                state.mixture.observe(self.ssm, start + 1, probs)
            state.valid[self.ssm] = request.context_len
            state.scores[self.ssm].append(roots.select(slice(i, i + 1)))
        return SsmProbs(self.ssm, np.array(rows), roots.probs, roots.tokens)

    def score_level(self, trees: GrowingTrees, slices: dict[int, slice], paths: Sequence[Sequence[int]]) -> SsmProbs:
        frontier, depth, states = trees.forest.frontier, trees.forest.depth, trees.states
        model = self.model.at_depth(depth)
        rows = np.concatenate([np.arange(part.start, part.stop) for part in slices.values()])
        bounds = accumulate((part.stop - part.start for part in slices.values()), initial=0)
        scored_slices = {tree: slice(*edges) for tree, edges in zip(slices, pairwise(bounds), strict=True)}
        scored = [
            ScoredSlice(request := trees.requests[tree], part, request.context_len + 1 + depth, paths[slices[tree]])
            for tree, part in scored_slices.items()
        ]
        features = NO_FEATURES
        if model.columns:
            parents = {tree: frontier.parent_slots[part] for tree, part in slices.items()}
            features = torch.cat([outputs_of(states[tree].scores[self.ssm], slots) for tree, slots in parents.items()])
        state_rows = dict[int, StateRows]()
        if self.states is not None:
            state_rows = {tree: StateRows(self.states.of(trees.requests[tree].request_id)) for tree in slices}
        layout = trees.levels.plan(self.ssm, rows, state_rows)
        tokens = frontier.tokens[rows]
        scores = score_rows(model, self.pool, layout, tokens, features, np.arange(len(rows)), scored)
        trees.drafted.add_pass(len(slices))
        for tree, part in scored_slices.items():
            states[tree].scores[self.ssm].append(scores.select(part))
        return SsmProbs(self.ssm, rows, scores.probs, scores.tokens)

    def _rows(self, chains: Sequence[Chain], has_roots: bool) -> list[RequestRows]:
        """Return the rows of a pass over committed tokens, with a root at the end of each chain if `has_roots`."""
        rows = list[RequestRows]()
        for request, start, stop in chains:
            states, count = self.states, stop - start
            state = None if states is None else StateRows(states.of(request.request_id), count - has_roots)
            first = start - self.model.offset
            rows.append(RequestRows.chain(first, count, request.pages, request.max_len, state=state))
        return rows

    def call_inputs(self, chains: Sequence[Chain], trees: Sequence[int], num_trees: int) -> DraftInputs:
        if self.states is not None:
            states = (STRUCTS["RequestState"] * num_trees)()
            for tree, (request, start, root) in zip(trees, chains, strict=True):
                state = self.states.of(request.request_id)
                state.check(start, 0, 0)
                addresses, stored_rows = state_addresses(state), state.inputs.shape[1]
                states[tree] = STRUCTS["RequestState"](*addresses, None, stored_rows, start - state.length)
                state.length = root  # after the call
            return DraftInputs(states=states)
        if not self.model.columns:
            return DraftInputs()
        # Features before the committed tokens, tree by tree, then features before the roots.
        spans = [(request, start - 1, root - 1) for request, start, root in chains]
        spans += [(request, root - 1, root) for request, _, root in chains]
        states = [self.cache.read_features(request.pages, start, stop) for request, start, stop in spans]
        return DraftInputs(self.model.features_of(torch.cat(states)))


class OnePassDraft(GroupDraft):
    """A block draft, which predicts the tokens of several depths in one pass at the root."""

    model: BlockDraft

    def read(self, chains: Sequence[Chain], counts: Sequence[int]) -> None:
        unread = unread_of(self.model, self.cache, [(request, start, stop + 1) for request, start, stop in chains])
        self.model.read(unread, self.pool)

    def score_roots(self, trees: GrowingTrees, rows: Sequence[int]) -> SsmProbs:
        frontier = trees.forest.frontier
        tree_ids = frontier.tree_ids[rows].tolist()
        blocks = score_blocks(self.model, self.cache, self.pool, [trees.unread(self.ssm, tree) for tree in tree_ids])
        for tree, block in zip(tree_ids, blocks, strict=True):
            trees.states[tree].blocks[self.ssm] = block
            trees.states[tree].valid[self.ssm] = trees.requests[tree].context_len
        paths: list[Sequence[int]] = [()] * len(frontier.nodes)
        return self.score_level(
            trees, {tree: slice(row, row + 1) for tree, row in zip(tree_ids, rows, strict=True)}, paths
        )

    def score_level(self, trees: GrowingTrees, slices: dict[int, slice], paths: Sequence[Sequence[int]]) -> SsmProbs:
        forest, depth, scored = trees.forest, trees.forest.depth, dict[int, tuple[np.ndarray, Rows]]()
        for tree, part in slices.items():
            rows, state = np.arange(part.start, part.stop), trees.states[tree]
            tokens = forest.frontier.tokens[rows]
            scores = state.blocks[self.ssm].at(self.model, trees.requests[tree], depth, tokens, paths[part])
            state.scores[self.ssm].append(scores)
            scored[tree] = rows, scores
        trees.drafted.add_pass(len(slices))
        differ = self.model.uses_node_tokens or any(trees.requests[tree].restriction for tree in slices)
        num_top = max(map(forest.children_at, slices)) if isinstance(forest, Forest) else None
        return level_probs(self.ssm, scored, differ, num_top)

    def call_inputs(self, chains: Sequence[Chain], trees: Sequence[int], num_trees: int) -> DraftInputs:
        roots = [(request, start, root + 1) for request, start, root in chains]
        blocks = score_blocks(self.model, self.cache, self.pool, roots, plain=True)
        probs = [block.rows.probs for block in blocks if block.rows is not None]
        block_probs = np.zeros((num_trees, *probs[0].shape), dtype=np.float32)
        block_probs[trees] = probs
        return DraftInputs(block_probs=block_probs)


def group_draft(ssm: int, model: GroupModel, cache: KVCache, is_compared: bool, states: StatePool | None) -> GroupDraft:
    """Wrap a model as a draft of the group; arguments as in `GroupDraft`."""
    if isinstance(model, BlockDraft):
        return OnePassDraft(ssm, model, cache, is_compared)
    return StepDraft(ssm, model, cache, is_compared, states)
