"""Specs of the tree ops. Their sizes do not depend on the model, so every shape gives the same specs."""

from __future__ import annotations

from treespec_kernels.aot.kernel_spec import KernelShape, KernelSpec
from treespec_kernels.tree import tree_merge as merge
from treespec_kernels.tree import tree_root as root
from treespec_kernels.tree import tree_select as select
from treespec_kernels.tree import tree_walk as walk
from treespec_kernels.tree.device_trees import block_of
from treespec_kernels.tree.growth_limits import FRONTIER, MAX_DEPTH, SEEDS
from treespec_kernels.tree.tree_merge_kernels import merge_level
from treespec_kernels.tree.tree_root_kernels import start_round
from treespec_kernels.tree.tree_select_kernels import select_nodes
from treespec_kernels.tree.tree_walk_kernels import walk_down

_FLOATS = ("probs", "weights", "seed_probs", "seed_ratios", "cand_values", "frontier_values")


def tree_merge(shape: KernelShape, target: str | None) -> list[KernelSpec]:
    """Return specs for a typical and a large frontier."""
    specs = []
    for num_ssms, frontier, proposals in ((3, 8, 8), (3, 16, 8)):
        constants = merge.blocks_of(num_ssms, frontier, proposals, 4, SEEDS)
        specs.append(
            KernelSpec(
                kernel=merge_level,
                types=dict.fromkeys(_FLOATS, "*fp32"),
                constants=constants | {"MAX_DEPTH": MAX_DEPTH, "BLOCK_W": block_of(MAX_DEPTH + 1)},
                options={"num_warps": merge.warps_of(constants), "enable_fp_fusion": False},
                config={"num_ssms": num_ssms, "frontier": frontier, "proposals": proposals},
            )
        )
    return specs


def tree_root(shape: KernelShape, target: str | None) -> list[KernelSpec]:
    """Return the spec for the default growth limits."""
    frontier, depth, candidates = FRONTIER, MAX_DEPTH, 3072
    return [
        KernelSpec(
            kernel=start_round,
            types=dict.fromkeys(("cand_values", "frontier_values"), "*fp32"),
            constants={
                "CANDIDATES": candidates,
                "FRONTIER": frontier,
                "WIDTH": depth + 1,
                "SEEDS": SEEDS,
                "BLOCK_Q": root.BLOCK_Q,
                "BLOCK_F": block_of(frontier),
                "BLOCK_W": block_of(depth + 1),
                "BLOCK_S": block_of(SEEDS),
            },
            options={"num_warps": root.NUM_WARPS, "enable_fp_fusion": False},
            config={"frontier": frontier, "max_depth": depth, "candidates": candidates},
        )
    ]


def tree_select(shape: KernelShape, target: str | None) -> list[KernelSpec]:
    """Return specs for a typical and for the largest tree."""
    specs = []
    for candidates, max_depth, max_nodes in ((256, 12, 64), (512, 7, 256)):
        constants = select.blocks_of(candidates, SEEDS, max_depth, max_nodes)
        specs.append(
            KernelSpec(
                kernel=select_nodes,
                types=dict.fromkeys(("cand_values", "seed_probs", "least_values", "tree_values"), "*fp32"),
                constants=constants,
                options={"num_warps": select.warps_of(constants), "enable_fp_fusion": False},
                config={"candidates": candidates, "max_depth": max_depth, "max_nodes": max_nodes},
            )
        )
    return specs


def tree_walk(shape: KernelShape, target: str | None) -> list[KernelSpec]:
    """Return specs for a typical and for the largest tree."""
    specs = []
    for max_depth, max_nodes in ((12, 64), (12, 256)):
        constants = walk.blocks_of(max_depth, max_nodes)
        specs.append(
            KernelSpec(
                kernel=walk_down,
                types={"choices": "*i64", "finite": "*i1"},
                constants=constants,
                options={"num_warps": walk.warps_of(constants), "enable_fp_fusion": False},
                config={"max_depth": max_depth, "max_nodes": max_nodes},
            )
        )
    return specs
