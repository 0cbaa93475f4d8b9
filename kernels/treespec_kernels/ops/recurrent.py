"""Entry of recurrent layers: their states along token trees, and their convolution."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from treespec_kernels.ops.linear import key_of
from treespec_kernels.ops.op import Case, Inputs, Op, mapped
from treespec_kernels.ops.shapes import Setting
from treespec_kernels.recurrent.mixer_rows import (
    MixerSizes,
    gate_rows_ref,
    gate_rows_triton,
    mix_rows_ref,
    mix_rows_triton,
)
from treespec_kernels.recurrent.round_states import (
    RoundPlan,
    exchange_inputs_ref,
    exchange_inputs_triton,
    keep_path_ref,
    keep_path_triton,
    round_plan_ref,
    round_plan_triton,
)
from treespec_kernels.recurrent.state_update import (
    Level,
    StatePaths,
    causal_conv_ref,
    causal_conv_triton,
    state_update_ref,
    state_update_triton,
)
from treespec_kernels.tuning.testing import path_to, tree_parents

REQUESTS = 3  # one of them is idle
KERNEL = 4  # tokens of the convolution
PLACES = 70  # for inputs of a request
REPLAYED = (2, 0, 1)  # rows of the first requests


def state_update_by_row(
    states: Tensor,
    qk: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    paths: StatePaths,
    reads: bool,
    tiled: bool,
) -> Tensor:
    """Compute `state_update_ref` row by row, in the order of `paths`."""
    order, parents = paths.order.tolist(), paths.parents.tolist()
    out, of_rows = torch.zeros_like(v), dict[int, Tensor]()
    zero = torch.zeros(1, dtype=torch.int64, device=v.device)
    of_requests = (part.tolist() for part in (paths.slots, paths.starts, paths.ends, paths.last))
    for slot, start, end, last in zip(*of_requests, strict=True):
        for row in order[start:end]:
            state = (states[slot] if parents[row] < 0 else of_rows[parents[row]])[None].clone()
            out += state_update_ref(state, qk, v, beta, decay, [Level(zero + row, zero, zero, zero)], reads, tiled)
            of_rows[row] = state[0]
        if last >= 0:
            states[slot] = of_rows[last]
    return out


def _inputs(setting: Setting, reads: bool, generator: torch.Generator) -> Inputs:
    """Rows of a planned round, whose trees have nodes with several children."""
    host = replace(setting, device=torch.device("cpu"))
    plan = round_plan_ref(**_round_inputs(host, REQUESTS, generator).arguments)
    paths: StatePaths = mapped(lambda table: table.to(setting.device), plan.paths)
    heads, key_dim, value_dim = setting.shape.num_heads, setting.shape.head_dim, setting.shape.head_dim + 8
    draw, count = partial(setting.random_fp32, generator), len(paths.parents)
    arguments: dict[str, Any] = {
        "states": draw(REQUESTS, heads, key_dim, value_dim),
        "qk": draw(count, 2 * setting.shape.num_kv_heads, key_dim) * key_dim**-0.5,
        "v": draw(count, heads, value_dim),
        "beta": draw(count, heads).sigmoid(),
        "decay": draw(count, heads).sigmoid(),
    }
    return Inputs(arguments | {"paths": paths, "reads": reads, "tiled": not reads})


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
        yield Case(op, setting, key, f"states of a {rule}", partial(_inputs, setting, reads), weight=0.0)
    changes: dict[str, Any] = {"ref": causal_conv_ref, "run": causal_conv_triton, "writes": (), "rows": {"taps": 0}}
    make = partial(_conv_inputs, setting, rows)
    yield Case(replace(op, **changes), setting, key, "convolution", make, weight=0.0, num_rows=rows)


def _rounds(setting: Setting, requests: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random trees behind some replayed rows, and their deepest paths, on the host; the last one of several is
    idle."""
    nodes, host = setting.nodes + 12, torch.Generator().manual_seed(generator.initial_seed())
    depths = torch.full((requests, nodes), -1, dtype=torch.int32, device="cpu")
    ancestors = torch.arange(nodes, dtype=torch.int32, device="cpu")[None, :, None].repeat(requests, 1, nodes)
    for request in range(max(requests - 1, 1)):
        parents = tree_parents("random", nodes - request % 2, host)
        for node in range(len(parents)):
            path = path_to(parents, node)
            depths[request, node] = len(path) - 1
            ancestors[request, node, : len(path)] = torch.tensor(path, dtype=torch.int32, device="cpu")
    replayed = torch.tensor((REPLAYED * requests)[:requests], dtype=torch.int32, device="cpu")
    slots = torch.arange(requests, dtype=torch.int32, device="cpu").flip(0)
    paths = ancestors[range(requests), depths.argmax(1)]
    tables = {"slots": slots, "replayed": replayed, "depths": depths, "ancestors": ancestors, "paths": paths}
    return tables | {"path_lens": depths.amax(1) + 1}


