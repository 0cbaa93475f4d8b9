"""Prompt lookup and suffix decoding: propose what followed earlier occurrences of the last few tokens.

*Prompt lookup* searches a request's own prompt and output: every earlier occurrence of the last token is a match.
*Suffix* searches what the engine wrote for other requests, for at least three tokens (`history.py`).
The longer the match, the better the guess, and of equally long ones the most recent first. The continuations of all of
them form one tree. How often a guess holds is counted over all requests and for each one, and that is its probability:
by length of the match, and by its place among its siblings, or, in the history, by how many matches agree on it. Where
both sources name a token, the larger probability counts.
"""

import ctypes
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from treespec.drafters.lookup.history import History
from treespec.request import Request
from treespec.tree import Draws, TokenTree
from treespec_kernels.cpu.cpu_library import address_of
from treespec_kernels.cpu.lookup_cpu import (
    BYTES_PER_TOKEN,
    MATCHES,
    MAX_MATCH,
    OWN_PLACES,
    PLACES,
    SHORT,
    CompiledHistory,
    Found,
    LookupSearch,
)

NAMES = ("lookup", "suffix")
MAX_SUFFIX_TOKENS = 2**26  # that are remembered: 4 GiB
PROMPT_TAIL = 64  # tokens of a prompt that are remembered with its output, for others to find where that begins
REACH = 8192  # tokens that are searched, counted from the end
PRIOR_TRIALS = 12.0  # what the prior counts for against observed guesses
GLOBAL_TRIALS = 6.0  # what all requests' counts count for against the request's own
FADING = 0.94  # of what was counted, every FADING_ROUNDS: guesses that never hold are tried again some day
FADING_ROUNDS = 32
BARREN = 16  # searches without an accepted guess after which every second one is left out
LEAST = 0.02  # probability of the best first guess below which none is proposed


def _prior() -> np.ndarray:
    """[PLACES, MAX_MATCH + 1]: probability that a guess holds, before any was seen.

    Those of the history are about what was counted over edited prompts and other seeds, fixed trees of 24 nodes. Three
    tokens of another text say less than three of the text itself, and matches that disagree little at any length.
    """
    lengths = np.arange(MAX_MATCH + 1)
    first = 0.9 - 0.75 * 0.7**lengths
    own = [first, 0.3 * (1 - first), 0.15 * (1 - first)]
    longer = np.maximum(lengths - SHORT, 0)
    sole, unanimous, apart = 0.85 - 0.5 * 0.75**longer, 0.95 - 0.4 * 0.65**longer, 0.85**longer
    several = [0.55 - 0.3 * apart, 0.35 - 0.2 * apart, 0.25 - 0.17 * apart, np.full(len(lengths), 0.05)]
    return np.stack([*own, sole, unanimous, *several])


class Counts:
    """Counts of proposals and of accepted ones, by place among siblings and length of the match."""

    def __init__(self) -> None:
        self.cells = np.zeros((2, PLACES, MAX_MATCH + 1))
        self.trials, self.hits = self.cells
        self.address = address_of(self.cells, np.float64)

    def add(self, trials: np.ndarray, hits: np.ndarray) -> None:
        """Count guesses and those that held; [PLACES, MAX_MATCH + 1] each."""
        self.trials += trials
        self.hits += hits

    def fade(self) -> None:
        """Decay the counts."""
        self.cells *= FADING

    def rates(self, prior: np.ndarray, weight: float) -> np.ndarray:
        """The share that held, drawn towards `prior` as if `weight` guesses had been seen; [PLACES, MAX_MATCH + 1]."""
        return (self.hits + weight * prior) / (self.trials + weight)


_owners = itertools.count(1)


