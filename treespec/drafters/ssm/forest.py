"""Deterministic tree growth in numpy: the reference of compiled growth, and the fallback without it.

The specification is `merge_children` in treespec_kernels/tree/tree_merge.py, which merges proposals. Growth on the host
adds static branching, and prunes nodes early that cannot be among a tree's best; this changes no tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from treespec.drafters.evidence import SeedEvidence
from treespec.tree import TokenTree, join_seed_tree
from treespec_kernels.sampling.logit_transforms import topk_rows
from treespec_kernels.tree.growth_limits import CHILDREN, FRONTIER, SEEDS, frontier_width
from treespec_kernels.tree.tree_merge import merge_children

_ZERO, _NOT_PROPOSED = np.float32(0), np.float32(np.nan)


class Level(NamedTuple):
    """Nodes of one depth, ordered by tree and parent."""

    tokens: np.ndarray  # int64 [size]
    parents: np.ndarray  # int64 [size], indices as in `Frontier.nodes`; also tree_ids and seeds
    tree_ids: np.ndarray
    seeds: np.ndarray
    probs: np.ndarray  # float32 [size], probability after the parent
    values: np.ndarray  # float32 [size], product of probabilities along the path
    proposed: np.ndarray  # bool [size, num_ssms], whether each SSM proposed the node
    draft_probs: np.ndarray  # float32 [size, num_ssms], each SSM's probability of the node

    def select(self, nodes: np.ndarray | slice) -> "Level":
        return Level(*(column[nodes] for column in self))


class Frontier(NamedTuple):
    """Nodes to score, grouped by tree; [num_rows] each, int64 except values."""

    nodes: np.ndarray  # indices over all levels of all trees
    tokens: np.ndarray  # tokens of the nodes
    tree_ids: np.ndarray  # index of the tree
    seeds: np.ndarray  # index of the node among the seeds, or -1
    parent_slots: np.ndarray  # slot of the parent in its tree
    values: np.ndarray  # float32, product of probabilities along the path

    def select(self, rows: np.ndarray | slice) -> "Frontier":
        return Frontier(*(column[rows] for column in self))

    def slices(self) -> dict[int, slice]:
        """Return each tree's slice of rows by tree index, without trees that have none."""
        if len(self.tree_ids) and self.tree_ids[0] == self.tree_ids[-1]:
            return {int(self.tree_ids[0]): slice(0, len(self.tree_ids))}
        starts = [0, *(np.flatnonzero(self.tree_ids[1:] != self.tree_ids[:-1]) + 1).tolist()]
        bounds = pairwise([*starts, len(self.tree_ids)])
        return {tree_id: slice(*bound) for tree_id, bound in zip(self.tree_ids[starts].tolist(), bounds, strict=True)}


class SsmProbs(NamedTuple):
    """An SSM's next-token probabilities for some rows of the frontier."""

    ssm: int
    rows: np.ndarray  # int64, frontier rows, ascending
    probs: np.ndarray  # float32 [len(rows), width]
    tokens: np.ndarray | None = None  # int64 [width], ascending token ids of the columns; None for the whole vocabulary


@dataclass(frozen=True)
class TreeLimits:
    """Limits of one tree."""

    max_depth: int  # 0 = no growth
    nodes: int  # number of nodes after pruning
    branching: Sequence[int] | None  # static number of children per node by depth; None = chosen by value
    end_tokens: tuple[int, ...]  # tokens that nothing is drafted after

    def children_at(self, depth: int) -> int:
        """Return the static number of children of a node of this depth; 0 = chosen by value."""
        return self.branching[min(depth, len(self.branching) - 1)] if self.branching else 0


