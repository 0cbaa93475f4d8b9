"""Every shipped kernel configuration compiles for real targets, without a GPU, within bounds and without a spill."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.child import needs_triton, run_uninterpreted
from treespec_kernels.aot.launches import launches_of
from treespec_kernels.launch.triton_launch import SHARED_BYTES
from treespec_kernels.ops.shapes import default_shapes

pytestmark = [pytest.mark.slow, needs_triton]

# Registers per thread, some tens above what Triton 3.6 and 3.9 give: a change that costs occupancy shows here.
REGISTER_BOUND = {
    "attend_items": 224,
    "combine_segments": 144,
    "move_path": 64,
    "project_to_vocab": 192,
    "multiply_rows": 192,
    "add_splits": 64,
    "multiply_quantized": 192,
    "norm_rows": 96,
    "rotate_and_write": 96,
    "lay_out_pass": 80,
    "merge_level": 160,
    "start_round": 48,
    "select_nodes": 96,
    "walk_down": 168,
    "summarise_blocks": 64,
    "select_of_blocks": 80,
    "transform_scores": 112,
    "truncate_scores": 128,
}

# Planted as launches: a kernel with a wrong shape, and one whose tile does not fit a warp's registers.
PLANTED = """
import json, sys, torch
import triton, triton.language as tl
from treespec_kernels.aot import compiler as aot
from treespec_kernels.ops.shapes import default_shapes, family_shapes
from treespec_kernels.aot.launches import Launch, Pointer

@triton.jit
def wrong(out, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), tl.zeros((BLOCK * 2,), tl.float32))

