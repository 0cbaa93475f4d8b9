"""Options of the server. The command line reads them before the packages of the server are imported."""

from collections.abc import Sequence
from dataclasses import dataclass

from treespec.serve.output_parser import CALL_FORMATS, REASONING_TAGS
from treespec.utils.options import check_values, option

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServerOptions:
    """Options of `treespec serve`, besides those of `LLM`.

    Args:
        host: interface to listen on; 0.0.0.0 is all of them.
        port: 0 is any free one.
        api_key: key that clients must send, or $TREESPEC_API_KEY, which other users of the machine do not see.
        served_model_name: name of the model for clients; repeatable, MODEL if not set. The first one is reported.
        no_spec: plain decoding, unless a request asks for more.
        speculative_config: JSON of vLLM's keys method (ngram, suffix, draft_model), model and num_speculative_tokens.
        chat_template: Jinja file that replaces the model's chat template. `Server` takes its text.
        enable_prefix_caching: share the KV cache of common prefixes between requests (`LLM` does so only if asked).
        tool_call_parser: format of tool calls: hermes, llama3_json, mistral, qwen3_coder, generic, none; auto is the
            template's, or generic if it has no tools.
        reasoning_parser: tags of reasoning: think, mistral, deepseek_r1, none; auto is the template's.
        request_timeout: longest seconds of a request; any if not set.
        replicas: processes with an engine each, which Ray Serve runs behind one port; needs the extra [ray].
        audit: share of finished requests to decode again without speculation while the server is idle; differing tokens
            are counted and logged.
        max_body_bytes: largest request.
        read_timeout: longest seconds in which the headers of a request arrive, and then its body.
    """

    host: str = "127.0.0.1"
    port: int = option(8000, least=0, most=65535)
    api_key: str | None = None
    served_model_name: Sequence[str] = ()
    no_spec: bool = False
    speculative_config: str | None = None
    chat_template: str | None = None
    enable_prefix_caching: bool = True
    tool_call_parser: str = option("auto", choices=("auto", *CALL_FORMATS, "none"))
    reasoning_parser: str = option("auto", choices=("auto", *REASONING_TAGS, "none"))
    request_timeout: float | None = option(None, least=0.01)
    replicas: int | None = option(None, least=1)
    audit: float = option(0.0, least=0, most=1)
    max_body_bytes: int = option(4 << 20, least=1)
    read_timeout: float = option(60.0, least=0.01)

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def only_loopback(self) -> bool:
        """Whether the server listens on the loopback interface only."""
        return self.host in LOOPBACK
