"""Prompt lookup and suffix decoding: n-gram draft sources.

*Prompt lookup* searches the request's own prompt and output; an earlier occurrence of the last token is a match.
*Suffix* searches the outputs of other requests (`history.py`) for matches of at least three tokens.

The continuations of the best matches (longest first, then most recent) are merged into one tree. A node's probability
is the acceptance rate of its class, counted over all requests and per request. A class combines the match length with
the node's rank among its siblings (lookup) or with the share of matches that continue with the node (suffix). If both
sources propose a token, the larger probability is used.
"""

import ctypes
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from treespec.drafters.base import DraftSource, Proposals
from treespec.drafters.lookup.history import History
from treespec.request import Request
from treespec.tree import TokenTree
from treespec_kernels.cpu.cpu_library import address_of
from treespec_kernels.cpu.lookup_cpu import (
    BYTES_PER_TOKEN,
    CLASSES,
    MATCHES,
    MAX_MATCH,
    SHORT,
    STRUCTS,
    TEXT_CLASSES,
    CompiledHistory,
    LookupSearch,
    Matches,
)

NAMES = ("lookup", "suffix")
PROMPT_TAIL = 64  # prompt tokens kept in the history, to match the first output tokens
SEARCH_WINDOW = 8192  # number of most recent tokens that prompt lookup searches
PRIOR_TRIALS = 12.0  # weight of the prior against the counts of all requests, in trials
GLOBAL_TRIALS = 6.0  # weight of all requests' acceptance rates against the request's own counts, in trials
DECAY = 0.94  # factor of all counts every DECAY_ROUNDS; lets classes with a low acceptance rate be retried
DECAY_ROUNDS = 32
BACKOFF_MISSES = 16  # searches without an accepted token after which every second search is skipped
MIN_PROB = 0.02  # minimum probability of the best first token for a proposal


def _prior() -> np.ndarray:
    """Return the prior acceptance probability of each class: float64 [CLASSES, MAX_MATCH + 1].

    The values for the history approximate acceptance rates measured over edited prompts and other seeds, with fixed
    trees of 24 nodes. A three-token match predicts less in another text than in the request's own, and
    disagreeing matches predict little at any length.
    """
    lengths = np.arange(MAX_MATCH + 1)
    first = 0.9 - 0.75 * 0.7**lengths
    in_text = [first, 0.3 * (1 - first), 0.15 * (1 - first)]
    longer = np.maximum(lengths - SHORT, 0)
    sole, unanimous, apart = 0.85 - 0.5 * 0.75**longer, 0.95 - 0.4 * 0.65**longer, 0.85**longer
    several = [0.55 - 0.3 * apart, 0.35 - 0.2 * apart, 0.25 - 0.17 * apart, np.full(len(lengths), 0.05)]
    return np.stack([*in_text, sole, unanimous, *several])


class Counts:
    """Counts of proposed (`trials`) and accepted tokens (`hits`) by class, float64 [2, CLASSES, MAX_MATCH + 1]."""

    def __init__(self) -> None:
        self.cells = np.zeros((2, CLASSES, MAX_MATCH + 1))
        self.trials, self.hits = self.cells
        self.address = address_of(self.cells, np.float64)

    def rates(self, prior: np.ndarray, weight: float) -> np.ndarray:
        """Return acceptance rates [CLASSES, MAX_MATCH + 1], with `prior` counted as `weight` pseudo-trials."""
        return (self.hits + weight * prior) / (self.trials + weight)


class RoundSearches(NamedTuple):
    """The searches of several rounds, as C++ reads them."""

    function: int  # address of `treespec_lookup`
    structs: "ctypes.Array[ctypes.Structure]"  # a `Search` by request, without text and outputs
    searched: list[bool]  # whether to search, by round and request
    texts: list[int]  # by request, address of its tokens


_owners = itertools.count(1)


def _is_searched(misses: int) -> bool:
    """Return whether to run a search; `misses` counts the searches since an accepted proposal, this one included."""
    return misses <= BACKOFF_MISSES or misses % (2 if misses <= 4 * BACKOFF_MISSES else 4) == 0


