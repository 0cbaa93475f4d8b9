"""`treespec autotune`: tune kernels and measure pass costs of this machine, for all later starts."""

from typing import Annotated, Any

import typer

from treespec.cli import curves, kernels
from treespec.cli.group import print_json, usage_error
from treespec.cli.options import Drafts, Json, Model, flags
from treespec.config.engine_options import EngineOptions
from treespec.utils.interrupts import raise_on_interrupt


def _kernel(name: str, metavar: str, text: str, **options: Any) -> Any:
    return typer.Option(name, metavar=metavar, help=text, rich_help_panel="Kernels", **options)


@flags(EngineOptions, "device", "dtype", "quantization")
def autotune(
    model: Model = None,
    draft: Drafts = None,
    show: Annotated[bool, typer.Option("--show", help="Print stored results without measuring.")] = False,
    seconds: Annotated[
        float,
        typer.Option("--seconds", metavar="S", min=0.01, max=3600, help="Approximate measuring time per cost curve."),
    ] = 5.0,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            metavar="N",
            min=1,
            max=1024,
            help="CPU threads to measure with. Default: 1, 2, 4 .. and all cores.",
        ),
    ] = None,
    nodes: Annotated[int | None, _kernel("--nodes", "N", "Rows of a tree pass. Default: 32.", min=1, max=256)] = None,
    context: Annotated[
        int | None, _kernel("--context", "N", "Committed positions. Default: 2048.", min=1, max=1 << 20)
    ] = None,
    ops: Annotated[
        list[str] | None,
        _kernel("--ops", "OP", "Ops to tune, without costs of passes; repeated or comma-separated. Default: all."),
    ] = None,
    budget_seconds: Annotated[
        float | None,
        _kernel("--budget-seconds", "S", "Start no configuration after S seconds; rerun to continue.", min=1),
    ] = None,
    fresh: Annotated[bool, _kernel("--fresh", "", "Measure configurations again.")] = False,
    aot: Annotated[
        list[str] | None,
        _kernel(
            "--aot",
            "TARGET",
            "Only compile, without a GPU: sm_80, sm_86, sm_89, sm_90, sm_100, sm_120 or gfx942; repeatable. Takes "
            "minutes; an interrupted run continues.",
        ),
    ] = None,
    as_json: Json = False,
    *,
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
    if show:
        from treespec.startup.cost_measurement import load_all

        _print(_curves(load_all()) | {"tuned": kernels.stored()}, as_json, "stored")
        return
    from dataclasses import replace

    from treespec.config.configs import QUANTIZATIONS
    from treespec.errors import reject_unknown
    from treespec.startup.options import DTYPES, resolve_device
    from treespec.utils.torch_state import on_device
    from treespec_kernels.launch.triton_launch import SHARED_BYTES, is_interpreted
    from treespec_kernels.ops import OPS, TUNABLE
    from treespec_kernels.ops.shapes import default_shapes

    raise_on_interrupt()
    reject_unknown("--dtype", [dtype], ("auto", *DTYPES))
    reject_unknown("--quantization", [quantization] if quantization is not None else [], QUANTIZATIONS)
    computed = None if dtype == "auto" else DTYPES[dtype]
    if aot:
        targets, compiled = kernels.names("--aot", aot, SHARED_BYTES), kernels.names("--ops", ops, sorted(OPS))
        if model is None and quantization is None:
            shapes = default_shapes(DTYPES.values() if computed is None else (computed,))
        else:
            models = kernels.settings_of(model, draft, computed, quantization)
            shapes = tuple(dict.fromkeys(setting.shape for setting in models))
        report = kernels.aot_report(targets, compiled, shapes)
        print_json(report) if as_json else kernels.echo_aot(report)
        raise typer.Exit(1 if report["failed"] else 0)
    engine: dict[str, Any] = {"model": model, "drafts": draft, "dtype": dtype, "quantization": quantization}
    where = resolve_device(device)
    used = {"--ops": ops, "--nodes": nodes, "--context": context, "--budget-seconds": budget_seconds, "--fresh": fresh}
    flags = [name for name, value in used.items() if value]
    if where.type == "cpu" and not (flags and is_interpreted()):
        if flags:
            raise usage_error(f"{flags[0]} is about kernels on a GPU, and torch finds none; --aot compiles them")
        counts = curves.thread_counts()
        if threads is not None or len(counts) == 1:
            entries = [curves.measure_here(seconds, threads, device="cpu", **engine)]
        else:
            entries = curves.measure_in_children(counts, seconds, **engine)
        _print(_curves(entries), as_json)
        return
    if threads is not None:
        raise usage_error(f"--threads {threads} needs a CPU; use --device cpu")
    if computed is None and where.type == "cpu":
        computed = DTYPES["float32"]  # Triton's interpreter computes bfloat16 wrongly
    selected = kernels.names("--ops", ops, TUNABLE)
    settings = [
        replace(setting, nodes=nodes or 32, context=context or 2048)
        for setting in kernels.settings_of(model, draft, computed, quantization)
    ]
    with on_device(where):
        tuned = kernels.tune_kernels(settings, where, selected, budget_seconds or float("inf"), fresh)
    document: dict[str, Any] = {"kernels": tuned}
    if not as_json:
        kernels.echo_tuned(tuned)
    if not ops and where.type == "cuda":
        document |= _curves([curves.measure_here(seconds, None, device=device, **engine)])
    _print(document, as_json)


def _curves(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the curve section of the document. `threads` compares stored curves of the first entry."""
    from treespec.startup import cost_measurement as costs

    compared = curves.compare_threads(entries[0]["key"]) if entries else None
    return {"file": str(costs.costs_file()), "curves": entries, "threads": compared}


def _print(document: dict[str, Any], as_json: bool, done: str = "written") -> None:
    if as_json:
        print_json(document)
        return
    if document.get("curves"):
        curves.echo_curves(document["curves"])
        typer.echo(f"{done} in {document['file']}")
    elif "curves" in document:
        typer.echo(f"no curves are stored in {document['file']}; run treespec autotune")
    kernels.echo_stored(document.get("tuned", ()))
