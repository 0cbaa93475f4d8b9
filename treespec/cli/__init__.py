"""The command line: `treespec generate | bench | tree | weights | autotune`.

Nothing here imports torch before a command needs it: `treespec --help` answers at once.
"""

import os
import sys
from typing import Annotated

import typer

from treespec import __version__
from treespec.cli import autotune, bench, generate, tree
from treespec.cli.group import Commands
from treespec.interrupts import raise_on_interrupt

_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}

app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)
app.command()(generate.generate)
app.command(cls=bench.SeveralValues)(bench.bench)
app.command()(tree.tree)
app.command()(autotune.autotune)


def main() -> None:
    """Run the command that `sys.argv` names, and exit."""
    if sys.stderr is None:  # closed by the caller, who wants to hear nothing
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        print("error: stdout is closed; give a file, or /dev/null where only the exit code matters", file=sys.stderr)
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):  # a terminal without some character shows "?" instead of a traceback
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    app(prog_name="treespec")


@app.callback(invoke_without_command=True)
def treespec(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Text from a large language model, faster and token for token the same: several small models guess ahead, their
    guesses form one token tree, and one pass of the large model verifies it."""
    if version:
        typer.echo(f"treespec {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command(context_settings=_PASS_ON | {"help_option_names": []})
def weights(ctx: typer.Context) -> None:
    """Safetensors checkpoints: inspect, verify, load, convert, grow, fetch."""
    from treespec_weights.cli import app as weights_app

    raise_on_interrupt()
    raise typer.Exit(weights_app(ctx.args or ["--help"], prog_name="treespec weights", standalone_mode=False) or 0)
