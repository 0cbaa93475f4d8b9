"""Prompt lookup: what followed the last few tokens before, in the prompt or the output, is likely to follow again.

Every earlier occurrence of the last token is a match; the longer the match, the better the guess, and of equally long
ones the most recent first. Their continuations form one tree. How often a guess holds is counted by length of the match
and by place among its siblings, over all requests and for each one, and that is its probability.
"""

import ctypes
from collections.abc import Sequence

import numpy as np

from treespec.request import Request
from treespec.tree import Draws, TokenTree, path_values
from treespec_kernels.cpu_library import address_of
from treespec_kernels.lookup_cpu import MATCHES, MAX_MATCH, PLACES, Found, LookupSearch

REACH = 8192  # tokens that are searched, counted from the end
PRIOR_TRIALS = 12.0  # what the prior counts for against observed guesses
GLOBAL_TRIALS = 6.0  # what all requests' counts count for against the request's own
FADING = 0.94  # of what was counted, every FADING_ROUNDS: guesses that never hold are tried again some day
FADING_ROUNDS = 32
BARREN = 16  # searches without an accepted guess after which every second one is left out
LEAST = 0.02  # probability of the best first guess below which none is proposed


def _prior() -> np.ndarray:
    """[PLACES, MAX_MATCH + 1]: probability that a guess holds, before any was seen."""
    lengths = np.arange(MAX_MATCH + 1)
    first = 0.9 - 0.75 * 0.7**lengths
    return np.stack([first, 0.3 * (1 - first), 0.15 * (1 - first)])


class Counts:
    """Guesses and how many of them held, by place among siblings and length of the match."""

    def __init__(self) -> None:
        self.cells = np.zeros((2, PLACES, MAX_MATCH + 1))
        self.trials, self.hits = self.cells
        self.address = address_of(self.cells, np.float64)

    def add(self, trials: np.ndarray, hits: np.ndarray) -> None:
        """Count guesses and those that held; [PLACES, MAX_MATCH + 1] each."""
        self.trials += trials
        self.hits += hits

    def fade(self) -> None:
        """Let what was counted count for less."""
        self.cells *= FADING

    def rates(self, prior: np.ndarray, weight: float) -> np.ndarray:
        """The share that held, drawn towards `prior` as if `weight` guesses had been seen; [PLACES, MAX_MATCH + 1]."""
        return (self.hits + weight * prior) / (self.trials + weight)


class _Text:
    """A request's tokens as an array that grows with it: converting a list of 1,000 takes 40 us.

    `barren` counts the searches since a guess was accepted.
    """

    def __init__(self) -> None:
        self._buffer, self._length = np.empty(1024, dtype=np.int64), 0
        self._address = address_of(self._buffer)
        self.barren = 0

    def due(self) -> bool:
        """Whether to search in this round: seldom where searching has found nothing for long."""
        self.barren += 1
        return self.barren <= BARREN or (self.barren % 2 == 0 and (self.barren <= 4 * BARREN or self.barren % 4 == 0))

    def follow(self, tokens: list[int]) -> None:
        """Take what is new of `tokens`, which only ever grow."""
        if len(tokens) > len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.empty(len(tokens), dtype=np.int64)])
            self._address = address_of(self._buffer)
        self._buffer[self._length : len(tokens)] = tokens[self._length :]
        self._length = len(tokens)

    @property
    def end(self) -> np.ndarray:
        """The last REACH tokens, int64, a view."""
        return self._buffer[max(self._length - REACH, 0) : self._length]

    @property
    def end_address(self) -> tuple[int, int]:
        """Where they lie, and how many they are."""
        first = max(self._length - REACH, 0)
        return self._address + 8 * first, self._length - first


class LookupDrafter:
    """Proposes what followed the same tokens before. Costs no model pass.

    Args:
        library: `lookup_library`, which finds the same; None searches in numpy.
    """

    name = "lookup"

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        self._prior, self._counts = _prior(), Counts()
        self._compiled = None if library is None else LookupSearch(
            library, self._prior, PRIOR_TRIALS, GLOBAL_TRIALS, self._counts.cells
        )  # fmt: skip
        self._rounds = 0
        self._own: dict[str, Counts] = {}
        self._texts: dict[str, _Text] = {}
        self._found: dict[str, Found] = {}

    def propose(
        self, requests: Sequence[Request], max_depths: Sequence[int], least_value: float = 0.0
    ) -> list[TokenTree]:
        """One tree per request over its last token, at most `max_depths[i]` deep; the one-node tree without a match.

        Args:
            requests: of this round.
            max_depths: by request.
            least_value: a request whose best first guess is less probable gets none; one of an automatic tree.
        """
        self._rounds += 1
        if self._rounds % FADING_ROUNDS == 0:
            for counts in (self._counts, *self._own.values()):
                counts.fade()
        trees = []
        for request, depth in zip(requests, max_depths, strict=True):
            found = self._search(request, depth, least_value) if depth else None
            if found is None:
                self._found.pop(request.request_id, None)
                trees.append(TokenTree.root(request.tokens[-1]))
            else:
                self._found[request.request_id] = found
                trees.append(_tree(found))
        return trees

    def _search(self, request: Request, depth: int, least_value: float) -> Found | None:
        """What followed the end of a request's text, where it is due to be searched."""
        if (text := self._texts.get(request.request_id)) is None:
            text = self._texts[request.request_id] = _Text()
        if not text.due():
            return None
        text.follow(request.tokens)
        own = self._own.get(request.request_id)
        least = max(least_value if request.spec.is_adaptive else 0.0, LEAST)
        if self._compiled is not None:
            return self._compiled.search(*text.end_address, depth, None if own is None else own.address, least)
        rates = self._counts.rates(self._prior, PRIOR_TRIALS)
        return search(text.end, depth, rates if own is None else own.rates(rates, GLOBAL_TRIALS), least)

    def commit(self, requests: Sequence[Request], paths: Sequence[np.ndarray]) -> None:
        """Count the guesses below every accepted node: one of them held, or none."""
        for request, path in zip(requests, paths, strict=True):
            found = self._found.pop(request.request_id, None)
            if found is None:
                continue
            if len(path) > 1:
                self._texts[request.request_id].barren = 0
            if (own := self._own.get(request.request_id)) is None:
                own = self._own[request.request_id] = Counts()
            if self._compiled is not None:
                self._compiled.count(found, path, own.cells)
                continue
            for counts in (self._counts, own):
                counts.add(*_count(found, path))

    def release(self, request: Request) -> None:
        """Forget a request."""
        self._own.pop(request.request_id, None)
        self._texts.pop(request.request_id, None)
        self._found.pop(request.request_id, None)


