"""`perf/gpu_suite.py`: that it runs, what it writes, how it goes on. Nothing here depends on a time."""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.child import run_cases
from tests.gpu_suite import Lost, facts_of, measurement, module, stage_of, state_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def perf_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "perf"))


def suite(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "perf" / "gpu_suite.py"), *map(str, arguments)]
    paths = [str(ROOT / part) for part in ("", "kernels", "weights")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Every stage, once for all tests."""
    pytest.importorskip("triton")
    out = tmp_path_factory.mktemp("dry-run")
    return out, suite("--dry-run", "--out", out)


def documents(out: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((out / "results.json").read_text())
    return found


# Loops of the interpreter of Triton 3.6 fail with numpy 2.4 or later.
KNOWN = "TypeError: only 0-dimensional arrays can be converted to Python scalars"


def test_the_dry_run_walks_every_stage_without_an_error(
    dry_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    out, child = dry_run
    assert child.returncode == 0, child.stdout + child.stderr
    written = documents(out)
    assert set(written) == {stage.name for stage in module("stages").STAGES}
    errors = {
        f"{stage}: {name}": figures["error"]
        for stage, document in written.items()
        for name, figures in document["measurements"].items()
        if "error" in figures and KNOWN not in figures["error"]
    }
    assert not errors
    for document in written.values():
        assert document["complete"] and document["running"] is None and document["dry_run"]
        assert document.keys() >= {"device", "versions", "commit", "source", "date", "seed"}
        assert document["measurements"]
    assert "MISSED" not in child.stdout and child.stdout.count("\n") < 330
    assert written["bits"]["measurements"]["greedy, step by step/float32/batch2"]["differing_logit_rows"] == 0


def test_what_is_complete_is_not_measured_again(dry_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, _ = dry_run
    before = (out / "results.json").read_bytes()
    child = suite("--dry-run", "--out", out, "--stage", "p", "ops")
    assert child.returncode == 0 and child.stdout.count("already measured") == 4
    assert (out / "results.json").read_bytes() == before
    assert len([path for path in out.iterdir() if path.is_file()]) <= 5, "few, as a machine may return no more"


def test_on_an_engine_of_captured_rounds() -> None:
    pytest.importorskip("triton")
    run_cases("gpu_suite_cases.py", {"TRITON_INTERPRET": "1"})


# --- a stage


@pytest.fixture
def setting(tmp_path: Path) -> Any:
    return module("setting").Setting(tmp_path, dry=True)


def test_a_failure_is_written_down_and_the_rest_goes_on(setting: Any) -> None:
    def fail(context: Any) -> dict[str, Any]:
        raise Lost("first line\nsecond line")

    stage = module("stage")
    assert stage.run(stage_of(measurement("bad", fail), measurement("good")), setting, 60.0)
    document = stage.load(setting.out, "s")
    assert document["measurements"]["good"]["value"] == 1 and document["complete"]
    assert "Lost: first line (test_gpu_suite.py:" in document["measurements"]["bad"]["error"]
    log = (setting.out / "errors.log").read_text()
    assert log.count("\n===") == 1 and "=== s: bad, " in log and "second line" in log and ", in fail\n" in log


def test_a_slow_measurement_is_ended(setting: Any) -> None:
    def wait(context: Any) -> dict[str, Any]:
        while True:
            pass

    stage = module("stage")
    assert stage.run(stage_of(measurement("slow", wait, 0.05), measurement("next")), setting, 60.0)
    found = stage.load(setting.out, "s")["measurements"]
    assert "MeasurementTimeout" in found["slow"]["error"] and found["next"]["value"] == 1


@pytest.mark.parametrize("turned", [False, True])
def test_what_the_end_of_the_slice_cuts_off_is_measured_by_the_next(
    setting: Any, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = module("stage")
    monkeypatch.setattr(stage, "LEAST", 0.0)

    def wait(context: Any) -> dict[str, Any]:
        try:
            while len(slices) == 1:
                pass
        except stage.MeasurementTimeout:
            if turned:  # as a compiler may do that reports whatever stops it
                raise Lost("interrupted") from None
            raise
        return {"value": 1}

    slices = [0.2]
    given = stage_of(measurement("a"), measurement("cut", wait), measurement("b"))
    assert not stage.run(given, setting, slices[0])
    document = stage.load(setting.out, "s")
    assert document["measurements"].keys() == {"a"} and document["running"] is None and not document["complete"]
    assert "=== s: cut, cut off, " in (setting.out / "errors.log").read_text()
    slices.append(60.0)
    assert stage.run(given, setting, slices[1])
    found = stage.load(setting.out, "s")["measurements"]
    assert list(found) == ["a", "cut", "b"] and found["cut"]["value"] == 1


def test_a_slice_that_ends_before_a_measurement_does_bounds_it() -> None:
    bound = module("stage").Bound.of
    assert bound(60.0, 300.0) == (60.0, 30.0, False), "its own time, whole"
    last = module("stage").LAST
    assert bound(60.0, 45.0) == (45.0, last, True)
    assert bound(60.0, 60.0) == (60.0, last, False), "the process is gone before its parent would end it"
    assert importlib.import_module("gpu_suite").KILL_SECONDS > module("stage").LAST + 10


def test_it_goes_on_behind_what_the_process_before_ended_in(setting: Any) -> None:
    ran: list[str] = []

    def note(name: str, end: bool = False) -> Any:
        def run(context: Any) -> dict[str, Any]:
            ran.append(name)
            if end:
                raise KeyboardInterrupt
            return {"value": float("nan")}

        return measurement(name, run)

    stage = module("stage")
    given = (note("a"), note("b", end=True), note("c"))
    with pytest.raises(KeyboardInterrupt):
        stage.run(stage_of(*given), setting, 60.0)
    assert stage.run(stage_of(*given), setting, 60.0) and ran == ["a", "b", "c"]
    found = stage.load(setting.out, "s")["measurements"]
    assert found["a"]["value"] is None, "NaN is null"
    assert found["b"]["error"] == "the process ended in it" and "error" not in found["c"]


def test_what_never_returns_is_written_down_and_its_process_left(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, left = module("stage"), threading.Event()
    monkeypatch.setattr(stage, "GRACE", 0.05)
    monkeypatch.setattr(stage, "leave", lambda status: (found.append(status), left.set()))
    found: list[Any] = []

    def hang(context: Any) -> dict[str, Any]:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # as in a call that does not come back to Python
        left.wait()
        document = stage.load(setting.out, "s")
        found.append(document["measurements"]["hangs"]["error"])
        assert document["running"] is None
        return {}

    stage.run(stage_of(measurement("hangs", hang, 0.05)), setting, 60.0)
    assert found[0] == stage.RESTART and "did not return within" in found[1]
    log = (setting.out / "errors.log").read_text()
    assert "=== s: hangs, did not return, " in log and " in hang\n" in log, "where every thread stands"


def test_what_hangs_beyond_the_slice_is_left_but_is_no_error(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, left = module("stage"), threading.Event()
    monkeypatch.setattr(stage, "LAST", 0.05)
    monkeypatch.setattr(stage, "LEAST", 0.0)
    monkeypatch.setattr(stage, "leave", lambda status: (found.append(status), left.set()))
    found: list[Any] = []

    def hang(context: Any) -> dict[str, Any]:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        left.wait()
        found.append(stage.load(setting.out, "s"))
        return {}

    stage.run(stage_of(measurement("hangs", hang)), setting, 0.05)
    assert found[0] == 0, "another process would have no time"
    assert not found[1]["measurements"] and found[1]["running"] is None
    assert "=== s: hangs, did not return, " in (setting.out / "errors.log").read_text()


def test_a_process_that_dies_is_followed_by_another(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    suite, stage = importlib.import_module("gpu_suite"), module("stage")
    chosen, codes = stage_of(measurement("a"), measurement("kills"), measurement("c")), [-11, 0]
    path = setting.out, "s"

    def start(group: Any, out: Path, seconds: float, args: Any) -> int:
        if len(codes) == 2:
            stage.write(*path, facts_of(setting) | {"complete": False, "running": "kills", "measurements": {"a": {}}})
        else:
            stage.run(chosen, setting, seconds)
        return codes.pop(0)

    monkeypatch.setattr(suite, "start", start)
    suite.run_stages([chosen], setting.out, time.monotonic() + 900.0, argparse.Namespace(dry_run=False))
    document = stage.load(*path)
    assert not codes and document["complete"] and list(document["measurements"]) == ["a", "kills", "c"]
    assert document["measurements"]["kills"] == {"error": "the process ended in it"}


@pytest.mark.parametrize("cut", [False, True])
def test_a_process_that_outlasts_its_time_is_ended_with_its_children(
    setting: Any, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    suite, stage = importlib.import_module("gpu_suite"), module("stage")
    script, path = setting.out / "hangs.py", (setting.out, "s")
    script.write_text("""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], process_group=0)
