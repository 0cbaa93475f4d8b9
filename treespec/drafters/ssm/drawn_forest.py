"""Trees whose children are sampled from the SSMs' distributions, as multi-step rejection and traversal need.

Verification by "rejection" or "traversal" holds for every draw that was made, in its order, with its distribution; so
nothing is left out after it was drawn. What may follow from earlier draws is whether to draw another: each node has
draws as long as the chance that they are needed is worth a row of the target pass (DySpec, arXiv 2410.11744: a draw y
from the residual R is worth value * R[y], and its next sibling value * (1 - R[y])).
"""

from collections.abc import Sequence

import numpy as np

from treespec.drafters.ssm.forest import Frontier, Shape, SsmProbs
from treespec.tree import Draws, TokenTree
from treespec.verification.oracle import RandomOracle

_LEAST_MASS = 1e-6  # of a distribution's tokens that were not drawn yet, below which nothing more is drawn from it
_MOST_REPEATS = 16  # draws in a row at one node that bring nothing new, after which none are made there: where they are
# independent, one that is nearly certain would take a million to bring another token


class _Node:
    """A node that was scored: what its children can be drawn from."""

    def __init__(self, index: int, weights: np.ndarray, distributions: dict[int, np.ndarray]):
        self.index, self.distributions = index, distributions
        self.weights = weights / max(sum(weights[ssm] for ssm in distributions), 1e-9)  # of those that have any here
        self.left = 1.0  # of the mixture's mass: what was not drawn
        self.drawn: list[tuple[int, int]] = []  # (SSM, token) in draw order
        self.rows: dict[int, int] = {}  # of each distribution among the tree's
        self.repeats = 0  # draws in a row that brought nothing new


