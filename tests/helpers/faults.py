"""An attention by its definition, and the ways in which it can be run wrong: what the adapter's probe has to refuse."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from treespec.adapter.decoder import open_adapter
from treespec.adapter.source import Source
from treespec.adapter.trace import run
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows


@dataclass(frozen=True)
class Rows:
    """The rows of one request in a pass, and the slots that they may see."""

    own: RequestRows
    pages: np.ndarray  # int64 [num_slots], of its context and of its tree
    offsets: np.ndarray
    visible: np.ndarray  # bool [num_rows, num_slots]
    others: tuple[RequestRows, ...]  # that run beside it


def rows_of(request: RequestRows, window: int | None, others: tuple[RequestRows, ...]) -> Rows:
    slots = np.arange(request.context_len + request.num_slots)
    visible = ~request.hidden_mask(len(slots), 0)
    if window is not None:
        depths = np.arange(request.num_slots) if request.slot_depths is None else request.slot_depths
        positions = np.concatenate((np.arange(request.context_len), request.context_len + depths))
        visible &= positions[None, :] > request.positions[:, None] - window
    return Rows(request, request.pages[slots // PAGE_SIZE], slots % PAGE_SIZE, visible, others)


class DenseAttention:
    """Attention over a dense mask, in float32, with a fault in one layer or in all."""

    name, cache_dtype = "dense", torch.float32

    def __init__(self, heads: int, kv_heads: int, fault: "Fault | None", layer: int | None):
        self.fault, self.layer = fault, layer
        self.head_of = torch.arange(heads) // (heads // kv_heads)  # KV head of each head
        self.kv_heads = kv_heads

    def plan(self, requests: list[RequestRows], num_rows: int, window: int | None = None) -> Any:
        return requests, num_rows, window

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Any, scale: float, cap: float | None = None
    ) -> Tensor:
        requests, num_rows, window = plan
        layer = k_cache.storage_offset() // (2 * k_cache.numel())
        fault = self.fault if self.fault is not None and self.layer in (None, layer) else Fault()
        window, cap = (None if fault.no_window else window), (None if fault.no_cap else cap)
        head_of = self.head_of.clone()
        if fault.wrong_group:
            head_of[0] = (head_of[0] + 1) % self.kv_heads
        out, first = q.new_zeros(num_rows, *q.shape[1:]), 0
        for request in requests:
            rows = rows_of(request, window, tuple(other for other in requests if other is not request))
            rows = fault.rows(rows)
            keys, values = (cache[rows.pages, :, rows.offsets][:, head_of] for cache in (k_cache, v_cache))
            scores = torch.einsum("rhd,shd->hrs", q[first : first + request.num_rows], keys) * scale * fault.scale
            scores = scores if cap is None else torch.tanh(scores / cap) * cap
            scores = scores.masked_fill(~torch.from_numpy(rows.visible), -torch.inf)
            out[first : first + request.num_rows] = torch.einsum("hrs,shd->rhd", scores.softmax(-1), values)
            first += request.num_rows
        return out


@dataclass(frozen=True)
class Fault:
    """What is done wrong; by default nothing."""

    rows: Callable[[Rows], Rows] = lambda rows: rows
    scale: float = 1.0
    no_window: bool = False
    no_cap: bool = False
    wrong_group: bool = False
    late: bool = False  # rows of the tree stand one position further on


def sees_of_its_pass(mask: Callable[[int, int], Any], chains: bool = False) -> Callable[[Rows], Rows]:
    """What rows of trees, or of `chains`, see of their own pass: a mask [num_rows, num_slots]."""

    def change(rows: Rows) -> Rows:
        visible = rows.visible.copy()
        own = visible[:, rows.own.context_len :]
        if rows.own.is_chain == chains:
            own[:] = mask(*own.shape)
        return replace(rows, visible=visible)

    return change


def sees_the_neighbour(rows: Rows) -> Rows:
    """A row sees the committed context of the requests beside it, too."""
    pages, offsets, visible = rows.pages, rows.offsets, rows.visible
    for other in rows.others:
        slots = np.arange(other.context_len)
        pages = np.concatenate((pages, other.pages[slots // PAGE_SIZE]))
        offsets = np.concatenate((offsets, slots % PAGE_SIZE))
        visible = np.concatenate((visible, np.ones((len(visible), len(slots)), dtype=bool)), 1)
    return replace(rows, pages=pages, offsets=offsets, visible=visible)


def reads_a_page_of_the_neighbour(rows: Rows) -> Rows:
    """The first page is the other request's."""
    if not rows.others:
        return rows
    return replace(rows, pages=np.where(rows.pages == rows.own.pages[0], rows.others[0].pages[0], rows.pages))


FAULTS = {
    "causal mask ignored": Fault(sees_of_its_pass(lambda *shape: True, chains=True)),
    "tree mask ignored": Fault(sees_of_its_pass(np.tri)),
    "parents hidden": Fault(sees_of_its_pass(np.eye)),
    "positions off by one": Fault(late=True),
    "another request's keys visible": Fault(sees_the_neighbour),
    "another request's page": Fault(reads_a_page_of_the_neighbour),
    "one head reads another group's keys": Fault(wrong_group=True),
    "scale off by 3 %": Fault(scale=1.03),
}
"""For every model with several KV heads and relative or absolute positions."""
WINDOW_FAULTS = {"window ignored": Fault(no_window=True), "soft cap dropped": Fault(no_cap=True)}
"""For models with a window and a cap on their scores."""


def open_with(model: Any, fault: Fault | None, layer: int | None = None) -> None:
    """Open a model in memory through the adapter with a dense attention. Raises ModelError where it is refused."""
    with dense(fault, layer):
        dtype = next(model.parameters()).dtype
        open_adapter(Source.from_model(model), dtype, torch.device("cpu"), "cpu-packed")


@contextmanager
def dense(fault: Fault | None, layer: int | None) -> Iterator[None]:
    def make(_kind: str, shape: Any, *_: Any) -> DenseAttention:
        return DenseAttention(shape.num_heads, shape.num_kv_heads, fault, layer)

    def late_run(base: Any, tokens: Tensor, positions: Tensor) -> Any:
        is_tree = len(positions.unique()) < len(positions) // 2  # siblings share a position
        return run(base, tokens, positions + 1 if is_tree else positions)

    with mock.patch("treespec.adapter.decoder.make_attention", make):
        if fault is None or not fault.late:
            yield
        else:
            with mock.patch("treespec.adapter.decoder.run", late_run):
                yield
