"""`treespec train`: train draft models for a target."""

import logging
import shlex
from pathlib import Path
from typing import Any

import typer

from treespec.cli.group import print_json
from treespec.cli.options import Json, flags
from treespec.training.settings import TrainingSettings
from treespec.utils.interrupts import INTERRUPTED


@flags(TrainingSettings)
def train(as_json: Json = False, **settings: Any) -> None:
    """Train small draft models for a target, on its own continuations of your texts, or of prompts that it writes.

    Ctrl-C stops after the current step and keeps the trained drafts; --resume continues.
    """
    from treespec.training.loop import Paused
    from treespec.training.run import train_drafts

    out = Path(settings["out"])
    training, handler = logging.getLogger("treespec.training"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    training.addHandler(handler)
    training.setLevel(logging.INFO)
    try:
        report = train_drafts(**settings)
    except Paused:
        typer.echo(f"stopped; drafts trained so far are in {out}; the same command with --resume continues", err=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        training.removeHandler(handler)
    if as_json:
        print_json(report.as_dict())
        return
    typer.echo(str(report))
    drafts = [word for name in [*report.agreement][: report.recommended] for word in ("--draft", str(out / name))]
    typer.echo(f'\n{shlex.join(["treespec", "generate", "--model", settings["target"], *drafts])} "..."')
