"""Deterministic growth of a batch's token trees, in C++: by one call per level, or for all levels.

The specification is treespec_kernels/tree/tree_merge.py. Growth on the host adds static branching, and removes nodes
early that cannot be among a tree's best, which changes no selected tree (reference_forest.py). The C++ is
`growth_cpu.cpp`. Python's overhead dominates a call (the address of an array alone takes 1 us), so its inputs are
packed into one array of integers, and its outputs into one array per type.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from treespec.drafters.evidence import SeedEvidence
from treespec.tree import TokenTree, join_seed_tree
from treespec_kernels.cpu.cpu_library import address_of
from treespec_kernels.cpu.growth_cpu import NO_PAGE, STRUCTS, CallPasses, ScoredRows, packed
from treespec_kernels.tree.growth_limits import CHILDREN, FRONTIER, SEEDS, frontier_width, level_widths
from treespec_kernels.tree.level_rule import LevelRule


class Level(NamedTuple):
    """Nodes of one depth, ordered by tree and parent."""

    tokens: np.ndarray  # int64 [size]
    parents: np.ndarray  # int64 [size], as `Frontier.nodes`; owners and seeds likewise
    owners: np.ndarray
    seeds: np.ndarray
    probs: np.ndarray  # float32 [size], probability after the parent
    values: np.ndarray  # float32 [size], product of probabilities along the path
    proposed: np.ndarray  # bool [size, num_ssms], whether each SSM proposed the node
    draft_probs: np.ndarray  # float32 [size, num_ssms], each SSM's probability of the node

    def select(self, nodes: np.ndarray | slice) -> "Level":
        return Level(*(column[nodes] for column in self))


class Frontier(NamedTuple):
    """Nodes to score, grouped by tree; [num_rows] each, int64 except values."""

    nodes: np.ndarray  # indices over all levels of all trees
    tokens: np.ndarray  # tokens of the nodes
    owners: np.ndarray  # index of the tree
    seeds: np.ndarray  # index of the node among the seeds, or -1
    above: np.ndarray  # slot of the parent in its tree
    values: np.ndarray  # float32, product of probabilities along the path

    def select(self, rows: np.ndarray | slice) -> "Frontier":
        return Frontier(*(column[rows] for column in self))

    def slices(self) -> dict[int, slice]:
        """Return the slice of rows of each tree that has any, by tree index."""
        if len(self.owners) and self.owners[0] == self.owners[-1]:
            return {int(self.owners[0]): slice(0, len(self.owners))}
        starts = [0, *(np.flatnonzero(self.owners[1:] != self.owners[:-1]) + 1).tolist()]
        bounds = pairwise([*starts, len(self.owners)])
        return {owner: slice(*bound) for owner, bound in zip(self.owners[starts].tolist(), bounds, strict=True)}


class SsmProbs(NamedTuple):
    """An SSM's next-token probabilities for some rows of the frontier."""

    ssm: int
    rows: np.ndarray  # int64, frontier rows, ascending
    probs: np.ndarray  # float32 [len(rows), width]
    tokens: np.ndarray | None = None  # int64 [width], ascending, of the columns; None = the whole vocabulary


@dataclass(frozen=True)
class TreeLimits:
    """Limits of one tree."""

    max_depth: int  # 0 = no growth
    nodes: int  # number of nodes that the tree will be cut to
    branching: Sequence[int] | None  # static number of children per node by depth; None = chosen by value
    end_tokens: tuple[int, ...]  # tokens below which nothing is drafted

    def children_at(self, depth: int) -> int:
        """Return the static number of children of a node of this depth; 0 = chosen by value."""
        return self.branching[min(depth, len(self.branching) - 1)] if self.branching else 0


