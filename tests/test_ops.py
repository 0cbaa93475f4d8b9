"""The table of ops: each kernel has an entry, whose cases hold in the interpreter or on a GPU."""

import pickle

import pytest
import torch

from tests.child import run_cases
from tests.kernel_cases import environments
from treespec_kernels.ops import OPS, cases_of
from treespec_kernels.ops.shapes import KernelShape, Setting
from treespec_kernels.tuning.tuned import kernel_modules
from treespec_kernels.tuning.workloads import TUNABLE, ops, workloads_of

SETTING = Setting(KernelShape(torch.float16, 16, 4, 2, 64, 96, 100), torch.device("cpu"), prefill=2048)


@environments()
def test_cases(environment: dict[str, str]) -> None:
    run_cases("ops_cases.py", environment)


def test_every_kernel_has_an_entry() -> None:
    assert OPS.keys() == kernel_modules().keys() and set(ops()) == OPS.keys()
    assert all(op.name == name for name, op in OPS.items())
    waiting = {module.split(".")[-1].removesuffix("_kernels") for module in kernel_modules()["programmatic_launch"]}
    assert waiting == {
        *("lm_head", "qkv_rope", "quantized_row_linear", "rms_norm", "row_linear"),
        *("tree_attention", "tree_attention_masked"),
    }


def test_cases_are_made_again_in_another_process() -> None:
    for op in OPS:
        for case in cases_of(op, SETTING):
            again = pickle.loads(pickle.dumps(case))
            assert (again.op, again.load, again.key, again.weight) == (op, case.load, case.key, case.weight)


def test_prefill_counts_little_in_tuning() -> None:
    [key, *_] = [case.key for case in workloads_of(SETTING, ["row_linear"])]
    loads = {case.load: case.weight for case in workloads_of(SETTING, ["row_linear"]) if case.key == key}
    assert loads == {"rows 1": 0.2, "rows 32": 0.6, "rows 128": 0.2, "rows 2048": 0.01}
    assert not any("2048" in case.load for case in workloads_of(SETTING, ["lm_head"]))


def test_without_names_the_tunable_ops_are_tuned() -> None:
    assert {case.op for case in workloads_of(SETTING)} == set(TUNABLE) - {"quantized_row_linear"}
    with pytest.raises(ValueError, match=r"op 'softmax' has no workloads; valid: .*tree_attention"):
        workloads_of(SETTING, ["softmax"])