open(__file__ + ".part", "w").write(str(child.pid))
os.rename(__file__ + ".part", __file__ + ".pid")
time.sleep(3600)
""")
    stage.write(*path, facts_of(setting) | {"complete": False, "running": "hangs", "cut": cut, "measurements": {}})
    monkeypatch.setattr(suite, "__file__", str(script))
    given: list[float] = []

    def wait(self: Any, timeout: float) -> int:
        given.append(timeout)
        while not Path(f"{script}.pid").exists():
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("", timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    code = suite.start([stage_of()], setting.out, 7.0, argparse.Namespace(seed=0, commit=None, dry_run=False))
    assert code == -signal.SIGKILL and given[0] == 7 + suite.KILL_SECONDS
    assert stage.load(*path)["running"] == (None if cut else "hangs"), "it had its own time, or not"
    pid = int(Path(f"{script}.pid").read_text())
    until = time.monotonic() + 30
    while (state := state_of(pid)) not in (None, "Z") and time.monotonic() < until:
        time.sleep(0.01)
    assert state in (None, "Z")


def test_only_what_failed_is_retried(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    suite, stage = importlib.import_module("gpu_suite"), module("stage")
    ran: list[str] = []
    given = stage_of(*(measurement(name, lambda context, name=name: ran.append(name) or {"v": 1}) for name in "abc"))
    found = {"a": {"v": 2}, "b": {"error": "lost"}, "c": {"v": 2}}
    path, facts = (setting.out, "s"), facts_of(setting)
    stage.write(*path, facts | {"date": "", "complete": True, "running": None, "measurements": found})
    monkeypatch.setattr(suite, "choose", lambda names: [given])
    monkeypatch.setattr(suite, "start", lambda group, out, seconds, args: int(not stage.run(given, setting, seconds)))
    monkeypatch.setattr(suite, "report", lambda stages, out: 0)
    for option, then in ((), []), (("--retry",), ["b"]), (("--again",), ["b", "a", "b", "c"]):
        monkeypatch.setattr(sys, "argv", ["gpu_suite.py", "--dry-run", "--out", str(setting.out), *option])
        assert suite.main() == 0 and ran == then
    assert stage.load(*path)["complete"]


def test_without_time_it_stops_and_says_so(setting: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stage = module("stage")
    assert not stage.run(stage_of(measurement("a")), setting, 1.0)
    assert "no time is left for a" in capsys.readouterr().out
    assert not stage.load(setting.out, "s")["complete"]


def test_other_sources_are_measured_anew(setting: Any) -> None:
    stage = module("stage")
    path = setting.out, "s"
    stage.run(stage_of(measurement("a")), setting, 60.0)
    stage.write(*path, stage.load(*path) | {"source": "another", "measurements": {"a": {"value": 2}}})
    stage.run(stage_of(measurement("a")), setting, 60.0)
    assert stage.load(*path)["measurements"]["a"]["value"] == 1


# --- what is counted


def test_pytest_reports_are_counted() -> None:
    report = """<testsuites><testsuite><testcase name="a"/><testcase name="b"><skipped/></testcase>
    <testcase name="c"><failure message="m">x = 1
