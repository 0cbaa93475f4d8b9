"""Verification at the engine's sizes: float32 rows, rounding, chance itself, bad input."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.helpers.enumeration import Builder, Path, Proposal, World, draft, engine, reference
from treespec.errors import ConfigError
from treespec.tree import TokenTree
from treespec.verification.oracle import RandomOracle
from treespec.verification.verify import verify_tree

RULES = ("rejection", "traversal")
VOCAB = 4096


class RandomProbs(dict[Path, np.ndarray]):
    """float32 distributions made when asked for: what all share at a prefix, and noise of one's own."""

    def __init__(self, seed: int, own: int, noise: float, vocab: int = VOCAB):
        super().__init__()
        self.seed, self.own, self.noise, self.vocab = seed, own, noise, vocab

    def __missing__(self, path: Path) -> np.ndarray:
        shared = np.random.default_rng([self.seed, 99, *path]).normal(size=self.vocab) * 3
        logits = shared + self.noise * np.random.default_rng([self.seed, self.own, *path]).normal(size=self.vocab)
        weights = np.exp(logits - logits.max())
        probs = (weights / weights.sum()).astype(np.float32)
        probs.flags.writeable = False
        self[path] = probs
        return probs


@functools.cache
def random_case(seed: int, vocab: int = VOCAB) -> tuple[World, TokenTree]:
    """Three sources that resemble the target more or less, and a tree of random draws of every kind."""
    rng = np.random.default_rng(seed)
    sources = tuple(RandomProbs(seed, 1 + i, noise, vocab) for i, noise in enumerate((0.2, 0.6, 1.5)))
    world = World(vocab, 4, RandomProbs(seed, 0, 0.0, vocab), sources)
    kinds = ["free", "own", "own", "cross", "cross", "top", "next"]
    scheme = [[Proposal(int(rng.integers(3)), str(rng.choice(kinds))) for _ in range(n)] for n in (4, 2, 2, 1)]
    return world, draft(world, scheme, RandomOracle(rng))


class Injected:
    """Given uniforms; what was asked is kept. The token that is chosen does not matter."""

    def __init__(self, seed: int):
        self.uniforms: Iterator[float] = iter(np.random.default_rng(seed).random(1000).tolist())
        self.flips: list[tuple[float, float]] = []
        self.probs = np.empty(0)

    def flip(self, p: float) -> bool:
        self.flips.append((next(self.uniforms), p))
        return self.flips[-1][0] < p

    def choose(self, weights: np.ndarray) -> int:
        self.probs = weights.astype(np.float64) / weights.sum(dtype=np.float64)
        return 0


def test_float32_goes_the_way_of_float64() -> None:
    close, lengths = 0, []
    with np.errstate(divide="raise", over="raise", invalid="raise"):
        for seed, rule in itertools.product(range(16), RULES):
            world, tree = random_case(seed)
            for run in range(4):
                ours, theirs = Injected(run), Injected(run)
                path, _ = engine(rule)(tree, world, ours)
                expected, _ = reference(rule)(tree, world, theirs)
                if any(abs(u - p) < 1e-6 for u, p in theirs.flips):
                    close += 1
                    continue
                assert path == expected
                assert np.array(ours.flips) == pytest.approx(np.array(theirs.flips), rel=1e-4, abs=1e-6)
                assert np.abs(ours.probs - theirs.probs).sum() < 1e-4
                lengths.append(len(path) - 1)
    assert close <= 1
    assert 0.5 < np.mean(lengths) < 3.5 and len(set(lengths)) == 5


# --- rounding


class Unlucky:
    """Every flip that can fail fails."""

    def flip(self, p: float) -> bool:
        return p >= 1

    def choose(self, weights: np.ndarray) -> int:
        assert np.isfinite(weights).all() and weights.sum() > 0
        return int(weights.argmax())


def chain_of(rows: list[np.ndarray], tokens: list[int]) -> TokenTree:
    built = Builder()
    for node, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        built.add(node, token, 0, row)
    return built.tree()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("verifier", [engine, reference])
