"""Growing token trees by a level in a call or two of C++: merge of what SSMs and other sources say, choice of the
frontier, and the slots of its nodes.

The source is `growth_cpu.cpp`, its specification `Forest.extend` in treespec/drafters/forest.py. What such calls cost
is Python's part: an array's address alone takes a microsecond. So a level's results lie side by side in three arrays.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from treespec_kernels.cpu_library import compile_library
from treespec_kernels.decoder_cpu import CompiledPlan
from treespec_kernels.tree_batch import PAGE_SIZE
from treespec_kernels.tree_levels import Frontier, Level

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("growth_cpu.cpp", "vectors_cpu.h"))


class _Law(ctypes.Structure):
    _fields_ = (
        ("probs", ctypes.c_void_p), ("rows", ctypes.c_void_p), ("count", ctypes.c_int64), ("ssm", ctypes.c_int64)
    )  # fmt: skip


_LIMITS = ("num_ssms", "vocab", "max_frontier", "max_slots", "most_nodes")
_TREES = ("max_depths", "nodes", "branching", "end_tokens", "end_starts", "num_slots", "num_values", "least", "best")
_SEEDS = ("seed_children", "seed_tokens", "seed_probs")
_ROW = ("row_nodes", "row_owners", "row_seeds", "row_values")
_NEXT = ("next_nodes", "next_tokens", "next_owners", "next_seeds", "next_above", "next_values")
_LEVEL = ("tokens", "parents", "owners", "seeds", "probs", "values", "draft_probs", "proposed", "broken")


def _numbers(*names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, ctypes.c_int64) for name in names)


def _pointers(*names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, ctypes.c_void_p) for name in names)


class _Growth(ctypes.Structure):
    _fields_ = (
        *_numbers(*_LIMITS), *_pointers(*_TREES), *_numbers("seed_width"), *_pointers(*_SEEDS),
        *_numbers("depth", "size", "children", "num_laws"), ("laws", ctypes.POINTER(_Law)), *_pointers("weights"),
        *_numbers("num_rows"), *_pointers(*_ROW), *_pointers(*_LEVEL),
        *_numbers("num_next"), *_pointers(*_NEXT),
    )  # fmt: skip


class _Placing(ctypes.Structure):
    _fields_ = (
        *_numbers("num_rows", "depth", "page_size"),
        *_pointers("owners", "above", "context", "first_page", "pages", "taken", "first", "row_of_slot"),
        *_pointers("paths_above", "paths", "slots", "rows", "positions"),
    )


@functools.cache
def growth_library(compiler: tuple[str, ...], folder: Path) -> ctypes.CDLL:
    """The library, as `compile_library`."""
    library = compile_library(compiler, _SOURCES, (), folder)
    library.treespec_grow.argtypes = library.treespec_place.argtypes = (ctypes.c_void_p,)
    library.treespec_grow.restype = library.treespec_place.restype = ctypes.c_int64
    return library


def _address(array: np.ndarray, dtype: type = np.int64) -> int:
    assert array.flags.c_contiguous and array.dtype == dtype, (array.dtype, array.shape)
    return array.__array_interface__["data"][0]


class TreeGrowth:
    """What the library knows of some trees between two levels.

    Args:
        library: from `growth_library`.
        num_ssms: that may score.
        max_depths, nodes: int64 [num_trees]: levels of each tree; only what can be among so many nodes is kept.
        end_tokens: by tree: below them nothing is expanded.
        seeds: children int64 [num nodes + 1, width], tokens int64 and probs float64 [num nodes], of other sources.
        max_frontier, max_slots: nodes of one tree that are expanded, at one depth and in all.
    """

    def __init__(
        self, library: ctypes.CDLL, num_ssms: int, max_depths: np.ndarray, nodes: np.ndarray,
        end_tokens: Sequence[Sequence[int]], seeds: tuple[np.ndarray, np.ndarray, np.ndarray],
        max_frontier: int, max_slots: int,
    ):  # fmt: skip
        count, most = len(nodes), int(nodes.max())
        ends = np.array([token for tokens in end_tokens for token in tokens], dtype=np.int64)
        starts = np.cumsum([0, *(len(tokens) for tokens in end_tokens)])
        state = np.zeros((2, count), dtype=np.int64)  # slots, values
        state[1] = 1  # the root's
        floats = np.zeros((1 + most, count))  # the least value, and [num_trees, most] best ones
        floats[1:].reshape(count, most)[:, 0] = 1.0
        self._library, self._num_ssms, self._width = library, num_ssms, seeds[0].shape[1]
        self._held = (max_depths, nodes, ends, starts, state, floats, seeds)
        self._growth = _Growth(
            num_ssms=num_ssms, max_frontier=max_frontier, max_slots=max_slots, most_nodes=most,
            max_depths=_address(max_depths), nodes=_address(nodes), end_tokens=_address(ends),
            end_starts=_address(starts), num_slots=_address(state), num_values=_address(state) + 8 * count,
            least=_address(floats, np.float64), best=_address(floats, np.float64) + 8 * count, seed_width=self._width,
            seed_children=_address(seeds[0]), seed_tokens=_address(seeds[1]), seed_probs=_address(seeds[2], np.float64),
        )  # fmt: skip
        self._largest_token = int(seeds[1].max())
        self._frontier: Frontier | None = None
        self._weights: np.ndarray | None = None

    def extend(
        self, frontier: Frontier, size: int, depth: int, laws: Sequence[tuple[int, np.ndarray, np.ndarray]],
        weights: np.ndarray, branching: np.ndarray, children: int,
    ) -> tuple[Level, Frontier, np.ndarray]:  # fmt: skip
        """One level; which of its nodes are expanded next; and bool [num_rows], where an SSM's law is not finite.

        Args:
            frontier: what was scored.
            size, depth: nodes of all trees so far, and levels.
            laws: SSM, rows (int64, ascending) and probabilities (float32 [len(rows), vocab]) of each that scored.
            weights: float64 [num_trees, num_ssms].
            branching: int64 [num_trees], children of a node, 0 where values decide.
            children: most proposals of one SSM.
        """
        rows, ssms, vocab = len(frontier.nodes), self._num_ssms, laws[0][2].shape[1]
        room = rows * (len(laws) * min(children, vocab) + self._width)
        ints, floats = np.empty((9, room), dtype=np.int64), np.empty((3 + ssms, room))
        flags = np.zeros(room * ssms + rows, dtype=bool)
        assert self._largest_token < vocab and all(probs.shape == (len(own), vocab) for _, own, probs in laws)
        own = (_Law * len(laws))(
            *((_address(p, np.float32), None if len(r) == rows else _address(r), len(r), ssm) for ssm, r, p in laws)
        )
        g, step = self._growth, 8 * room
        g.vocab, g.depth, g.size, g.children, g.num_laws, g.laws = vocab, depth, size, children, len(laws), own
        g.branching = _address(branching)
        if weights is not self._weights:
            self._weights, g.weights = weights, _address(weights, np.float64)
        if frontier is not self._frontier:  # else it lies where the last level put it
            g.row_nodes, g.row_owners, g.row_seeds = map(_address, (frontier.nodes, frontier.owners, frontier.seeds))
            g.row_values = _address(frontier.values, np.float64)
        g.num_rows = rows
        at, other = _address(ints), _address(floats, np.float64)
        g.tokens, g.parents, g.owners, g.seeds = (at + i * step for i in range(4))
        g.probs, g.values, g.draft_probs = other, other + step, other + 3 * step
        following = (*(at + i * step for i in range(4, 9)), other + 2 * step)
        g.proposed = _address(flags, np.bool_)
        g.broken = g.proposed + room * ssms
        g.next_nodes, g.next_tokens, g.next_owners, g.next_seeds, g.next_above, g.next_values = following
        n = self._library.treespec_grow(ctypes.byref(g))
        g.row_nodes, _, g.row_owners, g.row_seeds, _, g.row_values = following
        self._frontier = Frontier(*ints[4:, : g.num_next], floats[2, : g.num_next])
        self._results = (ints, floats)  # what `_frontier` points to
        draft_probs = floats[3:].reshape(-1)[: n * ssms].reshape(n, ssms)
        level = Level(*ints[:4, :n], *floats[:2, :n], flags[: n * ssms].reshape(n, ssms), draft_probs)
        return level, self._frontier, flags[room * ssms :]


class TreePlaces:
    """Where the nodes of some trees lie in the SSMs' pools; each takes the next slot of its tree, the root slot 0.

    Args:
        library: from `growth_library`.
        context_lens: committed positions, by tree.
        pages: of their requests, by tree.
    """

    def __init__(self, library: ctypes.CDLL, context_lens: Sequence[int], pages: Sequence[np.ndarray]):
        count = len(context_lens)
        self._library = library
        self._table = torch.from_numpy(np.concatenate(pages))
        # By tree: context, slots taken, the level's first slot, and a row minus its slot.
        state = self._state = np.zeros((4, count), dtype=np.int64)
        state[0], state[1], state[3] = context_lens, 1, np.arange(count)
        first_page = self._first_page = np.cumsum([0, *(len(own) for own in pages)])
        page, offset = np.divmod(state[0], PAGE_SIZE)
        self.paths = torch.from_numpy(self._table.numpy()[first_page[:-1] + page] * PAGE_SIZE + offset)
        at, step = _address(state), 8 * count
        self._placing = _Placing(
            page_size=PAGE_SIZE, context=at, taken=at + step, first=at + 2 * step, row_of_slot=at + 3 * step,
            first_page=_address(first_page), pages=self._table.data_ptr(),
        )  # fmt: skip

    def first_slot(self, tree: int) -> int:
        """Of a tree's nodes in the newest level."""
        return int(self._state[2, tree])

    def extend(self, owners: np.ndarray, above: np.ndarray, depth: int) -> CompiledPlan:
        """Give the nodes of a level their slots, and lay out a pass over them.

        Args:
            owners, above: int64 [num_rows], the tree, and the slot of the parent in it; those of a tree side by side.
            depth: of the level.
        """
        count, p = len(owners), self._placing
        results = torch.empty(count * (depth + 7), dtype=torch.int64)
        at, step = results.data_ptr(), 8 * count
        p.num_rows, p.depth, p.owners, p.above = count, depth, _address(owners), _address(above)
        p.paths_above, p.slots, p.positions, p.rows, p.paths = (
            self.paths.data_ptr(), at, at + step, at + 2 * step, at + 6 * step
        )  # fmt: skip
        placed = self._library.treespec_place(ctypes.byref(p))
        assert placed, "a tree has no page for its nodes"
        self.paths = results[6 * count :]
        return CompiledPlan(
            count, results[:count], results[2 * count : 6 * count].view(4, count), self._table, self.paths,
            results[count : 2 * count],
        )  # fmt: skip
