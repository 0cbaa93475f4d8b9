"""Prompt lookup in one call of C++.

It finds earlier occurrences of a text's suffix, in the text and in a history of texts, and builds the tree of their
continuations. The source is `lookup_cpu.cpp`; the references are `search` in
treespec/drafters/lookup/lookup_drafter.py and `History` in treespec/drafters/lookup/history.py.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from treespec_kernels.cpu.cpu_library import address_of, compile_library, function_address, read_structs

MAX_MATCH = 12  # maximum counted match length in tokens
MATCHES, PAST_MATCHES = 6, 16  # maximum numbers of matches in the text and in the history
# Classes of candidates with separate acceptance counts. From the text: first, second, and later siblings. From the
# history, by votes of the matches: only match; unanimous; most votes, with at least two thirds or with less; second
# most votes; fewer votes.
CLASSES, TEXT_CLASSES = 9, 3
ORDERS = SHORT, LONG = 3, 6  # minimum lengths of a match in the history; the longer one is tried first
BYTES_PER_TOKEN = 64  # bytes per token of the history: eight int64 numbers
STEPS = 64  # maximum number of occurrences in the history to check, latest first

_SOURCE = Path(__file__).with_name("lookup_cpu.cpp")
_INTS = ("node_tokens", "parents", "depths", "classes_0", "classes_1", "lengths_0", "lengths_1")
_FLOATS = ("probs", "values")
_SOURCES = _SOURCE, _SOURCE.with_suffix(".h")
STRUCTS = read_structs(*_SOURCES)


@functools.cache
def lookup_library(compiler: tuple[str, ...], folder: Path) -> ctypes.CDLL:
    """Load or compile the library; arguments and errors as in `compile_library`."""
    names = "MAX_MATCH MATCHES CLASSES TEXT_CLASSES PAST_MATCHES SHORT LONG STEPS".split()
    sizes = [f"-D{name}={globals()[name]}" for name in names]
    return compile_library(compiler, _SOURCES, sizes, folder)


class Matches(NamedTuple):
    """Class of each proposed node and length of the match that it continues, in the text and in the history.

    Both are int64 [2, num_nodes], -1 for nodes that are not proposed by this source, and 0 for the root.
    """

    classes: np.ndarray
    lengths: np.ndarray


class CompiledHistory:
    """Implementation of `History` in C++.

    `capacity` is the number of tokens, a power of two. A stored token uses BYTES_PER_TOKEN bytes.
    """

    def __init__(self, library: ctypes.CDLL, capacity: int):
        self._add = library.treespec_history_add
        names = ("tokens", "owners", "before", "after")
        # Zeroed memory, whose pages the system allocates on first access.
        self._held = {name: np.zeros(capacity, dtype=np.int64) for name in names}
        self._held |= {name: np.zeros(2 * capacity, dtype=np.int64) for name in ("older", "heads")}
        addresses = {name: address_of(array) for name, array in self._held.items()}
        self._history = STRUCTS["History"](capacity=capacity, count=0, num_heads=capacity, **addresses)
        self.address = ctypes.addressof(self._history)

    def add(self, owner: int, last: int, tokens: np.ndarray) -> int:
        """Append tokens like `History.add`; `tokens` is int64 [length], contiguous."""
        return self._add(self.address, owner, last, address_of(tokens), len(tokens))

    def __len__(self) -> int:
        return min(self._history.count, self._history.capacity)


class LookupSearch:
    """Search of texts, with probabilities from the acceptance counts of earlier proposals."""

    def __init__(
        self,
        library: ctypes.CDLL,  # from `lookup_library`
        prior: np.ndarray,  # float64 [CLASSES, MAX_MATCH + 1], prior acceptance probability
        prior_trials: float,  # pseudo-counts of the prior, added to the counts of all requests
        global_trials: float,  # pseudo-counts of the rate over all requests, added to a request's own counts
        common: np.ndarray,  # float64 [2, CLASSES, MAX_MATCH + 1], proposed and accepted tokens of all requests
        history: CompiledHistory | None,  # history to search in addition to each text, or None
    ):
        assert prior.shape == common.shape[1:] == (CLASSES, MAX_MATCH + 1) and prior.dtype == common.dtype == np.float64
        self._library, self._held = library, (prior, common, history)
        self.address = function_address(library.treespec_lookup)
        self._history = None if history is None else history.address
        self._search = STRUCTS["Search"](
            prior=address_of(prior, np.float64),
            prior_trials=prior_trials,
            global_trials=global_trials,
            common=address_of(common, np.float64),
        )
        self._address = ctypes.addressof(self._search)
        self._make_room(0)

    def search(
        self,
        tokens: int,  # address of the text, int64 [length]
        length: int,  # length of the text, at least 1
        depth: int,  # maximum depth of the tree, at least 1
        counts: int | None,  # address of the counts of this text, as `common`; None for no counts
        least: float,  # minimum probability of the root's most probable child
        looks_up: bool,  # whether to search the text itself
        owner: int | None,  # request to skip in the history; None skips the whole history
    ) -> tuple[list[np.ndarray], Matches] | None:
        """Return the tree of continuations of the longest matches, in descending order of value, or None.

        Returns None if there is no match, or if no child of the root is probable enough. A tree is tokens, parents,
        depths, probs and values of the nodes, as in `TokenTree`, and their matches.
        """
        most = (MATCHES + PAST_MATCHES) * depth + 1
        if most > self._ints.shape[1]:
            self._make_room(most)
        search = self.prepared(counts, least, looks_up, owner)
        search.tokens, search.length, search.depth = tokens, length, depth
        count = self._library.treespec_lookup(self._address)
        if not count:
            return None
        ints = self._ints[:, :count].copy()
        return [*ints[:3], *self._floats[:, :count].copy()], Matches(ints[3:5], ints[5:])

    def prepared(self, counts: int | None, least: float, looks_up: bool, owner: int | None) -> Any:
        """Return the search's struct with these arguments, which are those of `search`; the next call changes it."""
        search = self._search
        search.counts, search.least, search.looks_up = counts, least, looks_up
        search.history, search.owner = (None, 0) if owner is None else (self._history, owner)
        return search

    def count(self, parents: np.ndarray, matches: Matches, path: np.ndarray, counts: np.ndarray) -> None:
        """Count the children of every node of `path` as proposed, and those on the path as accepted.

        Args:
            parents, matches: from a tree returned by `search`.
            path: accepted path, int64 [length] node indices.
            counts: counts of the request, with the shape of `common`; updated in the same way.
        """
        address, row = address_of(parents), parents.nbytes  # parents, classes and lengths share an array
        self._library.treespec_lookup_count(
            address,
            address + 2 * row,
            address + 4 * row,
            len(parents),
            address_of(path),
            len(path),
            self._search.common,
            address_of(counts, np.float64),
        )

    def _make_room(self, nodes: int) -> None:
        self._ints, self._floats = np.empty((len(_INTS), nodes), dtype=np.int64), np.empty((len(_FLOATS), nodes))
        for names, arrays, kind in ((_INTS, self._ints, np.int64), (_FLOATS, self._floats, np.float64)):
            for name, array in zip(names, arrays, strict=True):
                setattr(self._search, name, address_of(array, kind))
