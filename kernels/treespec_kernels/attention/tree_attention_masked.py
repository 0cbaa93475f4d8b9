"""Masked tree attention for `exact=False`: `tree_attention` with each row's ancestors given as a bit mask.

Columns are logical slots: the committed positions, then the nodes in tree order. Bit i of a row's words is set if it
attends to node i. All rows of a request share every tile of keys, and keys are not gathered per row, which is cheaper
than `tree_attention`. But sums run in tree order, so a row is not bit-identical to plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from treespec_kernels.attention.tree_attention import (
    PassTables,
    check_cap,
    check_pass,
    check_plan,
    run_plan,
    tree_attention_ref,
)
from treespec_kernels.attention.tree_attention_plan import MAX_NODES, TreeAttentionPlan, check_window
from treespec_kernels.launch.triton_launch import check_last_strides, require_triton

WORD_BITS = 64


def num_words(num_nodes: int) -> int:
    """Return the number of 64-bit words for one bit per node."""
    return -(-num_nodes // WORD_BITS)


def ancestor_masks(parents: Sequence[int], window: int | None = None) -> np.ndarray:
    """Return the ancestor words of a tree's nodes.

    Args:
        parents: the parent of each node, -1 for the root. Parents precede their children.
        window: the model's sliding window, which hides ancestors `window` or more levels above; None for no window.

    Returns:
        int64 [num_nodes, num_words(num_nodes)]: bit i % 64 of word i // 64 of a row is set if it attends to node i. A
        node attends to itself.

    Raises:
        ValueError: a parent does not precede its child, or the window is empty.
    """
    check_window(window)
    words = np.zeros((len(parents), num_words(len(parents))), dtype=np.uint64)
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"node {node} has parent {parent}; a parent must precede its child")
        levels, ancestor = 0, node
        while ancestor >= 0 and (window is None or levels < window):
            words[node, ancestor // WORD_BITS] |= np.uint64(1 << ancestor % WORD_BITS)
            levels, ancestor = levels + 1, parents[ancestor]
    return words.view(np.int64)


def tree_attention_masked_ref(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, ancestor_words: torch.Tensor, **tables: Any
) -> torch.Tensor:
    """Compute `tree_attention_ref` of the ancestors that the words name (reference).

    Args:
        q, k_cache, v_cache, tables: as in `tree_attention_ref`, with the window that the words were made for.
        ancestor_words: as in `tree_attention_masked_triton`.
    """
    bits = torch.arange(WORD_BITS, device=q.device)
    seen = (ancestor_words[:, :, None] >> bits & 1).flatten(1).bool()
    own = torch.arange(seen.shape[1], dtype=torch.int32, device=q.device).expand_as(seen)
    nodes = torch.where(seen, own, seen.shape[1]).sort(dim=1).values  # parents precede their children
    hidden = (tables["depths"] + 1 - seen.sum(dim=1)).clamp(min=0)  # ancestors before the window, which are not read
    place = torch.arange(seen.shape[1], device=q.device)[None] - hidden[:, None]
    ancestors = nodes.gather(1, place.clamp(min=0)).int()
    return tree_attention_ref(q, k_cache, v_cache, ancestors=ancestors, **tables)


def tree_attention_masked_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    row_request: torch.Tensor,
    context_lens: torch.Tensor,
    page_table: torch.Tensor,
    depths: torch.Tensor,
    ancestor_words: torch.Tensor,
    scale: float,
    score_cap: float | None = None,
    window: int | None = None,
    plan: TreeAttentionPlan,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Compute masked tree attention on a GPU, in two launches; arguments as in `tree_attention_triton`, except:

    Args:
        ancestor_words: [num_rows, words] int64, as from `ancestor_masks` with the same window: a row attends to the
            nodes whose bits are set. Node i has logical slot L + i, and no row attends to a node after its own.
        plan: from `plan_tree_attention` with row_slots, or from a `DeviceLayout` with tree_slots.

    Raises:
        ValueError: a shape, dtype, stride or device does not match, or triton cannot run on the tensors.
    """
    tables = PassTables(row_request, context_lens, page_table, depths)
    check_pass(q, k_cache, v_cache, tables, ancestor_words=ancestor_words)
    check_plan(q, k_cache, out, window, True, plan)
    check_cap("score_cap", score_cap)
    if ancestor_words.shape[1] > num_words(MAX_NODES):
        raise ValueError(f"ancestor_words has shape {list(ancestor_words.shape)}; a tree has {MAX_NODES} nodes at most")
    check_last_strides(ancestor_words=ancestor_words)
    require_triton("tree_attention_masked")
    from treespec_kernels.attention.tree_attention_masked_kernels import attend_masked_items

    launch = {"scale": scale, "score_cap": score_cap, "plan": plan, "out": out, "pdl": pdl}
    return run_plan("tree_attention_masked", attend_masked_items, q, k_cache, v_cache, tables, ancestor_words, **launch)
