"""`treespec autotune`: measure what this machine's passes cost, once, so that every start knows it."""

import sys
from typing import Annotated, Any

import typer

from treespec.cli.group import print_json, table, usage_error
from treespec.cli.options import Device, Drafts, Dtype, Json, Model, load_llm, status


def _not_yet(option: typer.CallbackParam, value: Any) -> Any:
    if value:
        raise usage_error(
            f"{option.opts[0]} is not implemented yet: kernels are not tuned so far; valid now: --model, --draft, "
            "--device, --dtype, --seconds, --show, --json"
        )
    return value


def _pending(name: str) -> Any:
    """An option that the contract names and this version refuses."""
    return typer.Option(name, hidden=True, callback=_not_yet)


def autotune(
    model: Model = None,
    draft: Drafts = None,
    show: Annotated[bool, typer.Option("--show", help="Print the stored curves; measure nothing.")] = False,
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", help="About how long to measure.")] = 5.0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
    aot: Annotated[bool, _pending("--aot")] = False,
    heads: Annotated[int | None, _pending("--heads")] = None,
    kv_heads: Annotated[int | None, _pending("--kv-heads")] = None,
    head_dim: Annotated[int | None, _pending("--head-dim")] = None,
    nodes: Annotated[str | None, _pending("--nodes")] = None,
    context: Annotated[int | None, _pending("--context")] = None,
) -> None:
    """Measure how long a target pass takes over 1 to 64 rows, and a level of drafting.

    From this "auto" decides how large a tree is worth its pass. The curve is kept in the user's cache folder and used
    by every later start with the same models, dtype and threads on this machine; without it each start measures
    for a second.
    """
    if not 0 < seconds <= 3600:
        raise usage_error(f"--seconds {seconds:g}: valid are more than 0 and at most 3600")
    from treespec import costs

    if show:
        entries = costs.load_all()
    else:
        with status("loading"):
            llm = load_llm(model, draft, None, device, dtype)
        entries = [_measure(llm, seconds)]
    file = costs.costs_file()
    if as_json:
        print_json({"file": str(file), "curves": entries})
        return
    for entry in entries:
        typer.echo(_describe(entry) + "\n")
    if show and not entries:
        typer.echo(f"no curves are stored in {file}; run treespec autotune")
    else:
        typer.echo(f"{'stored' if show else 'written'} in {file}")


def _measure(llm: Any, seconds: float) -> dict[str, Any]:
    """Measure an engine's curve and store it; the entry that was stored."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    from treespec import costs

    engine = llm.engine
    shown = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"
    with tqdm(desc="measuring", total=1.0, leave=False, bar_format=shown, disable=not sys.stderr.isatty()) as bar:
        curve = costs.measure(engine.runner, engine.ssms, seconds, lambda fraction: bar.update(fraction - bar.n))
    key = costs.cost_key(engine.runner, engine.ssms, llm.config.num_threads)
    names = [engine.runner.target.config.folder.name, *(engine.ssms.names if engine.ssms else ())]
    costs.save(curve, key, names=names)
    return next(entry for entry in costs.load_all() if entry["key"] == key)


def _describe(entry: dict[str, Any]) -> str:
    """A stored curve for a reader: where it holds, and the table."""
    key, rows, times = entry["key"], entry["rows"], [1000 * s for s in entry["verify_seconds"]]
    names = entry.get("names") or ["target", *(f"draft {i}" for i in range(1, len(key["models"])))]
    models = [f"{name} ({shape[0]} x {shape[1]})" for name, shape in zip(names, key["models"], strict=False)]
    threads = f"{key['threads']} thread{'' if key['threads'] == 1 else 's'}"
    lines = [
        f"machine  {key['processor']}, {key['device']}, {threads}, torch {key['torch']}",
        f"target   {models[0]}, {key['dtype']}",
    ]
    if models[1:]:
        lines.append(
            f"drafts   {', '.join(models[1:])}: {1000 * entry['draft_seconds']:.2f} ms per level, all together"
        )
    body = [(str(n), f"{ms:.2f}", f"{ms / times[0]:.2f}", f"{n / ms:.2f}") for n, ms in zip(rows, times, strict=True)]
    return "\n".join([*lines, "", table([("rows", "ms per pass", "relative", "rows per ms"), *body])])
