"""Tune kernels for `treespec autotune` on a GPU, and compile them ahead of time without one."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from treespec.cli.group import table, usage_error

if TYPE_CHECKING:
    import torch

    from treespec.config import ModelConfig
    from treespec_kernels.linear.quantized import WeightForm
    from treespec_kernels.ops.shapes import KernelShape
    from treespec_kernels.tuning.sweep import Tuned

MAX_NODES = 256
MAX_CONTEXT = 1 << 20
PREFILL_ROWS = 2048  # as many as an engine computes in one pass
MAX_JOBS = 16  # compile processes; each keeps the inputs of one workload on the GPU
LISTED = 5  # number of printed failures; --json lists all


@dataclass(frozen=True)
class Sizes:
    """Model shape given by options instead of --model."""

    heads: int | None = None
    head_dim: int | None = None
    kv_heads: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    vocab: int | None = None
    layers: int | None = None

    @property
    def given(self) -> list[str]:
        """Options in use."""
        return [f"--{name.replace('_', '-')}" for name, value in asdict(self).items() if value is not None]


@dataclass(frozen=True)
class Shape:
    """Shape of a model, or of `groups` stacked models."""

    kernel: "KernelShape"
    layers: int
    groups: int = 1


def shapes_of(
    sizes: Sizes,
    model: str | None,
    drafts: list[str] | None,
    dtype: "torch.dtype | None",
    quantization: str | None = None,
) -> list[Shape]:
    """Return the shapes to tune or compile: from options, or of the models (default: the embedded ones).

    Args:
        dtype: dtype of the weights; None uses the checkpoint's, or bfloat16 without a checkpoint.
        quantization: quantisation of the target at load time. Quantised checkpoints yield a shape with their weight
            form, plus an unquantised one if some layers are not quantised.

    Raises:
        UsageError: contradictory options.
        ConfigError: `quantization` of a quantised model, or of sizes that no group size divides.
    """
    import torch

    from treespec_kernels.ops.shapes import KernelShape

    if sizes.given:
        if model is not None or drafts:
            raise usage_error(f"{sizes.given[0]} describes a model shape and excludes --model; use one of them")
        missing = [
            f"--{name.replace('_', '-')}"
            for name in ("heads", "head_dim", "intermediate", "vocab")
            if getattr(sizes, name) is None
        ]
        if missing:
            raise usage_error(f"{sizes.given[0]} needs {', '.join(missing)} too, or give --model")
        for name, value in asdict(sizes).items():
            if value is not None and value < 1:
                raise usage_error(f"--{name.replace('_', '-')} {value}: valid: whole numbers from 1")
        heads, head_dim = int(sizes.heads or 0), int(sizes.head_dim or 0)
        kv_heads = sizes.kv_heads or heads
        if heads % kv_heads:
            raise usage_error(f"--heads {heads}: not a multiple of --kv-heads {kv_heads}")
        kernel = KernelShape(
            dtype or torch.bfloat16,
            head_dim,
            heads,
            kv_heads,
            sizes.hidden or heads * head_dim,
            int(sizes.intermediate or 0),
            int(sizes.vocab or 0),
        )
        return [Shape(replace(kernel, quantized=_requested_form(kernel, quantization)), sizes.layers or 1)]
    from treespec.config import ModelConfig
    from treespec.models.quantized_weights import resolve_quantization
    from treespec.startup.folders import resolve_folders, resolve_model

    target = ModelConfig.from_hf(resolve_model(model))
    resolve_quantization(quantization, target, dtype or target.dtype)
    counts: dict[Shape, int] = {}
    for config in (ModelConfig.from_hf(folder) for _, folder in resolve_folders(model, drafts)):
        for kernel in _kernel_shapes(config, dtype or target.dtype, None):
            shape = Shape(kernel, config.shape.num_layers)
            counts[shape] = counts.get(shape, 0) + 1
    kernels = _kernel_shapes(target, dtype or target.dtype, quantization)
    own = [Shape(kernel, target.shape.num_layers) for kernel in kernels]
    stacked = [Shape(shape.kernel, shape.layers, groups) for shape, groups in counts.items()]
    return list(dict.fromkeys([*own, *stacked, *counts]))  # SSMs also run unstacked: on prompts, or alone in a round


def _requested_form(kernel: "KernelShape", quantization: str | None) -> "WeightForm | None":
    """Return the weight form of a shape given by options."""
    from treespec_kernels.linear.quantized import WeightForm
    from treespec_weights.quantize import BITS, group_of

    if quantization is None:
        return None
    inputs = {layer.in_features for layer in kernel.linear_layers}
    try:
        return WeightForm(BITS[quantization], group_of(inputs) if BITS[quantization] == 4 else None)
    except ValueError as error:
        raise usage_error(f"--quantization {quantization}: {error}") from error


def _kernel_shapes(config: "ModelConfig", dtype: "torch.dtype", quantization: str | None) -> "list[KernelShape]":
    """Return the kernel shapes of a model, one per weight form of its layers."""
    from treespec_kernels.ops.shapes import KernelShape

    shape = config.shape
    return [
        KernelShape(
            dtype,
            shape.head_dim,
            shape.num_heads,
            shape.num_kv_heads,
            shape.hidden_size,
            shape.intermediate_size,
            shape.vocab_size,
            norm=config.rules.norm,
            post_norms=shape.post_norms,
            qk_norm=shape.qk_norm,
            rotary=bool(config.ropes),
            gated=shape.gated,
            activation=config.activation,
            capped=config.score_cap is not None or config.logit_cap is not None,
            quantized=form,
        )
        for form in _forms(config, quantization)
    ]


def _forms(config: "ModelConfig", quantization: str | None) -> "list[WeightForm | None]":
    from treespec_kernels.linear.quantized import WeightForm
    from treespec_weights.load import covered, expected_tensors, quantizable, quantized_group
    from treespec_weights.quantize import BITS

    if quantization is not None:
        return [WeightForm(BITS[quantization], quantized_group(config.shape, quantization))]
    scheme = config.quantization
    if scheme is None or scheme.floating:  # fp8 is converted at load time
        return [None]
    matrices = quantizable(config.shape)
    placements = [each for each in expected_tensors(config.shape, config.rules) if {*each.params} & {*matrices}]
    names = [each.name if covered(scheme, each, config.rules) else None for each in placements]
    found = dict.fromkeys(None if name is None else WeightForm(*scheme.form(name)) for name in names)
    return sorted(found, key=lambda form: form is None)


def names(flag: str, given: Sequence[str] | None, valid: Iterable[str]) -> list[str] | None:
    """Return the values of a repeated or comma-separated option, or None if it is unused."""
    if not given:
        return None
    from treespec.errors import reject_unknown

    chosen = [name for value in given for name in value.split(",") if name]
    reject_unknown(flag, chosen, tuple(valid))
    return list(dict.fromkeys(chosen))


def check_number(flag: str, value: float | None, most: float) -> None:
    if value is not None and not 1 <= value <= most:
        raise usage_error(f"{flag} {value:g}: valid: numbers from 1 to {most:g}")


# --- ahead of time


def aot_report(
    targets: Sequence[str], only: list[str] | None, shapes: "Iterable[KernelShape]", fresh: bool
) -> dict[str, Any]:
    """Compile ahead of time and return `treespec_kernels.aot.compiler`'s report.

    Args:
        targets, only, shapes: GPU targets, ops and model shapes to compile.
        fresh: whether to ignore cached results.
    """
    from treespec_kernels.aot import compiler as aot
    from treespec_kernels.aot.binary_cache import ResultCache, cache_folder

    try:
        cache = ResultCache(cache_folder(), reads=not fresh)
    except OSError:
        cache = None

    def begin(plan: aot.Plan) -> None:
        left, kept = plan.total - plan.known, "" if cache is None else f"; results are cached in {cache.folder}"
        print(
            f"compiling {left} of {plan.total} kernels for {', '.join(targets)} in {plan.processes} processes{kept}",
            file=sys.stderr,
            flush=True,
        )

    with _progress_bar("compiling") as show:
        try:
            return aot.compile_report(
                targets, shapes, only, advance=partial(show, ""), begin=begin, cache=cache, fresh=fresh
            )
        except ValueError as error:
            raise usage_error(str(error)) from error


def echo_aot(report: dict[str, Any]) -> None:
    """Print one line per kernel and target: number of variants and maximum resources."""
    lines = [("kernel", "target", "compiled", "registers", "spills", "shared KB")]
    for target, rows in report["targets"].items():
        for kernel in dict.fromkeys(row["kernel"] for row in rows):
            own = [row for row in rows if row["kernel"] == kernel]
            most = {name: max(row[name] for row in own) for name in ("registers", "spills", "shared_bytes")}
            shared = f"{most['shared_bytes'] / 1024:.1f}"
            lines.append((kernel, target, str(len(own)), str(most["registers"]), str(most["spills"]), shared))
    typer.echo(table(lines))
    for failure in report["failed"]:
        typer.echo(f"failed: {failure['kernel']} for {failure['target']}, {failure['case']}: {failure['message']}")


# --- the sweep


def is_rehearsal() -> bool:
    """Return whether kernels run in Triton's interpreter: a rehearsal on a CPU with meaningless times."""
    from treespec_kernels.launch.triton_launch import is_interpreted

    return is_interpreted()


