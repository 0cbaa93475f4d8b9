"""Workloads on which each op is checked, tuned and benchmarked; `<op>.py` has those of one op."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path

from treespec_kernels.ops import kernel_modules

from .base import Setting as Setting
from .base import Workload as Workload

TUNABLE = ("row_linear", "quantized_row_linear", "lm_head", "tree_attention", "programmatic_launch")
"""Ops with several configurations."""


def ops() -> tuple[str, ...]:
    """Return every op that has workloads, the tunable ones first."""
    folder = Path(__file__).parent
    found = {path.stem for path in folder.glob("*.py")} & kernel_modules().keys()
    return (*(op for op in TUNABLE if op in found), *sorted(found - set(TUNABLE)))


def workloads_of(setting: Setting, only: Iterable[str] | None = None) -> list[Workload]:
    """Return the workloads of the ops in `only`, or of all tunable ones.

    Workloads of the same op and key are tuned together.

    Raises:
        ValueError: an op has no workloads.
    """
    chosen = tuple(only) if only is not None else tuple(op for op in ops() if op in TUNABLE)
    for op in chosen:
        if op not in ops():
            raise ValueError(f"op {op!r} has no workloads; valid: {', '.join(ops())}")
    return [workload for op in chosen for workload in importlib.import_module(f".{op}", __package__).workloads(setting)]
