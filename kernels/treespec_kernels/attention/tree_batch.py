"""The rows of a CPU pass, and which slots each row attends to."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

PAGE_SIZE = 64
"""Slots per page of the KV cache, and positions per tile of attention, so that a page is read as a view."""


@dataclass(frozen=True, eq=False)
class RequestRows:
    """The rows of one request in a pass.

    The request's `context_len` committed positions are logical slots 0 .. context_len - 1; node i of its token tree is
    logical slot context_len + i. Logical slot j is offset `j % PAGE_SIZE` of page `pages[j // PAGE_SIZE]`.

    Args:
        context_len: committed positions L. A row at depth d has position L + d.
        nodes: int64 [num_rows], the tree index of each row; its K/V go to logical slot context_len + node.
        depths: int64 [num_rows], depth of each row below the root.
        visible: bool [num_rows, num_slots], which tree slots a row attends to, itself included. None for a chain: row i
            is node i and sees nodes 0 .. i (a prefill chunk, a plain decoding step).
        slot_depths: int64 [num_slots], the depth of the node in each tree slot. None for a chain.
        pages: int64 [num_pages], the request's pages in logical order.
    """

    context_len: int
    nodes: np.ndarray
    depths: np.ndarray
    visible: np.ndarray | None
    slot_depths: np.ndarray | None
    pages: np.ndarray

    @classmethod
    def chain(cls, context_len: int, num_rows: int, pages: np.ndarray) -> "RequestRows":
        """Consecutive tokens from position `context_len` on."""
        order = np.arange(num_rows)
        return cls(context_len, order, order, None, None, pages)

    @property
    def num_rows(self) -> int:
        return len(self.nodes)

    @property
    def num_slots(self) -> int:
        """Tree slots of this pass."""
        return self.num_rows if self.visible is None else self.visible.shape[1]

    @property
    def is_chain(self) -> bool:
        return self.visible is None

    @cached_property
    def positions(self) -> np.ndarray:
        """int64 [num_rows], absolute positions."""
        return self.context_len + self.depths

    @cached_property
    def slots(self) -> tuple[np.ndarray, np.ndarray]:
        """(page, offset) of each row's own K/V, int64 [num_rows] each."""
        logical = self.context_len + self.nodes
        return self.pages[logical // PAGE_SIZE], logical % PAGE_SIZE

    @cached_property
    def ancestors(self) -> np.ndarray:
        """int64 [num_rows, max depth + 1]: the tree slot of each row's ancestor at each depth, padded with its own."""
        width = int(self.depths.max()) + 1 if self.num_rows else 1
        table = np.repeat(self.nodes[:, None], width, axis=1)
        if self.visible is None:
            return np.minimum(table, np.arange(width)[None, :])
        rows, columns = np.nonzero(
            self.visible
        )  # a parent's index is smaller than its child's: columns ascend in depth
        assert self.slot_depths is not None
        table[rows, self.slot_depths[columns]] = columns
        return table

    def hidden_mask(self, num_columns: int, first_column: int) -> np.ndarray:
        """bool [num_rows, num_columns]: True where a row must not see logical slot `first_column` + column."""
        hidden = np.ones((self.num_rows, num_columns), dtype=bool)
        committed = self.context_len - first_column
        hidden[:, : max(committed, 0)] = False
        start, width = max(committed, 0), self.num_slots
        if self.visible is None:
            hidden[:, start : start + width] = np.arange(width)[None, :] > self.nodes[:, None]
        else:
            hidden[:, start : start + width] = ~self.visible
        return hidden