class _Text:
    """A request's tokens in a growing array, since converting a list of 1,000 tokens takes 40 us.

    `begin` is the index of the first token to add to the history.
    """

    def __init__(self, begin: int) -> None:
        self._buffer, self._length = np.empty(1024, dtype=np.int64), 0
        self.address = address_of(self._buffer)
        self.misses = 0  # searches since the last accepted proposal
        self.owner = next(_owners)  # owner id in the history
        self._num_remembered, self.last = begin, 0

    def should_search(self) -> bool:
        """Count a search and return whether to run it: after many misses, only every second or fourth one runs."""
        self.misses += 1
        return _is_searched(self.misses)

    def update(self, tokens: list[int], further: int = 0) -> None:
        """Append the tokens that were added to `tokens` since the last call, with room for `further` ones."""
        if (needed := len(tokens) + further) > len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.empty(needed, dtype=np.int64)])
            self.address = address_of(self._buffer)
        self._buffer[self._length : len(tokens)] = tokens[self._length :]
        self._length = len(tokens)

    def add_to(self, history: History | CompiledHistory) -> None:
        new = self._buffer[self._num_remembered : self._length]
        self.last, self._num_remembered = history.add(self.owner, self.last, new), self._length

    @property
    def window(self) -> np.ndarray:
        """View of the last SEARCH_WINDOW tokens, int64."""
        return self._buffer[max(self._length - SEARCH_WINDOW, 0) : self._length]

    @property
    def window_address(self) -> tuple[int, int]:
        first = max(self._length - SEARCH_WINDOW, 0)
        return self.address + 8 * first, self._length - first


