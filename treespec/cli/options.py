"""Options shared by commands: models, prompt and speculative decoding."""

import functools
import gc
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from treespec.cli.group import UsageError
from treespec.config.configs import SpecConfig
from treespec.sampling_params import SamplingParams
from treespec.startup import smollm2
from treespec.utils.interrupts import raise_on_interrupt
from treespec.utils.options import LIMITS, help_texts

if TYPE_CHECKING:
    from treespec.llm import LLM

Prompt = Annotated[
    str | None,
    typer.Argument(
        help="A question, a text to continue, or token ids ('12 7 301') for a model without a tokenizer. "
        "Read from a pipe if neither PROMPT nor --file is given.",
        show_default=False,
    ),
]


def _model(default: str) -> Any:
    text = "The target: a Hugging Face folder, GGUF file, hub id, smollm2 (if installed) or embedded."
    return typer.Option("--model", metavar="M", help=f"{text} Default: {default}.")


Model = Annotated[str | None, _model("embedded")]
ChatModel = Annotated[str | None, _model("smollm2 if installed, otherwise embedded")]
Drafts = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        metavar="D",
        help="A draft model: a folder, a GGUF file, a hub id, one that comes with the target, such as ssm-1, or all of "
        "the output folder of `treespec train`; repeatable. Default: all that come with the target.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else.")]


@dataclass(frozen=True)
class GenerationFlags:
    """Options of commands that generate text.

    Args:
        file: file to read the prompt from; - is stdin.
        max_tokens: maximum number of new tokens.
        temperature: sampling temperature; 0 is greedy.
        top_p: keep the most likely tokens with this total probability.
        top_k: keep only the k most likely tokens.
        min_p: drop tokens below min_p times the top probability.
        seed: RNG seed; random by default.
        verification: acceptance rule for sampled tokens: coupled (default) or naive emit exactly the tokens of plain
            decoding; rejection or traversal preserve their distribution.
        nodes: tree size: rows of the target pass, including the root; auto chooses by measured costs.
        max_depth: maximum tree depth.
        branching: a fixed tree: children of each node by depth, such as 4,2,1.
        no_spec: plain decoding without drafts.
        check: also decode plainly with the same seed; exit with 1 if a token differs.
        stream: print text as it is generated.
        chat: answer the prompt as a user message, or continue it; by default, answer if the model has a chat template.
        chat_template: Jinja file that replaces the model's chat template.
    """

    file: str | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    verification: str | None = None
    nodes: str | None = None
    max_depth: int | None = None
    branching: str | None = None
    no_spec: bool = False
    check: bool = False
    stream: bool = False
    chat: bool | None = None
    chat_template: str | None = None

    def sampling_params(self, samples: int = 1) -> SamplingParams:
        """Return the sampling parameters from the options that are set."""
        truncation = {name: getattr(self, name) for name in ("top_p", "top_k", "min_p")}
        truncation = {name: value for name, value in truncation.items() if value is not None}
        if truncation and self.temperature == 0:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in truncation)
            raise UsageError(f"{names} without --temperature: temperature 0 always takes the most likely token")
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, n=samples, seed=self.seed, **truncation
        )

    def speculation(self, drafts: list[str] | None) -> tuple[list[str] | None, SpecConfig | str]:
        """Return the drafts to load and the speculation options: none and "off" with --no-spec."""
        tree_options = self.nodes, self.max_depth, self.branching, self.verification
        if not self.no_spec:
            return drafts, self.spec_config()
        if any(value is not None for value in tree_options):
            raise UsageError(
                "--no-spec is plain decoding; omit it, or omit --nodes, --max-depth, --branching and --verification"
            )
        return [], "off"

    def read_template(self) -> str | None:
        """Read the file of --chat-template, if given."""
        file = self.chat_template
        return None if file is None else read_text(file, f"--chat-template {file}")

    def spec_config(self) -> SpecConfig:
        """Return the speculation options that are set."""
        values: dict[str, Any] = {
            "nodes": int(self.nodes) if self.nodes and re.fullmatch(r"[+-]?\d+", self.nodes) else self.nodes,
            "max_depth": self.max_depth,
            "branching": None if self.branching is None else parse_branching(self.branching),
            "verification": self.verification,
        }
        return SpecConfig(**{name: value for name, value in values.items() if value is not None})


_Command = TypeVar("_Command", bound=Callable[..., Any])


def flags(options: type, *names: str) -> Callable[[_Command], _Command]:
    """Add flags to a command for the named fields of a dataclass, or for all.

    A command with a parameter of this class gets an instance, others get the values as keywords. Flags that are not
    given have the field's default, or are an empty list where a list has no default.
    """

    def decorate(command: _Command) -> _Command:
        option_fields = {field.name: field for field in fields(options) if not names or field.name in names}
        parameters = inspect.signature(command).parameters.values()
        instance = next((p.name for p in parameters if p.annotation is options), None)
        others = [p for p in parameters if p.name not in (*option_fields, instance) and p.kind is not p.VAR_KEYWORD]
        flag_parameters = [_flag(field, help_texts(options)[name]) for name, field in option_fields.items()]

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            settings = {name: values.pop(name) for name in option_fields}
            for name, field in option_fields.items():
                if settings[name] is None:
                    settings[name] = () if field.default is MISSING else field.default
            return command(**values, **(settings if instance is None else {instance: options(**settings)}))

        run.__signature__ = inspect.Signature([*others, *flag_parameters])  # type: ignore[attr-defined]
        return cast(_Command, run)

    return decorate


