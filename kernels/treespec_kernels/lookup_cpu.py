"""Prompt lookup in one call of C++: the search for earlier occurrences of a text's end, and the tree of what followed.

The source is `lookup_cpu.cpp`, its specification `search` in treespec/drafters/lookup.py. Addresses of
what stays where it is are taken once.
"""

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np

from treespec_kernels.cpu_library import address_of, compile_library

MAX_MATCH = 12  # longer matches count as this long
MATCHES = 6  # whose continuations are proposed
PLACES = 3  # among siblings; the third stands for all later ones

_SOURCE = Path(__file__).with_name("lookup_cpu.cpp")
_INTS, _FLOATS = ("node_tokens", "parents", "depths", "places", "lengths"), ("probs", "values")


class _Search(ctypes.Structure):
    _fields_ = (
        ("prior", ctypes.c_void_p), ("prior_trials", ctypes.c_double), ("global_trials", ctypes.c_double),
        ("common", ctypes.c_void_p), ("own", ctypes.c_void_p), ("tokens", ctypes.c_void_p),
        ("length", ctypes.c_int64), ("depth", ctypes.c_int64), ("least", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in (*_INTS, *_FLOATS)),
    )  # fmt: skip


@functools.cache
def lookup_library(compiler: tuple[str, ...], folder: Path) -> ctypes.CDLL:
    """The library, as `compile_library`."""
    sizes = [
        f"-D{name}={value}" for name, value in (("MAX_MATCH", MAX_MATCH), ("MATCHES", MATCHES), ("PLACES", PLACES))
    ]
    library = compile_library(compiler, (_SOURCE,), sizes, folder)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.treespec_lookup.argtypes, library.treespec_lookup.restype = (pointer,), number
    library.treespec_lookup_count.argtypes = (pointer, pointer, pointer, number, pointer, number, pointer, pointer)
    library.treespec_lookup_count.restype = None
    return library


class Found(NamedTuple):
    """A tree of guesses, numbered by falling value; arrays of [num_nodes], int64, and float64 the last two.

    Attributes:
        tokens, parents, depths: as `TokenTree` has them.
        places, lengths: of each node among its siblings, and of the match that it follows; the root's are 0.
        probs: that the text goes on to this node from its parent.
        values: products of them along the path.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    places: np.ndarray
    lengths: np.ndarray
    probs: np.ndarray
    values: np.ndarray


class LookupSearch:
    """Searches texts with what was counted so far.

    Args:
        library: from `lookup_library`.
        prior: float64 [PLACES, MAX_MATCH + 1], probability that a guess holds, before any was seen.
        prior_trials, global_trials: what the prior counts for against the counts of all requests, and these against a
            request's own.
        common: float64 [2, PLACES, MAX_MATCH + 1], guesses of all requests and how many of them held.
    """

    def __init__(
        self, library: ctypes.CDLL, prior: np.ndarray, prior_trials: float, global_trials: float, common: np.ndarray
    ):
        assert prior.shape == common.shape[1:] == (PLACES, MAX_MATCH + 1) and prior.dtype == common.dtype == np.float64
        self._library, self._held = library, (prior, common)
        self._search = _Search(
            prior=address_of(prior, np.float64), prior_trials=prior_trials, global_trials=global_trials,
            common=address_of(common, np.float64),
        )  # fmt: skip
        self._address = ctypes.addressof(self._search)
        self._make_room(0)

    def search(self, tokens: int, length: int, depth: int, own: int | None, least: float) -> Found | None:
        """The tree of what followed the best matches; None without one, or where the best guess is too improbable.

        Args:
            tokens: address of the text, int64 [length].
            length: of it, at least 1.
            depth: of the tree, at least 1.
            own: address of what was counted of this text, as `common`; None: nothing.
            least: probability that the best first guess must have.
        """
        if MATCHES * depth + 1 > self._ints.shape[1]:
            self._make_room(MATCHES * depth + 1)
        search = self._search
        search.tokens, search.length, search.depth, search.own, search.least = tokens, length, depth, own, least
        count = self._library.treespec_lookup(self._address)
        if not count:
            return None
        return Found(*self._ints[:, :count].copy(), *self._floats[:, :count].copy())

    def count(self, found: Found, path: np.ndarray, own: np.ndarray) -> None:
        """Count the guesses below every node of `path`, int64 [length] of node indices: one of them held, or none.

        `own` is counted into beside `common`, and of its shape.
        """
        parents, row = address_of(found.parents), found.parents.nbytes  # rows of one array
        self._library.treespec_lookup_count(
            parents, parents + 2 * row, parents + 3 * row, len(found.parents), address_of(path), len(path),
            self._search.common, address_of(own, np.float64),
        )  # fmt: skip

    def _make_room(self, nodes: int) -> None:
        self._ints, self._floats = np.empty((len(_INTS), nodes), dtype=np.int64), np.empty((len(_FLOATS), nodes))
        for names, arrays, kind in ((_INTS, self._ints, np.int64), (_FLOATS, self._floats, np.float64)):
            for name, array in zip(names, arrays, strict=True):
                setattr(self._search, name, address_of(array, kind))
