"""Error handling of commands: user errors become a message and exit code 2."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from treespec.errors import TreespecError
from treespec.utils.interrupts import INTERRUPTED, print_interrupted

# Depending on typer's version, UsageError comes from its vendored click or from the click package.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def run_reporting(main: Callable[..., Any], args: Sequence[str] | None, **options: Any) -> NoReturn:
    """Run click's `main`, and report user errors as text or, with --json, as JSON."""
    argv = list(sys.argv[1:] if args is None else args)
    as_json = "--json" in (argv[: argv.index("--")] if "--" in argv else argv)
    try:
        code = main(argv, **(options | {"standalone_mode": False}))
    except UsageError as error:
        _report("UsageError", error.format_message(), as_json)  # type: ignore[attr-defined]
        code = 2
    except (ValueError, OSError) as error:
        from treespec_weights.errors import CheckpointError, HubError, OptionError

        if not isinstance(error, TreespecError | CheckpointError | HubError | OptionError | OSError):
            raise
        _report(type(error).__name__, str(error), as_json)
        code = 2
    if code == INTERRUPTED:  # typer's exit code for KeyboardInterrupt
        if as_json:
            _report("KeyboardInterrupt", "interrupted", as_json)
        else:
            print_interrupted()
    try:
        sys.stdout.flush()
    except OSError:  # the reader has gone, as with `| head`: Python would retry at exit and change the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code or 0)


class Commands(TyperGroup):
    def main(self, args: Sequence[str] | None = None, **options: Any) -> NoReturn:  # type: ignore[override]
        run_reporting(super().main, args, **options)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except UsageError as error:
            raise UsageError(f"{error} Valid: {', '.join(self.list_commands(ctx))}") from None


class Command(TyperCommand):
    def main(self, args: Sequence[str] | None = None, **options: Any) -> NoReturn:  # type: ignore[override]
        run_reporting(super().main, args, **options)


def _report(kind: str, message: str, as_json: bool) -> None:
    if as_json:
        print_json({"error": {"type": kind, "message": message}})
    else:
        typer.echo(f"error: {message}", err=True)


def print_json(document: dict[str, Any]) -> None:
    """Print a command's JSON document, one line per key."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in document.items())
    typer.echo(f"{{\n{lines}\n}}")


def uses_colour(stream: TextIO) -> bool:
    """Return whether to colour output on a stream (a terminal, see https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
