"""Products in shared memory follow a proxy fence on every path: proved of compiled code."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.helpers.child import uninterpreted_document
from treespec_kernels.aot.code_order import OrderError, proxy_fences

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


@pytest.mark.parametrize(("before", "after", "last"), [("", FENCE, ""), (FENCE, "", ""), (STORE + FENCE, "", STORE)])
def test_products_behind_a_fence(before: str, after: str, last: str) -> None:
    assert proxy_fences(PTX.format(before=before, after=after, last=last)) == (1, 1)


@pytest.mark.parametrize(
    ("before", "after", "last"),
    [
        ("", "", ""),
        ("", "", FENCE),  # of the next iteration's operands, which are not complete yet
        (FENCE, STORE, ""),
        ("", SKIPPED, ""),
        ("", FENCE.replace("\tfence", "\t@%p2 fence"), ""),
    ],
)
def test_products_without_a_fence(before: str, after: str, last: str) -> None:
    with pytest.raises(OrderError, match=r"m64n128k16.* reads shared memory that no fence\.proxy\.async orders"):
        proxy_fences(PTX.format(before=before, after=after, last=last))


def test_the_kernels_fence_where_the_compiler_does_not() -> None:
    triton = pytest.importorskip("triton")
    from treespec_kernels.linear.dot import lacks_proxy_fence

    def lacks(arch: str | None, version: str) -> bool:
        semantic = SimpleNamespace(builder=SimpleNamespace(options=SimpleNamespace(arch=arch)))
        with mock.patch.object(triton, "__version__", version):
            return bool(lacks_proxy_fence(_semantic=semantic).value)

    assert lacks("sm90", "3.6.0") and lacks("sm90", "3.7.1") and not lacks("sm90", "3.10.0")
    assert not lacks("sm80", "3.6.0") and not lacks("sm100", "3.6.0") and not lacks(None, "3.6.0")
    assert not lacks_proxy_fence().value  # the interpreter passes nothing


FENCED = """
import json, os, torch
import triton
from treespec_kernels.aot import compiler as aot
from treespec_kernels.ops.shapes import default_shapes, family_shapes
if __name__ == "__main__":
    if triton.__version__ != "{version}":
        triton.__version__, os.environ["TRITON_CACHE_DIR"] = "{version}", "{folder}"  # no part of the cache's key
    shape = default_shapes([torch.bfloat16])[2]
    ops = ["row_linear", "lm_head", "tree_attention"]
    print(json.dumps(aot.compile_report(["sm_90"], [shape], ops, jobs=1)))
"""


@pytest.mark.slow
def test_the_kernels_own_fence(tmp_path: Path) -> None:
    """With the fence that Triton 3.6 lacks, every kernel of products compiles, and has one fence more than without."""
    pytest.importorskip("triton")
    rows = {}
    for version in ("3.6.0", "3.9.0"):
        report = uninterpreted_document(FENCED.format(version=version, folder=tmp_path / version))
        assert report["failed"] == []
        rows[version] = [row for row in report["targets"]["sm_90"] if row["products"]]
    assert {row["kernel"] for row in rows["3.6.0"]} >= {"multiply_rows", "project_to_vocab", "attend_items"}
    for fenced, plain in zip(rows["3.6.0"], rows["3.9.0"], strict=True):
        assert fenced["products"] == plain["products"] and fenced["fences"] > plain["fences"] > 0
