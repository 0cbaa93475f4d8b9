"""Trees of random draws from the SSMs' distributions, for verification by rejection or traversal.

These rules are lossless only if every draw stays in the tree, in draw order and with its distribution, so no draw is
ever pruned. Whether to draw again may depend on earlier draws: a node gets further draws while the
probability that they are needed exceeds a minimum value (DySpec, arXiv 2410.11744: a draw y from the residual R has the
value v * R[y], and its next sibling v * (1 - R[y]), where v is the parent's value).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treespec.drafters.ssm.forest import GrowingForest, GrowingTree, SsmProbs, TreeLimits
from treespec.request import Request
from treespec.tree import TokenTree
from treespec.verification.oracle import RandomOracle
from treespec_kernels.tree.growth_limits import FRONTIER, MAX_EXPANDED

_MIN_MASS = 1e-6  # minimum mass of the undrawn tokens for another draw
# Consecutive repeated draws after which a node gets no further draws. With replacement, a nearly certain token would
# otherwise be drawn a million times before another one.
_MAX_REPEATS = 16


class _Node:
    """A scored node, whose children can be drawn."""

    def __init__(self, index: int, weights: np.ndarray, distributions: dict[int, np.ndarray]):
        self.index, self.distributions = index, distributions  # node index in its tree; float32 [vocab] by SSM
        self.weights = weights / max(sum(weights[ssm] for ssm in distributions), 1e-9)  # sum 1 over these SSMs
        self.remaining = 1.0  # mass of the mixture on tokens not yet drawn
        self.drawn: list[tuple[int, int]] = []  # (SSM, token) in draw order
        self.rows: dict[int, int] = {}  # index of each SSM's distribution among the tree's
        self.repeats = 0  # number of consecutive draws of tokens already drawn


class _DrawnTree(GrowingTree):
    """A tree of random draws."""

    def __init__(
        self,
        seed_tree: TokenTree,
        limit: TreeLimits,
        oracle: RandomOracle,  # source of the random draws
        mode: str,  # `SpecConfig.draws`
        min_value: float,  # minimum value of a draw
        fills: bool,  # whether to add draws at the end until the tree has its full number of nodes
    ):
        max_seeds = (limit.nodes - 1) // (2 if limit.max_depth else 1)  # at most half of the nodes, if any is drawn
        seed_tree = seed_tree.as_deterministic()
        if not limit.branching:
            best = np.lexsort((seed_tree.depths, -seed_tree.values))[: 1 + max_seeds]
            seed_tree = seed_tree.keep(np.sort(best if fills else best[seed_tree.values[best] > min_value]))
        super().__init__(replace(seed_tree, draw_probs=np.ones(len(seed_tree.draw_nodes))), limit)
        self.oracle, self.mode, self.min_value, self.fills = oracle, mode, min_value, fills
        self.draw_rows: list[int] = []  # of the random draws; so are the other columns of `TokenTree`
        self.draw_excluded: list[tuple[int, ...]] = []
        self.distributions: list[np.ndarray] = []
        self.scored: list[_Node] = []
        self.room = limit.nodes - (0 if limit.branching else len(seed_tree) - 1)

    def draw(self, node: _Node) -> bool:
        """Draw a child of a scored node, new or existing; return whether a distribution has enough mass left."""
        counts = dict.fromkeys(node.distributions, 0)
        for ssm, _ in node.drawn:
            counts[ssm] += 1
        # Round-robin by descending weight: one SSM's first draw adds more mass than another's second.
        for ssm in sorted(node.distributions, key=lambda ssm: (counts[ssm], -node.weights[ssm])):
            distribution, excluded = node.distributions[ssm], self._excluded(node, ssm)
            if excluded:
                distribution = distribution.copy()
                distribution[list(excluded)] = 0.0
            mass = float(distribution.sum(dtype=np.float64))
            if mass < _MIN_MASS:
                continue
            token = self.oracle.choose(distribution)
            new = all(token != other for _, other in node.drawn)
            share = sum(float(node.weights[other] * node.distributions[other][token]) for other in node.distributions)
            child = self._child(node.index, token, share, share * self.values[node.index])
            if ssm not in node.rows:
                node.rows[ssm] = len(self.distributions)
                self.distributions.append(node.distributions[ssm])
            self.draws.append((child, ssm, float(distribution[token]) / mass))
            self.draw_rows.append(node.rows[ssm])
            self.draw_excluded.append(excluded)
            node.drawn.append((ssm, token))
            node.remaining -= share if new else 0.0
            node.repeats = 0 if new else node.repeats + 1
            return True
        return False

    def _excluded(self, node: _Node, ssm: int) -> tuple[int, ...]:
        """Return the tokens excluded from an SSM's next draw at a node."""
        if self.mode == "with-replacement":
            return ()
        return tuple(token for other, token in node.drawn if self.mode == "cross-source" or other == ssm)

    def extend(self, nodes: Sequence[int], proposals: Sequence[dict[int, np.ndarray]], weights: np.ndarray) -> None:
        scored = [_Node(node, weights, distributions) for node, distributions in zip(nodes, proposals, strict=True)]
        self.scored += scored
        for node in sorted(scored, key=lambda node: -self.values[node.index]):
            self._grow(node)

    def _grow(self, node: _Node) -> None:
        """Draw children of a newly scored node: a static number, or until the next draw is worth too little."""
        if self.limit.branching:
            for _ in range(self.limit.children_at(self.depths[node.index])):
                self.draw(node)
            return
        while len(self.tokens) < self.room and node.remaining * self.values[node.index] > self.min_value:
            if not self.draw(node) or node.repeats == _MAX_REPEATS:
                break

    def expandable(self) -> list[int]:
        if self.limit.branching:
            return self._growable()
        nodes = [node for node in self._growable() if self.values[node] > self.min_value]
        room = max(min(FRONTIER, MAX_EXPANDED - len(self.slots)), 0)
        return sorted(sorted(nodes, key=lambda node: -self.values[node])[:room])

    def open_value(self, node: int) -> float:
        """Return the probability that a node is reached; seeds do not reduce it."""
        return self.values[node]

    def level_mass(self, least: float) -> float:
        """Like `GrowingTree.level_mass`, but ignores `least`."""
        return sum(self.values[self.first_new :])

    def _fill(self) -> None:
        """Draw further children until the tree is full, always at the node with the most valuable next draw."""
        open_nodes = list(self.scored)
        while open_nodes and len(self.tokens) < self.room:
            node = max(open_nodes, key=lambda node: node.remaining * self.values[node.index])
            if node.repeats >= _MAX_REPEATS or not self.draw(node) or (node.repeats and node.remaining <= _MIN_MASS):
                open_nodes.remove(node)

    def finish(self, names: tuple[str, ...]) -> TokenTree:
        """Fill up and build the tree, with the seeds as deterministic draws after the random ones."""
        if self.fills and not self.limit.branching:
            self._fill()
        tree = self._build(names, self.seed_tree.probs.tolist(), complete=not self.limit.branching)
        num_seed_draws = len(tree.draw_nodes) - len(self.draw_rows)
        return replace(
            tree,
            draw_rows=np.array(self.draw_rows + [-1] * num_seed_draws, dtype=np.int64),
            draw_excluded=(*self.draw_excluded, *[()] * num_seed_draws),
            draft_probs=tuple(self.distributions),
        )


