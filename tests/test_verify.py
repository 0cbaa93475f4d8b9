"""Verification rules against the target's distribution, exactly: every branch of drafting and verifying is replayed."""

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from tests import enumeration
from tests.enumeration import (
    Builder,
    Drafts,
    Proposal,
    Scheme,
    Verifier,
    World,
    distance,
    draft,
    drafts_of,
    engine,
    output_distribution,
    paths_of,
    random_world,
    reference,
    runs,
)
from treespec.tree import TokenTree, merge
from treespec.verification import verify
from treespec.verification.oracle import Oracle

EXACT, WRONG = 1e-12, 1e-3
SEEDS = (0, 1)
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
        probs = world.sources[source][built.path(node)]
        left = enumeration.restricted(probs, excluded) if excluded else probs
        return built.add(node, oracle.choose(left), source, probs, excluded)

    first = draw(0, 0)
    below = draw(first, 0)
    if built.tokens[below] == 0 or one[()][built.tokens[first]] < 0.5:
        second = draw(0, 1)
        if built.tokens[second] == 1:
            drawn = built.drawn(first)
            left = other[built.path(first)].copy()
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
    return world, drafts_of(partial(way, world))


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("seed", [0, 1])
def test_lossless(name: str, seed: int) -> None:
    world, drafts = drafted(name, seed)
    assert sum(weight for weight, _ in drafts) == pytest.approx(1, abs=EXACT)
    far = {how: distance(world, drafts, verifier) for how, verifier in VERIFIERS.items()}
    assert all(tv < EXACT for tv in far.values()), far


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("rule", DRAWN)
def test_the_engine_goes_the_way_of_the_reference(name: str, rule: str) -> None:
    """The same questions to the oracle, with the same probabilities, and after the same answers the same result."""
    world, drafts = drafted(name, 1)
    for _, tree in drafts[:: max(1, len(drafts) // 50)]:
        ours, theirs = runs(tree, world, engine(rule)), runs(tree, world, reference(rule))
        for answers in ours.keys() | theirs.keys():
            weight, result = ours.get(answers, (0.0, None))
            expected_weight, expected = theirs.get(answers, (0.0, None))
            assert weight == pytest.approx(expected_weight, abs=EXACT)
            assert result == expected or weight < EXACT


# --- negative controls: what the literature's mistakes do, seen by the same enumeration


def with_draws(tree: TokenTree, keep: np.ndarray) -> TokenTree:
    """The tree with these draws, in this order; every node must keep one."""
    draws = tree.draws
    assert draws.rows is not None and draws.excluded is not None
    return dataclasses.replace(
        tree,
        draws=dataclasses.replace(
            draws,
            parents=draws.parents[keep],
            children=draws.children[keep],
            sources=draws.sources[keep],
            probs=draws.probs[keep],
            rows=draws.rows[keep],
            excluded=tuple(draws.excluded[i] for i in keep),
        ),
    )


def drawn_probs(tree: TokenTree) -> np.ndarray:
    """float64 [num_draws]: the probability of each draw's token in its distribution; 1 without chance."""
    distributions = [enumeration.probs_of(tree, i) for i in range(len(tree.draws.children))]
    tokens = tree.tokens[tree.draws.children]
    return np.array(
        [1.0 if probs is None else probs[token] for probs, token in zip(distributions, tokens, strict=True)]
    )


def duplicates_skipped(tree: TokenTree) -> TokenTree:
    """Leaves a duplicate out; the next draw's distribution stays what it was."""
    return with_draws(tree, np.sort(np.unique(tree.draws.children, return_index=True)[1]))


def sorted_by_q(tree: TokenTree) -> TokenTree:
    return with_draws(tree, np.argsort(-drawn_probs(tree), kind="stable"))


def pruned_by_value(tree: TokenTree) -> TokenTree:
    """Of the two draws at the root the one with the larger q."""
    best = int(drawn_probs(tree).argmax())
    built, draws = Builder(), tree.draws
    assert draws.rows is not None and draws.excluded is not None
    token, row = int(tree.tokens[draws.children[best]]), tree.draft_probs[draws.rows[best]]
    built.add(0, token, int(draws.sources[best]), row, draws.excluded[best])
    return built.tree()


def another_temperature(tree: TokenTree) -> TokenTree:
    return dataclasses.replace(tree, draft_probs=tuple(row**1.3 / (row**1.3).sum() for row in tree.draft_probs))


CONTROLS: dict[str, tuple[str, Callable[[TokenTree], TokenTree]]] = {
    "a duplicate draw skipped, q as it was": ("two sources", duplicates_skipped),
    "siblings sorted by q": ("without replacement", sorted_by_q),
    "pruned by value": ("two draws", pruned_by_value),
    "q at another temperature": ("chain", another_temperature),
}
WAYS["two draws"] = (5, 1, lambda world, oracle: draft(world, proposals("own0 own0"), oracle))


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("make", [reference, engine])
@pytest.mark.parametrize("rule", DRAWN)
def test_a_tree_that_breaks_a_condition_is_seen(control: str, make: Callable[[str], Verifier], rule: str) -> None:
    name, change = CONTROLS[control]
    far = []
    for seed in SEEDS:
        world, drafts = drafted(name, seed)
        assert distance(world, drafts, make(rule)) < EXACT
        far.append(distance(world, [(weight, change(tree)) for weight, tree in drafts], make(rule)))
    assert max(far) > WRONG


def one_coin(counted_twice: bool, tree: TokenTree, world: World, oracle: Oracle) -> tuple[list[int], int]:
    """One uniform for all siblings, laid against the running sum of the target's probabilities of their draws."""
    path, paths = [0], paths_of(tree)
    while True:
        p = world.target[paths[path[-1]]].copy()
        children = tree.draws.children[tree.draws.parents == path[-1]].tolist()
        children = children if counted_twice else list(dict.fromkeys(children))
        tokens = tree.tokens[children].tolist()
        bounds = np.minimum(np.cumsum([0.0, *p[tokens], 1.0]), 1.0)
        chosen = oracle.choose(np.maximum(np.diff(bounds), 0.0))
        if chosen == len(children):
            p[tokens] = 0.0
            return path, oracle.choose(p)
        path.append(children[chosen])


def test_one_coin_over_duplicated_siblings_is_seen() -> None:
    for name in ("independent draws", "two sources"):
        world, drafts = drafted(name, 1)
        assert distance(world, drafts, partial(one_coin, False)) < EXACT
        assert distance(world, drafts, partial(one_coin, True)) > WRONG


@pytest.mark.parametrize("rule", DRAWN)
def test_a_rule_chosen_by_what_was_drawn_is_seen(rule: str) -> None:
    """p = (.9, .1), q = (.5, .5), naive only where b was drawn: a comes up with .5 + .5 * .9."""
    anything = {(token,): np.array([0.3, 0.7]) for token in range(2)}
    world = World(2, 1, {(): np.array([0.9, 0.1])} | anything, ({(): np.array([0.5, 0.5])},))
    drafts = drafts_of(lambda oracle: draft(world, proposals("free0"), oracle))

    def by_token(tree: TokenTree, world: World, oracle: Oracle) -> tuple[list[int], int]:
        return reference("naive" if tree.tokens[1] == 1 else rule)(tree, world, oracle)

    probs, _ = output_distribution(world, drafts, by_token)
    assert probs[0].sum() == pytest.approx(0.95, abs=EXACT)
    assert distance(world, drafts, reference(rule)) < EXACT


# --- planted faults


def plant_residual(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify.Residual, "reject", lambda self, draw: True)


def plant_mass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify.Draw, "row_mass", 1.0)


def plant_one_hot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify.Residual, "without", lambda self, token: (self.probs, self.mass))


