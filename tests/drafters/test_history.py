"""The ring of what an engine wrote, against a search token by token; what votes are called."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.helpers.enumeration import paths_of
from tests.helpers.lookups import BOTH, PAST, ask, new, propose, request_of, write
from tests.helpers.models import quick, random_prompts
from treespec import SpecConfig
from treespec.drafters.lookup.history import History
from treespec.drafters.lookup.lookup_drafter import NAMES, PRIOR_TRIALS, PROMPT_TAIL, LookupDrafter
from treespec.request import Request
from treespec.tree import TokenTree
from treespec_kernels.cpu.lookup_cpu import MAX_MATCH, PAST_MATCHES, STEPS, TEXT_CLASSES, Matches

SOLE, UNANIMOUS, MAJORITY, PLURALITY, SECOND, LATER = range(TEXT_CLASSES, TEXT_CLASSES + 6)


@dataclass
class Written:
    """Everything that was ever written, whole; what is no longer kept is left out by its number."""

    capacity: int
    count: int = 0
    texts: list[tuple[int, list[int], list[int]]] = field(default_factory=list)  # owner, numbers, tokens

    def add(self, owner: int, last: int, tokens: Sequence[int]) -> int:
        for token in tokens:
            self.count += 1
            text = next((text for text in self.texts if last and text[1][-1] == last and self.kept(last)), None)
            if text is None:
                self.texts.append(text := (owner, [], []))
            text[1].append(last := self.count)
            text[2].append(token)
        return last

    def kept(self, number: int) -> bool:
        return self.count - number < self.capacity

    def places(self) -> list[tuple[int, int, list[int], list[int]]]:
        """(number, owner, tokens up to it, the token last, tokens behind it) of all that is kept, latest first."""
        found = []
        for owner, numbers, tokens in self.texts:
            first = sum(not self.kept(number) for number in numbers)
            for at in range(first, len(numbers)):
                found.append((numbers[at], owner, tokens[first : at + 1], tokens[at + 1 :]))
        return sorted(found, reverse=True)

    def find(self, text: Sequence[int], owner: int) -> list[tuple[int, int]]:
        for least in (6, 3):
            matches = []
            for number, whose, before, behind in self.places():
                length = 0
                while length < min(MAX_MATCH, len(text), len(before)) and before[-1 - length] == text[-1 - length]:
                    length += 1
                if length >= least:
                    matches.append((number, length, whose != owner and bool(behind)))
            if good := [(number, length) for number, length, is_good in matches[:STEPS] if is_good]:
                return sorted(good, key=lambda match: (-match[1], -match[0]))[:PAST_MATCHES]
        return []


@pytest.mark.parametrize("capacity", quick((1, 2, 8, 64, 512), (2, 8, 512)))
@pytest.mark.parametrize("seed", range(2))
def test_against_a_search_token_by_token(capacity: int, seed: int) -> None:
    """Texts of several owners grow side by side, some go on after their beginning, or all of them, was forgotten."""
    rng = np.random.default_rng([seed, capacity])
    words, history, naive = int(rng.integers(2, 5)), History(capacity), Written(capacity)
    texts: dict[int, list[int]] = {owner: [] for owner in range(1, 5)}
    last, matches, longest = dict.fromkeys(texts, 0), 0, 0
    for _ in range(120):
        owner = int(rng.integers(1, 5))
        more = rng.integers(0, words, rng.integers(0, 9))
        if rng.random() < 0.4:  # copied, so that there are long matches
            other = texts[int(rng.integers(1, 5))]
            at = int(rng.integers(0, len(other) + 1))
            more = np.array(other[at : at + 20], dtype=np.int64)
        number = history.add(owner, last[owner], more)
        assert number == naive.add(owner, last[owner], more.tolist())
        last[owner] = number
        texts[owner] += more.tolist()
        assert len(history) == min(sum(map(len, texts.values())), capacity)
        asking = int(rng.integers(1, 5))
        end = texts[asking] if rng.random() < 0.5 else rng.integers(0, words, rng.integers(0, 8)).tolist()
        found = history.find(end, asking)
        assert found == naive.find(end, asking)
        behind = {place: tokens for place, _, _, tokens in naive.places()}
        for place, length in found:
            assert list(history.following(place)) == behind[place]
            matches, longest = matches + 1, max(longest, length)
    expected = {1: (0, 0), 2: (0, 0), 8: (10, 3), 64: (50, 9), 512: (200, MAX_MATCH)}[capacity]
    assert matches >= expected[0] and longest >= expected[1], "there was something to find"


# --- what is told apart of a guess


def found_after(
    drafter: LookupDrafter, tokens: list[int], spec: SpecConfig = PAST, depth: int = 1
) -> tuple[Request, TokenTree, Matches]:
    """A request of these tokens, its tree, and what was found for it."""
    request = request_of(tokens, spec)
    tree = propose(drafter, request, depth)
    found = drafter.search(request, depth, 0.0)
    assert found is not None
    return request, tree, found[1]


@pytest.mark.parametrize(
    ("behind", "places"),
    [
        ([7], {7: SOLE}),
        ([7, 7], {7: UNANIMOUS}),
        ([7] * 5, {7: UNANIMOUS}),
        ([7, 8, 7], {7: MAJORITY, 8: SECOND}),
        ([8, 7, 7, 9, 7, 7], {7: MAJORITY, 8: LATER, 9: SECOND}),
        ([7, 7, 8, 7, 8], {7: PLURALITY, 8: SECOND}),
        ([7, 8], {8: PLURALITY, 7: SECOND}),
        ([7, 8, 9], {9: PLURALITY, 8: SECOND, 7: LATER}),
        ([7, 8, 9, 6, 7], {7: PLURALITY, 6: SECOND, 8: LATER, 9: LATER}),
    ],
)
def test_places_by_votes(behind: list[int], places: dict[int, int]) -> None:
    """One text each goes on with these tokens behind the same three; of equally many votes the latest come first."""
    drafter = new(1000)
    for token in behind:
        write(drafter, [1, 2, 3, token])
    _, tree, found = found_after(drafter, [9, 1, 2, 3])
    assert dict(zip(tree.tokens[1:].tolist(), found.classes[1, 1:].tolist(), strict=True)) == places
    assert (found.classes[0, 1:] == -1).all() and (found.lengths[0, 1:] == -1).all()
    assert (found.lengths[1, 1:] == 3).all()
    for node, prob in zip(tree.tokens.tolist()[1:], tree.probs.tolist()[1:], strict=True):
        assert prob == PRIOR_TRIALS * drafter.prior[places[node], 3] / PRIOR_TRIALS, "nothing was counted yet"


def test_votes_are_counted_at_each_node() -> None:
    """A match votes only below what it has itself gone on with, and no longer where its text has ended."""
    drafter = new(1000)
    for tail in ([7, 5], [7, 5], [7, 6], [8, 4], [7]):
        write(drafter, [1, 2, 3, *tail])
    _, tree, found = found_after(drafter, [0, 1, 2, 3], depth=3)
    classes, lengths = (
        dict(zip(paths_of(tree), own[1].tolist(), strict=True)) for own in (found.classes, found.lengths)
    )
    assert classes == {(): 0, (7,): MAJORITY, (8,): SECOND, (7, 5): MAJORITY, (7, 6): SECOND, (8, 4): SOLE}
    assert all(lengths[path] == 2 + len(path) for path in classes if path)


def test_a_token_of_both_sources_has_the_larger_probability() -> None:
    """And a draw of each; a node of one source has that one's."""
    for own, past, larger in (([1, 2, 3], [0, 1, 2, 3], 1), ([4, 5, 0, 1, 2, 3], [1, 2, 3], 0)):
        drafter = new(1000)
        for _ in range(2):
            write(drafter, [*past, 7, 20])
        _, tree, found = found_after(drafter, [*own, 7, 30, 4, 5, 0, 1, 2, 3], BOTH, depth=2)
        (seven,) = np.flatnonzero(tree.parents == 0)
        assert tree.tokens[seven] == 7 and found.classes[:, seven].tolist() == [0, UNANIMOUS]
        both = drafter.prior[[0, UNANIMOUS], found.lengths[:, seven]].tolist()
        assert tree.probs[seven] == pytest.approx(max(both)) and max(both) == both[larger] > min(both)
        assert tree.sources_of(seven) == NAMES == ("lookup", "suffix")
        assert sorted(tree.draw_sources[tree.draw_nodes == seven].tolist()) == [0, 1]
        below = {int(tree.tokens[node]): tree.sources_of(node) for node in np.flatnonzero(tree.parents == seven)}
        assert below == {30: ("lookup",), 20: ("suffix",)}
        assert len(tree.draw_nodes) == 4


