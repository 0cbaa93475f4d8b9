"""`treespec serve`: an OpenAI-compatible server."""

import gc
import json
import logging
import os
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treespec.cli.group import UsageError
from treespec.cli.options import Drafts, GenerationFlags, choose_target, flags, read_text, status, tell_default
from treespec.config.engine_options import EngineOptions
from treespec.serve.options import ServerOptions
from treespec.utils.interrupts import raise_on_interrupt

if TYPE_CHECKING:
    from fastapi import FastAPI

    from treespec.llm import LLM
    from treespec.sampling_params import SamplingParams

logger = logging.getLogger("treespec")


_ENGINE = """tokenizer device dtype max_num_seqs max_num_batched_tokens max_model_len kv_cache_memory_bytes
    scheduling_policy compile generation_config quantization suffix_tokens""".split()  # options of `LLM`


@flags(EngineOptions, *_ENGINE)
@flags(ServerOptions)
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
    server: ServerOptions,
    **engine_options: Any,
) -> None:
    """Serve the model on an HTTP port with OpenAI's API, and a page that shows token trees at /.

    POST /v1/chat/completions, /v1/completions, /tokenize, /detokenize; GET /v1/models, /health, /version, /metrics.
    """
    try:
        from treespec.serve.app import create_app
        from treespec.serve.http_server import HttpServer, bind

        if server.replicas is not None:
            from treespec.serve.replicas import serve_replicas
    except ModuleNotFoundError as error:
        extras = "[serve]" if server.replicas is None else "[serve,ray]"
        raise UsageError(f"serve needs the package {error.name}; install treespec with its extra: {extras}") from error
    from treespec.async_llm import AsyncLLM
    from treespec.frontend.engine_args import EngineArgs
    from treespec.startup.options import resolve_model
    from treespec.text.chat import check_syntax
    from treespec.text.prompt_tokenizer import load_tokenizer
    from treespec_weights.files import resolve_folder

    config = {} if server.speculative_config is None else parse_speculative_config(server.speculative_config)
    if num_tokens := config.pop("num_speculative_tokens", None):
        if nodes is not None:
            raise UsageError("--nodes and num_speculative_tokens both set the size of drafts; give one of them")
        nodes = str(num_tokens + 1)
    if server.no_spec and (nodes is not None or config):
        raise UsageError("--no-spec is plain decoding; drop it, or drop --nodes and --speculative-config")
    if server.replicas is not None and not server.port:
        raise UsageError("--replicas: Ray Serve chooses no free port; give a --port other than 0")
    model, template = choose_target(model), server.chat_template
    server = replace(
        server,
        served_model_name=server.served_model_name or [model or "embedded"],
        chat_template=template and read_text(template, f"--chat-template {template}"),
        api_key=server.api_key or os.environ.get("TREESPEC_API_KEY") or None,
    )
    tell_default(model)
    raise_on_interrupt()
    args = EngineArgs(
        model=model,
        drafts=draft,
        spec="off" if server.no_spec else GenerationFlags(nodes=nodes).spec_config(),
        speculative_config=config or None,
        enable_prefix_caching=server.enable_prefix_caching,
        **engine_options,
    )

    def build(engine: AsyncLLM) -> "FastAPI":
        return create_app(engine, server, default_params(engine.llm, args.generation_config))

    if not server.only_loopback and server.api_key is None:
        logger.warning(
            "anybody who reaches port %d of %s may use the model: there is no --api-key", server.port, server.host
        )
    with ExitStack() as ends:
        # What can be wrong with the port or the template is found before the model is read.
        sockets = bind(server.host, server.port) if server.replicas is None else []
        for bound in sockets:
            ends.enter_context(bound)
        tokenizer = load_tokenizer(args.tokenizer, resolve_folder(resolve_model(model)))
        check_syntax(tokenizer, server.chat_template)
        if server.replicas is not None:
            serve_replicas(lambda: build(AsyncLLM.from_engine_args(args)), server.replicas, server.host, server.port)
            return
        with status("loading"):
            engine = ends.enter_context(AsyncLLM.from_engine_args(replace(args, tokenizer=tokenizer)))
        app = build(engine)
        gc.freeze()  # as in `load_llm`: requests would wait for every full collection
        with suppress(KeyboardInterrupt):  # uvicorn raises it once the server has ended
            HttpServer(app, server).run(sockets)


def parse_speculative_config(text: str) -> dict[str, Any]:
    """Parse `--speculative-config`. `EngineOptions` checks what is in it, but for the number of tokens."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--speculative-config is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f'--speculative-config {text}: valid: an object, such as {{"method": "suffix"}}')
    number = config.get("num_speculative_tokens")
    if number is not None and (type(number) is not int or number < 1):
        raise UsageError(f"--speculative-config: num_speculative_tokens={number!r}; valid: an int of at least 1")
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