def _flag(field: Field[Any], text: str) -> inspect.Parameter:
    """Return the command parameter for a field; None means not given. The help is the text's first sentence."""
    text = f"{text[0].upper()}{text[1:]}".partition(". ")[0].rstrip(".") + "."
    annotation = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    types, default = annotation.split(" | "), field.default
    numbers = () if "str" in types else (int, float)  # int | str, such as "auto" or 16, is read as text
    kind: Any = next((kind for word in types for kind in (bool, *numbers) if kind.__name__ == word), str)
    if "Sequence[" in types[0]:
        kind = list[str]
    required = default is MISSING and kind is str
    name, choices = field.name.replace("_", "-"), field.metadata.get(LIMITS, {}).get("choices") if kind is str else None
    option = typer.Option(
        f"--{name}/--no-{name}" if kind is bool and default is not False else f"--{name}",
        metavar="|".join(filter(None, choices)) if choices else None,
        help=text if default in (MISSING, None, False, "", ()) else f"{text} Default: {default}.",
        show_default=False,
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else None,
        annotation=Annotated[kind if required else kind | None, option],
    )


def read_prompt(prompt: str | None, file: str | None) -> str:
    """Read the prompt from the argument, a file or a pipe, byte for byte."""
    if prompt is not None and file is not None:
        raise UsageError(f"both a PROMPT and --file {file} were given; use one of them")
    if prompt is not None:
        return prompt
    if file is None and sys.stdin.isatty():
        raise UsageError("no prompt; pass PROMPT or --file F, or pipe it in")
    source = f"the prompt from {'stdin' if file in (None, '-') else file}"
    if not (text := read_text(file or "-", source)):
        raise UsageError(f"{source} is empty; pass at least one token")
    return text


def read_text(file: str, source: str) -> str:
    """Read a file, or stdin for -, byte for byte. Errors name it `source`."""
    data = sys.stdin.buffer.read() if file == "-" else Path(file).expanduser().read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8: {error.reason} at byte {error.start}") from None


def choose_target(model: str | None) -> str | None:
    """Return --model, or its default: SmolLM2 if installed, otherwise None for the embedded model."""
    return smollm2.NAME if model is None and smollm2.install_command() is None else model


def tell_default(model: str | None) -> None:
    """Explain on stderr why the default model is not used, if `choose_target` returned None."""
    if model is None:
        missing = smollm2.install_command()
        typer.echo(f"{smollm2.TITLE} is not installed ({missing}); the embedded model only continues text", err=True)


def request_of(prompt: str, llm: "LLM", chat: bool | None, template: str | None = None) -> Any:
    """Return the prompt as a conversation, or token ids if the model has no tokenizer and the text lists ids.

    With `chat` None, it is a conversation if the model has a chat template or one is given.
    """
    if chat and not has_chat_template(llm, template):
        raise UsageError(
            "--chat: the model has no chat template (not a chat model); pass one with `treespec generate "
            "--chat-template FILE`, or omit --chat to continue the prompt"
        )
    if chat or (chat is None and has_chat_template(llm, template)):
        return [{"role": "user", "content": prompt}]
    if llm.get_tokenizer() is None and re.fullmatch(r"\s*\d+([\s,]+\d+)*[\s,]*", prompt):
        return [int(number) for number in re.findall(r"\d+", prompt)]
    return prompt


def has_chat_template(llm: "LLM", template: str | None) -> bool:
    """Return whether conversations have a template: the given one, or the tokenizer's."""
    return template is not None or bool(getattr(llm.get_tokenizer(), "chat_template", None))


def parse_branching(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise UsageError(f"--branching {text}: valid: children by depth, such as 4,2,1")
    return tuple(map(int, text.split(",")))


def load_llm(
    model: str | None, drafts: list[str] | None, spec: SpecConfig | str | None, max_num_seqs: int = 1, **options: Any
) -> "LLM":
    """Load an engine, by default for one concurrent request. `options` are those of `LLM`."""
    gc.disable()  # importing and loading create little garbage, but collections take 0.4 s of CPU time
    from treespec.llm import LLM

    raise_on_interrupt()
    try:
        llm = LLM(model, drafts, spec, max_num_seqs=max_num_seqs, **options)
    finally:
        gc.enable()
    gc.freeze()  # otherwise a full collection visits 230,000 objects, mostly of torch and transformers, for 0.11 s
    return llm


@contextmanager
def status(doing: str) -> Iterator[None]:
    """Show a status on the terminal while the context is open, including the progress of model loading."""
    if not sys.stderr.isatty():
        yield
        return
    from treespec_weights.progress import shown_by

    shown = None

    def show(text: str) -> None:
        nonlocal shown
        if text != shown:
            print(f"\x1b[2K{text}", end="\r", file=sys.stderr, flush=True)
        shown = text

    def show_progress(part: str, fraction: float) -> None:
        show(f"{doing} ... {part}, {fraction:.0%}")

    show(f"{doing} ...")
    try:
        with shown_by(show_progress):
            yield
    finally:
        show("")
