"""`treespec tree`: the token tree of one round, as it was."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treespec.cli.group import print_json, shows_colour, usage_error
from treespec.cli.options import (
    Branching,
    Device,
    Drafts,
    Dtype,
    File,
    Json,
    MaxDepth,
    Model,
    Nodes,
    Prompt,
    Seed,
    Temperature,
    Verification,
    encoded,
    load_llm,
    read_prompt,
    spec_config,
    status,
)

if TYPE_CHECKING:
    from treespec.round_record import RoundRecord

NODES = "16"
FIRST_ROUNDS = 8  # of these the one that accepted most is drawn, where no round was named


def tree(
    prompt: Prompt = None,
    file: File = None,
    model: Model = None,
    draft: Drafts = None,
    nodes: Nodes = None,
    max_depth: MaxDepth = None,
    branching: Branching = None,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    verification: Verification = None,
    number: Annotated[
        int | None,
        typer.Option(
            "--round",
            metavar="N",
            help=f"The round to draw, counted from 1. Default: of the first {FIRST_ROUNDS} the one that accepted most.",
        ),
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="F", help="Write the picture to a file too.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Draw the token tree of a round: who proposed what, and what the target accepted.

    Trees have 16 nodes unless --nodes or --branching says otherwise.
    """
    if number is not None and number < 1:
        raise usage_error(f"--round {number}: rounds count from 1")
    text = read_prompt(prompt, file)
    with status("loading"):
        spec = spec_config(nodes or (None if branching else NODES), max_depth, branching, verification)
        llm = load_llm(model, draft, spec, device, dtype)
    from treespec.drawing import to_svg, to_text
    from treespec.drawing.recording import picture, record_rounds
    from treespec.errors import RequestError

    rounds = record_rounds(llm, encoded(text, llm), number or FIRST_ROUNDS, None, temperature, seed)
    if number is not None and number > len(rounds):
        raise RequestError(f"--round {number}, but the output ended in round {len(rounds)}; valid: 1 to {len(rounds)}")
    shown = rounds[number - 1] if number is not None else max(rounds, key=lambda each: each.accepted)
    drawn = picture(shown, llm.get_tokenizer())
    if svg is not None:
        svg.write_text(to_svg(drawn), encoding="utf-8")
    if as_json:
        print_json(_document(shown, len(rounds), drawn))
    else:
        typer.echo(_heading(shown, rounds, number is None) + "\n")
        typer.echo(to_text(drawn, color=shows_colour(sys.stdout)), color=True)
    if svg is not None:
        typer.echo(f"picture written to {svg}", err=True)
    if not llm.stats()["drafts"]:
        typer.echo("there is no draft: the root is the whole tree; give some with --draft", err=True)


def _heading(shown: "RoundRecord", rounds: "list[RoundRecord]", chosen: bool) -> str:
    if not chosen:
        return f"round {shown.number}"
    accepted = " ".join(str(each.accepted) for each in rounds)
    return f"round {shown.number}, the best of the first {len(rounds)}: they accepted {accepted} drafted tokens"


def _document(shown: "RoundRecord", num_rounds: int, drawn: Any) -> dict[str, Any]:
    return {
        "round": shown.number,
        "rounds": num_rounds,
        "context": shown.context,
        "tokens": shown.tree.tokens.tolist(),
        "texts": drawn.tokens,
        "parents": drawn.parents,
        "depths": shown.tree.depths.tolist(),
        "sources": [list(names) for names in drawn.sources],
        "probs": drawn.probs,
        "path": drawn.path,
        "bonus": shown.bonus,
        "bonus_text": drawn.bonus,
        "emitted": shown.emitted,
    }
