"""Verification rules against the target's distribution, exactly: every branch of drafting and verifying is replayed."""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest

from tests.helpers import enumeration
from tests.helpers.enumeration import (
    Builder,
    Drafts,
    Proposal,
    Scheme,
    Verifier,
    World,
    draft,
    engine,
    outcomes,
    output_distribution,
    paths_of,
    random_world,
    reference,
    runs,
    total_variation,
)
from tests.helpers.models import quick
from treespec.tree import TokenTree, merge
from treespec.verification.oracle import Oracle

EXACT, WRONG = 1e-12, 1e-3
DRAWN = ("rejection", "traversal")
VERIFIERS = {
    "naive, reference": reference("naive"),
    **{f"{rule}, {make.__name__}": make(rule) for rule in DRAWN for make in (reference, engine)},
}


def proposals(*names: str) -> Scheme:
    """One word for each level, such as "own0 own1 top1"."""
    return [[Proposal(int(name[-1]), name[:-1]) for name in level.split()] for level in names]


# --- ways to draft: at every node of a level, by sources apart, and by what came up so far


def apart(world: World, oracle: Oracle) -> TokenTree:
    """Each source drafts a tree of its own, so that one that drew no `a` has no children there."""
    one = draft(world, proposals("own0 own0", "free0"), oracle)
    return merge([one, draft(world, proposals("free1", "free1"), oracle)])


def adaptive(world: World, oracle: Oracle) -> TokenTree:
    """Depth before breadth: what was drawn so far, anywhere in the tree, decides where the next draw is made."""
    built, (one, other) = Builder(), world.sources

    def draw(node: int, source: int, excluded: tuple[int, ...] = ()) -> int:
        probs = world.sources[source][built.paths[node]]
        left = enumeration.restricted(probs, excluded) if excluded else probs
        return built.add(node, oracle.choose(left), source, probs, excluded)

    first = draw(0, 0)
    below = draw(first, 0)
    if built.paths[below][-1] == 0 or one[()][built.paths[first][-1]] < 0.5:
        second = draw(0, 1)
        if built.paths[second][-1] == 1:
            drawn = built.drawn(first)
            left = other[built.paths[first]].copy()
            left[list(drawn)] = 0.0
            draw(first, 1, drawn if left.any() else ())
        built.add(second, 0, 0, None)
    return built.tree()


WAYS: dict[str, tuple[int, int, Callable[[World, Oracle], TokenTree]]] = {
    name: (vocab, len(levels), partial(lambda world, oracle, scheme: draft(world, scheme, oracle), scheme=levels))
    for name, vocab, levels in [
        ("chain", 3, proposals("free0", "free1", "free0")),
        ("independent draws", 3, proposals("free0 free0", "free0 free0")),
        ("independent draws, three", 3, proposals("free0 free0 free0")),
        ("without replacement", 3, proposals("own0 own0", "own0 own0")),
        ("without replacement, four tokens", 4, proposals("own0 own0 own0")),
        ("two sources", 3, proposals("free0 free1", "free1 free0")),
        ("two sources, each without replacement", 3, proposals("own0 own0 own1 own1")),
        ("cross-source without replacement", 3, proposals("cross0 cross1", "cross1 cross0")),
        ("without chance", 3, proposals("next0 next0", "next1 top0")),
        ("mixed", 3, proposals("own0 own1 top1 next0", "free0 next1")),
        ("mixed, without chance first", 3, proposals("top1 free0 next1", "next0 free1")),
        ("deep", 2, proposals("own0 own1", "cross0 cross1 top0", "free0 next1")),
        ("deep, duplicates", 2, proposals("free0 free0", "free1", "free0 free1")),
    ]
} | {"sources apart": (3, 2, apart), "adaptive": (3, 2, adaptive)}


@cache
def drafted(name: str, seed: int, same: bool = False) -> tuple[World, Drafts]:
    vocab, depth, way = WAYS[name]
    world = random_world(seed, vocab, depth, same=same)
    return world, [(weight, tree) for weight, _, tree in outcomes(partial(way, world))]


