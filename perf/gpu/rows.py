"""Comparisons of the bits of rows: in linear layers, and in whole passes of trees, decoding and repeats."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gpu.models import Passes
from gpu.stage import Context
from treespec_kernels.launch.triton_launch import target_of
from treespec_kernels.linear.row_linear import RowLinearConfig, row_linear_ref, row_linear_triton
from treespec_kernels.tuning.testing import path_to, tree_parents
from treespec_kernels.tuning.tuned import KernelConfigs

REPEAT_SECONDS = 20.0  # limit of the repeats of one pass


def linear(num_rows: int, out_features: int, in_features: int, gate: bool, context: Context) -> dict[str, Any]:
    """Count numbers of rows at which bits differ from a pass of `num_rows` rows, and measure the error.

    Every number of rows is computed by the tile that a pass would take, and `num_rows` rows by each tile.
    """
    setting = context.setting
    key = {"dtype": setting.dtype, "out_features": out_features, "in_features": in_features, "silu_gate": gate}
    default = RowLinearConfig.default(setting.dtype, out_features, in_features, gate, target_of(setting.device))
    config = KernelConfigs.load(setting.device).get("row_linear", key | {"groups": 1}, default)
    config = replace(config, fixed_order_dot=setting.dry)
    options: dict[str, Any] = {"silu_gate": gate, "config": config}
    x = setting.random(num_rows, in_features)
    weight = setting.random(out_features, in_features, scale=in_features**-0.5)
    whole = row_linear_triton(x, weight, **options)
    differing = []
    for rows in range(1, num_rows):
        # Compute the same rows at the start and at the end of a shorter pass.
        behind = torch.cat([x[rows:], x[:rows]])[-rows - 1 :]
        same = torch.equal(row_linear_triton(x[:rows], weight, **options), whole[:rows])
        if not same or not torch.equal(row_linear_triton(behind, weight, **options)[-rows:], whole[:rows]):
            differing.append(rows)
    each = [config.with_tile(tile) for tile in config.tiles]
    tiled = [row_linear_triton(x, weight, silu_gate=gate, config=one) for one in each]
    expected = row_linear_ref(x.float(), weight.float(), bias=None, residual=None, silu_gate=gate).float()
    error = float((whole.float() - expected).norm() / expected.norm())
    figures = {"row_counts": num_rows - 1, "differing_row_counts": len(differing), "relative_error": error}
    figures |= {
        "tiles": [tile.block_m for tile in config.tiles],
        "differing_tiles": sum(not torch.equal(out, whole) for out in tiled),
    }
    return figures | {"first": differing[:1], "config": str(config)}


@torch.inference_mode()
def differing_repeats(opened: Passes, prefix: int, nodes: int, repeats: int) -> dict[str, int]:
    """Count repeated passes over one tree whose logits differ from the first."""
    run = opened.prepare(prefix, tree_parents("random", nodes, torch.Generator().manual_seed(0)))
    first, began, count = run().clone(), time.perf_counter(), 0
    differing = torch.zeros((), dtype=torch.int64, device=first.device)
    while count < repeats and time.perf_counter() - began < REPEAT_SECONDS:
        count += 1
        differing += (run() != first).any()
    return {"repeats": count, "differing_repeats": int(differing)}


def differing_nodes(opened: Passes, contexts: Sequence[int], nodes: int, seed: int) -> dict[str, Any]:
    """Count differing nodes of any model at several prefixes."""
    generator = torch.Generator().manual_seed(seed)
    compared, differing, worst, first = 0, 0, 0.0, None
    with torch.inference_mode():
        for prefix in contexts:
            parents = tree_parents("random", nodes, generator)
            tokens = torch.randint(opened.shape.vocab_size, (len(parents),), generator=generator).tolist()
            tree = opened.prepare(prefix, parents, tokens)().clone()
            for node in sorted({0, 1, *range(5, len(parents), 6), len(parents) - 1}):
                for depth, step in enumerate(path_to(parents, node)):
                    alone = opened.prepare(prefix + depth, [-1], [tokens[step]])()
                compared += 1
                if not torch.equal(tree[node], alone[0]):
                    differing += 1
                    worst = max(worst, float((tree[node].float() - alone[0].float()).abs().max()))
                    first = first or f"behind {prefix} tokens, node {node}"
    return {"rows": compared, "differing_rows": differing, "largest_difference": worst, "first": first}
