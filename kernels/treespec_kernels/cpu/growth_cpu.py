"""Grows token trees in one call of C++.

The call assigns slots to the frontier, runs the SSMs' passes over it, merges their proposals with those of other
sources, selects the next frontier, and goes on with it while another level pays. The source is `growth_cpu.cpp`, and
the reference treespec_kernels/tree/tree_merge.py. Python's overhead dominates a call (the address of an array alone
takes 1 us), so the inputs of a call are packed into one array of integers, and its outputs into one array per type.
"""

import ctypes
import functools
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec_kernels.attention.tree_batch import PAGE_SIZE
from treespec_kernels.cpu.compiled_plan import CompiledPlan
from treespec_kernels.cpu.cpu_library import address_of, compile_library, read_structs
from treespec_kernels.cpu.decoder_cpu import PassEntries
from treespec_kernels.tree.growth_limits import MAX_MIXTURE, MIN_MIXTURE, frontier_width
from treespec_kernels.tree.level_rule import LevelRule
from treespec_kernels.tree.tree_levels import Frontier, Level

NO_PAGE = "a tree has no page for its nodes"
_SOURCES = tuple(
    Path(__file__).with_name(name)
    for name in ("growth_cpu.cpp", "drafts_cpu.h", "sampling_cpu.h", "vectors_cpu.h", "batch_cpu.h")
)
_STRUCTS = read_structs(*_SOURCES)


@functools.cache
def growth_library(compiler: tuple[str, ...], folder: Path) -> ctypes.CDLL:
    """Load or compile the library; arguments and errors as in `compile_library`."""
    bounds = f"-DMIN_MIXTURE={MIN_MIXTURE}f", f"-DMAX_MIXTURE={MAX_MIXTURE}f"
    return compile_library(compiler, _SOURCES, bounds, folder)


def _packed(*sequences: Sequence[int]) -> tuple[ctypes.Array[ctypes.c_int64], list[int]]:
    """Return all numbers in one array, and the address of each sequence: an array's address takes a microsecond."""
    numbers = [*chain(*sequences)]
    array = (ctypes.c_int64 * len(numbers))(*numbers)
    address = ctypes.addressof(array)
    return array, [address + 8 * first for first in accumulate(map(len, sequences[:-1]), initial=0)]


class DraftSampling(NamedTuple):
    """How the targets of a batch's trees choose, for drafts that predict it.

    Attributes:
        temperatures: by tree; 0 for the most likely token.
        adds_noise: by tree, whether the drafts add the noise of the target (see sampling/coupled_choice.py).
        rng_seeds, samples: by tree, the key of the noise.
    """

    temperatures: Sequence[float]
    adds_noise: Sequence[bool]
    rng_seeds: Sequence[int]
    samples: Sequence[int]


class DraftInputs(NamedTuple):
    """What a call that grows trees needs of one draft.

    Attributes:
        features: what a draft head reads in its first pass, [num_rows, hidden_size] in its dtype: first for the
            committed tokens, tree by tree, then for the roots; None for an SSM.
        block_probs: the probabilities of a block draft, which runs no pass and has read all tokens, by tree and depth,
            float32 [num_trees, depths, width], without temperature and noise; None for others.
    """

    features: Tensor | None = None
    block_probs: np.ndarray | None = None


class GrownLevels(NamedTuple):
    """All levels below the roots.

    Attributes:
        nodes: new nodes of all levels.
        level_nodes, level_rows: by level, number of new nodes and of scored nodes.
        row_nodes, row_owners: int64 [num_rows], scored nodes and their trees, by level.
        broken: bool [num_rows], whether an SSM's probabilities are not finite.
        scores: by SSM of the passes, float32 [num_rows, width]: probabilities without temperature and noise, after the
            committed tokens that it read, if `CallPasses.reads`, and then after the nodes that it scored, by level.
    """

    nodes: Level
    level_nodes: list[int]
    level_rows: list[int]
    row_nodes: np.ndarray
    row_owners: np.ndarray
    broken: np.ndarray
    scores: list[np.ndarray]

    def runs(self) -> Iterator[tuple[int, int]]:
        """Return the trees and numbers of consecutive scored nodes of the same tree."""
        owners = self.row_owners
        if len(owners) and (owners == owners[0]).all():
            yield int(owners[0]), len(owners)
            return
        first = 0
        for count in self.level_rows:
            level, sizes = np.unique(owners[first : first + count], return_counts=True)
            yield from zip(level.tolist(), sizes.tolist(), strict=True)
            first += count