class DrawnForest(GrowingForest):
    """Trees of random draws."""

    def __init__(
        self,
        requests: Sequence[Request],  # requests to grow trees for, with `SpecConfig.draws`
        seed_trees: Sequence[TokenTree],  # proposals of other sources, independent of the draws
        limits: Sequence[TreeLimits],  # by request
        # Per request, whether to make only draws that pay off; otherwise draws are added at the end until the tree has
        # its full number of nodes
        adaptive: Sequence[bool],
        least_value: float,  # minimum value of a draw that pays off
    ):
        # About n draws have a value above 1 / n, for a tree of n nodes.
        min_values = [least_value if pays else 1 / limit.nodes for limit, pays in zip(limits, adaptive, strict=True)]
        modes, fills = [request.spec.draws for request in requests], [not pays for pays in adaptive]
        oracles = [sampler.draft_oracle for request in requests if (sampler := request.sampler) is not None]
        rows = zip(seed_trees, limits, oracles, modes, min_values, fills, strict=True)
        super().__init__([_DrawnTree(*row) for row in rows])

    def _proposals(self, scores: SsmProbs) -> tuple[np.ndarray, np.ndarray]:
        """Return the SSM's distributions."""
        assert scores.tokens is None, "draws need distributions over the whole vocabulary"
        return scores.probs, np.isfinite(scores.probs).all(1)
