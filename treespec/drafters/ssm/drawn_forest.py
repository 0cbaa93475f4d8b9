"""Trees of random draws from the SSMs' distributions, for verification by rejection or traversal.

These rules are lossless only if every draw stays in the tree, in draw order and with its distribution, so no draw is
ever pruned. Whether to draw again may depend on earlier draws: a node gets further draws while the
probability that they are needed exceeds a minimum value (DySpec, arXiv 2410.11744: a draw y from the residual R has the
value v * R[y], and its next sibling v * (1 - R[y]), where v is the parent's value).
"""

from collections.abc import Sequence

import numpy as np

from treespec.drafters.ssm.forest import Frontier, SsmProbs, TreeLimits
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


class _Tree:
    """One tree under construction."""

    def __init__(
        self,
        seed_tree: TokenTree,  # nodes proposed by other sources, the seeds
        limit: TreeLimits,
        oracle: RandomOracle,  # source of the random draws
        mode: str,  # `SpecConfig.draws`
        min_value: float,  # minimum value of a draw
        fills: bool,  # whether to add draws at the end until the tree has its full number of nodes
    ):
        self.limit, self.oracle, self.mode, self.min_value, self.fills = limit, oracle, mode, min_value, fills
        self.tokens, self.parents, self.depths = [int(seed_tree.tokens[0])], [-1], [0]
        self.probs, self.values = [1.0], [1.0]
        self.child: dict[tuple[int, int], int] = {}
        self.draws: list[tuple[int, int, float, int, tuple[int, ...]]] = []  # columns of `TokenTree`
        self.distributions: list[np.ndarray] = []
        self.scored: list[_Node] = []
        self.slot_of_node: dict[int, int] = {}
        max_seeds = (limit.nodes - 1) // (2 if limit.max_depth else 1)  # at most half of the nodes, if any is drawn
        seed_tree = seed_tree.as_deterministic()
        best = np.lexsort((seed_tree.depths, -seed_tree.values))[: 1 + max_seeds]
        kept = best if fills else best[seed_tree.values[best] > min_value]
        self.seed_tree = seed_tree if limit.branching else seed_tree.keep(np.sort(kept))
        self.room = limit.nodes - (0 if limit.branching else len(self.seed_tree) - 1)

    def draw(self, node: _Node) -> int | None:
        """Draw a child of a scored node, new or existing; return None if no distribution has enough mass left."""
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
            self.draws.append((child, ssm, float(distribution[token]) / mass, node.rows[ssm], excluded))
            node.drawn.append((ssm, token))
            node.remaining -= share if new else 0.0
            node.repeats = 0 if new else node.repeats + 1
            return child
        return None

    def _excluded(self, node: _Node, ssm: int) -> tuple[int, ...]:
        """Return the tokens excluded from an SSM's next draw at a node."""
        if self.mode == "with-replacement":
            return ()
        return tuple(token for other, token in node.drawn if self.mode == "cross-source" or other == ssm)

    def _child(self, parent: int, token: int, prob: float, value: float) -> int:
        key = parent, token
        if key not in self.child:
            self.child[key] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.probs.append(min(prob, 1.0))
            self.values.append(min(value, 1.0))
        return self.child[key]

    def grow(self, node: _Node) -> None:
        """Draw children of a newly scored node: a static number, or until the next draw is worth too little."""
        if self.limit.branching:
            for _ in range(self.limit.children_at(self.depths[node.index])):
                self.draw(node)
            return
        while len(self.tokens) < self.room and node.remaining * self.values[node.index] > self.min_value:
            if self.draw(node) is None or node.repeats == _MAX_REPEATS:
                break

    def path(self, node: int) -> list[int]:
        tokens: list[int] = []
        while node:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def fill(self) -> None:
        """Draw further children until the tree is full, always at the node with the most valuable next draw."""
        open_nodes = list(self.scored)
        while open_nodes and len(self.tokens) < self.room:
            node = max(open_nodes, key=lambda node: node.remaining * self.values[node.index])
            if (
                node.repeats >= _MAX_REPEATS
                or self.draw(node) is None
                or (node.repeats and node.remaining <= _MIN_MASS)
            ):
                open_nodes.remove(node)

    def finish(self, names: Sequence[str]) -> TokenTree:
        """Add the seeds as deterministic draws, after the random ones, and build the tree; `names` are the SSMs'."""
        names, seed_tree = tuple(names), self.seed_tree
        sources = names + tuple(name for name in seed_tree.source_names if name not in names)
        node_of_seed = {0: 0}
        for child, source in zip(seed_tree.draw_nodes.tolist(), seed_tree.draw_sources.tolist(), strict=True):
            above, token = node_of_seed.get(int(seed_tree.parents[child])), int(seed_tree.tokens[child])
            if above is None or (self.limit.branching and (above, token) not in self.child):
                continue
            prob = float(seed_tree.probs[child])
            node = node_of_seed[child] = self._child(above, token, prob, prob * self.values[above])
            self.draws.append((node, sources.index(seed_tree.source_names[source]), 1.0, -1, ()))
        nodes, drawn_by, probs, rows, excluded = zip(*self.draws, strict=True) if self.draws else [()] * 5
        slots = np.full(len(self.tokens), -1)
        slots[list(self.slot_of_node)] = list(self.slot_of_node.values())
        return TokenTree(
            np.array(self.tokens),
            np.array(self.parents),
            np.array(self.depths),
            np.array(self.probs),
            np.array(nodes, dtype=np.int64),
            np.array(drawn_by, dtype=np.int64),
            np.array(probs, dtype=float),
            sources,
            np.array(rows, dtype=np.int64),
            tuple(excluded),
            tuple(self.distributions),
            slots,
        )


