"""Exact distributions by replaying every branch of a random program, such as drafting and verifying."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import NamedTuple, TypeVar

import numpy as np

from treespec.tree import TokenTree
from treespec.verification.oracle import Oracle
from treespec.verification.verify import verify_drawn, verify_tree

Path = tuple[int, ...]
Answers = tuple[int, ...]
T = TypeVar("T")


class Branching:
    """An oracle that gives the answers of a script and then the first possible ones, and keeps what it passed by."""

    def __init__(self, script: Sequence[int]):
        self.script = script
        self.answers: list[int] = []
        self.open: list[list[int]] = []  # at each question, the answers after the one given
        self.weight = 1.0

    def _answer(self, weights: Sequence[float]) -> int:
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        asked = len(self.answers)
        given = self.script[asked] if asked < len(self.script) else possible[0]
        self.answers.append(given)
        self.open.append([i for i in possible if i > given])
        self.weight *= weights[given] / sum(weights)
        return given

    def choose(self, weights: np.ndarray) -> int:
        return self._answer(weights.tolist())

    def flip(self, p: float) -> bool:
        return bool(self._answer((1.0 - p, p)))


def outcomes(program: Callable[[Oracle], T]) -> Iterator[tuple[float, Answers, T]]:
    """Every run of the program: its probability, the oracle's answers, the result."""
    script: list[int] | None = []
    while script is not None:
        oracle = Branching(script)
        result = program(oracle)
        yield oracle.weight, tuple(oracle.answers), result
        script = None
        for asked in reversed(range(len(oracle.answers))):
            if oracle.open[asked]:
                script = [*oracle.answers[:asked], oracle.open[asked][0]]
                break


# --- targets and drafts


class World(NamedTuple):
    """A target and sources over a few tokens: a distribution for each prefix below the root."""

    vocab: int
    depth: int  # of the deepest draft
    target: dict[Path, np.ndarray]
    sources: tuple[dict[Path, np.ndarray], ...]
    end: int | None = None  # a token that ends the output: nothing but itself follows it

    def joint(self, prefix: Path = ()) -> np.ndarray:
        """[vocab] * (depth + 1 - len(prefix)): the target's distribution of the tokens that follow the prefix."""
        if len(prefix) > self.depth:
            return np.ones(())
        probs = np.eye(self.vocab)[self.end] if self.end in prefix else self.target[prefix]
        return np.stack([probs[token] * self.joint((*prefix, token)) for token in range(self.vocab)])


def random_probs(rng: np.random.Generator, vocab: int, zeros: float = 0.2) -> np.ndarray:
    """float64 [vocab], uneven, each entry 0 with probability `zeros` unless all would be."""
    probs = rng.exponential(size=vocab) ** 1.5
    keep = rng.random(vocab) >= zeros
    probs = probs * keep if keep.any() else probs
    probs /= probs.sum()
    probs.flags.writeable = False  # what verification gets on loan
    return probs


def random_world(seed: int, vocab: int, depth: int, same: bool = False) -> World:
    """One distribution per prefix and each of two sources; every fourth is the target's, with `same` all are."""
    rng = np.random.default_rng(seed)
    prefixes = [path for length in range(depth + 1) for path in product(range(vocab), repeat=length)]
    target = {path: random_probs(rng, vocab) for path in prefixes}
    drafts = tuple(
        {path: target[path] if same or rng.random() < 0.25 else random_probs(rng, vocab) for path in prefixes}
        for _ in range(2)
    )
    return World(vocab, depth, target, drafts)


# --- drafting


class Proposal(NamedTuple):
    """One draw that is made at every node of a depth.

    `how`: "free" (independent of other draws), "own" (without what this source drew at the node), "cross" (without
    what any source drew there), "top" (without chance: the source's likeliest token), "next" (the likeliest that is not
    a child yet).
    """

    source: int
    how: str


Scheme = Sequence[Sequence[Proposal]]  # by depth


def restricted(row: np.ndarray, excluded: Sequence[int]) -> np.ndarray:
    probs = row.astype(np.float64)
    probs[list(excluded)] = 0.0
    return probs / probs.sum()


def paths_of(tree: TokenTree) -> list[Path]:
    """The tokens below the root that lead to each node."""
    paths: list[Path] = [()]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], int(tree.tokens[node])))
    return paths


