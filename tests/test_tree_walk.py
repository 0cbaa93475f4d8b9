"""Tree walk: each implementation against `verify_greedy`, a whole round of the batch, and what is refused."""

from typing import Any

import pytest
import torch

from tests.child import run_cases
from tests.kernel_cases import environments
from treespec_kernels.tree.device_trees import DeviceTrees
from treespec_kernels.tree.tree_walk import Walk, tree_walk_ref, tree_walk_triton


@environments("TREESPEC_TREE_WALK")
def test_cases(environment: dict[str, str]) -> None:
    run_cases(["tree_walk_cases.py", "tree_round_cases.py"], environment)


@pytest.mark.parametrize("tree_walk", [tree_walk_ref, tree_walk_triton])
def test_what_does_not_fit_is_refused(tree_walk: Any) -> None:
    trees = DeviceTrees.allocate(2, nodes=4, max_depth=3)
    choices, finite = torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"paths has shape \[2, 3\]; expected \[B 2, width 4\]"):
        tree_walk(trees, choices, finite, out=Walk.allocate(2, max_depth=2))
