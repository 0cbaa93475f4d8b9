"""`treespec serve`: an OpenAI-compatible server."""

import json
import logging
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treespec.cli.group import usage_error
from treespec.cli.options import (
    Drafts,
    Nodes,
    choose_target,
    flags,
    read_template,
    spec_config,
    status,
)
from treespec.engine_options import EngineOptions
from treespec.utils.interrupts import raise_on_interrupt

if TYPE_CHECKING:
    from fastapi import FastAPI

    from treespec.llm import LLM
    from treespec.sampling_params import SamplingParams

GRACE = 5  # seconds that running requests get to end after Ctrl-C or SIGTERM
# Seconds that idle connections stay open: longer than in the pools of clients (httpx: 5), which would otherwise send
# requests on connections that are being closed.
KEEP_ALIVE = 75

logger = logging.getLogger("treespec")


@flags(
    EngineOptions,
    "tokenizer",
    "device",
    "dtype",
    "max_num_seqs",
    "max_model_len",
    "compile",
    "generation_config",
    "quantization",
    "suffix_tokens",
)
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="The target: a Hugging Face folder, GGUF file, hub id, smollm2 or embedded. Default: smollm2 if it is "
            "installed, else embedded.",
            show_default=False,
        ),
    ] = None,
    draft: Drafts = None,
    host: Annotated[str, typer.Option("--host", help="Interface to listen on; 0.0.0.0 is all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 is any free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar="TREESPEC_API_KEY",
            help="Key that clients must send. On the command line, other users of the machine see it.",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name", metavar="NAME", help="Name of the model for clients; repeatable. Default: MODEL."
        ),
    ] = None,
    nodes: Nodes = None,
    no_spec: Annotated[bool, typer.Option("--no-spec", help="Plain decoding, unless a request asks for more.")] = False,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            "--speculative-config",
            metavar="JSON",
            help="vLLM's keys method (ngram, suffix, draft_model), model and num_speculative_tokens.",
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option("--chat-template", metavar="F", help="Jinja file that replaces the model's chat template."),
    ] = None,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Share the KV cache of common prefixes between requests.",
        ),
    ] = True,
    tool_call_parser: Annotated[
        str,
        typer.Option(
            "--tool-call-parser",
            help="Format of tool calls: hermes, llama3_json, mistral, qwen3_coder; auto is the template's.",
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str,
        typer.Option("--reasoning-parser", help="Tags of reasoning: think, mistral, none; auto is the template's."),
    ] = "auto",
    request_timeout: Annotated[
        float | None,
        typer.Option("--request-timeout", metavar="SECONDS", help="Longest time of a request; default: any.", min=0.01),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas",
            metavar="N",
            help="Processes with an engine each, which Ray Serve runs behind one port; needs the extra [ray].",
            min=1,
        ),
    ] = None,
    audit: Annotated[
        float,
        typer.Option(
            "--audit",
            metavar="FRACTION",
            help="Share of finished requests to decode again without speculation while the server is idle; differing "
            "tokens are counted and logged.",
            min=0,
            max=1,
        ),
    ] = 0.0,
    max_body_bytes: Annotated[int, typer.Option("--max-body-bytes", metavar="N", help="Largest request.", min=1)] = 4
    << 20,
    **engine_options: Any,
) -> None:
    """Serve the model on an HTTP port with OpenAI's API, and a page that shows token trees at /.

    POST /v1/chat/completions, /v1/completions, /tokenize, /detokenize; GET /v1/models, /health, /version, /metrics.
    """
    try:
        import uvicorn

        from treespec.serve.app import ServerOptions, create_app
        from treespec.serve.output_parser import CALL_FORMATS, REASONING_TAGS

        if replicas is not None:
            from treespec.serve.replicas import serve_replicas
    except ModuleNotFoundError as error:
        extras = "[serve]" if replicas is None else "[serve,ray]"
        raise usage_error(f"serve needs the package {error.name}; install treespec with its extra: {extras}") from error
    from treespec.async_llm import AsyncLLM
    from treespec.frontend.engine_args import EngineArgs
    from treespec.serve.errors import LOOPBACK

    config = {} if speculative_config is None else parse_speculative_config(speculative_config)
    if num_tokens := config.pop("num_speculative_tokens", None):
        if nodes is not None:
            raise usage_error("--nodes and num_speculative_tokens both set the size of drafts; give one of them")
        nodes = str(num_tokens + 1)
    if no_spec and (nodes is not None or config):
        raise usage_error("--no-spec is plain decoding; drop it, or drop --nodes and --speculative-config")
    for option, name, valid in (
        ("--tool-call-parser", tool_call_parser, CALL_FORMATS),
        ("--reasoning-parser", reasoning_parser, [*REASONING_TAGS, "none"]),
    ):
        if name not in ("auto", *valid):
            raise usage_error(f"{option} {name!r}; valid: auto, {', '.join(valid)}")
    if replicas is not None and not port:
        raise usage_error("--replicas: Ray Serve chooses no free port; give a --port other than 0")
    template = None if chat_template is None else read_template(chat_template)
    target = choose_target(model, None)
    target.tell()
    raise_on_interrupt()
    args = EngineArgs(
        model=target.model,
        drafts=draft,
        spec="off" if no_spec else spec_config(nodes, None, None),
        speculative_config=config or None,
        enable_prefix_caching=enable_prefix_caching,
        **engine_options,
    )
    only_loopback = host in LOOPBACK

    def build(engine: AsyncLLM) -> "FastAPI":
        options = ServerOptions(
            model_names=served_model_name or [target.model or "embedded"],
            defaults=default_params(engine.llm, args.generation_config),
            chat_template=template,
            api_key=api_key or None,
            max_body_bytes=max_body_bytes,
            only_loopback=only_loopback,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            request_timeout=request_timeout,
            audit=audit,
        )
        return create_app(engine, options)

    if not only_loopback and not api_key:
        logger.warning("anybody who reaches port %d of %s may use the model: there is no --api-key", port, host)
    if replicas is not None:
        serve_replicas(lambda: build(AsyncLLM.from_engine_args(args)), replicas, host, port)
        return
    with status("loading"):
        engine = AsyncLLM.from_engine_args(args)
    with engine:
        app = build(engine)
        uvicorn.run(app, host=host, port=port, timeout_graceful_shutdown=GRACE, timeout_keep_alive=KEEP_ALIVE)


def parse_speculative_config(text: str) -> dict[str, Any]:
    """Parse `--speculative-config`. `EngineOptions` checks what is in it, but for the number of tokens."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise usage_error(f"--speculative-config is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise usage_error(f'--speculative-config {text}: valid: an object, such as {{"method": "suffix"}}')
    number = config.get("num_speculative_tokens")
    if number is not None and (type(number) is not int or number < 1):
        raise usage_error(f"--speculative-config: num_speculative_tokens={number!r}; valid: an int of at least 1")
    return config


def default_params(llm: "LLM", generation_config: str | os.PathLike[str]) -> "SamplingParams":
    """Return the sampling parameters of requests that give none.

    Where the model's file says nothing, they are OpenAI's: temperature 1, and as many tokens as the context holds.
    """
    from treespec.sampling_params import SamplingParams

    params, unset = llm.get_default_sampling_params(), SamplingParams()
    if generation_config != "treespec" and params.temperature == unset.temperature:
        params.temperature = 1.0
    if params.max_tokens == unset.max_tokens:
        params.max_tokens = None
    return params
