"""Trees that grow, in numpy and compiled, and those of the ops: SSMs and seeds merged, budgets, frontiers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.enumeration import paths_of
from tests.helpers.growth import assert_same_trees, grown_by_ops, grown_on_host, growth_case, said_by
from tests.helpers.libraries import LIBRARIES
from tests.helpers.models import assert_same_tree, quick, tree_of
from tests.helpers.quantized_checkpoints import needs_compiler
from treespec.drafters.evidence import SeedEvidence
from treespec.drafters.ssm.forest import CompiledForest, Forest, TreeLimits
from treespec.drafters.ssm.reference_forest import ReferenceForest
from treespec.tree import TokenTree
from treespec_kernels.cpu.cpu_library import find_compiler
from treespec_kernels.cpu.growth_cpu import growth_library
from treespec_kernels.tree.growth_limits import DEEPEST, MAX_EXPANDED, frontier_width

NAMES = ("a", "b")
EVIDENCE = SeedEvidence(0.5, 0.8)


def compiled(*parts: Any, **limits: int) -> CompiledForest:
    return CompiledForest(*parts, library=growth_library(find_compiler(), LIBRARIES), **limits)


FORESTS = pytest.mark.parametrize(
    "kind", [pytest.param(ReferenceForest, id="numpy"), pytest.param(compiled, id="compiled", marks=needs_compiler)]
)


@pytest.mark.parametrize("part", quick(range(16), (0, 4)))
def test_trees_are_those_of_the_ops(part: int) -> None:
    """2,000 trees and more: those of numpy and of the ops' references are the same, node for node."""
    count = 0
    for number in range(part, 840, 16):
        case = growth_case(number)
        trees = grown_on_host(case, ReferenceForest)
        assert_same_trees(grown_by_ops(case), trees)
        count += len(trees)
    assert count > 100


@FORESTS
def test_limits_of_the_frontier(kind: type[Forest]) -> None:
    case = replace(growth_case(0), kind="random", vocab=12, weights=np.full((1, 2), 0.5))
    forest = kind([TokenTree.root(1)], [TreeLimits(99, 5000, None, ())], 2, EVIDENCE)
    depths: list[int] = []
    while len(forest.frontier.nodes):
        depths += map(len, forest.paths())
        assert not forest.extend(said_by(case, forest), case.weights).any()
    by_depth = np.bincount(depths)
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