BY_WHAT_WAS_DRAWN = {"mixed", "mixed, without chance first", "deep", "adaptive"}
"""Which draws are made, or which token is proposed without chance, depends on what was drawn before; there, rejection
may accept less than naive."""


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("seed", quick((0, 1), (0,)))
def test_lossless(name: str, seed: int) -> None:
    """And the engine accepts as many tokens as the reference, traversal most, naive least."""
    world, drafts = drafted(name, seed)
    assert sum(weight for weight, _ in drafts) == pytest.approx(1, abs=EXACT)
    results = {how: output_distribution(world, drafts, verifier) for how, verifier in VERIFIERS.items()}
    far = {how: total_variation(probs, world.joint()) for how, (probs, _) in results.items()}
    assert all(tv < EXACT for tv in far.values()), far
    for rule in DRAWN:
        assert results[f"{rule}, engine"][1] == pytest.approx(results[f"{rule}, reference"][1], abs=EXACT)
    if name not in BY_WHAT_WAS_DRAWN:
        accepted = [results[how][1] for how in ("naive, reference", "rejection, engine", "traversal, engine")]
        assert (np.diff(accepted) >= -EXACT).all(), accepted


@pytest.mark.parametrize("name", ["independent draws", "two sources, each without replacement", "mixed"])
@pytest.mark.parametrize("rule", DRAWN)
def test_nothing_follows_an_end(name: str, rule: str) -> None:
    """A node without a distribution ends the output, and the tokens up to it keep theirs."""
    world, drafts = drafted(name, 0)
    world = World(*world[:4], end=2)
    emitted, _ = output_distribution(world, drafts, engine(rule))
    assert total_variation(emitted, world.joint()) < EXACT


@pytest.mark.parametrize("name", ["chain", "cross-source without replacement", "deep"])
@pytest.mark.parametrize("rule", DRAWN)
@pytest.mark.parametrize("make", [reference, engine])
def test_a_perfect_draft_is_accepted_at_once(name: str, rule: str, make: Callable[[str], Verifier]) -> None:
    """q = p: the path follows the first draw of every node down to a leaf."""
    world, drafts = drafted(name, 1, same=True)
    for _, tree in drafts:
        firsts = [0]
        while (below := tree.parents[tree.draw_nodes] == firsts[-1]).any():
            firsts.append(int(tree.draw_nodes[below.argmax()]))
        assert all(path == firsts for weight, (path, _) in runs(tree, world, make(rule)).values() if weight > EXACT)


# --- block verification


def block_verification(tree: TokenTree, world: World, oracle: Oracle) -> tuple[list[int], int]:
    """Algorithm 2 of arXiv 2403.10444, on a chain: every prefix has its own coin, and the longest that wins is kept."""
    paths, length = paths_of(tree), len(tree) - 1
    big = [world.target[path] for path in paths]
    small = [tree.draft_probs[row] for row in tree.draw_rows] if tree.draw_rows is not None else []
    joint, kept, kept_joint = 1.0, 0, 1.0
    for i in range(1, length + 1):
        token = tree.tokens[i]
        joint = min(joint * big[i - 1][token] / small[i - 1][token], 1.0)
        wins = joint
        if i < length:
            surplus = np.maximum(joint * big[i] - small[i], 0.0).sum()
            wins = surplus / (surplus + (1.0 - joint)) if surplus + (1.0 - joint) > 0 else 1.0
        if oracle.flip(wins):
            kept, kept_joint = i, joint
    rest = big[kept] if kept == length else np.maximum(kept_joint * big[kept] - small[kept], 0.0)
    return list(range(kept + 1)), oracle.choose(rest)


@pytest.mark.parametrize("make", [reference, engine])
def test_traversal_of_a_chain_is_block_verification(make: Callable[[str], Verifier]) -> None:
    """For every drafted chain the same distribution of accepted length and next token."""

    def ends(world: World, tree: TokenTree, verifier: Verifier) -> np.ndarray:
        probs = np.zeros((len(tree), world.vocab))
        for weight, (path, token) in runs(tree, world, verifier).values():
            probs[len(path) - 1, token] += weight
        return probs

    apart = 0.0
    for seed in range(2):
        world, drafts = drafted("chain", seed)
        emitted, _ = output_distribution(world, drafts, block_verification)
        assert total_variation(emitted, world.joint()) < EXACT
        for weight, tree in drafts:
            traversal, block = ends(world, tree, make("traversal")), ends(world, tree, block_verification)
            assert np.abs(traversal - block).max() < EXACT
            apart += weight * np.abs(traversal - ends(world, tree, make("rejection"))).max()
    assert apart > WRONG  # the comparison could tell