class TreeGrowth:
    """State of a batch of growing trees in the library.

    Args:
        library: from `growth_library`.
        num_ssms: number of SSMs.
        max_depths, nodes: by tree, maximum number of levels and of nodes; candidates that cannot be among the best
            `nodes` are dropped.
        end_tokens: tokens that are not expanded, per tree.
        seeds: proposals of other sources: children int64 [num_seeds + 1, width], tokens int64 [num_seeds], probs and
            evidence ratios float32 [num_seeds].
        seed_children: maximum number of proposals at a seed.
        max_frontier: maximum number of expanded nodes per tree and depth; see `frontier_width`.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        num_ssms: int,
        max_depths: Sequence[int],
        nodes: Sequence[int],
        end_tokens: Sequence[Sequence[int]],
        seeds: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
        seed_children: int,
        max_frontier: int,
    ):
        count, most = len(nodes), max(nodes)
        starts = [*accumulate(map(len, end_tokens), initial=0)]
        slots, values = [0] * count, [1] * count  # numbers of them; the root has a value
        ints, addresses = _packed(max_depths, nodes, [*chain(*end_tokens)], starts, slots, values)
        floats = np.zeros((1 + most, count), dtype=np.float32)  # least value, and best values [num_trees, most]
        floats[1:].reshape(count, most)[:, 0] = 1.0
        self._library, self._num_ssms, self._width = library, num_ssms, seeds[0].shape[1]
        self._max_frontier = max_frontier
        self._held = ints, floats, seeds
        self._growth = _STRUCTS["Growth"](
            num_ssms=num_ssms,
            most_nodes=most,
            max_depths=addresses[0],
            nodes=addresses[1],
            end_tokens=addresses[2],
            end_starts=addresses[3],
            num_slots=addresses[4],
            num_values=addresses[5],
            least=(least := address_of(floats, np.float32)),
            best=least + 4 * count,
            seed_width=self._width,
            seed_children=address_of(seeds[0]),
            seed_tokens=address_of(seeds[1]),
            seed_probs=address_of(seeds[2], np.float32),
            seed_ratios=address_of(seeds[3], np.float32),
            max_seeds=seed_children,
        )
        self._frontier: Frontier | None = None
        self._weights: np.ndarray | None = None

    def extend(
        self,
        frontier: Frontier,
        size: int,
        depth: int,
        ssm_probs: Sequence[tuple[int, np.ndarray, np.ndarray, np.ndarray | None]],
        weights: np.ndarray,
        branching: np.ndarray,
        children: int,
    ) -> tuple[Level, Frontier, np.ndarray]:
        """Grow one level from the SSMs' probabilities.

        Args:
            frontier: the scored nodes.
            size, depth: number of nodes of all trees so far, and number of levels.
            ssm_probs: for each SSM that drafted, its index, the scored rows (int64, ascending) and their probabilities
                (float32 [len(rows), width]), and the columns' tokens (int64 [width], ascending; None = 0, 1, ...).
            weights: mixture weights, float32 [num_trees, num_ssms].
            branching: int64 [num_trees], number of children per node; 0 to select by value.
            children: maximum number of proposals of one SSM per node.

        Returns:
            The new level, the next frontier, and bool [num_rows]: rows where an SSM's probabilities are not finite.
        """
        rows, g = len(frontier.nodes), self._growth
        structs = (_STRUCTS["SsmProbs"] * len(ssm_probs))(
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
        g.num_scored, g.ssm_probs = len(ssm_probs), ctypes.addressof(structs)
        if weights is not self._weights:
            self._weights, g.weights = weights, address_of(weights, np.float32)
        g.depth, g.size, g.children, g.branching = depth, size, children, address_of(branching)
        g.next_width = frontier_width(depth + 1, self._max_frontier)
        room = rows * (len(ssm_probs) * children + self._width)
        if frontier is not self._frontier:  # otherwise the last call has set its addresses
            columns = frontier.nodes, frontier.tokens, frontier.owners, frontier.seeds, frontier.above
            g.row_nodes, g.row_tokens, g.row_owners, g.row_seeds, g.row_above = map(address_of, columns)
            g.row_values = address_of(frontier.values, np.float32)
        level, expanded, broken = self._begin(rows, room, room)
        count = self._library.treespec_grow(ctypes.byref(g))
        # Set the next frontier as input of the next call.
        g.row_nodes, g.row_tokens, g.row_owners = g.next_nodes, g.next_tokens, g.next_owners
        g.row_seeds, g.row_above, g.row_values = g.next_seeds, g.next_above, g.next_values
        self._frontier = expanded.select(slice(g.num_next))
        return level.select(slice(count)), self._frontier, broken[:rows]

    def draft(
        self,
        frontier: Frontier,
        passes: "CallPasses",
        weights: np.ndarray,
        branching: Sequence[Sequence[int]],
        children: int,
        room: tuple[int, int],
        rule: LevelRule,
        adaptive: Sequence[bool],
    ) -> GrownLevels:
        """Run the SSMs' passes and grow all levels. Call it once, instead of `extend`.

        Args:
            frontier: the roots of the trees that grow.
            passes: the SSMs' passes over these trees.
            weights: as in `extend`.
            branching: by level and tree, number of children per node; 0 to select by value.
            children: maximum number of proposals of one SSM per node that are selected by value.
            room: maximum number of nodes, and of nodes to expand, without the roots and with them.
            rule: ends adaptive trees early.
            adaptive: by tree; empty if no tree is adaptive.
        """
        g, places, levels = self._growth, passes.places, len(branching)
        level, expanded, broken = self._begin(len(frontier.nodes), *room)
        ints, addresses = _packed(
            *(column.tolist() for column in frontier[:5]),
            passes.tokens,
            passes.first_token,
            [*chain(*passes.active)],
            [*chain(*passes.valid)],
            [*chain(*passes.first_rotations)],
            [frontier_width(depth, self._max_frontier) for depth in range(1, levels + 1)],
            [*chain(*branching)],
            adaptive,
            [0] * (2 * levels),
        )
        g.row_nodes, g.row_tokens, g.row_owners, g.row_seeds, g.row_above = addresses[:5]
        g.row_values, g.weights = address_of(frontier.values, np.float32), address_of(weights, np.float32)
        g.size = len(branching[0])
        grown = _STRUCTS["Levels"](
            g.size, children, passes.reads, *addresses[5:12], 0, addresses[13], addresses[13] + 8 * levels
        )
        if passes.sampling is not None:
            temperatures = (ctypes.c_double * g.size)(*passes.sampling.temperatures)
            keys = _packed(*passes.sampling[1:])
            sampling = _STRUCTS["Sampling"](ctypes.addressof(temperatures), *keys[1])
            grown.sampling = ctypes.addressof(sampling)
        drafts, rows = passes.models.drafts, passes.num_unread + room[1]
        scores = [np.empty((rows, draft.width), dtype=np.float32) for draft in drafts]
        for draft, probs, (features, block) in zip(drafts, scores, passes.inputs, strict=True):
            draft.out = address_of(probs, np.float32)
            draft.features = None if features is None else features.data_ptr()
            draft.block_probs = None if block is None else address_of(block, np.float32)
            draft.block_depths = 0 if block is None else block.shape[1]
        numbers = rule.calibration, rule.level_cost, rule.marginal_cost, rule.least_value
        weights_of_trees = (ctypes.c_double * len(adaptive))(*rule.token_weights[: len(adaptive)])
        stop = _STRUCTS["Rule"](*numbers, addresses[12], ctypes.addressof(weights_of_trees))
        placed = self._library.treespec_draft(
            ctypes.byref(g),
            ctypes.byref(places.placing),
            drafts,
            len(drafts),
            ctypes.byref(grown),
            ctypes.byref(stop) if adaptive else None,
        )
        assert placed, NO_PAGE
        level_rows, level_nodes = (ints[-first:][: grown.num_levels] for first in (2 * levels, levels))
        below = sum(level_rows) - level_rows[0]
        return GrownLevels(
            level.select(slice(sum(level_nodes))),
            level_nodes,
            level_rows,
            np.concatenate([frontier.nodes, expanded.nodes[:below]]),
            np.concatenate([frontier.owners, expanded.owners[:below]]),
            broken[: sum(level_rows)],
            [probs[: draft.num_rows] for probs, draft in zip(scores, drafts, strict=True)],
        )

    def _begin(self, rows: int, nodes: int, expanded: int) -> tuple[Level, Frontier, np.ndarray]:
        """Set the frontier's number of rows, and allocate outputs: new nodes, nodes to expand, and broken rows."""
        g, ssms = self._growth, self._num_ssms
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
        level = Level(*ints[: 4 * nodes].reshape(4, nodes), probs, values, *by_ssm)
        frontier = Frontier(*ints[4 * nodes :].reshape(5, expanded), floats[:expanded])
        return level, frontier, flags[nodes * ssms :]


