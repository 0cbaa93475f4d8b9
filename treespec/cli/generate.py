"""`treespec generate`: continue a prompt or answer a question. --check compares with plain decoding."""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treespec.cli import options
from treespec.cli.group import UsageError, print_json, uses_colour
from treespec.config.configs import RANDOM_DRAWS
from treespec.config.engine_options import EngineOptions
from treespec.lora import LoRARequest
from treespec.utils.tables import table

if TYPE_CHECKING:
    from treespec.llm import LLM
    from treespec.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk

MAX_SEQS = 8  # samples decoded concurrently
MIN_PAIRS = 3  # minimum pairs of runs for measuring a speed-up
MEASURED_SECONDS = 3.0  # minimum seconds of these runs


@options.flags(EngineOptions, "device", "dtype", "compile", "quantization", "draft_vocabulary")
@options.flags(options.GenerationFlags)
def generate(
    prompt: options.Prompt = None,
    model: options.ChatModel = None,
    draft: options.Drafts = None,
    samples: Annotated[
        int, typer.Option("-n", "--samples", metavar="N", help="Number of outputs; more than 1 needs a temperature.")
    ] = 1,
    lora: Annotated[
        str | None, typer.Option("--lora", metavar="FOLDER", help="A LoRA adapter of the model, in PEFT's format.")
    ] = None,
    as_json: options.Json = False,
    *,
    decoding: options.GenerationFlags,
    **engine: Any,
) -> None:
    """Answer a question with a chat model, or continue a prompt.

    Prints the text to stdout and metrics to stderr.
    """
    stream, check, temperature = decoding.stream, decoding.check, decoding.temperature
    if stream and as_json:
        raise UsageError("--stream prints text incrementally, --json one document at the end; use one of them")
    if stream and samples > 1:
        raise UsageError(f"--stream prints one text, and -n {samples} generates several; use one of them")
    if check and temperature > 0 and decoding.verification in RANDOM_DRAWS:
        raise UsageError(
            f"--check compares tokens, and --verification {decoding.verification} preserves the distribution of plain "
            "decoding, not its tokens; use --verification coupled or naive, or omit --check"
        )
    if decoding.chat_template is not None and decoding.chat is False:
        raise UsageError("--no-chat does not use --chat-template; omit one of them")
    model = options.choose_target(model)
    template = decoding.read_template()
    text = options.read_prompt(prompt, decoding.file)

    with options.status("loading"):
        params = decoding.sampling_params(samples)
        drafts, spec = decoding.speculation(draft)
        llm = options.load_llm(model, drafts, spec, min(samples, MAX_SEQS), enable_lora=lora is not None, **engine)
    if not as_json:
        options.tell_default(model)
    inputs = options.request_of(text, llm, decoding.chat, template)
    shown = text if isinstance(inputs, str) else " ".join(str(token) for token in inputs if isinstance(token, int))
    if uses_colour(sys.stdout):
        shown = typer.style(shown, dim=True)
    if stream:
        typer.echo(shown, nl=False)
    decode = partial(_decode, llm, inputs, template, lora)
    show = (lambda chunk: typer.echo(_text_or_ids(chunk), nl=False)) if stream else None
    output = decode(params, None, show)
    if stream:
        typer.echo()
    elif not as_json:
        for completion in output.outputs:
            if samples > 1:
                typer.echo(f"--- output {completion.index + 1} of {samples} ---")
            typer.echo(shown + _text_or_ids(completion))
    same_seed = replace(params, seed=output.metrics.seed)
    difference = first_difference(output, decode(same_seed, "off")) if check else None
    if as_json:
        print_json(_document(output, check, difference))
    else:
        typer.echo(summary(output, temperature > 0), err=True)
    plainly = "plain decoding" + (f" with seed {output.metrics.seed}" if temperature > 0 else "")
    if difference is not None:
        typer.echo(f"NOT identical to {plainly}: {_describe(difference, llm)}", err=True)
        raise typer.Exit(1)
    if check:
        typer.echo(f"identical to {plainly}: {_count(output.metrics.generated_tokens, 'token')}", err=True)
    if check and not decoding.no_spec and not as_json:
        with options.status("measuring the speed-up"):
            ours, plain = (partial(decode, same_seed, spec, lambda chunk: None) for spec in (None, "off"))
            pairs = pairs_of_seconds(lambda: ours().metrics.seconds, lambda: plain().metrics.seconds)
        typer.echo(speed_up(output.metrics.generated_tokens, pairs), err=True)


def pairs_of_seconds(speculative: Callable[[], float], plain: Callable[[], float]) -> list[tuple[float, float]]:
    """Return the seconds of pairs of warm runs. Every other pair starts with the plain run, since machines drift."""
    pairs: list[tuple[float, float]] = []
    while len(pairs) < MIN_PAIRS or sum(map(sum, pairs)) < MEASURED_SECONDS:
        if len(pairs) % 2 == 0:
            pairs.append((speculative(), plain()))
        else:
            pairs.append((plain(), speculative())[::-1])
    return pairs


