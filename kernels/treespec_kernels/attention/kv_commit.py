"""KV commit: compacts the KV cache in place to the accepted path, for all layers, K and V.

Before: request b holds `context_lens[b]` = L committed positions in logical slots 0..L-1, and the K/V of node i of its
tree in logical slot L + i. After: the K/V of node `paths[b, j]` are in logical slot L + j. The root stays in place, so
a path of length 0 or 1 moves nothing. Slots after the path are unchanged; the caller tracks the new length.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.triton_launch import block_of, load_kernels

BLOCK_J = 16  # path steps per block of loads; most paths fit in one block
NUM_WARPS = 4

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def kv_commit_ref(kv_cache: Tensor, page_table: Tensor, context_lens: Tensor, paths: Tensor, path_lens: Tensor) -> None:
    """Move logical slot L + paths[b, j] to L + j in every layer, K and V (reference: eager torch, any device).

    Args:
        kv_cache: [num_layers, 2, num_pages, num_kv_heads, page_size, head_dim] of any dtype and outer strides, changed
            in place.
        page_table: [num_requests, max_pages] int32. Logical slot s of request b is page
            `page_table[b, s // page_size]`, offset `s % page_size`.
        context_lens: [num_requests] int32, number of committed positions L before this commit.
        paths: [num_requests, max_path] int32, accepted node indices, root first (`paths[b, 0] == 0`), strictly
            increasing; entries from `path_lens[b]` on are ignored.
        path_lens: [num_requests] int32, 0..max_path.

    Sources and destinations of a request overlap: on path 0, 2, 3 slot 2 is the source of step 1 and the destination of
    step 2. Indexing gathers all sources into new memory before the first write, and destinations are distinct.
    """
    page_size = kv_cache.shape[4]
    step_of_column = torch.arange(paths.shape[1], device=paths.device)
    moved = (step_of_column < path_lens[:, None]) & (paths != step_of_column)
    request, step = moved.nonzero(as_tuple=True)
    if request.numel() == 0:
        return
    base = context_lens[request].long()
    source, target = base + paths[request, step], base + step
    source_page, target_page = (page_table[request, slot // page_size].long() for slot in (source, target))
    kv_cache[:, :, target_page, :, target % page_size] = kv_cache[:, :, source_page, :, source % page_size]


def kv_commit_cpu(
    kv_cache: Tensor,
    pages: Sequence[np.ndarray],  # by request, int64 [num_pages]
    context_lens: Sequence[int],  # by request, number of committed positions L
    paths: Sequence[np.ndarray],  # by request, int64 [path_len], root first
) -> None:
    """Commit accepted paths like `kv_commit_ref`, from host arrays, in a cache on the CPU.

    numpy copies one slot of all layers at a time, which takes a fifth (batch 1) to half (batch 64) of the time of
    indexing with torch tensors. Ascending order never overwrites a source before it is read, because paths are strictly
    increasing.
    """
    cells = kv_cache.view(_INTEGER_OF_SIZE[kv_cache.element_size()]).numpy()
    page_size = kv_cache.shape[4]
    for request_pages, base, path in zip(pages, context_lens, paths, strict=True):
        for step in np.flatnonzero(path != np.arange(len(path))).tolist():
            source, target = base + int(path[step]), base + step
            moved = cells[:, :, request_pages[source // page_size], :, source % page_size]
            cells[:, :, request_pages[target // page_size], :, target % page_size] = moved


def kv_commit_triton(
    kv_cache: Tensor, page_table: Tensor, context_lens: Tensor, paths: Tensor, path_lens: Tensor
) -> None:
    """Commit accepted paths like `kv_commit_ref` on a GPU, in one launch without a host sync."""
    check_arguments(
        kv_cache=(kv_cache, "num_layers 2 num_pages num_kv_heads page_size head_dim", kv_cache.dtype),
        page_table=(page_table, "num_requests max_pages", torch.int32),
        context_lens=(context_lens, "num_requests", torch.int32),
        paths=(paths, "num_requests max_path", torch.int32),
        path_lens=(path_lens, "num_requests", torch.int32),
    )
    # Copies integers, which keeps NaN payloads and works for every dtype in the interpreter.
    integers = kv_cache.view(_INTEGER_OF_SIZE[kv_cache.element_size()])
    kernels = load_kernels("attention.kv_commit", integers)
    num_layers, _, _, num_kv_heads, page_size, head_dim = kv_cache.shape
    num_requests, max_path = paths.shape
    kernels.move_path[(num_layers * 2 * num_kv_heads, num_requests)](
        *(integers, page_table, context_lens, paths, path_lens, max_path),
        *kv_cache.stride()[:5],
        page_table.stride(0),
        paths.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_J=BLOCK_J,
        BLOCK_D=block_of(head_dim, 16),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
