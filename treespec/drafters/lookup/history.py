"""The history of an engine's outputs, finished or not, indexed for suffix decoding.

Suffix decoding (arXiv 2411.04975) keeps suffix trees over earlier outputs. Here the last `capacity` tokens lie in a
ring, and places where the same few tokens stand are chained, as in LZ77: adding a token and forgetting the oldest take
constant time, texts that grow side by side are searchable at once, and the latest occurrences are found first.
"""

from collections.abc import Iterator, Sequence
from itertools import islice, takewhile

import numpy as np

from treespec_kernels.cpu.lookup_cpu import MAX_MATCH, ORDERS, PAST_MATCHES, STEPS


class History:
    """Reference implementation of `CompiledHistory`, and its replacement without a C++ compiler.

    A token has a number, from 1 on; `number % capacity` is its place in the ring.

    Args:
        capacity: tokens that are kept.
    """

    def __init__(self, capacity: int):
        self._capacity, self._count = capacity, 0
        self._tokens, self._owners, self._before, self._after = (np.zeros(capacity, dtype=np.int64) for _ in range(4))
        self._older = {order: np.zeros(capacity, dtype=np.int64) for order in ORDERS}
        self._latest: dict[int, dict[tuple[int, ...], int]] = {order: {} for order in ORDERS}

    def __len__(self) -> int:
        return min(self._count, self._capacity)

    def add(self, owner: int, last: int, tokens: np.ndarray) -> int:
        """Append to a text.

        Args:
            owner: whose text it is.
            last: number of the text's last token so far; 0: it begins, as it does where that one was forgotten.
            tokens: int64 [length].

        Returns:
            The number of the text's last token.
        """
        for token in tokens.tolist():
            self._count += 1
            last = last if self._holds(last) else 0
            place = self._count % self._capacity
            self._tokens[place], self._owners[place], self._before[place], self._after[place] = token, owner, last, 0
            if last:
                self._after[last % self._capacity] = self._count
            last = self._count
            end = list(islice(self._backwards(last), max(ORDERS)))
            for order in ORDERS:
                if len(end) >= order:
                    latest, key = self._latest[order], tuple(end[:order])
                    self._older[order][place] = latest.pop(key, 0)
                    latest[key] = last  # behind all others: they stand in the order of their numbers
        for latest in self._latest.values():
            while latest and not self._holds(next(iter(latest.values()))):
                del latest[next(iter(latest))]
        return last

    def find(self, text: Sequence[int], owner: int) -> list[tuple[int, int]]:
        """Where the end of a text stands in the texts of others: (number of its last token there, length), longest
        first, of equally long ones the latest first, PAST_MATCHES at most.

        Looked at are the latest STEPS places where the last six tokens stand, and where that finds nothing, the last
        three. What nothing follows is no match.
        """
        ending = text[-MAX_MATCH:][::-1]
        for order in sorted(ORDERS, reverse=True):
            found, steps = [], 0
            number = self._latest[order].get(tuple(ending[:order]), 0) if len(ending) >= order else 0
            while self._holds(number) and steps < STEPS:
                same = takewhile(lambda both: both[0] == both[1], zip(ending, self._backwards(number), strict=False))
                length = sum(1 for _ in same)
                if length >= order:  # else its beginning was forgotten
                    steps += 1
                    if self._owners[number % self._capacity] != owner and self._next(number):
                        found.append((number, length))
                number = int(self._older[order][number % self._capacity])
            if found:
                return sorted(found, key=lambda match: -match[1])[:PAST_MATCHES]
        return []

    def following(self, number: int) -> Iterator[int]:
        """The tokens behind one, to the end of its text."""
        while number := self._next(number):
            yield int(self._tokens[number % self._capacity])

    def _holds(self, number: int) -> bool:
        return number > max(self._count - self._capacity, 0)

    def _next(self, number: int) -> int:
        return int(self._after[number % self._capacity])  # younger than what is kept, so kept

    def _backwards(self, number: int) -> Iterator[int]:
        """A token and those before it, as far as they are kept."""
        while self._holds(number):
            yield int(self._tokens[number % self._capacity])
            number = int(self._before[number % self._capacity])
