"""Deterministic growth of a batch's token trees, level by level.

The specification is treespec_kernels/tree/tree_merge.py, whose `merge_children` merges proposals here too. Growth on
the host adds static branching, and removes nodes early that cannot be among a tree's best, which changes no selected
tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from treespec.drafters.evidence import SeedEvidence
from treespec.tree import Draws, TokenTree, join_seed_tree
from treespec_kernels.sampling.logit_transforms import topk_rows
from treespec_kernels.tree.growth_limits import CHILDREN, FRONTIER, SEEDS, frontier_width
from treespec_kernels.tree.tree_levels import Frontier, Level
from treespec_kernels.tree.tree_merge import merge_children

_ZERO, _NOT_PROPOSED = np.float32(0), np.float32(np.nan)


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


class _SeedNodes:
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
        above = parents[order]
        rank = np.arange(len(order)) - np.searchsorted(above, above)
        self.width = int(rank.max(initial=0)) + 1
        self.children = np.full((len(parents) + 1, self.width), -1)
        self.children[above, rank] = order


@dataclass(frozen=True)
class TreeLimits:
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

    def children_at(self, depth: int) -> int:
        """Return the static number of children of a node of this depth; 0 = chosen by value."""
        return self.branching[min(depth, len(self.branching) - 1)] if self.branching else 0


class Forest:
    """One growing tree per request, which merges the SSMs' proposals with those of other sources (the seeds).

    Args:
        seed_trees: by request, nodes proposed by other sources. Trees that grow use the best `SEEDS` of them.
        limits: by request.
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
        seed_trees: Sequence[TokenTree],
        limits: Sequence[TreeLimits],
        num_ssms: int,
        evidence: SeedEvidence,
        max_children: int = CHILDREN,
        max_frontier: int = FRONTIER,
    ):
        count = len(seed_trees)
        self.limits, self.num_ssms = limits, num_ssms
        self.max_children, self.max_frontier = max_children, max_frontier
        pairs = zip(seed_trees, limits, strict=True)
        used = [tree.best(1 + SEEDS) if limit.max_depth else tree for tree, limit in pairs]
        self.seeds = _SeedNodes(used, evidence)
        roots, trees, one = self.seeds.first[:-1], np.arange(count), np.ones(count, dtype=np.float32)
        proposed = np.zeros((count, num_ssms), dtype=bool)
        tokens = self.seeds.tokens[roots]
        draft_probs = np.zeros((count, num_ssms), dtype=np.float32)
        self._levels = [Level(tokens, np.full(count, -1), trees, roots, one, one, proposed, draft_probs)]
        self._size, self._level_nodes = count, [count]
        self.slots: list[list[np.ndarray]] = [[] for _ in seed_trees]
        self._num_slots = np.zeros(count, dtype=np.int64)
        self._min_values = np.zeros(count, dtype=np.float32)  # by tree, minimum value of its best `nodes` so far
        self._values: list[list[np.ndarray]] = [[one[:1]] for _ in seed_trees]  # by tree and level
        self.frontier = Frontier(trees, tokens, trees, roots, np.full(count, -1), one)
        self.stop(np.array([not limit.max_depth for limit in limits]))

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
        frontier, levels, frontiers = self.frontier, list[Level](), list[Frontier]()
        proposals, broken = self._proposals(ssm_probs)
        mixture = np.array(weights, dtype=np.float32)
        for owner, part in frontier.slices().items():
            rows, level = self._children(owner, part, proposals, mixture[owner])
            kept = self._kept(owner, rows, level)
            rows, level = rows[kept], level.select(kept)
            slots = self._num_slots[owner] + rows - part.start  # the rows take the next slots of their tree
            self._num_slots[owner] += part.stop - part.start
            self.slots[owner].append(frontier.nodes[part])
            self._values[owner].append(level.values)
            best = self._expanded(owner, level)
            columns = level.tokens, level.owners, level.seeds, slots, level.values
            frontiers.append(Frontier(self._size + best, *(column[best] for column in columns)))
            self._size += len(rows)
            levels.append(level)
        self._levels.append(Level(*map(np.concatenate, zip(*levels, strict=True))))
        self._level_nodes.append(len(self._levels[-1].tokens))
        self.frontier = Frontier(*map(np.concatenate, zip(*frontiers, strict=True)))
        return broken

    def _proposals(self, ssm_probs: Sequence[SsmProbs]) -> tuple[list[dict[int, dict[int, np.float32]]], np.ndarray]:
        """Return the probabilities that SSMs propose, by frontier row, SSM and token, and the broken rows."""
        frontier = self.frontier
        widest = max(self.children_at(owner) for owner in frontier.owners.tolist())
        proposals: list[dict[int, dict[int, np.float32]]] = [{} for _ in frontier.nodes]
        broken = np.zeros(len(frontier.nodes), dtype=bool)
        for ssm, rows, probs, vocabulary in ssm_probs:
            values, columns = top_tokens(probs, widest)
            tokens = (columns if vocabulary is None else vocabulary[columns]).tolist()
            finite = np.isfinite(values).all(1)  # top-k sorts NaN first
            broken[rows[~finite]] = True
            for i in np.flatnonzero(finite):
                proposals[rows[i]][ssm] = dict(zip(tokens[i], values[i], strict=True))
        return proposals, broken

    def _children(
        self, owner: int, part: slice, proposals: Sequence[dict[int, dict[int, np.float32]]], weights: np.ndarray
    ) -> tuple[np.ndarray, Level]:
        """Merge the proposals of SSMs and seeds below one tree's part of the frontier; return rows and nodes."""
        frontier, seeds, nodes, draft_probs = self.frontier, self.seeds, list[Any](), list[list[np.float32]]()
        for row in range(part.start, part.stop):
            probs_of = proposals[row]
            shares = [{token: weights[ssm] * prob for token, prob in probs.items()} for ssm, probs in probs_of.items()]
            children = seeds.children[frontier.seeds[row]]
            below = {int(seeds.tokens[seed]): seed for seed in children[children >= 0].tolist()}
            merged = merge_children(shares, below, self.max_children, seeds.probs, seeds.ratios)
            for token, (prob, seed) in merged.items():
                nodes.append((row, token, frontier.nodes[row], seed, prob, frontier.values[row] * prob))
                draft_probs.append([probs_of.get(ssm, {}).get(token, _NOT_PROPOSED) for ssm in range(self.num_ssms)])
        rows, tokens, parents, seed_nodes = (np.array([node[i] for node in nodes], dtype=np.int64) for i in range(4))
        probs, values = (np.array([node[i] for node in nodes], dtype=np.float32) for i in (4, 5))
        by_ssm = np.array(draft_probs, dtype=np.float32).reshape(len(nodes), self.num_ssms)
        proposed, owners = ~np.isnan(by_ssm), np.full(len(nodes), owner)
        by_ssm = np.where(proposed, by_ssm, _ZERO)
        return rows, Level(tokens, parents, owners, seed_nodes, probs, values, proposed, by_ssm)

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
        return self.limits[owner].children_at(self.depth) or self.max_children

    def _kept(self, owner: int, rows: np.ndarray, level: Level) -> np.ndarray:
        """Return which new nodes of one tree are kept: bool [num_nodes].

        Static branching keeps a fixed number of children per node, otherwise nodes that may be among the tree's best.

        Args:
            owner: index of the tree.
            rows: int64 [num_nodes], ascending, frontier rows of the parents.
            level: the nodes.
        """
        limit, values = self.limits[owner], level.values
        if limit.branching:
            ranks = np.empty(len(rows), dtype=np.int64)
            ranks[np.lexsort((-values, rows))] = np.arange(len(rows)) - np.searchsorted(rows, rows)
            return ranks < self.children_at(owner)
        all_values = np.concatenate([*self._values[owner], values])
        if len(all_values) <= limit.nodes:
            return np.ones(len(rows), dtype=bool)
        self._min_values[owner] = np.partition(all_values, -limit.nodes)[-limit.nodes]
        # Seeds are always kept: `finish` adds missing seeds with their own probability, a different value.
        return (values >= self._min_values[owner]) | (level.seeds >= 0)

    def _expanded(self, owner: int, level: Level) -> np.ndarray:
        """Select the nodes to expand next among one tree's newest nodes; indices, best first without branching."""
        limit, depth, values = self.limits[owner], self.depth + 1, level.values
        if depth >= limit.max_depth:
            return np.empty(0, dtype=np.int64)
        growable = ~np.isin(level.tokens, limit.end_tokens)
        if limit.branching:
            return np.flatnonzero(growable)
        growable &= (values > 0) & (values >= self._min_values[owner])
        order = np.argsort(-values, kind="stable")
        return order[growable[order]][: frontier_width(depth, self.max_frontier)]

    def stop(self, owners: np.ndarray) -> None:
        """Remove trees from the frontier; owners: bool [num_trees]."""
        if owners.any():
            remaining = ~owners[self.frontier.owners]
            self.frontier = self.frontier.select(remaining)

    def open_mass(self) -> np.ndarray:
        """Return the open mass of each tree: float64 [num_trees].

        This is the probability that its frontier is reached and that the next token is not among the seeds.
        """
        frontier, seeds = self.frontier, self.seeds
        below = seeds.children[frontier.seeds]
        covered = np.cumsum(seeds.probs[below] * (below >= 0), axis=1)[:, -1]  # unlike `sum`, in order
        values = frontier.values * np.maximum(1 - covered, 0.0)
        return np.bincount(frontier.owners, values, minlength=len(self.limits))

    def level_mass(self, least: float) -> np.ndarray:
        """Return the probability that each tree's newest level is reached: float64 [num_trees].

        Counts nodes that are not seeds and have at least the value `least`.
        """
        level = self._levels[-1]
        counted = (level.values >= np.float32(least)) & (level.seeds < 0)
        return np.bincount(level.owners[counted], level.values[counted], minlength=len(self.limits))

    def finish(self, names: Sequence[str]) -> list[tuple[TokenTree, np.ndarray]]:
        """Build the trees, including seeds that were not reached.

        Args:
            names: of the SSMs.

        Returns:
            By request, the tree and each node's draft slot, -1 if it was not expanded.
        """
        joined = Level(*(np.concatenate(columns) for columns in zip(*self._levels, strict=True)))
        depths = np.repeat(np.arange(len(self._level_nodes)), self._level_nodes)
        return [self._finish(owner, joined, depths, names) for owner in range(len(self.limits))]

    def _finish(
        self, owner: int, nodes: Level, depths: np.ndarray, names: Sequence[str]
    ) -> tuple[TokenTree, np.ndarray]:
        """Build one tree from all levels of all trees."""
        expanded = np.concatenate(self.slots[owner]) if self.slots[owner] else np.empty(0, dtype=np.int64)
        if len(self.limits) > 1:
            of_tree = np.flatnonzero(nodes.owners == owner)
            nodes, depths, expanded = nodes.select(of_tree), depths[of_tree], np.searchsorted(of_tree, expanded)
            nodes.parents[1:] = np.searchsorted(of_tree, nodes.parents[1:])
        count = len(nodes.tokens)
        slot_of_node = np.full(count, -1)
        slot_of_node[expanded] = np.arange(len(expanded))
        children, sources = np.nonzero(nodes.proposed)
        draft_probs = nodes.draft_probs[children, sources].astype(np.float64)
        draws = Draws(nodes.parents[children], children, sources, draft_probs)
        probs = nodes.probs.astype(np.float64)
        tree = TokenTree(nodes.tokens, nodes.parents, depths, probs, draws, tuple(names))
        tree.with_values(nodes.values.astype(np.float64))
        seed_tree = self.seeds.trees[owner]
        if len(seed_tree) > 1:
            complete = not self.limits[owner].branching or not self.slots[owner]
            tree = join_seed_tree(tree, seed_tree, nodes.seeds - self.seeds.first[owner], complete)
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