class Forest(ABC):
    """One growing tree per request, which merges the SSMs' proposals with those of other sources (the seeds)."""

    def __init__(
        self,
        seed_trees: Sequence[TokenTree],  # proposed by other sources; growing trees use the best `SEEDS`
        limits: Sequence[TreeLimits],  # by request
        num_ssms: int,
        evidence: SeedEvidence,
        max_children: int = CHILDREN,  # maximum number of proposals of one source at one node
        max_frontier: int = FRONTIER,  # maximum number of expanded nodes per tree and depth; see `frontier_width`
    ):
        count = len(seed_trees)
        self.limits, self.num_ssms = limits, num_ssms
        self.max_children, self.max_frontier = max_children, max_frontier
        pairs = zip(seed_trees, limits, strict=True)
        # Seed i of tree t is number `first_seeds[t] + i` of all seeds.
        self.seed_trees = [tree.best(1 + SEEDS) if limit.max_depth else tree for tree, limit in pairs]
        self._join_seeds(evidence)
        roots, trees, one = self.first_seeds[:-1], np.arange(count), np.ones(count, dtype=np.float32)
        proposed = np.zeros((count, num_ssms), dtype=bool)
        tokens = self.seed_tokens[roots]
        draft_probs = np.zeros((count, num_ssms), dtype=np.float32)
        self._levels = [Level(tokens, np.full(count, -1), trees, roots, one, one, proposed, draft_probs)]
        self._size, self._level_nodes = count, [count]
        self.slots: list[list[np.ndarray]] = [[] for _ in seed_trees]  # by level, expanded nodes in slot order
        self.frontier = Frontier(trees, tokens, trees, roots, np.full(count, -1), one)
        self.stop(np.array([not limit.max_depth for limit in limits]))

    def _join_seeds(self, evidence: SeedEvidence) -> None:
        """Concatenate the columns of the seed trees, and list each seed's children, padded with -1.

        `seed_children` is int64 [num_seeds + 1, width]. Its last row is empty, so that number -1 (no seed) has none.
        """
        trees, sizes = self.seed_trees, [len(tree) for tree in self.seed_trees]
        self.first_seeds = np.array([0, *accumulate(sizes)])
        self.seed_tokens = np.concatenate([tree.tokens for tree in trees])
        self.seed_probs = np.concatenate([tree.probs for tree in trees]).astype(np.float32)
        if len(self.seed_tokens) == len(trees):  # only roots, as in most rounds
            self.seed_ratios = np.ones(len(trees), dtype=np.float32)
            self.seed_children = np.full((len(trees) + 1, 1), -1)
            return
        self.seed_ratios = evidence.ratios(self.seed_probs)
        parents = np.concatenate([tree.parents for tree in trees])
        below = np.flatnonzero(parents >= 0)
        parents = parents + np.repeat(self.first_seeds[:-1], sizes)  # invalid for roots
        order = below[np.argsort(parents[below], kind="stable")]
        above = parents[order]
        rank = np.arange(len(order)) - np.searchsorted(above, above)
        self.seed_children = np.full((len(parents) + 1, int(rank.max(initial=0)) + 1), -1)
        self.seed_children[above, rank] = order

    @property
    def depth(self) -> int:
        return len(self._level_nodes) - 1

    @abstractmethod
    def extend(self, ssm_probs: Sequence[SsmProbs], weights: Sequence[np.ndarray]) -> np.ndarray:
        """Add the children that SSMs and seeds propose for the frontier, and select the next frontier.

        `weights` are by tree the SSMs' mixture weights, float [num_ssms]; sum 1, 0 for an SSM that did not score.
        Returns bool [frontier rows]: True, and ignored, where an SSM's top probabilities are not finite.
        """

    def paths(self) -> list[list[int]]:
        """Return the path of each frontier row: the tokens from the root (exclusive) to the node."""
        tokens = np.concatenate([level.tokens for level in self._levels])
        parents = np.concatenate([level.parents for level in self._levels])
        nodes, reversed_path = self.frontier.nodes, []
        for _ in range(self.depth):
            reversed_path.append(tokens[nodes])
            nodes = parents[nodes]
        return np.stack(reversed_path[::-1], axis=1).tolist() if reversed_path else [[] for _ in nodes]

    def children_at(self, owner: int) -> int:
        """Return the maximum number of children of a frontier node of one tree."""
        return self.limits[owner].children_at(self.depth) or self.max_children

    def stop(self, owners: np.ndarray) -> None:
        """Remove trees from the frontier; owners: bool [num_trees]."""
        if owners.any():
            remaining = ~owners[self.frontier.owners]
            self.frontier = self.frontier.select(remaining)

    def open_mass(self) -> np.ndarray:
        """Return the open mass of each tree: float64 [num_trees].

        This is the probability that its frontier is reached and that the next token is not among the seeds.
        """
        frontier = self.frontier
        below = self.seed_children[frontier.seeds]
        covered = np.cumsum(self.seed_probs[below] * (below >= 0), axis=1)[:, -1]  # unlike `sum`, in order
        values = frontier.values * np.maximum(1 - covered, 0.0)
        return np.bincount(frontier.owners, values, minlength=len(self.limits))

    def level_mass(self, least: float) -> np.ndarray:
        """Return the probability that each tree's newest level is reached: float64 [num_trees].

        Counts nodes that are not seeds and have at least the value `least`.
        """
        level = self._levels[-1]
        counted = (level.values >= np.float32(least)) & (level.seeds < 0)
        return np.bincount(level.owners[counted], level.values[counted], minlength=len(self.limits))

    def finish(self, names: Sequence[str]) -> list[TokenTree]:
        """Build the trees, including seeds that were not reached; `names` are the SSMs'."""
        joined = Level(*(np.concatenate(columns) for columns in zip(*self._levels, strict=True)))
        depths = np.repeat(np.arange(len(self._level_nodes)), self._level_nodes)
        return [self._finish(owner, joined, depths, names) for owner in range(len(self.limits))]

    def _finish(self, owner: int, nodes: Level, depths: np.ndarray, names: Sequence[str]) -> TokenTree:
        """Build one tree from all levels of all trees."""
        expanded = np.concatenate(self.slots[owner]) if self.slots[owner] else np.empty(0, dtype=np.int64)
        if len(self.limits) > 1:
            of_tree = np.flatnonzero(nodes.owners == owner)
            nodes, depths, expanded = nodes.select(of_tree), depths[of_tree], np.searchsorted(of_tree, expanded)
            nodes.parents[1:] = np.searchsorted(of_tree, nodes.parents[1:])
        slots = np.full(len(nodes.tokens), -1)
        slots[expanded] = np.arange(len(expanded))
        drawn, sources = np.nonzero(nodes.proposed)
        draws = drawn, sources, nodes.draft_probs[drawn, sources].astype(np.float64)
        probs = nodes.probs.astype(np.float64)
        tree = TokenTree(nodes.tokens, nodes.parents, depths, probs, *draws, tuple(names), slots=slots)
        tree.with_values(nodes.values.astype(np.float64))
        seed_tree = self.seed_trees[owner]
        if len(seed_tree) == 1:
            return tree
        complete = not self.limits[owner].branching or not self.slots[owner]
        return join_seed_tree(tree, seed_tree, nodes.seeds - self.first_seeds[owner], complete)


