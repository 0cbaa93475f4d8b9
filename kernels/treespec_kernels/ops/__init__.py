"""The table of ops. Checks, tuning, benchmarks and ahead-of-time compilation iterate over it.

An op's entry is in the file of its family: `linear`, `experts`, `recurrent`, `attention`, `pass_chain`, `sampling` or
`tree`.
"""

from treespec_kernels.ops import attention, experts, linear, pass_chain, recurrent, sampling, tree
from treespec_kernels.ops.op import Case, Op
from treespec_kernels.ops.shapes import Setting

OPS: dict[str, Op] = {
    op.name: op for family in (linear, experts, recurrent, attention, pass_chain, sampling, tree) for op in family.OPS
}
TUNABLE = ("row_linear", "quantized_row_linear", "lm_head", "tree_attention", "programmatic_launch")
"""Ops with several configurations."""


def cases_of(op: str, setting: Setting) -> list[Case]:
    """Return the cases of an op; cases without a weight are not timed, cases with equal keys are tuned together."""
    return list(OPS[op].cases(OPS[op], setting))
