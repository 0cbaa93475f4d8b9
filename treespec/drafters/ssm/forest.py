"""Trees that grow on the host, level by level, from SSMs' scores of each level's nodes.

`Forest` grows deterministic trees: the reference of compiled growth, and the fallback without it. The specification of
these trees is `merge_children` in treespec_kernels/tree/tree_merge.py, which merges proposals. Growth on the host adds
static branching, and prunes nodes early that cannot be among a tree's best; this changes no tree.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from treespec.drafters.evidence import SeedEvidence
from treespec.tree import TokenTree
from treespec_kernels.sampling.logit_transforms import topk_rows
from treespec_kernels.tree.growth_limits import CHILDREN, FRONTIER, SEEDS, frontier_width
from treespec_kernels.tree.tree_merge import merge_children

_ZERO, _ONE = np.float32(0), np.float32(1)


class Frontier(NamedTuple):
    """Nodes to score, grouped by tree; int64 [num_rows] each."""

    nodes: np.ndarray  # index of the node in its tree
    tokens: np.ndarray  # tokens of the nodes
    tree_ids: np.ndarray  # index of the tree
    parent_slots: np.ndarray  # slot of the parent in its tree

    def select(self, rows: np.ndarray) -> "Frontier":
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


class GrowingTree(ABC):
    """One tree under construction, by columns of `TokenTree`. Its *seeds* are the nodes proposed by other sources."""

    def __init__(self, seed_tree: TokenTree, limit: TreeLimits):
        self.seed_tree, self.limit = seed_tree, limit
        self.tokens, self.parents, self.depths = [int(seed_tree.tokens[0])], [-1], [0]
        self.probs: list[Any] = [1.0]
        self.values: list[Any] = [1.0]
        self.draws: list[tuple[int, int, float]] = []  # (node, source, probability)
        self.slots: dict[int, int] = {}  # slot of each expanded node
        self.first_new = 0  # index of the newest level's first node
        self._children: dict[tuple[int, int], int] = {}  # by parent and token

    @abstractmethod
    def extend(self, nodes: Sequence[int], proposals: Sequence[dict[int, Any]], weights: np.ndarray) -> None:
        """Add children of `nodes`; `proposals`, by node and SSM, are those of `GrowingForest._proposals`."""

    @abstractmethod
    def expandable(self) -> list[int]:
        """Return the nodes of the newest level to score next."""

    @abstractmethod
    def open_value(self, node: int) -> float:
        """Return the probability that a node is reached and the next token is not a seed."""

    @abstractmethod
    def level_mass(self, least: float) -> float:
        """Return the probability of reaching the newest level's nodes of at least the value `least`."""

    @abstractmethod
    def finish(self, names: tuple[str, ...]) -> TokenTree:
        """Build the tree; `names` are the SSMs'."""

    def path(self, node: int) -> list[int]:
        """Return the tokens from the root (exclusive) to a node."""
        tokens: list[int] = []
        while node:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def _child(self, parent: int, token: int, prob: float | np.float32, value: float | np.float32) -> int:
        """Return a node's child with this token, new or existing."""
        key = parent, token
        if key not in self._children:
            self._children[key] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.probs.append(min(prob, 1.0))
            self.values.append(min(value, 1.0))
        return self._children[key]

    def _growable(self) -> list[int]:
        """Return the nodes of the newest level that may have children."""
        ends = self.limit.end_tokens
        return [node for node in range(self.first_new, len(self.tokens)) if self.tokens[node] not in ends]

    def _build(self, names: tuple[str, ...], seed_probs: Sequence[Any], complete: bool) -> TokenTree:
        """Append the seeds' draws and, if `complete`, the seeds that growth did not reach; build the tree."""
        seed_tree = self.seed_tree
        names += tuple(name for name in seed_tree.source_names if name not in names)
        node_of_seed = {0: 0}
        seeds = zip(seed_tree.parents.tolist(), seed_tree.tokens.tolist(), seed_probs, strict=True)
        for seed, (parent, token, prob) in enumerate(seeds):
            above = node_of_seed.get(parent)
            if above is not None and (complete or (above, token) in self._children):
                node_of_seed[seed] = self._child(above, token, prob, self.values[above] * prob)
        draws = seed_tree.draw_nodes.tolist(), seed_tree.draw_sources.tolist(), seed_tree.draw_probs.tolist()
        for seed, source, prob in zip(*draws, strict=True):
            if seed in node_of_seed:
                self.draws.append((node_of_seed[seed], names.index(seed_tree.source_names[source]), prob))
        nodes, sources, probs = zip(*self.draws, strict=True) if self.draws else [()] * 3
        slots = np.full(len(self.tokens), -1)
        slots[list(self.slots)] = list(self.slots.values())
        return TokenTree(
            np.array(self.tokens),
            np.array(self.parents),
            np.array(self.depths),
            np.array(self.probs, dtype=np.float64),
            np.array(nodes, dtype=np.int64),
            np.array(sources, dtype=np.int64),
            np.array(probs, dtype=np.float64),
            names,
            slots=slots,
        )


