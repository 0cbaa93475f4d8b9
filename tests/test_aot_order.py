"""Kernels that are launched programmatically wait before anything else, on every path: proved of compiled code."""

from pathlib import Path

import pytest

from tests.child import uninterpreted_document
from tests.test_kernels_aot import REGISTER_BOUND
from treespec_kernels.aot.compiler import SHARED_BYTES
from treespec_kernels.aot.launch_order import order_fault

PTX = """.visible .entry k(.param .u64 k_param_0)
{{
	.reg .pred 	%p<7>;
$L__func_begin0:
	ld.param.b64 	%rd8, [k_param_0];  // ld.global in a comment
	setp.lt.u32 	%p1, %r1, 32;
{}	griddepcontrol.launch_dependents;
	@%p1 bra 	$L__BB0_2;
	ld.global.b32 	%r2, [%rd8];
$L__BB0_2:
	ret;
}}
"""
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
WAIT = "\tgriddepcontrol.wait; // dummy %r4\n"
BULK = "        /*0040*/                   ACQBULK ;\n"


def line(address: str, text: str) -> str:
    return f"        /*{address}*/                   {text} ;\n"


@pytest.mark.parametrize(
    "before",
    [
        "",
        "\tld.shared.b32 \t%r9, [global_smem];\n\tbar.sync \t0;\n",
        "\tadd.s64 \t%rd2, %rd1, 16;\n",
        "\t@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r20], 128;\n",
        "\t@%p1 bra \t$L__BB0_1;\n\tmov.b32 \t%r1, 0;\n$L__BB0_1:\n",
        "\tcp.async.bulk.prefetch.L2.global [%rd3], %r2; mov.u32 %r4, 0;\n",
    ],
)
def test_code_that_waits_first(before: str) -> None:
    assert order_fault(PTX.format(before + WAIT), SASS.format(BULK)) is None


@pytest.mark.parametrize(
    ("before", "fault"),
    [
        ("\tld.global.b32 \t%r9, [%rd8];\n" + WAIT, "ld.global.b32 is reached before the wait"),
        ("\t@%p1 ld.global.v4.b32 \t{ %r1, %r2, %r3, %r4 }, [ %rd8 + 0 ];\n" + WAIT, "@%p1 ld.global.v4.b32"),
        ("\tcp.async.cg.shared.global [ %r1 + 0 ], [ %rd8 + 0 ], 0x10;\n" + WAIT, "cp.async"),
        ("\tst.global.b32 \t[%rd8], %r9;\n" + WAIT, "st.global.b32"),
        ("\tatom.global.add.u32 \t%r1, [%rd8], 1;\n" + WAIT, "atom.global"),
        ("\tred.global.add.u32 \t[%rd8], 1;\n" + WAIT, "red.global"),
        ("\tprefetch.global.L2 \t[%rd8];\n" + WAIT, "prefetch"),
        ("\t@%p1 ret;\n" + WAIT, "@%p1 ret is reached before the wait"),
        ("\t@%p1 bra \t$L__BB0_2;\n" + WAIT, "ret is reached before the wait"),
        ("\t@%p1 griddepcontrol.wait;\n", "griddepcontrol.launch_dependents is reached before the wait"),
        ("\tgriddepcontrol.launch_dependents;\n" + WAIT, "griddepcontrol.launch_dependents is reached"),
        ("\tbrx.idx \t%r1, $L_table;\n" + WAIT, "brx.idx is reached"),
        ("\tcall.uni \tprintf;\n" + WAIT, "has an unknown target"),
        ("\tld.b32 \t%r9, [%rd8];\n" + WAIT, ""),
        ("", "is reached before the wait"),
    ],
)
def test_ptx_that_does_not(before: str, fault: str) -> None:
    found = order_fault(PTX.format(before), SASS.format(BULK))
    assert found is not None and fault in found and "PTX" in found