E   ValueError: no</failure></testcase></testsuite></testsuites>"""
    found = module("ops").counts(report)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    assert found["first_failure"] == "c: ValueError: no" and found["failures"] == ["c"]
    with pytest.raises(RuntimeError, match="no test was collected"):
        module("ops").counts("<testsuites/>")


def test_intervals_are_joined() -> None:
    assert module("rounds").union_length([(5, 7), (0, 2), (1, 3), (6, 6.5)]) == 5
    assert module("rounds").union_length([]) == 0


def test_an_8b_pass_moves_its_weights_and_its_context() -> None:
    roofline, shape = module("roofline"), module("setting").LLAMA_8B
    assert shape.num_parameters() == pytest.approx(8.03e9, rel=1e-3)
    assert roofline.kv_bytes(shape, 2) == 131072
    assert roofline.pass_bytes(shape, 1, 2048, 2) == pytest.approx(15.0e9 + 0.27e9, rel=5e-3)
    assert roofline.pass_flop(shape, 1, 0) == pytest.approx(2 * 7.5e9, rel=5e-3)
    assert roofline.floor_us(4.3e12, 0, 4.3e12, None) == 1e6


def test_an_8b_pass_of_quantised_layers_moves_integers_and_scales() -> None:
    roofline, models, shape = module("roofline"), module("models"), module("setting").LLAMA_8B
    matrices = 32 * 4096 * (6144 + 4096 + 3 * 14336)
    outputs = 32 * (6144 + 4096 + 2 * 14336 + 4096)
    plain = roofline.pass_bytes(shape, 32, 2048, 2)
    for kind, scales, bits in (("int8", outputs, 8), ("int4", matrices // 128, 4)):
        form = models.form_of(shape, kind)
        moved = roofline.pass_bytes(shape, 32, 2048, 2, form=form)
        assert moved == plain - matrices * 2 + matrices * bits // 8 + scales * 2, kind
    assert models.form_of(shape, None) is None and roofline.pass_bytes(shape, 32, 2048, 2, form=None) == plain


def test_quantised_passes_stand_beside_plain_ones(dry_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, child = dry_run
    found = documents(out)["quantized"]["measurements"]
    for nodes in map(str, module("quantized").DRY.nodes):
        plain, *others = (found[name]["passes"][nodes] for name in ("plain", "int8", "int4"))
        assert plain["bytes"] > others[0]["bytes"] > others[1]["bytes"]
        for name in ("int8", "int4", "tuned int8", "tuned int4"):
            assert found[name][f"of_plain_{nodes}"] == found[name][f"us_{nodes}"] / plain["graph_us"]
    assert [found[kind]["differing_rows"] for kind in ("plain", "int8", "int4")] == [0, 0, 0]
    tuned = found["tuned int4"]["tuning"]["document"]["kernels"]["results"]
    assert {result["op"] for result in tuned} == {"quantized_row_linear"}
    assert {result["key"]["bits"] for result in tuned} == {4}
    assert module("stages").STAGES[-1].name == "quantized" and "\n  int4   1 nodes " in child.stdout


def test_tuning_quantised_layers_leaves_other_results_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "treespec" / "tuned" / "a.json"
    file.parent.mkdir(parents=True)
    hashes = []
    for entries in ([{"op": "lm_head"}], [{"op": "lm_head"}, {"op": "quantized_row_linear"}], [{"op": "row_linear"}]):
        file.write_text(json.dumps({"entries": entries}))
        hashes.append(module("setting").tuned_hash())
    assert hashes[0] == hashes[1] != hashes[2]
    file.write_text("{")
    assert module("setting").tuned_hash() not in hashes


def met() -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Figures that meet a target, by a part of its text."""
    attention = {"attention/8192/32/ours": {"us": 10.0}, "attention/8192/32/masked sdpa, gqa": {"us": 50.0}}
    attention["attention/8192/32/masked sdpa, keys repeated"] = {"us": 20.0}
    yield "8k: times masked SDPA", {"kernels": attention}
    yield "times FlexAttention", {"kernels": attention | {"attention/8192/32/flex attention": {"us": 11.0}}}
    plain, copied = {"graph_us": 4300.0, "share_of_copy": 0.8}, {"bytes_per_second": 4.3e12}
    passes = {"pass/context2048/nodes1": plain}
    yield "share of copy bandwidth", {"passes": passes}
    yield "32 nodes against 1", {"passes": passes | {"pass/context2048/nodes32": {"graph_us": 4700.0}}}
    slow = {"passes": passes | {"copy": copied, "pass/context2048/nodes1": {"graph_us": 9000.0}}}
    yield "ms at an H200's", slow | {"passes_tuned": passes | {"copy": copied}}
    slower = {"graph_us": 5700.0, "share_of_copy": 0.8}
    yield "ms at an H200's", {"passes": {"pass/context2048/nodes1": slower, "copy": {"bytes_per_second": 3.2e12}}}
    ours = {f"passes/batch{batch}/nodes1": {"graph_us": 5.0} for batch in (1, 4, 16, 64)}
    compiled = {f"compiled/batch{batch}/max-autotune": {"us": 5.5} for batch in (1, 4, 16)}
    late = {"compiled/batch64/max-autotune": {"error": "late"}, "compiled/batch64/reduce-overhead": {"us": 6.0}}
    yield "time over it, batch 1", {"baselines": ours | compiled}
    yield "least of batches", {"baselines": ours | compiled | late}
    yield "over cuBLAS products", {"prefill": {f"prompt/{n}/exact": {"over_products": 1.4} for n in (2048, 8192)}}
    batch = {
        "pass/context2048/nodes32/batch8": {"graph_us": 13.0},
        "fast/context2048/nodes32/batch8": {"graph_us": 10.0},
    }
    yield "8 trees of 32", {"passes_more": batch}
    yield "differing logit rows", {"bits": {"greedy, step by step/a": {"differing_logit_rows": 0}}}


