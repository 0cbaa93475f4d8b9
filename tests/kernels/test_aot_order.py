"""Kernels that are launched programmatically wait before anything else, on every path: proved of compiled code."""

import re
from pathlib import Path

import pytest

from tests.helpers.child import uninterpreted_document
from tests.kernels.test_kernels_aot import REGISTER_BOUND
from treespec_kernels.aot.code_order import OrderError, check_launch_order
from treespec_kernels.launch.triton_launch import SHARED_BYTES

SASS = """	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;     /* 0x00000a00ff017b82 */
{}        /*0050*/                   PREEXIT ;                  /* 0x000000000000782d */
        /*0060*/              @!P0 BRA 0x80 ;                 /* 0x00000010008c8947 */
        /*0070*/                   LDG.E R27, desc[UR4][R2.64] ;
        /*0080*/                   EXIT ;
        /*0090*/                   BRA 0x90;
        /*00a0*/                   LDG.E R2, desc[UR4][R2.64] ;
        /*00b0*/                   RET.REL.NODEC R4 0x0 ;
        /*00c0*/                   BPT.TRAP 0x1 ;
        /*00d0*/                   RET.REL.NODEC R4 0x0 ;
"""
BULK = "        /*0040*/                   ACQBULK ;\n"


def line(address: str, text: str) -> str:
    return f"        /*{address}*/                   {text} ;\n"


@pytest.mark.parametrize(
    ("before", "fault"),
    [
        (line("0010", "LDG.E R2, desc[UR4][R2.64]") + BULK, "LDG.E is reached"),
        (line("0010", "LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64]") + BULK, "LDGSTS"),
        (line("0010", "STG.E desc[UR4][R2.64], R3") + BULK, "STG.E"),
        (line("0010", "UTMALDG.2D [UR8], [UR4]") + BULK, "UTMALDG"),
        (line("0010", "@P0 REDG.E.ADD desc[UR4][R2.64], R3") + BULK, "@P0 REDG"),
        (line("0010", "@P0 EXIT") + BULK, "@P0 EXIT"),
        (line("0010", "@P0 BRA 0x70") + BULK, "LDG.E is reached"),
        (line("0010", "BRA.U UP0, 0x80") + BULK, "EXIT is reached"),
        (line("0010", "CALL.REL.NOINC 0xa0") + BULK, "LDG.E is reached"),
        (line("0010", "BRX R2 -0x10") + BULK, "BRX is reached"),
        (line("0010", "CALL.REL.NOINC 0xff0") + BULK, "CALL.REL.NOINC 0xff0 "),
        (BULK.replace("ACQ", "@P0 ACQ"), "PREEXIT is reached"),
        ("", "PREEXIT is reached"),
    ],
)
def test_machine_code_that_does_not(before: str, fault: str) -> None:
    with pytest.raises(OrderError, match=re.escape(fault)):
        check_launch_order(SASS.format(before))


@pytest.mark.parametrize(
    "text",
    [
        "STS [UR4], R0",
        "LDS R0, [UR7]",
        "CALL.REL.NOINC 0xc0",
        "@P0 BRA 0x40",
        "LDCU UR4, c[0x0]",
        "UBLKPF.L2 [UR10], UR8",
    ],
)
def test_machine_code_that_waits_first(text: str) -> None:
    check_launch_order(SASS.format(line("0010", text) + BULK))


def test_code_that_lets_nobody_begin() -> None:
    with pytest.raises(OrderError, match="does not launch dependents"):
        check_launch_order(SASS.replace("PREEXIT", "NOP").format(BULK))


KERNELS = """
import json, torch
from dataclasses import replace
from treespec_kernels.aot import compiler as aot
from treespec_kernels.ops.shapes import default_shapes, family_shapes
from treespec_kernels.ops.shapes import AOT_FORMS
if __name__ == "__main__":
    plain = default_shapes([torch.bfloat16])[2]
    shapes = [plain, *(replace(plain, quantized=form) for form in AOT_FORMS)]
    report = aot.compile_report(["sm_90"], shapes, ["programmatic_launch"], jobs=1)
    others = aot.compile_report(["sm_80", "sm_100", "gfx942"], [plain], ["programmatic_launch"], jobs=1)
    print(json.dumps({"failed": report["failed"] + others["failed"], "targets": others["targets"] | report["targets"]}))
"""
OF_A_PASS = set(
    """norm_rows multiply_rows add_splits multiply_quantized rotate_and_write attend_items
    combine_segments project_to_vocab""".split()
)