class DrawnForest:
    """Trees of random draws, one per request, grown level by level like `Forest`."""

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
        min_values = [least_value if pays else 1 / s.nodes for s, pays in zip(limits, adaptive, strict=True)]
        modes, fills = [request.spec.draws for request in requests], [not pays for pays in adaptive]
        oracles = [sampler.draft_oracle for request in requests if (sampler := request.sampler) is not None]
        rows = zip(seed_trees, limits, oracles, modes, min_values, fills, strict=True)
        self._trees = [_Tree(*row) for row in rows]
        self.depth = 0
        self._level_mass = np.zeros(len(self._trees))
        self.frontier = self._frontier([[0] if limit.max_depth else [] for limit in limits])

    def _frontier(self, nodes: Sequence[Sequence[int]]) -> Frontier:
        rows = [(self._trees[tree_id], tree_id, node) for tree_id, of_tree in enumerate(nodes) for node in of_tree]
        columns = [(n, t.tokens[n], tree_id, -1, t.slot_of_node.get(t.parents[n], -1)) for t, tree_id, n in rows]
        index, tokens, tree_ids, seeds, above = np.array(columns, dtype=np.int64).reshape(len(rows), 5).T.copy()
        return Frontier(index, tokens, tree_ids, seeds, above, np.array([t.values[n] for t, _, n in rows]))

    def extend(self, ssm_probs: Sequence[SsmProbs], weights: Sequence[np.ndarray]) -> np.ndarray:
        """Draw the children of the frontier, and select the next frontier; arguments as in `Forest.extend`."""
        scored = self.frontier
        by_row: list[dict[int, np.ndarray]] = [{} for _ in scored.nodes]
        broken = np.zeros(len(scored.nodes), dtype=bool)
        for ssm, rows, probs, vocabulary in ssm_probs:
            assert vocabulary is None, "draws need distributions over the whole vocabulary"
            finite = np.isfinite(probs).all(1)
            broken[rows[~finite]] = True
            for row, distribution in zip(rows[finite].tolist(), probs[finite], strict=True):
                by_row[row][ssm] = distribution
        first = [len(tree.tokens) for tree in self._trees]
        order = np.argsort(-scored.values, kind="stable").tolist()
        nodes = {
            row: _Node(int(scored.nodes[row]), weights[scored.tree_ids[row]], by_row[row])
            for row in range(len(scored.nodes))
        }
        for row, node in nodes.items():  # slots in the order of the pass's rows
            tree = self._trees[scored.tree_ids[row]]
            tree.slot_of_node[node.index] = len(tree.slot_of_node)
            tree.scored.append(node)
        for row in order:
            self._trees[scored.tree_ids[row]].grow(nodes[row])
        self.depth += 1
        growing = np.zeros(len(self._trees), dtype=bool)
        growing[scored.tree_ids] = True
        expanded = [
            self._expanded(tree, start) if grows else []
            for tree, start, grows in zip(self._trees, first, growing, strict=True)
        ]
        self._level_mass = np.array(
            [sum(tree.values[start:]) for tree, start in zip(self._trees, first, strict=True)], dtype=float
        )
        self.frontier = self._frontier(expanded)
        return broken

    def paths(self) -> list[list[int]]:
        """Return the path of each frontier row, as the tokens from the root (exclusive) to the node."""
        rows = zip(self.frontier.tree_ids.tolist(), self.frontier.nodes.tolist(), strict=True)
        return [self._trees[tree_id].path(node) for tree_id, node in rows]

    def _expanded(self, tree: _Tree, start: int) -> list[int]:
        """Select the nodes to score next among a tree's nodes from `start` on, ascending."""
        if self.depth >= tree.limit.max_depth:
            return []
        new = [node for node in range(start, len(tree.tokens)) if tree.tokens[node] not in tree.limit.end_tokens]
        if tree.limit.branching:
            return new
        new = [node for node in new if tree.values[node] > tree.min_value]
        room = max(min(FRONTIER, MAX_EXPANDED - len(tree.slot_of_node)), 0)
        return sorted(sorted(new, key=lambda node: -tree.values[node])[:room])

    def stop(self, tree_ids: np.ndarray) -> None:
        remaining = ~tree_ids[self.frontier.tree_ids]
        self.frontier = self.frontier.select(remaining)

    def open_mass(self) -> np.ndarray:
        """Return the probability of reaching each tree's frontier, float64 [num_trees]."""
        return np.bincount(self.frontier.tree_ids, self.frontier.values, minlength=len(self._trees))

    def level_mass(self, least: float) -> np.ndarray:
        """Return the probability of reaching each tree's newest level, float64 [num_trees]. Ignores `least`."""
        return self._level_mass

    def finish(self, names: Sequence[str]) -> list[TokenTree]:
        """Fill up and build the trees; `names` are the SSMs'."""
        for tree in self._trees:
            if tree.fills and not tree.limit.branching:
                tree.fill()
        return [tree.finish(names) for tree in self._trees]
