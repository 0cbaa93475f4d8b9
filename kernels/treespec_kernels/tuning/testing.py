"""Inputs for tests and autotuning; unused cache slots are poisoned with NaN."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from treespec_kernels.attention.tree_attention_plan import AttentionShape


def tree_parents(kind: str, num_nodes: int, generator: torch.Generator) -> list[int]:
    """Return the parents of a "chain", a "star" (all nodes are children of the root) or a "random" tree.

    The root is node 0 and has parent -1.
    """
    if kind == "chain":
        return list(range(-1, num_nodes - 1))
    if kind == "star":
        return [-1] + [0] * (num_nodes - 1)
    assert kind == "random"
    return [-1] + [int(torch.randint(i, (1,), generator=generator, device="cpu")) for i in range(1, num_nodes)]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Return the nodes from the root to `node`, both inclusive."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def scattered_page_table(num_requests: int, max_pages: int, generator: torch.Generator) -> torch.Tensor:
    """Return a page table of random distinct pages, [num_requests, max_pages] int32.

    The pages are drawn from num_requests * max_pages + 1 pages, so one is unused.
    """
    pages = torch.randperm(num_requests * max_pages + 1, generator=generator, device="cpu")[: num_requests * max_pages]
    return pages.view(num_requests, max_pages).int()


@dataclass(frozen=True)
class TreeAttentionInputs:
    """Arguments of one tree-attention pass and of its plan."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    rows: dict[str, Any]  # row_request, context_lens, page_table, depths, ancestors, scale
    plan: dict[str, Any]  # context_lens, rows_per_request, depths


def tree_attention_inputs(
    context_lens: Sequence[int],  # number of committed positions of each request
    trees: Sequence[Sequence[int]],  # parents of each request's nodes
    shape: AttentionShape,
    *,
    nodes: Sequence[Sequence[int]] | None = None,  # nodes of each request that are rows of the pass; None for all
    device: torch.device | str = "cpu",
    page_size: int = 64,  # slots per page
    seed: int = 0,
) -> TreeAttentionInputs:
    """Create random queries, keys and values for one tree per request. Slots that no row attends to contain NaN."""
    num_heads, num_kv_heads, head_dim, dtype, _ = shape
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    nodes = [range(len(parents)) for parents in trees] if nodes is None else nodes
    max_nodes = max(map(len, trees))
    page_table = scattered_page_table(len(trees), -(-(max(context_lens) + max_nodes + 1) // page_size), generator)
    # Interleaved as [page, K or V, head, slot]: the page stride differs from that of a dense [pages, heads, ...].
    size = page_table.numel() + 1, 2, num_kv_heads, page_size, head_dim
    kv_cache = torch.full(size, torch.nan, dtype=dtype, device="cpu")
    for request, (length, parents) in enumerate(zip(context_lens, trees, strict=True)):
        slots = torch.arange(length + len(parents), device="cpu")
        values = normal(len(slots), 2, num_kv_heads, head_dim).to(dtype)
        kv_cache[page_table[request, slots // page_size].long(), :, :, slots % page_size] = values
    kv_cache = kv_cache.to(device)
    paths = [
        path_to(parents, node) for parents, request_nodes in zip(trees, nodes, strict=True) for node in request_nodes
    ]
    depths = [len(path) - 1 for path in paths]
    # Padding refers to a slot that contains NaN.
    ancestors = [path + [max_nodes] * (max(depths) - depth) for path, depth in zip(paths, depths, strict=True)]
    integers = partial(torch.tensor, dtype=torch.int32, device=device)
    return TreeAttentionInputs(
        q=normal(len(paths), num_heads, head_dim).to(device, dtype),
        k_cache=kv_cache[:, 0],
        v_cache=kv_cache[:, 1],
        rows={
            "row_request": integers([request for request, request_nodes in enumerate(nodes) for _ in request_nodes]),
            "context_lens": integers(list(context_lens)),
            "page_table": page_table.to(device),
            "depths": integers(depths),
            "ancestors": integers(ancestors),
            "scale": head_dim**-0.5,
        },
        plan={"context_lens": list(context_lens), "rows_per_request": list(map(len, nodes)), "depths": depths},
    )


def in_planes(cache: torch.Tensor, heads: int, part_dim: int) -> torch.Tensor:
    """Return K or V, [num_pages, num_kv_heads, page_size, head_dim], in planes of heads that are parts of its heads."""
    num_pages, _, page_size, _ = cache.shape
    parts = cache.unflatten(3, (-1, part_dim)).transpose(2, 3).reshape(num_pages, -1, heads, page_size, part_dim)
    return parts.transpose(0, 1)


@dataclass(frozen=True)
class KvCommitInputs:
    """Arguments of one commit. Every element of the cache equals its index, so that every move is visible."""

    kv_cache: torch.Tensor
    page_table: torch.Tensor
    context_lens: torch.Tensor
    paths: torch.Tensor
    path_lens: torch.Tensor


def kv_commit_inputs(
    context_lens: Sequence[int],
    paths: Sequence[Sequence[int]],
    *,
    num_layers: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    page_size: int = 4,
    dtype: torch.dtype = torch.int32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> KvCommitInputs:
    """Create inputs with a cache just large enough for `paths`.

    `paths`: accepted nodes of each request, root first, possibly none.
    """
    generator = torch.Generator().manual_seed(seed)
    max_path = max(1, *map(len, paths)) + int(torch.randint(3, (1,), generator=generator, device="cpu"))
    padding = max(max_path, *(max(path, default=0) for path in paths)) + 1
    page_table = scattered_page_table(len(paths), -(-(max(context_lens) + padding + 1) // page_size), generator)
    shape = torch.Size((num_layers, 2, page_table.numel() + 1, num_kv_heads, page_size, head_dim))
    kv_cache = torch.arange(shape.numel(), dtype=torch.int64, device="cpu").view(shape).to(dtype)
    integers = partial(torch.tensor, dtype=torch.int32, device=device)
    return KvCommitInputs(
        kv_cache.to(device),
        page_table.to(device),
        integers(list(context_lens)),
        integers([[*path, *[padding] * (max_path - len(path))] for path in paths]),
        integers(list(map(len, paths))),
    )
