"""Trees that grow in numpy, in one C++ call and by the ops: SSMs and seeds merged, budgets, levels that pay."""

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.enumeration import paths_of
from tests.helpers.growth import assert_same_trees, grown_by_ops, grown_compiled, grown_on_host, growth_case, said_by
from tests.helpers.models import assert_same_tree, quick, tree_of
from tests.helpers.quantized_checkpoints import needs_compiler
from treespec.drafters.evidence import SeedEvidence
from treespec.drafters.ssm.forest import Forest, TreeLimits
from treespec.drafters.ssm.levels import stop_unprofitable
from treespec.tree import TokenTree
from treespec_kernels.tree.growth_limits import DEEPEST, MAX_EXPANDED, frontier_width
from treespec_kernels.tree.level_rule import LevelRule

NAMES = ("a", "b")
EVIDENCE = SeedEvidence(0.5, 0.8)


@pytest.mark.parametrize("part", quick(range(16), (0, 4)))
def test_trees_are_those_of_the_ops(part: int) -> None:
    """2,000 trees and more: those of numpy and of the ops' references are the same, node for node."""
    count = 0
    for number in range(part, 840, 16):
        case = growth_case(number)
        trees = grown_on_host(case)
        assert_same_trees(grown_by_ops(case), trees)
        count += len(trees)
    assert count > 100


def test_limits_of_the_frontier() -> None:
    case = replace(growth_case(0), kind="random", vocab=12, weights=np.full((1, 2), 0.5))
    forest = Forest([TokenTree.root(1)], [TreeLimits(99, 5000, None, ())], EVIDENCE)
    depths: list[int] = []
    while len(forest.frontier.nodes):
        depths += map(len, forest.paths())
        assert not forest.extend(said_by(case, forest), case.weights).any()
    by_depth = np.bincount(depths)
    assert by_depth.tolist() == [1, *(frontier_width(depth) for depth in range(1, DEEPEST + 1))]
    assert by_depth.sum() <= MAX_EXPANDED


def test_a_tree_without_levels_is_its_seed() -> None:
    hints = {(1,): 0.5, (2,): 0.25, (1, 1): 0.5}
    forest = Forest([tree_of(8, hints, "lookup"), TokenTree.root(2)], [TreeLimits(0, 16, None, ())] * 2, EVIDENCE)
    assert not len(forest.frontier.nodes)
    seeded, root = forest.finish(NAMES)
    assert paths_of(seeded) == [(), *sorted(hints, key=len)] and len(root) == 1
    assert seeded.slots is not None and (seeded.slots == -1).all()


@needs_compiler
@pytest.mark.parametrize("seed", range(60))
def test_compiled_trees_are_those_of_numpy(seed: int) -> None:
    """Nodes, draws and slots; some of fixed shapes or wide vocabularies; some trees end where a level does not pay."""
    rng, case = np.random.default_rng((7, seed)), growth_case(seed)
    case = replace(case, vocab=int(rng.choice([case.vocab, 64, 200, 1027])))
    sizes = case.sizes
    limits = []
    for nodes, ends in zip(case.nodes, case.ends, strict=True):
        branching = tuple(rng.integers(1, 4, int(rng.integers(1, 4))).tolist()) if rng.random() < 0.3 else None
        depth = len(branching or range(sizes.depth)) * int(rng.random() < 0.9)
        limits.append(TreeLimits(depth, nodes, branching, ends))
    adaptive = rng.random(sizes.requests) < 0.5
    costs = rng.exponential(0.1), rng.exponential(0.02), 0.01
    rule = LevelRule(float(rng.uniform(0.5, 1)), 1.0, (0.5 + rng.random(sizes.requests)).tolist(), 0.0, *costs)

    options = {"max_children": max(sizes.proposals, 3), "max_frontier": sizes.frontier}
    forest = Forest(case.trees, limits, case.evidence, **options)
    mass, broken = forest.open_mass(), set[int]()
    while len(forest.frontier.nodes):
        if forest.depth and adaptive.any():
            mass = stop_unprofitable(forest, adaptive, rule, mass)
            if not len(forest.frontier.nodes):
                break
        tree_ids = forest.frontier.tree_ids
        broken |= {*tree_ids[forest.extend(said_by(case, forest), case.weights)].tolist()}
    expected = forest.finish([f"ssm-{i}" for i in range(sizes.ssms)])

    trees, scored = grown_compiled(case, limits, rule, adaptive.tolist(), **options)
    assert {*scored.broken} == broken
    for ours, theirs in zip(trees, expected, strict=True):
        np.testing.assert_array_equal(ours.slots, theirs.slots)
        assert_same_tree(ours, theirs)
