"""Token trees: merge as the union of path sets with every draw kept, and the greedy walk."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.enumeration import Path, paths_of
from tests.helpers.models import greedy, random_prompts, tiny_llm
from treespec import SpecConfig
from treespec.drawing.recording import watch
from treespec.tree import TokenTree, merge

ROOT = 5
NAMES = ("a", "b", "c")
Draw = tuple[Path, str, float]


def build(paths: Sequence[Path], probs: Sequence[float], draws: Sequence[Draw], names: tuple[str, ...]) -> TokenTree:
    """A tree with the given nodes below the root, in this order."""
    index = {(): 0} | {path: i for i, path in enumerate(paths, start=1)}
    return TokenTree(
        tokens=np.array([ROOT] + [path[-1] for path in paths]),
        parents=np.array([-1] + [index[path[:-1]] for path in paths]),
        depths=np.array([0] + [len(path) for path in paths]),
        probs=np.array([1.0, *probs]),
        draw_nodes=np.array([index[path] for path, _, _ in draws], dtype=np.int64),
        draw_sources=np.array([names.index(name) for _, name, _ in draws], dtype=np.int64),
        draw_probs=np.array([q for _, _, q in draws], dtype=np.float64),
        source_names=names,
    )


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12) -> TokenTree:
    """A tree over few tokens, so that trees overlap; nodes in any order that puts parents first, several draws each."""
    names = draw(st.permutations(NAMES).map(lambda p: tuple(p[:2])))
    paths: list[Path] = []
    for _ in range(draw(st.integers(0, max_nodes))):
        above = draw(st.sampled_from([(), *paths]))
        path = (*above, draw(st.integers(0, 3)))
        if path not in paths:
            paths.append(path)
    probability = st.floats(0.0, 1.0, allow_nan=False)
    probs = [draw(probability) for _ in paths]
    draws = [(path, draw(st.sampled_from(names)), draw(probability)) for path in paths]
    draws += [
        (path, draw(st.sampled_from(names)), draw(probability)) for path in paths if draw(st.booleans())
    ]  # the same node again
    draws = draw(st.permutations(draws))
    return build(paths, probs, draws, names)


def draws_of(tree: TokenTree) -> list[Draw]:
    paths, names = paths_of(tree), tree.source_names
    each = zip(tree.draw_nodes, tree.draw_sources, tree.draw_probs, strict=True)
    return [(paths[child], names[source], float(q)) for child, source, q in each]


def probs_of(tree: TokenTree) -> dict[Path, float]:
    return dict(zip(paths_of(tree), tree.probs.tolist(), strict=True))


@given(st.lists(trees(), min_size=1, max_size=4))
def test_merge_is_the_union_of_paths(several: list[TokenTree]) -> None:
    merged = merge(several)
    paths = paths_of(merged)
    assert set(paths) == {path for tree in several for path in paths_of(tree)}
    assert len(paths) == len(set(paths)), "siblings carry different tokens"
    merged.check_integrity()
    assert merged.tokens[0] == ROOT
    for path, prob in probs_of(merged).items():
        assert prob == max(probs_of(tree).get(path, 0.0) for tree in several)


@given(st.lists(trees(), min_size=2, max_size=4))
def test_merge_keeps_every_draw_in_order(several: list[TokenTree]) -> None:
    merged = merge(several)
    assert draws_of(merged) == [each for tree in several for each in draws_of(tree)]
    for node, path in enumerate(paths_of(merged)):
        sources = [name for drawn, name, _ in draws_of(merged) if drawn == path]
        assert merged.sources_of(node) == tuple(dict.fromkeys(sources))


def test_different_roots_are_refused() -> None:
    with pytest.raises(ValueError, match=r"different roots.*\[5, 6\]"):
        merge([TokenTree.root(5), TokenTree.root(6)])


@given(trees(max_nodes=20))
def test_values_and_the_mask(tree: TokenTree) -> None:
    paths, probs = paths_of(tree), probs_of(tree)
    for node, path in enumerate(paths):
        value = np.prod([probs[path[:depth]] for depth in range(len(path) + 1)])
        assert tree.values[node] == pytest.approx(float(value))
        if node:
            assert tree.values[node] <= tree.values[tree.parents[node]]
        ancestors = [i for i, other in enumerate(paths) if path[: len(other)] == other]
        assert np.flatnonzero(tree.visible[node]).tolist() == ancestors
        assert [paths[i] for i in tree.path_to(node)] == [path[:depth] for depth in range(len(path) + 1)]


@given(trees(max_nodes=20), st.data())
def test_keep(tree: TokenTree, data: st.DataObject) -> None:
    paths = paths_of(tree)
    wanted = data.draw(st.lists(st.integers(0, len(tree) - 1)))
    kept = sorted({int(i) for node in [0, *wanted] for i in tree.path_to(node)})
    smaller = tree.keep(np.array(kept))
    chosen = {paths[i] for i in kept}
    assert paths_of(smaller) == [paths[i] for i in kept]
    assert probs_of(smaller) == {path: prob for path, prob in probs_of(tree).items() if path in chosen}
    assert draws_of(smaller) == [each for each in draws_of(tree) if each[0] in chosen]
    assert smaller.source_names == tree.source_names
    smaller.check_integrity()


@given(trees(), st.data())
def test_best(tree: TokenTree, data: st.DataObject) -> None:
    """The nodes of the largest value, of equal ones the first, whether or not they are numbered by falling value."""
    count = data.draw(st.integers(1, len(tree) + 1))
    ranked = sorted(range(len(tree)), key=lambda node: (-tree.values[node], node))
    for given_tree, order in ((tree, sorted(ranked[:count])), (in_order(tree, ranked), range(min(count, len(tree))))):
        best = given_tree.best(count)
        best.check_integrity()
        chosen = np.array(order)
        assert best.tokens.tolist() == given_tree.tokens[chosen].tolist()
        assert best.values.tolist() == given_tree.values[chosen].tolist()
        fresh = replace(best)
        assert best.values.tolist() == fresh.values.tolist(), "what is handed on is what would be computed"
        assert len(best.draw_nodes) == np.isin(given_tree.draw_nodes, chosen).sum()


def in_order(tree: TokenTree, order: list[int]) -> TokenTree:
    """The same tree, its nodes in another order that puts parents first."""
    index = np.argsort(order)
    parents = np.array([-1, *index[tree.parents[order[1:]]]])
    nodes = tree.tokens[order], parents, tree.depths[order], tree.probs[order]
    return TokenTree(*nodes, index[tree.draw_nodes], tree.draw_sources, tree.draw_probs, tree.source_names)


@given(trees(max_nodes=20), st.data())
def test_the_greedy_walk(tree: TokenTree, data: st.DataObject) -> None:
    choices = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(tree), max_size=len(tree))))
    path = [0]
    while True:
        below = [
            node
            for node in range(len(tree))
            if tree.parents[node] == path[-1] and tree.tokens[node] == choices[path[-1]]
        ]
        if not below:
            break
        assert len(below) == 1
        path.append(below[0])
    assert tree.follow(choices.tolist()).tolist() == path
    text = [*tree.tokens[path[1:]].tolist(), int(choices[path[-1]])]
    assert tree.match(text).tolist() == path == tree.match(text[:-1]).tolist()


# --- trees of a running engine


@pytest.mark.parametrize("name", ["dynamic", "auto", "static", "fixed"])
def test_trees_of_the_engine(name: str) -> None:
    """Sound, within budget and depth, every node drawn, and values are what drafts said."""
    spec = {
        "dynamic": SpecConfig(nodes=24, max_depth=5),
        "auto": SpecConfig(max_depth=4),
        "static": SpecConfig(branching=(4, 2, 1)),
        "fixed": SpecConfig(nodes=2, max_depth=3),
    }[name]
    llm = tiny_llm()
    with watch(llm.engine) as rounds:
        llm.generate(random_prompts((5, 40, 61)), greedy(16), spec=spec)
    assert len(rounds) > 9
    sizes = [len(each.tree) for each in rounds]
    for each in rounds:
        each.tree.check_integrity()
        assert len(each.tree) <= spec.max_nodes
        assert each.tree.depths.max() <= spec.max_depth
        assert (each.tree.probs <= 1.0).all() and (each.tree.draw_probs <= 1.0).all()
        assert set(each.tree.source_names) <= {"ssm-1", "ssm-2", "ssm-3", "lookup"}
    if name == "static":
        whole = [each.tree for each in rounds if each.tree.depths.max() == 3]
        assert whole and all(len(tree) == 1 + 4 + 8 + 8 for tree in whole)
        for tree in whole:
            children = Counter(tree.parents[1:].tolist())
            assert all(children[node] == (4, 2, 1, 0)[tree.depths[node]] for node in range(len(tree)))
    if name in ("dynamic", "fixed"):
        assert max(sizes) == spec.max_nodes
