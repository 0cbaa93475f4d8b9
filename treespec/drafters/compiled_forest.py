"""Trees of several requests while they grow, a level in one call of the compiled library."""

import ctypes
from collections.abc import Sequence

import numpy as np

from treespec.drafters.forest import Forest, Laws, Shape
from treespec.tree import TokenTree
from treespec_kernels.growth_cpu import TreeGrowth


class CompiledForest(Forest):
    """A `Forest` of the same nodes; its arguments, and the library."""

    def __init__(
        self, seeds: Sequence[TokenTree], shapes: Sequence[Shape], num_ssms: int, max_children: int,
        max_frontier: int, max_slots: int, library: ctypes.CDLL,
    ):  # fmt: skip
        super().__init__(seeds, shapes, num_ssms, max_children, max_frontier, max_slots)
        own = self.seeds
        self._growth = TreeGrowth(
            library, num_ssms, np.array([shape.max_depth for shape in shapes], dtype=np.int64),
            np.array([max(shape.nodes, 1) for shape in shapes], dtype=np.int64), [s.end_tokens for s in shapes],
            (own.children, own.tokens.astype(np.int64), own.probs.astype(np.float64)), max_frontier, max_slots,
        )  # fmt: skip
        self._branching = np.zeros(len(shapes), dtype=np.int64)
        self._static = any(shape.branching for shape in shapes)
        self._weights: tuple[Sequence[np.ndarray], np.ndarray] | None = None

    def extend(self, laws: Sequence[Laws], weights: Sequence[np.ndarray]) -> np.ndarray:
        at = self.frontier
        parts = at.parts()
        branching, widest = self._branching, self.max_children
        if self._static:
            children = [self.children_at(i) if shape.branching else 0 for i, shape in enumerate(self.shapes)]
            branching, widest = np.array(children), max(self.children_at(owner) for owner in parts)
        if self._weights is None or self._weights[0] is not weights:
            self._weights = weights, np.array(weights, dtype=np.float64)
            assert np.isfinite(self._weights[1]).all()
        for owner, part in parts.items():
            self.slots[owner].append(at.nodes[part])
        level, self.frontier, broken = self._growth.extend(
            at, self._size, self.depth, laws, self._weights[1], branching, widest
        )
        self._levels.append(level)
        self._size += len(level.tokens)
        return broken
