"""Kernel tuning for `treespec autotune` on a GPU, and ahead-of-time compilation without one."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer

from treespec.cli.group import UsageError
from treespec.errors import ConfigError, KernelError, reject_unknown
from treespec.utils.tables import table

if TYPE_CHECKING:
    import torch

    from treespec.models.model_config import ModelConfig
    from treespec_kernels.linear.quantized import WeightForm
    from treespec_kernels.ops.shapes import KernelShape, Setting

PREFILL_ROWS = 2048  # maximum rows of an engine's prefill pass
MAX_JOBS = 16  # maximum compile processes
LISTED = 5  # number of printed failures; --json lists all


def settings_of(
    model: str | None, drafts: list[str] | None, dtype: "torch.dtype | None", quantization: str | None = None
) -> "list[Setting]":
    """Return the settings of models, alone and stacked, one per weight format. dtype None is the checkpoint's."""
    from treespec.models.model_config import ModelConfig
    from treespec.startup.options import resolve_folders, resolve_model, resolve_quantization

    target = ModelConfig.from_hf(resolve_model(model))
    resolve_quantization(quantization, target, dtype or target.dtype)
    configs = [ModelConfig.from_hf(folder) for _, folder in resolve_folders(model, drafts)]
    counts = Counter(setting for config in configs for setting in _settings(config, dtype or target.dtype, None))
    stacked = [replace(setting, groups=groups) for setting, groups in counts.items()]
    # SSMs also run unstacked: on prompts, or if only one is active.
    return list(dict.fromkeys([*_settings(target, dtype or target.dtype, quantization), *stacked, *counts]))


def _settings(config: "ModelConfig", dtype: "torch.dtype", quantization: str | None) -> "list[Setting]":
    """Return the settings of a model, one per weight format of its layers."""
    from treespec_kernels.ops.shapes import KernelShape, Setting

    if (unsupported := config.without_kernel) is not None:
        raise ConfigError(f"{config.folder}: there is no Triton kernel for its {unsupported}")
    shape = config.shape
    kernel = KernelShape(
        dtype,
        *(shape.head_dim, shape.num_heads, shape.num_kv_heads),
        *(shape.hidden_size, shape.intermediate_size, shape.vocab_size),
        norm=config.rules.norm,
        post_norms=shape.post_norms,
        qk_norm=shape.qk_norm,
        rotary=bool(config.ropes),
        gated=shape.gated,
        activation=config.activation,
        capped=config.score_cap is not None or config.logit_cap is not None,
    )
    forms, kernels = _forms(config, quantization), [kernel] * shape.num_layers
    if shape.sizes:
        kernel = replace(kernel, planes=(shape.num_kv_heads, shape.head_dim))
        names = ("head_dim", "num_kv_heads", "intermediate_size")
        kernels = [replace(kernel, **{name: getattr(layer, name) for name in names}) for layer in shape.sizes]
    return [Setting(replace(layer, quantized=f), layers=n) for layer, n in Counter(kernels).items() for f in forms]


def _forms(config: "ModelConfig", quantization: str | None) -> "list[WeightForm | None]":
    from treespec_kernels.linear.quantized import WeightForm
    from treespec_weights.load import expected_tensors, quantizable, quantized_group
    from treespec_weights.quantize import BITS

    if quantization is not None:
        return [WeightForm(BITS[quantization], quantized_group(config.shape, quantization))]
    if config.quantization is None:
        return [None]
    matrices = quantizable(config.shape).keys()
    placements = expected_tensors(config.shape, config.rules, config.quantization)
    stored = dict.fromkeys(placement.form for placement in placements if not matrices.isdisjoint(placement.params))
    forms = [None if form is None else WeightForm(*form) for form in stored]
    return sorted(forms, key=lambda form: form is None)


def names(flag: str, values: Sequence[str] | None, valid: Iterable[str]) -> list[str]:
    """Return the values of a repeated or comma-separated option; all valid ones if it is not given."""
    selected = [name for value in values or () for name in value.split(",")]
    reject_unknown(flag, selected, tuple(valid))
    return list(dict.fromkeys(selected or valid))


# --- ahead of time


def aot_report(targets: Sequence[str], ops: Iterable[str], shapes: "Iterable[KernelShape]") -> dict[str, Any]:
    """Compile ahead of time and return `treespec_kernels.aot.compiler`'s report."""
    from treespec_kernels.aot.compiler import compile_report

    print(f"compiling kernels for {', '.join(targets)}", file=sys.stderr, flush=True)
    with _progress_bar("compiling") as show:
        try:
            return compile_report(targets, shapes, ops, advance=lambda done, total: show("", done, total))
        except ValueError as error:
            raise UsageError(str(error)) from error


def echo_aot(report: dict[str, Any]) -> None:
    """Print one line per kernel and target: number of variants and maximum resources."""
    lines = [("kernel", "target", "compiled", "registers", "spills", "shared KB")]
    for target, rows in report["targets"].items():
        for kernel in dict.fromkeys(row["kernel"] for row in rows):
            kernel_rows = [row for row in rows if row["kernel"] == kernel]
            registers, spills, shared = (
                max(row[name] for row in kernel_rows) for name in ("registers", "spills", "shared_bytes")
            )
            lines.append((kernel, target, str(len(kernel_rows)), str(registers), str(spills), f"{shared / 1024:.1f}"))
    typer.echo(table(lines))
    for failure in report["failed"]:
        typer.echo(f"failed: {failure['kernel']} for {failure['target']}, {failure['case']}: {failure['message']}")


# --- the sweep


