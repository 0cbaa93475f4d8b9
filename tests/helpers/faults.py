"""The ways in which an attention can be run wrong: what the adapter's probe has to refuse."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from treespec.adapter.decoder import open_adapter
from treespec.adapter.source import Source
from treespec.adapter.trace import run
from treespec.models.attention import CpuAttention
from treespec_kernels.attention.tree_batch import RequestRows


@dataclass(frozen=True)
class Fault:
    """What is done wrong; by default nothing."""

    rows: Callable[[RequestRows, Sequence[RequestRows]], RequestRows] = lambda own, _: own  # and all of the pass
    scale: float = 1.0
    no_window: bool = False
    no_cap: bool = False
    wrong_group: bool = False
    late: bool = False  # rows of the tree stand one position further on


class FaultyAttention(CpuAttention):
    """The CPU's attention, with a fault in one layer."""

    def __init__(self, heads: int, fault: Fault, layer: int):
        super().__init__(heads)
        self.fault, self.layer = fault, layer

    def plan(self, requests: list[RequestRows], num_rows: int, window: int | None = None) -> Any:
        wrong = [self.fault.rows(own, requests) for own in requests]
        wrong_window = None if self.fault.no_window else window
        return super().plan(requests, num_rows, window), super().plan(wrong, num_rows, wrong_window)

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Any, scale: float, cap: float | None = None
    ) -> Tensor:
        right, wrong = plan
        if k_cache.storage_offset() // (2 * k_cache.numel()) != self.layer:
            return super().__call__(q, k_cache, v_cache, right, scale, cap)
        options = {"plan": wrong, "scale": scale * self.fault.scale, "cap": None if self.fault.no_cap else cap}
        attend = partial(super().__call__, q, **options)
        out = attend(k_cache, v_cache)
        if self.fault.wrong_group:
            out[:, 0] = attend(k_cache.roll(1, 1), v_cache.roll(1, 1))[:, 0]
        return out


def sees_of_its_pass(mask: Callable[[int], np.ndarray], chains: bool = False) -> Fault:
    """What rows of trees, or of `chains`, see of their own pass: bool [num_rows, num_rows]."""

    def rows(own: RequestRows, _: Sequence[RequestRows]) -> RequestRows:
        if own.is_chain != chains:
            return own
        return replace(own, visible=mask(own.num_rows).astype(bool), slot_depths=own.depths)

    return Fault(rows)


def reads_a_page_of_the_neighbour(own: RequestRows, requests: Sequence[RequestRows]) -> RequestRows:
    """The first page is the other request's."""
    [other] = [each for each in requests if each is not own] or [own]
    return replace(own, pages=np.concatenate((other.pages[:1], own.pages[1:])))


FAULTS = {
    "causal mask ignored": sees_of_its_pass(lambda count: np.ones((count, count)), chains=True),
    "tree mask ignored": sees_of_its_pass(np.tri),
    "parents hidden": sees_of_its_pass(np.eye),
    "positions off by one": Fault(late=True),
    "another request's page": Fault(reads_a_page_of_the_neighbour),
    "one head reads another group's keys": Fault(wrong_group=True),
    "scale off by 3 %": Fault(scale=1.03),
}
"""For every model with several KV heads and relative or absolute positions."""
WINDOW_FAULTS = {"window ignored": Fault(no_window=True), "soft cap dropped": Fault(no_cap=True)}
"""For models with a window and a cap on their scores."""


def decoder_with(**parts: Any) -> AbstractContextManager[object]:
    """Let the adapter's decoder be made of other parts while the block runs."""
    return mock.patch.multiple("treespec.adapter.decoder", **parts)


def open_with(model: Any, fault: Fault, layer: int) -> None:
    """Open a model in memory through the adapter with a fault. Raises ModelError where it is refused."""

    def late(base: Any, tokens: Tensor, positions: Tensor) -> Any:
        is_tree = len(positions.unique()) < len(positions) // 2  # siblings share a position
        return run(base, tokens, positions + 1 if is_tree else positions)

    def attention(_kind: str, shape: Any, *_: Any) -> FaultyAttention:
        return FaultyAttention(shape.num_heads, fault, layer)

    with decoder_with(make_attention=attention, run=late if fault.late else run):
        dtype = next(model.parameters()).dtype
        open_adapter(Source.from_model(model), dtype, torch.device("cpu"), "cpu-packed")
