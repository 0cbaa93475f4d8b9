"""Options of the server. The command line reads them before importing the server's packages."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treespec.errors import ConfigError
from treespec.serve.output_parser import CALL_FORMATS, REASONING_TAGS
from treespec.utils.options import check_values, option

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServerOptions:
    """Options of `treespec serve`, in addition to those of `LLM`.

    Args:
        host: interface to listen on; 0.0.0.0 means all.
        port: port to listen on; 0 chooses a free one.
        uds: path of a Unix socket to listen on instead.
        ssl_certfile: certificate chain in PEM format; with it, the server speaks HTTPS.
        ssl_keyfile: private key, if it is not in the certificate's file.
        root_path: path prefix that clients see behind a proxy, such as /llm; the proxy may remove it.
        api_key: key that clients must send; or set $TREESPEC_API_KEY, which other users of the machine cannot see.
        allowed_origins: origin of web pages that may use the API (CORS), such as http://localhost:3000; * allows any;
            repeatable.
        served_model_name: model name for clients; repeatable, MODEL by default. The first one is reported.
        lora_modules: LoRA adapter as NAME=FOLDER, or as JSON with name and path; requests choose it by using the name
            as their model; repeatable. Implies --enable-lora.
        allow_runtime_lora_updating: let clients load adapters from folders of this machine or from the hub, and unload
            them, at /v1/load_lora_adapter and /v1/unload_lora_adapter. Implies --enable-lora.
        no_spec: plain decoding, unless a request enables speculation.
        speculative_config: JSON with vLLM's keys method (ngram, suffix, draft_model), model and num_speculative_tokens.
        chat_template: Jinja file that replaces the model's chat template. `Server` expects its text.
        enable_prefix_caching: share the KV cache of common prefixes between requests (`LLM` does so only if asked).
        tool_call_parser: format of tool calls: hermes, llama3_json, mistral, qwen3_coder, generic, none; auto detects
            the template's, or uses generic if it has no tools.
        reasoning_parser: tags of reasoning: think, mistral, deepseek_r1, none; auto detects the template's.
        request_timeout: maximum seconds of a request; unlimited by default.
        replicas: number of processes with an engine each, run by Ray Serve behind one port; needs the extra [ray].
        audit: share of finished requests to decode again without speculation while the server is idle; differing tokens
            are counted and logged.
        max_body_bytes: maximum size of a request.
        read_timeout: maximum seconds for a request's headers to arrive, and again for its body.
        uvicorn_log_level: log level of the HTTP server; warning omits the line per request.
    """

    host: str = "127.0.0.1"
    port: int = option(8000, ge=0, le=65535)
    uds: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    root_path: str = ""
    api_key: str | None = None
    allowed_origins: Sequence[str] = ()
    served_model_name: Sequence[str] = ()
    lora_modules: Sequence[str] = ()
    allow_runtime_lora_updating: bool = False
    no_spec: bool = False
    speculative_config: str | None = None
    chat_template: str | None = None
    enable_prefix_caching: bool = True
    tool_call_parser: str = option("auto", choices=("auto", *CALL_FORMATS, "none"))
    reasoning_parser: str = option("auto", choices=("auto", *REASONING_TAGS, "none"))
    request_timeout: float | None = option(None, ge=0.01)
    replicas: int | None = option(None, ge=1)
    audit: float = option(0.0, ge=0, le=1)
    max_body_bytes: int = option(4 << 20, ge=1)
    read_timeout: float = option(60.0, ge=0.01)
    uvicorn_log_level: str = option("info", choices=("critical", "error", "warning", "info", "debug", "trace"))

    def __post_init__(self) -> None:
        check_values(self)
        try:  # vLLM's flag is a JSON list
            lists = [json.loads(origin) if origin.startswith("[") else [origin] for origin in self.allowed_origins]
        except ValueError:
            raise ConfigError(f'allowed_origins={self.allowed_origins!r}; valid: origins, or ["*"] as JSON') from None
        object.__setattr__(self, "allowed_origins", [*itertools.chain.from_iterable(lists)])
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError(f"ssl_keyfile={self.ssl_keyfile!r} requires ssl_certfile")
        if self.allow_runtime_lora_updating and self.replicas is not None:
            raise ConfigError(f"allow_runtime_lora_updating=True would reach only one of replicas={self.replicas}")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path={self.root_path!r}; valid: a path that begins with /")

    def loras(self) -> dict[str, str]:
        """Return the folders of the adapters by name. Raises ConfigError."""
        loras: dict[str, str] = {}
        for module in self.lora_modules:
            name, _, path = module.partition("=")
            if module.lstrip().startswith("{"):  # vLLM's other form
                try:
                    fields = json.loads(module)
                except ValueError:
                    fields = {}
                name, path = fields.get("name"), fields.get("path")
            if not (isinstance(name, str) and name and isinstance(path, str) and path):
                raise ConfigError(f'lora_modules={module!r}; valid: NAME=FOLDER, or {{"name": NAME, "path": FOLDER}}')
            if name in loras or name in self.served_model_name:
                raise ConfigError(f"lora_modules={module!r}: the name {name!r} is taken")
            loras[name] = path
        return loras

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.uds is not None or self.host in LOOPBACK

    @property
    def uvicorn_settings(self) -> dict[str, Any]:
        """Keyword arguments for uvicorn."""
        names = ("host", "port", "uds", "ssl_certfile", "ssl_keyfile")
        settings = {"root_path": self.root_path.rstrip("/"), "log_level": self.uvicorn_log_level}
        return {name: getattr(self, name) for name in names} | settings