# --- what is remembered, and of whom


def guesses(drafter: LookupDrafter, tokens: list[int], spec: SpecConfig = PAST, depth: int = 1) -> set[int]:
    """The first guesses of a request with these tokens, which are remembered, too."""
    return set(propose(drafter, request_of(tokens, spec), depth).tokens[1:].tolist())


def test_a_running_request_is_searched_by_others_and_not_by_itself() -> None:
    drafter = new(1000)
    asked = [request_of([61, 62, 63], PAST), request_of([61, 62, 63, 64], PAST)]
    trees = drafter.propose(asked, [2, 2], 0.0).trees
    assert [(name, tree.tokens.tolist()) for name, tree in trees.items()] == [(asked[0].request_id, [63, 64])]
    running = request_of([1, 2, 3, 4, 5, 6], PAST)
    assert len(propose(drafter, running, 2)) == 1
    assert guesses(drafter, [1, 2, 3]) == {4}
    running.tokens += [1, 2, 3]
    assert len(propose(drafter, running, 2)) == 1, "its own text is the business of lookup"
    assert guesses(drafter, [8, 7, 6, 9, 8, 7, 6], BOTH) == {9}
    assert guesses(drafter, [5, 6, 1]) == {2}


def test_release_remembers_what_came_last() -> None:
    """The last round's tokens were in no search, and those of a request that was decoded plainly in none at all."""
    drafter = new(1000)
    drafted, plain = request_of([1, 2, 3], PAST), request_of([11, 12, 13], PAST)
    propose(drafter, drafted, 2)
    for request in (drafted, plain):
        request.tokens += [request.tokens[0] + 20]
        drafter.release(request)
    drafter.release(request_of([40, 41, 42], PAST))
    assert drafter.remembered == 8, "nothing was written for the third"
    assert guesses(drafter, [1, 2, 3]) == {21} and guesses(drafter, [11, 12, 13]) == {31}
    again = Request([1, 2, 3], drafted.params, PAST, request_id=drafted.request_id)  # an id that comes back
    assert propose(drafter, again, 1).tokens.tolist() == [3, 21]


