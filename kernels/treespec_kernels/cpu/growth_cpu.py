"""Grows token trees by one level in one call of C++.

The call assigns slots to the frontier, runs the SSMs' passes over it, merges their proposals with those of other
sources, and selects the next frontier. The source is `growth_cpu.cpp`, and the reference
treespec_kernels/tree/tree_merge.py. Python's overhead dominates a call (the address of an array alone takes 1 us), so
all data of a level is in three arrays.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec_kernels.attention.tree_batch import PAGE_SIZE
from treespec_kernels.cpu.compiled_plan import CompiledPlan
from treespec_kernels.cpu.cpu_library import address_of, compile_library, numbers, pointers
from treespec_kernels.cpu.decoder_cpu import PassEntries
from treespec_kernels.tree.growth_limits import frontier_width
from treespec_kernels.tree.tree_levels import Frontier, Level

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("growth_cpu.cpp", "vectors_cpu.h", "batch_cpu.h"))


class _SsmProbs(ctypes.Structure):
    _fields_ = (*pointers("probs", "rows", "tokens"), *numbers("count", "ssm", "width"))


NO_PAGE = "a tree has no page for its nodes"
_LIMITS = ("num_ssms", "most_nodes")
_TREES = ("max_depths", "nodes", "branching", "end_tokens", "end_starts", "num_slots", "num_values", "least", "best")
_SEEDS = ("seed_children", "seed_tokens", "seed_probs", "seed_ratios")
_ROW = ("row_nodes", "row_tokens", "row_owners", "row_seeds", "row_above", "row_values")
_NEXT = ("next_nodes", "next_tokens", "next_owners", "next_seeds", "next_above", "next_values")
_LEVEL = ("tokens", "parents", "owners", "seeds", "probs", "values", "draft_probs", "proposed", "broken")


class _Growth(ctypes.Structure):
    _fields_ = (
        *numbers(*_LIMITS),
        *pointers(*_TREES),
        *numbers("seed_width"),
        *pointers(*_SEEDS),
        *numbers("depth", "size", "children", "max_seeds", "next_width", "num_scored"),
        ("ssm_probs", ctypes.POINTER(_SsmProbs)),
        *pointers("weights"),
        *numbers("num_rows"),
        *pointers(*_ROW),
        *pointers(*_LEVEL),
        *numbers("num_next"),
        *pointers(*_NEXT),
    )


class _Placing(ctypes.Structure):
    _fields_ = (
        *numbers("num_rows", "depth", "page_size"),
        *pointers("owners", "above", "context", "first_page", "pages", "num_slots", "first", "row_of_slot"),
        *pointers("paths_above", "paths", "slots", "rows", "positions"),
    )


class _Draft(ctypes.Structure):
    _fields_ = (
        *pointers("forward", "probs", "model", "head", "rotation", "cache"),
        *numbers("num_layers", "num_pages", "num_places", "hidden_bytes", "threads", "ssm", "width"),
        *pointers("tokens", "active", "out"),
        *numbers("num_rows"),
    )


@functools.cache
def growth_library(compiler: tuple[str, ...], folder: Path) -> ctypes.CDLL:
    """Load or compile the library; arguments and errors as in `compile_library`."""
    library = compile_library(compiler, _SOURCES, (), folder)
    library.treespec_grow.argtypes = library.treespec_place.argtypes = (ctypes.c_void_p,)
    library.treespec_draft.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    for entry in (library.treespec_grow, library.treespec_place, library.treespec_draft):
        entry.restype = ctypes.c_int64
    return library


class Grown(NamedTuple):
    """A new level, the next frontier, and bool [num_rows]: rows where an SSM's probabilities are not finite."""

    level: Level
    frontier: Frontier
    broken: np.ndarray


class _Results(NamedTuple):
    """Outputs of a call: int64 [9, capacity], float32 [3 + num_ssms, capacity], and bools of nodes and rows."""

    ints: np.ndarray
    floats: np.ndarray
    flags: np.ndarray


