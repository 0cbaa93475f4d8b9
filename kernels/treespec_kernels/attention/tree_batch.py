"""Rows of a CPU pass, and the slots each row attends to."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from treespec_kernels.recurrent.request_state import StateRows

PAGE_SIZE = 64
"""Slots per page of the KV cache. Attention tiles have the same size, so that a page is read as a view."""


@dataclass(frozen=True, eq=False)
class RequestRows:
    """Rows of one request in a pass.

    The request's `context_len` committed positions have logical slots 0 .. context_len - 1; node i of its token tree
    has logical slot context_len + i. Logical slot j is offset `j % PAGE_SIZE` of page `pages[j // PAGE_SIZE]`.
    """

    context_len: int  # number of committed positions L. A row at depth d has position L + d
    nodes: np.ndarray  # int64 [num_rows], tree index of each row; its K/V go to logical slot context_len + node
    depths: np.ndarray  # int64 [num_rows], depth of each row below the root
    # bool [num_rows, num_slots], the tree slots that a row attends to, its own included: a node's path, or all slots of
    # a block. None for a chain: row i is node i and attends to nodes 0 .. i (a prefill chunk, a plain decoding step)
    visible: np.ndarray | None
    slot_depths: np.ndarray | None  # int64 [num_slots], depth of the node in each tree slot. None for a chain
    pages: np.ndarray  # int64 [num_pages], the request's pages in logical order
    # Maximum number of positions of the request; its rotations may depend on it
    max_len: int = sys.maxsize
    adapter: Any = None  # low-rank updates for the rows' products, from `Decoder.updates`, or None
    state: StateRows | None = None  # state of recurrent layers, updated by the pass; None without such layers

    @classmethod
    def chain(
        cls,
        context_len: int,
        num_rows: int,
        pages: np.ndarray,
        max_len: int = sys.maxsize,
        adapter: Any = None,
        state: StateRows | None = None,
    ) -> "RequestRows":
        """Create the rows of consecutive tokens from position `context_len` on."""
        order = np.arange(num_rows)
        return cls(context_len, order, order, None, None, pages, max_len, adapter, state)

    @classmethod
    def tree(
        cls,
        context_len: int,
        parents: np.ndarray,
        pages: np.ndarray,
        max_len: int = sys.maxsize,
        state: StateRows | None = None,
    ) -> "RequestRows":
        """Create the rows of a whole tree with the root at position `context_len`. Parents precede their children."""
        nodes = np.arange(len(parents))
        depths, visible = np.zeros_like(nodes), np.eye(len(nodes), dtype=bool)
        for node in nodes[1:]:
            depths[node] = depths[parents[node]] + 1
            visible[node] |= visible[parents[node]]
        return cls(context_len, nodes, depths, visible, depths, pages, max_len, state=state)

    @property
    def num_rows(self) -> int:
        return len(self.nodes)

    @property
    def num_slots(self) -> int:
        """Number of tree slots in this pass."""
        return self.num_rows if self.visible is None else self.visible.shape[1]

    @property
    def is_chain(self) -> bool:
        return self.visible is None

    @cached_property
    def positions(self) -> np.ndarray:
        """Absolute positions of the rows, int64 [num_rows]."""
        return self.context_len + self.depths

    @cached_property
    def slots(self) -> tuple[np.ndarray, np.ndarray]:
        """Page and offset of each row's own K/V, int64 [num_rows] each."""
        logical = self.context_len + self.nodes
        return self.pages[logical // PAGE_SIZE], logical % PAGE_SIZE

    @cached_property
    def path_lengths(self) -> np.ndarray:
        """Number of tree slots each row attends to, int64 [num_rows]: in a tree, its depth + 1."""
        return self.nodes + 1 if self.visible is None else self.visible.sum(1)

    @property
    def num_earlier(self) -> int:
        """Number of tree slots before those of the rows, which earlier passes computed."""
        return int(self.nodes[0]) if self.num_rows else 0

    @cached_property
    def parents(self) -> np.ndarray:
        """Tree slot of each tree slot's parent, int64 [num_slots]; -1 for the root, and for slots that no row reads."""
        if self.visible is None:
            return self.nodes - 1
        parents, path = np.full(self.num_slots, -1), self.ancestors
        below = np.arange(1, path.shape[1]) <= self.depths[:, None]
        parents[path[:, 1:][below]] = path[:, :-1][below]
        return parents

    @cached_property
    def ancestors(self) -> np.ndarray:
        """Tree slots of each row's ancestors by depth, padded with its own, int64 [num_rows, max depth + 1]."""
        width = int(self.depths.max()) + 1 if self.num_rows else 1
        table = np.repeat(self.nodes[:, None], width, axis=1)
        if self.visible is None:
            return np.minimum(table, np.arange(width)[None, :])
        # A parent's index is smaller than its child's, so columns ascend in depth.
        rows, columns = np.nonzero(self.visible)
        assert self.slot_depths is not None
        table[rows, self.slot_depths[columns]] = columns
        return table

    def hidden_mask(self, num_columns: int, first_column: int) -> np.ndarray:
        """Return a mask of the logical slots from `first_column` on that a row must not attend to.

        It is bool [num_rows, num_columns], True for hidden slots.
        """
        hidden = np.ones((self.num_rows, num_columns), dtype=bool)
        committed = self.context_len - first_column
        hidden[:, : max(committed, 0)] = False
        start, width = max(committed, 0), self.num_slots
        if self.visible is None:
            hidden[:, start : start + width] = np.arange(width)[None, :] > self.nodes[:, None]
        else:
            hidden[:, start : start + width] = ~self.visible
        return hidden


class UpdatedRows(NamedTuple):
    """Consecutive rows of a pass that use an adapter's low-rank updates."""

    adapter: Any
    first: int
    num_rows: int


def updated_rows(requests: Iterable[tuple[Any, int]]) -> list[UpdatedRows]:
    """Return the rows of each adapter, given each request's adapter (or None) and number of rows."""
    updated: list[UpdatedRows] = []
    first = 0
    for adapter, num_rows in requests:
        last = updated[-1] if updated else None
        if last is not None and adapter is last.adapter and first == last.first + last.num_rows:
            updated[-1] = last._replace(num_rows=last.num_rows + num_rows)
        elif adapter is not None:
            updated.append(UpdatedRows(adapter, first, num_rows))
        first += num_rows
    return updated
