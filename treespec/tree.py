"""Token trees: drafted tokens merged by path, with the source of every draw."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np


def _read_only(array: np.ndarray) -> np.ndarray:
    """Make an array read-only so that trees can share it."""
    array.setflags(write=False)
    return array


_NO_PARENT, _ZERO, _ONE = _read_only(np.array([-1])), _read_only(np.zeros(1, dtype=np.int64)), _read_only(np.ones(1))
_NO_DRAWS = _read_only(np.empty(0, dtype=np.int64)), _read_only(np.empty(0, dtype=np.int64)), _read_only(np.empty(0))


@dataclass(frozen=True, eq=False)
class TokenTree:
    """One request's drafted tokens. Node 0 is the root, the last committed token; parents precede their children.

    A *draw* is one source's proposal of a node. Columns of draws are in draw order; a node may have several draws.

    Args:
        tokens: int64 [num_nodes].
        parents: int64 [num_nodes], -1 for the root.
        depths: int64 [num_nodes], 0 for the root.
        probs: float64 [num_nodes], estimated probability of this node given its parent (1 for the root); a mixture if
            several sources propose it.
        draw_nodes: int64 [num_draws], the drawn node.
        draw_sources: int64 [num_draws], indices into `source_names`.
        draw_probs: float64 [num_draws], the source's probability of the node; 1 for a deterministic source, NaN if
            unknown.
        source_names: indexed by `draw_sources`.
        draw_rows: int64 [num_draws], index of the distribution in `draft_probs` that the token was sampled from, -1 for
            a deterministic proposal; None = all deterministic.
        draw_excluded: by draw, tokens excluded from sampling: the draw's distribution is its row, renormalised without
            them; None = no exclusions.
        draft_probs: distributions indexed by `draw_rows`, float [vocab] each, sum 1.
        slots: int64 [num_nodes], slot of each node in the caches of the drafts that grew the tree, -1 for a node that
            they did not expand; None if no draft did, or if nodes were removed.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    probs: np.ndarray
    draw_nodes: np.ndarray
    draw_sources: np.ndarray
    draw_probs: np.ndarray
    source_names: tuple[str, ...]
    draw_rows: np.ndarray | None = None
    draw_excluded: tuple[tuple[int, ...], ...] | None = None
    draft_probs: tuple[np.ndarray, ...] = ()
    slots: np.ndarray | None = None

    @classmethod
    def root(cls, token: int) -> "TokenTree":
        """Return a one-node tree, that is, no proposal."""
        return cls(np.array([token]), _NO_PARENT, _ZERO, _ONE, *_NO_DRAWS, ()).with_values(_ONE)

    @classmethod
    def from_parents(
        cls, tokens: Sequence[int], parents: Sequence[int], probs: float | Sequence[float], source: str
    ) -> "TokenTree":
        """Build a tree with deterministic proposals of one source.

        Args:
            tokens: [num_nodes], root first.
            parents: [num_nodes], index of each node's parent, which precedes it; -1 for the root.
            probs: [num_nodes], estimated probability of each node given its parent, or one number for all; the root's
                is ignored.
            source: name of the source in metrics.

        Raises:
            ValueError: lengths differ, or a parent does not precede its child.
        """
        count = len(tokens)
        estimates = np.asarray(probs, dtype=np.float64)
        estimates = np.full(count, estimates) if estimates.ndim == 0 else estimates
        if not count == len(parents) == len(estimates) or not count:
            raise ValueError(
                f"{count} tokens, {len(parents)} parents and {len(estimates)} probs; lengths must be equal, root first"
            )
        depths = [0]
        for node in range(1, count):
            if not 0 <= parents[node] < node:
                raise ValueError(f"node {node} has parent {parents[node]}; valid: 0 to {node - 1}")
            depths.append(depths[parents[node]] + 1)
        above, chances = np.array([-1, *parents[1:]], dtype=np.int64), np.append(1.0, estimates[1:])
        draws = np.arange(1, count), np.zeros(count - 1, dtype=np.int64), np.ones(count - 1)
        return cls(np.array(tokens, dtype=np.int64), above, np.array(depths), chances, *draws, (source,))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def visible(self) -> np.ndarray:
        """Attention mask of the tree, bool [num_nodes, num_nodes]: [i, j] is True if j is i or an ancestor of i."""
        mask = np.eye(len(self), dtype=bool)
        above = np.maximum(self.parents, 0)
        for _ in range(int(self.depths.max()).bit_length()):  # each step doubles the number of covered ancestors
            mask |= mask[above]
            above = above[above]
        return mask

    @cached_property
    def values(self) -> np.ndarray:
        """Estimated acceptance probabilities, float64 [num_nodes]: products of `probs` along each node's path."""
        value, above = self.probs.tolist(), self.parents.tolist()
        for node in range(1, len(value)):
            value[node] *= value[above[node]]
        return np.array(value)

    def with_values(self, values: np.ndarray) -> "TokenTree":
        """Set precomputed `values` and return self."""
        vars(self)["values"] = values
        return self

    def sources_of(self, node: int) -> tuple[str, ...]:
        """Return the unique names of the sources that proposed a node, in draw order."""
        if node and len(self.source_names) == 1:
            return self.source_names
        return self._sources[node]

    @cached_property
    def _sources(self) -> list[tuple[str, ...]]:
        """The unique names of the sources that proposed each node, in draw order."""
        sources: list[tuple[str, ...]] = [()] * len(self.tokens)
        for node, source in zip(self.draw_nodes.tolist(), self.draw_sources.tolist(), strict=True):
            if (name := self.source_names[source]) not in sources[node]:
                sources[node] += (name,)
        return sources

    def drafted_by_source(self) -> dict[str, int]:
        """Return the number of proposals of each source, which are its nodes unless it draws with replacement."""
        counts = np.bincount(self.draw_sources, minlength=len(self.source_names)).tolist()
        return {name: count for name, count in zip(self.source_names, counts, strict=True) if count}

    def path_to(self, node: int) -> np.ndarray:
        """Return the nodes from the root to `node`: int64 [depth + 1]."""
        return np.flatnonzero(self.visible[node])

    def follow(self, choices: Sequence[int]) -> np.ndarray:
        """Descend from the root as long as a child carries the token chosen at its parent: the naive rule.

        Args:
            choices: [num_nodes], the token chosen after each node.

        Returns:
            The path, int64 [1 + accepted], root first.
        """
        path, parents, tokens = [0], self.parents.tolist(), self.tokens.tolist()
        for node in range(1, len(tokens)):  # parents precede their children
            if parents[node] == path[-1] and tokens[node] == choices[path[-1]]:
                path.append(node)
        return np.array(path, dtype=np.int64)

    def match(self, text: Sequence[int]) -> np.ndarray:
        """Return the path that matches the longest prefix of the tokens after the root, as `follow` does."""
        path, end, depth, max_depth = [0], 0, 0, len(text)
        for node, (parent, token) in enumerate(zip(self.parents.tolist(), self.tokens.tolist(), strict=True)):
            if node and parent == end and depth < max_depth and token == text[depth]:
                path.append(node)
                end, depth = node, depth + 1
        return np.array(path, dtype=np.int64)

    def keep(self, nodes: np.ndarray) -> "TokenTree":
        """Return the subtree of the given nodes, renumbered.

        A tree with random draws must keep all nodes, because a subset would not follow the draws' distributions.

        Args:
            nodes: int64, ascending, with the root and all parents of included nodes.
        """
        count = len(nodes)
        if self.draw_rows is not None:
            assert count == len(self), "a random draw was removed"
            return self
        rows: slice | np.ndarray
        if nodes[-1] == count - 1:  # a prefix of the nodes keeps its numbers
            rows, parents, drawn = slice(count), self.parents[:count], self.draw_nodes
            kept = drawn < count
        else:
            new_index = np.full(len(self) + 1, -1, dtype=np.int64)  # the last entry is for parent -1, the root's
            new_index[nodes] = np.arange(count)
            rows, parents, drawn = nodes, new_index[self.parents[nodes]], new_index[self.draw_nodes]
            kept = drawn >= 0
            assert (parents[1:] >= 0).all(), "a kept node lost its parent"
        draws = drawn[kept], self.draw_sources[kept], self.draw_probs[kept]
        tree = TokenTree(self.tokens[rows], parents, self.depths[rows], self.probs[rows], *draws, self.source_names)
        return tree.with_values(self.values[rows])

    def best(self, count: int, calibration: float = 1.0) -> "TokenTree":
        """Return the subtree of the `count` nodes with the largest values, each times `calibration` per level.

        It is connected, because values never increase along a path.
        """
        if len(self) <= count:
            return self
        values = self.values * calibration**self.depths
        order = (-values).argsort(kind="stable")[:count]  # stable: a parent stays before a child of equal value
        order.sort()
        return self.keep(order)

    def as_deterministic(self) -> "TokenTree":
        """Return the tree with all draws marked deterministic, for rules that ignore the draft distributions."""
        if self.draw_rows is None:
            return self
        return replace(self, draw_rows=None, draw_excluded=None, draft_probs=())

    def find_problem(self) -> str | None:
        """Return the first violated invariant that verification or the mask relies on, or None."""
        # By lists: for the trees of a few dozen nodes that drafters propose, arrays take five times as long.
        tokens, parents, depths = self.tokens.tolist(), self.parents.tolist(), self.depths.tolist()
        if parents[0] != -1 or depths[0] != 0:
            return "node 0 must have parent -1 and depth 0"
        siblings = set[tuple[int, int]]()
        for node in range(1, len(tokens)):
            parent, below = parents[node], (parents[node], tokens[node])
            if not 0 <= parent < node:
                return "a parent must precede its child"
            if depths[node] != depths[parent] + 1:
                return "a child's depth must be its parent's plus 1"
            if below in siblings:
                return "siblings must have distinct tokens"
            siblings.add(below)
        if not len(self.draw_nodes) == len(self.draw_sources) == len(self.draw_probs):
            return "each draw needs one node, source and prob"
        if set(self.draw_nodes.tolist()) != set(range(1, len(tokens))):
            return "every node below the root needs a draw"
        if self.draw_rows is not None:
            lengths = {len(column) for column in (self.draw_rows, self.draw_excluded) if column is not None}
            if lengths != {len(self.draw_nodes)}:
                return "draw_rows and draw_excluded need one entry per draw"
            if len(self.draw_rows) and not -1 <= self.draw_rows.min() <= self.draw_rows.max() < len(self.draft_probs):
                return "a draw's row must be an index into draft_probs, or -1"
        sources = self.draw_sources.tolist()
        if sources and not 0 <= min(sources) <= max(sources) < len(self.source_names):
            return "a draw's source must be an index into source_names"
        return None

    def check_integrity(self) -> None:
        """Assert that all invariants hold."""
        problem = self.find_problem()
        assert problem is None, problem


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """Merge trees over the same root into a trie: nodes with equal paths are one node (SpecInfer, section 3).

    All draws are kept, in the order of the trees: a token proposed by two sources is one node with two draws. Nodes are
    sorted by depth, then by first draw. A node's probability is the maximum of its estimates.

    Args:
        trees: at least one; all roots have the same token.

    Raises:
        ValueError: the roots differ.
    """
    roots = {int(tree.tokens[0]) for tree in trees}
    if len(roots) != 1:
        raise ValueError(f"cannot merge trees with different roots: {sorted(roots)}")
    trees = [tree for tree in trees if len(tree) > 1] or trees[:1]
    if len(trees) == 1:
        return trees[0]
    names = tuple(dict.fromkeys(name for tree in trees for name in tree.source_names))
    sources = [names.index(tree.source_names[s]) for tree in trees for s in tree.draw_sources]
    paths: dict[tuple[int, ...], float] = {(): 1.0}
    path_of = []
    for tree in trees:
        node_paths: list[tuple[int, ...]] = [()]
        for node in range(1, len(tree)):
            path = (*node_paths[tree.parents[node]], int(tree.tokens[node]))
            node_paths.append(path)
            paths[path] = max(paths.get(path, 0.0), float(tree.probs[node]))
        path_of.append(node_paths)
    ordered = sorted(paths, key=len)  # stable: keeps the order of first draws within a depth
    index = {path: i for i, path in enumerate(ordered)}
    rows, excluded = _merge_draft_rows(trees)
    return TokenTree(
        tokens=np.array([roots.pop()] + [path[-1] for path in ordered[1:]], dtype=np.int64),
        parents=np.array([-1] + [index[path[:-1]] for path in ordered[1:]], dtype=np.int64),
        depths=np.array([len(path) for path in ordered], dtype=np.int64),
        probs=np.array([paths[path] for path in ordered]),
        draw_nodes=np.array([index[path_of[i][n]] for i, tree in enumerate(trees) for n in tree.draw_nodes], np.int64),
        draw_sources=np.array(sources, dtype=np.int64),
        draw_probs=np.concatenate([tree.draw_probs for tree in trees]),
        source_names=names,
        draw_rows=rows,
        draw_excluded=excluded,
        draft_probs=tuple(probs for tree in trees for probs in tree.draft_probs),
    )