class Seeds(NamedTuple):
    """Nodes proposed by other sources for a batch, tree by tree."""

    trees: list[TokenTree]
    first: list[int]  # index of each tree's root
    tokens: np.ndarray  # int64 [num_seeds]
    probs: np.ndarray  # float32 [num_seeds]
    ratios: np.ndarray  # float32 [num_seeds], evidence ratios
    # int64 [num_seeds + 1, width], indices of each seed's children, padded with -1. The last row is empty, so that
    # index -1 (no seed) has no children.
    children: np.ndarray

    @classmethod
    def join(cls, trees: Sequence[TokenTree], limits: Sequence[TreeLimits], evidence: SeedEvidence) -> "Seeds":
        """Concatenate the columns of the seed trees; growing trees use their best `SEEDS` seeds."""
        trees = [tree.best(1 + SEEDS) if limit.max_depth else tree for tree, limit in zip(trees, limits, strict=True)]
        sizes = [len(tree) for tree in trees]
        first = [*accumulate(sizes, initial=0)][:-1]
        tokens = np.concatenate([tree.tokens for tree in trees])
        probs = np.concatenate([tree.probs for tree in trees]).astype(np.float32)
        parents = np.concatenate([tree.parents for tree in trees])
        below = np.flatnonzero(parents >= 0)
        parents = parents + np.repeat(first, sizes)  # invalid for roots, which are not read
        order = below[np.argsort(parents[below], kind="stable")]
        above = parents[order]
        rank = np.arange(len(order)) - np.searchsorted(above, above)
        children = np.full((len(parents) + 1, int(rank.max(initial=0)) + 1), -1)
        children[above, rank] = order
        return cls(trees, first, tokens, probs, evidence.ratios(probs), children)


def grown_tree(
    nodes: Level,  # nodes of one tree; `seeds` index its own seed tree
    depths: np.ndarray,
    slots: np.ndarray,
    names: tuple[str, ...],  # names of the SSMs
    seed_tree: TokenTree | None,
    complete: bool,  # whether to add seeds that growth did not reach
) -> TokenTree:
    """Build a tree from the columns of its nodes, joined with its seed tree."""
    drawn, sources = np.nonzero(nodes.proposed)
    draws = drawn, sources, nodes.draft_probs[drawn, sources].astype(np.float64)
    probs, values = nodes.probs.astype(np.float64), nodes.values.astype(np.float64)
    tree = TokenTree(nodes.tokens, nodes.parents, depths, probs, *draws, names, slots=slots).with_values(values)
    return tree if seed_tree is None or len(seed_tree) == 1 else join_seed_tree(tree, seed_tree, nodes.seeds, complete)


