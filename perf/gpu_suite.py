"""GPU measurement suite in resumable stages.

    PYTHONPATH=.:kernels:weights python perf/gpu_suite.py                       # missing results, by priority
    PYTHONPATH=.:kernels:weights python perf/gpu_suite.py --out DIR --budget-seconds 540
    PYTHONPATH=.:kernels:weights python perf/gpu_suite.py --stage passes m      # some stages, in this order
    PYTHONPATH=.:kernels:weights python perf/gpu_suite.py --dry-run             # everything, tiny, without a GPU
    PYTHONPATH=.:kernels:weights python perf/gpu_suite.py --report              # tables of existing results

Stages, in the order of a run (letters name several): smoke (s); passes, autotune and passes_tuned (p); autotune_grown,
rounds and grown8b (g); bits, ops and families (a); baselines, prefill, passes_more, kernels, captured, grown1b,
autotune_more and quantized (m). Each runs for under eight minutes at a time (smoke: under two). The run ends within the
budget, with the tables. The results folder gets at most five files, to be copied to perf/results/<device>: results.json
with the documents of all stages, written after every measurement; errors.log; ops-failed.txt; and the tuned file, which
a later run installs if the machine lacks it. A run with another folder continues from perf/results/<device>. Documents
of the same sources are resumed, where each stage has its own sources (gpu/sources.py); complete ones are skipped unless
--again is given, and --retry repeats failures. Failures and timeouts are recorded as errors, in full in errors.log;
measurements cut off by the budget are not recorded. Exits with 1 if a correctness target is missed.
"""

import argparse
import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu import BEGAN, documents, failures, host, passes, targets, tune
from gpu.documents import forget_cut, load
from gpu.facts import device_slug
from gpu.setting import ROOT, Setting, tuned_hash
from gpu.stage import LAST, RESTART, Stage, run
from gpu.stages import STAGES, choose

LEAST_SECONDS = 25.0  # minimum remaining budget to start a stage
KILL_SECONDS = 16.0  # seconds after its time at which a process is killed; more than `LAST`
CLOSING = KILL_SECONDS + 14.0  # seconds of the budget for killing a process that hangs, and for the tables
RESTARTS = 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--stage",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names or letters, in the order to run; default: all, by priority",
    )
    parser.add_argument("--out", type=Path, help="results folder; default: perf/results/<device>")
    parser.add_argument("--budget-seconds", type=float, default=36000.0, help="time limit")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, as a smoke test")
    parser.add_argument("--again", action="store_true", help="repeat complete stages")
    parser.add_argument("--retry", action="store_true", help="repeat failed measurements")
    parser.add_argument("--report", action="store_true", help="only print existing results")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="commit to record if the checkout has no .git")
    parser.add_argument("--child", type=float, metavar="UNTIL", help=argparse.SUPPRESS)  # by the monotonic clock
    args = parser.parse_args()
    try:
        stages = choose(args.stage)
    except ValueError as error:
        parser.error(str(error))
    if args.child is not None:
        return _child(stages, Setting(args.out, args.dry_run, args.seed, args.commit), args.child)
    if not args.dry_run and not args.report and not sees_a_gpu():
        parser.error("torch finds no GPU; --dry-run runs every stage without one")
    kept = None
    if not args.dry_run and (not args.report or sees_a_gpu()):
        kept = ROOT / "perf" / "results" / device_slug()
    out = args.out or kept or Path(tempfile.mkdtemp(prefix="treespec-gpu-dry-run-"))
    if args.report:
        return report(stages, out)
    out.mkdir(parents=True, exist_ok=True)
    if kept is not None:
        documents.adopt(kept, out)
        print(host.describe(host.facts()), flush=True)
        for name in tune.install(out):
            print(f"installed {name} of an earlier run", flush=True)
    for stage in stages:
        if args.again:
            documents.forget(out, stage.name)
        if args.retry:
            documents.forget_errors(out, stage.name)
    run_stages(stages, out.absolute(), BEGAN + args.budget_seconds - CLOSING, args)
    return report(stages, out)


