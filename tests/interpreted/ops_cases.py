"""Cases of the table of ops. Results are those of the reference, and rows do not depend on other rows."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.interpreted.common import DEVICE, LLAMA, unchanged
from treespec_kernels.linear.quantized import WeightForm
from treespec_kernels.ops import OPS, cases_of
from treespec_kernels.ops.op import Case
from treespec_kernels.ops.shapes import KernelShape, Setting

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

GEMMA = KernelShape(
    torch.float16, 24, 3, 1, 63, 33, 123, "rms_plus_one", True, True, activation="gelu_tanh", capped=True
)
UNEQUAL = KernelShape(torch.float16, 24, 4, 2, 64, 32, 123, qk_norm=True, planes=(2, 8))
OPT = KernelShape(torch.float32, 10, 2, 2, 40, 24, 63, "layer", rotary=False, gated=False, activation="relu")
INT4 = replace(LLAMA, dtype=torch.float16, hidden_size=64, quantized=WeightForm(4, 32, True))
SHAPES: dict[str, tuple[KernelShape, dict[str, int]]] = {
    "llama": (LLAMA, {}),
    "gemma": (GEMMA, {}),
    "unequal": (UNEQUAL, {}),
    "opt": (OPT, {"nodes": 1, "context": 0, "requests": 1}),
    "int4": (INT4, {"groups": 2}),
}
# Ops whose cases follow the kind of model.
KINDS = ("row_linear", "lm_head", "rms_norm", "qkv_rope", "tree_attention")
PAIRS = [
    *(("llama", op) for op in OPS if not op.startswith("quantized")),
    *((kind, op) for kind in ("gemma", "opt") for op in KINDS),
    *(("unequal", op) for op in ("rms_norm", "qkv_rope", "tree_attention", "kv_commit")),
    *(("int4", op) for op in ("quantized_row_linear", "experts")),
]


def check_no_rows(case: Case) -> None:
    entry, some = case.entry, case.entry.rows_of(case.fresh(), [])
    for results in (case.results(some, case.default), entry.results_of(some, entry.ref(**some.arguments))):
        for name, tensor in entry.by_row(some, results).items():
            assert tensor.shape[entry.row_dim] == 0, name


@pytest.mark.parametrize(("kind", "op"), PAIRS)
def test_every_case(kind: str, op: str) -> None:
    shape, options = SHAPES[kind]
    sizes: dict[str, Any] = {"nodes": 2, "context": 20, "requests": 2, "layers": 2} | options
    cases = cases_of(op, Setting(shape, torch.device(DEVICE), **sizes))
    assert cases and {case.op for case in cases} == {op}
    for case in cases:
        assert json.loads(json.dumps(case.key)) == case.key
        case.prepare(2)
        assert case.bytes > 0
        arguments, writes = case.inputs[0].arguments, case.entry.writes
        kept = {} if op == "programmatic_launch" else {n: value for n, value in arguments.items() if n not in writes}
        with unchanged(kept):
            case.check(case.default)
        case.run(case.default, 1)
        for baseline in case.entry.baselines.values() if case.weight else ():
            baseline(case.inputs[1])
        if case.entry.rows and op not in ("tree_root", "tree_merge", "tree_select", "tree_walk"):
            check_no_rows(case)
        case.release()
