"""The commands behind `weights/load_model.py` and `treespec weights`."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm  # type: ignore[import-untyped]

from treespec_weights.describe import describe, describe_verification
from treespec_weights.errors import CheckpointError
from treespec_weights.inspection import compare_draft, inspect_checkpoint
from treespec_weights.verify import verify_checkpoint

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Folder = Annotated[Path, typer.Argument(help="A checkpoint folder: config.json and safetensors.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Drafts = Annotated[list[Path] | None, typer.Option("--draft", help="Compare a draft's folder; may be repeated.")]


@app.callback()
def commands() -> None:
    """Look into safetensors checkpoints."""


@app.command()
def inspect(folder: Folder, draft: Drafts = None, as_json: Json = False) -> None:
    """Show what a checkpoint is: family, shapes, dtypes, memory, and what a draft shares with it."""
    with _user_errors(as_json):
        report = inspect_checkpoint(folder)
        report["drafts"] = [compare_draft(report, inspect_checkpoint(path)) for path in draft or []]
    typer.echo(json.dumps(report, indent=2) if as_json else describe(report))


@app.command()
def verify(folder: Folder, as_json: Json = False) -> None:
    """Check a checkpoint: files, index, config, tokenizer, names, shapes, every value. Exit code 1 on a problem."""
    with _user_errors(as_json), tqdm(unit="value", unit_scale=True, leave=False, disable=not _terminal()) as bar:

        def advance(scanned: int, total: int) -> None:
            bar.total = total
            bar.update(scanned - bar.n)

        result = verify_checkpoint(folder, advance)
    if as_json:
        problems = [problem._asdict() for problem in result.problems]
        checks = [{"name": c.name, "done": c.done, "problems": len(c.problems)} for c in result.checks]
        typer.echo(
            json.dumps({"folder": str(folder), "ok": result.ok, "checks": checks, "problems": problems}, indent=2)
        )
    else:
        typer.echo(describe_verification(folder, result))
    raise typer.Exit(0 if result.ok else 1)


@contextmanager
def _user_errors(as_json: bool) -> Iterator[None]:
    """Turns an error of the user's into exit code 2 and a message: JSON on stdout, or text on stderr."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        if as_json:
            typer.echo(json.dumps({"error": {"type": type(error).__name__, "message": str(error)}}, indent=2))
        else:
            typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def _terminal() -> bool:
    return sys.stderr.isatty()
