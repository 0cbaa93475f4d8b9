"""Entries of the tree ops: root and levels of every tree of a batch, their selection, and their verification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from treespec_kernels.ops.op import Case, Inputs, Op, mapped, num_bytes
from treespec_kernels.ops.shapes import Setting
from treespec_kernels.tree.device_trees import DeviceForest, DeviceTrees, ProposedTrees
from treespec_kernels.tree.growth_limits import CHILDREN, FRONTIER, MAX_DEPTH, SEEDS
from treespec_kernels.tree.tree_merge import tree_merge_ref, tree_merge_triton
from treespec_kernels.tree.tree_root import tree_root_ref, tree_root_triton
from treespec_kernels.tree.tree_select import tree_select_ref, tree_select_triton
from treespec_kernels.tree.tree_walk import Walk, tree_walk_ref, tree_walk_triton

SSMS = 3
VOCAB = 12  # so small that SSMs often propose the same token
MERGED = 2  # timed levels: the first, which has one frontier node, and one that is like all later levels
KEY = {"levels": MAX_DEPTH, "frontier": FRONTIER, "ssms": SSMS, "proposals": CHILDREN, "seeds": SEEDS}
META = torch.device("meta")


def _empty_forest(requests: int, device: torch.device, frontier: int = FRONTIER) -> DeviceForest:
    depth = MAX_DEPTH * FRONTIER // frontier
    return DeviceForest.allocate(
        requests, frontier=frontier, num_ssms=SSMS, proposals=CHILDREN, max_depth=depth, device=device
    )


def _roots(requests: int, device: torch.device) -> torch.Tensor:
    return torch.full((requests,), 3, dtype=torch.int32, device=device)


def _proposals(
    requests: int, levels: int, generator: torch.Generator, device: torch.device, frontier: int = FRONTIER
) -> dict[str, Any]:
    """Create proposals with low probabilities for the first levels, and two chains of seeds for each request.

    The chains start with different tokens.
    """
    numbers: dict[str, Any] = {"generator": generator, "device": device}
    size = (levels, SSMS, requests, frontier, CHILDREN)
    tokens = torch.rand((*size[:-1], VOCAB), **numbers, dtype=torch.float32).argsort(-1)[..., :CHILDREN]
    probs = torch.rand(size, **numbers, dtype=torch.float32).sort(-1, descending=True).values / CHILDREN
    seeds = torch.randint(VOCAB, (requests, SEEDS), **numbers, dtype=torch.int32)
    seeds[:, SEEDS // 2] = (seeds[:, 0] + 1) % VOCAB
    parents = torch.arange(-1, SEEDS - 1, dtype=torch.int32, device=device).repeat(requests, 1)
    parents[:, SEEDS // 2] = -1
    chances = torch.rand(requests, SEEDS, **numbers, dtype=torch.float32)
    return {
        "tokens": tokens.int().contiguous(),
        "probs": probs.contiguous(),
        "weights": torch.full((requests, SSMS), 1 / SSMS, device=device, dtype=torch.float32),
        "end_tokens": torch.full((requests, 1), VOCAB - 1, dtype=torch.int32, device=device),
        "proposed": ProposedTrees(seeds, parents, chances, 1 + 8 * chances),
    }


def _grow(
    root: Callable[..., None],
    merge: Callable[..., None],
    forest: DeviceForest,
    root_tokens: torch.Tensor,
    tokens: torch.Tensor,
    probs: torch.Tensor,
    **rest: Any,
) -> None:
    """Start the round and merge every level."""
    root(forest, root_tokens)
    for level_tokens, level_probs in zip(tokens, probs, strict=True):
        merge(forest, level_tokens, level_probs, **rest)


grow_ref = partial(_grow, tree_root_ref, tree_merge_ref)
grow_triton = partial(_grow, tree_root_triton, tree_merge_triton)


def _merge_inputs(setting: Setting, requests: int, generator: torch.Generator, frontier: int = FRONTIER) -> Inputs:
    device = setting.device
    made = _proposals(requests, MERGED, generator, device, frontier)
    return Inputs({"forest": _empty_forest(requests, device, frontier), "root_tokens": _roots(requests, device)} | made)


def _bytes(setting: Setting, make: Callable[..., Inputs], requests: int, *unread: str) -> int:
    """Return the bytes of the arguments of a case, except some."""
    inputs = make(replace(setting, device=META), requests, torch.Generator())
    return num_bytes(*(value for name, value in inputs.arguments.items() if name not in unread))


def _merge_cases(setting: Setting) -> list[Case]:
    timed = [
        Case(
            TREE_MERGE,
            setting,
            KEY,
            f"requests {requests}, levels {MERGED}",
            partial(_merge_inputs, setting, requests),
            _bytes(setting, _merge_inputs, requests, "root_tokens", "weights", "end_tokens"),
            num_rows=requests,
        )
        for requests in setting.batches
    ]
    wide = partial(_merge_inputs, setting, 1, frontier=2 * FRONTIER)
    return [*timed, Case(TREE_MERGE, setting, KEY, f"frontier {2 * FRONTIER}", wide, weight=0.0)]


TREE_MERGE = Op(
    "tree_merge",
    grow_ref,
    grow_triton,
    _merge_cases,
    writes=("forest",),
    rows={"root_tokens": 0, "tokens": 2, "probs": 2, "weights": 0, "end_tokens": 0, "proposed": 0, "forest": 0},
    exact=True,
)


def _root_inputs(setting: Setting, requests: int, generator: torch.Generator) -> Inputs:
    device = setting.device
    return Inputs({"forest": _empty_forest(requests, device), "root_tokens": _roots(requests, device)})


TREE_ROOT = Op(
    "tree_root",
    tree_root_ref,
    tree_root_triton,
    lambda setting: [
        Case(
            TREE_ROOT,
            setting,
            KEY,
            f"requests {requests}",
            partial(_root_inputs, setting, requests),
            _bytes(setting, _root_inputs, requests),
            num_rows=requests,
        )
        for requests in setting.batches
    ],
    writes=("forest",),
    rows={"forest": 0, "root_tokens": 0},
    exact=True,
)


def _grown(requests: int, generator: torch.Generator, device: torch.device) -> tuple[DeviceForest, ProposedTrees]:
    """Return forests grown by the reference on the host, and their seeds."""
    if device == META:
        return _empty_forest(requests, device), _proposals(requests, 1, generator, device)["proposed"]
    host = torch.device("cpu")
    made = _proposals(requests, MAX_DEPTH, torch.Generator().manual_seed(generator.initial_seed()), host)
    forest = _empty_forest(requests, host)
    grow_ref(forest, _roots(requests, host), **made)
    return mapped(lambda tensor: tensor.to(device), (forest, made["proposed"]))


def _select_inputs(setting: Setting, requests: int, generator: torch.Generator) -> Inputs:
    device = setting.device
    forest, proposed = _grown(requests, generator, device)
    return Inputs(
        {
            "forest": forest,
            "proposed": proposed,
            "root_tokens": _roots(requests, device),
            "nodes": setting.nodes,
            "least_values": torch.zeros(requests, device=device, dtype=torch.float32),
            "max_depths": torch.full((requests,), MAX_DEPTH, dtype=torch.int32, device=device),
        }
    )


def _select_cases(setting: Setting) -> list[Case]:
    """The bytes are those of the candidates and of the selected trees."""
    forest = _empty_forest(1, META)
    trees = DeviceTrees.allocate(1, nodes=setting.nodes, max_depth=MAX_DEPTH, device=META)
    read = num_bytes(*(getattr(forest, name) for name in vars(forest) if name.startswith("cand_")), trees)
    timed = [
        Case(
            TREE_SELECT,
            setting,
            KEY | {"nodes": setting.nodes},
            f"requests {requests}",
            partial(_select_inputs, setting, requests),
            requests * read,
            num_rows=requests,
        )
        for requests in setting.batches
    ]
    large = partial(_select_inputs, replace(setting, nodes=256), 1)
    return [*timed, Case(TREE_SELECT, setting, KEY | {"nodes": 256}, "largest tree", large, weight=0.0)]


def _selected(inputs: Inputs, config: Any) -> dict[str, Any]:
    roots, nodes = inputs.arguments["root_tokens"], inputs.arguments["nodes"]
    return {"out": DeviceTrees.allocate(len(roots), nodes=nodes, max_depth=MAX_DEPTH, device=roots.device)}


TREE_SELECT = Op(
    "tree_select",
    tree_select_ref,
    tree_select_triton,
    _select_cases,
    plan=_selected,
    rows={"forest": 0, "proposed": 0, "root_tokens": 0, "least_values": 0, "max_depths": 0},
    exact=True,
)


def _walk_inputs(setting: Setting, requests: int, generator: torch.Generator) -> Inputs:
    """Let the target choose the first child of every node, so that paths are long."""
    device, nodes = setting.device, setting.nodes
    if device == META:
        trees = DeviceTrees.allocate(requests, nodes=nodes, max_depth=MAX_DEPTH, device=device)
    else:
        trees = tree_select_ref(**_select_inputs(setting, requests, generator).arguments)
    choices = torch.full((requests, nodes), -7, dtype=torch.int64, device="cpu")
    if device != META:
        for request, (parents, tokens) in enumerate(zip(trees.parents.tolist(), trees.tokens.tolist(), strict=True)):
            for node in reversed(range(1, nodes)):
                if parents[node] >= 0:
                    choices[request, parents[node]] = tokens[node]
    finite = torch.ones(requests, nodes, dtype=torch.bool, device=device)
    return Inputs({"trees": trees, "choices": choices.to(device), "finite": finite})


def _walk_cases(setting: Setting) -> list[Case]:
    def case(requests: int, nodes: int, load: str, weight: float) -> Case:
        own = replace(setting, nodes=nodes)
        return Case(
            TREE_WALK,
            setting,
            {"levels": MAX_DEPTH, "nodes": nodes},
            load,
            partial(_walk_inputs, own, requests),
            _bytes(own, _walk_inputs, requests, "choices", "finite"),
            weight=weight,
            num_rows=requests,
        )

    timed = [case(requests, setting.nodes, f"requests {requests}", 1.0) for requests in setting.batches]
    return [*timed, case(1, 256, "largest tree", 0.0)]


def _walk(inputs: Inputs, config: Any) -> dict[str, Any]:
    trees = inputs.arguments["trees"]
    device = trees.ancestors.device
    return {"out": Walk.allocate(trees.num_requests, max_depth=trees.max_depth, device=device)}


TREE_WALK = Op(
    "tree_walk",
    tree_walk_ref,
    tree_walk_triton,
    _walk_cases,
    plan=_walk,
    rows={"trees": 0, "choices": 0, "finite": 0},
    exact=True,
)

OPS = (TREE_ROOT, TREE_MERGE, TREE_SELECT, TREE_WALK)
