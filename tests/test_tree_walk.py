"""Tree walk: each implementation against `verify_greedy`, a whole round of the batch, and what is refused."""

from typing import Any

import pytest
import torch

from tests.child import run_cases
from treespec_kernels.tree.device_trees import DeviceTrees
from treespec_kernels.tree.tree_walk import Walk, tree_walk_ref, tree_walk_triton

CASES = ["tree_walk_cases.py", "tree_round_cases.py"]


def test_ref() -> None:
    run_cases(CASES, {"TREESPEC_TREE_WALK": "ref"})


def test_triton_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, {"TREESPEC_TREE_WALK": "triton", "TRITON_INTERPRET": "1"})


@pytest.mark.gpu
def test_triton_on_a_gpu() -> None:
    run_cases(CASES, {"TREESPEC_TREE_WALK": "triton", "TRITON_INTERPRET": "0"})


@pytest.mark.parametrize("tree_walk", [tree_walk_ref, tree_walk_triton])
def test_what_does_not_fit_is_refused(tree_walk: Any) -> None:
    trees = DeviceTrees.allocate(2, nodes=4, max_depth=3)
    choices, finite = torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"choices has shape \[8\]; expected \[2, 4\] as the trees"):
        tree_walk(trees, choices.flatten(), finite)
    with pytest.raises(ValueError, match=r"choices has dtype torch\.float32; convert it to torch\.int32 or torch\.in"):
        tree_walk(trees, choices.float(), finite)
    with pytest.raises(ValueError, match=r"finite has shape \[2, 3\]; expected \[2, 4\] as the trees"):
        tree_walk(trees, choices, finite[:, :3])
    with pytest.raises(ValueError, match=r"finite is on meta and the trees on cpu; move it there"):
        tree_walk(trees, choices, finite.to("meta"))
    with pytest.raises(ValueError, match=r"out\.paths has shape \[2, 3\]; expected \[2, 4\], contiguous"):
        tree_walk(trees, choices, finite, out=Walk.allocate(2, max_depth=2))
