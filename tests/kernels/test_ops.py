"""The table of ops: each kernel has an entry."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.helpers.child import needs_triton, run_uninterpreted
from treespec_kernels.attention.tree_attention import TreeAttentionConfig
from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.rows import FLOAT_TYPES
from treespec_kernels.linear.lm_head import LmHeadConfig
from treespec_kernels.linear.quantized import WeightForm
from treespec_kernels.ops import OPS, TUNABLE, cases_of
from treespec_kernels.ops.op import mapped, named_tensors
from treespec_kernels.ops.shapes import KernelShape, Setting
from treespec_kernels.sweep import problems_of
from treespec_kernels.tuning.tuned import kernel_files

SETTING = Setting(KernelShape(torch.float16, 16, 4, 2, 64, 96, 100), torch.device("cpu"), prefill=2048)

NORMS = {"norm": "rms_plus_one", "post_norms": True, "qk_norm": True}
GEMMA = replace(SETTING.shape, **NORMS, capped=True)


def test_every_kernel_has_an_entry() -> None:
    assert OPS.keys() == kernel_files().keys() > set(TUNABLE)
    assert all(op.name == name for name, op in OPS.items())
    waiting = {file.stem.removesuffix("_kernels") for file in kernel_files()["programmatic_launch"]}
    assert waiting == {
        "lm_head",
        "qkv_rope",
        "quantized_row_linear",
        "rms_norm",
        "row_linear",
        "tree_attention",
        "experts",
    }


WRONG = {
    "has dtype|values are": lambda tensor: tensor.double(),
    "has shape|are": lambda tensor: tensor[None, None],
    "is on meta|on cpu": lambda tensor: tensor.to("meta"),
    "has strides": lambda tensor: torch.stack((tensor, tensor), -1)[..., 0],
}

# Without tensors of their own, and growth from the root on by the next op.
UNCHECKED = ("quantized_row_linear", "programmatic_launch", "tree_merge")


@pytest.mark.parametrize("op", [op for op in OPS if op not in UNCHECKED])
def test_tensors_that_do_not_fit_are_refused(op: str) -> None:
    """Every argument with another dtype, shape, device or layout."""
    setting = replace(SETTING, nodes=3, context=5, requests=2, prefill=0)
    for case in [*cases_of(op, setting), *cases_of(op, replace(setting, shape=GEMMA))]:
        inputs, entry = case.make(torch.Generator().manual_seed(0)), case.entry
        call = partial(entry.run, **entry.plan(inputs, case.default))
        tensors = {name for name, value in inputs.arguments.items() if named_tensors(value, name)}
        for name in tensors if len(tensors) > 1 else ():
            for message, change in WRONG.items():
                if name == "kv_cache" and "dtype" in message:  # which may have any
                    continue
                wide = any(tensor.shape[-1] > 1 for tensor in named_tensors(inputs.arguments[name], name).values())
                if "strides" in message and not wide:
                    continue
                with pytest.raises(ValueError, match=message):
                    call(**(inputs.arguments | {name: mapped(change, inputs.arguments[name])}))


@needs_triton
@pytest.mark.parametrize("op", OPS)
def test_cpu_tensors_are_refused_outside_the_interpreter(op: str) -> None:
    """An implementation asked for by name never falls back."""
    shape = replace(SETTING.shape, quantized=WeightForm(8) if op == "quantized_row_linear" else None)
    case = cases_of(op, replace(SETTING, shape=shape, nodes=3, context=5))[0]
    with pytest.raises(ValueError, match=r"implementation 'triton' got CPU tensors; .* TRITON_INTERPRET=1 before"):
        case.run(case.default)


@pytest.mark.slow
def test_importing_the_references_imports_no_triton() -> None:
    modules = "treespec_kernels.ops, treespec_kernels.aot.compiler, treespec_kernels.sweep"
    child = run_uninterpreted(f"import sys; sys.modules['triton'] = None; import {modules}")
    assert child.returncode == 0, child.stderr


def test_a_check_names_the_sizes() -> None:
    x, y = torch.zeros(3, 4), torch.zeros(2, 4, 0)
    assert check_arguments(x=(x, "rows width", torch.float32)) == {"rows": 3, "width": 4}
    assert check_arguments(x=(x, "rows width", FLOAT_TYPES), y=(None, "rows", torch.int32)) == {"rows": 3, "width": 4}
    assert check_arguments(x=(x, "(groups) rows 4", torch.float32)) == {"rows": 3}
    wide, width = torch.zeros(3, 8)[:, :4], r"expected \[groups 2, width 4, items 0\], .*items 1 or more"
    for given, message in (
        ((x, "width _", torch.float32), r"y has shape \[3, 4\]; expected \[width 4, _\]"),
        ((y, "(groups+) width items+", torch.float32), width),
        ((x, "rows width", (torch.int8, torch.int32)), r"y has dtype .*float32; convert it to .*int8 or .*int32"),
        ((x.to("meta"), "rows width", torch.float32), "y is on meta and x on cpu; move it there"),
        ((wide, "[rows width]", torch.float32), r"y has strides \[8, 1\] for shape \[3, 4\]; make it contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            check_arguments({"width": 4}, x=(x, "rows width", torch.float32), y=given)


@pytest.mark.parametrize("target", [None, "sm_80", "sm_89", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
def test_candidates_are_distinct_and_start_with_the_default(dtype: torch.dtype, target: str | None) -> None:
    heads = [(LmHeadConfig, *sizes) for sizes in ((4096, 256), (128256, 2048), (128256, 4096), (1, 1))]
    for kind, *sizes in (*heads, *((TreeAttentionConfig, dim) for dim in (16, 64, 80, 128, 192, 256))):
        candidates = kind.candidates(dtype, *sizes, target)
        assert candidates[0] == kind.default(dtype, *sizes, target)
        assert len(set(candidates)) == len(candidates) > 3


def test_what_is_tuned_without_names_and_how_little_prefill_counts() -> None:
    problems = problems_of([SETTING])
    assert {problem[0].op for problem in problems} == set(TUNABLE) - {"quantized_row_linear"}
    loads = {case.load: case.weight for problem in problems if problem[0].op == "row_linear" for case in problem}
    assert loads == {"rows 1": 0.2, "rows 32": 0.6, "rows 128": 0.2, "rows 2048": 0.01}
    assert not any("2048" in case.load for case in cases_of("lm_head", SETTING))