class _Text:
    """A request's tokens as an array that grows with it: converting a list of 1,000 takes 40 us.

    `barren` counts the searches since a guess was accepted. What stands before `begin` is not remembered.
    """

    def __init__(self, begin: int) -> None:
        self._buffer, self._length = np.empty(1024, dtype=np.int64), 0
        self._address = address_of(self._buffer)
        self.barren = 0
        self.owner = next(_owners)  # in the history
        self._remembered, self._last = begin, 0

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

    def remember(self, history: History | CompiledHistory) -> None:
        """Add what is new to the history."""
        new = self._buffer[self._remembered : self._length]
        self._last, self._remembered = history.add(self.owner, self._last, new), self._length

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
    """Drafter of prompt lookup and suffix decoding. Runs no model.

    Args:
        library: `lookup_library`, which finds the same; None searches in numpy.
        remembers: tokens of outputs that are remembered for other requests, up to the next power of two; 0: none.
    """

    name = "lookup"

    def __init__(self, library: ctypes.CDLL | None = None, remembers: int = 0) -> None:
        self._library, self._remembers = library, 1 << (remembers - 1).bit_length() if remembers else 0
        self._prior, self._counts, self._rounds = _prior(), Counts(), 0
        self._own: dict[str, Counts] = {}
        self._found: dict[str, Found] = {}
        self.forget()

    def forget(self, running: Sequence[Request] = ()) -> None:
        """Forget all that was written, not how often guesses held. Of `running` requests, what they go on with is
        new."""
        self._texts = {request.request_id: _Text(len(request.tokens)) for request in running}
        self._history: History | CompiledHistory | None = None
        self._compiled: LookupSearch | None = None
        if self._library is None:
            self._history = History(self._remembers) if self._remembers else None
            return
        compiled = CompiledHistory(self._library, self._remembers) if self._remembers else None
        self._history = compiled
        self._compiled = LookupSearch(
            self._library, self._prior, PRIOR_TRIALS, GLOBAL_TRIALS, self._counts.cells, compiled
        )

    @property
    def nbytes(self) -> int:
        """Bytes that the history may take, compiled."""
        return BYTES_PER_TOKEN * self._remembers

    @property
    def remembered(self) -> int:
        """Tokens in the history."""
        return 0 if self._history is None else len(self._history)

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
        for request in requests:  # all, before one is searched: each may help another
            self._remember(request)
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

    def _text(self, request: Request) -> _Text:
        if (text := self._texts.get(request.request_id)) is None:
            text = self._texts[request.request_id] = _Text(_begin(request))
        return text

    def _remember(self, request: Request) -> None:
        """Take what is new of a request's text into the history, if it may be read there."""
        if self._history is not None and request.spec.allows("suffix", "suffix"):
            text = self._text(request)
            text.follow(request.tokens)
            text.remember(self._history)

    def _search(self, request: Request, depth: int, least_value: float) -> Found | None:
        """What followed the end of a request's text, where it is due to be searched."""
        spec, own, text = request.spec, self._own.get(request.request_id), self._text(request)
        looks_up, owner = spec.allows("lookup", "lookup"), text.owner if spec.allows("suffix", "suffix") else None
        if not (looks_up or owner) or not text.due():
            return None
        text.follow(request.tokens)
        least = max(least_value if spec.is_adaptive else 0.0, LEAST)
        if self._compiled is not None:
            counted = None if own is None else own.address
            return self._compiled.search(*text.end_address, depth, counted, least, looks_up, owner)
        rates = self._counts.rates(self._prior, PRIOR_TRIALS)
        rates = rates if own is None else own.rates(rates, GLOBAL_TRIALS)
        history = self._history if owner is not None and isinstance(self._history, History) else None
        return search(text.end, depth, rates, least, looks_up, history, owner or 0)

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
        """Forget a request, and remember what was written for it."""
        if request.num_generated:
            self._remember(request)
        self._own.pop(request.request_id, None)
        self._texts.pop(request.request_id, None)
        self._found.pop(request.request_id, None)


def _begin(request: Request) -> int:
    """Where what is remembered of a request begins."""
    return max(request.num_prompt - PROMPT_TAIL, 0)


def _tree(found: Found) -> TokenTree:
    below, by_past = len(found.tokens) - 1, found.places[1, 1:] >= 0
    if not by_past.any():
        draws = Draws(found.parents[1:], np.arange(1, below + 1), np.zeros(below, dtype=np.int64), np.ones(below))
        tree = TokenTree(found.tokens, found.parents, found.depths, found.probs, draws, NAMES[:1])
    else:
        nodes = [1 + np.flatnonzero(own) for own in (found.places[0, 1:] >= 0, by_past)]
        children, sources = np.concatenate(nodes), np.repeat([0, 1], [len(own) for own in nodes])
        draws = Draws(found.parents[children], children, sources, np.ones(len(children)))
        tree = TokenTree(found.tokens, found.parents, found.depths, found.probs, draws, NAMES)
    return tree.with_values(found.values)


