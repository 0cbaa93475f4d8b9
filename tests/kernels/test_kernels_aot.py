"""Shipped kernel configurations compile for real targets, without a GPU, within bounds and without a spill."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.child import needs_triton, uninterpreted_document
from treespec_kernels.aot.launches import launches_of
from treespec_kernels.launch.triton_launch import SHARED_BYTES
from treespec_kernels.ops import OPS
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
    "route_rows": 48,
    "group_rows": 64,
    "combine_rows": 64,
    "update_states": 128,
    "convolve_rows": 64,
    "mix_rows": 80,
    "gate_rows": 80,
    "plan_round": 176,
    "exchange_inputs": 128,
    "keep_path": 48,
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
OF_A_PASS = {"norm_rows", "multiply_rows", "add_splits", "multiply_quantized", "rotate_and_write", "attend_items"}
OF_A_PASS |= {"combine_segments", "project_to_vocab", "route_rows", "group_rows", "combine_rows"}
WITH_WEIGHTS = {"multiply_rows", "multiply_quantized", "project_to_vocab", "norm_rows"}

# bf16 and others: the embedded target and Llama 8B; int8, int4 and awq: 8B; the rest: families.
COMPILED = """
import json, torch
from dataclasses import replace
from treespec_kernels.aot import compiler as aot
from treespec_kernels.ops.shapes import AOT_FORMS, KernelShape, default_shapes
gemma = {"norm": "rms_plus_one", "post_norms": True, "activation": "gelu_tanh"}
plain = {"norm": "layer", "gated": False}
unequal = gemma | {"norm": "rms", "qk_norm": True, "planes": (8, 256)}
families = {  # Gemma 2 9B, Gemma 3 1B, layers of Gemma 4 31B, GPT-NeoX 20B, Pythia 2.8B and OPT 6.7B
    "gemma2": ((256, 16, 8, 3584, 14336, 256000), gemma | {"capped": True}),
    "gemma3": ((256, 4, 1, 1152, 6912, 262144), gemma | {"qk_norm": True}),
    "gemma4": ((256, 32, 16, 5376, 21504, 262144), unequal),
    "gemma4 wide": ((512, 32, 4, 5376, 21504, 262144), unequal),
    "neox": ((96, 64, 64, 6144, 24576, 50432), plain | {"activation": "gelu"}),
    "pythia": ((80, 32, 32, 2560, 10240, 50304), plain | {"activation": "gelu_tanh"}),
    "opt": ((128, 32, 32, 4096, 16384, 50272), plain | {"activation": "relu", "rotary": False}),
}
if __name__ == "__main__":
    names = [f"{size} {dtype}" for dtype in ("bf16", "fp16", "fp32") for size in ("small", "1b", "8b")]
    shapes = dict(zip(names, default_shapes()))
    shapes |= {name: KernelShape(torch.bfloat16, *sizes, **kinds) for name, (sizes, kinds) in families.items()}
    for name in ("gemma2", "gemma4 wide"):
        shapes[f"{name} fp32"] = replace(shapes[name], dtype=torch.float32)
    shapes |= zip(("int8", "int4", "awq"), (replace(shapes["8b bf16"], quantized=form) for form in AOT_FORMS))
    launches_of, seen = aot.launches_of, set()
    def new_launches_of(*given):  # models share kernels
        small = [one for one in launches_of(*given) if one.constants.get("BLOCK_M", 0) <= ROWS]
        new = {(repr(one.binary), repr(one.first)): one for one in small}
        new = {key: one for key, one in new.items() if key not in seen}
        seen.update(new)
        return list(new.values())
    aot.launches_of = new_launches_of
    report = {"failed": [], "rows": []}
    for name, ops in PARTS:
        compiled = aot.compile_report([TARGET], [shapes[name]], ops.split(), jobs=1)
        report["failed"] += compiled["failed"]
        report["rows"] += compiled["targets"][TARGET]
    print(json.dumps(report))