class TreePlaces:
    """KV slots of a batch's tree nodes in the SSMs' caches. The root has slot 0, each node the next slot of its tree.

    Args:
        library: from `growth_library`.
        context_lens: number of committed positions of each tree's request.
        pages: pages of each tree's request.
    """

    def __init__(self, library: ctypes.CDLL, context_lens: Sequence[int], pages: Sequence[np.ndarray]):
        count = len(context_lens)
        self._library = library
        self._pages = pages[0] if count == 1 else np.concatenate(pages)
        self._paths: Tensor | None = None  # of the newest level
        # Per tree: context length, number of slots in use, and a row minus its slot.
        first_page = [*accumulate(map(len, pages), initial=0)]
        self._held, addresses = _packed(context_lens, [1] * count, [0] * count, first_page)
        self.placing = _STRUCTS["Placing"](
            page_size=PAGE_SIZE,
            context=addresses[0],
            num_slots=addresses[1],
            row_of_slot=addresses[2],
            first_page=addresses[3],
            pages=address_of(self._pages),
        )

    def extend(self, owners: np.ndarray, above: np.ndarray, depth: int) -> CompiledPlan:
        """Assign slots to the nodes of a level, and plan a pass over them.

        Args:
            owners, above: int64 [num_rows], each node's tree, and its parent's slot in it, grouped by tree.
            depth: depth of the level.
        """
        count, p = len(owners), self.placing
        p.num_rows, p.depth, p.owners, p.above = count, depth, address_of(owners), address_of(above)
        results = torch.empty(count * (depth + 7), dtype=torch.int64, device="cpu")
        address, step = results.data_ptr(), 8 * count
        p.slots, p.positions = address, address + step
        p.rows, p.paths = address + 2 * step, address + 6 * step
        placed = self._library.treespec_place(ctypes.byref(p))
        assert placed, NO_PAGE
        self._paths = results[6 * count :]
        p.paths_above = p.paths
        return CompiledPlan(
            count,
            results[:count],
            results[2 * count : 6 * count].view(4, count),
            torch.from_numpy(self._pages),
            self._paths,
            results[count : 2 * count],
        )


