"""Tree merge and tree root: each implementation against a dictionary of paths, and what is refused."""

from typing import Any

import pytest
import torch

from tests.child import run_cases
from tests.growth import Sizes
from tests.kernel_cases import environments
from treespec_kernels.tree.device_trees import DeviceForest
from treespec_kernels.tree.tree_merge import tree_merge_ref, tree_merge_triton


@environments("TREESPEC_TREE_MERGE")
def test_cases(environment: dict[str, str]) -> None:
    run_cases("tree_merge_cases.py", environment)


@pytest.mark.parametrize("tree_merge", [tree_merge_ref, tree_merge_triton])
def test_what_does_not_fit_is_refused(tree_merge: Any) -> None:
    sizes, tokens, probs = Sizes(2, 3, 4, 5, 2), torch.zeros(3, 2, 4, 5, dtype=torch.int32), torch.zeros(3, 2, 4, 5)
    weights, ends, seeds = torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int32), sizes.unproposed()
    fewer = Sizes(2, 3, 4, 5, 2, seeds=3).unproposed()
    strided = seeds._replace(ratios=torch.zeros(4, 2).T)
    fitting = {"tokens": tokens, "probs": probs, "weights": weights, "end_tokens": ends, "proposed": seeds}
    for name, value, message in [
        ("tokens", tokens.view(3, 2, 5, 4), r"tokens has shape \[3, 2, 5, 4\]; expected \[G 3, B 2, F 4, C 4\]"),
        ("tokens", tokens[:2], r"probs has shape \[3, 2, 4, 5\]; expected \[G 2, B 2, F 4, C 5\]"),
        ("probs", probs[..., :4], r"probs has shape \[3, 2, 4, 4\]; expected \[G 3, B 2, F 4, C 5\]"),
        ("weights", weights.T, r"weights has shape \[3, 2\]; expected \[B 2, G 3\]"),
        ("proposed", fewer, r"tokens has shape \[2, 3\]; expected \[requests 2, seeds 4\]"),
        ("proposed", strided, r"ratios has strides \[1, 2\] .*; make it contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            tree_merge(sizes.forest(), **(fitting | {name: value}))
    fewer_ssms = {"tokens": tokens[:2], "probs": probs[:2], "weights": weights[:, :2]}
    with pytest.raises(ValueError, match=r"tokens has shape .* = 80 candidates as in the forest"):
        tree_merge(sizes.forest(), **(fitting | fewer_ssms))


def test_masks_have_no_room_for_more_ssms() -> None:
    with pytest.raises(ValueError, match="num_ssms is 31; masks hold at most 30"):
        Sizes(1, 31, 1, 1, 1).forest()


def test_forests_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="max_depth is 0; expected 1 or more"):
        Sizes(1, 1, 1, 1, 0).forest()
    with pytest.raises(ValueError, match="8 levels of 512 candidates and 4 seeds are more than 4096"):
        Sizes(1, 3, 16, 8, 8).forest()
    tensors = {name: getattr(Sizes(2, 1, 3, 2, 2).forest(), name) for name in DeviceForest.__dataclass_fields__}
    with pytest.raises(ValueError, match=r"cand_values has dtype torch\.int32; convert it to torch\.float32"):
        DeviceForest(**(tensors | {"cand_values": tensors["cand_masks"]}))
    with pytest.raises(ValueError, match=r"frontier_ancestors has shape \[2, 3\]; expected \[2, 3, 3\]"):
        DeviceForest(**(tensors | {"frontier_ancestors": tensors["frontier"]}))
    with pytest.raises(ValueError, match=r"frontier_slots has strides \[1, 2\] .*; make it contiguous"):
        DeviceForest(**(tensors | {"frontier_slots": torch.zeros(3, 2, dtype=torch.int32).T}))
