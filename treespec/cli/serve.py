"""`treespec serve`: an OpenAI-compatible server."""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treespec.cli.group import usage_error
from treespec.cli.options import (
    Drafts,
    GenerationFlags,
    choose_target,
    flags,
    read_template,
    spec_config,
    status,
)
from treespec.config.engine_options import EngineOptions
from treespec.utils.interrupts import raise_on_interrupt
from treespec.utils.options import check_values, option

if TYPE_CHECKING:
    from fastapi import FastAPI

    from treespec.llm import LLM
    from treespec.sampling_params import SamplingParams

GRACE = 5  # seconds that running requests get to end after Ctrl-C or SIGTERM
# Seconds that idle connections stay open: longer than in the pools of clients (httpx: 5), which would otherwise send
# requests on connections that are being closed.
KEEP_ALIVE = 75

logger = logging.getLogger("treespec")


@dataclass(frozen=True)
class ServeFlags:
    """Options of the server.

    Args:
        host: interface to listen on; 0.0.0.0 is all of them.
        port: 0 is any free one.
        api_key: key that clients must send, or $TREESPEC_API_KEY, which other users of the machine do not see.
        served_model_name: name of the model for clients; repeatable, MODEL if not set.
        no_spec: plain decoding, unless a request asks for more.
        speculative_config: JSON of vLLM's keys method (ngram, suffix, draft_model), model and num_speculative_tokens.
        chat_template: Jinja file that replaces the model's chat template.
        enable_prefix_caching: share the KV cache of common prefixes between requests.
        tool_call_parser: format of tool calls: hermes, llama3_json, mistral, qwen3_coder; auto is the template's.
        reasoning_parser: tags of reasoning: think, mistral, none; auto is the template's.
        request_timeout: longest seconds of a request; any if not set.
        replicas: processes with an engine each, which Ray Serve runs behind one port; needs the extra [ray].
        audit: share of finished requests to decode again without speculation while the server is idle; differing tokens
            are counted and logged.
        max_body_bytes: largest request.
    """

    host: str = "127.0.0.1"
    port: int = option(8000, least=0, most=65535)
    api_key: str | None = None
    served_model_name: Sequence[str] = ()
    no_spec: bool = False
    speculative_config: str | None = None
    chat_template: str | None = None
    enable_prefix_caching: bool = True
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    request_timeout: float | None = None
    replicas: int | None = option(None, least=1)
    audit: float = option(0.0, least=0, most=1)
    max_body_bytes: int = option(4 << 20, least=1)

    def __post_init__(self) -> None:
        check_values(self)
        if self.request_timeout is not None and self.request_timeout < 0.01:
            raise usage_error(f"--request-timeout {self.request_timeout}; valid: seconds, at least 0.01")


_ENGINE = """tokenizer device dtype max_num_seqs max_model_len kv_cache_memory_bytes scheduling_policy compile
    generation_config quantization suffix_tokens""".split()


@flags(EngineOptions, *_ENGINE)
@flags(ServeFlags)
@flags(GenerationFlags, "nodes")
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
    *,
    nodes: str | None,
    **values: Any,
) -> None:
    """Serve the model on an HTTP port with OpenAI's API, and a page that shows token trees at /.

    POST /v1/chat/completions, /v1/completions, /tokenize, /detokenize; GET /v1/models, /health, /version, /metrics.
    """
    engine_options = {name: values.pop(name) for name in _ENGINE}
    server = ServeFlags(**values)
    try:
        import uvicorn

        from treespec.serve.app import ServerOptions, create_app
        from treespec.serve.output_parser import CALL_FORMATS, REASONING_TAGS

        if server.replicas is not None:
            from treespec.serve.replicas import serve_replicas
    except ModuleNotFoundError as error:
        extras = "[serve]" if server.replicas is None else "[serve,ray]"
        raise usage_error(f"serve needs the package {error.name}; install treespec with its extra: {extras}") from error
    from treespec.async_llm import AsyncLLM
    from treespec.frontend.engine_args import EngineArgs
    from treespec.serve.errors import LOOPBACK

    config = {} if server.speculative_config is None else parse_speculative_config(server.speculative_config)
    if num_tokens := config.pop("num_speculative_tokens", None):
        if nodes is not None:
            raise usage_error("--nodes and num_speculative_tokens both set the size of drafts; give one of them")
        nodes = str(num_tokens + 1)
    if server.no_spec and (nodes is not None or config):
        raise usage_error("--no-spec is plain decoding; drop it, or drop --nodes and --speculative-config")
    for flag, name, valid in (
        ("--tool-call-parser", server.tool_call_parser, CALL_FORMATS),
        ("--reasoning-parser", server.reasoning_parser, [*REASONING_TAGS, "none"]),
    ):
        if name not in ("auto", *valid):
            raise usage_error(f"{flag} {name!r}; valid: auto, {', '.join(valid)}")
    if server.replicas is not None and not server.port:
        raise usage_error("--replicas: Ray Serve chooses no free port; give a --port other than 0")
    template = None if server.chat_template is None else read_template(server.chat_template)
    target = choose_target(model, None)
    target.tell()
    raise_on_interrupt()
    args = EngineArgs(
        model=target.model,
        drafts=draft,
        spec="off" if server.no_spec else spec_config(nodes, None, None),
        speculative_config=config or None,
        enable_prefix_caching=server.enable_prefix_caching,
        **engine_options,
    )
    only_loopback, api_key = server.host in LOOPBACK, server.api_key or os.environ.get("TREESPEC_API_KEY") or None

    def build(engine: AsyncLLM) -> "FastAPI":
        options = ServerOptions(
            model_names=server.served_model_name or [target.model or "embedded"],
            defaults=default_params(engine.llm, args.generation_config),
            chat_template=template,
            api_key=api_key,
            max_body_bytes=server.max_body_bytes,
            only_loopback=only_loopback,
            tool_call_parser=server.tool_call_parser,
            reasoning_parser=server.reasoning_parser,
            request_timeout=server.request_timeout,
            audit=server.audit,
        )
        return create_app(engine, options)

    if not only_loopback and api_key is None:
        logger.warning(
            "anybody who reaches port %d of %s may use the model: there is no --api-key", server.port, server.host
        )
    if server.replicas is not None:
        serve_replicas(lambda: build(AsyncLLM.from_engine_args(args)), server.replicas, server.host, server.port)
        return
    with status("loading"):
        engine = AsyncLLM.from_engine_args(args)
    with engine:
        app = build(engine)
        uvicorn.run(
            app, host=server.host, port=server.port, timeout_graceful_shutdown=GRACE, timeout_keep_alive=KEEP_ALIVE
        )


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