def test_every_kernel_of_a_pass() -> None:
    """Of 8B in bfloat16 and, for sm_90, quantised."""
    pytest.importorskip("triton")
    report = uninterpreted_document(KERNELS)
    assert report["failed"] == []
    assert {target for target, rows in report["targets"].items() if rows} == {"sm_90", "sm_100"}
    for target in ("sm_90", "sm_100"):
        rows = report["targets"][target]
        assert {row["kernel"] for row in rows} == OF_A_PASS - ({"multiply_quantized"} if target == "sm_100" else set())
        for row in rows:
            has_weights = row["kernel"] in ("multiply_rows", "multiply_quantized", "project_to_vocab", "norm_rows")
            assert row["prefetches"] == has_weights
            assert (
                row["config"]["PDL"]
                and row["config"]["launch_pdl"]
                and row["spills"] == 0
                and row["shared_bytes"] <= SHARED_BYTES[target]
            ), row
            if target == "sm_90":  # for which the bounds are
                assert row["registers"] <= REGISTER_BOUND[row["kernel"]], row


PLANTED = """
import json, torch
import triton, triton.language as tl
from treespec_kernels.aot import compiler as aot
from treespec_kernels.ops.shapes import default_shapes, family_shapes
from treespec_kernels.aot.launches import Launch, Pointer
from treespec_kernels.launch.predecessors import wait_for_predecessors

@triton.jit
def reads_first(x, out, PDL: tl.constexpr):
    found = tl.load(x)
    wait_for_predecessors(PDL)
    tl.store(out, found)

@triton.jit
def leaves_first(x, out, PDL: tl.constexpr):
    if tl.program_id(0) > 3:
        return
    wait_for_predecessors(PDL)
    tl.store(out, tl.load(x))

@triton.jit
def waits_in_a_loop(x, out, num_blocks, PDL: tl.constexpr):
    for i in range(num_blocks):
        wait_for_predecessors(PDL)
        tl.store(out + i, tl.load(x + i))

@triton.jit
def forgets(x, out, PDL: tl.constexpr):
    tl.store(out, tl.load(x))

@triton.jit
def waits(x, out, num_blocks, PDL: tl.constexpr):
    wait_for_predecessors(PDL)
    if tl.program_id(0) > 3:
        return
    for i in range(num_blocks):
        tl.store(out + i, tl.load(x + i))

def planted(op, shape, target):
    x = {"x": Pointer(torch.int32, 0), "out": Pointer(torch.int32, 0)}
    return [Launch(__name__, name, x | ({"num_blocks": 7} if "loop" in name or name == "waits" else {}) | {"PDL": True},
                   {"num_warps": 1, "launch_pdl": True})
            for name in ("reads_first", "leaves_first", "waits_in_a_loop", "forgets", "waits")]
aot.launches_of = planted
print(json.dumps(aot.compile_report(["sm_90"], default_shapes()[:1], ["programmatic_launch"], jobs=1)))
"""


def test_kernels_that_do_not_wait_have_failed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "planted.py"  # Triton reads the source of a kernel from its file
    file.write_text(PLANTED)
    report = uninterpreted_document(f"import sys; sys.path.append({str(tmp_path)!r}); import planted")
    assert [row["kernel"] for row in report["targets"]["sm_90"]] == ["waits"]
    faults = {row["kernel"]: row["message"] for row in report["failed"]}
    assert faults.keys() == {"reads_first", "leaves_first", "waits_in_a_loop", "forgets"}
    assert all(message.startswith("OrderError: ") for message in faults.values())
    assert "LDG" in faults["reads_first"] and "EXIT" in faults["leaves_first"]
    assert "EXIT" in faults["waits_in_a_loop"] and "is reached before the wait" in faults["forgets"]
