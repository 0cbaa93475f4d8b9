"""Deterministic growth of token trees in numpy: the fallback without a compiler, and the reference of the C++.

`merge_children` of treespec_kernels/tree/tree_merge.py merges the proposals.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from treespec.drafters.ssm.forest import Forest, Frontier, Level, SsmProbs
from treespec_kernels.sampling.logit_transforms import topk_rows
from treespec_kernels.tree.growth_limits import frontier_width
from treespec_kernels.tree.tree_merge import merge_children

_ZERO, _NOT_PROPOSED = np.float32(0), np.float32(np.nan)


class ReferenceForest(Forest):
    """`Forest` with growth in numpy."""

    def extend(self, ssm_probs: Sequence[SsmProbs], weights: Sequence[np.ndarray]) -> np.ndarray:
        frontier, levels, frontiers = self.frontier, list[Level](), list[Frontier]()
        proposals, broken = self._proposals(ssm_probs)
        mixture = np.array(weights, dtype=np.float32)
        for owner, part in frontier.slices().items():
            rows, level = self._children(owner, part, proposals, mixture[owner])
            least = self._least_value(owner, level)
            kept = self._kept(owner, rows, level, least)
            rows, level = rows[kept], level.select(kept)
            slots = sum(map(len, self.slots[owner])) + rows - part.start  # the rows take the next slots of their tree
            self.slots[owner].append(frontier.nodes[part])
            best = self._expanded(owner, level, least)
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
        frontier, nodes, draft_probs = self.frontier, list[Any](), list[list[np.float32]]()
        for row in range(part.start, part.stop):
            probs_of = proposals[row]
            shares = [{token: weights[ssm] * prob for token, prob in probs.items()} for ssm, probs in probs_of.items()]
            children = self.seed_children[frontier.seeds[row]]
            below = {int(self.seed_tokens[seed]): seed for seed in children[children >= 0].tolist()}
            merged = merge_children(shares, below, self.max_children, self.seed_probs, self.seed_ratios)
            for token, (prob, seed) in merged.items():
                nodes.append((row, token, frontier.nodes[row], seed, prob, frontier.values[row] * prob))
                draft_probs.append([probs_of.get(ssm, {}).get(token, _NOT_PROPOSED) for ssm in range(self.num_ssms)])
        rows, tokens, parents, seed_nodes = (np.array([node[i] for node in nodes], dtype=np.int64) for i in range(4))
        probs, values = (np.array([node[i] for node in nodes], dtype=np.float32) for i in (4, 5))
        by_ssm = np.array(draft_probs, dtype=np.float32).reshape(len(nodes), self.num_ssms)
        proposed, owners = ~np.isnan(by_ssm), np.full(len(nodes), owner)
        by_ssm = np.where(proposed, by_ssm, _ZERO)
        return rows, Level(tokens, parents, owners, seed_nodes, probs, values, proposed, by_ssm)

    def _least_value(self, owner: int, level: Level) -> np.float32:
        """Return the least value of one tree's best `nodes` nodes, its newest level included; 0 if it has fewer."""
        values = np.concatenate([*(nodes.values[nodes.owners == owner] for nodes in self._levels), level.values])
        most = self.limits[owner].nodes
        return np.partition(values, -most)[-most] if len(values) > most else _ZERO

    def _kept(self, owner: int, rows: np.ndarray, level: Level, least: np.float32) -> np.ndarray:
        """Return which new nodes of one tree are kept, bool [num_nodes]; `rows` are the frontier rows of their parents.

        Static branching keeps a fixed number of children per node, otherwise nodes that may be among the tree's best.
        """
        limit, values = self.limits[owner], level.values
        if limit.branching:
            ranks = np.empty(len(rows), dtype=np.int64)
            ranks[np.lexsort((-values, rows))] = np.arange(len(rows)) - np.searchsorted(rows, rows)
            return ranks < self.children_at(owner)
        # Seeds are always kept: `finish` adds missing seeds with their own probability, a different value.
        return (values >= least) | (level.seeds >= 0)

    def _expanded(self, owner: int, level: Level, least: np.float32) -> np.ndarray:
        """Select the nodes to expand next among one tree's newest nodes; indices, best first without branching."""
        limit, depth, values = self.limits[owner], self.depth + 1, level.values
        if depth >= limit.max_depth:
            return np.empty(0, dtype=np.int64)
        growable = ~np.isin(level.tokens, limit.end_tokens)
        if limit.branching:
            return np.flatnonzero(growable)
        growable &= (values > 0) & (values >= least)
        order = np.argsort(-values, kind="stable")
        return order[growable[order]][: frontier_width(depth, self.max_frontier)]


def top_tokens(probs: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest probabilities of each row and their tokens, descending, lower tokens first among equals."""
    values, tokens = (part.numpy() for part in topk_rows(torch.from_numpy(probs), count))
    smallest = values[:, -1:]
    # Where a tie crosses the cut, top-k returns an arbitrary subset of the tied tokens.
    for row in np.flatnonzero((probs == smallest).sum(1) > (values == smallest).sum(1)):
        tokens[row] = np.argsort(-probs[row], kind="stable")[: tokens.shape[1]]
    return values, np.take_along_axis(tokens, np.lexsort((tokens, -values)), 1)
