"""Deterministic growth of a batch's token trees, level by level, with numpy.

The specification is treespec_kernels/tree/tree_merge.py; nodes and values are bit-identical to it, with two additions:
static branching, and early removal of nodes that cannot be among a tree's best, which changes no selected tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from treespec.drafters.evidence import SeedEvidence
from treespec.tree import Draws, TokenTree
from treespec_kernels.sampling.logit_transforms import topk_rows
from treespec_kernels.tree.growth_limits import CHILDREN, FRONTIER, MAX_MIXTURE, MIN_MIXTURE, SEEDS, frontier_width
from treespec_kernels.tree.tree_levels import Frontier, Level

_ONE = np.float32(1)


class SsmProbs(NamedTuple):
    """An SSM's next-token probabilities for some rows of the frontier.

    Attributes:
        ssm: index of the SSM.
        rows: int64, frontier rows, ascending.
        probs: float32 [len(rows), width].
        tokens: int64 [width], ascending, the tokens of the columns; None if they are the whole vocabulary.
    """

    ssm: int
    rows: np.ndarray
    probs: np.ndarray
    tokens: np.ndarray | None = None


class _Candidates(NamedTuple):
    """Proposed children of each row of the frontier.

    Attributes:
        tokens: int64 [num_rows, width], -1 for no candidate and for repeated tokens of a row.
        draft_probs: float32 [num_ssms, num_rows, width], each SSM's probability where it proposes the token.
        proposed: bool [num_ssms, num_rows, width].
        probs: float32 [num_rows, width], merged probability.
        seeds: int64 [num_rows, width], index of the seed with the same path, -1 for none.
    """

    tokens: np.ndarray
    draft_probs: np.ndarray
    proposed: np.ndarray
    probs: np.ndarray
    seeds: np.ndarray


class _Seeds:
    """The seed trees of a batch, concatenated: node i of tree t has index `first[t] + i`.

    Attributes:
        children: int64 [num_nodes + 1, width], children of each node, padded with -1. The last row is empty, so that
            index -1 (no seed) has no children.
        ratios: float32 [num_nodes], evidence ratios.
    """

    def __init__(self, trees: Sequence[TokenTree], evidence: SeedEvidence):
        sizes = [len(tree) for tree in trees]
        self.trees, self.first = trees, np.array([0, *accumulate(sizes)])
        self.tokens = np.concatenate([tree.tokens for tree in trees])
        self.probs = np.concatenate([tree.probs for tree in trees]).astype(np.float32)
        if len(self.tokens) == len(trees):  # only roots, as in most rounds
            self.ratios, self.width = np.ones(len(trees), dtype=np.float32), 1
            self.children = np.full((len(trees) + 1, 1), -1)
            return
        self.ratios = evidence.ratios(self.probs)
        parents = np.concatenate([tree.parents for tree in trees])
        shift = np.repeat(self.first[:-1], sizes)
        below = np.flatnonzero(parents >= 0)
        parents = parents + shift  # invalid for roots
        order = below[np.argsort(parents[below], kind="stable")]
        ranked = parents[order]
        place = np.arange(len(order)) - np.searchsorted(ranked, ranked)
        self.width = int(place.max(initial=0)) + 1
        self.children = np.full((len(parents) + 1, self.width), -1)
        self.children[ranked, place] = order


@dataclass(frozen=True)
class Shape:
    """Limits of one tree.

    Attributes:
        max_depth: maximum depth; 0 = no growth.
        nodes: number of nodes that the tree will be cut to.
        branching: static number of children per node by depth; None = chosen by value.
        end_tokens: tokens below which nothing is drafted.
    """

    max_depth: int
    nodes: int
    branching: Sequence[int] | None
    end_tokens: tuple[int, ...]


class Forest:
    """One growing tree per request, which merges the SSMs' proposals with those of other sources (the seeds).

    Args:
        seeds: by request, a tree with the same root. Trees that grow use its best `SEEDS` nodes.
        shapes: by request.
        num_ssms: number of SSMs.
        evidence: evidence ratios of the seeds.
        max_children: maximum number of proposals of one source at one node.
        max_frontier: maximum number of expanded nodes per tree and depth; see `frontier_width`.

    Attributes:
        frontier: nodes to score next.
        slots: by tree and level, indices of the expanded nodes, in slot order.
    """

    def __init__(
        self,
        seeds: Sequence[TokenTree],
        shapes: Sequence[Shape],
        num_ssms: int,
        evidence: SeedEvidence,
        max_children: int = CHILDREN,
        max_frontier: int = FRONTIER,
    ):
        count = len(seeds)
        self.shapes, self.num_ssms = shapes, num_ssms
        self.max_children, self.max_frontier = max_children, max_frontier
        used = [seed.best(1 + SEEDS) if shape.max_depth else seed for seed, shape in zip(seeds, shapes, strict=True)]
        self.seeds = _Seeds(used, evidence)
        roots, trees, one = self.seeds.first[:-1], np.arange(count), np.ones(count, dtype=np.float32)
        proposed = np.zeros((count, num_ssms), dtype=bool)
        tokens = self.seeds.tokens[roots]
        draft_probs = np.zeros((count, num_ssms), dtype=np.float32)
        self._levels = [Level(tokens, np.full(count, -1), trees, roots, one, one, proposed, draft_probs)]
        self._size, self._level_nodes = count, [count]
        self.slots: list[list[np.ndarray]] = [[] for _ in seeds]
        self._num_slots = np.zeros(count, dtype=np.int64)
        self._min_values = np.zeros(count, dtype=np.float32)  # by tree, minimum value of its best `nodes` so far
        self._values: list[list[np.ndarray]] = [[one[:1]] for _ in seeds]  # by tree and level
        self.frontier = Frontier(trees, tokens, trees, roots, np.full(count, -1), one)
        self.stop(np.array([not shape.max_depth for shape in shapes]))

    @property
    def depth(self) -> int:
        """Number of levels grown."""
        return len(self._level_nodes) - 1

    def extend(self, ssm_probs: Sequence[SsmProbs], weights: Sequence[np.ndarray]) -> np.ndarray:
        """Add the children that SSMs and seeds propose for the frontier, and select the next frontier.

        Args:
            ssm_probs: of the SSMs that scored the frontier or a part of it. Rows whose top probabilities are not finite
                are ignored.
            weights: by tree, the SSMs' mixture weights, float [num_ssms]; sum 1, 0 for an SSM that did not score.

        Returns:
            bool [frontier rows], True where an SSM's top probabilities are not finite.
        """
        at = self.frontier
        found, broken = self._candidates(ssm_probs, np.array(weights, dtype=np.float32)[at.owners])
        values, valid = at.values[:, None] * found.probs, found.tokens >= 0
        parts = at.parts()
        slots = np.empty(len(at.nodes), dtype=np.int64)  # the rows take the next slots of their trees
        for owner, part in parts.items():
            first, count = self._num_slots[owner], part.stop - part.start
            slots[part] = np.arange(first, first + count)
            self._num_slots[owner] += count
            self.slots[owner].append(at.nodes[part])
            self._keep(owner, values[part], valid[part], found.seeds[part])
        rows, columns = np.nonzero(valid)
        level = Level(
            found.tokens[rows, columns],
            at.nodes[rows],
            at.owners[rows],
            found.seeds[rows, columns],
            found.probs[rows, columns],
            values[rows, columns],
            found.proposed[:, rows, columns].T,
            found.draft_probs[:, rows, columns].T,
        )
        self._levels.append(level)
        self._level_nodes.append(len(rows))
        edges = np.searchsorted(rows, [*(part.start for part in parts.values()), len(at.nodes)]).tolist()
        expanded = []
        for owner, (begin, end) in zip(parts, pairwise(edges), strict=True):
            self._values[owner].append(level.values[begin:end])
            expanded.append(begin + self._expanded(owner, level.tokens[begin:end], level.values[begin:end]))
        chosen = np.concatenate(expanded)
        self.frontier = Frontier(
            self._size + chosen,
            level.tokens[chosen],
            level.owners[chosen],
            level.seeds[chosen],
            slots[rows[chosen]],
            level.values[chosen],
        )
        self._size += len(rows)
        return broken

    def _candidates(self, ssm_probs: Sequence[SsmProbs], weights: np.ndarray) -> tuple[_Candidates, np.ndarray]:
        """Merge the proposals of SSMs and seeds; also return the broken rows, bool [num_rows].

        Args:
            ssm_probs: as in `extend`.
            weights: float32 [num_rows, num_ssms].
        """
        at, seeds = self.frontier, self.seeds
        count, widest = len(at.nodes), max(self.children_at(owner) for owner in at.owners.tolist())
        below = seeds.children[at.seeds]
        seed_tokens = np.where(below >= 0, seeds.tokens[below], -1)
        top_probs = np.zeros((self.num_ssms, count, widest), np.float32)
        proposals, broken = [], np.zeros(count, dtype=bool)
        for ssm, rows, probs, known in ssm_probs:
            values, columns = top_tokens(probs, widest)
            columns = columns if known is None else known[columns]
            finite = np.isfinite(values).all(1)  # top-k sorts NaN first
            broken[rows[~finite]] = True
            own = np.full((count, widest), -1)
            own[rows, : columns.shape[1]] = np.where(finite[:, None], columns, -1)
            top_probs[ssm, rows, : columns.shape[1]] = np.where(finite[:, None], values, 0)
            proposals.append((ssm, own))
        tokens = np.concatenate([*(own for _, own in proposals), seed_tokens[:, : self.max_children]], axis=1)
        mixture, has_mixture = np.zeros(tokens.shape, dtype=np.float32), np.zeros((count, 1), dtype=bool)
        proposed = np.zeros((self.num_ssms, *tokens.shape), dtype=bool)
        draft_probs = np.zeros(proposed.shape, dtype=np.float32)
        for ssm, own in proposals:
            same = (tokens[:, :, None] == own[:, None, :]) & (own >= 0)[:, None, :]
            proposed[ssm] = same.any(2)
            draft_probs[ssm] = np.where(same, top_probs[ssm][:, None, :], 0).max(2)
            mixture += weights[:, ssm, None] * draft_probs[ssm]
            has_mixture |= (own >= 0).any(1, keepdims=True)
        mixture = np.minimum(mixture, _ONE)
        same = (tokens[:, :, None] == seed_tokens[:, None, :]) & (below >= 0)[:, None, :]
        node = np.where(same.any(2), np.take_along_axis(below, same.argmax(2), 1), -1)
        prior = np.clip(mixture, MIN_MIXTURE, MAX_MIXTURE)
        scaled = seeds.ratios[node] * prior
        posterior = np.where(has_mixture, scaled / (scaled + (_ONE - prior)), seeds.probs[node])
        repeats = np.tril(tokens[:, :, None] == tokens[:, None, :], -1).any(2)
        tokens = np.where(repeats, -1, tokens)
        return _Candidates(tokens, draft_probs, proposed, np.where(node >= 0, posterior, mixture), node), broken

    def paths(self) -> list[list[int]]:
        """Return the path of each frontier row: the tokens from the root (exclusive) to the node."""
        tokens = np.concatenate([level.tokens for level in self._levels])
        parents = np.concatenate([level.parents for level in self._levels])
        nodes, reversed_path = self.frontier.nodes, []
        for _ in range(self.depth):
            reversed_path.append(tokens[nodes])
            nodes = parents[nodes]
        return np.stack(reversed_path[::-1], axis=1).tolist() if reversed_path else [[] for _ in nodes]

    def children_at(self, owner: int) -> int:
        """Return the maximum number of children of a frontier node of one tree."""
        branching = self.shapes[owner].branching
        return branching[min(self.depth, len(branching) - 1)] if branching else self.max_children

    def _keep(self, owner: int, values: np.ndarray, valid: np.ndarray, seeds: np.ndarray) -> None:
        """Clear `valid` for the new nodes of one tree that are not kept, in place.

        Static branching keeps a fixed number of children per node, otherwise nodes that may be among the tree's best.

        Args:
            owner: index of the tree.
            values, valid, seeds: [num_rows, width], of its candidates.
        """
        shape = self.shapes[owner]
        if shape.branching:
            ranks = np.argsort(np.argsort(np.where(valid, -values, 1.0), axis=1, kind="stable"), axis=1)
            valid &= ranks < self.children_at(owner)
            return
        all_values = np.concatenate([*self._values[owner], values[valid]])
        if len(all_values) > shape.nodes:
            self._min_values[owner] = np.partition(all_values, -shape.nodes)[-shape.nodes]
            # Seeds are always kept: `finish` adds missing seeds with their own probability, a different value.
            valid &= (values >= self._min_values[owner]) | (seeds >= 0)

    def _expanded(self, owner: int, tokens: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Select the nodes to expand next among one tree's newest nodes; indices, best first without branching."""
        shape = self.shapes[owner]
        if self.depth >= shape.max_depth:
            return np.empty(0, dtype=np.int64)
        growable = ~np.isin(tokens, shape.end_tokens)
        if shape.branching:
            return np.flatnonzero(growable)
        growable &= (values > 0) & (values >= self._min_values[owner])
        order = np.argsort(-values, kind="stable")
        return order[growable[order]][: frontier_width(self.depth, self.max_frontier)]

    def stop(self, owners: np.ndarray) -> None:
        """Remove trees from the frontier; owners: bool [num_trees]."""
        if owners.any():
            remaining = ~owners[self.frontier.owners]
            self.frontier = Frontier(*(part[remaining] for part in self.frontier))

    def open_mass(self) -> np.ndarray:
        """Return the open mass of each tree: float64 [num_trees].

        This is the probability that its frontier is reached and that the next token is not among the seeds.
        """
        at, seeds = self.frontier, self.seeds
        below = seeds.children[at.seeds]
        covered = np.cumsum(seeds.probs[below] * (below >= 0), axis=1)[:, -1]  # unlike `sum`, in order
        values = at.values * np.maximum(1 - covered, 0.0)
        return np.bincount(at.owners, values, minlength=len(self.shapes))

    def level_mass(self, least: float) -> np.ndarray:
        """Return the probability that each tree's newest level is reached: float64 [num_trees].

        Counts nodes that are not seeds and have at least the value `least`.
        """
        level = self._levels[-1]
        counted = (level.values >= np.float32(least)) & (level.seeds < 0)
        return np.bincount(level.owners[counted], level.values[counted], minlength=len(self.shapes))

    def finish(self, names: Sequence[str]) -> list[tuple[TokenTree, np.ndarray]]:
        """Build the trees, including seeds that were not reached.

        Args:
            names: of the SSMs.

        Returns:
            By request, the tree and each node's draft slot, -1 if it was not expanded.
        """
        joined = Level(*(np.concatenate(parts) for parts in zip(*self._levels, strict=True)))
        depths = np.repeat(np.arange(len(self._level_nodes)), self._level_nodes)
        return [self._finish(owner, joined, depths, names) for owner in range(len(self.shapes))]

    def _finish(
        self, owner: int, nodes: Level, depths: np.ndarray, names: Sequence[str]
    ) -> tuple[TokenTree, np.ndarray]:
        """Build one tree from all levels of all trees."""
        expanded = np.concatenate(self.slots[owner]) if self.slots[owner] else np.empty(0, dtype=np.int64)
        if len(self.shapes) > 1:
            own = np.flatnonzero(nodes.owners == owner)
            nodes, depths, expanded = Level(*(part[own] for part in nodes)), depths[own], np.searchsorted(own, expanded)
            nodes.parents[1:] = np.searchsorted(own, nodes.parents[1:])
        count = len(nodes.tokens)
        slot_of_node = np.full(count, -1)
        slot_of_node[expanded] = np.arange(len(expanded))
        children, sources = np.nonzero(nodes.proposed)
        draft_probs = nodes.draft_probs[children, sources].astype(np.float64)
        draws = Draws(nodes.parents[children], children, sources, draft_probs)
        probs = nodes.probs.astype(np.float64)
        tree = TokenTree(nodes.tokens, nodes.parents, depths, probs, draws, tuple(names))
        tree.with_values(nodes.values.astype(np.float64))
        seed = self.seeds.trees[owner]
        if len(seed) > 1:
            complete = not self.shapes[owner].branching or not self.slots[owner]
            tree = _join(tree, seed, nodes.seeds - self.seeds.first[owner], complete)
            slot_of_node = np.concatenate([slot_of_node, np.full(len(tree) - count, -1)])
        return tree, slot_of_node