def test_nothing_left_but_rounding_is_accepted(rule: str, dtype: Any, verifier: Any) -> None:
    """p the next float below q in every entry: the draw can be rejected, and then max(p - q, 0) is 0 everywhere."""
    q = RandomProbs(0, 0, 0.0)[()].astype(dtype)
    p = np.nextafter(q, dtype(0))
    tree = chain_of([q, q], [5, 6])
    target: dict[Path, np.ndarray] = {(): p, (5,): p, (5, 6): p}
    world = World(VOCAB, 2, target, ())
    with np.errstate(all="raise"):
        path, token = verifier(rule)(tree, world, Unlucky())
    assert (path, token) == ([0, 1, 2], int(p.argmax()))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("verifier", [engine, reference])
def test_a_token_the_target_excludes_is_never_accepted(rule: str, verifier: Any) -> None:
    """q = p elsewhere: rejecting the token leaves less than rounding, so the distribution stays as it is."""
    q = np.full(4, 0.25, dtype=np.float32)
    q[0] = 1e-9
    p = q.copy()
    p[0] = 0.0
    p, q = p / p.sum(), q / p.sum()
    world = World(4, 2, dict.fromkeys([(), (0,)], p), ())

    class Willing(Unlucky):
        def flip(self, p: float) -> bool:
            return p > 0

    path, token = verifier(rule)(chain_of([q], [0]), world, Willing())
    assert path == [0] and token != 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tiny", [1e-45, 1e-30, 0.0])
def test_vanishing_probabilities_give_no_nan(rule: str, tiny: float) -> None:
    """A lookup proposes what the target all but excludes, with a random draw below it."""
    p, q = RandomProbs(1, 0, 0.0)[()].copy(), RandomProbs(1, 1, 0.5)[()].copy()
    p[7], q[9] = tiny, 0.0
    built = Builder()
    built.add(built.add(0, 7, 1, None), 3, 0, q)
    built.add(0, 4, 0, q, (7,))
    world = World(VOCAB, 2, dict.fromkeys([(), (7,), (7, 3), (4,)], p), ())
    with np.errstate(divide="raise", over="raise", invalid="raise"):
        path, token = engine(rule)(built.tree(), world, Unlucky())
    assert path[:2] != [0, 1] and token not in (7, 4)[: len(path)]


def test_a_sum_that_cancels_is_taken_anew() -> None:
    """Tokens without chance that hold all but 1e-4 of the target: what is left keeps its precision."""
    p = np.full(VOCAB, 1e-4 / (VOCAB - 3))
    p[:3] = 0.5, 0.3, 0.2 - 1e-4
    built = Builder()
    for token in (0, 1, 2, 50):
        built.add(0, token, 0, None)
    chances = []
    for dtype in (np.float32, np.float64):
        oracle = Injected(0)
        oracle.uniforms = itertools.repeat(1 - 1e-12)
        engine("rejection")(built.tree(), World(VOCAB, 1, {(): p.astype(dtype)}, ()), oracle)
        chances.append([chance for _, chance in oracle.flips])
    assert chances[0] == pytest.approx(chances[1], rel=1e-3)
    assert chances[1] == pytest.approx([0.5, 0.6, 1 - 5e-4, 1 / (VOCAB - 3)], rel=1e-6)


# --- chance


class Fixed:
    """Stands in for a Generator: the uniforms that it is given."""

    def __init__(self, *uniforms: float):
        self.random = iter(uniforms).__next__


