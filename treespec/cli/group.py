"""How commands end: one place turns every error of the user's into a message and exit code 2."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from treespec.interrupts import INTERRUPTED, print_interrupted

# UsageError is in typer's own copy of click or in the package click, depending on typer's version.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def usage_error(message: str) -> Exception:
    """An error in how a command was called, found without loading anything."""
    return UsageError(message)


def run_reporting(main: Callable[..., Any], args: Sequence[str] | None, **options: Any) -> NoReturn:
    """Run click's `main`. Errors that a user can cause are reported as text or, with --json, as JSON."""
    given = list(sys.argv[1:] if args is None else args)
    as_json = "--json" in (given[: given.index("--")] if "--" in given else given)
    try:
        code = main(given, **(options | {"standalone_mode": False}))
    except UsageError as error:
        _report("UsageError", error.format_message(), as_json)  # type: ignore[attr-defined]
        code = 2
    except (ValueError, OSError) as error:
        if not _is_users(error):
            raise
        _report(type(error).__name__, str(error), as_json)
        code = 2
    if code == INTERRUPTED:  # what typer makes of KeyboardInterrupt
        if as_json:
            _report("KeyboardInterrupt", "interrupted", as_json)
        else:
            print_interrupted()
    _give_up_full(sys.stdout)
    sys.exit(code or 0)


class Commands(TyperGroup):
    """A group of commands."""

    def main(self, args: Sequence[str] | None = None, **options: Any) -> NoReturn:  # type: ignore[override]
        run_reporting(super().main, args, **options)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except UsageError as error:
            raise usage_error(f"{error} Valid: {', '.join(self.list_commands(ctx))}") from None


class Command(TyperCommand):
    """A command that stands alone."""

    def main(self, args: Sequence[str] | None = None, **options: Any) -> NoReturn:  # type: ignore[override]
        run_reporting(super().main, args, **options)


def _is_users(error: Exception) -> bool:
    from treespec.errors import CheckpointError, TreespecError

    return isinstance(error, TreespecError | CheckpointError | OSError)


def _report(kind: str, message: str, as_json: bool) -> None:
    if as_json:
        try:
            print_json({"error": {"type": kind, "message": message}})
        except OSError:  # nothing can be written there: a full disk, which may be what is reported
            as_json = False
    if not as_json:
        typer.echo(f"error: {message}", err=True)


def _give_up_full(stream: TextIO) -> None:
    """Drop what a stream could not write: Python would try it once more at its end, and exit with a code of its own."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_json(document: dict[str, Any]) -> None:
    """The one JSON document of a command, a line per key."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in document.items())
    typer.echo(f"{{\n{lines}\n}}")


def shows_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal whose user wants colour (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Lines of aligned columns: the first to the left, numbers to the right. The first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
