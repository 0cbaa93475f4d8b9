"""The cases of the ops that are tuned and timed."""

from __future__ import annotations

from collections.abc import Iterable

from treespec_kernels.ops import OPS, cases_of
from treespec_kernels.ops.op import Case as Case
from treespec_kernels.ops.shapes import Setting as Setting

TUNABLE = ("row_linear", "quantized_row_linear", "lm_head", "tree_attention", "programmatic_launch")
"""Ops with several configurations."""


def ops() -> tuple[str, ...]:
    """Return every op, the tunable ones first."""
    return (*TUNABLE, *sorted(OPS.keys() - set(TUNABLE)))


def workloads_of(setting: Setting, only: Iterable[str] | None = None) -> list[Case]:
    """Return the timed cases of the ops in `only`, or of all tunable ones.

    Cases of the same op and key are tuned together.

    Raises:
        ValueError: an op is unknown.
    """
    chosen = tuple(only) if only is not None else TUNABLE
    for op in chosen:
        if op not in OPS:
            raise ValueError(f"op {op!r} has no workloads; valid: {', '.join(ops())}")
    return [case for op in chosen for case in cases_of(op, setting) if case.weight]