class LookupDrafter(DraftSource):
    """Model-free drafter for prompt lookup and suffix decoding."""

    name = "lookup"

    def __init__(
        self,
        library: ctypes.CDLL | None = None,  # from `lookup_library`; None for the equivalent search in numpy
        history_tokens: int = 0,  # history capacity, rounded up to a power of two; 0 disables the history
    ) -> None:
        self._library, self._capacity = library, 1 << (history_tokens - 1).bit_length() if history_tokens else 0
        self.prior, self.counts, self._rounds = _prior(), Counts(), 0
        self.own_counts: dict[str, Counts] = {}
        self.nbytes = BYTES_PER_TOKEN * self._capacity  # upper bound, for the compiled history
        self.forget()

    @property
    def held(self) -> set[str]:
        return {*self.own_counts, *self.texts}

    def forget(self, running: Sequence[Request] = ()) -> None:
        """Clear history and texts, but not the acceptance counts. Running requests add their future tokens to it."""
        self.texts = {request.request_id: _Text(len(request.tokens)) for request in running}
        self._history: History | CompiledHistory | None = None
        self._compiled: LookupSearch | None = None
        if self._library is None:
            self._history = History(self._capacity) if self._capacity else None
            return
        compiled = CompiledHistory(self._library, self._capacity) if self._capacity else None
        self._history = compiled
        self._compiled = LookupSearch(
            self._library, self.prior, PRIOR_TRIALS, GLOBAL_TRIALS, self.counts.cells, compiled
        )

    @property
    def remembered(self) -> int:
        return 0 if self._history is None else len(self._history)

    def propose(self, requests: Sequence[Request], max_depths: Sequence[int], least_value: float) -> Proposals:
        """Propose continuations of matches; in adaptive trees, the best first token has at least `least_value`."""
        self._decay()
        self._remember_all(requests)
        searches: dict[str, tuple[TokenTree, Matches]] = {}  # tree and matches by request id
        for request, depth in zip(requests, max_depths, strict=True):
            if depth and (searched := self.search(request, depth, least_value)) is not None:
                searches[request.request_id] = searched
        return self.proposals(searches)

    def proposals(self, searches: dict[str, tuple[TokenTree, Matches]]) -> Proposals:
        """Return the proposals found in a round's searches, by request id."""
        trees = {request_id: tree for request_id, (tree, _) in searches.items()}
        return Proposals(trees, partial(self._commit, searches))

    def _decay(self) -> None:
        """Count a round, and let the counts decay every DECAY_ROUNDS."""
        self._rounds += 1
        if self._rounds % DECAY_ROUNDS == 0:
            for counts in (self.counts, *self.own_counts.values()):
                counts.cells *= DECAY

    def _remember_all(self, requests: Sequence[Request]) -> None:
        for request in requests:  # before any search, so that requests of a batch match each other's latest tokens
            self._remember(request)

    def prepare_rounds(
        self, requests: Sequence[Request], depths: Sequence[int], least_value: float, rounds: int, most_new: int
    ) -> "RoundSearches | None":
        """Return the searches of the next rounds, which C++ runs; None without the compiled search.

        Arguments as in `propose`, the number of rounds, and the maximum number of tokens that a round adds to a text.
        """
        if (compiled := self._compiled) is None:
            return None
        self._remember_all(requests)
        structs, searched, texts = (STRUCTS["Search"] * len(requests))(), list[list[bool]](), list[int]()
        for i, (request, depth) in enumerate(zip(requests, depths, strict=True)):
            text, counts = self._text(request), self.own_counts.get(request.request_id)
            looks_up, owner = self._searched(request, text)
            text.update(request.tokens, rounds * most_new)
            texts.append(text.address)
            asks = bool(depth and (looks_up or owner))
            searched.append([asks and _is_searched(text.misses + 1 + i) for i in range(rounds)])
            own_counts = None if counts is None else counts.address
            structs[i] = compiled.prepared(own_counts, _least_prob(request, least_value), looks_up, owner)
        return RoundSearches(compiled.address, structs, [*itertools.chain(*zip(*searched, strict=True))], texts)

    def count_round(self, requests: Sequence[Request], depths: Sequence[int]) -> None:
        """Count a round whose searches C++ has run; arguments as in `propose`."""
        if any(depths):
            self._decay()
        for request, depth in zip(requests, depths, strict=True):
            self._text(request).misses += depth > 0

    def _searched(self, request: Request, text: "_Text") -> tuple[bool, int | None]:
        """Return whether to search the request's own text, and its owner id, or None to skip the history."""
        spec = request.spec
        return spec.allows("lookup", "lookup"), text.owner if spec.allows("suffix", "suffix") else None

    def _text(self, request: Request) -> _Text:
        if (text := self.texts.get(request.request_id)) is None:
            text = self.texts[request.request_id] = _Text(max(request.num_prompt - PROMPT_TAIL, 0))
        return text

    def _remember(self, request: Request) -> None:
        """Add a request's new tokens to the history if its `sources` include suffix decoding."""
        if self._history is not None and request.spec.allows("suffix", "suffix"):
            text = self._text(request)
            text.update(request.tokens)
            text.add_to(self._history)

    def search(self, request: Request, depth: int, least_value: float) -> tuple[TokenTree, Matches] | None:
        """Search continuations of a request's text; None without a match, or if this round's search is skipped."""
        counts, text = self.own_counts.get(request.request_id), self._text(request)
        looks_up, owner = self._searched(request, text)
        if not (looks_up or owner) or not text.should_search():
            return None
        text.update(request.tokens)
        min_prob = _least_prob(request, least_value)
        if self._compiled is not None:
            own_counts = None if counts is None else counts.address
            searched = self._compiled.search(*text.window_address, depth, own_counts, min_prob, looks_up, owner)
            return None if searched is None else (found_tree(*searched), searched[1])
        rates = self.counts.rates(self.prior, PRIOR_TRIALS)
        rates = rates if counts is None else counts.rates(rates, GLOBAL_TRIALS)
        history = self._history if owner is not None and isinstance(self._history, History) else None
        return search(text.window, depth, rates, min_prob, looks_up, history, owner or 0)

    def _commit(
        self, searches: dict[str, tuple[TokenTree, Matches]], requests: Sequence[Request], paths: Sequence[np.ndarray]
    ) -> None:
        """Count trials and hits among the children of every accepted node."""
        for request, path in zip(requests, paths, strict=True):
            tree, matches = searches[request.request_id]
            if len(path) > 1:
                self.texts[request.request_id].misses = 0
            if (request_counts := self.own_counts.get(request.request_id)) is None:
                request_counts = self.own_counts[request.request_id] = Counts()
            if self._compiled is not None:
                self._compiled.count(tree.parents, matches, path, request_counts.cells)
                continue
            for counts in (self.counts, request_counts):
                counts.cells += _count(tree, matches, path)

    def release(self, request: Request) -> None:
        """Release a request's state, after adding its output to the history."""
        if request.num_generated:
            self._remember(request)
        self.own_counts.pop(request.request_id, None)
        self.texts.pop(request.request_id, None)


