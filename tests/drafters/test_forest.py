"""Trees that grow, in numpy and compiled, and those of the ops: SSMs and seeds merged, budgets, frontiers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.enumeration import paths_of
from tests.helpers.growth import Path, assert_same_trees, grown_by_ops, grown_on_host, growth_case, said_by
from tests.helpers.libraries import LIBRARIES
from tests.helpers.models import assert_same_tree, quick, tree_of
from tests.helpers.quantized_checkpoints import needs_compiler
from treespec.drafters.evidence import SeedEvidence
from treespec.drafters.ssm.forest import CompiledForest, Forest, TreeLimits
from treespec.drafters.ssm.reference_forest import ReferenceForest
from treespec.drafters.ssm.ssm_state import grown_masks
from treespec.tree import TokenTree
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows
from treespec_kernels.cpu.compiled_plan import plan_compiled
from treespec_kernels.cpu.cpu_library import find_compiler
from treespec_kernels.cpu.growth_cpu import TreePlaces, growth_library
from treespec_kernels.tree.growth_limits import DEEPEST, MAX_EXPANDED, frontier_width

NAMES = ("a", "b")
EVIDENCE = SeedEvidence(0.5, 0.8)


def compiled(*parts: Any, **limits: int) -> CompiledForest:
    return CompiledForest(*parts, library=growth_library(find_compiler(), LIBRARIES), **limits)


FORESTS = pytest.mark.parametrize(
    "kind", [pytest.param(ReferenceForest, id="numpy"), pytest.param(compiled, id="compiled", marks=needs_compiler)]
)


def grow(forest: Forest, seed: int) -> list[Path]:
    """Grow the tree of two SSMs to the end; the paths that were expanded."""
    case = replace(growth_case(0), seed=seed, kind="random", vocab=12, weights=np.full((1, 2), 0.5))
    expanded: list[Path] = []
    while len(forest.frontier.nodes):
        expanded += [tuple(path) for path in forest.paths()]
        assert not forest.extend(said_by(case, forest), case.weights).any()
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
    grow(forest, 5)
    (tree,) = forest.finish(NAMES)
    tree.check_integrity()
    for depth, children in enumerate(branching):
        for node in np.flatnonzero(tree.depths == depth):
            assert (tree.parents == node).sum() == children
    assert len(tree) == 1 + sum(int(np.prod(branching[: i + 1])) for i in range(len(branching)))


@FORESTS
def test_limits_of_the_frontier(kind: type[Forest]) -> None:
    forest = kind([TokenTree.root(1)], [TreeLimits(99, 5000, None, ())], 2, EVIDENCE)
    by_depth = np.bincount([len(path) for path in grow(forest, 1)])
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


@needs_compiler
@pytest.mark.parametrize("seed", range(60))
def test_compiled_trees_are_those_of_numpy(seed: int) -> None:
    """Levels, masses, draws and slots, some of fixed shapes; wide vocabularies; trees that are stopped."""
    rng, case = np.random.default_rng((7, seed)), growth_case(seed)
    case = replace(case, vocab=int(rng.choice([case.vocab, 64, 200, 1027])))
    sizes = case.sizes
    shapes = []
    for nodes, ends in zip(case.nodes, case.ends, strict=True):
        branching = tuple(rng.integers(1, 4, int(rng.integers(1, 4))).tolist()) if rng.random() < 0.3 else None
        shapes.append(TreeLimits(len(branching or range(sizes.depth)), nodes, branching, ends))
    limits = {"max_children": max(sizes.proposals, 3), "max_frontier": sizes.frontier}
    pair = [kind(case.trees, shapes, sizes.ssms, case.evidence, **limits) for kind in (ReferenceForest, compiled)]
    while len(pair[0].frontier.nodes):
        broken = [forest.extend(said_by(case, forest), case.weights) for forest in pair]
        assert (broken[0] == broken[1]).all()
        stopped = rng.random(sizes.requests) < 0.1
        for forest in pair:
            if stopped.any():
                forest.stop(stopped)
        for ours, theirs in zip(pair[0].frontier, pair[1].frontier, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(pair[0].open_mass(), pair[1].open_mass())
        np.testing.assert_array_equal(pair[0].level_mass(0.01), pair[1].level_mass(0.01))
    names = tuple(f"ssm-{i}" for i in range(sizes.ssms))
    for ours, theirs in zip(*(forest.finish(names) for forest in pair), strict=True):
        np.testing.assert_array_equal(ours.slots, theirs.slots)
        assert_same_tree(ours, theirs)


@needs_compiler
@pytest.mark.parametrize("seed", range(10))
def test_places_are_those_of_a_planned_pass(seed: int) -> None:
    """Slots, paths and positions of level after level, as `plan_compiled` finds them; some trees stop."""
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
