"""`treespec autotune`: what it measures where, what it prints, what it stores, and what it refuses."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import commands
from tests.helpers.child import faster_interpreter
from tests.helpers.commands import program
from tests.helpers.libraries import share_libraries
from tests.helpers.models import tiny
from tests.startup.test_costs import KEY
from treespec import LLM
from treespec.cli import autotune
from treespec.planning.round_costs import CostCurve
from treespec.startup import cost_measurement as costs
from treespec.startup.cost_measurement import warn_of_threads
from treespec_kernels.aot import compiler as aot
from treespec_kernels.aot.compile_jobs import run_in_processes
from treespec_kernels.linear.quantized import WeightForm
from treespec_kernels.ops import OPS
from treespec_kernels.ops.shapes import DTYPES
from treespec_kernels.tuning import tuned

pytestmark = pytest.mark.slow

run = partial(commands.run, "autotune")
THREADS = torch.get_num_threads()
A_GPU: dict[str, Any] = {"condition": torch.cuda.is_available(), "reason": "there is a GPU here"}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share_libraries(tmp_path / "treespec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def models() -> list[str]:
    target, drafts = tiny()
    return ["--model", str(target), *(part for draft in drafts[:2] for part in ("--draft", str(draft)))]


def document(*arguments: object, code: int = 0) -> dict[str, Any]:
    return run(*arguments, "--json", code=code).document


def refusal(*arguments: object) -> str:
    result = run(*arguments, code=2)
    assert result.stdout == "" and result.stderr.startswith("error: ")
    error = document(*arguments, code=2)["error"]
    assert f"error: {error['message']}\n" == result.stderr
    return error["message"]


# --- cost curves


def test_a_curve_is_stored_shown_and_used(tmp_path: Path) -> None:
    assert "no curves are stored" in run("--show").stdout
    measured = document(*models(), "--seconds", 0.3, "--threads", THREADS)
    [curve] = measured["curves"]
    assert Path(measured["file"]) == tmp_path / "treespec" / "costs.json"
    assert curve["rows"][0] == 1 and len(curve["rows"]) == len(curve["verify_seconds"]) and curve["draft_seconds"] > 0
    assert curve["draft_start_seconds"] >= 0
    assert curve["names"] == ["target", "ssm-1", "ssm-2"]
    assert measured["threads"].keys() == {"best", "round_ms"} and measured["threads"]["best"] == THREADS
    assert measured["threads"]["round_ms"].keys() == {str(THREADS)}
    shown = run("--show").stdout
    again = document("--show")
    assert again["curves"] == [curve] and again["tuned"] == []
    lines = shown.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("rows "))
    table = [line.split() for line in lines[head + 1 : head + 1 + len(curve["rows"])]]
    assert [int(row[0]) for row in table] == curve["rows"] and table[0][2] == "1.00"
    assert "ssm-2" in shown and measured["file"] in shown and "best" not in shown
    target, drafts = tiny()
    used = LLM(target, list(drafts[:2])).stats()["cost_curve"]
    rising = np.minimum.accumulate(curve["verify_seconds"][::-1])[::-1].tolist()
    assert used["rows"] == curve["rows"] and used["verify_seconds"] == rising
    assert used["draft_start_seconds"] == curve["draft_start_seconds"]


# --- numbers of threads


def run_children(child: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a function stand for the processes that measure, of a machine with two cores."""
    for owner, name, stand_in in ((autotune, "thread_counts", lambda: [1, 2]), (subprocess, "run", child)):
        monkeypatch.setattr(owner, name, stand_in)


def test_each_number_of_threads_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = subprocess.run

    def child(command: list[str], **options: Any) -> Any:
        seen.append((command[command.index("--threads") + 1], options["env"]["OMP_NUM_THREADS"]))
        if seen[-1][0] == "1":
            return real(command, **options)
        key = json.loads(costs.costs_file().read_text())[0]["key"] | {"threads": 2}
        costs.save(CostCurve((1, 16), (9.0, 9.0), 0.0), key)
        stored = json.dumps({"curves": [costs.load_all()[-1]]})
        return subprocess.CompletedProcess(command, 0, stored, "")

    run_children(child, monkeypatch)
    measured = document(*models(), "--seconds", 0.1)
    assert seen == [("1", "1"), ("2", "2")]
    assert [curve["key"]["threads"] for curve in measured["curves"]] == [1, 2]
    assert measured["threads"]["best"] == 1 and measured["threads"]["round_ms"]["2"] == 9000.0
    shown = run("--show").stdout
    assert ", 2 threads: 9000.00 ms, best: 1 (a round of 16 rows and 3 levels of drafting)" in shown