def sees_a_gpu() -> bool:
    """Return whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def run_stages(stages: Sequence[Stage], out: Path, deadline: float, args: argparse.Namespace) -> None:
    """Run each stage in its own processes; a dry run uses one process for all."""
    left = [stage for stage in stages if not _is_done(out, stage)]
    for stage in stages:
        if stage not in left:
            print(f"{stage.name}: already measured with these sources; --again repeats it", flush=True)
    groups = [left] if args.dry_run and left else [[stage] for stage in left]
    for group in groups:
        for _ in range(RESTARTS):
            before = [_progress(out, stage) for stage in group]
            seconds = min(deadline - time.monotonic(), sum(stage.seconds for stage in group))
            if seconds < LEAST_SECONDS:
                print(f"{group[0].name}: no time is left for it", flush=True)
                return
            code = start(group, out, seconds, args)
            if code not in (0, RESTART):
                print(f"{group[0].name}: its process ended with {code}", flush=True)
            group = [stage for stage in group if not _is_done(out, stage)]
            stuck = code != RESTART and before == [_progress(out, stage) for stage in group]
            if not group or code == 0 or stuck:
                break


def start(group: Sequence[Stage], out: Path, seconds: float, args: argparse.Namespace) -> int:
    """Run stages in a process and return its exit status; kill it and its children after its time."""
    until = time.monotonic() + seconds  # includes the start of the process
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--child",
        str(until),
        "--out",
        str(out),
        "--seed",
        str(args.seed),
        "--stage",
        *(stage.name for stage in group),
    ]
    command += ["--commit", args.commit] if args.commit else []
    environment = dict(os.environ)
    if args.dry_run:
        command.append("--dry-run")
        # Do not use the user's cache folder.
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(out / "cache")}
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return child.wait(timeout=seconds + KILL_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        _end_session(child.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a hanging driver may block even killed processes
            child.wait(timeout=5)
        for stage in group:
            forget_cut(out, stage.name)
        return -signal.SIGKILL
    finally:
        _end_session(child.pid)


def _end_session(leader: int) -> None:
    """Kill all remaining processes of the session (tests, compilers), which would share the GPU with the next stage."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            session = int(stat.read_text().rpartition(")")[2].split()[3])
            if session == leader:
                os.kill(int(stat.parent.name), signal.SIGKILL)
        except (OSError, IndexError):
            continue  # already ended


def _child(stages: Sequence[Stage], setting: Setting, until: float) -> int:
    with failures.section(setting.out, f"process {os.getpid()}: {', '.join(stage.name for stage in stages)}") as log:
        faulthandler.enable(log)
        # faulthandler's thread dumps stacks even while a call holds the GIL.
        faulthandler.dump_traceback_later(max(until - time.monotonic(), 0.0) + LAST + 5.0, file=log)
        try:
            for stage in stages:
                if not _is_done(setting.out, stage):
                    run(stage, setting, until - time.monotonic())
        except Exception as error:
            log.write(failures.trace(error))
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()
    return 0


def _is_done(out: Path, stage: Stage) -> bool:
    document = load(out, stage.name)
    return document is not None and document["complete"] and document["source"] == stage.source()


def _progress(out: Path, stage: Stage) -> int:
    document = load(out, stage.name)
    return -1 if document is None else len(document["measurements"])


def report(stages: Sequence[Stage], out: Path) -> int:
    """Print the tables of stages and targets. Return 1 if a correctness target is missed, else 0.

    Args:
        stages: stages to print; the target table covers all stages.
        out: results folder.
    """
    found = {stage.name: document for stage in STAGES if (document := load(out, stage.name))}
    for stage in stages:
        if stage.name in found:
            try:
                print(_table(stage, found[stage.name]))
            except Exception as error:  # malformed figures raise arbitrary types; print the other tables
                where = out / documents.NAME
                print(f"\n{stage.name}: NO TABLE, {failures.last_line(error)}; its figures are in {where}")
    dry = any(document["dry_run"] for document in found.values())
    if found:
        first = next(iter(found.values()))
        device, versions = first["device"], first["versions"]
        print(
            f"\n{device['name']}, driver {device['driver']}, commit {first['commit']}, torch {versions['torch']}, "
            f"triton {versions['triton']}, results in {out}, failures in {failures.NAME} there"
        )
    measured = {name: document["measurements"] for name, document in found.items()}
    if compared := passes.compare(measured.get("passes", {}), measured.get("passes_tuned", {})):
        print(f"\n{compared}")
    print(f"\n{targets.table(measured, dry)}")
    return int(targets.wrong(measured))


def _table(stage: Stage, document: dict[str, Any]) -> str:
    notes = [document["date"][:16]]
    notes += [] if document["complete"] else ["NOT COMPLETE"]
    notes += [] if document["source"] == stage.source() else ["OF OTHER SOURCES"]
    notes += [] if document["tuned"] == tuned_hash() or document["dry_run"] else ["before tuning"]
    title = f"\n{stage.name}: {stage.title} ({', '.join(notes)})"
    return f"{title}\n{stage.describe(document) or '  nothing measured'}"


if __name__ == "__main__":
    sys.exit(main())
