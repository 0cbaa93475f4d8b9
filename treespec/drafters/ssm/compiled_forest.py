"""`Forest` implemented with a compiled library: one C++ call per level, or for all levels."""

import ctypes
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from treespec.drafters.evidence import SeedEvidence
from treespec.drafters.ssm.forest import Forest, Shape, SsmProbs
from treespec.tree import TokenTree
from treespec_kernels.cpu.growth_cpu import CallPasses, GrownLevels, TreeGrowth
from treespec_kernels.tree.growth_limits import CHILDREN, FRONTIER, level_widths
from treespec_kernels.tree.level_rule import LevelRule
from treespec_kernels.tree.tree_levels import Frontier, Level


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
            [shape.max_depth for shape in shapes],
            [max(shape.nodes, 1) for shape in shapes],
            [s.end_tokens for s in shapes],
            (own.children, own.tokens.astype(np.int64), own.probs, own.ratios),
            max_children,
            max_frontier,
        )
        self._weights: Sequence[np.ndarray] | None = None
        self._mixture = np.empty(0)  # `_weights` as one float32 array

    def extend(self, ssm_probs: Sequence[SsmProbs], weights: Sequence[np.ndarray]) -> np.ndarray:
        at = self.frontier
        parts = at.parts()
        for owner, part in parts.items():
            self.slots[owner].append(at.nodes[part])
        branching = np.array(self._branching(self.depth))
        widest = max(self.children_at(owner) for owner in parts)
        mixture = self._mix(weights)
        level, frontier, broken = self._growth.extend(at, self._size, self.depth, ssm_probs, mixture, branching, widest)
        self._append(level, [len(level.tokens)], frontier)
        return broken

    def draft(
        self, passes: CallPasses, weights: Sequence[np.ndarray], rule: LevelRule, adaptive: Sequence[bool]
    ) -> GrownLevels:
        """Run the SSMs' passes and extend the trees from their roots by all levels, in one call.

        Args:
            passes: the SSMs' passes.
            weights: as in `extend`.
            rule: ends adaptive trees early.
            adaptive: by tree; empty if no tree is adaptive.
        """
        at, depth = self.frontier, max(shape.max_depth for shape in self.shapes)
        branching = [self._branching(level) for level in range(depth)]
        limits = branching, self.max_children, self.room
        drafted = self._growth.draft(at, passes, self._mix(weights), *limits, rule, adaptive)
        for owner in at.owners.tolist():
            self.slots[owner].append(drafted.row_nodes[drafted.row_owners == owner])
        self._append(drafted.nodes, drafted.level_nodes, at.select(slice(0)))
        return drafted

    @cached_property
    def room(self) -> tuple[int, int]:
        """Maximum numbers of nodes, and of nodes to expand, that trees grow from their roots."""
        widest = max([self.max_children, *(max(shape.branching) for shape in self.shapes if shape.branching)])
        nodes = expanded = 0
        for shape in self.shapes:
            widths = level_widths(shape.max_depth, shape.branching, self.max_frontier)
            expanded += sum(widths)
            nodes += sum(widths) * (
                max(shape.branching) if shape.branching else self.num_ssms * widest + self.seeds.width
            )
        return nodes, expanded

    def _mix(self, weights: Sequence[np.ndarray]) -> np.ndarray:
        """Return the mixture weights as one array: float32 [num_trees, num_ssms]."""
        if self._weights is not weights:
            self._weights, self._mixture = weights, np.array(weights, dtype=np.float32)
            assert np.isfinite(self._mixture).all()
        return self._mixture

    def _branching(self, depth: int) -> list[int]:
        """Return the static number of children per node of a depth, by tree; 0 = chosen by value."""
        own = (shape.branching for shape in self.shapes)
        return [each[min(depth, len(each) - 1)] if each else 0 for each in own]

    def _append(self, nodes: Level, level_nodes: Sequence[int], frontier: Frontier) -> None:
        """Append one or more levels, and set the frontier."""
        self._levels.append(nodes)
        self._level_nodes += level_nodes
        self._size += len(nodes.tokens)
        self.frontier = frontier
