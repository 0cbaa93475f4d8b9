"""Processes of `perf/gpu_suite.py`: tests, tasks, engines, and the machine that they run on."""

import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import time
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_suite import Lost, measurement, module, state_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def perf_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "perf"))


@pytest.fixture
def setting(tmp_path: Path) -> Any:
    return module("setting").Setting(tmp_path, dry=True)


@pytest.fixture
def cases_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes files of cases with these sources those of the stage `ops`."""

    def make(**sources: str) -> dict[str, dict[str, str]]:
        files = {}
        for name, source in sources.items():
            (tmp_path / f"{name}_cases.py").write_text(source)
            files[str(tmp_path / f"{name}_cases.py")] = {"CHOSEN": "triton"}
        monkeypatch.setattr(module("ops"), "case_files", lambda setting: files)
        return files

    return make


def test_what_pytest_says_of_failures_is_kept(setting: Any, cases_of: Any) -> None:
    ops, stage = module("ops"), module("stage")
    wrong = "def test_a():\n    print('x' * 30000)\n    assert 1 == 3"
    good = "import os\ndef test_well(): assert os.environ['CHOSEN'] == 'triton'"
    cases_of(wrong=wrong, good=good, breaks="import nothing_of_that_name", none="")
    given = stage.Stage("ops", "a", "", ops.measurements, ops.describe)
    assert stage.run(given, setting, 400.0)
    found = stage.load(setting.out, "ops")["measurements"]
    assert [found[name]["failed"] for name in ("wrong", "good", "breaks")] == [1, 0, 1]
    assert "no test was collected" in found["none"]["error"] and "1 == 3" in found["wrong"]["first_failure"]
    assert found["wrong"]["failures"] == ["test_a"]
    text = (setting.out / ops.FAILED).read_text()
    assert text.count("\n=== ") == 2 and "test_well" not in text
    assert "wrong_cases.py::test_a" in text and "No module named 'nothing_of_that_name'" in text
    assert len(text) < 2 * (ops.OUTPUT + 200), "of a long output the end"
    assert "collected 0 items" in (setting.out / "errors.log").read_text(), "all that pytest said"


def test_cases_that_take_too_long_are_counted_up_to_then(
    setting: Any, cases_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, stage = module("ops"), module("stage")
    monkeypatch.setattr(ops, "SECONDS", 5.0)
    source = "import time\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_hangs(): time.sleep(3600)"
    cases_of(slow=source)
    given = stage.Stage("ops", "a", "", ops.measurements, ops.describe)
    stage.run(given, setting, 400.0)
    found = stage.load(setting.out, "ops")["measurements"]
    assert "it took more than 5 s, in " in found["slow"]["error"]
    output = "tests/x_cases.py::test_a[1-[2, 3]] PASSED [ 3%]\ntests/x_cases.py::test_b FAILED [ 6%]\n"
    found = ops.unfinished(output + "tests/x_cases.py::test_c[0] ")
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 0)
    assert found["failures"] == ["test_b"] and found["error"].endswith("in test_c[0]")


def test_what_was_run_before_is_not_run_again(setting: Any, cases_of: Any, tmp_path: Path) -> None:
    ops, stage = module("ops"), module("stage")
    note = f"def test_a(): open({str(tmp_path / 'ran')!r}, 'a').write('x')"
    cases_of(first=note, second=note)
    context = stage.Context(setting, {"first": {"failed": 0}})
    assert ops.measurements(setting)[1].run(context)["passed"] == 1
    context.release()
    assert (tmp_path / "ran").read_text() == "x"


def test_every_kernel_has_cases_on_a_gpu(tmp_path: Path) -> None:
    files = module("ops").case_files(module("setting").Setting(tmp_path))
    names = {Path(file).stem.removesuffix("_cases") for file in files}
    assert names >= {"row_linear", "lm_head", "tree_attention", "combine_segments", "qkv_rope", "tree_round"}
    assert files["tests/interpreted/kv_commit_cases.py"] == {"TRITON_INTERPRET": "0", "TREESPEC_KV_COMMIT": "triton"}
    assert all((ROOT / file).is_file() for file in files)


def test_tests_end_with_their_stage(
    setting: Any, cases_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, stage = module("ops"), module("stage")
    monkeypatch.setattr(ops, "SECONDS", 60.0)  # after which it would have ended anyway, and otherwise
    begun = tmp_path / "begun"
    source = f"""