class TreeGrowth:
    """State of a batch of growing trees in the library.

    Args:
        library: from `growth_library`.
        num_ssms: number of SSMs.
        max_depths, nodes: int64 [num_trees], maximum number of levels and of nodes of each tree; candidates that cannot
            be among the best `nodes` are dropped.
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
        max_depths: np.ndarray,
        nodes: np.ndarray,
        end_tokens: Sequence[Sequence[int]],
        seeds: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
        seed_children: int,
        max_frontier: int,
    ):
        count, most = len(nodes), int(nodes.max())
        ends = np.array([token for tokens in end_tokens for token in tokens], dtype=np.int64)
        starts = np.cumsum([0, *(len(tokens) for tokens in end_tokens)])
        state = np.zeros((2, count), dtype=np.int64)  # numbers of slots and of values
        state[1] = 1  # the root's value
        floats = np.zeros((1 + most, count), dtype=np.float32)  # least value, and best values [num_trees, most]
        floats[1:].reshape(count, most)[:, 0] = 1.0
        self._library, self._num_ssms, self._width = library, num_ssms, seeds[0].shape[1]
        self._max_frontier = max_frontier
        self._held = (max_depths, nodes, ends, starts, state, floats, seeds)
        self._growth = _Growth(
            num_ssms=num_ssms,
            most_nodes=most,
            max_depths=address_of(max_depths),
            nodes=address_of(nodes),
            end_tokens=address_of(ends),
            end_starts=address_of(starts),
            num_slots=address_of(state),
            num_values=address_of(state) + 8 * count,
            least=address_of(floats, np.float32),
            best=address_of(floats, np.float32) + 4 * count,
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
    ) -> Grown:
        """Grow one level from the SSMs' probabilities.

        Args:
            frontier: the scored nodes.
            size, depth: number of nodes of all trees so far, and number of levels.
            ssm_probs: for each SSM that drafted, its index, the scored rows (int64, ascending) and their probabilities
                (float32 [len(rows), width]), and the columns' tokens (int64 [width], ascending; None = 0, 1, ...).
            weights: mixture weights, float32 [num_trees, num_ssms].
            branching: int64 [num_trees], number of children per node; 0 to select by value.
            children: maximum number of proposals of one SSM per node.
        """
        rows, g = len(frontier.nodes), self._growth
        own = (_SsmProbs * len(ssm_probs))(
            *(
                (
                    address_of(probs, np.float32),
                    None if len(at) == rows else address_of(at),
                    None if tokens is None else address_of(tokens),
                    len(at),
                    ssm,
                    probs.shape[1],
                )
                for ssm, at, probs, tokens in ssm_probs
            )
        )
        g.num_scored, g.ssm_probs = len(ssm_probs), own
        results = self._begin(frontier, size, depth, len(ssm_probs), weights, branching, children)
        return self._grown(results, self._library.treespec_grow(ctypes.byref(g)))

    def draft(
        self,
        frontier: Frontier,
        size: int,
        depth: int,
        passes: "DraftPasses",
        weights: np.ndarray,
        branching: np.ndarray,
        children: int,
    ) -> tuple[Grown, list[np.ndarray]]:
        """Run the SSMs' passes over the frontier, and grow one level.

        Args:
            passes: the SSMs' passes over these trees.
            frontier, size, depth, weights, branching, children: as in `extend`.

        Returns:
            The level, and each SSM's probabilities: float32 [scored rows, width], in the order of the frontier.
        """
        rows, drafts = len(frontier.nodes), passes.drafts
        results = self._begin(frontier, size, depth, len(drafts), weights, branching, children)
        probs = [np.empty((rows, draft.width), dtype=np.float32) for draft in drafts]
        for draft, own in zip(drafts, probs, strict=True):
            draft.out = address_of(own, np.float32)
        places = passes.places
        placed = places.prepare(rows, depth)
        count = self._library.treespec_draft(
            ctypes.byref(self._growth), ctypes.byref(places.placing), drafts, len(drafts)
        )
        assert count >= 0, NO_PAGE
        places.paths = placed[6 * rows :]
        return self._grown(results, count), [own[: draft.num_rows] for own, draft in zip(probs, drafts, strict=True)]

    def _begin(
        self,
        frontier: Frontier,
        size: int,
        depth: int,
        num_scored: int,
        weights: np.ndarray,
        branching: np.ndarray,
        children: int,
    ) -> _Results:
        """Set all inputs except the SSMs' probabilities, and allocate the outputs."""
        g, rows, ssms = self._growth, len(frontier.nodes), self._num_ssms
        room = rows * (num_scored * children + self._width)
        ints, floats = np.empty((9, room), dtype=np.int64), np.empty((3 + ssms, room), dtype=np.float32)
        flags = np.zeros(room * ssms + rows, dtype=bool)
        g.depth, g.size, g.children, g.num_rows = depth, size, children, rows
        g.branching, g.next_width = address_of(branching), frontier_width(depth + 1, self._max_frontier)
        if weights is not self._weights:
            self._weights, g.weights = weights, address_of(weights, np.float32)
        if frontier is not self._frontier:  # otherwise `_grown` has set its addresses
            own = frontier.nodes, frontier.tokens, frontier.owners, frontier.seeds, frontier.above
            g.row_nodes, g.row_tokens, g.row_owners, g.row_seeds, g.row_above = map(address_of, own)
            g.row_values = address_of(frontier.values, np.float32)
        at, other, step = address_of(ints), address_of(floats, np.float32), 8 * room
        g.tokens, g.parents, g.owners, g.seeds = (at + i * step for i in range(4))
        g.probs, g.values, g.next_values, g.draft_probs = (other + 4 * i * room for i in range(4))
        g.next_nodes, g.next_tokens, g.next_owners, g.next_seeds, g.next_above = (at + i * step for i in range(4, 9))
        g.proposed = address_of(flags, np.bool_)
        g.broken = g.proposed + room * ssms
        return _Results(ints, floats, flags)

    def _grown(self, results: _Results, size: int) -> Grown:
        """Return the outputs of a call with `size` new nodes, and set the next frontier as input of the next call."""
        ints, floats, flags = self._results = results  # kept alive, since the library has addresses of them
        g, ssms, room = self._growth, self._num_ssms, ints.shape[1]
        g.row_nodes, g.row_tokens, g.row_owners = g.next_nodes, g.next_tokens, g.next_owners
        g.row_seeds, g.row_above, g.row_values = g.next_seeds, g.next_above, g.next_values
        self._frontier = Frontier(*ints[4:, : g.num_next], floats[2, : g.num_next])
        draft_probs = floats[3:].reshape(-1)[: size * ssms].reshape(size, ssms)
        level = Level(*ints[:4, :size], *floats[:2, :size], flags[: size * ssms].reshape(size, ssms), draft_probs)
        return Grown(level, self._frontier, flags[room * ssms :])


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
        self._table = torch.from_numpy(np.concatenate(pages))
        # Per tree: context length, number of slots in use, the level's first slot, and a row minus its slot.
        state = self._state = np.zeros((4, count), dtype=np.int64)
        state[0], state[1], state[3] = context_lens, 1, np.arange(count)
        first_page = self._first_page = np.cumsum([0, *(len(own) for own in pages)])
        page, offset = np.divmod(state[0], PAGE_SIZE)
        self.paths = torch.from_numpy(self._table.numpy()[first_page[:-1] + page] * PAGE_SIZE + offset)
        at, step = address_of(state), 8 * count
        self.placing = _Placing(
            page_size=PAGE_SIZE,
            context=at,
            num_slots=at + step,
            first=at + 2 * step,
            row_of_slot=at + 3 * step,
            first_page=address_of(first_page),
            pages=self._table.data_ptr(),
        )

    def first_slot(self, tree: int) -> int:
        """Return the first slot of a tree in the newest level."""
        return int(self._state[2, tree])

    def extend(self, owners: np.ndarray, above: np.ndarray, depth: int) -> CompiledPlan:
        """Assign slots to the nodes of a level, and plan a pass over them.

        Args:
            owners, above: int64 [num_rows], each node's tree, and its parent's slot in it, grouped by tree.
            depth: depth of the level.
        """
        count, p = len(owners), self.placing
        p.num_rows, p.depth, p.owners, p.above = count, depth, address_of(owners), address_of(above)
        results = self.prepare(count, depth)
        found = self._library.treespec_place(ctypes.byref(p))
        assert found, NO_PAGE
        self.paths = results[6 * count :]
        return CompiledPlan(
            count,
            results[:count],
            results[2 * count : 6 * count].view(4, count),
            self._table,
            self.paths,
            results[count : 2 * count],
        )

    def prepare(self, count: int, depth: int) -> Tensor:
        """Allocate the outputs of a level of `count` nodes.

        The paths, from index 6 * `count` on, are inputs of the next level.
        """
        results = torch.empty(count * (depth + 7), dtype=torch.int64, device="cpu")
        at, step, p = results.data_ptr(), 8 * count, self.placing
        p.paths_above, p.slots, p.positions, p.rows, p.paths = (
            self.paths.data_ptr(),
            at,
            at + step,
            at + 2 * step,
            at + 6 * step,
        )
        return results