def speed_up(tokens: int, pairs: Sequence[tuple[float, float]]) -> str:
    """Format the speed-up from `pairs_of_seconds`, with `tokens` tokens generated per run."""
    ratio = median(plain / speculative for speculative, plain in pairs)
    fast, slow = (tokens / median(seconds) for seconds in zip(*pairs, strict=True))
    return (
        f"{ratio:.2f} times as fast as plain decoding: {fast:.0f} instead of {slow:.0f} tokens/s "
        f"(medians of {len(pairs)} pairs of warm runs)"
    )


def first_difference(ours: "RequestOutput", plain: "RequestOutput") -> dict[str, Any] | None:
    """Return the first position where outputs differ, both tokens (None past the end), and the index of the output."""
    for completion, other in zip(ours.outputs, plain.outputs, strict=True):
        for index, (token, expected) in enumerate(itertools.zip_longest(completion.token_ids, other.token_ids)):
            if token != expected:
                output = {"output": completion.index} if len(ours.outputs) > 1 else {}
                return output | {"index": index, "token": token, "plain_token": expected}
    return None


def _decode(
    llm: "LLM",
    prompt: Any,
    template: str | None,
    lora: str | None,
    params: Any,
    spec: str | None,
    on_chunk: "Callable[[StreamChunk], None] | None" = None,
) -> "RequestOutput":
    """Generate for a prompt or conversation, with a progress bar on terminals unless streaming."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    hidden = on_chunk is not None or not sys.stderr.isatty()
    activity = "decoding plainly" if spec == "off" else "generating"
    adapter = None if lora is None else LoRARequest(lora, 1, lora)
    output = None
    with tqdm(total=params.max_tokens * params.n, desc=activity, unit="token", leave=False, disable=hidden) as bar:
        for chunk in llm.stream(prompt, params, spec, chat_template=template, lora_request=adapter):
            bar.update(len(chunk.token_ids))
            if on_chunk is not None:
                on_chunk(chunk)
            output = chunk.output
    assert output is not None, "a stream ends with its output"
    return output


def _text_or_ids(output: "CompletionOutput | StreamChunk") -> str:
    return output.text if output.text is not None else "".join(f" {token}" for token in output.token_ids)


def _document(output: "RequestOutput", check: bool, difference: dict[str, Any] | None) -> dict[str, Any]:
    metrics, names = output.metrics, ("text", "token_ids", "finish_reason")
    completions = [{name: getattr(completion, name) for name in names} for completion in output.outputs]
    document: dict[str, Any] = completions[0] | {
        "target_passes": metrics.target_passes,
        "acceptance_length": metrics.acceptance_length,
        "accepted_by_source": metrics.accepted_by_source,
        "seconds": metrics.seconds,
        "tokens_per_second": metrics.generated_tokens / metrics.seconds,
        "seed": metrics.seed,
    }
    if len(completions) > 1:
        document["outputs"] = completions
    if check:
        document["identical"] = difference is None
    if difference is not None:
        document["first_difference"] = difference
    return document


def summary(output: "RequestOutput", sampled: bool) -> str:
    """Format the metrics, summed over outputs."""
    metrics = output.metrics
    reasons = ", ".join(str(completion.finish_reason) for completion in output.outputs)
    tokens, passes = metrics.generated_tokens, metrics.target_passes
    lines = [
        "",
        f"{_count(tokens, 'token')} in {_count(passes, 'target pass')} ({metrics.acceptance_length:.2f} per pass): "
        + ", ".join(_origins(metrics)),
        f"{_count(tokens, 'token')} in {metrics.seconds:.2f} s ({tokens / metrics.seconds:.0f} tokens/s), "
        f"finish reason: {reasons}" + (f", seed {metrics.seed}" if sampled else ""),
    ]
    if metrics.accepted_by_source:
        by, only = metrics.accepted_by_source, metrics.accepted_only_by_source
        rows = [(name, str(by[name]), str(only.get(name, 0))) for name in sorted(by)]
        lines += ["", table([("accepted by source", "tokens", "only it"), *rows]), ""]
    return "\n".join(lines)


def _origins(metrics: "RequestMetrics") -> Iterator[str]:
    """Yield the numbers of tokens guessed by each kind of source and added by the target; each token counts once."""
    drafts = sorted(metrics.accepted_by_source.keys() - {"lookup"})
    looked_up = metrics.accepted_by_source.get("lookup", 0)
    if drafts:
        looked_up = metrics.accepted_only_by_source.get("lookup", 0)
        yield f"{metrics.accepted_tokens - looked_up} guessed by {' + '.join(drafts)}"
    if looked_up:
        yield f"{looked_up} by lookup alone" if drafts else f"{looked_up} guessed by lookup"
    yield f"{metrics.generated_tokens - metrics.accepted_tokens} by the target itself"


def _describe(difference: dict[str, Any], llm: "LLM") -> str:
    tokenizer = llm.get_tokenizer()

    def name(token: int | None) -> str:
        if token is None:
            return "the end"
        return f"token {token}" + (f" ({tokenizer.decode([token])!r})" if tokenizer is not None else "")

    ours, plain = name(difference["token"]), name(difference["plain_token"])
    position = f"output {difference['output'] + 1}, position" if "output" in difference else "output position"
    return f"{position} {difference['index']} (counted from 0) has {ours}, plain decoding {plain}"


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
