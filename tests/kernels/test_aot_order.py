"""Order in compiled code, on every path: programmatic launches wait first, and a fence comes before products."""

import contextlib
import re
from types import SimpleNamespace

import pytest

from treespec_kernels.aot.code_order import OrderError, check_launch_order, proxy_fences
from treespec_kernels.launch.triton_launch import emits_proxy_fences

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


@pytest.mark.parametrize(
    ("first", "fault"),
    [
        ("LDG.E R2, desc[UR4][R2.64]", "LDG.E is reached"),
        ("LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64]", "LDGSTS"),
        ("STG.E desc[UR4][R2.64], R3", "STG.E"),
        ("UTMALDG.2D [UR8], [UR4]", "UTMALDG"),
        ("@P0 REDG.E.ADD desc[UR4][R2.64], R3", "@P0 REDG"),
        ("@P0 EXIT", "@P0 EXIT"),
        ("@P0 BRA 0x70", "LDG.E is reached"),
        ("BRA.U UP0, 0x80", "EXIT is reached"),
        ("CALL.REL.NOINC 0xa0", "LDG.E is reached"),
        ("BRX R2 -0x10", "BRX is reached"),
        ("CALL.REL.NOINC 0xff0", "CALL.REL.NOINC 0xff0 "),
        *((text, None) for text in ("STS [UR4], R0", "LDS R0, [UR7]", "CALL.REL.NOINC 0xc0", "@P0 BRA 0x40")),
        *((text, None) for text in ("LDCU UR4, c[0x0]", "UBLKPF.L2 [UR10], UR8")),
    ],
)
def test_what_comes_before_the_wait(first: str, fault: str | None) -> None:
    refused = contextlib.nullcontext() if fault is None else pytest.raises(OrderError, match=re.escape(fault))
    with refused:
        check_launch_order(SASS.format(f"        /*0010*/                   {first} ;\n{BULK}"))


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (SASS.format(BULK.replace("ACQ", "@P0 ACQ")), "PREEXIT is reached"),
        (SASS.format(""), "PREEXIT is reached"),
        (SASS.replace("PREEXIT", "NOP").format(BULK), "does not launch dependents"),
    ],
)
def test_code_that_does_not_wait_or_lets_nobody_begin(code: str, fault: str) -> None:
    with pytest.raises(OrderError, match=fault):
        check_launch_order(code)


# --- fences

PTX = """.visible .entry k(.param .u64 k_param_0)
{{
	.reg .pred 	%p<7>;
	cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
	cp.async.commit_group;
$L__BB0_1:
	cp.async.wait_group 	0;
{before}	bar.sync 	0;
{after}	wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {{%r3}}, %rd2, %rd3, %p5, 1, 1, 0, 1;
{last}	@%p1 bra 	$L__BB0_1;
	st.shared.b32 	[%r4], %r3;
	ret;
}}
"""
FENCE = "\t// begin inline asm\n\tfence.proxy.async.shared::cta; mov.u32 %r5, 0;\n\t// end inline asm\n"
STORE = "\tst.shared.v4.b32 \t[%r4], {%r6, %r6, %r6, %r6};\n"
SKIPPED = f"\t@%p2 bra \t$L__BB0_2;\n{FENCE}$L__BB0_2:\n"


@pytest.mark.parametrize(
    ("before", "after", "last", "fenced"),
    [
        ("", FENCE, "", True),
        (FENCE, "", "", True),
        (STORE + FENCE, "", STORE, True),
        ("", "", "", False),
        ("", "", FENCE, False),  # of the next iteration's operands, which are not complete yet
        (FENCE, STORE, "", False),
        ("", SKIPPED, "", False),
        ("", FENCE.replace("\tfence", "\t@%p2 fence"), "", False),
    ],
)
def test_a_fence_before_products(before: str, after: str, last: str, fenced: bool) -> None:
    ptx = PTX.format(before=before, after=after, last=last)
    if fenced:
        assert proxy_fences(ptx) == (1, 1)
        return
    with pytest.raises(OrderError, match=r"m64n128k16.* reads shared memory without a preceding fence\.proxy\.async"):
        proxy_fences(ptx)


def test_the_kernels_fence_where_the_compiler_does_not() -> None:
    triton = pytest.importorskip("triton")
    from treespec_kernels.linear.dot import lacks_proxy_fence

    for arch in ("sm80", "sm90", "sm100", None):
        semantic = SimpleNamespace(builder=SimpleNamespace(options=SimpleNamespace(arch=arch)))
        lacks = arch == "sm90" and not emits_proxy_fences(triton.__version__)
        assert lacks_proxy_fence(_semantic=semantic).value == lacks
    assert not lacks_proxy_fence().value  # the interpreter passes nothing
    assert [emits_proxy_fences(version) for version in ("3.6.0", "3.7.1", "3.10.0")] == [False, False, True]