class DraftPasses:
    """The SSMs' passes over a batch of trees, level by level.

    Args:
        places: slots of the trees; only these passes may assign slots in it.
        ssms: indices of the SSMs that draft for any tree, ascending.
        entries: `PassEntries` of each SSM.
        rotations: for each SSM, as in `CompiledModel.forward`, for all positions that the trees may reach.
        pools: each SSM's part of the cache.
        active: bool [num_trees, len(ssms)], whether each SSM drafts for each tree.
        tokens: tokens of the columns of each SSM's probabilities, int64 [width], ascending; or their number, if they
            are 0, 1, ...
    """

    def __init__(
        self,
        places: TreePlaces,
        ssms: Sequence[int],
        entries: Sequence[PassEntries],
        rotations: Sequence[Tensor],
        pools: Sequence[Tensor],
        active: np.ndarray,
        tokens: Sequence[np.ndarray | int],
    ):
        self.places = places
        columns = np.ascontiguousarray(active.T)
        assert all(part.is_contiguous() for part in (*rotations, *pools))
        self._held = rotations, pools, columns, tokens
        at, step = address_of(columns, np.bool_), columns.shape[1]
        self.drafts = (_Draft * len(ssms))(
            *(
                _Draft(
                    *own[:4],
                    rotation.data_ptr(),
                    pool.data_ptr(),
                    len(pool),
                    pool.shape[2],
                    *own[4:],
                    ssm,
                    known if isinstance(known, int) else len(known),
                    None if isinstance(known, int) else address_of(known),
                    at + i * step,
                )
                for i, (ssm, own, rotation, pool, known) in enumerate(
                    zip(ssms, entries, rotations, pools, tokens, strict=True)
                )
            )
        )
