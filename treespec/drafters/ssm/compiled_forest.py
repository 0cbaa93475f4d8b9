"""`Forest` implemented with a compiled library: one C++ call per level."""

import ctypes
from collections.abc import Sequence

import numpy as np

from treespec.drafters.evidence import SeedEvidence
from treespec.drafters.ssm.forest import Forest, Shape, SsmProbs
from treespec.tree import TokenTree
from treespec_kernels.cpu.growth_cpu import DraftPasses, Grown, TreeGrowth
from treespec_kernels.tree.growth_limits import CHILDREN, FRONTIER


class CompiledForest(Forest):
    """`Forest` with compiled growth; its nodes and values are bit-identical."""

    def __init__(
        self,
        seeds: Sequence[TokenTree],
        shapes: Sequence[Shape],
        num_ssms: int,
        evidence: SeedEvidence,
        library: ctypes.CDLL,
        max_children: int = CHILDREN,
        max_frontier: int = FRONTIER,
    ):
        super().__init__(seeds, shapes, num_ssms, evidence, max_children, max_frontier)
        own = self.seeds
        self._growth = TreeGrowth(
            library,
            num_ssms,
            np.array([shape.max_depth for shape in shapes], dtype=np.int64),
            np.array([max(shape.nodes, 1) for shape in shapes], dtype=np.int64),
            [s.end_tokens for s in shapes],
            (own.children, own.tokens.astype(np.int64), own.probs, own.ratios),
            max_children,
            max_frontier,
        )
        self._branching = np.zeros(len(shapes), dtype=np.int64)
        self._static = any(shape.branching for shape in shapes)
        self._weights: Sequence[np.ndarray] | None = None
        self._mixture = np.empty(0)  # `_weights` as one float32 array

    def extend(self, ssm_probs: Sequence[SsmProbs], weights: Sequence[np.ndarray]) -> np.ndarray:
        branching, widest = self._begin(weights)
        grown = self._growth.extend(self.frontier, self._size, self.depth, ssm_probs, self._mixture, branching, widest)
        return self._append(grown)

    def draft(self, passes: DraftPasses, weights: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Run the SSMs' passes over the frontier and extend the trees, in one call. Not for the root level.

        Args:
            passes: the SSMs' passes.
            weights: as in `extend`.

        Returns:
            The result of `extend`, and each SSM's probabilities in the order of `passes`: float32 [rows that it scored,
            vocab].
        """
        branching, widest = self._begin(weights)
        grown, probs = self._growth.draft(
            self.frontier, self._size, self.depth, passes, self._mixture, branching, widest
        )
        return self._append(grown), probs

    def _begin(self, weights: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
        """Record the frontier's slots and update the mixture.

        Returns:
            int64 [num_trees], static number of children per node (0 = chosen by value), and the maximum number of
            proposals of one SSM at one node.
        """
        at = self.frontier
        parts = at.parts()
        if self._weights is not weights:
            self._weights, self._mixture = weights, np.array(weights, dtype=np.float32)
            assert np.isfinite(self._mixture).all()
        for owner, part in parts.items():
            self.slots[owner].append(at.nodes[part])
        if not self._static:
            return self._branching, self.max_children
        children = [self.children_at(i) if shape.branching else 0 for i, shape in enumerate(self.shapes)]
        return np.array(children), max(self.children_at(owner) for owner in parts)

    def _append(self, grown: Grown) -> np.ndarray:
        """Append a new level; return its broken rows."""
        self._levels.append(grown.level)
        self._size += len(grown.level.tokens)
        self.frontier = grown.frontier
        return grown.broken
