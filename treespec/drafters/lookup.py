"""Prompt lookup: what followed the last few tokens before, in the prompt or the output, is likely to follow again.

Every earlier occurrence of the last token is a match; the longer the match, the better the guess, and of equally long
ones the most recent first. Their continuations form one tree. How often a guess holds is counted by length of the match
and by place among its siblings, over all requests and for each one, and that is its probability.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treespec.request import Request
from treespec.tree import Draws, TokenTree

MAX_MATCH = 12  # longer matches count as this long
MATCHES = 6  # whose continuations are proposed
PLACES = 3  # among siblings; the third stands for all later ones
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
        self.trials = np.zeros((PLACES, MAX_MATCH + 1))
        self.hits = np.zeros((PLACES, MAX_MATCH + 1))

    def add(self, trials: np.ndarray, hits: np.ndarray) -> None:
        """Count guesses and those that held; [PLACES, MAX_MATCH + 1] each."""
        self.trials += trials
        self.hits += hits

    def fade(self) -> None:
        """Let what was counted count for less."""
        self.trials *= FADING
        self.hits *= FADING

    def rates(self, prior: np.ndarray, weight: float) -> np.ndarray:
        """The share that held, drawn towards `prior` as if `weight` guesses had been seen; [PLACES, MAX_MATCH + 1]."""
        return (self.hits + weight * prior) / (self.trials + weight)


class _Text:
    """A request's tokens as an array that grows with it: converting a list of 1,000 takes 40 us.

    `barren` counts the searches since a guess was accepted.
    """

    def __init__(self) -> None:
        self._buffer, self._length = np.empty(1024, dtype=np.int64), 0
        self.barren = 0

    def due(self) -> bool:
        """Whether to search in this round: seldom where searching has found nothing for long."""
        self.barren += 1
        return self.barren <= BARREN or (self.barren % 2 == 0 and (self.barren <= 4 * BARREN or self.barren % 4 == 0))

    def follow(self, tokens: list[int]) -> np.ndarray:
        """int64 [len(tokens)], a view; `tokens` only ever grow."""
        if len(tokens) > len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.empty(len(tokens), dtype=np.int64)])
        self._buffer[self._length : len(tokens)] = tokens[self._length :]
        self._length = len(tokens)
        return self._buffer[: self._length]


@dataclass
class _Guess:
    """A proposed tree, with each node's place among its siblings and length of match; the root's entries are 0."""

    tree: TokenTree
    places: np.ndarray
    lengths: np.ndarray

    def count(self, nodes: np.ndarray) -> np.ndarray:
        """How many of these nodes have which place and length; [PLACES, MAX_MATCH + 1]."""
        cells = self.places[nodes] * (MAX_MATCH + 1) + self.lengths[nodes]
        return np.bincount(cells, minlength=PLACES * (MAX_MATCH + 1)).reshape(PLACES, MAX_MATCH + 1)


class LookupDrafter:
    """Proposes what followed the same tokens before. Costs no model pass."""

    name = "lookup"

    def __init__(self) -> None:
        self._prior, self._counts = _prior(), Counts()
        self._rounds = 0
        self._own: dict[str, Counts] = {}
        self._texts: dict[str, _Text] = {}
        self._guesses: dict[str, _Guess] = {}

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
        common = self._counts.rates(self._prior, PRIOR_TRIALS)
        trees = []
        for request, depth in zip(requests, max_depths, strict=True):
            if not depth:
                trees.append(TokenTree.root(request.tokens[-1]))
                continue
            own = self._own.get(request.request_id)
            rates = common if own is None else own.rates(common, GLOBAL_TRIALS)
            text = self._texts.setdefault(request.request_id, _Text())
            least = max(least_value if request.spec.is_adaptive else 0.0, LEAST)
            guess = _guess(text.follow(request.tokens)[-REACH:], depth, rates, least) if text.due() else None
            if guess is None:
                self._guesses.pop(request.request_id, None)
                trees.append(TokenTree.root(request.tokens[-1]))
            else:
                self._guesses[request.request_id] = guess
                trees.append(guess.tree)
        return trees

    def commit(self, requests: Sequence[Request], paths: Sequence[np.ndarray]) -> None:
        """Count the guesses below every accepted node: one of them held, or none."""
        for request, path in zip(requests, paths, strict=True):
            guess = self._guesses.pop(request.request_id, None)
            if guess is None:
                continue
            if len(path) > 1:
                self._texts[request.request_id].barren = 0
            on_path = np.zeros(len(guess.tree), dtype=bool)
            on_path[path] = True
            tested = 1 + np.flatnonzero(on_path[guess.tree.parents[1:]])
            result = guess.count(tested), guess.count(tested[on_path[tested]])
            self._counts.add(*result)
            self._own.setdefault(request.request_id, Counts()).add(*result)

    def release(self, request: Request) -> None:
        """Forget a request."""
        self._own.pop(request.request_id, None)
        self._texts.pop(request.request_id, None)
        self._guesses.pop(request.request_id, None)


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


def _guess(tokens: np.ndarray, depth: int, rates: np.ndarray, least: float) -> _Guess | None:
    """The tree of the best matches' continuations; None without a match, or where the first is less probable than
    `least`."""
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
    probs = rates[places, matched]
    nodes = 1 + np.arange(len(match))
    tree = TokenTree(
        tokens=np.concatenate([tokens[-1:], coming[match, level]]),
        parents=np.concatenate([[-1], parents]),
        depths=np.concatenate([[0], level + 1]),
        probs=np.concatenate([[1.0], probs]),
        draws=Draws(parents, nodes, np.zeros(len(nodes), dtype=np.int64), np.ones(len(nodes))),
        source_names=("lookup",),
    )
    return _Guess(tree, np.concatenate([[0], places]), np.concatenate([[0], matched]))
