"""Options of the server. The command line reads them before the packages of the server are imported."""

from collections.abc import Sequence
from dataclasses import dataclass

from treespec.serve.output_parser import CALL_FORMATS, REASONING_TAGS
from treespec.utils.options import check_values, option

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServerOptions:
    """Options of the server, besides those of the engine.

    Args:
        host: interface to listen on; 0.0.0.0 is all of them.
        port: 0 is any free one.
        api_key: key that clients must send, or $TREESPEC_API_KEY, which other users of the machine do not see.
        served_model_name: name of the model for clients; repeatable, MODEL if not set. The first one is reported.
        chat_template: Jinja file that replaces the model's chat template. `Server` takes its text.
        tool_call_parser: format of tool calls: hermes, llama3_json, mistral, qwen3_coder; auto is the template's.
        reasoning_parser: tags of reasoning: think, mistral, none; auto is the template's.
        request_timeout: longest seconds of a request; any if not set.
        audit: share of finished requests to decode again without speculation while the server is idle; differing tokens
            are counted and logged.
        max_body_bytes: largest request.
    """

    host: str = "127.0.0.1"
    port: int = option(8000, least=0, most=65535)
    api_key: str | None = None
    served_model_name: Sequence[str] = ()
    chat_template: str | None = None
    tool_call_parser: str = option("auto", choices=("auto", *CALL_FORMATS))
    reasoning_parser: str = option("auto", choices=("auto", *REASONING_TAGS, "none"))
    request_timeout: float | None = None
    audit: float = option(0.0, least=0, most=1)
    max_body_bytes: int = option(4 << 20, least=1)

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def only_loopback(self) -> bool:
        """Whether the server listens on the loopback interface only."""
        return self.host in LOOPBACK
