"""The token tree of a captured round, read back from the device for those who observe it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from treespec.tree import Draws, TokenTree


class RoundTree(NamedTuple):
    """One request's tree, root first.

    Attributes:
        tokens, parents, depths: int64 [num_nodes].
        values: float64 [num_nodes], the estimated probability that each node is accepted.
        sources: by node, bits of the SSMs that proposed it, and behind them that of the seeds.
        path: int64 [1 + accepted], the accepted nodes; empty where the target computed NaN or infinity.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    values: np.ndarray
    sources: list[int]
    path: np.ndarray

    def token_tree(self, names: Sequence[str], seeds: TokenTree | None) -> TokenTree:
        """The tree with the names of its sources.

        Args:
            names: of the SSMs.
            seeds: the tree of sources without a pass that the round was given; the device does not tell them apart.
        """
        above = self.values[self.parents[1:]]
        probs = np.append(1.0, np.minimum(np.divide(self.values[1:], above, where=above > 0, out=0 * above), 1.0))
        source_names = (*names, *(() if seeds is None else (n for n in seeds.source_names if n not in names)))
        places = {name: place for place, name in enumerate(source_names)}
        children, sources = [], []
        for node, own in enumerate(self._proposers(names, seeds)):
            children += [node] * len(own)
            sources += [places[name] for name in own]
        drawn = np.array(children, dtype=np.int64)
        draws = Draws(self.parents[drawn], drawn, np.array(sources, dtype=np.int64), np.full(len(drawn), np.nan))
        tree = TokenTree(self.tokens, self.parents, self.depths, probs, draws, source_names)
        return tree.with_values(self.values)

    def _proposers(self, names: Sequence[str], seeds: TokenTree | None) -> list[tuple[str, ...]]:
        """By node the names of the sources that proposed it."""
        seeded = {} if seeds is None else _children(seeds)
        seed_of = {0: 0}  # the node of `seeds` with the same path, where there is one
        found: list[tuple[str, ...]] = [()]
        for node in range(1, len(self.tokens)):
            bits, parent = self.sources[node], int(self.parents[node])
            own = tuple(name for i, name in enumerate(names) if bits >> i & 1)
            seed = seeded.get((seed_of.get(parent, -1), int(self.tokens[node])))
            if seed is not None and seeds is not None:
                seed_of[node] = seed
                if bits >> len(names) & 1:
                    own += tuple(name for name in seeds.sources_of(seed) if name not in own)
            found.append(own)
        return found


def _children(tree: TokenTree) -> dict[tuple[int, int], int]:
    """The node below each parent that carries a token."""
    nodes = zip(tree.parents[1:].tolist(), tree.tokens[1:].tolist(), strict=True)
    return {place: node for node, place in enumerate(nodes, start=1)}