def test_what_children_are_given_and_how_they_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ended = [(0, '{"curves": [{}]}'), (2, '{"error": {"type": "ConfigError", "message": "what is wrong"}}'), (1, "")]

    def child(command: list[str], **options: Any) -> Any:
        asked.append(command[command.index("--quantization") + 1])
        return subprocess.CompletedProcess(command, *ended.pop(0), "Traceback")

    run_children(child, monkeypatch)
    assert autotune.measure_in_children([1], 1.0, quantization="int8") == [{}]
    assert document("--quantization", "int4", code=2)["error"]["message"] == "what is wrong"
    with pytest.raises(RuntimeError, match="ended with 1"):
        autotune.measure_in_children([1], 1.0, quantization="int8")
    assert asked == ["int8", "int4", "int8"]


def test_only_other_numbers_of_threads_are_compared() -> None:
    for threads, seconds, dtype in ((1, 0.2, "float32"), (4, 0.1, "float32"), (2, 0.05, "bfloat16")):
        costs.save(CostCurve((1, 16), (seconds, seconds), 0.0), KEY | {"threads": threads, "dtype": dtype})
    milliseconds = {"1": pytest.approx(200), "4": pytest.approx(100)}
    assert autotune.compare_threads(KEY) == {"best": 4, "round_ms": milliseconds}
    assert autotune.compare_threads(KEY | {"device": "cuda"}) is None


def test_the_engine_says_that_other_threads_are_faster(caplog: pytest.LogCaptureFixture) -> None:
    target, _ = tiny()
    first = LLM(target, [])
    key = costs.cost_key(first.engine.runner, None, first.config.num_threads)
    for threads, seconds in ((THREADS, 0.2), (THREADS + 1, 0.1)):
        costs.save(CostCurve((1, 16), (seconds, seconds), 0.0), key | {"threads": threads})
    caplog.clear()
    LLM(target, [])
    said = [record.getMessage() for record in caplog.records if "OMP_NUM_THREADS" in record.getMessage()]
    assert len(said) == 1 and f"set OMP_NUM_THREADS={THREADS + 1}" in said[0] and "200 ms" in said[0]
    caplog.clear()
    warn_of_threads({1: 0.1, 2: 0.095}, 1)  # as good as equal
    warn_of_threads({2: 0.1, 4: 0.2}, 1)  # this number was not measured
    warn_of_threads({1: 0.1, 2: 0.2}, 1)
    assert not caplog.records


# --- ahead of time


def test_kernels_are_compiled_for_a_target_without_a_gpu() -> None:
    pytest.importorskip("triton")
    options = ["--aot", "sm_90", "--ops", "kv_commit", "--dtype", "float16", "--json"]
    child = program("kernels/autotune.py", *options, TRITON_INTERPRET=None, PYTHONPATH=".:kernels:weights")
    assert child.returncode == 0 and child.stderr.startswith("compiling kernels for sm_90"), child.stderr
    report = json.loads(child.stdout)
    assert report.keys() == {"targets", "failed"} and report["failed"] == []
    assert {row["kernel"] for row in report["targets"]["sm_90"]} == {"move_path"}
    assert {row["case"].split(",")[0] for row in report["targets"]["sm_90"]} == {"kv_commit float16"}


def test_a_process_that_dies_costs_its_task_alone() -> None:
    found: dict[int, int | None] = {}
    run_in_processes(eval, ["1", "2", "__import__('os')._exit(9)", "4", "5", "6"], 2, found.__setitem__)
    assert found == {0: 1, 1: 2, 2: None, 3: 4, 4: 5, 5: 6}


def test_what_fails_ahead_of_time_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    row = {"kernel": "k", "case": "an op; rows 1", "registers": 40, "spills": 8, "shared_bytes": 2048}
    failure = {"target": "sm_90", **row, "message": "spills 8"}

    def report(targets: list[str], shapes: list[Any], ops: Any, **_: Any) -> dict[str, Any]:
        asked.update(targets=targets, shapes=shapes, ops=ops)
        return {"targets": {target: [row] for target in targets}, "failed": [failure]}

    monkeypatch.setattr(aot, "compile_report", report)
    assert document("--aot", "sm_90", "--aot", "gfx942", *models(), code=1)["failed"] == [failure]
    assert asked["targets"] == ["sm_90", "gfx942"] and set(asked["ops"]) == set(OPS)
    assert [shape.dtype for shape in asked["shapes"]] == [torch.float32]  # drafts have the target's shape
    head, line, failed = run("--aot", "sm_90", code=1).stdout.splitlines()
    assert head.split() == ["kernel", "target", "compiled", "registers", "spills", "shared", "KB"]
    assert line.split() == ["k", "sm_90", "1", "40", "8", "2.0"]
    assert failed == "failed: k for sm_90, an op; rows 1: spills 8"
    assert {shape.dtype for shape in asked["shapes"]} == set(DTYPES)
    for kind, form in (("int8", WeightForm(8)), ("int4", WeightForm(4, 64))):
        run("--aot", "sm_90", *models(), "--quantization", kind, "--dtype", "bfloat16", code=1)
        target, draft = asked["shapes"]
        assert (target.quantized, draft.quantized) == (form, None) and draft.dtype == torch.bfloat16


