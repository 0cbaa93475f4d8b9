"""GPU measurement suite in resumable stages.

    PYTHONPATH=.:kernels:weights python perf/gpu_suite.py                       # missing results, by priority
    PYTHONPATH=.:kernels:weights python perf/gpu_suite.py --stage passes a --out DIR --budget-seconds 540
    PYTHONPATH=.:kernels:weights python perf/gpu_suite.py --dry-run             # everything, tiny, without a GPU
    PYTHONPATH=.:kernels:weights python perf/gpu_suite.py --report              # tables of existing results

Stages (letters name several): smoke (s), ops, bits and families (a), passes and rounds (b), autotune (c), kernels (d),
grown1b and grown8b (e), quantized (f). They run in the given order, each for under eight minutes (smoke: under two),
until the budget is used up: name the most important first. Each stage writes perf/results/<device>/<stage>.json after
every measurement. Documents of the same sources are resumed; complete ones are skipped unless --again is given, and
--retry repeats failures. Failures and timeouts are recorded as errors, in full in errors.log; measurements cut off by
the budget are not recorded. The target table is printed last, at most half a minute after the budget. Exits with 1 if a
correctness target is missed.
"""

import argparse
import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu import BEGAN, failures, host, targets
from gpu.documents import forget_cut, forget_errors, load, path_of
from gpu.setting import ROOT, Setting, device_slug, source_hash, tuned_hash
from gpu.stage import LAST, RESTART, Stage, run
from gpu.stages import STAGES, choose

LEAST_SECONDS = 25.0  # minimum remaining budget to start a stage
KILL_SECONDS = 25.0  # seconds after its time at which a process is killed; more than `LAST`
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
        kept = ROOT / "perf" / "results" / device_slug(dry=False)
    out = args.out or kept or Path(tempfile.mkdtemp(prefix="treespec-gpu-dry-run-"))
    out.mkdir(parents=True, exist_ok=True)
    if args.again:
        for stage in stages:
            path_of(out, stage.name).unlink(missing_ok=True)
    if args.retry:
        for stage in stages:
            _continue(out, kept or out, stage)
            forget_errors(path_of(out, stage.name))
    kept = out if kept is None or args.again or args.retry else kept
    if not args.report:
        if not args.dry_run:
            print(host.describe(host.facts()), flush=True)
        run_stages(stages, out.absolute(), kept, BEGAN + args.budget_seconds, args)
    return report(stages, out, kept)


def sees_a_gpu() -> bool:
    """Return whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def run_stages(stages: Sequence[Stage], out: Path, kept: Path, deadline: float, args: argparse.Namespace) -> None:
    """Run each stage in its own processes; a dry run uses one process for all."""
    left = [stage for stage in stages if not (_is_done(out, stage) or _is_done(kept, stage))]
    for stage in stages:
        if stage not in left:
            print(f"{stage.name}: already measured with these sources; --again repeats it", flush=True)
        else:
            _continue(out, kept, stage)
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


def _continue(out: Path, kept: Path, stage: Stage) -> None:
    """Copy results that exist only in `kept` to `out`, to resume them there."""
    if not path_of(out, stage.name).exists() and path_of(kept, stage.name).exists():
        shutil.copy(path_of(kept, stage.name), path_of(out, stage.name))


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
            forget_cut(path_of(out, stage.name))
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
    document = load(path_of(out, stage.name))
    return document is not None and document["complete"] and document["source"] == source_hash()


def _progress(out: Path, stage: Stage) -> int:
    document = load(path_of(out, stage.name))
    return -1 if document is None else len(document["measurements"])


def report(stages: Sequence[Stage], out: Path, kept: Path) -> int:
    """Print the tables of stages and targets. Return 1 if a correctness target is missed, else 0.

    Args:
        stages: stages to print; the target table covers all stages.
        out, kept: results folders; `out` takes precedence.
    """
    documents = {
        stage.name: document
        for stage in STAGES
        if (document := load(path_of(out, stage.name)) or load(path_of(kept, stage.name)))
    }
    for stage in stages:
        if stage.name in documents:
            try:
                print(_table(stage, documents[stage.name]))
            except Exception as error:  # malformed figures raise arbitrary types; print the other tables
                path = path_of(out if path_of(out, stage.name).exists() else kept, stage.name)
                print(f"\n{stage.name}: NO TABLE, {failures.last_line(error)}; its figures are in {path}")
    dry = any(document["dry_run"] for document in documents.values())
    if documents:
        first = next(iter(documents.values()))
        device, versions = first["device"], first["versions"]
        print(
            f"\n{device['name']}, driver {device['driver']}, commit {first['commit']}, torch {versions['torch']}, "
            f"triton {versions['triton']}, results in {out}, failures in {failures.NAME} there"
        )
    measured = {name: document["measurements"] for name, document in documents.items()}
    print(f"\n{targets.table(measured, dry)}")
    return int(targets.wrong(measured))


def _table(stage: Stage, document: dict[str, Any]) -> str:
    notes = [document["date"][:16]]
    notes += [] if document["complete"] else ["NOT COMPLETE"]
    notes += [] if document["source"] == source_hash() else ["OF OTHER SOURCES"]
    notes += [] if document["tuned"] == tuned_hash() or document["dry_run"] else ["before tuning"]
    title = f"\n{stage.name}: {stage.title} ({', '.join(notes)})"
    return f"{title}\n{stage.describe(document) or '  nothing measured'}"


if __name__ == "__main__":
    sys.exit(main())
