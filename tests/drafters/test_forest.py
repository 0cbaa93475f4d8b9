"""Trees that grow, in numpy and compiled, against a dictionary of paths: SSMs and seeds merged, budgets, frontiers."""

from typing import Any

import numpy as np
import pytest

from tests.helpers.enumeration import paths_of
from tests.helpers.growth import assert_same_trees, grown_by_ops, grown_on_host, growth_case
from tests.helpers.libraries import LIBRARIES
from tests.helpers.models import assert_same_tree, quick, tree_of
from tests.helpers.quantized_checkpoints import needs_compiler
from treespec.drafters.evidence import SeedEvidence
from treespec.drafters.ssm.forest import CompiledForest, Forest, SsmProbs, TreeLimits
from treespec.drafters.ssm.reference_forest import ReferenceForest
from treespec.drafters.ssm.ssm_state import grown_masks
from treespec.tree import TokenTree
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows
from treespec_kernels.cpu.compiled_plan import plan_compiled
from treespec_kernels.cpu.cpu_library import find_compiler
from treespec_kernels.cpu.growth_cpu import TreePlaces, growth_library
from treespec_kernels.tree.growth_limits import DEEPEST, MAX_EXPANDED, frontier_width

VOCAB = 12
NAMES = ("a", "b")
EVIDENCE = SeedEvidence(0.5, 0.8)
Path = tuple[int, ...]


class Speaker:
    """SSMs whose probabilities are a function of the path."""

    def __init__(self, seed: int, num_ssms: int):
        self.seed, self.num_ssms = seed, num_ssms

    def probs(self, ssm: int, path: Path) -> np.ndarray:
        rng = np.random.default_rng((self.seed, ssm, *path))
        weights = rng.exponential(size=VOCAB) ** 2
        return (weights / weights.sum()).astype(np.float32)

    def says(self, paths: list[Path]) -> list[SsmProbs]:
        rows = np.arange(len(paths))
        return [SsmProbs(s, rows, np.stack([self.probs(s, path) for path in paths])) for s in range(self.num_ssms)]


def compiled(*parts: Any, **limits: int) -> CompiledForest:
    return CompiledForest(*parts, library=growth_library(find_compiler(), LIBRARIES), **limits)


FORESTS = pytest.mark.parametrize(
    "kind", [pytest.param(ReferenceForest, id="numpy"), pytest.param(compiled, id="compiled", marks=needs_compiler)]
)


def grow(forest: Forest, speaker: Speaker, weights: np.ndarray) -> list[list[Path]]:
    """Grow to the end; the expanded paths of each tree, by level."""
    expanded: list[list[Path]] = [[] for _ in forest.limits]
    while len(forest.frontier.nodes):
        paths = [tuple(path) for path in forest.paths()]
        for owner, path in zip(forest.frontier.owners.tolist(), paths, strict=True):
            expanded[owner].append(path)
        broken = forest.extend(speaker.says(paths), [weights] * len(forest.limits))
        assert not broken.any()
    return expanded


@needs_compiler
@pytest.mark.parametrize("part", quick(range(16), (0, 4)))
def test_trees_are_those_of_the_ops(part: int) -> None:
    """2,000 trees and more: those of numpy, of C++ and of the ops' references are the same, node for node."""
    count = 0
    for number in range(part, 840, 16):
        case = growth_case(number)
        ours, theirs = grown_on_host(case, ReferenceForest), grown_on_host(case, compiled)
        for tree, other in zip(ours, theirs, strict=True):
            assert_same_tree(tree, other)
            assert tree.values.tolist() == other.values.tolist(), number
        assert_same_trees(grown_by_ops(case), ours)
        count += len(ours)
    assert count > 100


@FORESTS
@pytest.mark.parametrize("branching", [(3, 2), (1, 1, 1), (2,)])
def test_static_trees_have_their_shape(branching: tuple[int, ...], kind: type[Forest]) -> None:
    """Seeds compete for the places of a fixed shape and add none."""
    hints = {(1,): 0.9, (1, 2): 0.9, (1, 2, 3): 0.9, (1, 2, 3, 4): 0.9}
    shape = TreeLimits(len(branching), 64, branching, ())
    forest = kind([tree_of(0, hints, "lookup")], [shape], 2, EVIDENCE, max_children=6)
    grow(forest, Speaker(5, 2), np.array([0.5, 0.5]))
    (tree,) = forest.finish(NAMES)
    tree.check_integrity()
    for depth, children in enumerate(branching):
        for node in np.flatnonzero(tree.depths == depth):
            assert (tree.parents == node).sum() == children
    assert len(tree) == 1 + sum(int(np.prod(branching[: i + 1])) for i in range(len(branching)))


@FORESTS
def test_limits_of_the_frontier(kind: type[Forest]) -> None:
    forest = kind([TokenTree.root(1)], [TreeLimits(99, 5000, None, ())], 2, EVIDENCE)
    expanded = grow(forest, Speaker(1, 2), np.array([0.5, 0.5]))
    by_depth = np.bincount([len(path) for path in expanded[0]])
    assert by_depth.tolist() == [1, *(frontier_width(depth) for depth in range(1, DEEPEST + 1))]
    assert by_depth.sum() <= MAX_EXPANDED


@FORESTS
def test_a_tree_without_levels_is_its_seed(kind: type[Forest]) -> None:
    hints = {(1,): 0.5, (2,): 0.25, (1, 1): 0.5}
    forest = kind([tree_of(8, hints, "lookup"), TokenTree.root(2)], [TreeLimits(0, 16, None, ())] * 2, 2, EVIDENCE)
    assert not len(forest.frontier.nodes)
    seeded, root = forest.finish(NAMES)
    assert paths_of(seeded) == [(), *sorted(hints, key=len)] and len(root) == 1
    assert seeded.slots is not None and (seeded.slots == -1).all()


