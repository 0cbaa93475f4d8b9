"""`treespec autotune`: tune kernels and measure pass costs of this machine for later starts."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import typer

from treespec.cli import kernels
from treespec.cli.group import UsageError, print_json
from treespec.cli.options import Drafts, Json, Model, flags, load_llm, status
from treespec.config.configs import QUANTIZATIONS
from treespec.config.engine_options import EngineOptions
from treespec.errors import TreespecError, reject_unknown
from treespec.utils.interrupts import raise_on_interrupt
from treespec.utils.options import check_values, option
from treespec.utils.tables import table

BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"


@dataclass(frozen=True)
class AutotuneOptions:
    """Options of autotuning.

    Args:
        show: print stored results without measuring.
        seconds: approximate measuring time per cost curve.
        threads: CPU threads to measure with; by default 1, 2, 4 up to all cores.
        nodes: rows of a tree pass for kernels; 32 by default.
        context: committed positions for kernels; 2048 by default.
        ops: kernels to tune, without pass costs; repeated or comma-separated, all by default.
        budget_seconds: time limit for starting kernel measurements; rerun to continue.
        fresh: measure kernel configurations again.
        aot: only compile kernels, without a GPU, for sm_80, sm_86, sm_89, sm_90, sm_100, sm_120 or gfx942; repeatable.
            Takes minutes; an interrupted run continues.
    """

    show: bool = False
    seconds: float = option(5.0, ge=0.01, le=3600)
    threads: int | None = option(None, ge=1, le=1024)
    nodes: int | None = option(None, ge=1, le=256)
    context: int | None = option(None, ge=1, le=1 << 20)
    ops: Sequence[str] = ()
    budget_seconds: float | None = option(None, ge=1.0)
    fresh: bool = False
    aot: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_values(self)


@flags(EngineOptions, "device", "dtype", "quantization")
@flags(AutotuneOptions)
def autotune(
    model: Model = None,
    draft: Drafts = None,
    as_json: Json = False,
    *,
    tuning: AutotuneOptions,
    device: str,
    dtype: str,
    quantization: str | None,
) -> None:
    """Tune this machine and store the results.

    On a GPU: sweeps kernel configurations for a model's shapes, checks each against its reference, stores the fastest,
    and measures pass costs. On a CPU: measures passes over 1 to 64 rows and drafting levels with 1, 2, 4 .. threads.
    nodes="auto" sizes trees by these costs. Later starts with the same models, dtype and versions on this machine use
    the stored results.
    """
    if tuning.show:
        from treespec.startup.cost_measurement import load_all

        _print(_curves(load_all()) | {"tuned": kernels.stored()}, as_json, "stored")
        return
    from treespec.startup.options import resolve_device
    from treespec.utils.torch_state import on_device
    from treespec_kernels.launch.triton_launch import SHARED_BYTES, is_interpreted
    from treespec_kernels.ops import OPS, TUNABLE
    from treespec_kernels.ops.shapes import default_shapes
    from treespec_weights.dtypes import DTYPES

    raise_on_interrupt()
    reject_unknown("--dtype", [dtype], ("auto", *DTYPES))
    reject_unknown("--quantization", [quantization] if quantization is not None else [], QUANTIZATIONS)
    computed = None if dtype == "auto" else DTYPES[dtype]
    ops, threads, seconds = tuning.ops, tuning.threads, tuning.seconds
    if tuning.aot:
        targets, compiled = kernels.names("--aot", tuning.aot, SHARED_BYTES), kernels.names("--ops", ops, sorted(OPS))
        if model is None and quantization is None:
            shapes = default_shapes(DTYPES.values() if computed is None else (computed,))
        else:
            models = kernels.settings_of(model, draft, computed, quantization)
            shapes = tuple(dict.fromkeys(setting.shape for setting in models))
        report = kernels.aot_report(targets, compiled, shapes)
        print_json(report) if as_json else kernels.echo_aot(report)
        raise typer.Exit(1 if report["failed"] else 0)
    engine: dict[str, Any] = {"model": model, "drafts": draft, "dtype": dtype, "quantization": quantization}
    target_device = resolve_device(device)
    names = ("ops", "nodes", "context", "budget_seconds", "fresh")
    flags = [f"--{name.replace('_', '-')}" for name in names if getattr(tuning, name)]
    if target_device.type == "cpu" and not (flags and is_interpreted()):
        if flags:
            raise UsageError(f"{flags[0]} is for GPU kernels, but torch finds no GPU; --aot compiles without one")
        counts = thread_counts()
        if threads is not None or len(counts) == 1:
            entries = [_measure_here(seconds, threads, device="cpu", **engine)]
        else:
            entries = measure_in_children(counts, seconds, **engine)
        _print(_curves(entries), as_json)
        return
    if threads is not None:
        raise UsageError(f"--threads {threads} needs a CPU; use --device cpu")
    if computed is None and target_device.type == "cpu":
        computed = DTYPES["float32"]  # Triton's interpreter computes bfloat16 wrongly
    selected = kernels.names("--ops", ops, TUNABLE)
    settings = [
        replace(setting, nodes=tuning.nodes or 32, context=tuning.context or 2048)
        for setting in kernels.settings_of(model, draft, computed, quantization)
    ]
    with on_device(target_device):
        budget = tuning.budget_seconds or float("inf")
        tuned = kernels.tune_kernels(settings, target_device, selected, budget, tuning.fresh)
    document: dict[str, Any] = {"kernels": tuned}
    if not as_json:
        kernels.echo_tuned(tuned)
    if not ops and target_device.type == "cuda":
        document |= _curves([_measure_here(seconds, None, device=device, **engine)])
    _print(document, as_json)


def _curves(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the curve section of the document. `threads` compares stored curves of the first entry."""
    from treespec.startup import cost_measurement as costs

    compared = compare_threads(entries[0]["key"]) if entries else None
    return {"file": str(costs.costs_file()), "curves": entries, "threads": compared}