import os, time
def test_hangs():
    open({str(begun)!r} + ".part", "w").write(str(os.getpid()))
    os.rename({str(begun)!r} + ".part", {str(begun)!r})
    time.sleep(3600)"""
    [hangs, queued] = cases_of(hangs=source, queued=source)
    context = stage.Context(setting, {})
    runs = context.keep("children", lambda: ops.Children(setting, [hangs, queued]))
    while not begun.exists():
        time.sleep(0.01)
    context.release()
    with pytest.raises(RuntimeError, match="pytest ended with -9") as failure:
        runs.result(hangs)
    assert "hangs_cases.py::test_hangs" in module("failures").trace(failure.value), "which one it was in"
    assert state_of(int(begun.read_text())) in (None, "Z")
    with pytest.raises(futures.CancelledError):
        runs.result(queued)


def test_tasks_apart_answer_fail_die_and_take_too_long() -> None:
    workers = module("workers")
    tasks = {
        "answers": partial(divmod, 7, 2),
        "fails": partial(divmod, 7, 0),
        "breaks": partial(signal.raise_signal, signal.SIGSEGV),
        "dies": partial(os._exit, 3),
        "hangs": partial(time.sleep, 3600),
    }
    running = workers.WorkerPool(tasks, 30.0)
    assert running.result("answers") == (3, 1)
    with pytest.raises(RuntimeError, match="ZeroDivisionError") as failure:
        running.result("fails")
    assert "Traceback (most recent call last)" in module("failures").trace(failure.value).partition("RuntimeError")[2]
    with pytest.raises(RuntimeError, match=f"its process ended with {-signal.SIGSEGV}") as failure:
        running.result("breaks")
    assert "Fatal Python error: Segmentation fault" in module("failures").trace(failure.value)
    with pytest.raises(RuntimeError, match="its process ended with 3"):
        running.result("dies")
    running.close()
    with pytest.raises(RuntimeError, match=r"its process ended with -9|it did not begin"):
        running.result("hangs")
    [late] = workers.WorkerPool({"hangs": partial(time.sleep, 3600)}, 0.01).wait().values()
    assert str(late) == "it took more than 0 s"


def test_what_hangs_apart_leaves_where_it_stood(tmp_path: Path) -> None:
    spawning, stacks = multiprocessing.get_context("spawn"), tmp_path / "stacks"
    _, sender = spawning.Pipe(duplex=False)
    given = (partial(time.sleep, 3600), sender, str(stacks), 0.0)
    process = spawning.Process(target=module("workers").run_task, args=given, daemon=True)
    process.start()
    until = time.monotonic() + 60
    while not (stacks.exists() and "in run_task\n" in stacks.read_text()) and time.monotonic() < until:
        time.sleep(0.01)
    process.kill()
    assert "Timeout" in stacks.read_text() and "in run_task\n" in stacks.read_text()


def test_what_does_not_compile_apart_is_in_the_log(tmp_path: Path) -> None:
    tasks = {"a": partial(divmod, 7, 0), "b": partial(divmod, 7, 2)}
    found = module("workers").compile_in_workers(tasks, 60.0, tmp_path)
    assert found["tasks"] == 2 and [each.partition(":")[0] for each in found["failures"]] == ["ZeroDivisionError"]
    log = (tmp_path / "errors.log").read_text()
    assert "=== compiling a, " in log and ", in run_task\n" in log and "compiling b" not in log


# --- engines and their machine


class Engine:
    """An `LLM` whose rounds were not captured, as it says while it is made."""

    def __init__(self, *given: Any, **options: Any):
        try:
            raise Lost("operation not permitted when stream is capturing")
        except Lost as error:
            logging.getLogger("treespec").warning("captured rounds do not run here", exc_info=error)

    def stats(self) -> dict[str, Any]:
        return {"frozen": {"rounds": "step by step"}}


def test_an_engine_without_captured_rounds_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines_of, stage, setting = module("engines"), module("stage"), module("setting").Setting(tmp_path)
    monkeypatch.setattr(engines_of, "LLM", Engine)
    monkeypatch.setattr(stage, "free_memory", lambda setting: None)
    monkeypatch.setattr(module("rounds"), "grown_folder", lambda *given: tmp_path)
    monkeypatch.setattr(module("grown"), "grown_folder", lambda *given: tmp_path)
    context = stage.Context(setting, {})
    captured = [f"{how}/bfloat16/batch1" for how in ("greedy", "sampled")]
    own = {each.name: each for each in module("bits").own_measurements(setting)}
    engines = [*(own[name] for name in captured), *module("rounds").measurements(setting)]
    engines += module("grown").measurements("8B", setting)
    assert len(engines) == 2 + 8 + 4
    for each in engines:
        with pytest.raises(RuntimeError, match="rounds go step by step: captured rounds do not run here") as failure:
            each.run(context)
        assert "Lost: operation not permitted when stream is capturing (test_gpu_suite" in str(failure.value)
        assert "Traceback" in module("failures").trace(failure.value).partition("RuntimeError: rounds go")[2]
    assert isinstance(engines_of.open_engine(setting, captured=False), Engine), "where requests go step by step anyway"
    assert isinstance(engines_of.open_engine(module("setting").Setting(tmp_path, dry=True)), Engine)
    with pytest.raises(AttributeError, match="engine"):
        own["greedy, step by step/bfloat16/batch1"].run(context)
    assert not logging.getLogger("treespec").handlers


def test_what_a_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host = module("host")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    shown = host.describe(host.facts())
    missing = [line.split()[1].rstrip(":") for line in shown.splitlines() if line.startswith("  MISSING")]
    assert set(missing) - {"triton"} == {"c_compiler", "python_h", "hypothesis", "compute_mode"}
    (tmp_path / "Python.h").touch()
    for name, text in {"gcc": "", "nvidia-smi": "echo 580.1, Exclusive_Process, 99 MiB, 100 MiB"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    found = host.facts()
    assert (found["c_compiler"], found["python_h"]) == (str(tmp_path / "gcc"), str(tmp_path / "Python.h"))
    assert (found["driver"], found["memory_free"]) == ("580.1", "99 MiB")
    assert "COMPUTE MODE Exclusive_Process" in host.describe(found)
    assert "COMPUTE MODE" not in host.describe(found | {"compute_mode": "Default"})


def test_the_host_is_looked_at_first(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    suite, said = importlib.import_module("gpu_suite"), []
    monkeypatch.setattr(suite, "sees_a_gpu", lambda: True)
    monkeypatch.setattr(suite, "device_slug", lambda: "a-gpu")
    monkeypatch.setattr(suite.host, "describe", lambda found: said.append("host"))
    monkeypatch.setattr(suite, "run_stages", lambda *given: said.append("stages"))
    monkeypatch.setattr(suite, "report", lambda *given: 0)
    for option in ([], ["--dry-run"], ["--report"]):
        monkeypatch.setattr(sys, "argv", ["gpu_suite.py", "--out", str(setting.out), *option])
        assert suite.main() == 0
    assert said == ["host", "stages", "stages"]
    monkeypatch.setattr(module("facts"), "device_facts", lambda device: {})
    given = module("setting").Setting(setting.out)
    facts = module("facts").facts
    assert facts(given, "")["host"]["python"] and facts(setting, "")["host"] is None


def test_what_runs_apart_on_a_gpu_can_be_sent_to_a_process(tmp_path: Path) -> None:
    bits, families, stage = module("bits"), module("families"), module("stage")
    setting = module("setting").Setting(tmp_path)
    own = list(bits.own_measurements(setting))
    assert {each.name.partition("/")[0] for each in own} >= {"attention", "row_linear", "decoder", "greedy"}
    for each in own:
        pickle.loads(pickle.dumps(partial(each.run, stage.Context(setting, {}))))
    first = next(families.measurements(setting))
    [tasks] = [cell.cell_contents for cell in first.run.__closure__ if isinstance(cell.cell_contents, dict)]
    assert len(tasks) == len(families.FAMILIES) + len(families.SWITCHES)
    pickle.loads(pickle.dumps(tasks))


def test_bits_run_apart_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bits, setting, stage = module("bits"), module("setting").Setting(tmp_path), module("stage")
    monkeypatch.setattr(bits, "own_measurements", lambda setting: iter([measurement("a", vars)]))
    [apart] = bits.measurements(setting)
    context = stage.Context(setting, {})
    monkeypatch.setattr(stage, "free_memory", lambda setting: None)
    assert apart.run(context) == {"setting": setting, "results": {}, "shared": {}}, "in a context of its own"
    context.release()
    assert not context.shared
