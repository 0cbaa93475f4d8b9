"""Command line interface: `treespec generate | chat | serve | bench | tree | train | weights | autotune`.

Commands import torch lazily, so that `treespec --help` is fast.
"""

import sys
from typing import Annotated

import typer

from treespec.cli import autotune, bench, chat, generate, serve, train, tree
from treespec.cli.group import Commands
from treespec.utils.interrupts import raise_on_interrupt
from treespec.version import __version__

_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}

# Rich's tables truncate flag names in narrow terminals.
app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(generate.generate)
app.command()(chat.chat)
app.command(cls=bench.SeveralValues)(serve.serve)
app.command(cls=bench.SeveralValues)(bench.bench)
app.command()(tree.tree)
app.command(cls=bench.SeveralValues)(train.train)
app.command()(autotune.autotune)


def main() -> None:
    """Run the command in `sys.argv` and exit."""
    for stream in (sys.stdout, sys.stderr):  # prints "?" for characters that the terminal cannot encode
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    app(prog_name="treespec")


@app.callback(invoke_without_command=True)
def treespec(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Lossless speculative decoding: several draft models propose a merged token tree, which the target verifies in one
    pass."""
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