def _print(document: dict[str, Any], as_json: bool, done: str = "written") -> None:
    if as_json:
        print_json(document)
        return
    if document.get("curves"):
        _echo_curves(document["curves"])
        typer.echo(f"{done} in {document['file']}")
    elif "curves" in document:
        typer.echo(f"no curves are stored in {document['file']}; run treespec autotune")
    kernels.echo_stored(document.get("tuned", ()))


# --- cost curves


def _measure_here(seconds: float, threads: int | None, **options: Any) -> dict[str, Any]:
    """Measure and store an engine's cost curve in this process; return the stored entry. `options` are `LLM`'s."""
    import torch
    from tqdm import tqdm  # type: ignore[import-untyped]

    from treespec.startup import cost_measurement as costs

    if threads is not None:
        torch.set_num_threads(threads)
    with status("loading"):
        llm = load_llm(spec=None, **options)
    engine = llm.engine
    silent = not sys.stderr.isatty()
    with (
        costs.measuring_alone(seconds),
        tqdm(desc="measuring", total=1.0, leave=False, bar_format=BAR, disable=silent) as bar,
    ):
        curve = costs.measure(
            engine.runner, engine.sources.ssms, seconds, lambda fraction: bar.update(fraction - bar.n)
        )
    key = costs.cost_key(engine.runner, engine.sources.ssms, llm.config.num_threads)
    names = [engine.runner.target.config.folder.name, *(engine.sources.ssms.names if engine.sources.ssms else ())]
    costs.save(curve, key, names=names)
    return next(entry for entry in costs.load_all() if entry["key"] == key)


