"""Entry of recurrent layers: their states along token trees, and their convolution."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from treespec_kernels.ops.linear import key_of
from treespec_kernels.ops.op import Case, Inputs, Op
from treespec_kernels.ops.shapes import Setting
from treespec_kernels.recurrent.state_update import (
    Level,
    StatePaths,
    causal_conv_ref,
    causal_conv_triton,
    state_update_ref,
    state_update_triton,
)

REQUESTS = 2
KERNEL = 4  # tokens of the convolution


def state_update_by_row(
    states: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    paths: StatePaths,
    reads: bool,
) -> Tensor:
    """Compute `state_update_ref` row by row, in the order of `paths`."""
    starts, order, parents, last = (part.tolist() for part in (paths.starts, paths.order, paths.parents, paths.last))
    out, of_rows = torch.zeros_like(v), dict[int, Tensor]()
    zero = torch.zeros(1, dtype=torch.int64, device=v.device)
    for request in range(len(states)):
        for row in order[starts[request] : starts[request + 1]]:
            state = (states[request] if parents[row] < 0 else of_rows[parents[row]])[None].clone()
            out += state_update_ref(state, q, k, v, beta, decay, [Level(zero + row, zero, zero, zero)], reads)
            of_rows[row] = state[0]
        if last[request] >= 0:
            states[request] = of_rows[last[request]]
    return out


def _paths(setting: Setting, rows: int) -> StatePaths:
    """Return binary trees of both requests; the state after the first one's last row is stored."""
    parents = [-1, *((row - 1) // 2 for row in range(1, rows))]
    kept = [row if 2 * row + 2 < rows else -1 for row in range(rows)]

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cpu").to(setting.device)

    both = range(REQUESTS * rows)
    return StatePaths(
        integers([0, rows, 2 * rows]),
        integers([*both]),
        integers([parents[row % rows] + (parents[row % rows] >= 0) * (row // rows * rows) for row in both]),
        integers([kept[row % rows] + (kept[row % rows] >= 0) * (row // rows * rows) for row in both]),
        integers([rows - 1, -1]),
        2 * rows,
    )


def _inputs(setting: Setting, rows: int, reads: bool, generator: torch.Generator) -> Inputs:
    heads, key_dim, value_dim = setting.shape.num_heads, setting.shape.head_dim, setting.shape.head_dim + 8
    draw, count = partial(setting.random_fp32, generator), REQUESTS * rows
    arguments: dict[str, Any] = {
        "states": draw(REQUESTS, heads, key_dim, value_dim),
        "q": draw(count, heads, key_dim),
        "k": draw(count, heads, key_dim) * key_dim**-0.5,
        "v": draw(count, heads, value_dim),
        "beta": draw(count, heads).sigmoid(),
        "decay": draw(count, heads).sigmoid(),
    }
    return Inputs(arguments | {"paths": _paths(setting, rows), "reads": reads})


def _conv_inputs(setting: Setting, rows: int, generator: torch.Generator) -> Inputs:
    channels = setting.shape.hidden_size
    taps = torch.arange(rows, device=setting.device)[:, None] + torch.arange(KERNEL, device=setting.device)
    inputs = setting.random(generator, rows + KERNEL, channels)
    weight, bias = (setting.random_fp32(generator, *size, channels) for size in ((KERNEL,), ()))
    return Inputs({"inputs": inputs, "taps": taps, "weight": weight, "bias": bias})


def _cases(op: Op, setting: Setting) -> Iterator[Case]:
    key = key_of(setting, heads=setting.shape.num_heads, key_dim=setting.shape.head_dim)
    rows = setting.nodes + 5  # so that nodes have several children
    for rule, reads in (("Gated DeltaNet", True), ("Mamba 2", False)):
        yield Case(op, setting, key, f"states of a {rule}", partial(_inputs, setting, rows, reads), weight=0.0)
    changes: dict[str, Any] = {"ref": causal_conv_ref, "run": causal_conv_triton, "writes": (), "rows": {"taps": 0}}
    make = partial(_conv_inputs, setting, rows)
    yield Case(replace(op, **changes), setting, key, "convolution", make, weight=0.0, num_rows=rows)


OPS = (Op("state_update", state_update_by_row, state_update_triton, _cases, writes=("states",)),)
