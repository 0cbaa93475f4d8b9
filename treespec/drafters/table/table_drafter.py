"""The table: a draft source from an n-gram model with back-off, counted in training and while serving.

The probability of a token is interpolated over the contexts of the last 0 to 3 tokens. For each context length, the
probabilities stored by `treespec train` come first, then the counts of the tokens emitted by this engine. Nodes are
added by descending value, so that a smaller tree is a prefix of a larger one.
"""

import ctypes
import heapq
from collections.abc import Sequence

import numpy as np

from treespec.drafters.base import DraftSource, Proposals
from treespec.drafters.table.stored_table import StoredTable, hash_contexts
from treespec.request import Request
from treespec.tree import TokenTree
from treespec_kernels.cpu.cpu_library import address_of
from treespec_kernels.cpu.table_cpu import BYTES_PER_SLOT, CANDIDATES, CONTEXTS, PROBS, SLOT, STRUCTS

NAME = "table"
MIN_VALUE = 0.01  # default minimum value of a node
# Weight of a context's stored probabilities against the tokens counted while serving. The log loss on held-out training
# texts is 0.290; 0.295 with 1 or 4.
PRIOR_COUNT = 2.0
SLOTS_PER_TOKEN = 2  # average number of counted contexts per token
_OUTPUTS = ("node_tokens", "parents", "depths", "node_probs", "values")