@pytest.mark.parametrize("text, found", list(met()), ids=lambda value: value if isinstance(value, str) else "")
def test_targets(text: str, found: dict[str, dict[str, Any]]) -> None:
    lines = module("targets").table(found).splitlines()
    assert any(text in line and line.endswith("  met") for line in lines)
    assert not any("MISSED" in line for line in lines)
    assert not module("targets").wrong(found)


def test_what_is_slower_misses_its_target() -> None:
    found = {"passes": {"copy": {"bytes_per_second": 3.2e12}, "pass/context2048/nodes1": {"graph_us": 5900.0}}}
    [line] = [line for line in module("targets").table(found).splitlines() if "ms at an H200's" in line]
    assert line.split()[-2:] == ["4.39", "MISSED"]
    tuned = {"pass/context2048/nodes1": {"graph_us": 5000.0}, "copy": {"us": 1.0}}
    shown = module("passes").compare(found["passes"], tuned)
    assert shown.endswith(": pass/context2048/nodes1 5.900 to 5.000 ms (1.18 times)")
    assert module("passes").compare(found["passes"], {}) == ""


def test_a_part_proves_nothing_and_one_wrong_bit_is_wrong() -> None:
    targets = module("targets")
    half = {"bits": {"attention/a": {"differing_rows": 0}, "attention/b": {"error": "lost"}}}
    [line] = [line for line in targets.table(half).splitlines() if line.startswith("attention: rows")]
    assert line.endswith("not measured")
    wrong = {"bits": {"attention/a": {"differing_rows": 1}}}
    assert targets.wrong(wrong) and "MISSED" in targets.table(wrong)
    everything = [target for target in targets.TARGETS if target.value({}) is not None]
    assert not everything, "nothing was measured"