def tune_kernels(
    shapes: Sequence[Shape],
    device: "torch.device",
    only: list[str] | None,
    nodes: int,
    context: int,
    budget_seconds: float | None,
    fresh: bool,
    force: bool,
) -> dict[str, Any]:
    """Run the sweep, write the tuned file and return the results.

    Raises:
        UsageError: before measuring, if the file is not a tuned file (without `force`) or no kernel supports the sizes.
        KernelError: a kernel broke the device, or memory is insufficient.
    """
    import torch

    from treespec.errors import KernelError
    from treespec_kernels.tuning import sweep as tuning
    from treespec_kernels.tuning import tuned, workloads
    from treespec_kernels.tuning.clock import CudaClock, HostClock
    from treespec_kernels.tuning.workloads import Setting

    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "Triton interpreter"
    folder = tuned.writable_folder() if on_gpu else tuned.user_folder()
    path = folder / f"{tuned.slug(name)}.json"
    settings = [
        Setting(
            shape.kernel,
            device,
            nodes=nodes,
            context=context,
            prefill=PREFILL_ROWS if on_gpu else 0,
            groups=shape.groups,
            layers=shape.layers,
            fixed_order_dot=not on_gpu,
        )
        for shape in shapes
    ]
    try:
        if not force:
            tuned.check_writable(path, name)
        problems = tuning.problems_of(work for setting in settings for work in workloads.workloads_of(setting, only))
        for problem in problems:
            problem.workloads[0].candidates()  # validates dtypes and sizes before measuring
    except ValueError as error:
        raise usage_error(str(error)) from error
    log = tuning.SweepLog(tuned.user_folder() / f"{tuned.slug(name)}.log.jsonl", name)
    if fresh:
        log.forget()
    clock = CudaClock(device) if on_gpu else HostClock()
    bandwidth = clock.copy_bandwidth()
    budget = float("inf") if budget_seconds is None else budget_seconds
    jobs = min(MAX_JOBS, os.cpu_count() or 1) if on_gpu else 1
    try:
        with _progress_bar("tuning") as show:
            found = tuning.tune(problems, clock, log, budget_seconds=budget, jobs=jobs, advance=show)
    except tuning.TuningError as error:
        raise KernelError(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise KernelError(
            f"the workloads do not fit into {name}'s free memory; use smaller --ops, --nodes, --context or an idle GPU"
        ) from error
    entries = [entry for each in found if (entry := each.entry(tuned.versions_of(name, each.problem.op)))]
    tuned.save_entries(path, name, entries, force)
    return {
        "file": str(path),
        "device": name,
        "copy_bytes_per_second": bandwidth,
        "versions": tuned.versions_of(name, "") | {"source": None},
        "rehearsal": not on_gpu,
        "results": [_result(each, bandwidth) for each in found],
    }


def _result(found: "Tuned", bandwidth: float) -> dict[str, Any]:
    from treespec_kernels.tuning.tuned import config_fields

    best, default, problem = found.best, found.default, found.problem
    loads = (
        []
        if best is None
        else [
            {
                "load": work.load,
                "weight": work.weight,
                "microseconds": 1e6 * best.seconds[work.load],
                "default_microseconds": 1e6 * default.seconds[work.load] if default else None,
                "share_of_copy": work.bytes / best.seconds[work.load] / bandwidth,
            }
            for work in problem.workloads
        ]
    )
    return {
        "op": problem.op,
        "key": problem.key,
        "config": config_fields(best.config) if best else None,
        "default": config_fields(problem.workloads[0].default),
        "loads": loads,
        "measured": len(found.measurements) - len(found.failed),
        "left": found.left,
        "failed": [{"config": config_fields(each.config), "message": each.error} for each in found.failed],
    }


def echo_tuned(document: dict[str, Any]) -> None:
    """Print times, chosen configurations and failures."""
    versions = document["versions"]
    speed = document["copy_bytes_per_second"] / 1e12
    typer.echo(
        f"device   {document['device']}, copies {speed:.3g} TB/s, triton {versions['triton']}, "
        f"torch {versions['torch']}, driver {versions['driver']}"
    )
    if document["rehearsal"]:
        typer.echo("rehearsal in Triton's interpreter: the times below are meaningless for a GPU")
    lines = [("op", "us", "default us", "of copy", "")]
    for result in document["results"]:
        for load in result["loads"]:
            default = load["default_microseconds"]
            lines.append(
                (
                    f"{_label(result)}, {load['load']}",
                    f"{load['microseconds']:.2f}",
                    "failed" if default is None else f"{default:.2f}",
                    f"{100 * load['share_of_copy']:.0f} %",
                    f"weight {load['weight']:g}",
                )
            )
    typer.echo(f"\n{table(lines)}\n")
    for result in document["results"]:
        chosen = "nothing measured" if result["config"] is None else _config(result)
        typer.echo(f"{_label(result)}: {chosen}")
        counts = [f"{result['measured']} measured"]
        counts += [f"{len(result['failed'])} failed"] if result["failed"] else []
        counts += [f"{result['left']} left; run again to continue"] if result["left"] else []
        typer.echo(f"  {', '.join(counts)}")
        for failure in result["failed"][:LISTED]:
            typer.echo(f"  failed: {failure['config']}: {failure['message'].splitlines()[0]}")
    typer.echo(f"\nwritten in {document['file']}")


def _label(result: dict[str, Any]) -> str:
    from treespec_kernels.tuning.tuned import label_of

    return label_of(result["op"], result["key"])


def _config(result: dict[str, Any]) -> str:
    if result["config"] is None:
        return "nothing to choose"
    fields = ", ".join(f"{name} {value}" for name, value in result["config"].items() if name != "fixed_order_dot")
    return f"{fields}{' (the default)' if result['config'] == result['default'] else ''}"


def stored() -> list[dict[str, Any]]:
    """Return all tuned files of the user and the package, with stale entries marked."""
    from treespec_kernels.tuning import tuned

    documents = []
    for path in sorted({f for folder in (tuned.user_folder(), tuned.package_folder()) for f in folder.glob("*.json")}):
        name = _device_of(path)
        entries = (tuned.read_entries(path, name) if name else None) or []
        listed = [asdict(each) | {"stale": each.stale(tuned.versions_of(str(name), each.op))} for each in entries]
        documents.append({"file": str(path), "device": name, "entries": listed})
    return documents


def _device_of(path: Path) -> str | None:
    """Return the device named in a tuned file."""
    import json

    try:
        match json.loads(path.read_text(encoding="utf-8")):
            case {"device": str(device)}:
                return device
    except (OSError, ValueError):
        pass
    return None


def echo_stored(documents: Sequence[dict[str, Any]]) -> None:
    for document in documents:
        typer.echo(f"{document['file']}: {document['device'] or 'not a tuned file'}")
        for entry in document["entries"]:
            stale = f"; stale: {', '.join(entry['stale'])}" if entry["stale"] else ""
            times = f"{entry['microseconds']:.2f} us, default {entry['default_microseconds']:.2f} us"
            launched = {True: ", on", False: ", off"}.get(entry["config"].get("pdl"), "")
            typer.echo(f"  {_label(entry)}: {times}{launched}{stale}")


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