class CompiledForest(Forest):
    """`Forest` with compiled growth; bit-identical."""

    def __init__(self, *arguments: Any, library: ctypes.CDLL, **options: Any):
        super().__init__(*arguments, **options)
        limits = self.limits
        count, nodes, ends = len(limits), [max(limit.nodes, 1) for limit in limits], [s.end_tokens for s in limits]
        starts, slots, values = [*accumulate(map(len, ends), initial=0)], [0] * count, [1] * count  # counts of them
        depths = [limit.max_depth for limit in limits]
        ints, addresses = packed(depths, nodes, [*chain(*ends)], starts, slots, values)
        floats = np.zeros((1 + max(nodes), count), dtype=np.float32)  # least value, and best values [num_trees, nodes]
        floats[1:].reshape(count, -1)[:, 0] = 1.0
        self._library, self._held = library, (ints, floats)
        self._growth = STRUCTS["Growth"](
            num_ssms=self.num_ssms,
            most_nodes=max(nodes),
            max_depths=addresses[0],
            nodes=addresses[1],
            end_tokens=addresses[2],
            end_starts=addresses[3],
            num_slots=addresses[4],
            num_values=addresses[5],
            least=(least := address_of(floats, np.float32)),
            best=least + 4 * count,
            seed_width=self.seed_children.shape[1],
            seed_children=address_of(self.seed_children),
            seed_tokens=address_of(self.seed_tokens),
            seed_probs=address_of(self.seed_probs, np.float32),
            seed_ratios=address_of(self.seed_ratios, np.float32),
            max_seeds=self.max_children,
        )
        self._grown: Frontier | None = None  # the frontier of which the library has the addresses
        self._weights: Sequence[np.ndarray] | None = None

    def extend(self, ssm_probs: Sequence[SsmProbs], weights: Sequence[np.ndarray]) -> np.ndarray:
        frontier, g, rows = self.frontier, self._growth, len(self.frontier.nodes)
        slices = frontier.slices()
        for owner, part in slices.items():
            self.slots[owner].append(frontier.nodes[part])
        structs = (STRUCTS["SsmProbs"] * len(ssm_probs))(
            *(
                (
                    address_of(probs, np.float32),
                    None if len(scored) == rows else address_of(scored),
                    None if tokens is None else address_of(tokens),
                    len(scored),
                    ssm,
                    probs.shape[1],
                )
                for ssm, scored, probs, tokens in ssm_probs
            )
        )
        branching = np.array([limit.children_at(self.depth) for limit in self.limits])
        self._mix(weights)
        g.num_scored, g.ssm_probs = len(ssm_probs), ctypes.addressof(structs)
        g.depth, g.size, g.branching = self.depth, self._size, address_of(branching)
        g.children = max(self.children_at(owner) for owner in slices)
        g.next_width = frontier_width(self.depth + 1, self.max_frontier)
        if frontier is not self._grown:
            self._set_rows(address_of(column) for column in frontier[:5])
            g.row_values = address_of(frontier.values, np.float32)
        room = rows * (len(ssm_probs) * g.children + self.seed_children.shape[1])
        level, expanded, broken = self._begin(rows, room, room)
        count = self._library.treespec_grow(ctypes.byref(g))
        self._set_rows((g.next_nodes, g.next_tokens, g.next_owners, g.next_seeds, g.next_above))
        g.row_values, self._grown = g.next_values, expanded.select(slice(g.num_next))
        self._append(level.select(slice(count)), [count], self._grown)
        return broken[:rows]

    def draft(
        self, passes: CallPasses, weights: Sequence[np.ndarray], rule: LevelRule, adaptive: Sequence[bool]
    ) -> ScoredRows:
        """Run the SSMs' passes and extend the trees by all levels, in one call.

        `adaptive`, by tree, says where `rule` may end growth early; it is empty if no tree is adaptive.
        """
        roots, g, num_levels = self.frontier, self._growth, max(limit.max_depth for limit in self.limits)
        level, expanded, broken = self._begin(len(roots.nodes), *self.room)
        widths = [frontier_width(depth, self.max_frontier) for depth in range(1, num_levels + 1)]
        ints, addresses = packed(
            *(column.tolist() for column in roots[:5]),
            passes.tokens,
            passes.first_token,
            [*chain(*passes.active)],
            [*chain(*passes.valid)],
            [*chain(*passes.first_rotations)],
            widths,
            [limit.children_at(depth) for depth in range(num_levels) for limit in self.limits],
            adaptive,
            [0] * (2 * num_levels),
        )
        self._mix(weights)
        self._set_rows(addresses[:5])
        g.row_values, g.size = address_of(roots.values, np.float32), len(self.limits)
        grown = STRUCTS["Levels"](
            g.size, self.max_children, passes.reads, *addresses[5:12], 0, addresses[13], addresses[13] + 8 * num_levels
        )
        if passes.sampling is not None:
            temperatures = (ctypes.c_double * g.size)(*passes.sampling.temperatures)
            keys = packed(*passes.sampling[1:])
            sampling = STRUCTS["Sampling"](ctypes.addressof(temperatures), *keys[1])
            grown.sampling = ctypes.addressof(sampling)
        drafts, scores = passes.models.drafts, passes.allocate_scores(self.room[1])
        numbers = rule.calibration, rule.level_cost, rule.marginal_cost, rule.least_value
        token_weights = (ctypes.c_double * len(adaptive))(*rule.token_weights[: len(adaptive)])
        stop = STRUCTS["Rule"](*numbers, addresses[12], ctypes.addressof(token_weights))
        placed = self._library.treespec_draft(
            ctypes.byref(g),
            ctypes.byref(passes.places.placing),
            drafts,
            len(drafts),
            ctypes.byref(grown),
            ctypes.byref(stop) if adaptive else None,
        )
        assert placed, NO_PAGE
        level_rows, level_nodes = (ints[-first:][: grown.num_levels] for first in (2 * num_levels, num_levels))
        below = sum(level_rows) - level_rows[0]
        nodes = np.concatenate([roots.nodes, expanded.nodes[:below]])
        owners = np.concatenate([roots.owners, expanded.owners[:below]])
        for owner in roots.owners.tolist():
            self.slots[owner].append(nodes[owners == owner])
        self._append(level.select(slice(sum(level_nodes))), level_nodes, roots.select(slice(0)))
        scores = [probs[: draft.num_rows] for probs, draft in zip(scores, drafts, strict=True)]
        return ScoredRows(level_rows, owners, broken[: sum(level_rows)], scores)

    @cached_property
    def room(self) -> tuple[int, int]:
        """Maximum numbers of nodes, and of nodes to expand, that trees grow from their roots."""
        widest = max([self.max_children, *(max(limit.branching) for limit in self.limits if limit.branching)])
        nodes = expanded = 0
        for limit in self.limits:
            widths = level_widths(limit.max_depth, limit.branching, self.max_frontier)
            expanded += sum(widths)
            nodes += sum(widths) * (
                max(limit.branching) if limit.branching else self.num_ssms * widest + self.seed_children.shape[1]
            )
        return nodes, expanded

    def _mix(self, weights: Sequence[np.ndarray]) -> None:
        if self._weights is not weights:
            self._weights, self._mixture = weights, np.array(weights, dtype=np.float32)
            assert np.isfinite(self._mixture).all()
            self._growth.weights = address_of(self._mixture, np.float32)

    def _set_rows(self, addresses: Iterable[int]) -> None:
        g = self._growth
        g.row_nodes, g.row_tokens, g.row_owners, g.row_seeds, g.row_above = addresses

    def _begin(self, rows: int, nodes: int, expanded: int) -> tuple[Level, Frontier, np.ndarray]:
        """Pass the frontier's number of rows, and allocate outputs: new nodes, nodes to expand, and broken rows."""
        g, ssms = self._growth, self.num_ssms
        ints = np.empty(4 * nodes + 5 * expanded, dtype=np.int64)
        floats = np.empty(expanded + (2 + ssms) * nodes, dtype=np.float32)
        flags = np.empty(nodes * ssms + expanded, dtype=bool)
        g.num_rows = rows
        address = address_of(ints)
        g.tokens, g.parents, g.owners, g.seeds = range(address, address + 32 * nodes, 8 * nodes)
        address += 32 * nodes
        g.next_nodes, g.next_tokens, g.next_owners, g.next_seeds, g.next_above = range(
            address, address + 40 * expanded, 8 * expanded
        )
        g.next_values = address = address_of(floats, np.float32)
        address += 4 * expanded
        g.probs, g.values, g.draft_probs = range(address, address + 12 * nodes, 4 * nodes)
        g.proposed = address_of(flags, np.bool_)
        g.broken = g.proposed + nodes * ssms
        self._outputs = ints, floats, flags  # kept alive, since the library has addresses of them
        probs, values = floats[expanded:][: 2 * nodes].reshape(2, nodes)
        by_ssm = flags[: nodes * ssms].reshape(nodes, ssms), floats[expanded + 2 * nodes :].reshape(nodes, ssms)
        columns: list[np.ndarray] = [*ints[: 4 * nodes].reshape(4, nodes), probs, values, *by_ssm]
        columns_of_frontier: list[np.ndarray] = [*ints[4 * nodes :].reshape(5, expanded), floats[:expanded]]
        return Level(*columns), Frontier(*columns_of_frontier), flags[nodes * ssms :]

    def _append(self, nodes: Level, level_nodes: Sequence[int], frontier: Frontier) -> None:
        """Append one or more levels, and set the frontier."""
        self._levels.append(nodes)
        self._level_nodes += level_nodes
        self._size += len(nodes.tokens)
        self.frontier = frontier
