"""The table of ops. Checks, tuning, benchmarks and ahead-of-time compilation iterate over it.

An op's entry is in the file of its family: `linear`, `attention`, `sampling` or `tree`.
"""

from __future__ import annotations

from treespec_kernels.ops import attention, linear, pass_chain, sampling, tree
from treespec_kernels.ops.op import Case, Op
from treespec_kernels.ops.shapes import Setting

OPS: dict[str, Op] = {
    op.name: op
    for family in (linear, attention, pass_chain, sampling, tree)
    for op in sorted(family.OPS, key=lambda op: op.name)
}


def cases_of(op: str, setting: Setting) -> list[Case]:
    """Return the cases of an op; those without a weight are not timed."""
    cases = OPS[op].cases(setting)
    for index, case in enumerate(cases):
        case.index = index
    return cases


def case_at(op: str, setting: Setting, index: int) -> Case:
    """Return the case at an index of `cases_of`."""
    return cases_of(op, setting)[index]