class Builder:
    """A tree as it is drafted, draw by draw."""

    def __init__(self) -> None:
        self.paths: list[Path] = [()]  # of each node
        self.draws: list[tuple[int, int, int, int, tuple[int, ...]]] = []  # parent, child, source, row, excluded
        self.rows: list[np.ndarray] = []

    def drawn(self, parent: int, source: int | None = None) -> tuple[int, ...]:
        """Tokens drawn at a node so far, by one source or any, each once."""
        tokens = [self.paths[child][-1] for at, child, by, *_ in self.draws if at == parent and source in (None, by)]
        return tuple(dict.fromkeys(tokens))

    def add(
        self, parent: int, token: int, source: int, probs: np.ndarray | None, excluded: tuple[int, ...] = ()
    ) -> int:
        """Record a draw. The distribution's row is shared with the draws before it where it is the very same array."""
        row, path = -1, (*self.paths[parent], token)
        if probs is not None:
            row = next((i for i, other in enumerate(self.rows) if other is probs), len(self.rows))
            self.rows[row:] = self.rows[row:] or [probs]
        if path not in self.paths:
            self.paths.append(path)
        self.draws.append((parent, self.paths.index(path), source, row, excluded))
        return self.paths.index(path)

    def tree(self) -> TokenTree:
        parents = [-1, *(self.paths.index(path[:-1]) for path in self.paths[1:])]
        bare = TokenTree.from_parents([0, *(path[-1] for path in self.paths[1:])], parents, 1.0, "")
        _, nodes, sources, rows = np.array([draw[:4] for draw in self.draws], dtype=np.int64).reshape(-1, 4).T
        tree = replace(
            bare,
            draw_nodes=nodes,
            draw_sources=sources,
            draw_probs=np.ones(len(self.draws)),
            source_names=tuple(f"s{i}" for i in range(8)),
            draw_rows=rows,
            draw_excluded=tuple(draw[4] for draw in self.draws),
            draft_probs=tuple(self.rows),
        )
        tree.check_integrity()
        return tree


def draft(world: World, scheme: Scheme, oracle: Oracle) -> TokenTree:
    """Every source at every node of a level, then the next level. A source without a token left makes no draw."""
    built, level = Builder(), [0]
    for proposals in scheme:
        children: list[int] = []
        for node in level:
            for source, how in proposals:
                probs = world.sources[source][built.paths[node]]
                excluded = {"own": built.drawn(node, source), "cross": built.drawn(node), "next": built.drawn(node)}
                left = probs.copy()
                left[list(excluded.get(how, ()))] = 0.0
                if not left.any():
                    continue
                if how in ("top", "next"):
                    child = built.add(node, int(left.argmax()), source, None)
                else:
                    child = built.add(node, oracle.choose(left), source, probs, excluded.get(how, ()))
                if child not in children:
                    children.append(child)
        level = children
    return built.tree()


# --- verifying


Verifier = Callable[[TokenTree, World, Oracle], tuple[list[int], int]]


def reference(rule: str) -> Verifier:
    """`verify_tree`, with the distributions that the tree's draws came from."""

    def verify(tree: TokenTree, world: World, oracle: Oracle) -> tuple[list[int], int]:
        draws, drawn_from = [], []
        each = zip(tree.draw_nodes.tolist(), tree.draw_rows.tolist(), tree.draw_excluded, strict=True)
        for child, row, excluded in each:
            draws.append((int(tree.parents[child]), child, len(drawn_from) if row >= 0 else None))
            drawn_from += [restricted(tree.draft_probs[row], excluded)] if row >= 0 else []
        target = np.stack([world.target[path] for path in paths_of(tree)])
        rows = np.stack(drawn_from) if drawn_from else np.empty((0, world.vocab))
        return verify_tree(rule, tree.tokens.tolist(), tree.parents.tolist(), draws, target, rows, oracle)

    return verify


def engine(rule: str) -> Verifier:
    """The engine's `verify_drawn`; below an end of the output there are no distributions."""

    def verify(tree: TokenTree, world: World, oracle: Oracle) -> tuple[list[int], int]:
        paths = paths_of(tree)

        def target(node: int) -> np.ndarray | None:
            return None if world.end in paths[node] else world.target[paths[node]]

        path, bonus = verify_drawn(rule, tree, target, oracle)
        return path.tolist(), bonus

    return verify


Drafts = Sequence[tuple[float, TokenTree]]


def output_distribution(world: World, drafts: Drafts, verifier: Verifier) -> tuple[np.ndarray, float]:
    """Distribution of the first depth + 1 tokens (the target continues short outputs), and the mean accepted length."""
    probs, accepted = np.zeros((world.vocab,) * (world.depth + 1)), 0.0
    futures: dict[Path, np.ndarray] = {}
    for drafted, tree in drafts:
        paths = paths_of(tree)
        for verified, (path, token) in runs(tree, world, verifier).values():
            assert path[0] == 0 and all(tree.parents[node] == above for above, node in pairwise(path)), path
            output = (*paths[path[-1]], token)
            if output not in futures:
                futures[output] = world.joint(output)
            probs[output] += drafted * verified * futures[output]
            accepted += drafted * verified * (len(path) - 1)
    return probs, accepted


def runs(tree: TokenTree, world: World, verifier: Verifier) -> dict[Answers, tuple[float, tuple[list[int], int]]]:
    """Every run of a verifier on one tree, by the answers that the oracle gave: its probability and result."""
    return {answers: (weight, result) for weight, answers, result in outcomes(lambda o: verifier(tree, world, o))}


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).sum()) / 2