def test_a_table_that_fails_leaves_the_others(
    setting: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite, stage, targets = importlib.import_module("gpu_suite"), module("stage"), module("targets")
    facts = facts_of(setting) | {"date": "2026-01-01T00:00", "complete": True, "running": None}
    none = {
        "differing_row_counts": 0,
        "row_counts": 3,
        "relative_error": None,
        "tiles": [64, 128],
        "differing_tiles": 0,
    }
    for name, found in ("bits", {"row_linear/1": none}), ("passes", {"pass/1": {}}), ("rounds", {}):
        stage.write(setting.out, name, facts | {"measurements": found})
    spoilt = targets.TARGETS[0]._replace(text="spoilt", value=lambda documents: 1 + documents["bits"])
    monkeypatch.setattr(targets, "TARGETS", (spoilt, *targets.TARGETS[1:]))
    assert suite.report(module("stages").STAGES, setting.out) == 1, "what cannot be read is not right"
    shown = capsys.readouterr().out
    assert "0 of 3 row counts and 0 of tiles [64, 128] differ, error -\n" in shown
    assert "passes: NO TABLE, KeyError: 'share_of_copy' (passes.py:" in shown and f"{setting.out}/results.json" in shown
    assert "rounds of the grown 8B model" in shown
    lines = {line[:60].strip(): line for line in shown.splitlines()}
    assert "FAILED: TypeError" in lines["spoilt"]
    assert lines["row_linear: row counts with differing bits"].endswith("  met")


def test_stages_by_name_and_letter_in_the_order_named() -> None:
    stages = module("stages")
    assert [stage.name for stage in stages.choose(["p", "ops"])] == ["passes", "autotune", "passes_tuned", "ops"]
    assert [stage.name for stage in stages.choose(["families", "a", "s"])] == ["families", "bits", "ops", "smoke"]
    assert stages.choose([]) == list(stages.STAGES)
    with pytest.raises(ValueError, match=r"--stage nothing: valid: smoke \(s\), passes \(p\), autotune \(p\)"):
        stages.choose(["nothing"])
