"""Everything that is to be measured on a GPU, in stages that can be broken off and gone on with.

    PYTHONPATH=.:kernels:weights python perf/gpu_suite.py                       # what is not there yet, by priority
    PYTHONPATH=.:kernels:weights python perf/gpu_suite.py --stage a passes --out DIR --budget-seconds 500
    PYTHONPATH=.:kernels:weights python perf/gpu_suite.py --dry-run             # all of it, tiny, without a GPU
    PYTHONPATH=.:kernels:weights python perf/gpu_suite.py --report              # the tables of what is there

Stages (letters name several): ops, bits and families (a), passes and rounds (b), autotune (c), kernels (d), grown1b and
grown8b (e), quantized (f). Each stays below eight minutes and writes perf/results/<device>/<stage>.json after every
measurement. A document of the same sources is gone on with, and a complete one is not measured again, except with
--again. What failed or was too slow stands in the document as an error; what was not measured is not there. The last
thing printed is the table of what must be reached. Exits with 1 where something that was measured misses its bound in
correctness.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gpu import targets
from gpu.setting import ROOT, Setting, device_slug, source_hash, tuned_hash
from gpu.stage import RESTART, Stage, load, path_of, run
from gpu.stages import STAGES, choose

LEAST_SECONDS = 25.0  # of the budget: with less no stage begins
RESTARTS = 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", nargs="+", default=[], metavar="NAME", help="names or letters; default: all")
    parser.add_argument("--out", type=Path, help="where results go; default: perf/results/<device>")
    parser.add_argument("--budget-seconds", type=float, default=36000.0, help="begin nothing that may end later")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, to see that nothing breaks")
    parser.add_argument("--again", action="store_true", help="measure anew what is there already")
    parser.add_argument("--report", action="store_true", help="only print what is there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="what documents name as the commit, where the checkout has no .git")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        stages = choose(args.stage)
    except ValueError as error:
        parser.error(str(error))
    if args.child:
        return _child(stages, Setting(args.out, args.dry_run, args.seed, args.commit), args.budget_seconds)
    if not args.dry_run and not args.report and not _sees_a_gpu():
        parser.error("torch sees no GPU here; --dry-run walks every stage without one")
    kept = None
    if not args.dry_run and (not args.report or _sees_a_gpu()):
        kept = ROOT / "perf" / "results" / device_slug(dry=False)
    out = args.out or kept or Path(tempfile.mkdtemp(prefix="treespec-gpu-dry-run-"))
    out.mkdir(parents=True, exist_ok=True)
    if args.again:
        for stage in stages:
            path_of(out, stage.name).unlink(missing_ok=True)
    kept = out if kept is None or args.again else kept
    if not args.report:
        _run_all(stages, out.absolute(), kept, args)
    return report(stages, out, kept)


def _sees_a_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _run_all(stages: Sequence[Stage], out: Path, kept: Path, args: argparse.Namespace) -> None:
    """Each stage in processes of its own; a dry run has one for all, to save the starts."""
    deadline = time.monotonic() + args.budget_seconds
    left = [stage for stage in stages if not (_is_done(out, stage) or _is_done(kept, stage))]
    for stage in stages:
        if stage not in left:
            print(f"{stage.name}: measured already, with these sources; --again measures it anew", flush=True)
        elif not path_of(out, stage.name).exists() and path_of(kept, stage.name).exists():
            shutil.copy(path_of(kept, stage.name), path_of(out, stage.name))  # it goes on there
    groups = [left] if args.dry_run and left else [[stage] for stage in left]
    for group in groups:
        for _ in range(RESTARTS):
            before = [_progress(out, stage) for stage in group]
            seconds = min(deadline - time.monotonic(), sum(stage.seconds for stage in group))
            if seconds < LEAST_SECONDS:
                print(f"{group[0].name}: no time is left for it", flush=True)
                return
            code = _start(group, out, seconds, args)
            group = [stage for stage in group if not _is_done(out, stage)]
            stuck = code != RESTART and before == [_progress(out, stage) for stage in group]
            if not group or code == 0 or stuck:
                break


def _start(group: Sequence[Stage], out: Path, seconds: float, args: argparse.Namespace) -> int:
    """One process; the status it ended with. It and its children are ended a minute after its time."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", "--out", str(out), "--seed", str(args.seed),
               "--budget-seconds", str(seconds), "--stage", *(stage.name for stage in group)]  # fmt: skip
    command += ["--commit", args.commit] if args.commit else []
    environment = dict(os.environ)
    if args.dry_run:
        command.append("--dry-run")
        # What it measures is nobody's: the user's cache folder is left alone.
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(out / "cache")}
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return child.wait(timeout=seconds + 60)
    except subprocess.TimeoutExpired:
        print(f"{group[0].name}: ended after {seconds + 60:.0f} s", flush=True)
        return 1
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _child(stages: Sequence[Stage], setting: Setting, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    for stage in stages:
        if not _is_done(setting.out, stage):
            run(stage, setting, deadline - time.monotonic())
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
        document = documents.get(stage.name)
        if document is not None:
            notes = [document["date"][:16]]
            notes += [] if document["complete"] else ["NOT COMPLETE"]
            notes += [] if document["source"] == source_hash() else ["OF OTHER SOURCES"]
            notes += [] if document["tuned"] == tuned_hash() or document["dry_run"] else ["before tuning"]
            print(f"\n{stage.name}: {stage.title} ({', '.join(notes)})")
            print(stage.describe(document) or "  nothing measured")
    dry = any(document["dry_run"] for document in documents.values())
    if documents:
        first = next(iter(documents.values()))
        device, versions = first["device"], first["versions"]
        print(f"\n{device['name']}, driver {device['driver']}, commit {first['commit']}, torch {versions['torch']}, "
              f"triton {versions['triton']}, results in {out}")  # fmt: skip
    measured = {name: document["measurements"] for name, document in documents.items()}
    print(f"\n{targets.table(measured, dry)}")
    return int(targets.wrong(measured))


if __name__ == "__main__":
    sys.exit(main())
