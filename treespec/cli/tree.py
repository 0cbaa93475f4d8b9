"""`treespec tree`: draw the token tree of one round."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treespec.cli import options
from treespec.cli.group import UsageError, print_json, uses_colour
from treespec.config.engine_options import EngineOptions
from treespec.errors import RequestError

if TYPE_CHECKING:
    from treespec.engine.round_record import RoundRecord

NODES = "16"
FIRST_ROUNDS = 8  # the default of --round is the one of these first rounds that accepted the most tokens


@options.flags(EngineOptions, "device", "dtype")
@options.flags(options.GenerationFlags, *"file nodes max_depth branching temperature seed verification chat".split())
def tree(
    prompt: options.Prompt = None,
    model: options.ChatModel = None,
    draft: options.Drafts = None,
    number: Annotated[
        int | None,
        typer.Option(
            "--round",
            metavar="N",
            help=f"The round to draw, from 1. Default: the best of the first {FIRST_ROUNDS}, by accepted tokens.",
        ),
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="F", help="Also write an SVG to F.")] = None,
    as_json: options.Json = False,
    *,
    decoding: options.GenerationFlags,
    **engine: Any,
) -> None:
    """Draw the token tree of a round with sources, probabilities and the accepted path.

    Trees have 16 nodes by default (--nodes, --branching).
    """
    if number is not None and number < 1:
        raise UsageError(f"--round {number}: rounds count from 1")
    text, model = options.read_prompt(prompt, decoding.file), options.choose_target(model)
    with options.status("loading"):
        if decoding.branching is None:
            decoding = replace(decoding, nodes=decoding.nodes or NODES)
        llm = options.load_llm(model, draft, decoding.spec_config(), **engine)
    if not as_json:
        options.tell_default(model)
    from treespec.drawing import to_svg, to_text
    from treespec.drawing.recording import picture, record_rounds

    inputs = options.request_of(text, llm, decoding.chat)
    rounds = record_rounds(llm, inputs, number or FIRST_ROUNDS, decoding.temperature, decoding.seed)
    if number is not None and number > len(rounds):
        raise RequestError(f"--round {number}, but the output ended in round {len(rounds)}; valid: 1 to {len(rounds)}")
    chosen_record = rounds[number - 1] if number is not None else max(rounds, key=lambda record: record.accepted)
    drawn = picture(chosen_record, llm.get_tokenizer())
    if svg is not None:
        svg.write_text(to_svg(drawn), encoding="utf-8")
    if as_json:
        print_json(_document(chosen_record, len(rounds), drawn))
    else:
        accepted = " ".join(str(record.accepted) for record in rounds)
        choice = f", the best of the first {len(rounds)}: they accepted {accepted} drafted tokens"
        typer.echo(f"round {chosen_record.number}{choice if number is None else ''}\n")
        typer.echo(to_text(drawn, color=uses_colour(sys.stdout)), color=True)
    if svg is not None:
        typer.echo(f"picture written to {svg}", err=True)
    if not llm.stats()["drafts"] and len(chosen_record.tree) == 1:
        typer.echo("no drafts: the tree is only its root; add drafts with --draft", err=True)


def _document(record: "RoundRecord", num_rounds: int, drawn: Any) -> dict[str, Any]:
    return {
        "round": record.number,
        "rounds": num_rounds,
        "context": record.context,
        "tokens": record.tree.tokens.tolist(),
        "texts": drawn.tokens,
        "parents": drawn.parents,
        "depths": record.tree.depths.tolist(),
        "sources": [list(names) for names in drawn.sources],
        "probs": drawn.probs,
        "path": drawn.path,
        "bonus": record.bonus,
        "bonus_text": drawn.bonus,
        "emitted": record.emitted,
    }