def _tree(found: Found) -> TokenTree:
    below = len(found.tokens) - 1
    draws = Draws(found.parents[1:], np.arange(1, below + 1), np.zeros(below, dtype=np.int64), np.ones(below))
    tree = TokenTree(found.tokens, found.parents, found.depths, found.probs, draws, ("lookup",))
    return tree.with_values(found.values)


def _count(found: Found, path: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The guesses below the nodes of a path, and those that held; [PLACES, MAX_MATCH + 1] each."""
    on_path = np.zeros(len(found.tokens), dtype=bool)
    on_path[path] = True
    tested = 1 + np.flatnonzero(on_path[found.parents[1:]])

    def cells(nodes: np.ndarray) -> np.ndarray:
        flat = found.places[nodes] * (MAX_MATCH + 1) + found.lengths[nodes]
        return np.bincount(flat, minlength=PLACES * (MAX_MATCH + 1)).reshape(PLACES, MAX_MATCH + 1)

    return cells(tested), cells(tested[on_path[tested]])


def find_matches(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the end of `tokens` occurred before: (last position, length) of the best matches, longest first, and of
    equally long ones the most recent first. int64 [num matches] each; lengths up to MAX_MATCH."""
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])[::-1]
    back = np.arange(min(MAX_MATCH, last))
    before = ends[:, None] - back
    same = (tokens[before] == tokens[last - back]) & (before >= 0)  # a negative index wraps around
    lengths = np.logical_and.accumulate(same, axis=1).sum(1)
    best = np.argsort(-lengths, kind="stable")[:MATCHES]
    return ends[best], lengths[best]


def search(tokens: np.ndarray, depth: int, rates: np.ndarray, least: float) -> Found | None:
    """The tree of the best matches' continuations; None without a match, or where the first is less probable than
    `least`.

    Args:
        tokens: int64 [length].
        depth: of the tree.
        rates: float64 [PLACES, MAX_MATCH + 1], probabilities of guesses.
        least: that the best first guess must have.
    """
    ends, lengths = find_matches(tokens)
    if not len(ends) or rates[0, lengths[0]] < least:
        return None
    steps = np.arange(depth)
    period = len(tokens) - 1 - ends  # a continuation that reaches the end of the text goes on as a loop
    coming = tokens[ends[:, None] + 1 + steps % period[:, None]]  # [num matches, depth]
    shared = np.logical_and.accumulate(coming[:, None] == coming[None, :], axis=2)  # [matches, matches, depth]
    owner = shared.argmax(1)  # [num matches, depth]: the first match with the same tokens so far
    level, match = np.nonzero((owner == np.arange(len(ends))[:, None]).T)
    index = np.zeros((len(ends), depth), dtype=np.int64)
    index[match, level] = 1 + np.arange(len(match))
    above = index[owner[match, level - 1], level - 1]
    parents = np.where(level > 0, above, 0)
    # Siblings follow one another in order of their matches; a stable sort by parent counts them.
    order = np.argsort(parents, kind="stable")
    ranked = parents[order]
    places = np.empty(len(match), dtype=np.int64)
    places[order] = np.arange(len(match)) - np.searchsorted(ranked, ranked)
    places = np.minimum(places, PLACES - 1)
    matched = np.minimum(lengths[match] + level, MAX_MATCH)
    probs = np.concatenate([[1.0], rates[places, matched]])
    values = path_values(probs, np.concatenate([[-1], parents]))
    order = np.argsort(-values, kind="stable")  # a parent comes first, and stays ahead of an equal child
    index = np.argsort(order)
    return Found(
        tokens=np.concatenate([tokens[-1:], coming[match, level]])[order],
        parents=np.concatenate([[-1], index[parents[order[1:] - 1]]]),
        depths=np.concatenate([[0], level + 1])[order],
        places=np.concatenate([[0], places])[order],
        lengths=np.concatenate([[0], matched])[order],
        probs=probs[order],
        values=values[order],
    )