def _least_prob(request: Request, least_value: float) -> float:
    """Return the minimum probability of the best first token."""
    return max(least_value if request.spec.is_adaptive else 0.0, MIN_PROB)


def found_tree(columns: Sequence[np.ndarray], matches: Matches) -> TokenTree:
    """Build a token tree with the sources "lookup" and "suffix" from the results of `LookupSearch.search`."""
    names: tuple[str, ...]
    tokens, parents, depths, probs, values = columns
    in_text, in_history = matches.classes[:, 1:] >= 0
    if not in_history.any():
        below = len(in_text)
        nodes, sources, names = np.arange(1, below + 1), np.zeros(below, dtype=np.int64), NAMES[:1]
    else:
        by_source = [1 + np.flatnonzero(proposed) for proposed in (in_text, in_history)]
        nodes, sources, names = np.concatenate(by_source), np.repeat([0, 1], [len(drawn) for drawn in by_source]), NAMES
    draws = nodes, sources, np.ones(len(nodes))
    return TokenTree(tokens, parents, depths, probs, *draws, names).with_values(values)


def _count(tree: TokenTree, matches: Matches, path: np.ndarray) -> np.ndarray:
    """Return trials and hits among the children of the path's nodes, [2, CLASSES, MAX_MATCH + 1]."""
    on_path = np.zeros(len(tree.tokens), dtype=bool)
    on_path[path] = True
    tested = 1 + np.flatnonzero(on_path[tree.parents[1:]])

    def cells(nodes: np.ndarray) -> np.ndarray:
        classes, lengths = (column[:, nodes].ravel() for column in matches)
        flat = (classes * (MAX_MATCH + 1) + lengths)[classes >= 0]
        return np.bincount(flat, minlength=CLASSES * (MAX_MATCH + 1)).reshape(CLASSES, MAX_MATCH + 1)

    return np.stack((cells(tested), cells(tested[on_path[tested]])))