class _Tree:
    """One tree while it grows."""

    def __init__(self, seed: TokenTree, shape: Shape, oracle: RandomOracle, mode: str, least: float, fills: bool):
        self.shape, self.oracle, self.mode, self.least, self.fills = shape, oracle, mode, least, fills
        self.tokens, self.parents, self.depths = [int(seed.tokens[0])], [-1], [0]
        self.probs, self.values = [1.0], [1.0]
        self.child: dict[tuple[int, int], int] = {}
        self.draws: list[tuple[int, int, int, float, int, tuple[int, ...]]] = []
        self.distributions: list[np.ndarray] = []
        self.scored: list[_Node] = []
        self.slot_of_node: dict[int, int] = {}
        # Half of the rows at most are for what other sources propose, the likeliest of it, where something is drawn.
        most_seeds = (shape.nodes - 1) // (2 if shape.max_depth else 1)
        seed = seed.as_deterministic()
        best = np.lexsort((seed.depths, -seed.values))[: 1 + most_seeds]
        worth = best if fills else best[seed.values[best] > least]
        self.seed = seed if shape.branching else seed.keep(np.sort(worth))
        self.room = shape.nodes - (0 if shape.branching else len(self.seed) - 1)

    def draw(self, node: _Node) -> int | None:
        """Draw a child of a scored node; its index, new or not, or None where no distribution has anything left."""
        counts = dict.fromkeys(node.distributions, 0)
        for ssm, _ in node.drawn:
            counts[ssm] += 1
        # In turn, beginning with the one that the text speaks for: another's guess adds more than a second of its own.
        for ssm in sorted(node.distributions, key=lambda ssm: (counts[ssm], -node.weights[ssm])):
            own, excluded = node.distributions[ssm], self._excluded(node, ssm)
            if excluded:
                own = own.copy()
                own[list(excluded)] = 0.0
            mass = float(own.sum(dtype=np.float64))
            if mass < _LEAST_MASS:
                continue
            token = self.oracle.choose(own)
            new = all(token != other for _, other in node.drawn)
            share = sum(float(node.weights[other] * node.distributions[other][token]) for other in node.distributions)
            child = self._child(node.index, token, share, share * self.values[node.index])
            if ssm not in node.rows:
                node.rows[ssm] = len(self.distributions)
                self.distributions.append(node.distributions[ssm])
            self.draws.append((node.index, child, ssm, float(own[token]) / mass, node.rows[ssm], excluded))
            node.drawn.append((ssm, token))
            node.left -= share if new else 0.0
            node.repeats = 0 if new else node.repeats + 1
            return child
        return None

    def _excluded(self, node: _Node, ssm: int) -> tuple[int, ...]:
        """Tokens that cannot come up in the next draw."""
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
        """Draw the children that a newly scored node is worth."""
        branching = self.shape.branching
        if branching:
            for _ in range(branching[min(self.depths[node.index], len(branching) - 1)]):
                self.draw(node)
            return
        while len(self.tokens) < self.room and node.left * self.values[node.index] > self.least:
            if self.draw(node) is None or node.repeats == _MOST_REPEATS:
                break

    def path(self, node: int) -> list[int]:
        """The tokens from below the root down to a node."""
        tokens: list[int] = []
        while node:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def fill(self) -> None:
        """Draw further children of scored nodes, the most needed first, until the tree has its nodes."""
        open_nodes = list(self.scored)
        while open_nodes and len(self.tokens) < self.room:
            node = max(open_nodes, key=lambda node: node.left * self.values[node.index])
            if node.repeats >= _MOST_REPEATS or self.draw(node) is None or (node.repeats and node.left <= _LEAST_MASS):
                open_nodes.remove(node)

    def finish(self, names: Sequence[str]) -> tuple[TokenTree, np.ndarray]:
        """The tree, what other sources proposed last at each node, and the draft slot of each node, -1 for none."""
        names, seed = tuple(names), self.seed
        sources = names + tuple(name for name in seed.source_names if name not in names)
        node_of_seed = {0: 0}
        for parent, child, source in zip(
            seed.draws.parents.tolist(), seed.draws.children.tolist(), seed.draws.sources.tolist(), strict=True
        ):
            above, token = node_of_seed.get(parent), int(seed.tokens[child])
            if above is None or (self.shape.branching and (above, token) not in self.child):
                continue
            prob = float(seed.probs[child])
            node = node_of_seed[child] = self._child(above, token, prob, prob * self.values[above])
            self.draws.append((above, node, sources.index(seed.source_names[source]), 1.0, -1, ()))
        parents, children, drawn_by, probs, rows, excluded = zip(*self.draws, strict=True) if self.draws else [()] * 6
        slots = np.full(len(self.tokens), -1)
        slots[list(self.slot_of_node)] = list(self.slot_of_node.values())
        tree = TokenTree(
            np.array(self.tokens),
            np.array(self.parents),
            np.array(self.depths),
            np.array(self.probs),
            Draws(
                np.array(parents, dtype=np.int64),
                np.array(children, dtype=np.int64),
                np.array(drawn_by, dtype=np.int64),
                np.array(probs, dtype=float),
                np.array(rows, dtype=np.int64),
                tuple(excluded),
            ),
            sources,
            tuple(self.distributions),
        )
        return tree, slots