def plant_forgotten(patch: pytest.MonkeyPatch) -> None:
    """After a rejection the node is accepted as before."""
    original = verify.Residual.reject

    def reject(self: Any, draw: Any) -> bool:
        before = self.accept
        done = original(self, draw)
        if done and self.mass > 0:
            self.accept = before
        return done

    patch.setattr(verify.Residual, "reject", reject)


def plant_acceptance_by_p(patch: pytest.MonkeyPatch) -> None:
    """A draw is accepted with probability p, as if it had been chosen without chance."""
    patch.setattr(verify.Residual, "chance", lambda self, draw: min(1.0, float(self.probs[draw.token]) / self.mass))


def plant_port(patch: pytest.MonkeyPatch) -> None:
    """A public port's slip: S / (1 - q[x])."""
    original = verify.Residual.reject

    def reject(self: Any, draw: Any) -> bool:
        before = self.accept
        done = original(self, draw)
        if before < 1 and draw.prob < 1:
            left = self.accept * (1 - before) / (1 - self.accept)
            self.accept = min(1.0, left / (1 - draw.prob))
        return done

    patch.setattr(verify.Residual, "reject", reject)


def plant_port_of_the_mass(patch: pytest.MonkeyPatch) -> None:
    """The same slip where the mass before the rejection is what S is divided by."""
    original = verify.Residual.reject

    def reject(self: Any, draw: Any) -> bool:
        before, mass = self.accept, self.mass
        done = original(self, draw)
        if before < 1:
            self.accept = min(before * self.mass / mass / max(1 - draw.prob, 1e-9), 1.0)
        return done

    patch.setattr(verify.Residual, "reject", reject)