@pytest.mark.parametrize(
    ("before", "fault"),
    [
        (line("0010", "LDG.E R2, desc[UR4][R2.64]") + BULK, "LDG.E is reached"),
        (line("0010", "LDG.E.64.STRONG.SYS R2, desc[UR4][R2.64]") + BULK, "LDG.E.64.STRONG.SYS is reached"),
        (line("0010", "LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64]") + BULK, "LDGSTS"),
        (line("0010", "STG.E desc[UR4][R2.64], R3") + BULK, "STG.E"),
        (line("0010", "UTMALDG.2D [UR8], [UR4]") + BULK, "UTMALDG"),
        (line("0010", "@P0 REDG.E.ADD desc[UR4][R2.64], R3") + BULK, "@P0 REDG"),
        (line("0010", "@P0 EXIT") + BULK, "@P0 EXIT"),
        (line("0010", "@P0 BRA 0x70") + BULK, "LDG.E is reached"),
        (line("0010", "BRA.U UP0, 0x80") + BULK, "EXIT is reached"),
        (line("0010", "CALL.REL.NOINC 0xa0") + BULK, "LDG.E is reached"),
        (line("0010", "BRX R2 -0x10") + BULK, "BRX is reached"),
        (BULK.replace("ACQ", "@P0 ACQ"), "PREEXIT is reached"),
        ("", "PREEXIT is reached"),
    ],
)
def test_machine_code_that_does_not(before: str, fault: str) -> None:
    found = order_fault(PTX.format(WAIT), SASS.format(before))
    assert found is not None and fault in found and "machine code" in found


@pytest.mark.parametrize(
    "text",
    [
        "STS [UR4], R0",
        "LDS R0, [UR7]",
        "CALL.REL.NOINC 0xc0",
        "@P0 BRA 0x40",
        "LDCU UR4, c[0x0]",
        "UBLKPF.L2 [UR10], UR8",
        "@!P0 LDG.E.STRONG.GPU R2, desc[UR20][R6.64]",
    ],
)
def test_machine_code_that_waits_first(text: str) -> None:
    assert order_fault(PTX.format(WAIT), SASS.format(line("0010", text) + BULK)) is None


def test_code_that_lets_nobody_begin() -> None:
    alone = PTX.format(WAIT).replace("\tgriddepcontrol.launch_dependents;\n", "")
    assert "does not launch dependents" in str(order_fault(alone, SASS.format(BULK)))
    assert "PREEXIT" not in (sass := SASS.replace("PREEXIT", "NOP")).format(BULK)
    assert "does not launch dependents" in str(order_fault(PTX.format(WAIT), sass.format(BULK)))


KERNELS = """
import json, torch
from dataclasses import replace
from treespec_kernels.aot import compiler as aot
from treespec_kernels.ops.shapes import AOT_FORMS
if __name__ == "__main__":
    plain = aot.default_shapes([torch.bfloat16])[2]
    shapes = [plain, *(replace(plain, quantized=form) for form in AOT_FORMS)]
    print(json.dumps(aot.compile_report({targets}, shapes, ["programmatic_launch"])))
"""
OF_A_PASS = set(
    """norm_rows multiply_rows add_splits multiply_quantized rotate_and_write attend_items attend_masked_items
    combine_segments project_to_vocab""".split()
)


def test_every_kernel_of_a_pass() -> None:
    """Of 8B in bfloat16 and quantised; what other shapes and dtypes add, the tests of all ops compile for sm_90."""
    pytest.importorskip("triton")
    report = uninterpreted_document(KERNELS.format(targets=["sm_80", "sm_90", "sm_100", "gfx942"]))
    assert report["failed"] == []
    assert {target for target, rows in report["targets"].items() if rows} == {"sm_90", "sm_100"}
    for target in ("sm_90", "sm_100"):
        rows = report["targets"][target]
        assert {row["kernel"] for row in rows} == OF_A_PASS
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
import json
import triton, triton.language as tl
from treespec_kernels.aot import compiler as aot
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
    x = {"x": Pointer("int32", 0), "out": Pointer("int32", 0)}
    return [Launch(__name__, name, x | ({"num_blocks": 7} if "loop" in name or name == "waits" else {}) | {"PDL": True},
                   {"num_warps": 1, "launch_pdl": True})
            for name in ("reads_first", "leaves_first", "waits_in_a_loop", "forgets", "waits")]
aot.launches_of = planted
print(json.dumps(aot.compile_report(["sm_90"], aot.default_shapes()[:1], ["programmatic_launch"], jobs=1)))
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
    assert "ld.global" in faults["reads_first"] and "ret" in faults["leaves_first"]
    assert "ret" in faults["waits_in_a_loop"] and "ld.global" in faults["forgets"]