def add_seed_draws(tree: TokenTree, seed_tree: TokenTree, seed_of_node: np.ndarray) -> TokenTree:
    """Append a seed tree's draws to a tree that contains some of the seeds and no random draws.

    `seed_of_node`, int64 [num_nodes], is each node's seed index, negative for none.
    """
    node_of_seed = np.full(len(seed_tree), -1)
    shared = np.flatnonzero(seed_of_node >= 0)
    node_of_seed[seed_of_node[shared]] = shared
    names = tree.source_names + tuple(name for name in seed_tree.source_names if name not in tree.source_names)
    index = np.array([names.index(name) for name in seed_tree.source_names], dtype=np.int64)
    seed_draws = node_of_seed[seed_tree.draw_nodes]
    kept = np.flatnonzero(seed_draws >= 0)
    return replace(
        tree,
        draw_nodes=np.concatenate([tree.draw_nodes, seed_draws[kept]]),
        draw_sources=np.concatenate([tree.draw_sources, index[seed_tree.draw_sources[kept]]]),
        draw_probs=np.concatenate([tree.draw_probs, seed_tree.draw_probs[kept]]),
        source_names=names,
    ).with_values(tree.values)


def _merge_draft_rows(trees: Sequence[TokenTree]) -> tuple[np.ndarray | None, tuple[tuple[int, ...], ...] | None]:
    """Concatenate `draw_rows` and `draw_excluded` of the trees."""
    if all(tree.draw_rows is None for tree in trees):
        return None, None
    rows, first = [], 0
    excluded: list[tuple[int, ...]] = []
    for tree in trees:
        count, index = len(tree.draw_nodes), tree.draw_rows
        rows.append(np.full(count, -1) if index is None else np.where(index >= 0, index + first, -1))
        excluded += [()] * count if tree.draw_excluded is None else tree.draw_excluded
        first += len(tree.draft_probs)
    return np.concatenate(rows), tuple(excluded)
