"""Cases of the table of ops. Results are those of the reference, and rows do not depend on other rows."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.interpreted.common import DEVICE
from treespec_kernels.linear.quantized import WeightForm
from treespec_kernels.ops import OPS, cases_of
from treespec_kernels.ops.op import Case, mapped, named_tensors
from treespec_kernels.ops.shapes import KernelShape, Setting
from treespec_kernels.tuning.testing import same_bits

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

LLAMA = KernelShape(torch.float32, 16, 4, 2, 32, 48, 100)
GEMMA = KernelShape(
    torch.float16, 24, 3, 1, 63, 33, 123, "rms_plus_one", True, True, activation="gelu_tanh", capped=True
)
OPT = KernelShape(torch.float32, 10, 2, 2, 40, 24, 63, "layer", rotary=False, gated=False, activation="relu")
SHAPES = {
    "llama": (LLAMA, {}),
    "gemma": (GEMMA, {}),
    "opt": (OPT, {"nodes": 1, "context": 0, "requests": 1}),
    "stacked": (LLAMA, {"groups": 2}),
    "int8": (replace(LLAMA, quantized=WeightForm(8)), {}),
    "int4": (replace(LLAMA, dtype=torch.float16, hidden_size=64, quantized=WeightForm(4, 32, True)), {"groups": 2}),
}
GROUPED = ("row_linear", "lm_head")
# Ops whose cases follow the kind of model.
KINDS = (*GROUPED, "rms_norm", "qkv_rope", "tree_attention")
PAIRS = [
    *(("llama", op) for op in OPS if not op.startswith("quantized")),
    *((kind, op) for kind in ("gemma", "opt") for op in KINDS),
    *(("stacked", op) for op in GROUPED),
    *((kind, "quantized_row_linear") for kind in ("int8", "int4")),
]


def setting_of(kind: str) -> Setting:
    shape, options = SHAPES[kind]
    sizes: dict[str, Any] = {"nodes": 3, "context": 20, "requests": 2, "layers": 2} | options
    return Setting(shape, torch.device(DEVICE), **sizes)


def check_no_rows(case: Case) -> None:
    entry, some = case.entry, case.entry.rows_of(case.fresh(), [])
    for results in (case.results(some, case.default), entry.results_of(some, entry.ref(**some.arguments))):
        for name, tensor in entry.by_row(some, results).items():
            assert tensor.shape[entry.row_dim] == 0, name


@pytest.mark.parametrize(("kind", "op"), PAIRS)
def test_every_case(kind: str, op: str) -> None:
    cases = cases_of(op, setting_of(kind))
    assert cases and {case.op for case in cases} == {op}
    for case in cases:
        assert json.loads(json.dumps(case.key)) == case.key
        case.prepare(2)
        assert case.bytes > 0
        arguments = case.inputs[0].arguments
        kept = {name: mapped(torch.clone, value) for name, value in arguments.items() if name not in case.entry.writes}
        case.check(case.default)
        for name, value in kept.items() if op != "programmatic_launch" else ():
            now = named_tensors(arguments[name], name)
            assert all(same_bits(now[part], tensor) for part, tensor in named_tensors(value, name).items()), name
        case.run(case.default, 1)
        for baseline in case.entry.baselines.values() if case.weight else ():
            baseline(case.inputs[1])
        if case.entry.rows and op not in ("tree_root", "tree_merge", "tree_select", "tree_walk"):
            check_no_rows(case)
        case.release()
