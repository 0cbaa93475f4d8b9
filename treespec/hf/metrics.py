"""What the last `generate` call of a model took."""

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields

from torch import nn

from treespec.hf.rows import Row
from treespec.outputs import RequestMetrics

_metrics: "weakref.WeakKeyDictionary[nn.Module, GenerateMetrics]" = weakref.WeakKeyDictionary()
_guard = threading.Lock()


@dataclass(frozen=True)
class GenerateMetrics(RequestMetrics):
    """Figures of a `generate` call, summed over its rows.

    Attributes:
        rows: the same for every row of the output.
    """

    rows: tuple[RequestMetrics, ...]


def last_metrics(model: nn.Module) -> GenerateMetrics | None:
    """Figures of the last call that decoded by token trees with this model, from any thread; None before the first.

    The call may have gone through `accelerate` or through `custom_generate=treespec.hf.generate`. One that failed, or
    that was left to transformers, changes nothing.
    """
    with _guard:
        return _metrics.get(model)


def record_metrics(model: nn.Module, rows: Sequence[Row]) -> None:
    """Keep the figures of a call that has ended."""
    total = RequestMetrics.of(rows)
    found = GenerateMetrics(
        **{field.name: getattr(total, field.name) for field in fields(RequestMetrics)},
        rows=tuple(RequestMetrics.of([row]) for row in rows),
    )
    with _guard:
        _metrics[model] = found