ALMOST_ONE = float(np.nextafter(1.0, 0.0))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", [1, 511, 512, 513, 5000])
def test_choose_inverts_the_distribution_function(dtype: Any, length: int) -> None:
    rng = np.random.default_rng(length)
    for case in range(40):
        weights = rng.exponential(size=length) ** 3 * (rng.random(length) < rng.choice([0.01, 0.5, 1.0]))
        weights[: rng.integers(length)] = 0.0
        weights[rng.integers(1, length + 1) :] = 0.0
        if not weights.any():
            weights[rng.integers(length)] = 1.0
        weights = (weights * 10.0 ** rng.integers(-20, 20)).astype(dtype)
        weights.flags.writeable = False
        bounds = np.cumsum(weights, dtype=np.float64)
        for u in [0.0, ALMOST_ONE, *rng.random(20)]:
            index = RandomOracle(Fixed(u)).choose(weights)  # type: ignore[arg-type]
            assert weights[index] > 0, (case, u)
            slack = 1e-5 * bounds[-1]
            assert bounds[index] - weights[index] - slack <= u * bounds[-1] <= bounds[index] + slack, (case, u)


def test_flips_are_strict() -> None:
    assert not RandomOracle(Fixed(0.0)).flip(0.0)  # type: ignore[arg-type]
    assert RandomOracle(Fixed(ALMOST_ONE)).flip(1.0)  # type: ignore[arg-type]
    assert not RandomOracle(Fixed(0.25)).flip(0.25)  # type: ignore[arg-type]


# --- bad input of the documented door

GOOD: dict[str, Any] = {
    "rule": "rejection",
    "tokens": [9, 0, 1, 0],
    "parents": [-1, 0, 0, 1],
    "draws": [(0, 1, 0), (0, 2, None), (0, 1, 1), (1, 3, 1)],
    "target_probs": np.tile([0.2, 0.5, 0.3], (4, 1)),
    "draft_probs": np.array([[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]]),
    "oracle": Unlucky(),
}
NEGATIVE = np.tile([-0.2, 0.9, 0.3], (4, 1))
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown rule": ({"rule": "traversl"}, r"'traversl' \(did you mean 'traversal'\?\).*naive, rejection, traversal"),
    "lengths": ({"parents": [-1, 0]}, "not 4 and 2"),
    "parents out of order": ({"parents": [-1, 0, 3, 1]}, r"parents\[2\].*0 to 1.*not 3"),
    "token": ({"tokens": [9, 0, 3, 0]}, r"tokens\[2\] must be less than the vocabulary size 3, not 3"),
    "equal siblings": ({"tokens": [9, 0, 0, 0]}, "siblings 1 and 2 under node 0 both carry token 0"),
    "draw of a stranger": ({"draws": [(0, 1, 0), (0, 2, None), (0, 3, 1)]}, r"draws\[2\]: node 3 is not a child.* 0"),
    "no draw": ({"draws": [(0, 1, 0), (0, 1, 1)]}, r"nodes without one: \[2, 3\]"),
    "row": ({"draws": [(0, 1, 2), (0, 2, None), (1, 3, 1)]}, r"draws\[0\].*0 to 1.*not 2"),
    "impossible draw": ({"draft_probs": np.array([[0.0, 1, 0], [0.1, 0.2, 0.7]])}, r"draws\[0\]: token 0.*row 0"),
    "target rows": ({"target_probs": np.full((3, 3), 1 / 3)}, r"\[4 nodes, vocab\], not \[3, 3\]"),
    "negative": ({"target_probs": NEGATIVE}, r"target_probs\[0\] must be probabilities, but contains -0.2"),
    "sum": ({"draft_probs": np.array([[0.5, 0.5, 0.0], [0.1, 0.2, 0.6]])}, r"draft_probs\[1\] must sum to 1, not 0\.9"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case: str) -> None:
    change, message = BAD[case]
    verify_tree(**GOOD)
    with pytest.raises(ConfigError, match=message):
        verify_tree(**GOOD | change)


def test_a_chain_too_deep_is_refused() -> None:
    n = 300
    chain = {"tokens": [0] * n, "parents": list(range(-1, n - 1)), "draws": [(i, i + 1, None) for i in range(n - 1)]}
    arrays = {"target_probs": np.ones((n, 1)), "draft_probs": np.empty((0, 1))}
    with pytest.raises(ConfigError, match="node 257 is 257 deep"):
        verify_tree("traversal", **chain, **arrays, oracle=Unlucky())