class GrowingForest(ABC):
    """One growing tree per request; SSMs score the frontier of all trees together."""

    def __init__(self, trees: Sequence[GrowingTree]):
        self.trees, self.depth = trees, 0
        self.frontier = self._frontier([[0] if tree.limit.max_depth else [] for tree in trees])

    def _frontier(self, nodes: Sequence[Sequence[int]]) -> Frontier:
        rows = [(self.trees[tree_id], tree_id, node) for tree_id, tree_nodes in enumerate(nodes) for node in tree_nodes]
        columns = [(node, tree.tokens[node], i, tree.slots.get(tree.parents[node], -1)) for tree, i, node in rows]
        return Frontier(*np.array(columns, dtype=np.int64).reshape(len(rows), 4).T.copy())

    @abstractmethod
    def _proposals(self, scores: SsmProbs) -> tuple[Any, np.ndarray]:
        """Return an SSM's proposals by row, and which rows are finite, bool [num_rows]."""

    def extend(self, ssm_probs: Sequence[SsmProbs], weights: Sequence[np.ndarray]) -> np.ndarray:
        """Add the children proposed for the frontier by SSMs and seeds, and select the next frontier.

        `weights` are the SSMs' mixture weights by tree, float [num_ssms]; sum 1, 0 for SSMs without scores. Returns
        bool [frontier rows]: True for rows, otherwise ignored, where an SSM's probabilities are not finite.
        """
        frontier, expandable = self.frontier, [list[int]()] * len(self.trees)
        proposals: list[dict[int, Any]] = [{} for _ in frontier.nodes]
        broken = np.zeros(len(proposals), dtype=bool)
        for scores in ssm_probs:
            ssm_proposals, finite = self._proposals(scores)
            broken[scores.rows[~finite]] = True
            for i in np.flatnonzero(finite).tolist():
                proposals[scores.rows[i]][scores.ssm] = ssm_proposals[i]
        self.depth += 1
        for tree_id, part in frontier.slices().items():
            tree, nodes = self.trees[tree_id], frontier.nodes[part].tolist()
            tree.first_new = len(tree.tokens)
            tree.slots.update(zip(nodes, count(len(tree.slots)), strict=False))  # the rows take their tree's next slots
            tree.extend(nodes, proposals[part], weights[tree_id])
            if self.depth < tree.limit.max_depth:
                expandable[tree_id] = tree.expandable()
        self.frontier = self._frontier(expandable)
        return broken

    def _rows(self) -> list[tuple[GrowingTree, int]]:
        """Return tree and node of each frontier row."""
        tree_ids, nodes = self.frontier.tree_ids.tolist(), self.frontier.nodes.tolist()
        return [(self.trees[tree_id], node) for tree_id, node in zip(tree_ids, nodes, strict=True)]

    def paths(self) -> list[list[int]]:
        """Return the path of each frontier row, as the tokens from the root (exclusive) to the node."""
        return [tree.path(node) for tree, node in self._rows()]

    def stop(self, tree_ids: np.ndarray) -> None:
        """Remove trees from the frontier; tree_ids: bool [num_trees]."""
        self.frontier = self.frontier.select(~tree_ids[self.frontier.tree_ids])

    def open_mass(self) -> np.ndarray:
        """Return each tree's open mass, float64 [num_trees]: P(frontier reached, next token not a seed)."""
        values = [tree.open_value(node) for tree, node in self._rows()]
        return np.bincount(self.frontier.tree_ids, values, minlength=len(self.trees))

    def level_mass(self, least: float) -> np.ndarray:
        """Return `GrowingTree.level_mass` of each tree, float64 [num_trees]."""
        return np.array([tree.level_mass(least) for tree in self.trees])

    def finish(self, names: Sequence[str]) -> list[TokenTree]:
        """Build the trees, including seeds that growth did not reach; `names` are the SSMs'."""
        return [tree.finish(tuple(names)) for tree in self.trees]


class _Candidate(NamedTuple):
    """A node proposed by SSMs or seeds."""

    parent: int
    token: int
    prob: np.float32
    value: np.float32
    seed: int  # its index among the seeds, -1 for none
    proposals: dict[int, dict[int, np.float32]]  # the parent's, by SSM and token


