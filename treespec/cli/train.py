"""`treespec train`: train draft models for a target."""

from pathlib import Path
from typing import Annotated

import typer

from treespec.cli.group import print_json, usage_error
from treespec.cli.options import Device, Json
from treespec.utils.interrupts import INTERRUPTED


def train(
    target: Annotated[
        str, typer.Option("--target", metavar="M", help="The target: a folder, a GGUF file or a hub id.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the drafts ssm-1, ssm-2 and so on.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data",
            metavar="FILES_OR_FOLDERS...",
            help="Texts like those that the target will continue: UTF-8 files, or JSON lines with messages, prompt or "
            "text. Groups are a folder's subfolders, or an entry's kind.",
        ),
    ] = None,
    lessons: Annotated[
        Path | None,
        typer.Option("--lessons", metavar="DIR", help="Instead of --data: train on the lessons of an earlier --out."),
    ] = None,
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            "--texts",
            metavar="FILES_OR_FOLDERS...",
            help="Raw texts to pre-train on, by their own next tokens; these need no pass of the target.",
        ),
    ] = None,
    ssms: Annotated[int, typer.Option("--ssms", metavar="N", help="Number of drafts.")] = 3,
    minutes: Annotated[
        float | None, typer.Option("--minutes", metavar="N", help="Time for lessons and training. Default: 60.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            metavar="N",
            help="Instead of --minutes: tokens that the target writes as lessons; reproducible.",
        ),
    ] = None,
    specialise: Annotated[
        str,
        typer.Option(
            "--specialise",
            metavar="HOW",
            help="errors: by what a draft gets wrong; folders: by the groups of the data.",
        ),
    ] = "errors",
    generalist: Annotated[
        bool,
        typer.Option(
            "--generalist", help="Also train a draft on all lessons, for as long as each SSM, to compare them with."
        ),
    ] = False,
    start: Annotated[
        str | None,
        typer.Option("--start", metavar="DRAFT", help="Start from a trained draft of this target, with its size."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", metavar="N", help="Layers of a draft. Default: by this machine's costs.")
    ] = None,
    hidden: Annotated[
        int | None,
        typer.Option(
            "--hidden", metavar="N", help="Width of a draft, a multiple of 64. Default: the target's, or less by costs."
        ),
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option("--vocabulary", metavar="N", help="Most rows of a draft's vocabulary. Default: by costs."),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="Tokens of a lesson.")] = 160,
    head: Annotated[
        str | None,
        typer.Option(
            "--head",
            metavar="KIND",
            help="Train a draft head instead of SSMs, which reads the target's states: eagle3, dflash.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Seed of everything.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train small draft models for a target, from its own continuations of your texts.

    Ctrl-C stops after the current step and keeps what is trained; --resume continues.
    """
    from treespec.training.loop import Paused
    from treespec.training.run import train_drafts

    if minutes is not None and tokens is not None:
        raise usage_error("--minutes and --tokens: give one of them")
    try:
        report = train_drafts(
            target,
            data or (),
            out,
            lessons=lessons,
            texts=texts or (),
            ssms=ssms,
            minutes=minutes,
            tokens=tokens,
            specialise=specialise,
            generalist=generalist,
            start=start,
            layers=layers,
            hidden=hidden,
            vocabulary=vocabulary,
            max_tokens=max_tokens,
            seed=seed,
            head=head,
            device=device,
            resume=resume,
        )
    except Paused:
        typer.echo(f"stopped; drafts trained so far are in {out}; the same command with --resume continues", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_json(report.as_dict())
        return
    typer.echo(str(report))
    names = " ".join(f"--draft {out / name}" for name in [*report.agreement][: report.recommended])
    typer.echo(f'\ntreespec generate --model {target} {names} "..."')
