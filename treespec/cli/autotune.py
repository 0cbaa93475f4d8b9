"""`treespec autotune`: tune kernels and measure pass costs of this machine, for all later starts."""

from typing import Annotated, Any

import typer

from treespec.cli import curves, kernels
from treespec.cli.group import print_json, usage_error
from treespec.cli.options import Device, Drafts, Dtype, Json, Model, Quantization
from treespec.utils.interrupts import raise_on_interrupt

MAX_SECONDS = 24 * 3600


def _size(name: str, what: str) -> Any:
    return typer.Option(name, metavar="N", help=f"{what}, instead of --model's.", rich_help_panel="A model's shape")


def _kernel(name: str, metavar: str, text: str) -> Any:
    return typer.Option(name, metavar=metavar, help=text, rich_help_panel="Kernels")


def autotune(
    model: Model = None,
    draft: Drafts = None,
    show: Annotated[bool, typer.Option("--show", help="Print stored results without measuring.")] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", help="Approximate measuring time per cost curve.")
    ] = 5.0,
    threads: Annotated[
        int | None,
        typer.Option("--threads", metavar="N", help="CPU threads to measure with. Default: 1, 2, 4 .. and all cores."),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    heads: Annotated[int | None, _size("--heads", "Query heads")] = None,
    kv_heads: Annotated[int | None, _size("--kv-heads", "KV heads")] = None,
    head_dim: Annotated[int | None, _size("--head-dim", "Head size")] = None,
    hidden: Annotated[int | None, _size("--hidden", "Hidden size")] = None,
    intermediate: Annotated[int | None, _size("--intermediate", "MLP size")] = None,
    vocab: Annotated[int | None, _size("--vocab", "Vocabulary size")] = None,
    layers: Annotated[int | None, _size("--layers", "Layers")] = None,
    nodes: Annotated[int | None, _kernel("--nodes", "N", "Rows of a tree pass. Default: 32.")] = None,
    context: Annotated[int | None, _kernel("--context", "N", "Committed positions. Default: 2048.")] = None,
    ops: Annotated[
        list[str] | None, _kernel("--ops", "OP", "Ops to tune; repeated or comma-separated. Default: all.")
    ] = None,
    budget_seconds: Annotated[
        float | None,
        _kernel("--budget-seconds", "S", "Start no configuration after S seconds; rerun to continue."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore stored results; measure or compile again.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is not a tuned file.")] = False,
    aot: Annotated[
        list[str] | None,
        _kernel(
            "--aot",
            "TARGET",
            "Only compile, without a GPU: sm_80, sm_86, sm_89, sm_90, sm_100, sm_120 or gfx942; repeatable. Takes "
            "minutes; results are cached, so that an interrupted run continues.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Tune this machine and store the results.

    On a GPU: sweeps kernel configurations for a model's shapes, checks each against its reference, stores the fastest,
    and measures pass costs. On a CPU: measures passes over 1 to 64 rows and drafting levels with 1, 2, 4 .. threads.
    nodes="auto" sizes trees by these costs. Later starts with the same models, dtype and versions on this machine use
    the stored results.
    """
    sizes = kernels.Sizes(heads, head_dim, kv_heads, hidden, intermediate, vocab, layers)
    if not 0 < seconds <= 3600:
        raise usage_error(f"--seconds {seconds:g}: valid: more than 0, at most 3600")
    if threads is not None and not 1 <= threads <= 1024:
        raise usage_error(f"--threads {threads}: valid: whole numbers from 1 to 1024")
    kernels.check_number("--nodes", nodes, kernels.MAX_NODES)
    kernels.check_number("--context", context, kernels.MAX_CONTEXT)
    kernels.check_number("--budget-seconds", budget_seconds, MAX_SECONDS)
    if show:
        _show(as_json)
        return
    from treespec.config import QUANTIZATIONS
    from treespec.errors import reject_unknown
    from treespec.startup.device import DTYPES, resolve_device
    from treespec.utils.torch_state import on_device

    raise_on_interrupt()
    reject_unknown("--dtype", [dtype], ("auto", *DTYPES))
    reject_unknown("--quantization", [quantization] if quantization is not None else [], QUANTIZATIONS)
    computed = None if dtype == "auto" else DTYPES[dtype]
    if aot:
        raise typer.Exit(_aot(aot, ops, sizes, model, draft, computed, quantization, fresh, as_json))
    where = resolve_device(device)
    swept = {
        "--ops": ops,
        "--nodes": nodes,
        "--context": context,
        "--budget-seconds": budget_seconds,
        "--fresh": fresh,
        "--force": force,
    }
    of_kernels = [*sizes.given, *(name for name, value in swept.items() if value)]
    if where.type == "cpu" and not (of_kernels and kernels.is_rehearsal()):
        if of_kernels:
            raise usage_error(
                f"{of_kernels[0]} is about kernels on a GPU, and torch finds none; valid on a CPU: --model, "
                "--draft, --dtype, --quantization, --seconds, --threads, --show, --json, and --aot TARGET to compile "
                "kernels"
            )
        _measure_on_cpu(model, draft, dtype, quantization, seconds, threads, as_json)
        return
    if threads is not None:
        raise usage_error(f"--threads {threads} needs a CPU; use --device cpu")
    from treespec_kernels.tuning.workloads import ops as known_ops

    if computed is None and where.type == "cpu":
        computed = DTYPES["float32"]  # Triton's interpreter computes bfloat16 wrongly
    shapes = kernels.shapes_of(sizes, model, draft, computed, quantization)
    chosen = kernels.names("--ops", ops, known_ops())
    with on_device(where):
        found = kernels.tune_kernels(shapes, where, chosen, nodes or 32, context or 2048, budget_seconds, fresh, force)
    document: dict[str, Any] = {"kernels": found}
    if not as_json:
        kernels.echo_tuned(found)
    if not sizes.given and where.type == "cuda":
        entry = curves.measure_here(model, draft, device, dtype, quantization, seconds, None)
        document |= _curves([entry])
        if not as_json:
            typer.echo("")
            _echo_curves(document)
    if as_json:
        print_json(document)


def _aot(
    targets: list[str],
    ops: list[str] | None,
    sizes: kernels.Sizes,
    model: str | None,
    drafts: list[str] | None,
    dtype: Any,
    quantization: str | None,
    fresh: bool,
    as_json: bool,
) -> int:
    """Compile ahead of time. Returns the exit code."""
    from dataclasses import replace

    from treespec_kernels.aot import compiler as aot
    from treespec_kernels.ops.shapes import DTYPES, default_shapes

    chosen = kernels.names("--aot", targets, aot.SHARED_BYTES) or []
    if sizes.given or model is not None or quantization is not None:
        dtypes = [dtype] if dtype is not None else list(DTYPES)
        found = dict.fromkeys(shape.kernel for shape in kernels.shapes_of(sizes, model, drafts, None, quantization))
        shapes = [replace(shape, dtype=each) for each in dtypes for shape in found]
    else:
        shapes = list(default_shapes(DTYPES if dtype is None else (dtype,)))
    report = kernels.aot_report(chosen, kernels.names("--ops", ops, aot.ops()), shapes, fresh)
    if as_json:
        print_json(report)
    else:
        kernels.echo_aot(report)
    return 1 if report["failed"] else 0


def _measure_on_cpu(
    model: str | None,
    drafts: list[str] | None,
    dtype: str,
    quantization: str | None,
    seconds: float,
    threads: int | None,
    as_json: bool,
) -> None:
    counts = curves.thread_counts()
    if threads is not None or len(counts) == 1:
        entries = [curves.measure_here(model, drafts, "cpu", dtype, quantization, seconds, threads)]
    else:
        entries = curves.measure_in_children(counts, model, drafts, dtype, quantization, seconds)
    document = _curves(entries)
    if as_json:
        print_json(document)
    else:
        _echo_curves(document)


def _show(as_json: bool) -> None:
    from treespec.planning import cost_measurement as costs

    document = _curves(costs.load_all()) | {"tuned": kernels.stored()}
    if as_json:
        print_json(document)
        return
    if document["curves"]:
        _echo_curves(document, "stored")
    else:
        typer.echo(f"no curves are stored in {document['file']}; run treespec autotune")
    kernels.echo_stored(document["tuned"])


def _curves(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the curve section of the document. `threads` compares stored curves of the first entry."""
    from treespec.planning import cost_measurement as costs

    compared = curves.compare_threads(entries[0]["key"]) if entries else None
    return {"file": str(costs.costs_file()), "curves": entries, "threads": compared}


def _echo_curves(document: dict[str, Any], done: str = "written") -> None:
    curves.echo_curves(document["curves"])
    typer.echo(f"{done} in {document['file']}")