class _MergedTree(GrowingTree):
    """A tree of the most probable proposals. Probabilities and values are float32, but those of the root."""

    def __init__(
        self, seed_tree: TokenTree, limit: TreeLimits, evidence: SeedEvidence, max_children: int, max_frontier: int
    ):
        super().__init__(seed_tree.best(1 + SEEDS) if limit.max_depth else seed_tree, limit)
        self.max_children, self.max_frontier = max_children, max_frontier
        self.values, self.least = [_ONE], _ZERO  # least: smallest value of a node that pruning may keep
        self.seeds = [0]  # index of each node among the seeds, -1 for none
        self.seed_probs = self.seed_tree.probs.astype(np.float32)
        self.seed_ratios = evidence.ratios(self.seed_probs)
        edges = zip(self.seed_tree.parents.tolist(), self.seed_tree.tokens.tolist(), strict=True)
        self.seeds_below: list[dict[int, int]] = [{} for _ in range(1 + len(self.seed_tree))]  # by token; last: of -1
        for seed, (parent, token) in enumerate(edges):
            if seed:
                self.seeds_below[parent][token] = seed

    def extend(self, nodes: Sequence[int], proposals: Sequence[dict[int, Any]], weights: np.ndarray) -> None:
        mixture, candidates = np.asarray(weights, dtype=np.float32), list[_Candidate]()
        for node, probs_of in zip(nodes, proposals, strict=True):
            shares = [{token: mixture[ssm] * prob for token, prob in probs.items()} for ssm, probs in probs_of.items()]
            below = self.seeds_below[self.seeds[node]]
            merged = merge_children(shares, below, self.max_children, self.seed_probs, self.seed_ratios)
            children = [
                _Candidate(node, token, prob, self.values[node] * prob, seed, probs_of)
                for token, (prob, seed) in merged.items()
            ]
            if self.limit.branching:
                best = sorted(range(len(children)), key=lambda i: -children[i].value)
                children = [children[i] for i in sorted(best[: self.limit.children_at(self.depths[node])])]
            candidates += children
        max_nodes = self.limit.nodes
        values = sorted([*self.values, *(candidate.value for candidate in candidates)], reverse=True)
        self.least = values[max_nodes - 1] if len(values) > max_nodes and not self.limit.branching else _ZERO
        for parent, token, prob, value, seed, probs_of in candidates:
            # Seeds are always kept: `finish` would add missing ones with their own probability, a different value.
            if value >= self.least or seed >= 0:
                child = self._child(parent, token, prob, value)
                self.seeds.append(seed)
                self.draws += [(child, ssm, float(probs[token])) for ssm, probs in probs_of.items() if token in probs]

    def expandable(self) -> list[int]:
        """Without static branching, the best nodes, best first."""
        if self.limit.branching:
            return self._growable()
        nodes = [node for node in self._growable() if self.values[node] > 0 and self.values[node] >= self.least]
        width = frontier_width(self.depths[-1], self.max_frontier)
        return sorted(nodes, key=lambda node: -self.values[node])[:width]

    def open_value(self, node: int) -> float:
        covered = _ZERO
        for seed in self.seeds_below[self.seeds[node]].values():
            covered += self.seed_probs[seed]
        return float(self.values[node] * max(_ONE - covered, _ZERO))

    def level_mass(self, least: float) -> float:
        """Like `GrowingTree.level_mass`, without seeds."""
        mass, new = 0.0, slice(self.first_new, None)
        for value, seed in zip(self.values[new], self.seeds[new], strict=True):
            if value >= np.float32(least) and seed < 0:
                mass += float(value)
        return mass

    def finish(self, names: tuple[str, ...]) -> TokenTree:
        tree = self._build(names, [*self.seed_probs], complete=not self.limit.branching or not self.slots)
        return tree.with_values(np.array(self.values, dtype=np.float64))


class Forest(GrowingForest):
    """Deterministic trees, merged from the proposals of SSMs and of other sources."""

    def __init__(
        self,
        seed_trees: Sequence[TokenTree],  # proposals of other sources; growing trees use the best `SEEDS`
        limits: Sequence[TreeLimits],  # by request
        evidence: SeedEvidence,
        max_children: int = CHILDREN,  # maximum number of proposals per source and node
        max_frontier: int = FRONTIER,  # maximum number of expanded nodes per tree and depth; see `frontier_width`
    ):
        self._max_children = max_children
        pairs = zip(seed_trees, limits, strict=True)
        super().__init__([_MergedTree(tree, limit, evidence, max_children, max_frontier) for tree, limit in pairs])

    def children_at(self, tree_id: int) -> int:
        """Return the maximum number of children of a frontier node of one tree."""
        return self.trees[tree_id].limit.children_at(self.depth) or self._max_children

    def _proposals(self, scores: SsmProbs) -> tuple[Sequence[dict[int, np.float32]], np.ndarray]:
        """Return the SSM's most probable tokens with their probabilities."""
        values, columns = top_tokens(scores.probs, max(map(self.children_at, self.frontier.tree_ids.tolist())))
        tokens = columns if scores.tokens is None else scores.tokens[columns]
        proposals = [dict(zip(*row, strict=True)) for row in zip(tokens.tolist(), values, strict=True)]
        return proposals, np.isfinite(values).all(1)  # top-k sorts NaN first


def top_tokens(probs: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's largest probabilities and their tokens, descending; equal ones by ascending token."""
    values, tokens = (part.numpy() for part in topk_rows(torch.from_numpy(probs), count))
    smallest = values[:, -1:]
    # Where a tie crosses the cut, top-k returns an arbitrary subset of the tied tokens.
    for row in np.flatnonzero((probs == smallest).sum(1) > (values == smallest).sum(1)):
        tokens[row] = np.argsort(-probs[row], kind="stable")[: tokens.shape[1]]
    return values, np.take_along_axis(tokens, np.lexsort((tokens, -values)), 1)