"""


def rows_of(target: str, *parts: tuple[str, str], tile_rows: int = 256) -> list[dict[str, Any]]:
    """What compiles of some shapes' ops, in tiles of up to so many rows.

    Asserts that all does, without a spill, in the target's shared memory.
    """
    script = COMPILED.replace("TARGET", repr(target)).replace("PARTS", repr(parts)).replace("ROWS", str(tile_rows))
    report = uninterpreted_document(script)
    assert report["failed"] == []
    rows: list[dict[str, Any]] = report["rows"]
    for row in rows:
        assert row["spills"] == 0 and row["shared_bytes"] <= SHARED_BYTES[target], row
    return rows


def assert_registers(rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        assert 0 < row["registers"] <= REGISTER_BOUND[row["kernel"]], row


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_passes_as_they_are_launched(target: str) -> None:
    """Programmatically: each kernel waits first on every path, or has failed. For sm_90 of 8B, and quantised."""
    names, tile_rows = (("8b bf16", "int8"), 256) if target == "sm_90" else (("small bf16",), 64)
    rows = rows_of(target, *((name, "programmatic_launch") for name in names), tile_rows=tile_rows)
    absent = {"multiply_quantized", "add_splits"} if target == "sm_100" else set()  # of the small model
    assert {row["kernel"] for row in rows} == OF_A_PASS - absent
    for row in rows:
        chosen_on_device = "multiply" in row["kernel"] and "tiles" not in row["config"]  # after the wait
        assert row["prefetches"] == (row["kernel"] in WITH_WEIGHTS and not chosen_on_device), row
        assert row["config"]["PDL"] and row["config"]["launch_pdl"], row
    if target == "sm_100":
        return
    assert_registers(rows)
    products = [row for row in rows if row["kernel"] == "multiply_rows"]
    assert {row["config"]["BLOCK_M"] for row in products} == {64, 128, 256}
    # Two programs of 8 warps with 128 registers, or one of 16, fill the registers of a multiprocessor.
    assert all(row["registers"] <= 128 for row in products if row["config"]["BLOCK_M"] > 64)
    for row in (row for row in rows if row["kernel"] == "attend_items"):
        config = row["config"]
        tile = 2 * config["BLOCK_N"] * config["HEAD_DIM"] * 2  # bytes of keys and values
        assert row["shared_bytes"] > config["num_stages"] * tile, f"fewer tiles are fetched ahead: {row}"


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_launches_in_order(target: str) -> None:
    """All ops for sm_90; for sm_80, which has no other launches, those with products."""
    others = "row_linear lm_head rms_norm"
    if target == "sm_90":
        parts = [("small bf16", " ".join(op for op in OPS if "quantized" not in op and "programmatic" not in op))]
        parts += [("small fp32", others), ("8b fp16", "tree_attention")]
    else:
        parts = [("8b bf16", f"{others} tree_attention")]
        parts += [(form, "quantized_row_linear") for form in ("int8", "int4", "awq")]
    rows = rows_of(target, *parts, ("small fp32", "tree_attention"), ("8b fp32", "tree_attention"))
    assert_registers(rows)
    if target == "sm_90":
        assert {row["kernel"] for row in rows} == set(REGISTER_BOUND) - {"multiply_quantized"}
        return
    found = [row["config"] for row in rows if row["kernel"] == "multiply_quantized"]
    forms = {(c["BITS"], c["GROUP"] if c["BITS"] == 4 else None, "zero" not in c) for c in found}
    assert forms == {(8, None, False), (4, 128, False), (4, 128, True)}
    sizes = {(c["OUT_FEATURES"], c["IN_FEATURES"]) for c in found}
    assert sizes == {(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)}


def test_families() -> None:
    """Each switch once; heads of 256 and 512 in float32 too, whose tiles take most registers; K split into seven."""
    rows = rows_of(
        "sm_90",
        ("gemma2", "tree_attention lm_head rms_norm"),
        ("gemma2 fp32", "tree_attention"),
        ("gemma3", "qkv_rope row_linear"),
        ("gemma4", "tree_attention qkv_rope rms_norm"),
        ("gemma4 wide", "tree_attention qkv_rope kv_commit"),
        ("gemma4 wide fp32", "tree_attention"),
        ("pythia", "rms_norm row_linear"),
        ("opt", "qkv_rope"),
        tile_rows=64,
    )
    assert 7 in {row["config"].get("SPLIT_K") for row in rows}


def test_gpus_of_less_memory_and_other_vendors() -> None:
    """What takes most memory: the linear layers of 8B, and heads of 256 and 512."""
    wide = ("gemma4 wide", "tree_attention"), ("gemma4 wide fp32", "tree_attention")
    assert len(rows_of("sm_89", ("8b bf16", "row_linear"), ("gemma2", "tree_attention"), *wide)) > 6
    assert len(rows_of("gfx942", *wide)) > 2
    for target in ("gfx942", "sm_100"):
        assert "multiply_quantized" in {row["kernel"] for row in rows_of(target, ("awq", "quantized_row_linear"))}


FENCED = """
import json, os, torch
import triton
from treespec_kernels.aot import compiler as aot
from treespec_kernels.ops.shapes import default_shapes
if __name__ == "__main__":
    if triton.__version__ != "{version}":
        triton.__version__, os.environ["TRITON_CACHE_DIR"] = "{version}", "{folder}"  # no part of the cache's key
    shape, first = default_shapes([torch.bfloat16])[0], dict()
    for op in ("row_linear", "lm_head", "tree_attention"):
        for launch in aot.launches_of(op, shape, "sm_90"):
            first.setdefault(launch.kernel, launch)
    compiled = [(launch.kernel, aot.compile_launch("sm_90", launch)) for launch in first.values()]
    print(json.dumps([[kernel, found.products, found.fences] for kernel, found in compiled if found.products]))