def tune_kernels(
    settings: "Sequence[Setting]", device: "torch.device", ops: Sequence[str], budget_seconds: float, fresh: bool
) -> dict[str, Any]:
    """Run the sweep, write the tuned file and return the results. Raises UsageError for unsupported sizes."""
    import torch

    from treespec_kernels import sweep
    from treespec_kernels.tuning import tuned
    from treespec_kernels.tuning.clock import Clock

    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "Triton interpreter"
    path, prefill = tuned.tuned_file(name), PREFILL_ROWS if on_gpu else 0
    try:
        problems = sweep.problems_of((replace(setting, device=device, prefill=prefill) for setting in settings), ops)
        for problem in problems:
            problem[0].candidates()  # validates dtypes and sizes before measuring
    except ValueError as error:
        raise UsageError(str(error)) from error
    log = sweep.SweepLog(path.with_suffix(".log.jsonl"), name)
    if fresh:
        log.forget()
    clock, jobs = Clock(device), min(MAX_JOBS, os.cpu_count() or 1) if on_gpu else 0
    bandwidth = clock.copy_bandwidth()
    try:
        with _progress_bar("tuning") as show:
            outcomes = sweep.tune(problems, clock, log, budget_seconds=budget_seconds, jobs=jobs, advance=show)
    except sweep.TuningError as error:
        raise KernelError(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise KernelError(
            f"the inputs do not fit into {name}'s free memory; use smaller --ops, --nodes, --context or an idle GPU"
        ) from error
    earlier = {entry.label: entry for entry in tuned.read_entries(path, name)}
    entries, results = [], []
    for outcome in outcomes:
        case = outcome.problem[0]
        failed = [{"config": asdict(failure.config), "message": failure.error} for failure in outcome.failed]
        counts = {"measured": len(outcome.measurements) - len(failed), "left": outcome.unmeasured, "failed": failed}
        if entry := outcome.entry(tuned.versions_of(name, case.op), bandwidth):
            previous = earlier.get(entry.label)
            if previous and previous.has_same_times(entry):  # no new measurements: keeps the date and share_of_copy
                entry = previous
            entries.append(entry)
        entry_fields = entry and asdict(entry)
        results.append({"label": case.label, "default": asdict(case.default), "entry": entry_fields, **counts})
    tuned.save_entries(path, name, entries)
    return {
        "file": str(path),
        "device": name,
        "copy_bytes_per_second": bandwidth,
        "versions": tuned.versions_of(name, ""),
        "rehearsal": not on_gpu,
        "results": results,
    }


def echo_tuned(document: dict[str, Any]) -> None:
    """Print times, chosen configurations and failures."""
    versions, speed = document["versions"], document["copy_bytes_per_second"] / 1e12
    environment = f"copies {speed:.3g} TB/s, triton {versions['triton']}, torch {versions['torch']}"
    typer.echo(f"device   {document['device']}, {environment}")
    if document["rehearsal"]:
        typer.echo("rehearsal in Triton's interpreter: the times below are meaningless for a GPU")
    lines = [("op", "us", "default us", "of copy", "")]
    for result in document["results"]:
        for load, times in (result["entry"] or {"loads": {}})["loads"].items():
            microseconds = f"{times['microseconds']:.2f}", f"{times['default_microseconds']:.2f}"
            share, weight = f"{100 * times['share_of_copy']:.0f} %", f"weight {times['weight']:g}"
            lines.append((f"{result['label']}, {load}", *microseconds, share, weight))
    typer.echo(f"\n{table(lines)}\n")
    for result in document["results"]:
        config, failed = result["entry"] and result["entry"]["config"], result["failed"]
        is_default = config and result["default"] | config == result["default"]
        fields = ", ".join(f"{name} {value}" for name, value in (config or {}).items()) or "nothing measured"
        typer.echo(f"{result['label']}: {fields}{' (the default)' if is_default else ''}")
        unmeasured = f", {result['left']} remaining; run again to continue" if result["left"] else ""
        typer.echo(f"  {result['measured']} measured{f', {len(failed)} failed' if failed else ''}{unmeasured}")
        for failure in failed[:LISTED]:
            typer.echo(f"  failed: {failure['config']}: {failure['message'].splitlines()[0]}")
    typer.echo(f"\nwritten in {document['file']}")


def stored() -> list[dict[str, Any]]:
    """Return the tuned files, with stale entries marked."""
    from treespec_kernels.tuning import tuned

    def shown(entry: tuned.TunedEntry) -> dict[str, Any]:
        stale = entry.stale(tuned.versions_of(entry.versions["gpu"], entry.op))
        return asdict(entry) | {"label": entry.label, "stale": stale}

    paths = sorted(tuned.user_folder().glob("*.json"))
    return [{"file": str(path), "entries": [*map(shown, tuned.read_entries(path))]} for path in paths]


def echo_stored(documents: Sequence[dict[str, Any]]) -> None:
    for document in documents:
        typer.echo(f"{document['file']}:")
        for entry in document["entries"]:
            stale = f"; stale: {', '.join(entry['stale'])}" if entry["stale"] else ""
            times = f"{entry['microseconds']:.2f} us, default {entry['default_microseconds']:.2f} us"
            launched = {True: ", on", False: ", off"}.get(entry["config"].get("pdl"), "")
            typer.echo(f"  {entry['label']}: {times}{launched}{stale}")


@contextmanager
def _progress_bar(doing: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on a terminal. Yields a function that updates it with (label, done, total)."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    with tqdm(desc=doing, leave=False, disable=not sys.stderr.isatty()) as bar:

        def show(label: str, done: int, total: int) -> None:
            bar.total = total
            bar.set_postfix_str(label, refresh=False)
            bar.update(done - bar.n)

        yield show