def _round_inputs(setting: Setting, requests: int, generator: torch.Generator, spreads: bool = False) -> Inputs:
    rounds = {name: table.to(setting.device) for name, table in _rounds(setting, requests, generator).items()}
    arguments = {name: rounds[name] for name in ("replayed", "depths", "ancestors")}
    _, nodes, width = rounds["ancestors"].shape
    out = RoundPlan.allocate(rounds["slots"], nodes, width, KERNEL - 1, setting.device)
    flag = torch.full((1,), int(spreads), dtype=torch.int32, device=setting.device)
    return Inputs(arguments | {"spreads": flag, "out": out})


def _exchange_inputs(setting: Setting, requests: int, generator: torch.Generator) -> Inputs:
    rounds, channels = _rounds(setting, requests, generator), setting.shape.hidden_size
    nodes = rounds["depths"].shape[1]
    arguments: dict[str, Any] = {name: rounds[name].to(setting.device) for name in ("slots", "replayed", "depths")}
    arguments["kept"] = setting.random(generator, requests, setting.layers, PLACES + nodes, channels)[:, -1]
    arguments["new_inputs"] = setting.random(generator, requests * nodes, channels)
    return Inputs(arguments | {"width": nodes, "history": KERNEL - 1})


def _path_inputs(setting: Setting, requests: int, generator: torch.Generator) -> Inputs:
    rounds = _rounds(setting, requests, generator)
    arguments: dict[str, Any] = {name: rounds[name].to(setting.device) for name in ("slots", "paths", "path_lens")}
    size = requests, setting.layers, PLACES + rounds["depths"].shape[1], setting.shape.hidden_size
    return Inputs(arguments | {"inputs": setting.random(generator, *size), "history": KERNEL - 1})


def _round_cases(op: Op, setting: Setting) -> Iterator[Case]:
    key = key_of(setting, hidden_size=setting.shape.hidden_size)
    exchange = replace(op, ref=exchange_inputs_ref, run=exchange_inputs_triton, writes=("kept",))
    path = replace(op, ref=keep_path_ref, run=keep_path_triton, writes=("inputs",))
    for requests in setting.batches:
        makes: list[tuple[str, Op, Callable[..., Inputs]]] = [("plan", op, _round_inputs)]
        makes += [("measured plan", op, partial(_round_inputs, spreads=True))]
        makes += [("inputs", exchange, _exchange_inputs), ("path", path, _path_inputs)]
        for name, entry, make in makes:
            yield Case(entry, setting, key, f"{name} of {requests}", partial(make, setting, requests), weight=0.0)


def _mixer_inputs(setting: Setting, sizes: MixerSizes, generator: torch.Generator) -> Inputs:
    rows, channels = setting.nodes + 5, 2 * sizes.key_heads * sizes.key_dim + sizes.heads * sizes.value_dim
    draw = partial(setting.random_fp32, generator)
    arguments = {
        "inputs": setting.random(generator, rows + KERNEL, channels + (1 + sizes.delta) * sizes.heads),
        "taps": torch.arange(rows, device=setting.device)[:, None] + torch.arange(KERNEL, device=setting.device),
        "weight": draw(KERNEL, channels),
        "bias": None if sizes.delta else draw(channels),
        "dt_bias": 4 * draw(sizes.heads),
        "rate": -draw(sizes.heads).exp(),
    }
    return Inputs(arguments | {"sizes": sizes})


def _gate_inputs(setting: Setting, sizes: MixerSizes, generator: torch.Generator) -> Inputs:
    draw, rows, width = partial(setting.random_fp32, generator), setting.nodes + 5, sizes.heads * sizes.value_dim
    arguments: dict[str, Any] = {name: draw(rows, sizes.heads, sizes.value_dim) for name in ("out", "v")}
    arguments["gate"] = setting.random(generator, rows, 8 + width)[:, 8:]
    arguments |= {"gain": draw(sizes.value_dim if sizes.delta else width)}
    return Inputs(arguments | {"skip": None if sizes.delta else draw(sizes.heads), "sizes": sizes, "eps": 1e-5})


def _mixer_cases(op: Op, setting: Setting) -> Iterator[Case]:
    shape, rows = setting.shape, setting.nodes + 5
    key = key_of(setting, heads=shape.num_heads, key_dim=shape.head_dim)
    gate = replace(op, ref=_gated, run=gate_rows_triton, rows={"out": 0, "v": 0, "gate": 0})
    for name, delta in (("Gated DeltaNet", True), ("Mamba 2", False)):
        sizes = MixerSizes(delta, shape.num_kv_heads, shape.head_dim, shape.num_heads, shape.head_dim + 8, delta)
        for entry, part, make in ((op, "inputs", _mixer_inputs), (gate, "outputs", _gate_inputs)):
            case = partial(Case, entry, setting, key, f"{part} of a {name}")
            yield case(partial(make, setting, sizes), weight=0.0, num_rows=rows)


def _gated(out: Tensor, **arguments: Any) -> Tensor:
    return gate_rows_ref(out.clone(), **arguments)


OPS = (
    Op("mixer_rows", mix_rows_ref, mix_rows_triton, _mixer_cases, rows={"taps": 0}),
    Op("state_update", state_update_by_row, state_update_triton, _cases, writes=("states",)),
    Op("round_states", round_plan_ref, round_plan_triton, _round_cases, writes=("out",), exact=True),
)
