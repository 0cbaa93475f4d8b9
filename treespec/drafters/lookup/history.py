"""Searchable history of an engine's outputs, finished or running, for suffix decoding.

Suffix decoding (arXiv 2411.04975) keeps suffix trees over earlier outputs. This implementation keeps the last
`capacity` tokens in a ring buffer and chains the positions of equal n-grams, as LZ77 does. Appending a token and
evicting the oldest take constant time, texts of concurrent requests are searchable immediately, and searches return
the most recent occurrences first.
"""

from collections.abc import Iterator, Sequence
from itertools import islice, takewhile

import numpy as np

from treespec_kernels.cpu.lookup_cpu import MAX_MATCH, ORDERS, PAST_MATCHES, STEPS


class History:
    """Ring buffer of tokens with n-gram chains: reference of `CompiledHistory`, and fallback without a C++ compiler.

    Tokens are numbered from 1 in the order of insertion; `number % capacity` is the ring index.
    """

    def __init__(self, capacity: int):
        self._capacity, self._count = capacity, 0
        self._tokens, self._owners, self._before, self._after = (np.zeros(capacity, dtype=np.int64) for _ in range(4))
        self._older = {order: np.zeros(capacity, dtype=np.int64) for order in ORDERS}
        self._latest: dict[int, dict[tuple[int, ...], int]] = {order: {} for order in ORDERS}

    def __len__(self) -> int:
        return min(self._count, self._capacity)

    def add(self, owner: int, last: int, tokens: np.ndarray) -> int:
        """Append int64 tokens to a text of `owner` after token number `last`; return the number of the last one.

        `last` = 0 starts a new text. If token `last` was evicted, a new text starts, too.
        """
        for token in tokens.tolist():
            self._count += 1
            last = last if self._holds(last) else 0
            index = self._count % self._capacity
            self._tokens[index], self._owners[index], self._before[index], self._after[index] = token, owner, last, 0
            if last:
                self._after[last % self._capacity] = self._count
            last = self._count
            end = list(islice(self._backwards(last), max(ORDERS)))
            for order in ORDERS:
                if len(end) >= order:
                    latest, key = self._latest[order], tuple(end[:order])
                    self._older[order][index] = latest.pop(key, 0)
                    latest[key] = last  # popped above: the dict stays ordered by number for eviction
        for latest in self._latest.values():
            while latest and not self._holds(next(iter(latest.values()))):
                del latest[next(iter(latest))]
        return last

    def find(self, text: Sequence[int], owner: int) -> list[tuple[int, int]]:
        """Find the suffix of a text, at most MAX_MATCH tokens long, in the texts of other owners.

        Checks the latest STEPS occurrences of the last six tokens, and of the last three if there is no match. An
        occurrence without a following token is not a match.

        Returns (number of the last token, length) for up to PAST_MATCHES matches, longest first, then most recent.
        """
        suffix = text[-MAX_MATCH:][::-1]
        for order in sorted(ORDERS, reverse=True):
            matches, steps = [], 0
            number = self._latest[order].get(tuple(suffix[:order]), 0) if len(suffix) >= order else 0
            while self._holds(number) and steps < STEPS:
                same = takewhile(lambda pair: pair[0] == pair[1], zip(suffix, self._backwards(number), strict=False))
                length = sum(1 for _ in same)
                if length >= order:  # otherwise part of the n-gram was evicted
                    steps += 1
                    if self._owners[number % self._capacity] != owner and self._next(number):
                        matches.append((number, length))
                number = int(self._older[order][number % self._capacity])
            if matches:
                return sorted(matches, key=lambda match: -match[1])[:PAST_MATCHES]
        return []

    def following(self, number: int) -> Iterator[int]:
        """Yield the tokens that follow a token in its text."""
        while number := self._next(number):
            yield int(self._tokens[number % self._capacity])

    def _holds(self, number: int) -> bool:
        return number > max(self._count - self._capacity, 0)

    def _next(self, number: int) -> int:
        return int(self._after[number % self._capacity])  # newer than a stored token, so also stored

    def _backwards(self, number: int) -> Iterator[int]:
        """Yield a token and its predecessors, newest first, up to the first evicted one."""
        while self._holds(number):
            yield int(self._tokens[number % self._capacity])
            number = int(self._before[number % self._capacity])
