"""Prompt lookup against a search token by token; its counts; its compiled twin."""

import numpy as np
import pytest

from tests.helpers.enumeration import paths_of
from tests.helpers.libraries import LIBRARIES
from tests.helpers.lookups import LOOKUP, PAST, ask, new, propose, request_of
from tests.helpers.models import quick
from tests.helpers.quantized_checkpoints import needs_compiler
from treespec import SpecConfig
from treespec.drafters.lookup.lookup_drafter import DECAY_ROUNDS, SEARCH_WINDOW, LookupDrafter, find_matches
from treespec.request import Request
from treespec_kernels.cpu.cpu_library import find_compiler
from treespec_kernels.cpu.lookup_cpu import MATCHES, MAX_MATCH, lookup_library


def naive_matches(tokens: list[int]) -> list[tuple[int, int]]:
    """(last position, length) of every earlier occurrence of the end, best first."""
    found = []
    for end in range(len(tokens) - 1):
        length = 0
        while length < MAX_MATCH and end >= length and tokens[end - length] == tokens[-1 - length]:
            length += 1
        if length:
            found.append((end, length))
    return sorted(found, key=lambda match: (-match[1], -match[0]))[:MATCHES]


@pytest.mark.parametrize("seed", range(12))
def test_against_a_search_token_by_token(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, rng.integers(2, 12), rng.integers(1, 90)).tolist()
    depth = int(rng.integers(1, 8))
    matches = naive_matches(tokens)
    if len(tokens) > 1:
        ends, lengths = find_matches(np.array(tokens))
        assert list(zip(ends.tolist(), lengths.tolist(), strict=True)) == matches
    expected: set[tuple[int, ...]] = {()}
    for end, _ in matches:
        text = list(tokens)
        for step in range(depth):  # a continuation that reaches the end goes on with what it wrote itself
            text.append(text[end + 1 + step])
        path = text[len(tokens) :]
        expected |= {tuple(path[: i + 1]) for i in range(depth)}
    tree = propose(new(), request_of(tokens), depth)
    assert sorted(paths_of(tree)) == sorted(expected), "every path once"
    assert (np.diff(tree.values) <= 0).all(), "the likeliest first, so that a smaller tree is its beginning"
    if matches:
        assert tree.tokens[1] == tokens[matches[0][0] + 1], "the best match's token comes first"


def test_a_round_is_counted_after_the_next_was_proposed() -> None:
    """As captured rounds do; each round's counts are of its own proposals, of which those below the path are judged."""
    drafter, request = new(), request_of([7, 1, 2, 3, 9, 2, 5, 1, 2])
    tree, count_first = ask(drafter, request, 2)
    assert tree.probs[tree.tokens == 3] > tree.probs[tree.tokens == 5], "two tokens matched before 3, one before 5"
    found = np.flatnonzero(tree.tokens == 3)[:1]
    request.tokens += [3, 9]
    _, count_second = ask(drafter, request, 1)
    count_first(0, *found)
    late, counts = drafter.counts, (prompt := new()).counts
    _, count = ask(prompt, request_of([7, 1, 2, 3, 9, 2, 5, 1, 2]), 2)
    count(0, *found)
    assert late.hits.sum() == 1 and (late.cells == counts.cells).all()
    assert late.trials.sum() == sum((tree.parents == node).sum() for node in (0, *found))
    count_second(0)
    assert late.hits.sum() == 1 and late.trials.sum() > counts.trials.sum(), "the second round has its own"


def test_counts_follow_what_held() -> None:
    for holds in (True, False):
        drafter, request = new(), request_of([1, 2, 3, 1, 2])
        for _ in range(16):
            tree, count = ask(drafter, request, 1)
            count(*([0, 1] if holds else [0]))
        assert tree.probs[1] > 0.85 if holds else tree.probs[1] < 0.08
        other = propose(drafter, request_of([1, 2, 3, 1, 2]), 1)
        assert other.probs[1] > 0.7 if holds else other.probs[1] < 0.35, "other requests learn from it too"


def test_a_growing_text_is_followed() -> None:
    drafter, request, rng = new(), request_of([1, 2]), np.random.default_rng(0)
    for _ in range(16):
        request.tokens.extend(rng.integers(0, 9, rng.integers(0, 30)).tolist())
        own, fresh = propose(drafter, request, 4), propose(new(), request_of(request.tokens), 4)
        assert sorted(paths_of(own)) == sorted(paths_of(fresh))


def test_barren_searches_become_rare() -> None:
    """A text that never goes on as before is searched every fourth time in the end, and at once again after a hit."""
    drafter, request = new(), request_of([1, 2, 3, 1, 2])
    searched = [len(propose(drafter, request, 1)) > 1 for _ in range(200)]
    assert all(searched[:16]) and sum(searched[16:64]) == 24 and sum(searched[100:200]) == 25
    while len((asked := ask(drafter, request, 1))[0]) == 1:
        pass
    asked[1](0, 1)
    assert all(len(propose(drafter, request, 1)) > 1 for _ in range(16))