class Forest:
    """One growing tree per request, merged from the proposals of SSMs and of other sources (the seeds)."""

    def __init__(
        self,
        seed_trees: Sequence[TokenTree],  # proposals of other sources; growing trees use the best `SEEDS`
        limits: Sequence[TreeLimits],  # by request
        num_ssms: int,
        evidence: SeedEvidence,
        max_children: int = CHILDREN,  # maximum number of proposals per source and node
        max_frontier: int = FRONTIER,  # maximum number of expanded nodes per tree and depth; see `frontier_width`
    ):
        count = len(seed_trees)
        self.limits, self.num_ssms = limits, num_ssms
        self.max_children, self.max_frontier = max_children, max_frontier
        self.seeds = seeds = Seeds.join(seed_trees, limits, evidence)
        roots, trees, one = np.array(seeds.first), np.arange(count), np.ones(count, dtype=np.float32)
        proposed = np.zeros((count, num_ssms), dtype=bool)
        tokens = seeds.tokens[roots]
        draft_probs = np.zeros((count, num_ssms), dtype=np.float32)
        self._levels = [Level(tokens, np.full(count, -1), trees, roots, one, one, proposed, draft_probs)]
        self._size, self._level_nodes = count, [count]
        self.slots: list[list[np.ndarray]] = [[] for _ in seed_trees]  # expanded nodes in slot order, by level
        self.frontier = Frontier(trees, tokens, trees, roots, np.full(count, -1), one)
        self.stop(np.array([not limit.max_depth for limit in limits]))

    @property
    def depth(self) -> int:
        return len(self._level_nodes) - 1

    def extend(self, ssm_probs: Sequence[SsmProbs], weights: Sequence[np.ndarray]) -> np.ndarray:
        """Add the children proposed for the frontier by SSMs and seeds, and select the next frontier.

        `weights` are the SSMs' mixture weights by tree, float [num_ssms]; sum 1, 0 for SSMs without scores. Returns
        bool [frontier rows]: True for rows, otherwise ignored, where an SSM's top probabilities are not finite.
        """
        frontier, levels, frontiers = self.frontier, list[Level](), list[Frontier]()
        proposals, broken = self._proposals(ssm_probs)
        mixture = np.array(weights, dtype=np.float32)
        for tree_id, part in frontier.slices().items():
            rows, level = self._children(tree_id, part, proposals, mixture[tree_id])
            least = self._least_value(tree_id, level)
            kept = self._kept(tree_id, rows, level, least)
            rows, level = rows[kept], level.select(kept)
            slots = sum(map(len, self.slots[tree_id])) + rows - part.start  # the rows take their tree's next slots
            self.slots[tree_id].append(frontier.nodes[part])
            best = self._expanded(tree_id, level, least)
            columns = level.tokens, level.tree_ids, level.seeds, slots, level.values
            frontiers.append(Frontier(self._size + best, *(column[best] for column in columns)))
            self._size += len(rows)
            levels.append(level)
        self._levels.append(Level(*map(np.concatenate, zip(*levels, strict=True))))
        self._level_nodes.append(len(self._levels[-1].tokens))
        self.frontier = Frontier(*map(np.concatenate, zip(*frontiers, strict=True)))
        return broken

    def _proposals(self, ssm_probs: Sequence[SsmProbs]) -> tuple[list[dict[int, dict[int, np.float32]]], np.ndarray]:
        """Return proposed probabilities by frontier row, SSM and token, and a mask of rows with non-finite ones."""
        frontier = self.frontier
        widest = max(self.children_at(tree_id) for tree_id in frontier.tree_ids.tolist())
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
        self, tree_id: int, part: slice, proposals: Sequence[dict[int, dict[int, np.float32]]], weights: np.ndarray
    ) -> tuple[np.ndarray, Level]:
        """Merge the proposals of SSMs and seeds at one tree's part of the frontier; return rows and nodes."""
        frontier, nodes, draft_probs = self.frontier, list[Any](), list[list[np.float32]]()
        for row in range(part.start, part.stop):
            probs_of = proposals[row]
            shares = [{token: weights[ssm] * prob for token, prob in probs.items()} for ssm, probs in probs_of.items()]
            children = self.seeds.children[frontier.seeds[row]]
            below = {int(self.seeds.tokens[seed]): seed for seed in children[children >= 0].tolist()}
            merged = merge_children(shares, below, self.max_children, self.seeds.probs, self.seeds.ratios)
            for token, (prob, seed) in merged.items():
                nodes.append((row, token, frontier.nodes[row], seed, prob, frontier.values[row] * prob))
                draft_probs.append([probs_of.get(ssm, {}).get(token, _NOT_PROPOSED) for ssm in range(self.num_ssms)])
        rows, tokens, parents, seed_nodes = (np.array([node[i] for node in nodes], dtype=np.int64) for i in range(4))
        probs, values = (np.array([node[i] for node in nodes], dtype=np.float32) for i in (4, 5))
        by_ssm = np.array(draft_probs, dtype=np.float32).reshape(len(nodes), self.num_ssms)
        proposed, tree_ids = ~np.isnan(by_ssm), np.full(len(nodes), tree_id)
        by_ssm = np.where(proposed, by_ssm, _ZERO)
        return rows, Level(tokens, parents, tree_ids, seed_nodes, probs, values, proposed, by_ssm)

    def _least_value(self, tree_id: int, level: Level) -> np.float32:
        """Return the smallest value among one tree's best `nodes` nodes, newest level included; 0 if it has fewer."""
        values = np.concatenate([*(nodes.values[nodes.tree_ids == tree_id] for nodes in self._levels), level.values])
        most = self.limits[tree_id].nodes
        return np.partition(values, -most)[-most] if len(values) > most else _ZERO

    def _kept(self, tree_id: int, rows: np.ndarray, level: Level, least: np.float32) -> np.ndarray:
        """Return a mask of one tree's new nodes to keep, bool [num_nodes]; `rows` are their parents' frontier rows.

        Static branching keeps a fixed number of children per node; other trees keep nodes that may be among the best.
        """
        limit, values = self.limits[tree_id], level.values
        if limit.branching:
            ranks = np.empty(len(rows), dtype=np.int64)
            ranks[np.lexsort((-values, rows))] = np.arange(len(rows)) - np.searchsorted(rows, rows)
            return ranks < self.children_at(tree_id)
        # Seeds are always kept: `finish` would add missing ones with their own probability, which is a different value.
        return (values >= least) | (level.seeds >= 0)

    def _expanded(self, tree_id: int, level: Level, least: np.float32) -> np.ndarray:
        """Return indices of one tree's newest nodes to expand next; without static branching, best first."""
        limit, depth, values = self.limits[tree_id], self.depth + 1, level.values
        if depth >= limit.max_depth:
            return np.empty(0, dtype=np.int64)
        growable = ~np.isin(level.tokens, limit.end_tokens)
        if limit.branching:
            return np.flatnonzero(growable)
        growable &= (values > 0) & (values >= least)
        order = np.argsort(-values, kind="stable")
        return order[growable[order]][: frontier_width(depth, self.max_frontier)]

    def paths(self) -> list[list[int]]:
        """Return the path of each frontier row, as the tokens from the root (exclusive) to the node."""
        tokens = np.concatenate([level.tokens for level in self._levels])
        parents = np.concatenate([level.parents for level in self._levels])
        nodes, reversed_path = self.frontier.nodes, []
        for _ in range(self.depth):
            reversed_path.append(tokens[nodes])
            nodes = parents[nodes]
        return np.stack(reversed_path[::-1], axis=1).tolist() if reversed_path else [[] for _ in nodes]

    def children_at(self, tree_id: int) -> int:
        """Return the maximum number of children of a frontier node of one tree."""
        return self.limits[tree_id].children_at(self.depth) or self.max_children

    def stop(self, tree_ids: np.ndarray) -> None:
        """Remove trees from the frontier; tree_ids: bool [num_trees]."""
        if tree_ids.any():
            remaining = ~tree_ids[self.frontier.tree_ids]
            self.frontier = self.frontier.select(remaining)

    def open_mass(self) -> np.ndarray:
        """Return each tree's open mass, float64 [num_trees]: P(frontier reached, next token not a seed)."""
        frontier = self.frontier
        below = self.seeds.children[frontier.seeds]
        covered = np.cumsum(self.seeds.probs[below] * (below >= 0), axis=1)[:, -1]  # sums in order, unlike `sum`
        values = frontier.values * np.maximum(1 - covered, 0.0)
        return np.bincount(frontier.tree_ids, values, minlength=len(self.limits))

    def level_mass(self, least: float) -> np.ndarray:
        """Return the probability of reaching each tree's newest level, float64 [num_trees].

        Counts nodes that are not seeds and have at least the value `least`.
        """
        level = self._levels[-1]
        counted = (level.values >= np.float32(least)) & (level.seeds < 0)
        return np.bincount(level.tree_ids[counted], level.values[counted], minlength=len(self.limits))

    def finish(self, names: Sequence[str]) -> list[TokenTree]:
        """Build the trees, including seeds that growth did not reach; `names` are the SSMs'."""
        joined = Level(*(np.concatenate(columns) for columns in zip(*self._levels, strict=True)))
        depths = np.repeat(np.arange(len(self._level_nodes)), self._level_nodes)
        return [self._finish(tree_id, joined, depths, names) for tree_id in range(len(self.limits))]

    def _finish(self, tree_id: int, nodes: Level, depths: np.ndarray, names: Sequence[str]) -> TokenTree:
        """Build one tree from the nodes of all trees."""
        expanded = np.concatenate(self.slots[tree_id]) if self.slots[tree_id] else np.empty(0, dtype=np.int64)
        of_tree = np.flatnonzero(nodes.tree_ids == tree_id)
        nodes, depths, expanded = nodes.select(of_tree), depths[of_tree], np.searchsorted(of_tree, expanded)
        nodes.parents[1:] = np.searchsorted(of_tree, nodes.parents[1:])
        slots = np.full(len(nodes.tokens), -1)
        slots[expanded] = np.arange(len(expanded))
        complete = not self.limits[tree_id].branching or not self.slots[tree_id]
        nodes = nodes._replace(seeds=nodes.seeds - self.seeds.first[tree_id])
        return grown_tree(nodes, depths, slots, tuple(names), self.seeds.trees[tree_id], complete)


def top_tokens(probs: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's largest probabilities and their tokens, descending; equal ones by ascending token."""
    values, tokens = (part.numpy() for part in topk_rows(torch.from_numpy(probs), count))
    smallest = values[:, -1:]
    # Where a tie crosses the cut, top-k returns an arbitrary subset of the tied tokens.
    for row in np.flatnonzero((probs == smallest).sum(1) > (values == smallest).sum(1)):
        tokens[row] = np.argsort(-probs[row], kind="stable")[: tokens.shape[1]]
    return values, np.take_along_axis(tokens, np.lexsort((tokens, -values)), 1)