# --- the sweep


# The command with --json, and again without.
TWICE = """
import sys
from treespec.cli import app

for options in (["--json"], []):
    try:
        app([*sys.argv[1:], *options])
    except SystemExit as end:
        assert not end.code
    print("---")
"""


def test_a_rehearsal_of_the_sweep(tmp_path: Path) -> None:
    """On a CPU, in Triton's interpreter: everything but the times is as on a GPU."""
    pytest.importorskip("triton")

    given = ["autotune", *models()[:2], *"--nodes 2 --context 3 --ops tree_attention".split()]
    child = program("-c", TWICE, *given, TRITON_INTERPRET="1", **faster_interpreter())
    assert child.returncode == 0, child.stderr
    written, printed, _ = child.stdout.split("---\n")
    found = json.loads(written)["kernels"]
    assert found["rehearsal"] and found["copy_bytes_per_second"] > 0
    file = tmp_path / "treespec" / "tuned" / "triton-interpreter.json"
    assert Path(found["file"]) == file
    result = found["results"][0]
    assert result.keys() == {"label", "default", "entry", "measured", "left", "failed"}
    assert result["label"] == "tree_attention float32, group 2, head_dim 16"
    assert result["measured"] > 0 and result["failed"] == []
    loads = result["entry"]["loads"]
    assert loads.keys() >= {"requests 1, nodes 2, context 3"}
    assert all(load["share_of_copy"] > 0 and load["default_microseconds"] > 0 for load in loads.values())
    [entry] = tuned.read_entries(file, "Triton interpreter")
    assert asdict(entry) == result["entry"]  # a second command without new measurements does not change it
    assert entry.versions["source"] == tuned.source_hash("tree_attention")
    for load in loads.values():
        assert f"{load['microseconds']:.2f}" in printed
    assert "rehearsal" in printed
    shown = document("--show")["tuned"]
    assert [(each["file"], each["entries"][0]["stale"]) for each in shown] == [(str(file), [])]
    assert "tree_attention float32, group 2, head_dim 16" in run("--show").stdout


def test_what_is_tuned_is_shown() -> None:
    """An entry of other kernels as stale, and of programmatic launches whether they are on."""
    layer = {"dtype": "bfloat16", "groups": 1, "out_features": 64, "in_features": 96, "bits": 4, "group": 32, "zero": 0}
    versions, pdl = (tuned.versions_of("NVIDIA H200", op) for op in ("quantized_row_linear", "programmatic_launch"))
    entries = [
        *(tuned.TunedEntry(op, layer, {}, 1.0, 2.0, {}, versions, "") for op in ("row_linear", "quantized_row_linear")),
        *(
            tuned.TunedEntry("programmatic_launch", {"hidden_size": size}, {"pdl": size > 1}, 1.0, 2.0, {}, pdl, "")
            for size in (1, 2)
        ),
    ]
    tuned.save_entries(tuned.user_folder() / "nvidia-h200.json", "NVIDIA H200", entries)
    [shown] = document("--show")["tuned"]
    assert [each["op"] for each in shown["entries"] if each["stale"]] == ["row_linear"]
    text = run("--show").stdout
    label = "quantized_row_linear bfloat16, bits 4, group 32, groups 1, in_features 96, out_features 64, zero 0"
    for said in (label, "programmatic_launch hidden_size 1", "programmatic_launch hidden_size 2"):
        assert f"  {said}: 1.00 us, default 2.00 us" in text
    assert text.count(", off\n") == text.count(", on\n") == 1


# --- errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--aot", "sm_91"], ["'sm_91' (did you mean 'sm_90'?)", "valid: gfx942, sm_100, sm_120, sm_80, "]),
        (["--aot", "sm_90", "--ops", "tree_atention"], ["did you mean 'tree_attention'?", "kv_commit"]),
        (["--aot", "sm_90", "--dtype", "float6"], ["'float6' (did you mean 'float16'?)", "bfloat16"]),
        (["--nodes", "8"], ["--nodes is for GPU kernels", "--aot compiles without one"]),
        (["--nodes", "257"], ["nodes=257", "an int from 1 to 256"]),
        (["--context", "0"], ["context=0", "an int from 1"]),
        (["--device", "tpu"], ["device='tpu'", '"cpu", "cuda"']),
        (["--dtype", "bf16"], ["--dtype: unknown 'bf16'", "bfloat16"]),
        (["--quantization", "int3"], ["--quantization: unknown 'int3'", "int4, int8"]),
        (["--model", "/nowhere", "--threads", "1"], ["/nowhere"]),
        pytest.param(["--device", "cuda"], ["torch sees no GPU here"], marks=pytest.mark.skipif(**A_GPU)),
    ],
)
def test_what_cannot_be_done_is_refused(arguments: list[str], said: list[str]) -> None:
    message = refusal(*arguments)
    assert all(part in message for part in said), message