class DraftModels:
    """SSMs and draft heads whose passes run in the call that grows trees.

    Args:
        library: from `growth_library`.
        ssms: their indices, ascending.
        entries: `PassEntries` of each SSM.
        rotations: for each SSM, as in `CompiledModel.forward`.
        pools: each SSM's part of the cache.
        tokens: tokens of the columns of each SSM's probabilities, int64 [width], ascending; or their number, if they
            are 0, 1, ...

    Attributes:
        num_positions: number of positions that the rotations cover.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        ssms: Sequence[int],
        entries: Sequence[PassEntries],
        rotations: Sequence[Tensor],
        pools: Sequence[Tensor],
        tokens: Sequence[np.ndarray | int],
    ):
        assert all(tensor.is_contiguous() for tensor in (*rotations, *pools))
        self.library, self._held = library, (rotations, pools, tokens)
        self.num_positions = min((len(rotation) for rotation in rotations if rotation.numel()), default=sys.maxsize)
        self.drafts = (_STRUCTS["Draft"] * len(ssms))(
            *(
                _STRUCTS["Draft"](
                    *entry[:4],
                    rotation.data_ptr(),
                    pool.data_ptr(),
                    len(pool),
                    pool.shape[2],
                    *entry[4:7],
                    ssm,
                    vocabulary if isinstance(vocabulary, int) else len(vocabulary),
                    None if isinstance(vocabulary, int) else address_of(vocabulary),
                    *entry[7:],
                )
                for ssm, entry, rotation, pool, vocabulary in zip(ssms, entries, rotations, pools, tokens, strict=True)
            )
        )


class CallPasses(NamedTuple):
    """The SSMs' passes over a batch of trees.

    Attributes:
        models: the SSMs that draft for any tree.
        places: slots of the trees; only these passes may assign slots in it.
        active: by SSM and tree, whether the SSM drafts for the tree.
        valid: by SSM and tree, number of leading positions with K/V, at most the root's.
        first_rotations: by SSM and tree, row of the SSM's rotations for position 0.
        tokens: each tree's last committed tokens, from the first one that an SSM has not read to the root.
        first_token: start of each tree's part of `tokens`, and their number.
        reads: whether to return the probabilities after the committed tokens that are read.
        inputs: by SSM.
        sampling: how the targets choose; None if all of them choose the most likely token.
    """

    models: DraftModels
    places: TreePlaces
    active: Sequence[Sequence[bool]]
    valid: Sequence[Sequence[int]]
    first_rotations: Sequence[Sequence[int]]
    tokens: Sequence[int]
    first_token: Sequence[int]
    reads: bool
    inputs: Sequence[DraftInputs]
    sampling: DraftSampling | None

    @property
    def num_unread(self) -> int:
        """Maximum number of committed tokens that an SSM reads and after which probabilities are returned."""
        return len(self.tokens) - len(self.first_token) + 1 if self.reads else 0