@triton.jit
def greedy(a, out, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    x = tl.load(a + o[:, None] * BLOCK + o[None, :])
    tl.store(out + o[:, None] * BLOCK + o[None, :], tl.dot(x, x, input_precision="ieee"))

"""

# All ops in bfloat16, for the embedded target and 8B; of other dtypes and of sm_80 the kernels with products.
# Programmatic launches are compiled by test_aot_order.py, quantised 8B below.
DEFAULTS = """
import json, torch
from treespec_kernels.aot import compiler as aot
from treespec_kernels.ops import OPS
from treespec_kernels.ops.shapes import default_shapes
if __name__ == "__main__":
    small, _, large = default_shapes([torch.bfloat16])
    half, _, large_half, single, _, large_single = default_shapes([torch.float16, torch.float32])
    products = ["row_linear", "lm_head", "tree_attention"]
    plain = [op for op in OPS if op not in ("programmatic_launch", "quantized_row_linear")]
    parts = [([large], plain), ([small], [*plain, "quantized_row_linear"]), ([single], [*products, "rms_norm"])]
    parts = parts if TARGET == "sm_90" else [([small, large], products)]
    parts += [([half, large_half, single, large_single], ["tree_attention"])]
    report = {"failed": [], "rows": []}
    for shapes, ops in parts:
        compiled = aot.compile_report([TARGET], shapes, ops, jobs=1)
        report["failed"] += compiled["failed"]
        report["rows"] += compiled["targets"][TARGET]
    print(json.dumps(report))
"""

QUANTISED = """
import json, torch
from dataclasses import replace
from treespec_kernels.aot import compiler as aot
from treespec_kernels.ops.shapes import default_shapes, family_shapes
from treespec_kernels.ops.shapes import AOT_FORMS
if __name__ == "__main__":
    shapes = [replace(default_shapes([torch.bfloat16])[2], quantized=form) for form in AOT_FORMS]
    targets = ["sm_80", "sm_90", "sm_100", "gfx942"]
    print(json.dumps(aot.compile_report(targets, shapes, ["quantized_row_linear"], jobs=1)))
"""


LESS_MEMORY = """
import json, torch
from treespec_kernels.aot import compiler as aot
from treespec_kernels.ops.shapes import default_shapes, family_shapes
if __name__ == "__main__":
    large, wide = default_shapes([torch.bfloat16])[2], family_shapes([torch.bfloat16])[0]
    parts = (large, ["row_linear"]), (wide, ["row_linear", "tree_attention"])
    print(json.dumps([aot.compile_report(["sm_89"], [shape], ops, jobs=1) for shape, ops in parts]))
"""


def printed_by(script: str) -> Any:
    """The JSON that a script prints where triton is not interpreted."""
    child = run_uninterpreted(script)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_shipped_defaults_compile(target: str) -> None:
    report = printed_by(DEFAULTS.replace("TARGET", repr(target)))
    assert report["failed"] == []
    rows = report["rows"]
    assert target != "sm_90" or {row["kernel"] for row in rows} == set(REGISTER_BOUND)
    for row in rows:
        counted = {"products", "fences", "prefetches"}
        assert row.keys() == {"kernel", "case", "config", "registers", "spills", "shared_bytes"} | counted
        assert row["spills"] == 0, row
        assert row["shared_bytes"] <= SHARED_BYTES[target], row
        assert 0 < row["registers"] <= REGISTER_BOUND[row["kernel"]], row
    attended = [row for row in rows if row["kernel"] == "attend_items"]
    if target == "sm_90":
        for row in (row for row in rows if row["kernel"].startswith("attend") and "float32" not in row["case"]):
            config = row["config"]
            tile = 2 * config["BLOCK_N"] * config["HEAD_DIM"] * 2  # bytes of keys and values
            assert row["shared_bytes"] > config["num_stages"] * tile, f"fewer tiles are fetched ahead: {row}"
    assert {(row["case"].split()[1].strip(","), row["config"]["HEAD_DIM"]) for row in attended} == {
        (dtype, head_dim) for dtype in ("bfloat16", "float16", "float32") for head_dim in (64, 128)
    }


def test_quantised_defaults_of_8b_compile_everywhere() -> None:
    report = printed_by(QUANTISED)
    assert report["failed"] == [] and set(report["targets"]) == {"sm_80", "sm_90", "sm_100", "gfx942"}
    for target, rows in report["targets"].items():
        found = [row["config"] for row in rows if row["kernel"] == "multiply_quantized"]
        assert {(c["BITS"], c["GROUP"] if c["BITS"] == 4 else None, "zero" not in c) for c in found} == {
            (8, None, False),
            (4, 128, False),
            (4, 128, True),
        }, target
        assert {(c["OUT_FEATURES"], c["IN_FEATURES"]) for c in found} == {
            (6144, 4096),
            (4096, 4096),
            (28672, 4096),
            (4096, 14336),
        }


def test_defaults_fit_gpus_of_less_memory() -> None:
    """What takes most of it: the linear layers of 8B, and heads of 256."""
    for report in printed_by(LESS_MEMORY):
        assert report["failed"] == []
        rows = report["targets"]["sm_89"]
        assert {row["kernel"] for row in rows} & {"multiply_rows", "attend_items"}
        assert all(row["shared_bytes"] <= SHARED_BYTES["sm_89"] for row in rows), rows


def test_what_does_not_compile_or_spills_has_failed(tmp_path: Path) -> None:
    script = PLANTED + (
        "def planted(op, shape, target):\n"
        "    options, out = {'num_warps': 1, 'num_stages': 1}, Pointer(torch.float32, 0)\n"
        "    return [Launch(__name__, 'wrong', {'out': out, 'BLOCK': 16}, options, 'a case'),\n"
        "            Launch(__name__, 'greedy', {'a': out, 'out': out, 'BLOCK': 64}, options)]\n"
        "aot.launches_of = planted\n"
        "shapes = default_shapes()[:2]\n"
        "print(json.dumps(aot.compile_report(['sm_90'], shapes, ['kv_commit'], jobs=1)))\n"
    )
    file = tmp_path / "planted.py"  # Triton reads the source of a kernel from its file
    file.write_text(script)
    report = printed_by(f"import sys; sys.path.append({str(tmp_path)!r}); import planted")
    assert [row["kernel"] for row in report["targets"]["sm_90"]] == ["greedy"] * 2  # once per shape, compiled once
    wrong, greedy = report["failed"][:2]
    assert (wrong["kernel"], wrong["target"], wrong["case"]) == ("wrong", "sm_90", "a case")
    assert wrong["config"] == {"BLOCK": 16, "num_warps": 1, "num_stages": 1}
    assert "CompilationError" in wrong["message"]
    assert greedy["spills"] > 0 and greedy["message"] == f"spills {greedy['spills']}"


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = default_shapes()[0]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="aot: TRITON_INTERPRET is set"):
        launches_of("row_linear", shape, "sm_90")