def top_tokens(probs: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest probabilities of each row and their tokens, descending, lower tokens first among equals."""
    values, tokens = (part.numpy() for part in topk_rows(torch.from_numpy(probs), count))
    smallest = values[:, -1:]
    # Where a tie crosses the cut, top-k returns an arbitrary subset of the tied tokens.
    for row in np.flatnonzero((probs == smallest).sum(1) > (values == smallest).sum(1)):
        tokens[row] = np.argsort(-probs[row], kind="stable")[: tokens.shape[1]]
    return values, np.take_along_axis(tokens, np.lexsort((tokens, -values)), 1)


def _join(tree: TokenTree, seed: TokenTree, seed_of_node: np.ndarray, complete: bool) -> TokenTree:
    """Append the seed's draws to a tree, and its missing nodes if `complete`.

    Parents precede their children in the result, but nodes are not sorted by depth.

    Args:
        tree: grown over the seed.
        seed: nodes proposed by other sources.
        seed_of_node: int64 [num_nodes], the seed node of each node of `tree`, negative for none.
        complete: whether to append nodes of the seed that the tree lacks.
    """
    node_of_seed = np.full(len(seed), -1)
    known = np.flatnonzero(seed_of_node >= 0)
    node_of_seed[seed_of_node[known]] = known
    rest = np.flatnonzero(node_of_seed < 0) if complete else np.empty(0, dtype=np.int64)
    node_of_seed[rest] = len(tree) + np.arange(len(rest))
    drawn = np.flatnonzero(node_of_seed[seed.draws.children] >= 0)
    own = seed.draws
    names = tree.source_names + tuple(name for name in seed.source_names if name not in tree.source_names)
    index = np.array([names.index(name) for name in seed.source_names], dtype=np.int64)
    draws = Draws(
        np.concatenate([tree.draws.parents, node_of_seed[own.parents[drawn]]]),
        np.concatenate([tree.draws.children, node_of_seed[own.children[drawn]]]),
        np.concatenate([tree.draws.sources, index[own.sources[drawn]]]),
        np.concatenate([tree.draws.probs, own.probs[drawn]]),
    )
    probs, above = seed.probs[rest].astype(np.float32), node_of_seed[seed.parents[rest]]
    values = [*tree.values.astype(np.float32)]
    for prob, parent in zip(probs, above.tolist(), strict=True):
        values.append(values[parent] * prob)
    joined = TokenTree(
        np.concatenate([tree.tokens, seed.tokens[rest]]),
        np.concatenate([tree.parents, above]),
        np.concatenate([tree.depths, seed.depths[rest]]),
        np.concatenate([tree.probs, probs]),
        draws,
        names,
    )
    return joined.with_values(np.array(values, dtype=np.float64))