class TableDrafter(DraftSource):
    """Drafter that expands an n-gram table. Runs no model."""

    name = NAME

    def __init__(
        self,
        stored: StoredTable,
        library: ctypes.CDLL | None = None,  # from `table_library`; None for the equivalent Python code
        history_tokens: int = 0,  # approximate number of emitted tokens to keep counts for; 0 disables counting
    ) -> None:
        self._library = library
        self._hashes, self._tokens = stored.hashes, stored.tokens.astype(np.int32)
        self._codes, self._frequencies, self._levels = stored.codes, stored.frequencies, PROBS
        self._starts = np.append(0, np.cumsum(stored.sizes, dtype=np.int64))
        self._buckets = np.searchsorted(stored.hashes, np.arange((1 << 16) + 1, dtype=np.uint64) << np.uint64(16))
        self._num_slots = 1 << (SLOTS_PER_TOKEN * history_tokens - 1).bit_length() if history_tokens else 0
        columns = self._hashes, self._starts, self._tokens, self._codes, self._frequencies
        self.nbytes = sum(column.nbytes for column in columns) + BYTES_PER_SLOT * self._num_slots
        self._expansion = STRUCTS["Expansion"](prior=PRIOR_COUNT)
        self._room = 0
        self.forget()

    def forget(self, running: Sequence[Request] = ()) -> None:
        """Clear the counts made while serving. Future tokens of running requests are counted."""
        self._counted = {request.request_id: len(request.tokens) for request in running}
        self._keys = np.zeros(self._num_slots, dtype=np.uint32)
        self._slot_tokens = np.zeros((self._num_slots, SLOT), dtype=np.int32)
        self._slot_counts = np.zeros((self._num_slots, SLOT), dtype=np.float32)
        names = "hashes buckets starts tokens codes frequencies levels keys slot_tokens slot_counts".split()
        addresses = {name: address_of(array := getattr(self, f"_{name}"), array.dtype) for name in names}
        self._table = STRUCTS["Table"](len(self._frequencies), self._num_slots, **addresses)

    def propose(self, requests: Sequence[Request], max_depths: Sequence[int], least_value: float) -> Proposals:
        """Propose probable continuations; `least_value` is the minimum value of adaptive trees' nodes."""
        trees: dict[str, TokenTree] = {}
        for request, depth in zip(requests, max_depths, strict=True):
            spec = request.spec
            if not depth or not self.may_draft(request):
                continue
            least = max(least_value if spec.is_adaptive else 0.0, MIN_VALUE)
            temperature = request.sampler.temperature if request.sampler is not None else 0.0
            trees[request.request_id] = self.expand(*self._new(request), depth, spec.max_nodes, least, temperature)
        return Proposals(trees, lambda *_: None)  # `propose` and `release` count new tokens

    def release(self, request: Request) -> None:
        if request.num_generated and request.spec.allows(NAME, NAME):
            self.count(*self._new(request))
        self._counted.pop(request.request_id, None)

    def _new(self, request: Request) -> tuple[np.ndarray, int]:
        """Return the end of a request's text, and how many of its tokens were counted before."""
        counted = self._counted.get(request.request_id, request.num_prompt)
        self._counted[request.request_id] = len(request.tokens)
        first = max(counted - CONTEXTS, 0) if self._num_slots else max(len(request.tokens) - CONTEXTS, 0)
        return np.array(request.tokens[first:], dtype=np.int64), counted - first

    def count(self, text: np.ndarray, seen: int) -> None:
        """Count each token of text[seen:], int64, after its contexts."""
        if self._library is not None and self._num_slots:
            self._library.treespec_table_count(*self._arguments(text, seen))
        elif self._num_slots:
            for end in range(max(seen, 1), len(text)):
                for key in _hashes(text[:end]):
                    self._count(key, int(text[end]))

    def expand(
        self,
        text: np.ndarray,  # int64 [length], last tokens of a text
        seen: int,  # number of tokens of `text` already counted; the rest is counted first
        depth: int,  # maximum depth of the tree, at least 1
        nodes: int,  # maximum number of nodes, including the root
        least: float,  # minimum value of a node
        temperature: float = 0.0,
    ) -> TokenTree:
        """Return the tree of the most valuable continuations.

        Probabilities are for greedy decoding. Up to temperature 1 they are kept, which fits held-out lessons better
        than their power 1 / temperature; above 1 they are raised to this power and renormalised.
        """
        power = 1 / max(temperature, 1.0)
        if self._library is not None:
            if nodes > self._room:
                self._make_room(nodes)
            arguments, expansion = self._arguments(text, seen), self._expansion
            expansion.depth, expansion.nodes, expansion.least, expansion.power = depth, nodes, least, power
            count = self._library.treespec_table_expand(*arguments)
            columns = [*self._ints[:, :count].copy(), *self._floats[:, :count].copy()]
        else:
            self.count(text, seen)
            columns = self._expanded(text.tolist(), depth, nodes, least, power)
            count = len(columns[0])
        draws = np.arange(1, count), np.zeros(count - 1, dtype=np.int64), np.ones(count - 1)
        tokens, parents, depths, probs, values = columns
        return TokenTree(tokens, parents, depths, probs, *draws, (NAME,)).with_values(values)

    def _arguments(self, text: np.ndarray, seen: int) -> tuple[int, int]:
        expansion = self._expansion
        expansion.text, expansion.length, expansion.seen = address_of(text), len(text), seen
        return ctypes.addressof(self._table), ctypes.addressof(expansion)

    def _make_room(self, nodes: int) -> None:
        self._room, self._ints, self._floats = nodes, np.empty((3, nodes), dtype=np.int64), np.empty((2, nodes))
        for name, row in zip(_OUTPUTS, [*self._ints, *self._floats], strict=True):
            setattr(self._expansion, name, address_of(row, row.dtype))

    def _count(self, key: int, token: int) -> None:
        """Count a token after a context. If two contexts share a slot, the later one replaces a rarely seen one."""
        slot = key & (self._num_slots - 1)
        tokens, counts = self._slot_tokens[slot], self._slot_counts[slot]
        if self._keys[slot] != key:
            counts *= 0.5
            if counts.sum() >= 0.5:
                return
            self._keys[slot], counts[:] = key, 0
        places = np.flatnonzero((counts > 0) & (tokens == token))
        place = int(places[0]) if len(places) else int(np.argmin(counts))
        tokens[place], counts[place] = token, counts[place] + 1 if len(places) else 1

    def _expanded(self, text: list[int], depth: int, nodes: int, least: float, power: float) -> list[np.ndarray]:
        """Return the tree's tokens, parents, depths, probs and values: the reference of the library's expansion."""
        heap, number = [(-1.0, 0, text[-1], -1, 1.0)], 0
        rows: list[tuple[int, int, int, float, float]] = []
        ends: list[list[int]] = []  # last tokens of the path to each node
        while heap and len(rows) < nodes:
            minus, _, token, parent, prob = heapq.heappop(heap)
            rows.append((token, parent, rows[parent][2] + 1 if rows else 0, prob, -minus))
            ends.append([*ends[parent], token] if len(rows) > 1 else text)
            if rows[-1][2] == depth:
                continue
            for child, chance in self._children(ends[-1], power):
                if -minus * chance >= least:
                    number += 1
                    heapq.heappush(heap, (minus * chance, number, child, len(rows) - 1, chance))
        columns = list(zip(*rows, strict=True))
        return [np.array(column, dtype=np.int64) for column in columns[:3]] + [np.array(c) for c in columns[3:]]

    def _children(self, text: list[int], power: float) -> list[tuple[int, float]]:
        """Return the candidate tokens after a text and their probabilities."""
        contexts: list[tuple[dict[int, float], dict[int, float]]] = []  # stored weights, counts; shortest context first
        for key in _hashes(np.array(text[-CONTEXTS:])):
            place = int(np.searchsorted(self._hashes, np.uint32(key)))
            weights: dict[int, float] = {}
            if place < len(self._hashes) and self._hashes[place] == key:
                stored = slice(self._starts[place], self._starts[place + 1])
                weights = dict(zip(self._tokens[stored].tolist(), PROBS[self._codes[stored]].tolist(), strict=True))
            slot, counts = key & (self._num_slots - 1), dict[int, float]()
            if self._num_slots and self._keys[slot] == key:
                pairs = zip(self._slot_tokens[slot].tolist(), self._slot_counts[slot].tolist(), strict=True)
                counts = {token: count for token, count in pairs if count > 0}
            contexts.append((weights, counts))
        tokens = list(dict.fromkeys(t for weights, counts in reversed(contexts) for t in (*counts, *weights)))
        probs = []
        for token in tokens[:CANDIDATES]:
            prob = float(PROBS[self._frequencies[token]]) if len(self._frequencies) else 0.0
            for weights, counts in contexts:
                rest = 1.0
                for weight in weights.values():
                    rest -= weight
                prob = max(rest, 0.0) * prob + weights.get(token, 0.0)
                if counts:
                    prob = (PRIOR_COUNT * prob + counts.get(token, 0.0)) / (PRIOR_COUNT + sum(counts.values()))
            probs.append(prob)
        if power != 1.0:
            powers, unlisted, total = [prob**power for prob in probs], 1.0, 0.0
            for prob, raised in zip(probs, powers, strict=True):  # same rounding as C++; `sum` is more exact
                unlisted, total = unlisted - prob, total + raised
            total += max(unlisted, 0.0) ** power
            probs = [raised / total for raised in powers]
        return list(zip(tokens, probs, strict=False))


def _hashes(text: np.ndarray) -> list[int]:
    """Return the hashes of the last 1 to CONTEXTS tokens of a text, shortest context first."""
    return hash_contexts(text[: -CONTEXTS - 1 : -1][:, None])[:, 0].tolist()
