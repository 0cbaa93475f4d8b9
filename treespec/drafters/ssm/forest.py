"""Grows the token trees of a batch level by level, by the merge rule of `tree_merge`.

How proposals become nodes, values and the next frontier is specified in treespec_kernels/tree/tree_merge.py; trees
here have the same nodes and values, to the bit. What only trees on the host have: a fixed number of children for every
node, and nodes that cannot be among a tree's best are left out on the way, which changes no selected tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from treespec.drafters.evidence import SeedEvidence
from treespec.sampling.transforms import topk_rows
from treespec.tree import Draws, TokenTree
from treespec_kernels.tree.growth_limits import CHILDREN, FRONTIER, SEEDS, frontier_width
from treespec_kernels.tree.tree_levels import Frontier, Level
from treespec_kernels.tree.tree_merge import LEAST_DOUBTED, MOST_CERTAIN

_ONE = np.float32(1)


class SsmProbs(NamedTuple):
    """An SSM's probabilities of the next token after some rows of the frontier, float32 [len(rows), vocab].

    rows: int64, ascending.
    """

    ssm: int
    rows: np.ndarray
    probs: np.ndarray


class _Candidates(NamedTuple):
    """What the SSMs and the seeds propose below each row of the frontier.

    tokens: int64 [num rows, width], -1 where there is none, or an earlier one of the row names the same token.
    draft_probs, proposed: [num ssms, num rows, width], float32 and bool, each SSM's probability where it proposes.
    probs: float32 [num rows, width], merged.
    seeds: int64 [num rows, width], which seed's node each is, -1 for none.
    """

    tokens: np.ndarray
    draft_probs: np.ndarray
    proposed: np.ndarray
    probs: np.ndarray
    seeds: np.ndarray


class _Seeds:
    """The trees that are grown over, side by side. Node i of tree t is number `first[t] + i`."""

    def __init__(self, trees: Sequence[TokenTree], evidence: SeedEvidence):
        sizes = np.array([len(tree) for tree in trees])
        self.trees, self.first = trees, np.concatenate([[0], np.cumsum(sizes)])
        self.tokens = np.concatenate([tree.tokens for tree in trees])
        self.probs = np.concatenate([tree.probs for tree in trees]).astype(np.float32)
        self.ratios = evidence.ratios(self.probs)
        parents = np.concatenate([tree.parents for tree in trees])
        shift = np.repeat(self.first[:-1], sizes)
        below = np.flatnonzero(parents >= 0)
        self.parents = parents + shift  # a root's own is meaningless
        order = below[np.argsort(self.parents[below], kind="stable")]
        ranked = self.parents[order]
        place = np.arange(len(order)) - np.searchsorted(ranked, ranked)
        self.width = int(place.max(initial=0)) + 1
        self.children = np.full((len(parents) + 1, self.width), -1)  # the last row is for nodes that are no seed
        self.children[ranked, place] = order


@dataclass(frozen=True)
class Shape:
    """Limits of one tree. `branching` is the children per node by depth, None lets values decide."""

    max_depth: int
    nodes: int
    branching: tuple[int, ...] | None
    end_tokens: tuple[int, ...]


class Forest:
    """One tree per request, over its root and what other sources have proposed (the seeds).

    Args:
        seeds: by request; their roots are the trees' roots. Trees that grow use the best `SEEDS` nodes.
        shapes: by request.
        num_ssms: sources of the probabilities to come.
        evidence: of the seeds.
        max_children: proposals of one source at one node.
        max_frontier: nodes of one tree and depth that are expanded, see `frontier_width`.
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
        nobody = np.zeros((count, num_ssms), dtype=bool)
        tokens = self.seeds.tokens[roots]
        unsaid = np.zeros((count, num_ssms), dtype=np.float32)
        self._levels = [Level(tokens, np.full(count, -1), trees, roots, one, one, nobody, unsaid)]
        self._size = count
        self.slots: list[list[np.ndarray]] = [[] for _ in seeds]  # nodes that were expanded, by tree, by level
        self._num_slots = np.zeros(count, dtype=np.int64)
        self._least = np.zeros(count, dtype=np.float32)  # value that a node must have to be among the best
        self._values: list[list[np.ndarray]] = [[one[:1]] for _ in seeds]  # by tree, by level
        grows = np.array([shape.max_depth > 0 for shape in shapes], dtype=bool)
        everything = Frontier(trees, tokens, trees, roots, np.full(count, -1), one)
        self.frontier = Frontier(*(part[grows] for part in everything))

    @property
    def depth(self) -> int:
        """Number of levels grown."""
        return len(self._levels) - 1

    def extend(self, ssm_probs: Sequence[SsmProbs], weights: Sequence[np.ndarray]) -> np.ndarray:
        """Add what the SSMs and the seeds propose below the frontier, and choose the next frontier.

        Args:
            ssm_probs: of the SSMs that scored it, or a part of it. One stays silent where its likeliest are not finite.
            weights: by tree, float [num_ssms]: of the mixture; 0 for an SSM that did not score, sum 1.

        Returns:
            bool [frontier rows]: where some SSM's likeliest are not finite.
        """
        at = self.frontier
        found, broken = self._candidates(ssm_probs, np.array(weights, dtype=np.float32)[at.owners])
        values, valid = at.values[:, None] * found.probs, found.tokens >= 0
        parts = at.parts()
        slots = np.empty(len(at.nodes), dtype=np.int64)  # the frontier's rows take the next slots of their trees
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
        edges = np.searchsorted(rows, [*(part.start for part in parts.values()), len(at.nodes)]).tolist()
        going = []
        for owner, (begin, end) in zip(parts, pairwise(edges), strict=True):
            self._values[owner].append(level.values[begin:end])
            going.append(begin + self._expanded(owner, level.tokens[begin:end], level.values[begin:end]))
        chosen = np.concatenate(going)
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
        """What is proposed below each row, and which rows are broken. `weights`: float32 [num rows, num ssms]."""
        at, seeds = self.frontier, self.seeds
        count, widest = len(at.nodes), max(self.children_at(owner) for owner in at.owners.tolist())
        below = seeds.children[at.seeds]
        offered = np.where(below >= 0, seeds.tokens[below], -1)
        named, said, broken = [], np.zeros((self.num_ssms, count, widest), np.float32), np.zeros(count, dtype=bool)
        for ssm, rows, probs in ssm_probs:
            values, columns = _likeliest(probs, widest)
            sound = np.isfinite(values).all(1)  # NaN is the largest of values
            broken[rows[~sound]] = True
            own = np.full((count, widest), -1)
            own[rows, : columns.shape[1]] = np.where(sound[:, None], columns, -1)
            said[ssm, rows, : columns.shape[1]] = np.where(sound[:, None], values, 0)
            named.append((ssm, own))
        tokens = np.concatenate([*(own for _, own in named), offered[:, : self.max_children]], axis=1)
        mixture, spoke = np.zeros(tokens.shape, dtype=np.float32), np.zeros((count, 1), dtype=bool)
        proposed = np.zeros((self.num_ssms, *tokens.shape), dtype=bool)
        draft_probs = np.zeros(proposed.shape, dtype=np.float32)
        for ssm, own in named:
            same = (tokens[:, :, None] == own[:, None, :]) & (own >= 0)[:, None, :]
            proposed[ssm] = same.any(2)
            draft_probs[ssm] = np.where(same, said[ssm][:, None, :], 0).max(2)
            mixture += weights[:, ssm, None] * draft_probs[ssm]
            spoke |= (own >= 0).any(1, keepdims=True)
        mixture = np.minimum(mixture, _ONE)
        same = (tokens[:, :, None] == offered[:, None, :]) & (below >= 0)[:, None, :]
        node = np.where(same.any(2), np.take_along_axis(below, same.argmax(2), 1), -1)
        held = np.clip(mixture, LEAST_DOUBTED, MOST_CERTAIN)
        told = seeds.ratios[node] * held
        both = np.where(spoke, told / (told + (_ONE - held)), seeds.probs[node])
        repeats = np.tril(tokens[:, :, None] == tokens[:, None, :], -1).any(2)
        tokens = np.where(repeats, -1, tokens)
        return _Candidates(tokens, draft_probs, proposed, np.where(node >= 0, both, mixture), node), broken

    def paths(self) -> list[list[int]]:
        """By row of the frontier, the tokens from below its root down to it."""
        tokens = np.concatenate([level.tokens for level in self._levels])
        parents = np.concatenate([level.parents for level in self._levels])
        nodes, upwards = self.frontier.nodes, []
        for _ in range(self.depth):
            upwards.append(tokens[nodes])
            nodes = parents[nodes]
        return np.stack(upwards[::-1], axis=1).tolist() if upwards else [[] for _ in nodes]

    def children_at(self, owner: int) -> int:
        """The most children of a node of the frontier."""
        branching = self.shapes[owner].branching
        return branching[min(self.depth, len(branching) - 1)] if branching else self.max_children

    def _keep(self, owner: int, values: np.ndarray, valid: np.ndarray, seeds: np.ndarray) -> None:
        """Narrow `valid` to those of a tree's new nodes that stay; all [num rows, width]."""
        shape = self.shapes[owner]
        if shape.branching:
            ranks = np.argsort(np.argsort(np.where(valid, -values, 1.0), axis=1, kind="stable"), axis=1)
            valid &= ranks < self.children_at(owner)
            return
        everything = np.concatenate([*self._values[owner], values[valid]])
        if len(everything) > shape.nodes:  # others cannot be among the best `nodes`
            self._least[owner] = np.partition(everything, -shape.nodes)[-shape.nodes]
            valid &= (values >= self._least[owner]) | (seeds >= 0)  # left out, a seed would join with another value

    def _expanded(self, owner: int, tokens: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Which of a tree's newest nodes are expanded next; indices, the best first where values decide."""
        shape = self.shapes[owner]
        if self.depth >= shape.max_depth:
            return np.empty(0, dtype=np.int64)
        going = ~np.isin(tokens, shape.end_tokens)  # nothing is emitted below one
        if shape.branching:
            return np.flatnonzero(going)
        going &= (values > 0) & (values >= self._least[owner])
        order = np.argsort(-values, kind="stable")
        return order[going[order]][: frontier_width(self.depth, self.max_frontier)]

    def stop(self, owners: np.ndarray) -> None:
        """Grow these trees no further; bool [num trees]."""
        going = ~owners[self.frontier.owners]
        self.frontier = Frontier(*(part[going] for part in self.frontier))

    def open_mass(self) -> np.ndarray:
        """float64 [num trees]: the chance that the frontier is reached and no seed says what follows."""
        at, seeds = self.frontier, self.seeds
        below = seeds.children[at.seeds]
        values = at.values * np.maximum(1 - (seeds.probs[below] * (below >= 0)).sum(1), 0.0)
        return np.bincount(at.owners, values, minlength=len(self.shapes))

    def level_mass(self, least: float) -> np.ndarray:
        """float64 [num trees]: the chance that the newest level is reached, by nodes of at least this value that are no
        seed's."""
        level = self._levels[-1]
        counted = (level.values >= least) & (level.seeds < 0)
        return np.bincount(level.owners[counted], level.values[counted], minlength=len(self.shapes))

    def finish(self, names: Sequence[str]) -> list[tuple[TokenTree, np.ndarray]]:
        """The trees, seeds and all, and the draft slot of each node, -1 where it was not expanded.

        Args:
            names: of the SSMs.
        """
        joined = Level(*(np.concatenate(parts) for parts in zip(*self._levels, strict=True)))
        depths = np.repeat(np.arange(len(self._levels)), [len(level.tokens) for level in self._levels])
        return [self._finish(owner, joined, depths, names) for owner in range(len(self.shapes))]

    def _finish(
        self, owner: int, nodes: Level, depths: np.ndarray, names: Sequence[str]
    ) -> tuple[TokenTree, np.ndarray]:
        own = np.flatnonzero(nodes.owners == owner)
        slot_of_node = np.full(len(own), -1)
        if self.slots[owner]:
            expanded = np.searchsorted(own, np.concatenate(self.slots[owner]))
            slot_of_node[expanded] = np.arange(len(expanded))
        parents = nodes.parents[own]
        parents[1:] = np.searchsorted(own, parents[1:])
        children, sources = np.nonzero(nodes.proposed[own])
        probs = nodes.probs[own].astype(np.float64)
        draws = Draws(
            parents[children], children, sources, nodes.draft_probs[own][children, sources].astype(np.float64)
        )
        tree = TokenTree(nodes.tokens[own], parents, depths[own], probs, draws, tuple(names))
        tree.with_values(nodes.values[own].astype(np.float64))
        seed = self.seeds.trees[owner]
        if len(seed) > 1:
            complete = not self.shapes[owner].branching or not self.slots[owner]
            tree = _join(tree, seed, nodes.seeds[own] - self.seeds.first[owner], complete)
            slot_of_node = np.concatenate([slot_of_node, np.full(len(tree) - len(own), -1)])
        return tree, slot_of_node


def _likeliest(probs: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest probabilities of each row and their tokens, descending, of equal ones the lower tokens first."""
    values, tokens = (part.numpy() for part in topk_rows(torch.from_numpy(probs), count))
    least = values[:, -1:]
    for row in np.flatnonzero((probs == least).sum(1) > (values == least).sum(1)):  # which of them is open
        tokens[row] = np.argsort(-probs[row], kind="stable")[: tokens.shape[1]]
    return values, np.take_along_axis(tokens, np.lexsort((tokens, -values)), 1)


def _join(tree: TokenTree, seed: TokenTree, seed_of_node: np.ndarray, complete: bool) -> TokenTree:
    """Add the seed's draws, last, and, where `complete`, its nodes that the tree lacks, behind the tree's own.

    seed_of_node: int64 [num_nodes], negative where a node is none of the seed's. Parents precede their children in the
    result, but nodes are not sorted by depth.
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