def _count(found: Found, path: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The guesses below the nodes of a path, and those that held; [PLACES, MAX_MATCH + 1] each."""
    on_path = np.zeros(len(found.tokens), dtype=bool)
    on_path[path] = True
    tested = 1 + np.flatnonzero(on_path[found.parents[1:]])

    def cells(nodes: np.ndarray) -> np.ndarray:
        places, lengths = found.places[:, nodes].ravel(), found.lengths[:, nodes].ravel()
        flat = (places * (MAX_MATCH + 1) + lengths)[places >= 0]
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


@dataclass
class _Guess:
    """A node while the tree is built. `places` and `lengths` as `Found` has them; `votes` of matches in the history."""

    token: int
    parent: int
    depth: int
    places: list[int] = field(default_factory=lambda: [-1, -1])
    lengths: list[int] = field(default_factory=lambda: [-1, -1])
    votes: int = 0
    prob: float = 1.0
    value: float = 1.0


def search(
    tokens: np.ndarray,
    depth: int,
    rates: np.ndarray,
    least: float,
    looks_up: bool = True,
    history: History | None = None,
    owner: int = 0,
) -> Found | None:
    """The tree of the best matches' continuations; None without a match, or where the most probable first guess is less
    probable than `least`.

    Args:
        tokens: int64 [length].
        depth: of the tree.
        rates: float64 [PLACES, MAX_MATCH + 1], probabilities of guesses.
        least: that the best first guess must have.
        looks_up: whether `tokens` themselves are searched.
        history: searched as well, for texts of others than `owner`; None: none is.
    """
    text, table = tokens.tolist(), rates.tolist()
    coming: list[tuple[list[int], int, bool]] = []  # what follows a match, its length, whether it is in the history
    if looks_up:
        for end, length in zip(*(found.tolist() for found in find_matches(tokens)), strict=True):
            period = len(text) - 1 - end  # a continuation that reaches the end of the text goes on as a loop
            coming.append(([text[end + 1 + step % period] for step in range(depth)], length, False))
    if history is not None:
        for number, length in history.find(text, owner):
            coming.append((list(islice(history.following(number), depth)), length, True))
    if not coming:
        return None
    guesses, at, first = [_Guess(text[-1], -1, 0, [0, 0], [0, 0])], [0] * len(coming), 1
    for level in range(depth):
        known: dict[tuple[int, int], int] = {}
        siblings: Counter[int] = Counter()
        for match, (tail, length, past) in enumerate(coming):
            if level >= len(tail):
                continue
            above = at[match]
            at[match] = node = known.setdefault((above, tail[level]), len(guesses))
            if node == len(guesses):
                guesses.append(_Guess(tail[level], above, level + 1))
                if not past:
                    guesses[node].places[0] = min(siblings[above], OWN_PLACES - 1)
                siblings[above] += 1
            guess = guesses[node]
            guess.votes += past
            if guess.lengths[past] < 0:
                guess.lengths[past] = min(length + level, MAX_MATCH)
        _judge(guesses, first, table)
        if level == 0 and max(guess.prob for guess in guesses[1:]) < least:
            return None
        first = len(guesses)
    values = np.array([guess.value for guess in guesses])
    order = np.argsort(-values, kind="stable")  # a parent comes first, and stays ahead of an equal child
    index = np.argsort(order)
    parents, ranked = index[[guess.parent for guess in guesses]], [guesses[node] for node in order]
    parents[0] = -1
    return Found(
        tokens=np.array([guess.token for guess in ranked]),
        parents=parents[order],
        depths=np.array([guess.depth for guess in ranked]),
        places=np.array([guess.places for guess in ranked]).T,
        lengths=np.array([guess.lengths for guess in ranked]).T,
        probs=np.array([guess.prob for guess in ranked]),
        values=values[order],
    )


def _judge(guesses: list[_Guess], first: int, rates: list[list[float]]) -> None:
    """Say how probable the guesses from number `first` on are. Of two sources' estimates the larger one counts."""
    families: dict[int, list[_Guess]] = {}
    for guess in guesses[first:]:
        if guess.votes:
            families.setdefault(guess.parent, []).append(guess)
    for family in families.values():
        total = sum(guess.votes for guess in family)
        for rank, guess in enumerate(sorted(family, key=lambda guess: -guess.votes)):
            guess.places[1] = _past_place(guess.votes, total, rank)
    for guess in guesses[first:]:
        own = zip(guess.places, guess.lengths, strict=True)
        guess.prob = max(rates[place][length] for place, length in own if place >= 0)
        guess.value = guess.prob * guesses[guess.parent].value


def _past_place(votes: int, total: int, rank: int) -> int:
    """What is told apart of a guess from the history: see `PLACES`."""
    if votes == total:
        return OWN_PLACES + (total > 1)
    if rank == 0:
        return OWN_PLACES + (2 if 3 * votes >= 2 * total else 3)
    return OWN_PLACES + min(3 + rank, 5)