def test_hopeless_guesses_are_left_out_and_tried_again() -> None:
    drafter, request = new(), request_of([1, 2, 3, 1, 2])
    sizes = []
    for _ in range(2000):
        tree, count = ask(drafter, request, 1)
        sizes.append(len(tree))
        count(0)
    assert min(sizes) == 1, "at some point it is given up"
    quiet = sizes.index(1)
    assert 2 in sizes[quiet:] and sizes[quiet:].count(2) < 0.2 * len(sizes[quiet:]), "and tried now and then"


def compiled(remembers: int = 0) -> LookupDrafter:
    return LookupDrafter(lookup_library(find_compiler(), LIBRARIES), remembers)


MIXED = (SpecConfig(), LOOKUP, PAST, SpecConfig(sources=("ssm",)))


@needs_compiler
@pytest.mark.parametrize("remembers", quick((0, 1, 16, 64, 4000), (0, 16, 4000)))
@pytest.mark.parametrize("seed", range(2))
def test_compiled_and_numpy_agree_to_the_bit(seed: int, remembers: int) -> None:
    """Over rounds of texts that grow, come and go, and after all was forgotten: trees, places, counts and history."""
    rng = np.random.default_rng([seed, remembers])
    words, longest = int(rng.integers(2, 4 if 0 < remembers < 100 else 12)), 6 if 0 < remembers < 20 else 60
    drafters, nodes, past = (new(remembers), compiled(remembers)), 0, 0

    def fresh() -> Request:
        return request_of(rng.integers(0, words, rng.integers(1, longest)).tolist(), MIXED[rng.integers(4)])

    requests = [fresh() for _ in range(4)]
    for number in range(3 * DECAY_ROUNDS):
        asked = [request for request in requests if rng.random() < 0.8]  # the others wait, or are decoded plainly
        depths, least = rng.integers(0, 20, len(asked)).tolist(), float(rng.random() ** 3)
        proposals = [drafter.propose(asked, depths, least) for drafter in drafters]
        assert proposals[0].trees.keys() == proposals[1].trees.keys()
        for tree, other in zip(*(each.trees.values() for each in proposals), strict=True):
            tree.check_integrity()
            for name in (
                *("tokens", "parents", "depths", "probs", "values"),
                *("draw_nodes", "draw_sources", "draw_probs"),
            ):
                assert_same(getattr(tree, name), getattr(other, name))
            assert tree.source_names == other.source_names
            nodes, past = nodes + len(tree), past + ("suffix" in tree.source_names)
        judged = [(request, tree) for request in asked if (tree := proposals[0].trees.get(request.request_id))]
        paths = [tree.path_to(int(rng.integers(len(tree)))) for _, tree in judged]
        for each in proposals:
            each.commit([request for request, _ in judged], paths)
        for request in asked:
            request.tokens += [int(rng.integers(words))]
        for (request, tree), path in zip(judged, paths, strict=True):
            request.tokens[-1:-1] = tree.tokens[path[1:]].tolist()
        for request in asked:
            if rng.random() < 0.3:  # it writes what another one wrote
                request.tokens += requests[rng.integers(4)].tokens[-12 : -int(rng.integers(1, 6))]
        if rng.random() < 0.2:
            gone = requests.pop(int(rng.integers(4)))
            for drafter in drafters:
                drafter.release(gone)
            requests.append(fresh())
        if number == 2 * DECAY_ROUNDS:
            for drafter in drafters:
                drafter.forget(requests)
        lasts = [{name: text.last for name, text in drafter.texts.items()} for drafter in drafters]
        assert lasts[0] == lasts[1] and drafters[0].remembered == drafters[1].remembered
    assert nodes > 500 and past >= (5 if remembers > 1 else 0), "there were guesses"
    one, other = drafters
    assert_same(one.counts.cells, other.counts.cells)
    assert one.own_counts.keys() == other.own_counts.keys()
    for request_id, own in one.own_counts.items():
        assert_same(own.cells, other.own_counts[request_id].cells)


def assert_same(mine: np.ndarray, theirs: np.ndarray) -> None:
    assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs)


@needs_compiler
def test_only_the_end_of_a_long_text_is_searched() -> None:
    text = [1, 2, 3, *range(10, 10 + SEARCH_WINDOW)]
    for make in (new, compiled):
        assert len(propose(make(), request_of([*text, 1, 2]), 2)) == 1
        assert len(propose(make(), request_of([*text, 12, 13]), 2)) > 1
