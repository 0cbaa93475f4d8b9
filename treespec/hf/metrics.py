"""Metrics of a model's last `generate` call."""

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from treespec.hf.rows import Row
from treespec.outputs import RequestMetrics

_metrics: "weakref.WeakKeyDictionary[nn.Module, GenerateMetrics]" = weakref.WeakKeyDictionary()
_guard = threading.Lock()


@dataclass(frozen=True)
class GenerateMetrics(RequestMetrics):
    """Metrics of a `generate` call, summed over its rows.

    Attributes:
        rows: metrics of each output row.
    """

    rows: tuple[RequestMetrics, ...]


def last_metrics(model: nn.Module) -> GenerateMetrics | None:
    """Return the metrics of the last token-tree call with this model, from any thread, or None before the first.

    Covers `accelerate` and `custom_generate=treespec.hf.generate`. Failed calls and calls passed to transformers are
    not recorded.
    """
    with _guard:
        return _metrics.get(model)


def record_metrics(model: nn.Module, rows: Sequence[Row]) -> None:
    metrics = GenerateMetrics(**vars(RequestMetrics.of(rows)), rows=tuple(RequestMetrics.of([row]) for row in rows))
    with _guard:
        _metrics[model] = metrics
