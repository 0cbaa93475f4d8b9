"""Everything that is to be measured on a GPU, in stages that can be broken off and gone on with.

    PYTHONPATH=.:kernels:weights python perf/gpu_suite.py                       # what is not there yet, by priority
    PYTHONPATH=.:kernels:weights python perf/gpu_suite.py --stage passes a --out DIR --budget-seconds 540
    PYTHONPATH=.:kernels:weights python perf/gpu_suite.py --dry-run             # all of it, tiny, without a GPU
    PYTHONPATH=.:kernels:weights python perf/gpu_suite.py --report              # the tables of what is there

Stages (letters name several): ops, bits and families (a), passes and rounds (b), autotune (c), kernels (d), grown1b and
grown8b (e), quantized (f). They run in the order in which they are named, each for as long as it needs, below eight
minutes, and then the next one with what is left of the budget: name first what must not be missing. Each writes
perf/results/<device>/<stage>.json after every measurement. A document of the same sources is gone on with, and a
complete one is not measured again, except with --again, and with --retry what failed in it. What failed or was too slow
stands in the document as an error, and in full in errors.log beside it; what was not measured, or cut off by the end of
the budget, is not there. The last thing printed is the table of what must be reached, half a minute after the budget at
the latest. Exits with 1 where something that was measured misses its bound in correctness.
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

LEAST_SECONDS = 25.0  # of the budget: with less no stage begins
KILL_SECONDS = 25.0  # after its time a process is ended: more than `LAST`, and a call of 600 s still prints the report
RESTARTS = 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--stage",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names or letters, which run in this order; default: all, by priority",
    )
    parser.add_argument("--out", type=Path, help="where results go; default: perf/results/<device>")
    parser.add_argument("--budget-seconds", type=float, default=36000.0, help="begin nothing that may end later")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, to see that nothing breaks")
    parser.add_argument("--again", action="store_true", help="measure anew what is there already")
    parser.add_argument("--retry", action="store_true", help="measure anew what is there as an error")
    parser.add_argument("--report", action="store_true", help="only print what is there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="what documents name as the commit, where the checkout has no .git")
    parser.add_argument("--child", type=float, metavar="UNTIL", help=argparse.SUPPRESS)  # by the monotonic clock
    args = parser.parse_args()
    try:
        stages = choose(args.stage)
    except ValueError as error:
        parser.error(str(error))
    if args.child is not None:
        return _child(stages, Setting(args.out, args.dry_run, args.seed, args.commit), args.child)
    if not args.dry_run and not args.report and not sees_a_gpu():
        parser.error("torch sees no GPU here; --dry-run walks every stage without one")
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
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def run_stages(stages: Sequence[Stage], out: Path, kept: Path, deadline: float, args: argparse.Namespace) -> None:
    """Each stage in processes of its own; a dry run has one for all, to save the starts."""
    left = [stage for stage in stages if not (_is_done(out, stage) or _is_done(kept, stage))]
    for stage in stages:
        if stage not in left:
            print(f"{stage.name}: measured already, with these sources; --again measures it anew", flush=True)
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
    """Where results of a stage are only in `kept`, they are gone on with in `out`."""
    if not path_of(out, stage.name).exists() and path_of(kept, stage.name).exists():
        shutil.copy(path_of(kept, stage.name), path_of(out, stage.name))


def start(group: Sequence[Stage], out: Path, seconds: float, args: argparse.Namespace) -> int:
    """One process; the status it ended with. It and its children are ended soon after its time."""
    until = time.monotonic() + seconds  # its start is part of them
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
        # What it measures is nobody's: the user's cache folder is left alone.
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(out / "cache")}
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return child.wait(timeout=seconds + KILL_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        _end_session(child.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs holds even what was killed
            child.wait(timeout=5)
        for stage in group:
            forget_cut(path_of(out, stage.name))
        return -signal.SIGKILL
    finally:
        _end_session(child.pid)


def _end_session(leader: int) -> None:
    """Kill what a process and its children have left, tests and compilers too, each of which leads a group: they would
    share the GPU with the next stage."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            session = int(stat.read_text().rpartition(")")[2].split()[3])
            if session == leader:
                os.kill(int(stat.parent.name), signal.SIGKILL)
        except (OSError, IndexError):
            continue  # it has ended meanwhile


def _child(stages: Sequence[Stage], setting: Setting, until: float) -> int:
    with failures.section(setting.out, f"process {os.getpid()}: {', '.join(stage.name for stage in stages)}") as log:
        faulthandler.enable(log)
        # From a thread that needs no lock of Python's: where a call holds that, nothing else here can say so.
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
    """Print the tables of the stages, and that of the targets; 1 where bits or results are wrong.

    Args:
        stages: whose tables; the targets' has all.
        out, kept: where results are; those of `out` come first.
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
            except Exception as error:  # whatever a figure of another kind raises: the other tables hold
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
