"""Prefix caching: lookup of pages of committed positions by their tokens."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from treespec_kernels.attention.tree_batch import PAGE_SIZE


class Prefix(NamedTuple):
    """Cached pages of a prompt's first positions."""

    pages: np.ndarray  # int64 [num_pages]
    draft_lengths: np.ndarray  # int64 [num_drafts], leading positions with K/V in each draft's pool


def page_keys(tokens: Sequence[int], salt: bytes = b"") -> list[bytes]:
    """Return a key for each full page of tokens: a hash of `salt` and all tokens up to the page's end."""
    keys, key = list[bytes](), salt
    full_pages = np.array(tokens[: len(tokens) // PAGE_SIZE * PAGE_SIZE], dtype=np.int64)
    for page in full_pages.reshape(-1, PAGE_SIZE):
        key = hashlib.sha256(key + page.tobytes()).digest()
        keys.append(key)
    return keys


class PrefixCache:
    """Index of a `KVCache`'s contents: held pages, and free pages until they are allocated again."""

    def __init__(self, num_pages: int, num_drafts: int):
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._has_draft = np.zeros((num_drafts, num_pages), dtype=bool)  # whether a draft has K/V of a full page
        self._last_use = np.zeros(num_pages, dtype=np.int64)  # 0: the page is empty
        self._clock = 0

    def find(self, keys: Sequence[bytes]) -> Prefix:
        """Return the longest cached prefix for the pages with these keys."""
        pages = []
        for key in keys:
            if (page := self._page_of.get(key)) is None:
                break
            pages.append(page)
        cached_pages = np.array(pages, dtype=np.int64)
        leading = np.logical_and.accumulate(self._has_draft[:, cached_pages], axis=1).sum(axis=1)
        return Prefix(cached_pages, PAGE_SIZE * leading)

    def insert(self, keys: Sequence[bytes], pages: np.ndarray, draft_lengths: np.ndarray) -> None:
        """Insert a request's leading pages with their keys; of pages with equal contents, keep the first one."""
        for i, (key, page) in enumerate(zip(keys, pages.tolist(), strict=True)):
            page = self._page_of.setdefault(key, page)
            if page not in self._key_of:
                self._key_of[page], self._last_use[page] = key, 1
            assert self._key_of[page] == key, "a page's contents changed without being forgotten"
            self._has_draft[:, page] |= draft_lengths >= (i + 1) * PAGE_SIZE
        self.touch(np.array([self._page_of[key] for key in keys], dtype=np.int64))

    def touch(self, pages: np.ndarray) -> None:
        """Mark a request's leading pages that are cached as used; the last page is replaced first."""
        pages = pages[self._last_use[pages] > 0]
        self._clock += len(pages)
        self._last_use[pages] = 1 + self._clock - np.arange(len(pages))

    def forget(self, pages: np.ndarray) -> None:
        """Remove pages with changed contents."""
        for page in pages[self._last_use[pages] > 0].tolist():
            del self._page_of[self._key_of.pop(page)]
        self._last_use[pages] = 0
        self._has_draft[:, pages] = False

    def clear(self) -> None:
        self.forget(np.array(list(self._key_of), dtype=np.int64))

    def num_empty(self, pages: np.ndarray) -> int:
        """Return the number of empty pages among these."""
        return int(np.count_nonzero(self._last_use[pages] == 0))

    def oldest_first(self, pages: np.ndarray) -> np.ndarray:
        """Sort pages by their last use; empty pages come first, in ascending order."""
        return pages[np.argsort(self._last_use[pages], kind="stable")]