def random_case(rng: np.random.Generator) -> tuple[list[TokenTree], list[TreeLimits], int]:
    """Seeds, shapes and how many SSMs."""
    seeds, shapes = [], []
    for _ in range(int(rng.integers(1, 5))):
        hints: dict[Path, float] = {}
        for _ in range(int(rng.integers(0, 3))):  # runs that may share a beginning
            path: Path = ()
            for _ in range(int(rng.integers(1, 5))):
                path = (*path, int(rng.integers(0, 3)))
                hints.setdefault(path, float(rng.uniform(0.05, 0.45)))
        seeds.append(tree_of(int(rng.integers(4)), hints, "lookup") if hints else TokenTree.root(3))
        branching = tuple(rng.integers(1, 4, int(rng.integers(1, 4))).tolist()) if rng.random() < 0.3 else None
        depth = len(branching) if branching else int(rng.integers(0, 6))
        shapes.append(TreeLimits(depth, int(rng.integers(1, 30)), branching, tuple(rng.integers(0, VOCAB, 2).tolist())))
    return seeds, shapes, int(rng.integers(1, 4))


@needs_compiler
@pytest.mark.parametrize("seed", range(60))
def test_compiled_trees_are_those_of_numpy(seed: int) -> None:
    """Batches of trees of all kinds with SSMs that score only some of them, and broken probabilities: the same nodes,
    parents, draws, slots, masses and probabilities."""
    rng = np.random.default_rng((7, seed))
    seeds, shapes, num_ssms = random_case(rng)
    active = rng.random((len(seeds), num_ssms)) < 0.7
    active[~active.any(1), 0] = True
    weights = [np.where(on, rng.uniform(0.1, 1, num_ssms), 0) for on in active]
    weights = [own / own.sum() for own in weights]
    limits = {"max_children": int(rng.integers(1, 10)), "max_frontier": int(rng.integers(1, 9))}
    pair = [kind(seeds, shapes, num_ssms, EVIDENCE, **limits) for kind in (ReferenceForest, compiled)]
    vocab = int(rng.choice([4, VOCAB, 64, 200, 1027]))
    while len(pair[0].frontier.nodes):
        at = pair[0].frontier
        said = []
        for ssm in range(num_ssms):
            rows = np.flatnonzero(active[at.owners, ssm])
            probs = rng.exponential(size=(len(rows), vocab)) ** 3
            probs = (probs / probs.sum(1, keepdims=True)).astype(np.float32)
            for bad, columns in ((np.nan, slice(None)), (np.nan, int(rng.integers(vocab))), (np.inf, 0)):
                probs[rng.random(len(rows)) < 0.05, columns] = bad
            if len(rows):
                said.append(SsmProbs(ssm, rows, probs))
        broken = [forest.extend(said, weights) for forest in pair]
        assert (broken[0] == broken[1]).all()
        stopped = rng.random(len(seeds)) < 0.1
        for forest in pair:
            if stopped.any():
                forest.stop(stopped)
        for ours, theirs in zip(pair[0].frontier, pair[1].frontier, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(pair[0].open_mass(), pair[1].open_mass())
        np.testing.assert_array_equal(pair[0].level_mass(0.01), pair[1].level_mass(0.01))
    names = tuple(f"ssm-{i}" for i in range(num_ssms))
    for ours, theirs in zip(*(forest.finish(names) for forest in pair), strict=True):
        np.testing.assert_array_equal(ours.slots, theirs.slots)
        assert_same_tree(ours, theirs)


@needs_compiler
@pytest.mark.parametrize("seed", range(10))
def test_places_are_those_of_a_planned_pass(seed: int) -> None:
    """Slots, paths and positions of level after level, as `plan_compiled` finds them through masks; pages in any order,
    trees that begin late in a page, and trees that stop."""
    rng = np.random.default_rng((9, seed))
    count = int(rng.integers(1, 4))
    contexts = rng.integers(1, 3 * PAGE_SIZE, count).tolist()
    pages = np.split(rng.permutation(5 * count) + 1, count)
    places = TreePlaces(growth_library(find_compiler(), LIBRARIES), contexts, pages)
    masks, going, newest = [np.ones((1, 1), dtype=bool)] * count, list(range(count)), [[0]] * count
    for depth in range(1, 6):
        going = [tree for tree in going if rng.random() < 0.9]
        if not going:
            break
        above = [np.sort(rng.choice(newest[tree], int(rng.integers(1, 5)))) for tree in going]
        owners = np.repeat(going, [len(own) for own in above])
        plan = places.extend(owners, np.concatenate(above), depth)
        rows = []
        for tree, own in zip(going, above, strict=True):
            first = len(masks[tree])
            masks[tree] = grown = grown_masks(masks[tree], own)
            newest[tree] = list(range(first, len(grown)))
            depths = grown.sum(1) - 1
            nodes = np.arange(first, len(grown))
            rows.append(RequestRows(contexts[tree], nodes, depths[first:], grown[first:], depths, pages[tree]))
        expected = plan_compiled(rows)
        assert plan.num_rows == expected.num_rows
        assert plan.slots.equal(expected.slots) and plan.positions.equal(expected.positions)
        table = np.concatenate(pages)
        for ours, theirs in zip(plan.rows.T.tolist(), expected.rows.T.tolist(), strict=True):
            assert ours[1] == theirs[1] and ours[3] == theirs[3] == depth + 1
            assert plan.paths[ours[2] :][: depth + 1].equal(expected.paths[theirs[2] :][: depth + 1])
            used = -(-ours[1] // PAGE_SIZE)
            assert (table[ours[0] :][:used] == expected.pages[theirs[0] :][:used].numpy()).all()