"""


def test_the_kernels_own_fence(tmp_path: Path) -> None:
    """With the fence that Triton 3.6 lacks, kernels of products compile, and have one fence more than without."""
    versions = ("3.6.0", "3.9.0")
    fenced, plain = (uninterpreted_document(FENCED.format(version=v, folder=tmp_path / v)) for v in versions)
    assert {kernel for kernel, *_ in fenced} >= {"multiply_rows", "project_to_vocab", "attend_items"}
    for (_, products, fences), (_, same, fewer) in zip(fenced, plain, strict=True):
        assert products == same and fences > fewer > 0


# Kernels with a wrong shape, with a tile that does not fit the permitted registers, and that do not wait as they must.
PLANTED = """
import json, torch
import triton, triton.language as tl
from treespec_kernels.aot import compiler as aot
from treespec_kernels.ops.shapes import default_shapes
from treespec_kernels.aot.launches import Launch, Pointer
from treespec_kernels.launch.predecessors import wait_for_predecessors

@triton.jit
def wrong(x, out, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), tl.zeros((BLOCK * 2,), tl.float32))

@triton.jit
def greedy(x, out, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    found = tl.load(x + o[:, None] * BLOCK + o[None, :])
    tl.store(out + o[:, None] * BLOCK + o[None, :], tl.dot(found, found, input_precision="ieee"))

@triton.jit
def reads_first(x, out, PDL: tl.constexpr):
    found = tl.load(x)
    wait_for_predecessors(PDL)
    tl.store(out, found)

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
    x = {"x": Pointer(torch.float32, 0), "out": Pointer(torch.float32, 0)}
    options = {"num_warps": 1, "num_stages": 1}
    launches = [Launch(__name__, name, x | {"BLOCK": 16}, options | more, "a case")
                for name, more in (("wrong", {}), ("greedy", {"maxnreg": 24}))]
    return launches + [
        Launch(__name__, name, x | ({"num_blocks": 7} if "waits" in name else {}) | {"PDL": True},
               {"num_warps": 1, "launch_pdl": True})
        for name in ("reads_first", "waits_in_a_loop", "forgets", "waits")]
aot.launches_of = planted
print(json.dumps(aot.compile_report(["sm_90"], default_shapes()[:1], ["kv_commit"], jobs=1)))
"""


def test_what_does_not_compile_or_spills_or_does_not_wait_has_failed(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)  # Triton reads the source of a kernel from its file
    report = uninterpreted_document(f"import sys; sys.path.append({str(tmp_path)!r}); import planted")
    assert [row["kernel"] for row in report["targets"]["sm_90"]] == ["greedy", "waits"]
    assert len(report["failed"]) == 5
    failed = {row["kernel"]: row for row in report["failed"]}
    wrong, greedy = failed.pop("wrong"), failed.pop("greedy")
    assert (wrong["target"], wrong["case"]) == ("sm_90", "a case") and "CompilationError" in wrong["message"]
    assert wrong["config"] == {"BLOCK": 16, "num_warps": 1, "num_stages": 1}
    assert greedy["spills"] > 0 and greedy["message"] == f"spills {greedy['spills']}"
    said = {"reads_first": "LDG", "waits_in_a_loop": "EXIT", "forgets": "before the wait"}
    assert failed.keys() == said.keys()
    for name, words in said.items():
        assert failed[name]["message"].startswith("OrderError: ") and words in failed[name]["message"]


PRECOMPILED = """
import json, os, time, torch
from pathlib import Path
from treespec_kernels.ops.shapes import KernelShape, Setting
from treespec_kernels.sweep import precompile, problems_of
if __name__ == "__main__":
    os.environ["TRITON_CACHE_DIR"] = FOLDER
    setting = Setting(KernelShape(torch.bfloat16, 16, 4, 2, 64, 96, 100), compiled_for="sm_90")
    problems = problems_of([setting], ["row_linear", "programmatic_launch"])[-2:]
    configs = [problem[0].candidates()[:1] for problem in problems]
    found = []
    for deadline in (time.monotonic(), float("inf")):
        precompile(problems, configs, 2, deadline)
        found.append(sorted({path.stem for path in Path(FOLDER).rglob("*.cubin")}))
    print(json.dumps(found))
"""


def test_configurations_are_compiled_before_they_are_measured(tmp_path: Path) -> None:
    """In other processes that need no GPU, until a deadline."""
    none, compiled = uninterpreted_document(PRECOMPILED.replace("FOLDER", repr(str(tmp_path))))
    assert none == [] and {"multiply_rows", "norm_rows", "attend_items", "project_to_vocab"} <= {*compiled}


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="aot: TRITON_INTERPRET is set"):
        launches_of("row_linear", default_shapes()[0], "sm_90")
