"""Masked tree attention: the words, what is refused, and the kernel's cases in the interpreter or on a GPU."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.child import run_cases
from tests.kernel_cases import environments
from treespec_kernels.attention.tree_attention import TreeAttentionConfig, plan_tree_attention, tree_attention_triton
from treespec_kernels.attention.tree_attention_masked import ancestor_masks, num_words, tree_attention_masked_triton
from treespec_kernels.tuning.testing import path_to, tree_attention_inputs, tree_parents


@environments()
def test_cases(environment: dict[str, str]) -> None:
    run_cases("tree_attention_masked_cases.py", environment)


@pytest.mark.parametrize("num_nodes", [1, 31, 32, 33, 63, 64, 65, 200, 256])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_words_hold_the_path_of_every_node(num_nodes: int, window: int | None) -> None:
    parents = tree_parents("random", num_nodes, torch.Generator().manual_seed(num_nodes))
    parents[-1] = num_nodes - 2  # so that the last word has two bits
    words = ancestor_masks(parents, window)
    assert (words.shape, words.dtype) == ((num_nodes, num_words(num_nodes)), np.int64)
    for node in range(num_nodes):
        bits = [i for i in range(64 * words.shape[1]) if int(words[node, i // 64]) >> i % 64 & 1]
        assert bits == sorted(path_to(parents, node)[-(window or num_nodes) :])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="node 1 has parent 2; a parent must precede its child"):
        ancestor_masks([-1, 2, 0])
    with pytest.raises(ValueError, match="window is 0; it must be 1 or more"):
        ancestor_masks([-1], window=0)

    shape: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
    inputs = tree_attention_inputs([5], [[-1, 0]], **shape)
    rows = {name: value for name, value in inputs.rows.items() if name != "ancestors"}
    caches = (inputs.q, inputs.k_cache, inputs.v_cache)
    words = torch.from_numpy(ancestor_masks([-1, 0]))
    plan = plan_tree_attention(**inputs.plan, **shape, device="cpu", row_slots=[0, 1])
    exact = plan_tree_attention(**inputs.plan, **shape, device="cpu")

    def attend(**changed: Any) -> None:
        tree_attention_masked_triton(*caches, **(rows | {"ancestor_words": words, "plan": plan} | changed))

    with pytest.raises(ValueError, match="the plan is for tree_attention; plan with row_slots"):
        attend(plan=exact)
    with pytest.raises(ValueError, match="the plan is for tree_attention_masked; plan without row_slots"):
        tree_attention_triton(*caches, **inputs.rows, plan=plan)
    with pytest.raises(ValueError, match="the plan is for window None and the pass has 3; plan for that window"):
        attend(window=3)
    with pytest.raises(ValueError, match=r"ancestor_words has dtype torch\.int32; convert it to torch.int64"):
        attend(ancestor_words=words.int())
    with pytest.raises(ValueError, match=r"ancestor_words has shape \[2, 5\]; a tree has 256 nodes at most"):
        attend(ancestor_words=words.expand(2, 5))
    with pytest.raises(ValueError, match="row_slots are for a masked plan, and a masked plan needs them"):
        plan.refill(**inputs.plan)
    with pytest.raises(ValueError, match=r"row_slots \[0, 256\]: one tree index per row is needed, 0 to 255"):
        plan.refill(**inputs.plan, row_slots=[0, 256])
    with pytest.raises(ValueError, match="block_n is 128; a masked plan takes 64 at most"):
        config = TreeAttentionConfig(16, 128, 4, 2)
        plan_tree_attention(**inputs.plan, **shape, device="cpu", row_slots=[0, 1], config=config)
