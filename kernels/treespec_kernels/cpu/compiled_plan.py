"""Plan of a compiled CPU pass: the KV slots each row attends to, shared by all layers and models."""

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows
from treespec_kernels.cpu.cpu_library import address_of, packed, read_structs
from treespec_kernels.recurrent.request_state import RecurrentState

_STRUCTS = read_structs(Path(__file__).with_name("batch_cpu.h"))
_State = _STRUCTS["RequestState"]


class CompiledPlan(NamedTuple):
    """KV slots attended to by the rows of a pass, the same for all layers and models."""

    num_rows: int
    slots: Tensor  # int64 [num_rows], page * PAGE_SIZE + offset of each row's own K and V
    rows: Tensor  # int64 [4, num_rows]: start in pages, positions read through pages, start in paths, path length
    pages: Tensor  # int64, pages of all requests
    paths: Tensor  # int64, slots of tree nodes, in position order
    positions: Tensor  # int64 [num_rows], rows of the rotations
    states: "PlannedStates | None" = None  # states of recurrent layers; None without such layers


def state_addresses(state: RecurrentState) -> tuple[int, int]:
    """Return the addresses of a state's matrices and inputs."""
    return state.matrices.data_ptr(), state.inputs.data_ptr()


class PlannedStates:
    """Recurrent states of a pass's requests, which the pass updates."""

    def __init__(self, requests: Sequence[RequestRows]):
        self._requests, self._parents = requests, [rows.parents for rows in requests]
        structs, first = list[ctypes.Structure](), 0
        for rows, parents in zip(requests, self._parents, strict=True):
            assert rows.state is not None, "a pass of recurrent layers needs the requests' states"
            state, commits = rows.state
            state.check(rows.context_len, rows.num_rows, commits, rows.num_earlier)
            counts = rows.context_len - state.length, rows.num_earlier, rows.num_rows, commits, first, first + commits
            structs.append(_State(*state_addresses(state), address_of(parents), state.inputs.shape[1], *counts))
            first += rows.num_rows
        self._structs = (_State * len(structs))(*structs)

    @property
    def arguments(self) -> dict[str, int]:
        """Fields of a `Batch`."""
        return {"requests": ctypes.addressof(self._structs), "num_requests": len(self._structs)}

    def finish(self) -> None:
        """Advance the states' lengths, after the pass."""
        for rows in self._requests:
            assert rows.state is not None
            rows.state.state.length = rows.context_len + rows.state.commits


def plan_compiled(
    requests: Sequence[RequestRows],
    first_rotation: Callable[[int], int] = lambda max_len: 0,
    recurrent: bool = False,
) -> CompiledPlan:
    """Plan a pass over the rows of all requests, in order.

    A row reads committed positions (and the positions of a chain) through its request's pages, and the path of a tree
    node slot by slot. Scores are stored by position, so a node's result is bit-identical to the same token's in plain
    decoding.

    `first_rotation` returns the row of the rotations for position 0 of a request, by its `max_len`.
    """
    slots, rows, pages, paths = [], [], [], []
    first_page = first_path = 0
    for request in requests:
        page, offset = request.slots
        slots.append(page * PAGE_SIZE + offset)
        row_table = np.zeros((4, request.num_rows), dtype=np.int64)
        row_table[0] = first_page
        if request.is_chain:
            row_table[1] = request.positions + 1
        else:
            logical = request.context_len + request.ancestors  # [num_rows, max depth + 1], padded
            width = logical.shape[1]
            row_table[1] = request.context_len
            row_table[2] = first_path + width * np.arange(request.num_rows)
            row_table[3] = request.path_lengths
            paths.append((request.pages[logical // PAGE_SIZE] * PAGE_SIZE + logical % PAGE_SIZE).reshape(-1))
            first_path += logical.size
        rows.append(row_table)
        pages.append(request.pages)
        first_page += len(request.pages)

    def join(arrays: list[np.ndarray]) -> Tensor:
        joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1) if arrays else np.zeros(1, np.int64)
        return torch.from_numpy(np.ascontiguousarray(joined, dtype=np.int64))

    positions = join([request.positions + first_rotation(request.max_len) for request in requests])
    return CompiledPlan(
        sum(row_table.shape[1] for row_table in rows),
        join(slots),
        join(rows),
        join(pages),
        join(paths),
        positions,
        PlannedStates(requests) if recurrent else None,
    )


class TreeBatch:
    """Whole trees of a pass, one after another, as C++ reads them."""

    def __init__(
        self,
        columns: Sequence[Sequence[int]],  # tokens, parents and depths of all trees' nodes
        first_rows: Sequence[int],  # start of each tree's rows, and their number
        contexts: Sequence[int],  # by tree, its request's committed positions
        pages: Sequence[np.ndarray],  # by tree, its request's pages, int64
        first_rotations: Sequence[int],  # by tree, row of the rotations for position 0
        rules: Sequence[int],  # by tree, as `TreeRows.rules` in batch_cpu.h
    ):
        num_rows, num_trees = first_rows[-1], len(contexts)
        first_pages = [*accumulate(map(len, pages), initial=0)]
        outputs = [0] * num_rows, [0] * num_rows, [0] * num_trees  # paths, tokens after their nodes, lengths
        inputs = *columns, first_rows, first_pages, contexts, first_rotations, rules
        self._numbers, addresses = packed(*inputs, *outputs)
        self._pages = pages[0] if num_trees == 1 else np.concatenate(pages)
        self._first_rows, self.num_rows = first_rows, num_rows
        self.num_positions = max(contexts) + max(first_rotations) + num_rows  # at most, in rows of the rotations
        self.struct = _STRUCTS["TreeRows"](num_trees, PAGE_SIZE, *addresses[:-3], address_of(self._pages))
        self.walk_outputs = addresses[-3:]  # paths, tokens and lengths of `Walks`

    @property
    def sizes(self) -> list[int]:
        """Number of each tree's nodes."""
        return [last - first for first, last in pairwise(self._first_rows)]

    def walked(self) -> tuple[list[np.ndarray], list[int]]:
        """Return the paths that a walk wrote, int64, and the tokens after them."""
        first_rows, num_rows, count = self._first_rows, self.num_rows, len(self._first_rows) - 1
        paths, tokens = list[np.ndarray](), list[int]()
        written = self._numbers[len(self._numbers) - 2 * num_rows - count :]
        for first, length in zip(first_rows, written[2 * num_rows :], strict=False):
            paths.append(np.array(written[first : first + length], dtype=np.int64))
            tokens.append(written[num_rows + first + length - 1])
        return paths, tokens


def kv_pools(pools: Sequence[Tensor]) -> ctypes.Array[Any]:
    """Describe pools of K/V, [num_planes, 2, num_pages, num_heads, PAGE_SIZE, head_dim] each, that C++ compacts."""
    assert all(pool.is_contiguous() for pool in pools)
    sizes = ((2 * pool.shape[0], *pool.shape[2:4], pool.shape[5] * pool.itemsize) for pool in pools)
    structs = (_STRUCTS["KvPool"](pool.data_ptr(), *size) for pool, size in zip(pools, sizes, strict=True))
    return (_STRUCTS["KvPool"] * len(pools))(*structs)
