"""Entries of the tree ops: tree root, merge of levels, selection of the trees, and verification."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from treespec_kernels.ops.op import Case, Inputs, Op, mapped
from treespec_kernels.ops.shapes import META, Setting
from treespec_kernels.tree.device_trees import DeviceForest, DeviceTrees, ProposedTrees
from treespec_kernels.tree.growth_limits import CHILDREN, FRONTIER, MAX_DEPTH, SEEDS
from treespec_kernels.tree.tree_merge import tree_merge_ref, tree_merge_triton
from treespec_kernels.tree.tree_root import tree_root_ref, tree_root_triton
from treespec_kernels.tree.tree_select import tree_select_ref, tree_select_triton
from treespec_kernels.tree.tree_walk import Walk, tree_walk_ref, tree_walk_triton

SSMS = 3
VOCAB = 12  # small, so that SSMs often propose the same token
MERGED = 2  # timed levels: the first, with one frontier node, and one like all later levels
KEY = {"levels": MAX_DEPTH, "frontier": FRONTIER, "ssms": SSMS, "proposals": CHILDREN, "seeds": SEEDS}
LARGEST = 256  # nodes of the largest tree


def _empty_forest(requests: int, device: torch.device, frontier: int = FRONTIER) -> DeviceForest:
    depth = MAX_DEPTH * FRONTIER // frontier
    return DeviceForest.allocate(
        requests, frontier=frontier, num_ssms=SSMS, proposals=CHILDREN, max_depth=depth, device=device
    )


def _root_inputs(setting: Setting, requests: int, generator: torch.Generator, frontier: int = FRONTIER) -> Inputs:
    roots = torch.full((requests,), 3, dtype=torch.int32, device=setting.device)
    return Inputs({"forest": _empty_forest(requests, setting.device, frontier), "root_tokens": roots})


def _per_request(
    op: Op, setting: Setting, key: dict[str, int], make: Callable[..., Inputs], load: str = ""
) -> list[Case]:
    """Return timed cases of one request and of a batch."""
    return [
        Case(op, setting, key, f"requests {requests}{load}", partial(make, setting, requests), num_rows=requests)
        for requests in setting.batches
    ]


def _proposals(
    requests: int, levels: int, generator: torch.Generator, device: torch.device, frontier: int = FRONTIER
) -> dict[str, Any]:
    """Create proposals with low probabilities in the first levels, and two chains of seeds per request.

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
    **options: Any,
) -> None:
    """Start the round and merge every level."""
    root(forest, root_tokens)
    for level_tokens, level_probs in zip(tokens, probs, strict=True):
        merge(forest, level_tokens, level_probs, **options)


grow_ref = partial(_grow, tree_root_ref, tree_merge_ref)
grow_triton = partial(_grow, tree_root_triton, tree_merge_triton)


def _merge_inputs(
    setting: Setting, requests: int, generator: torch.Generator, frontier: int = FRONTIER, levels: int = MERGED
) -> Inputs:
    start = _root_inputs(setting, requests, generator, frontier).arguments
    return Inputs(start | _proposals(requests, levels, generator, setting.device, frontier))


def _merge_cases(op: Op, setting: Setting) -> list[Case]:
    wide = partial(_merge_inputs, setting, 1, frontier=2 * FRONTIER)
    timed = _per_request(op, setting, KEY, _merge_inputs, f", levels {MERGED}")
    return [*timed, Case(op, setting, KEY, f"frontier {2 * FRONTIER}", wide, weight=0.0)]


TREE_ROOT = Op(
    "tree_root",
    tree_root_ref,
    tree_root_triton,
    lambda op, setting: _per_request(op, setting, KEY, _root_inputs),
    writes=("forest",),
    rows={"forest": 0, "root_tokens": 0},
    exact=True,
)
TREE_MERGE = replace(
    TREE_ROOT,
    name="tree_merge",
    ref=grow_ref,
    run=grow_triton,
    cases=_merge_cases,
    rows={"root_tokens": 0, "tokens": 2, "probs": 2, "weights": 0, "end_tokens": 0, "proposed": 0, "forest": 0},
)


def _select_inputs(setting: Setting, requests: int, generator: torch.Generator) -> Inputs:
    """Grow forests with the reference on the host; forests on "meta" stay empty."""
    device, host = setting.device, replace(setting, device=torch.device("cpu"))
    if device == META:
        arguments = _merge_inputs(setting, requests, generator, levels=1).arguments
    else:
        seeded = torch.Generator().manual_seed(generator.initial_seed())
        arguments = _merge_inputs(host, requests, seeded, levels=MAX_DEPTH).arguments
        grow_ref(**arguments)
    forest, proposed, roots = (
        mapped(lambda tensor: tensor.to(device), arguments[name]) for name in ("forest", "proposed", "root_tokens")
    )
    return Inputs(
        {
            "forest": forest,
            "proposed": proposed,
            "root_tokens": roots,
            "nodes": setting.nodes,
            "least_values": torch.zeros(requests, device=device, dtype=torch.float32),
            "max_depths": torch.full((requests,), MAX_DEPTH, dtype=torch.int32, device=device),
        }
    )


def _with_largest(make: Callable[..., Inputs], key: dict[str, int], op: Op, setting: Setting) -> list[Case]:
    """Return cases of trees of the setting's size, and of the largest trees."""
    large = partial(make, replace(setting, nodes=LARGEST), 1)
    timed = _per_request(op, setting, key | {"nodes": setting.nodes}, make)
    return [*timed, Case(op, setting, key | {"nodes": LARGEST}, "largest tree", large, weight=0.0)]


def _selected(inputs: Inputs, config: Any) -> dict[str, Any]:
    roots, nodes = inputs.arguments["root_tokens"], inputs.arguments["nodes"]
    return {"out": DeviceTrees.allocate(len(roots), nodes=nodes, max_depth=MAX_DEPTH, device=roots.device)}


TREE_SELECT = Op(
    "tree_select",
    tree_select_ref,
    tree_select_triton,
    partial(_with_largest, _select_inputs, KEY),
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


def _walk(inputs: Inputs, config: Any) -> dict[str, Any]:
    trees = inputs.arguments["trees"]
    device = trees.ancestors.device
    return {"out": Walk.allocate(trees.num_requests, max_depth=trees.max_depth, device=device)}


TREE_WALK = Op(
    "tree_walk",
    tree_walk_ref,
    tree_walk_triton,
    partial(_with_largest, _walk_inputs, {"levels": MAX_DEPTH}),
    plan=_walk,
    rows={"trees": 0, "choices": 0, "finite": 0},
    exact=True,
)

OPS = (TREE_ROOT, TREE_MERGE, TREE_SELECT, TREE_WALK)