def test_the_end_of_a_prompt_is_remembered_with_its_output() -> None:
    (prompt,) = random_prompts((3 * PROMPT_TAIL,))
    for plainly in (True, False):
        drafter, request = new(1000), request_of(prompt, PAST)
        request.tokens += [600, 601]
        if not plainly:
            propose(drafter, request, 1)
        drafter.release(request)
        assert drafter.remembered == PROMPT_TAIL + 2
        assert guesses(drafter, prompt) == {600} and guesses(drafter, prompt[-PROMPT_TAIL:][:3]) == {
            prompt[-PROMPT_TAIL + 3]
        }
        assert guesses(drafter, prompt[-PROMPT_TAIL - 3 : -PROMPT_TAIL]) == set()


@pytest.mark.parametrize("sources", [(), ("lookup",), ("ssm", "grammar")])
def test_requests_without_suffix_neither_give_nor_take(sources: tuple[str, ...]) -> None:
    drafter, apart = new(1000), SpecConfig(sources=sources)
    for tokens in ([1, 2, 3, 4], [4, 5, 6, 7]):
        write(drafter, tokens, apart)
        request = request_of(tokens, apart)
        propose(drafter, request, 1)
        request.tokens.append(8)
        drafter.release(request)
    assert drafter.remembered == 0
    write(drafter, [1, 2, 3, 4])
    assert drafter.remembered == 4
    assert guesses(drafter, [1, 2, 3], apart) == set() and guesses(drafter, [1, 2, 3]) == {4}


def test_forget() -> None:
    """What running and plain requests have written is forgotten too; what they go on with is remembered."""
    drafter = new(1000)
    write(drafter, [1, 2, 3, 4])
    running, plain = request_of([11, 12, 13], PAST), request_of([21, 22, 23], PAST)
    for request in (running, plain):
        request.tokens += [request.tokens[0] + 3, 80]
    _, count = ask(drafter, running, 1)
    drafter.forget([running, plain])
    count(0)
    drafter.forget([running, plain])
    assert drafter.remembered == 0
    assert guesses(drafter, [1, 2, 3]) == guesses(drafter, [11, 12, 13]) == set()
    before = drafter.remembered
    for request in (running, plain):
        request.tokens += [request.tokens[0] + 5, request.tokens[0] + 6, request.tokens[0] + 7]
        propose(drafter, request, 1)
        request.tokens += [request.tokens[0] + 8]
        drafter.release(request)
    assert drafter.remembered == before + 8
    for first in (11, 21):
        assert guesses(drafter, [first, first + 1, first + 2]) == set()
        assert guesses(drafter, [first + 5, first + 6, first + 7]) == {first + 8}
