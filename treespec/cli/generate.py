"""`treespec generate`: continue a prompt, and prove that the tokens are those of plain decoding."""

import itertools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treespec.cli.group import print_json, shows_colour, table, usage_error
from treespec.cli.options import (
    Branching,
    Compile,
    Device,
    Drafts,
    Dtype,
    File,
    Json,
    MaxDepth,
    Model,
    Nodes,
    Prompt,
    encoded,
    load_llm,
    read_prompt,
    spec_config,
    status,
)

if TYPE_CHECKING:
    from treespec.llm import LLM
    from treespec.request import RequestOutput, SamplingParams, StreamChunk


def generate(
    prompt: Prompt = None,
    file: File = None,
    model: Model = None,
    draft: Drafts = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="The most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", metavar="T", help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", metavar="S", help="The seed of sampling.")] = None,
    nodes: Nodes = None,
    max_depth: MaxDepth = None,
    branching: Branching = None,
    no_spec: Annotated[bool, typer.Option("--no-spec", help="Plain decoding, without drafts.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Decode plainly too, with the same seed; exit 1 where a token differs.")
    ] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    compile: Compile = False,
    as_json: Json = False,
) -> None:
    """Continue a prompt.

    The text goes to stdout; what it took goes to stderr.
    """
    if stream and as_json:
        raise usage_error("--stream prints text as it comes, --json one document at the end; drop one of them")
    if no_spec and (nodes, max_depth, branching) != (None, None, None):
        raise usage_error("--no-spec is plain decoding; drop it, or drop --nodes, --max-depth and --branching")
    text = read_prompt(prompt, file)

    def params(seed: int | None) -> "SamplingParams":
        from treespec.params import SamplingParams

        return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)

    with status("loading"):
        params(seed)  # refuses bad values before anything is loaded
        spec = spec_config(nodes, max_depth, branching)
        llm = load_llm(model, [] if no_spec else draft, "off" if no_spec else spec, device, dtype, compile)
    given = encoded(text, llm)
    shown = text if isinstance(given, str) else " ".join(map(str, given))
    if shows_colour(sys.stdout):
        shown = typer.style(shown, dim=True)
    if stream:
        typer.echo(shown, nl=False)
    output = _decode(llm, given, params(seed), None, _print_chunk if stream else None)
    if stream:
        typer.echo()
    elif not as_json:
        typer.echo(shown + _readable(output))
    difference = None
    if check:
        plain = _decode(llm, given, params(output.metrics.seed), "off", None)
        difference = first_difference(output.outputs[0].token_ids, plain.outputs[0].token_ids)
    if as_json:
        print_json(_document(output, check, difference))
    else:
        typer.echo(_summary(output), err=True)
    if difference is not None:
        typer.echo(f"NOT identical to plain decoding: {_describe(difference, llm)}", err=True)
        raise typer.Exit(1)
    if check:
        typer.echo(f"identical to plain decoding: {_count(output.metrics.generated_tokens, 'token')}", err=True)


def first_difference(tokens: list[int], plain: list[int]) -> dict[str, int | None] | None:
    """The first position where two outputs differ and the token of each there, None where one has ended."""
    for index, (ours, theirs) in enumerate(itertools.zip_longest(tokens, plain)):
        if ours != theirs:
            return {"index": index, "token": ours, "plain_token": theirs}
    return None


def _decode(
    llm: "LLM", prompt: Any, params: Any, spec: str | None, on_chunk: "Callable[[StreamChunk], None] | None"
) -> "RequestOutput":
    """Generate, with a progress bar on a terminal unless the text itself shows the progress."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    hidden = on_chunk is not None or not sys.stderr.isatty()
    doing = "decoding plainly" if spec == "off" else "generating"
    output = None
    with tqdm(total=params.max_tokens, desc=doing, unit="token", leave=False, disable=hidden) as bar:
        for chunk in llm.stream(prompt, params, spec):
            bar.update(len(chunk.token_ids))
            if on_chunk is not None:
                on_chunk(chunk)
            output = chunk.output
    assert output is not None, "a stream ends with its output"
    return output


def _print_chunk(chunk: "StreamChunk") -> None:
    text = chunk.text if chunk.text is not None else "".join(f" {token}" for token in chunk.token_ids)
    sys.stdout.write(text)
    sys.stdout.flush()


def _readable(output: "RequestOutput") -> str:
    completion = output.outputs[0]
    return completion.text if completion.text is not None else "".join(f" {token}" for token in completion.token_ids)


def _document(output: "RequestOutput", check: bool, difference: dict[str, int | None] | None) -> dict[str, Any]:
    completion, metrics = output.outputs[0], output.metrics
    document: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "target_passes": metrics.target_passes,
        "acceptance_length": metrics.acceptance_length,
        "accepted_by_source": metrics.accepted_by_source,
        "seconds": metrics.seconds,
        "tokens_per_second": metrics.generated_tokens / metrics.seconds,
    }
    if check:
        document["identical"] = difference is None
    if difference is not None:
        document["first_difference"] = difference
    return document


def _summary(output: "RequestOutput") -> str:
    """What the output took, for a reader."""
    metrics = output.metrics
    tokens, passes = metrics.generated_tokens, metrics.target_passes
    lines = [
        "",
        f"{_count(tokens, 'token')} in {metrics.seconds:.2f} s ({tokens / metrics.seconds:.0f} tokens/s), "
        f"finish reason: {output.outputs[0].finish_reason}",
        f"{_count(passes, 'target pass')}, acceptance length {metrics.acceptance_length:.2f} tokens per pass",
    ]
    if metrics.accepted_by_source:
        by, only = metrics.accepted_by_source, metrics.accepted_only_by_source
        rows = [(name, str(by[name]), str(only.get(name, 0))) for name in sorted(by)]
        lines += ["", table([("accepted by source", "tokens", "it alone"), *rows]), ""]
    return "\n".join(lines)


def _describe(difference: dict[str, int | None], llm: "LLM") -> str:
    tokenizer = llm.get_tokenizer()

    def name(token: int | None) -> str:
        if token is None:
            return "the end"
        return f"token {token}" + (f" ({tokenizer.decode([token])!r})" if tokenizer is not None else "")

    ours, plain = name(difference["token"]), name(difference["plain_token"])
    return f"output position {difference['index']} (counted from 0) has {ours}, plain decoding {plain}"


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