def find_matches(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find earlier occurrences of the suffix of `tokens`, at most MAX_MATCH tokens long.

    Returns the last positions and lengths (int64) of the best MATCHES matches, longest first, then most recent.
    """
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])[::-1]
    back = np.arange(min(MAX_MATCH, last))
    before = ends[:, None] - back
    same = (tokens[before] == tokens[last - back]) & (before >= 0)  # a negative index wraps around
    lengths = np.logical_and.accumulate(same, axis=1).sum(1)
    best = np.argsort(-lengths, kind="stable")[:MATCHES]
    return ends[best], lengths[best]


@dataclass
class _Candidate:
    """A node of a tree under construction; classes and lengths, in the text and in the history, as in `Matches`."""

    token: int
    parent: int
    depth: int
    classes: list[int] = field(default_factory=lambda: [-1, -1])
    lengths: list[int] = field(default_factory=lambda: [-1, -1])
    votes: int = 0  # number of matches in the history that continue with this node
    prob: float = 1.0
    value: float = 1.0


def search(
    tokens: np.ndarray,  # int64 [length]
    depth: int,
    rates: np.ndarray,  # float64 [CLASSES, MAX_MATCH + 1], acceptance probability of each class
    min_prob: float,  # minimum probability of the best first token
    looks_up: bool = True,  # whether to search `tokens` themselves
    history: History | None = None,  # history to search in addition to `tokens`
    owner: int = 0,  # owner id; texts of this owner in the history are skipped
) -> tuple[TokenTree, Matches] | None:
    """Return the tree of the best continuations and its nodes' matches: the reference of `LookupSearch.search`.

    None without a match, or if no first token has the probability `min_prob`.
    """
    text, table = tokens.tolist(), rates.tolist()
    continuations: list[tuple[list[int], int, bool]] = []  # (tokens, match length, whether from the history)
    if looks_up:
        for end, length in zip(*(columns.tolist() for columns in find_matches(tokens)), strict=True):
            period = len(text) - 1 - end  # continuations past the end of the text repeat periodically
            continuations.append(([text[end + 1 + step % period] for step in range(depth)], length, False))
    if history is not None:
        for number, length in history.find(text, owner):
            continuations.append((list(islice(history.following(number), depth)), length, True))
    if not continuations:
        return None
    candidates, reached, first = [_Candidate(text[-1], -1, 0, [0, 0], [0, 0])], [0] * len(continuations), 1
    for level in range(depth):
        nodes: dict[tuple[int, int], int] = {}
        num_siblings: Counter[int] = Counter()
        for match, (tail, length, in_history) in enumerate(continuations):
            if level >= len(tail):
                continue
            above = reached[match]
            reached[match] = node = nodes.setdefault((above, tail[level]), len(candidates))
            if node == len(candidates):
                candidates.append(_Candidate(tail[level], above, level + 1))
                if not in_history:
                    candidates[node].classes[0] = min(num_siblings[above], TEXT_CLASSES - 1)
                num_siblings[above] += 1
            candidate = candidates[node]
            candidate.votes += in_history
            if candidate.lengths[in_history] < 0:
                candidate.lengths[in_history] = min(length + level, MAX_MATCH)
        _estimate_probs(candidates, first, table)
        if level == 0 and max(candidate.prob for candidate in candidates[1:]) < min_prob:
            return None
        first = len(candidates)
    values = np.array([candidate.value for candidate in candidates])
    order = np.argsort(-values, kind="stable")  # stable: a parent stays ahead of a child of equal value
    index = np.argsort(order)
    parents, ranked = index[[candidate.parent for candidate in candidates]], [candidates[node] for node in order]
    parents[0] = -1
    columns = (
        np.array([candidate.token for candidate in ranked]),
        parents[order],
        np.array([candidate.depth for candidate in ranked]),
        np.array([candidate.prob for candidate in ranked]),
        values[order],
    )
    classes = np.array([candidate.classes for candidate in ranked]).T
    matches = Matches(classes, np.array([candidate.lengths for candidate in ranked]).T)
    return found_tree(columns, matches), matches


def _estimate_probs(candidates: list[_Candidate], first: int, rates: list[list[float]]) -> None:
    """Set class, probability (the larger one of the two sources) and value of the candidates from `first` on."""
    by_parent: dict[int, list[_Candidate]] = {}
    for candidate in candidates[first:]:
        if candidate.votes:
            by_parent.setdefault(candidate.parent, []).append(candidate)
    for siblings in by_parent.values():
        total = sum(candidate.votes for candidate in siblings)
        for rank, candidate in enumerate(sorted(siblings, key=lambda candidate: -candidate.votes)):
            candidate.classes[1] = _history_class(candidate.votes, total, rank)
    for candidate in candidates[first:]:
        columns = zip(candidate.classes, candidate.lengths, strict=True)
        candidate.prob = max(rates[kind][length] for kind, length in columns if kind >= 0)
        candidate.value = candidate.prob * candidates[candidate.parent].value


def _history_class(votes: int, total: int, rank: int) -> int:
    """Return the class of a candidate from the history; see `CLASSES`."""
    if votes == total:
        return TEXT_CLASSES + (total > 1)
    if rank == 0:
        return TEXT_CLASSES + (2 if 3 * votes >= 2 * total else 3)
    return TEXT_CLASSES + min(3 + rank, 5)
