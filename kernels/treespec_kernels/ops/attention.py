"""Entries of the attention ops: tree attention, pass layout, QKV with RoPE, and KV commit."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from treespec_kernels.attention.kv_commit import kv_commit_ref, kv_commit_triton
from treespec_kernels.attention.pass_layout import DeviceLayout, PassPlaces, pass_layout_ref
from treespec_kernels.attention.qkv_rope import HeadNorm, qkv_rope_ref, qkv_rope_triton
from treespec_kernels.attention.tree_attention import (
    TreeAttentionConfig,
    plan_tree_attention,
    tree_attention_ref,
    tree_attention_triton,
)
from treespec_kernels.ops.linear import EPS, SPLITS, key_of
from treespec_kernels.ops.op import Case, Inputs, Op, Results
from treespec_kernels.ops.shapes import PAGE_SIZE, Setting
from treespec_kernels.tuning.testing import (
    in_planes,
    kv_commit_inputs,
    path_to,
    scattered_page_table,
    tree_attention_inputs,
    tree_parents,
)

# --- tree attention


def _attention_inputs(
    setting: Setting, requests: int, nodes: int, generator: torch.Generator, window: int | None = None
) -> Inputs:
    """Create random trees of `nodes` nodes, each after `context` committed positions."""
    seed = generator.initial_seed()
    host = torch.Generator().manual_seed(seed)
    trees = [tree_parents("random", nodes, host) for _ in range(requests)]
    lengths = [setting.context + 5 * i for i in range(requests)]
    shape = setting.shape.attention._replace(window=window)
    inputs = tree_attention_inputs(lengths, trees, shape, device=setting.device, seed=seed)
    caches = {"k_cache": inputs.k_cache, "v_cache": inputs.v_cache}
    if setting.shape.planes is not None:
        caches = {name: in_planes(cache, *setting.shape.planes) for name, cache in caches.items()}
    arguments = {"q": inputs.q, **caches, **inputs.rows}
    arguments |= {"score_cap": setting.shape.cap, "window": window}
    return Inputs(arguments, inputs.plan | {"shape": shape})


def _attention_cases(op: Op, setting: Setting) -> list[Case]:
    """Return cases of one tree (with half of the weight), of plain decoding, of a batch of trees, and of a window."""
    shape, nodes = setting.shape, setting.nodes
    timed = {(1, nodes): 0.5, (setting.requests, nodes): 0.25, (1, 1): 0.25}
    if nodes == 1:
        timed[1, 1] = 0.75
    key, cases = _key(setting), []
    for (requests, rows), weight in timed.items():
        positions = 2 * shape.num_kv_heads * (setting.context + rows)
        moved = requests * (positions + 2 * rows * shape.num_heads) * shape.head_dim * shape.dtype.itemsize
        load = f"requests {requests}, nodes {rows}, context {setting.context}"
        make = partial(_attention_inputs, setting, requests, rows)
        cases.append(Case(op, setting, key, load, make, moved, weight, requests * rows))
    first, window = cases[0], 1 + (setting.context + nodes) // 2
    make = partial(_attention_inputs, setting, 1, nodes, window=window)
    return [*cases, replace(first, load=f"{first.load}, window {window}", make=make, weight=0.0)]


def _key(setting: Setting) -> dict[str, Any]:
    return key_of(setting, head_dim=setting.shape.head_dim, group=setting.shape.attention.group)


def _candidates(case: Case) -> Sequence[TreeAttentionConfig]:
    return TreeAttentionConfig.candidates(case.setting.dtype, case.setting.shape.head_dim, case.setting.target)


def _planned(inputs: Inputs, config: Any) -> dict[str, Any]:
    return {"plan": plan_tree_attention(**inputs.host, device=inputs.arguments["q"].device, config=config)}


def _some_rows(inputs: Inputs, index: list[int]) -> Inputs:
    by_row = ("q", "row_request", "depths", "ancestors")
    arguments = inputs.arguments | {name: inputs.arguments[name][index] for name in by_row}
    counts = arguments["row_request"].long().bincount(minlength=len(arguments["context_lens"]))
    depths = [inputs.host["depths"][row] for row in index]
    return Inputs(arguments, inputs.host | {"rows_per_request": counts.tolist(), "depths": depths})


TREE_ATTENTION = Op(
    "tree_attention",
    tree_attention_ref,
    tree_attention_triton,
    _attention_cases,
    _candidates,
    _planned,
    some_rows=_some_rows,
)


# --- pass layout


def _layout_inputs(setting: Setting, requests: int, kind: str, generator: torch.Generator) -> Inputs:
    """Create trees of a kind of `tree_parents`, of `nodes` nodes."""
    nodes, host = setting.nodes, torch.Generator().manual_seed(generator.initial_seed())
    trees = [tree_parents(kind, nodes, host) for _ in range(requests)]
    paths = [[path_to(parents, node) for node in range(nodes)] for parents in trees]
    integers = partial(torch.tensor, dtype=torch.int32, device=setting.device)
    page_table = scattered_page_table(requests, -(-(setting.context + nodes) // PAGE_SIZE), host)
    arguments = {
        "context_lens": integers([setting.context] * requests),
        "page_table": page_table.to(setting.device),
        "depths": integers([[len(path) - 1 for path in tree] for tree in paths]),
        "row_slots": integers([list(range(nodes))] * requests),
        "ancestors": integers([[path + path[-1:] * (nodes - len(path)) for path in tree] for tree in paths]),
    }
    host_sizes = {"max_context": setting.context, "chain": kind == "chain", "shape": setting.shape.attention}
    return Inputs(arguments, host_sizes)


def _layout(inputs: Inputs, config: Any) -> dict[str, Any]:
    depths = inputs.arguments["depths"]
    sizes = *depths.shape, depths.shape[1]
    return {"layout": DeviceLayout.allocate(*sizes, **inputs.host, device=depths.device, config=config)}


def _lay_out(layout: DeviceLayout, **arguments: torch.Tensor) -> PassPlaces:
    layout.fill(**arguments)
    return PassPlaces(layout.positions, layout.slots)


def _layout_cases(op: Op, setting: Setting) -> list[Case]:
    def case(requests: int, kind: str, weight: float = 0.0) -> Case:
        load = f"requests {requests}, nodes {setting.nodes}, context {setting.context}{kind}"
        make = partial(_layout_inputs, setting, requests, "chain" if "chain" in kind else "random")
        return Case(op, setting, _key(setting), load, make, weight=weight)

    timed = [case(requests, "", 1.0) for requests in setting.batches]
    return [*timed, case(1, ", chain")]


# The tests of attention check the plan, the other output of a layout.
PASS_LAYOUT = Op(
    "pass_layout", lambda ancestors, **tables: pass_layout_ref(**tables), _lay_out, _layout_cases, _candidates, _layout
)


# --- RoPE


def _rope_inputs(setting: Setting, rows: int, splits: int, biased: bool, generator: torch.Generator) -> Inputs:
    """Create rows at consecutive positions after `context`, with slots scattered over the pages of a cache."""
    shape, device, random = setting.shape, setting.device, partial(setting.random, generator)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    pages = -(-rows // PAGE_SIZE) * 2 + 1
    dtype = torch.float32 if shape.norm == "rms_plus_one" else setting.dtype
    norm = HeadNorm(
        random(shape.head_dim).to(dtype), random(shape.head_dim).to(dtype), EPS, of_values=shape.planes is not None
    )
    planes, (heads, part_dim) = shape.cache_dims
    table = setting.random_fp32(generator, setting.context + rows, 2, shape.head_dim)
    return Inputs(
        {
            "qkv": setting.random_fp32(generator, splits, rows, width) if splits else random(rows, width),
            "rotation": table if shape.rotary else None,
            "positions": setting.context + torch.arange(rows, dtype=torch.int32, device=device),
            "slots": torch.randperm(pages * PAGE_SIZE, generator=generator, device=device)[:rows],
            "kv_layer": random(*planes, 2, pages, heads, PAGE_SIZE, part_dim),
            "q_out": torch.empty(rows, shape.num_heads, shape.head_dim, dtype=setting.dtype, device=device),
            "bias": random(width) if biased or shape.biased else None,
            "norm": norm if shape.qk_norm else None,
        }
    )


def _rope_cases(op: Op, setting: Setting) -> list[Case]:
    shape, nodes = setting.shape, setting.nodes
    sizes = {"head_dim": shape.head_dim, "heads": shape.num_heads, "kv_heads": shape.num_kv_heads, "splits": SPLITS}

    def case(load: str, rows: int, splits: int, biased: bool = False, weight: float = 0.0) -> Case:
        numbers = rows * (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        moved = numbers * (4 * splits + setting.dtype.itemsize) + rows * 2 * shape.head_dim * 4
        make = partial(_rope_inputs, setting, rows, splits, biased)
        return Case(op, setting, key_of(setting, **sizes), load, make, moved, weight, rows)

    others = [case("alone", nodes, 0), case("of 2 splits", nodes, 2), case("of 8 splits", nodes, 8, True)]
    return [*(case(f"rows {rows}", rows, SPLITS, weight=1.0) for rows in setting.row_counts), *others]


def _rope_rows(inputs: Inputs, results: Results) -> Results:
    slots, cache = inputs.arguments["slots"], inputs.arguments["kv_layer"]
    if cache is None:
        return {"q_out": results["q_out"]}
    # [rows, 2, num_kv_heads, head_dim], or [rows, num_planes, 2, ..]
    written = cache[..., slots // cache.shape[-2], :, slots % cache.shape[-2], :]
    return {"q_out": results["q_out"], "kv_layer": written}


QKV_ROPE = Op(
    "qkv_rope",
    qkv_rope_ref,
    qkv_rope_triton,
    _rope_cases,
    writes=("q_out", "kv_layer"),
    rows={"qkv": -2, "positions": 0, "slots": 0, "q_out": 0},
    by_row=_rope_rows,
    baselines={"torch": lambda inputs: qkv_rope_ref(**inputs.arguments)},
)


# --- KV commit

CONTEXT = 64  # maximum committed positions, which do not move; copies of a long context would fill a GPU


def _commit_inputs(setting: Setting, requests: int, path: int, generator: torch.Generator) -> Inputs:
    """Create paths with every second node of each request's tree, so that all nodes but the root move.

    Repeated commits of a path move other values between the same slots, which takes the same time.
    """
    shape, (planes, (heads, head_dim)) = setting.shape, setting.shape.cache_dims
    inputs = kv_commit_inputs(
        [min(setting.context, CONTEXT) + 17 * i for i in range(requests)],
        [list(range(0, 2 * path, 2))] * requests,
        num_layers=setting.layers * math.prod(planes),
        num_kv_heads=heads,
        head_dim=head_dim,
        page_size=PAGE_SIZE,
        dtype=torch.int16 if shape.dtype.itemsize == 2 else torch.int32,
        device=setting.device,
        seed=generator.initial_seed(),
    )
    return Inputs(vars(inputs) | {"kv_cache": inputs.kv_cache.view(shape.dtype)})


def _commit_cases(op: Op, setting: Setting) -> Iterator[Case]:
    shape, path = setting.shape, max(2, min(6, setting.nodes // 2))
    key = key_of(setting, head_dim=shape.head_dim, kv_heads=shape.num_kv_heads, layers=setting.layers)
    slot = setting.layers * 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
    for requests in setting.batches:
        make, moved = partial(_commit_inputs, setting, requests, path), 2 * requests * (path - 1) * slot
        yield Case(op, setting, key, f"requests {requests}, path {path}", make, moved)


KV_COMMIT = Op("kv_commit", kv_commit_ref, kv_commit_triton, _commit_cases, writes=("kv_cache",), exact=True)

OPS = (TREE_ATTENTION, PASS_LAYOUT, QKV_ROPE, KV_COMMIT)