class DrawnForest:
    """Trees of random draws, one per request, grown level by level like `Forest`.

    Args:
        seeds: what other sources propose, by request: chosen without looking at a draw.
        shapes, oracles, modes: by request; modes as `SpecConfig.draws`.
        leasts: by request, the value that a draw must have.
        fills: by request, whether further draws fill its tree up in the end.
        max_frontier, max_slots: nodes of one tree that are scored, at one depth and in all.
    """

    def __init__(
        self,
        seeds: Sequence[TokenTree],
        shapes: Sequence[Shape],
        oracles: Sequence[RandomOracle],
        modes: Sequence[str],
        leasts: Sequence[float],
        fills: Sequence[bool],
        max_frontier: int,
        max_slots: int,
    ):
        self._trees = [_Tree(*parts) for parts in zip(seeds, shapes, oracles, modes, leasts, fills, strict=True)]
        self._max_frontier, self._max_slots = max_frontier, max_slots
        self.depth = 0  # levels grown
        self._level_mass = np.zeros(len(self._trees))
        self.frontier = self._frontier([[0] if shape.max_depth else [] for shape in shapes])

    def _frontier(self, nodes: Sequence[Sequence[int]]) -> Frontier:
        """Of the given nodes, by tree."""
        rows = [(owner, node) for owner, own in enumerate(nodes) for node in own]
        owners = np.array([owner for owner, _ in rows], dtype=np.int64)
        index = np.array([node for _, node in rows], dtype=np.int64)
        trees = [self._trees[owner] for owner, _ in rows]
        tokens = np.array([tree.tokens[node] for tree, (_, node) in zip(trees, rows, strict=True)], dtype=np.int64)
        above = np.array(
            [tree.slot_of_node.get(tree.parents[node], -1) for tree, (_, node) in zip(trees, rows, strict=True)],
            dtype=np.int64,
        )
        values = np.array([tree.values[node] for tree, (_, node) in zip(trees, rows, strict=True)])
        return Frontier(index, tokens, owners, np.full(len(rows), -1), above, values)

    def extend(self, ssm_probs: Sequence[SsmProbs], weights: Sequence[np.ndarray]) -> np.ndarray:
        """Draw the children of the frontier, and choose the next frontier.

        Args:
            ssm_probs: of the SSMs that scored it.
            weights: by request, how far each SSM is trusted, float64 [num_ssms].

        Returns:
            bool [frontier rows]: where a distribution is not finite; an SSM that overflowed stays silent there.
        """
        at = self.frontier
        by_row: list[dict[int, np.ndarray]] = [{} for _ in at.nodes]
        broken = np.zeros(len(at.nodes), dtype=bool)
        for ssm, rows, probs in ssm_probs:
            sound = np.isfinite(probs).all(1)
            broken[rows[~sound]] = True
            for row, own in zip(rows[sound].tolist(), probs[sound], strict=True):
                by_row[row][ssm] = own
        first = [len(tree.tokens) for tree in self._trees]
        order = np.argsort(-at.values, kind="stable").tolist()
        nodes = {row: _Node(int(at.nodes[row]), weights[at.owners[row]], by_row[row]) for row in range(len(at.nodes))}
        for row, node in nodes.items():  # slots follow the rows of the pass
            tree = self._trees[at.owners[row]]
            tree.slot_of_node[node.index] = len(tree.slot_of_node)
            tree.scored.append(node)
        for row in order:
            self._trees[at.owners[row]].grow(nodes[row])
        self.depth += 1
        growing = np.zeros(len(self._trees), dtype=bool)
        growing[at.owners] = True
        going = [
            self._expanded(tree, start) if grows else []
            for tree, start, grows in zip(self._trees, first, growing, strict=True)
        ]
        self._level_mass = np.array(
            [sum(tree.values[start:]) for tree, start in zip(self._trees, first, strict=True)], dtype=float
        )
        self.frontier = self._frontier(going)
        return broken

    def paths(self) -> list[list[int]]:
        """By row of the frontier, the tokens from below its root down to it."""
        rows = zip(self.frontier.owners.tolist(), self.frontier.nodes.tolist(), strict=True)
        return [self._trees[owner].path(node) for owner, node in rows]

    def _expanded(self, tree: _Tree, start: int) -> list[int]:
        """Which of a tree's nodes from `start` on are scored next."""
        if self.depth >= tree.shape.max_depth:
            return []
        new = [node for node in range(start, len(tree.tokens)) if tree.tokens[node] not in tree.shape.end_tokens]
        if tree.shape.branching:
            return new
        new = [node for node in new if tree.values[node] > tree.least]
        room = max(min(self._max_frontier, self._max_slots - len(tree.slot_of_node)), 0)
        return sorted(sorted(new, key=lambda node: -tree.values[node])[:room])

    def stop(self, owners: np.ndarray) -> None:
        """Score no further nodes of these trees; bool [num trees]."""
        going = ~owners[self.frontier.owners]
        self.frontier = Frontier(*(part[going] for part in self.frontier))

    def open_mass(self) -> np.ndarray:
        """float64 [num trees]: the chance that the frontier is reached."""
        return np.bincount(self.frontier.owners, self.frontier.values, minlength=len(self._trees))

    def level_mass(self, least: float) -> np.ndarray:
        """float64 [num trees]: the chance that the newest level is reached."""
        return self._level_mass

    def finish(self, names: Sequence[str]) -> list[tuple[TokenTree, np.ndarray]]:
        """The trees, and the draft slot of each node, -1 where it was not scored.

        Args:
            names: of the SSMs.
        """
        for tree in self._trees:
            if tree.fills and not tree.shape.branching:
                tree.fill()
        return [tree.finish(names) for tree in self._trees]