def plant_draws(change: Callable[[list[Any]], list[Any]]) -> Callable[[pytest.MonkeyPatch], None]:
    """Change the draws at every node."""
    original = verify.draws_below
    return lambda patch: patch.setattr(verify, "draws_below", lambda tree: [change(each) for each in original(tree)])


def next_child(draws: list[Any]) -> list[Any]:
    return [
        dataclasses.replace(draw, child=other.child) for draw, other in zip(draws, draws[1:] + draws[:1], strict=True)
    ]


OWN, CROSS = "without replacement", "cross-source without replacement"
FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], list[tuple[str, str]]]] = {
    "the residual stays": (plant_residual, [(rule, name) for rule in DRAWN for name in (OWN, CROSS)]),
    "distributions are not renormalised": (
        plant_mass,
        [("rejection", OWN), ("rejection", CROSS), ("traversal", CROSS)],
    ),
    "a token without chance stays": (plant_one_hot, [("rejection", "without chance")]),
    "excluded is ignored": (
        plant_draws(lambda draws: [dataclasses.replace(draw, excluded=[]) for draw in draws]),
        [("rejection", CROSS)],
    ),
    "down to the wrong child": (plant_draws(next_child), [("traversal", OWN)]),
    "the draws in reverse": (plant_draws(lambda draws: draws[::-1]), [("rejection", OWN)]),
    "acceptance over 1 - q": (plant_port, [("traversal", "two sources")]),
    "acceptance over 1 - q of the mass": (plant_port_of_the_mass, [("traversal", CROSS)]),
    "acceptance is forgotten": (plant_forgotten, [("traversal", CROSS)]),
    "acceptance by p": (plant_acceptance_by_p, [(rule, CROSS) for rule in DRAWN]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str) -> None:
    plant, cases = FAULTS[fault]
    for rule, name in cases:
        worlds = [drafted(name, seed) for seed in range(3)]
        assert all(distance(world, drafts, engine(rule)) < EXACT for world, drafts in worlds)
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            assert max(distance(world, drafts, engine(rule)) for world, drafts in worlds[: len(SEEDS)]) > WRONG


# --- how much is accepted

BY_WHAT_WAS_DRAWN = {"mixed", "mixed, without chance first", "deep", "adaptive"}
"""Here which draws are made, or which token is proposed without chance, depends on what was drawn before."""


def accepted(world: World, drafts: Drafts) -> np.ndarray:
    """Mean accepted tokens of naive, rejection, traversal."""
    rules = (reference("naive"), engine("rejection"), engine("traversal"))
    return np.array([output_distribution(world, drafts, each)[1] for each in rules])


@pytest.mark.parametrize("name", WAYS)
def test_traversal_accepts_most_and_naive_least(name: str) -> None:
    """Exact means over drafting: on every world, or over the worlds where drafting looks at what it drew."""
    means = np.array([accepted(*drafted(name, seed)) for seed in range(3)])
    assert (np.diff(means.mean(axis=0)) >= -EXACT).all(), means
    if name not in BY_WHAT_WAS_DRAWN:
        assert (np.diff(means) >= -EXACT).all(), means


def test_rejection_can_accept_less_than_naive() -> None:
    """Where a child without chance is chosen by what was drawn.

    p = (0, .5, .5), q = (.5, .5, 0), and b is proposed after a, c after b. Rejection: b is accepted where it was drawn,
    and a is rejected always, but then nothing is left for b: .5 in all. Naive: b or c where b was drawn, b alone
    otherwise: .5 * 1 + .5 * .5.
    """
    anything = {(token,): np.full(3, 1 / 3) for token in range(3)}
    world = World(3, 1, {(): np.array([0.0, 0.5, 0.5])} | anything, ({(): np.array([0.5, 0.5, 0.0])},))

    def by_draw(oracle: Oracle) -> TokenTree:
        built, probs = Builder(), world.sources[0][()]
        drawn = oracle.choose(probs)
        built.add(0, drawn, 0, probs)
        built.add(0, drawn + 1, 1, None)
        return built.tree()

    assert accepted(world, drafts_of(by_draw)) == pytest.approx([0.75, 0.5, 0.5], abs=EXACT)


@pytest.mark.parametrize("name", ["chain", "without replacement", "cross-source without replacement", "mixed", "deep"])
@pytest.mark.parametrize("rule", DRAWN)
@pytest.mark.parametrize("make", [reference, engine])
def test_a_perfect_draft_is_accepted_at_once(name: str, rule: str, make: Callable[[str], Verifier]) -> None:
    """q = p: the path follows the first draw of every node down to a leaf."""
    world, drafts = drafted(name, 1, same=True)
    for _, tree in drafts:
        firsts = [0]
        while (tree.draws.parents == firsts[-1]).any():
            firsts.append(int(tree.draws.children[(tree.draws.parents == firsts[-1]).argmax()]))
        assert all(path == firsts for weight, (path, _) in runs(tree, world, make(rule)).values() if weight > EXACT)


@pytest.mark.parametrize("rule", DRAWN)
def test_the_order_of_sources_does_not_matter(rule: str) -> None:
    """Trees of two sources merged either way round; sources that take turns either way round."""
    world, _ = drafted("sources apart", 0)
    one, other = proposals("own0 own0", "free0"), proposals("free1", "free1")

    def merged(first: Scheme, second: Scheme) -> Drafts:
        return drafts_of(lambda oracle: merge([draft(world, first, oracle), draft(world, second, oracle)]))

    distributions = [
        output_distribution(world, merged(*order), engine(rule))[0] for order in ((one, other), (other, one))
    ]
    for levels in (("cross0 cross1", "free0"), ("cross1 cross0", "free0")):
        distributions.append(
            output_distribution(world, drafts_of(partial(draft, world, proposals(*levels))), engine(rule))[0]
        )
    assert all(enumeration.total_variation(probs, world.joint()) < EXACT for probs in distributions)


# --- block verification


def block_verification(tree: TokenTree, world: World, oracle: Oracle) -> tuple[list[int], int]:
    """Algorithm 2 of arXiv 2403.10444, on a chain: every prefix has its own coin, and the longest that wins is kept."""
    paths, length = paths_of(tree), len(tree) - 1
    big = [world.target[path] for path in paths]
    small = [tree.draft_probs[row] for row in tree.draws.rows] if tree.draws.rows is not None else []
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
    for seed in range(4):
        world, drafts = drafted("chain", seed)
        assert distance(world, drafts, block_verification) < EXACT
        for weight, tree in drafts:
            traversal, block = ends(world, tree, make("traversal")), ends(world, tree, block_verification)
            assert np.abs(traversal - block).max() < EXACT
            apart += weight * np.abs(traversal - ends(world, tree, make("rejection"))).max()
    assert apart > WRONG  # the comparison could tell
