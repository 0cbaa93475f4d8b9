"""The verified tree of a captured round, on the host."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from treespec.tree import Draws, TokenTree
from treespec_kernels.tree.device_trees import SEED_BIT


@dataclass(frozen=True, eq=False)
class RoundTree:
    """One request's verified tree, root first; arrays are converted when they are first read.

    Attributes:
        nodes: int32 [5, num_rows], by row: tokens; parents, -1 for the root; depths, -1 after the last node; bit masks
            of the sources, bit i if SSM i proposed the node, `SEED_BIT` if it is a node of `proposed`; and the bits of
            the float32 values.
        names: names of the SSMs.
        proposed: the proposals of sources without a model that the round received. The device does not distinguish
            these sources, so their names are looked up here.
    """

    nodes: np.ndarray
    names: tuple[str, ...] = ()
    proposed: TokenTree | None = None

    @cached_property
    def tokens(self) -> np.ndarray:
        """int64 [num_nodes]."""
        return self.nodes[0, : len(self)].astype(np.int64)

    @cached_property
    def parents(self) -> np.ndarray:
        """int64 [num_nodes], -1 for the root."""
        return self.nodes[1, : len(self)].astype(np.int64)

    @cached_property
    def depths(self) -> np.ndarray:
        """int64 [num_nodes]."""
        return self.nodes[2, : len(self)].astype(np.int64)

    @cached_property
    def values(self) -> np.ndarray:
        """float64 [num_nodes], the estimated probability that each node is accepted."""
        return self.nodes[4, : len(self)].view(np.float32).astype(np.float64)

    @cached_property
    def _size(self) -> int:
        return int(np.count_nonzero(self.nodes[2] >= 0))

    def __len__(self) -> int:
        return self._size

    def sources_of(self, node: int) -> tuple[str, ...]:
        """Return the names of the sources that proposed a node."""
        bits = int(self.nodes[3, node])
        own = tuple(name for i, name in enumerate(self.names) if bits >> i & 1)
        if self.proposed is None or not bits >> SEED_BIT & 1:
            return own
        seed = self._place_in_proposed(node)
        return own if seed is None else (*own, *(n for n in self.proposed.sources_of(seed) if n not in own))

    def drafted_by_source(self) -> dict[str, int]:
        """Return the number of nodes that each source proposed."""
        bits = self.nodes[3, 1 : len(self)]
        counts = {name: int(np.count_nonzero(bits >> i & 1)) for i, name in enumerate(self.names)}
        seeds = () if self.proposed is None else np.flatnonzero(bits >> SEED_BIT & 1).tolist()
        for node in seeds:
            for name in self.sources_of(node + 1):
                if name not in self.names:
                    counts[name] = counts.get(name, 0) + 1
        return {name: count for name, count in counts.items() if count}

    def token_tree(self) -> TokenTree:
        """Return the equivalent `TokenTree`, with the sources of every node."""
        above = self.values[self.parents[1:]]
        probs = np.append(1.0, np.minimum(np.divide(self.values[1:], above, where=above > 0, out=0 * above), 1.0))
        others = () if self.proposed is None else (n for n in self.proposed.source_names if n not in self.names)
        source_names = (*self.names, *others)
        drawn = [(node, source_names.index(name)) for node in range(1, len(self)) for name in self.sources_of(node)]
        children, sources = np.array(drawn, dtype=np.int64).reshape(-1, 2).T
        draws = Draws(self.parents[children], children, sources, np.full(len(children), np.nan))
        tree = TokenTree(self.tokens, self.parents, self.depths, probs, draws, source_names)
        return tree.with_values(self.values)

    def _place_in_proposed(self, node: int) -> int | None:
        """Return the node of `proposed` with the same path as `node`, or None."""
        path, place = [], 0
        while node:
            path.append(int(self.tokens[node]))
            node = int(self.parents[node])
        for token in reversed(path):
            if (below := self._children.get((place, token))) is None:
                return None
            place = below
        return place

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        """Map each (parent, token) of `proposed` to the child node."""
        assert self.proposed is not None
        nodes = zip(self.proposed.parents[1:].tolist(), self.proposed.tokens[1:].tolist(), strict=True)
        return {place: node for node, place in enumerate(nodes, start=1)}
