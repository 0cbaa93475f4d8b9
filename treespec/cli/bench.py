"""`treespec bench`: measure the speed against plain decoding and transformers."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from treespec.bench.options import Options
from treespec.cli.group import Command, UsageError, print_json
from treespec.cli.options import Drafts, Json, Model, flags, parse_branching, status
from treespec.config.engine_options import EngineOptions
from treespec.utils.interrupts import raise_on_interrupt

_SEVERAL = (
    "--k-values",
    "--nodes",
    "--batch",
    "--combine",
    "--only",
    "--verification",
    "--data",
    "--texts",
    "--lora-modules",
)
_FLAGS = """prompts samples max_tokens k_values nodes combine batch temperature verification branching repeats warmup
    peers only grow grow_vocab keep threads seed server request_rate max_concurrency""".split()


class SeveralValues(Command):
    """Command with multi-value options: `--nodes 8 16` or `--nodes 8,16`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_flags(args))


def repeat_flags(args: Sequence[str]) -> list[str]:
    """Rewrite `--nodes 8 16` to `--nodes 8 --nodes 16` for multi-value options."""
    result: list[str] = []
    flag, first = None, False
    for arg in args:
        if arg.startswith("-"):
            flag = arg.partition("=")[0]
            flag, first = (flag, "=" not in arg) if flag in _SEVERAL else (None, False)
        elif flag is not None and not first:
            result.append(flag)
        else:
            first = False
        result.append(arg)
    return result


@flags(EngineOptions, "device", "dtype", "compile", "quantization", "draft_vocabulary")
@flags(Options, *_FLAGS)
def bench(
    model: Model = None,
    draft: Drafts = None,
    profile: Annotated[bool, typer.Option("--profile", help="Print the time of a round by stage.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the JSON to FILE.")] = None,
    as_json: Json = False,
    **values: Any,
) -> None:
    """Benchmark plain decoding, chains, trees and transformers in one run.

    All modes use the same weights, prompts and dtype; every batch is decoded by every mode in turn. Prefill is reported
    separately. With --verification: compares verification rules at a temperature, on a fixed tree drafted by SSMs only.
    Several values: --nodes 8 16, or comma-separated.
    """
    for path in (out, values["keep"]):
        if path is not None and not (parent := Path(path).absolute().parent).is_dir():
            raise UsageError(f"{path}: the folder {parent} does not exist")
    for name in ("combine", "only", "verification"):
        values[name] = tuple(word for value in values[name] for word in value.split(",") if word)
    for name in ("k_values", "nodes", "batch"):
        values[name] = _integers(name, values[name])
    if values["branching"] is not None:
        values["branching"] = parse_branching(",".join(values["branching"]))
    raise_on_interrupt()
    options = Options(model=model, drafts=draft, **values)
    document = _measure_server(options) if options.server else _measure(options)
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print_json(document)
    elif options.server:
        from treespec.bench.server import table

        typer.echo(table(document))
    else:
        from treespec.bench.text import body, header

        typer.echo(f"{header(document)}\n\n{body(document, profile)}")


def _integers(name: str, values: Sequence[int | str]) -> tuple[int, ...]:
    """Return distinct whole numbers from words, which may be comma-separated lists."""
    words = [word for value in values for word in str(value).split(",") if word]
    if bad := [word for word in words if not word.isdecimal()]:
        raise UsageError(f"--{name.replace('_', '-')} {bad[0]}: valid: whole numbers, such as 3 5 7")
    return tuple(dict.fromkeys(map(int, words)))


def _measure(options: Options) -> dict[str, Any]:
    from treespec.bench.grow import grown
    from treespec.bench.run import bench as measure

    growing = grown(options, options.grow, options.grow_vocab, options.keep) if options.grow else None
    with growing or nullcontext((options, None)) as (models, target):
        return measure(models, target, status("loading"))


def _measure_server(options: Options) -> dict[str, Any]:
    try:
        from treespec.bench.server import bench_server
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--server needs the package {error.name}; install treespec with its extra: [serve]"
        ) from error
    return bench_server(options)