def thread_counts() -> list[int]:
    """Return the thread counts to measure: 1, 2, 4 .. and all cores available to this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return sorted({1 << i for i in range(cores.bit_length()) if 1 << i <= cores} | {cores})


def measure_in_children(
    counts: Sequence[int], seconds: float, drafts: Sequence[str] | None = None, **options: str | None
) -> list[dict[str, Any]]:
    """Measure the curve for each number of threads in a child process, since an engine fixes it at its self-test."""
    from tqdm import tqdm

    flags = [*options.items(), ("device", "cpu"), ("seconds", str(seconds))]
    flags += [("draft", draft) for draft in drafts or ()]
    words = ["--json", *(word for name, value in flags if value is not None for word in (f"--{name}", value))]
    entries = []
    with tqdm(desc="measuring", total=len(counts), leave=False, disable=not sys.stderr.isatty()) as bar:
        for count in counts:
            bar.set_postfix_str(f"{count} thread{'s' * (count > 1)}")
            command = [sys.executable, "-m", "treespec", "autotune", "--threads", str(count), *words]
            paths = [path for path in sys.path if path]
            environment = os.environ | {"OMP_NUM_THREADS": str(count), "PYTHONPATH": os.pathsep.join(paths)}
            child = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            if child.returncode == 2:
                raise TreespecError(json.loads(child.stdout)["error"]["message"])
            if child.returncode != 0:
                raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}:\n{child.stderr}")
            entries += json.loads(child.stdout)["curves"]
            bar.update()
    return entries


def compare_threads(key: dict[str, Any]) -> dict[str, Any] | None:
    """Compare the stored curves of these models by number of threads; None on a GPU."""
    from treespec.startup import cost_measurement as costs

    seconds = costs.by_threads(key)
    if key["device"] != "cpu" or not seconds:
        return None
    return {
        "best": min(seconds, key=lambda number: seconds[number]),
        "round_ms": {str(number): 1000 * value for number, value in seconds.items()},
    }


def _describe(entry: dict[str, Any]) -> str:
    """Format a stored curve: its scope and a table."""
    key, rows, times = entry["key"], entry["rows"], [1000 * s for s in entry["verify_seconds"]]
    names = entry.get("names") or ["target", *(f"draft {i}" for i in range(1, len(key["models"])))]
    models = [f"{name} ({shape[0]} x {shape[1]})" for name, shape in zip(names, key["models"], strict=False)]
    lines = [
        f"machine  {key['processor']}, {key['device']}, {_threads(key['threads'])}, torch {key['torch']}",
        f"target   {models[0]}, {key['dtype']}",
    ]
    if models[1:]:
        per_draft = f", {1000 * entry['ssm_seconds']:.2f} ms per additional draft" if models[2:] else ""
        start, level = 1000 * entry["draft_start_seconds"], 1000 * entry["draft_seconds"]
        cost = f"{start:.2f} ms to start, {level:.2f} ms per level of one{per_draft}"
        lines.append(f"drafts   {', '.join(models[1:])}: {cost}")
    if entry["position_seconds"]:
        extra, row = (1e6 * entry[name] for name in ("position_seconds", "row_position_seconds"))
        lines.append(f"context  {entry['context']}; per 1,000 more: {extra:.2f} ms, and {row:.2f} ms per further row")
    body = [(str(n), f"{ms:.2f}", f"{ms / times[0]:.2f}", f"{n / ms:.2f}") for n, ms in zip(rows, times, strict=True)]
    return "\n".join([*lines, "", table([("rows", "ms per pass", "relative", "rows per ms"), *body])])


def _echo_curves(entries: Sequence[dict[str, Any]]) -> None:
    """Print all curves, each group that differs only in the number of threads followed by a comparison."""
    from treespec.startup.cost_measurement import DRAFT_LEVELS, ROUND_ROWS

    for i, entry in enumerate(entries):
        typer.echo(_describe(entry) + "\n")
        key = entry["key"] | {"threads": 0}
        if all(later["key"] | {"threads": 0} != key for later in entries[i + 1 :]):
            compared = compare_threads(entry["key"])
            if compared is not None and len(compared["round_ms"]) > 1:
                times = ", ".join(f"{_threads(int(count))}: {ms:.2f} ms" for count, ms in compared["round_ms"].items())
                workload = f"a round of {ROUND_ROWS} rows and {DRAFT_LEVELS} levels of drafting"
                typer.echo(f"{times}, best: {compared['best']} ({workload})\n")


def _threads(number: int) -> str:
    return f"{number} thread{'' if number == 1 else 's'}"
