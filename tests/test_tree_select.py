"""Tree select: each implementation against a dictionary of paths, and what is refused."""

from typing import Any

import pytest
import torch

from tests.child import run_cases
from tests.growth import Sizes
from tests.kernel_cases import environments
from treespec_kernels.tree.device_trees import DeviceTrees
from treespec_kernels.tree.tree_select import tree_select_ref, tree_select_triton


@environments("TREESPEC_TREE_SELECT")
def test_cases(environment: dict[str, str]) -> None:
    run_cases("tree_select_cases.py", environment)


@pytest.mark.parametrize("tree_select", [tree_select_ref, tree_select_triton])
def test_what_does_not_fit_is_refused(tree_select: Any) -> None:
    forest = Sizes(2, 1, 2, 2, 3).forest()
    integers = torch.zeros(2, dtype=torch.int32)
    fitting: dict[str, Any] = {
        "root_tokens": integers,
        "nodes": 4,
        "least_values": torch.zeros(2),
        "max_depths": integers,
        "out": DeviceTrees.allocate(2, nodes=4, max_depth=3),
    }

    def select(**wrong: Any) -> None:
        tree_select(forest, Sizes(2, 1, 2, 2, 3).unproposed(), **(fitting | wrong))

    with pytest.raises(ValueError, match="nodes is 0; expected 1 or more, and at most the nodes of out"):
        select(nodes=0)
    with pytest.raises(ValueError, match="nodes is 5; expected 1 or more"):
        select(nodes=5)
    with pytest.raises(ValueError, match=r"ancestors has shape \[2, 4, 3\]; expected \[B 2, _, width 4\]"):
        select(out=DeviceTrees.allocate(2, nodes=4, max_depth=2))


def test_trees_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="nodes is 0; expected 1 or more"):
        DeviceTrees.allocate(1, nodes=0, max_depth=1)
    trees = DeviceTrees.allocate(2, nodes=3, max_depth=1)
    tensors = {name: getattr(trees, name) for name in DeviceTrees.__dataclass_fields__}
    with pytest.raises(ValueError, match=r"num_nodes has shape \[2, 3\]; expected \[2\]"):
        DeviceTrees(**(tensors | {"num_nodes": trees.tokens}))
    with pytest.raises(ValueError, match=r"ancestors has shape \[2, 3\]; expected \[B, N, D \+ 1\]"):
        DeviceTrees(**(tensors | {"ancestors": trees.tokens}))
