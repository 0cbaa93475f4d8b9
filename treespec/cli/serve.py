"""`treespec serve`: an OpenAI-compatible server."""

import gc
import json
import logging
import os
import ssl
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treespec.cli.group import UsageError
from treespec.cli.options import Drafts, GenerationFlags, choose_target, flags, read_text, status, tell_default
from treespec.config.engine_options import EngineOptions
from treespec.errors import reject_unknown
from treespec.sampling_params import SamplingParams
from treespec.serve.options import ServerOptions
from treespec.utils.interrupts import raise_on_interrupt

if TYPE_CHECKING:
    from fastapi import FastAPI

    from treespec.llm import LLM

logger = logging.getLogger("treespec")


_ENGINE = """tokenizer device dtype max_num_seqs max_num_batched_tokens max_model_len kv_cache_memory_bytes
    scheduling_policy compile generation_config quantization draft_vocabulary
    suffix_tokens enable_lora max_loras max_cpu_loras max_lora_rank""".split()  # options of `LLM`


def read_config(ctx: typer.Context, file: str | None) -> None:
    """Set flags that are not given from a YAML file, like vLLM's `--config`."""
    if file is None:
        return
    import yaml  # type: ignore[import-untyped]

    try:
        values = yaml.safe_load(read_text(file, f"--config {file}"))
    except yaml.YAMLError as error:
        raise UsageError(f"--config {file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UsageError(f"--config {file}: valid: names of flags with their values, such as port: 8000")
    names = {parameter.name: parameter for parameter in ctx.command.params if parameter.name not in ("config", "help")}
    values = {str(name).replace("-", "_"): value for name, value in values.items()}
    reject_unknown(f"--config {file}", values, [str(name) for name in names])
    for name, value in values.items():
        if isinstance(value, dict):  # --speculative-config, which is JSON
            values[name] = json.dumps(value)
        elif names[name].multiple and not isinstance(value, list):
            values[name] = [str(value)]
        elif type(value) in (int, float):
            values[name] = str(value)
    ctx.default_map = {name: value for name, value in values.items() if value is not None}


@flags(EngineOptions, *_ENGINE)
@flags(ServerOptions)
@flags(GenerationFlags, "nodes")
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="The target: a Hugging Face folder, GGUF file, hub id, smollm2 or embedded. Default: smollm2 if it is "
            "installed, otherwise embedded.",
            show_default=False,
        ),
    ] = None,
    draft: Drafts = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="YAML file with values by flag name, or model; flags of the command take precedence.",
            is_eager=True,
            callback=read_config,
        ),
    ] = None,
    *,
    nodes: str | None,
    server: ServerOptions,
    **engine_options: Any,
) -> None:
    """Serve the model on an HTTP port with OpenAI's API, and a page that shows token trees at /.

    POST /v1/chat/completions, /v1/completions, /v1/responses, /tokenize, /detokenize; GET /v1/models, /health, /ping,
    /version, /metrics.
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

    method = {} if server.speculative_config is None else parse_speculative_config(server.speculative_config)
    if num_tokens := method.pop("num_speculative_tokens", None):
        if nodes is not None:
            raise UsageError("--nodes and num_speculative_tokens both set the size of drafts; pass one of them")
        nodes = str(num_tokens + 1)
    if server.no_spec and (nodes is not None or method):
        raise UsageError("--no-spec is plain decoding; omit it, or omit --nodes and --speculative-config")
    check_socket(server)
    model, template = choose_target(model), server.chat_template
    server = replace(
        server,
        served_model_name=server.served_model_name or [model or "embedded"],
        chat_template=template and read_text(template, f"--chat-template {template}"),
        api_key=server.api_key or os.environ.get("TREESPEC_API_KEY") or None,
    )
    loras = {}
    if (count := len(server.loras())) or server.allow_runtime_lora_updating:
        max_cpu_loras = engine_options["max_cpu_loras"] or max(engine_options["max_loras"], count)
        loras = {"enable_lora": True, "max_cpu_loras": max_cpu_loras}
    tell_default(model)
    raise_on_interrupt()
    args = EngineArgs(
        model=model,
        drafts=draft,
        spec="off" if server.no_spec else GenerationFlags(nodes=nodes).spec_config(),
        speculative_config=method or None,
        enable_prefix_caching=server.enable_prefix_caching,
        **(engine_options | loras),
    )

    def build(engine: AsyncLLM) -> "FastAPI":
        return create_app(engine, server, default_params(engine.llm, args.generation_config))

    if not server.is_local and server.api_key is None:
        logger.warning(
            "anybody who reaches port %d of %s can use the model: no --api-key is set", server.port, server.host
        )
    with ExitStack() as ends:
        # Detects errors of the port and the template before the model is loaded.
        sockets = None if server.replicas or server.uds else bind(server.host, server.port)
        for bound in sockets or ():
            ends.enter_context(bound)
        tokenizer = load_tokenizer(args.tokenizer, resolve_folder(resolve_model(model)))
        check_syntax(tokenizer, server.chat_template)
        if server.replicas is not None:
            serve_replicas(lambda: build(AsyncLLM.from_engine_args(args)), server.replicas, server.host, server.port)
            return
        with status("loading"):
            engine = ends.enter_context(AsyncLLM.from_engine_args(replace(args, tokenizer=tokenizer)))
        app = build(engine)
        gc.freeze()  # see `load_llm`: requests would wait for every full collection
        with suppress(KeyboardInterrupt):  # uvicorn raises it after the server has ended
            HttpServer(app, server).run(sockets)


def check_socket(server: ServerOptions) -> None:
    """Raise UsageError for contradictory or unusable options of the socket."""
    if server.replicas is not None and not server.port:
        raise UsageError("--replicas: Ray Serve does not choose a free port; pass a --port other than 0")
    if server.replicas is not None and (server.uds or server.ssl_certfile or server.root_path):
        raise UsageError("--replicas: Ray Serve does not support --uds, --ssl-certfile and --root-path; use a proxy")
    if server.uds is not None and not Path(server.uds).absolute().parent.is_dir():
        raise UsageError(f"--uds {server.uds}: its folder does not exist")
    if server.ssl_certfile is not None:
        check_certificate(server.ssl_certfile, server.ssl_keyfile)


def check_certificate(certfile: str, keyfile: str | None) -> None:
    """Raise UsageError if a certificate or its key cannot be used; called before a model is loaded."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)
    except (OSError, ValueError) as error:  # ssl.SSLError lacks the file's name
        raise UsageError(f"--ssl-certfile {certfile}, --ssl-keyfile {keyfile or certfile}: {error}") from None


def parse_speculative_config(text: str) -> dict[str, Any]:
    """Parse `--speculative-config`. `EngineOptions` checks its contents, except for the number of tokens."""
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


def default_params(llm: "LLM", generation_config: str | os.PathLike[str]) -> SamplingParams:
    """Return the default sampling parameters of requests.

    Values missing in the model's file are OpenAI's: temperature 1, and as many tokens as fit into the context.
    """
    params, unset = llm.get_default_sampling_params(), SamplingParams()
    if generation_config != "treespec" and params.temperature == unset.temperature:
        params.temperature = 1.0
    if params.max_tokens == unset.max_tokens:
        params.max_tokens = None
    return params
