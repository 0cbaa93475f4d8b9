"""Measure cost curves for `treespec autotune`, in one process per number of threads."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import typer

from treespec.cli.options import load_llm, status
from treespec.utils.tables import table

BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"


def measure_here(seconds: float, threads: int | None, **options: Any) -> dict[str, Any]:
    """Measure and store an engine's cost curve in this process. Returns the stored entry. `options` are `LLM`'s."""
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
        costs.measuring_alone(),
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
    """Measure the curve for each number of threads in a child process, because an engine fixes it at its self-test."""
    from tqdm import tqdm

    from treespec.errors import TreespecError

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
    """Compare the stored curves of these models by number of threads. Returns None on a GPU."""
    from treespec.startup import cost_measurement as costs

    seconds = costs.by_threads(key)
    if key["device"] != "cpu" or not seconds:
        return None
    return {
        "best": min(seconds, key=lambda number: seconds[number]),
        "round_ms": {str(number): 1000 * value for number, value in seconds.items()},
    }


def describe(entry: dict[str, Any]) -> str:
    """Format a stored curve: its scope and a table."""
    key, rows, times = entry["key"], entry["rows"], [1000 * s for s in entry["verify_seconds"]]
    names = entry.get("names") or ["target", *(f"draft {i}" for i in range(1, len(key["models"])))]
    models = [f"{name} ({shape[0]} x {shape[1]})" for name, shape in zip(names, key["models"], strict=False)]
    lines = [
        f"machine  {key['processor']}, {key['device']}, {_threads(key['threads'])}, torch {key['torch']}",
        f"target   {models[0]}, {key['dtype']}",
    ]
    if models[1:]:
        further = f", {1000 * entry['ssm_seconds']:.2f} ms per further draft" if models[2:] else ""
        start, level = 1000 * entry["draft_start_seconds"], 1000 * entry["draft_seconds"]
        took = f"{start:.2f} ms to start, {level:.2f} ms per level of one{further}"
        lines.append(f"drafts   {', '.join(models[1:])}: {took}")
    if entry["position_seconds"]:
        first, row = (1e6 * entry[name] for name in ("position_seconds", "row_position_seconds"))
        lines.append(f"context  {entry['context']}; per 1,000 more: {first:.2f} ms, plus {row:.2f} ms per further row")
    body = [(str(n), f"{ms:.2f}", f"{ms / times[0]:.2f}", f"{n / ms:.2f}") for n, ms in zip(rows, times, strict=True)]
    return "\n".join([*lines, "", table([("rows", "ms per pass", "relative", "rows per ms"), *body])])


def describe_threads(compared: dict[str, Any]) -> str:
    """Format the time of a round by number of threads, and the best number, as one line."""
    from treespec.startup.cost_measurement import DRAFT_LEVELS, ROUND_ROWS

    times = ", ".join(f"{_threads(int(number))}: {ms:.2f} ms" for number, ms in compared["round_ms"].items())
    workload = f"a round of {ROUND_ROWS} rows and {DRAFT_LEVELS} levels of drafting"
    return f"{times}, best: {compared['best']} ({workload})"


def echo_curves(entries: Sequence[dict[str, Any]]) -> None:
    """Print every curve, and a comparison after curves that differ only in the number of threads."""
    for i, entry in enumerate(entries):
        typer.echo(describe(entry) + "\n")
        key = entry["key"] | {"threads": 0}
        if all(later["key"] | {"threads": 0} != key for later in entries[i + 1 :]):
            compared = compare_threads(entry["key"])
            if compared is not None and len(compared["round_ms"]) > 1:
                typer.echo(describe_threads(compared) + "\n")


def _threads(number: int) -> str:
    return f"{number} thread{'' if number == 1 else 's'}"
