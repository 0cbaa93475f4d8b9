"""Request bodies: fields of OpenAI, vLLM and treespec, and their translation."""

from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from openai.types.chat.completion_create_params import CompletionCreateParamsBase as OpenAIChat
from openai.types.completion_create_params import CompletionCreateParamsBase as OpenAICompletion
from pydantic import BaseModel, ConfigDict, FailFast, Field
from typing_extensions import TypeAliasType

from treespec.errors import ConfigError, reject_unknown
from treespec.sampling_params import RequestOutputKind, SamplingParams
from treespec.serve.messages import AllowedToolsChoice, Messages, Strict, TemplateFields, Tool, ToolChoice, calls_schema

MAX_CHOICES = 1024  # maximum choices per request: prompts times n
MAX_LOGPROBS = 20  # limit of OpenAI and vLLM

# Fail fast: an error for each of a million items would be a million errors.
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast()])
TokenIds = TypeAliasType("TokenIds", Annotated[list[int], FailFast()])
TokenIdLists = TypeAliasType("TokenIdLists", Annotated[list[TokenIds], FailFast()])


class StreamOptions(Strict):
    """OpenAI's `stream_options` and vLLM's `continuous_usage_stats`; obfuscation of lengths is ignored."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Strict):
    """OpenAI's named schema. Outputs always match it, as with `strict`."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def structured_outputs(self) -> dict[str, Any] | None:
        """Return the keywords of `StructuredOutputsParams`; None for text."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ConfigError("response_format: json_schema and type 'json_schema' require each other")
        if self.json_schema is not None:
            return {"json": self.json_schema.schema_}
        return {"json_object": True} if self.type == "json_object" else None


class GenerationBody(BaseModel):
    """Fields common to all endpoints. Null or missing fields have the server's defaults."""

    model_config = ConfigDict(extra="allow", strict=True)  # `check` rejects unknown names
    endpoint: ClassVar[str]
    openai: ClassVar[type]  # the fields of OpenAI; those not defined below change no token
    unsupported: ClassVar[dict[str, tuple[tuple[Any, ...], str]]]  # no-op values, and the alternative
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # fields of vLLM
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Texts | None = None
    allowed_token_ids: TokenIds | None = None
    structured_outputs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    # fields of treespec
    speculation: Literal["off"] | dict[str, Any] | None = None
    speculative_decoding_stats: bool | None = None
    rounds: bool | None = None

    def check(self) -> None:
        """Raise ConfigError for unknown, unsupported and contradictory fields."""
        extra, openai_fields = self.model_extra or {}, self.openai.__annotations__
        for name, (neutral, instead) in self.unsupported.items():
            if (vars(self) | extra).get(name) not in neutral:
                raise ConfigError(f"{self.endpoint}: {name} is not supported; {instead}")
        unknown = [name[:60] for name in extra if name not in openai_fields]
        reject_unknown(self.endpoint, unknown[:3], type(self).model_fields | openai_fields)
        if self.stream_options is not None and not self.stream:
            raise ConfigError("stream_options require stream=true")
        if self.rounds and not self.stream:
            raise ConfigError("rounds=true requires stream=true")

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continues_usage(self) -> bool:
        """Whether every chunk carries the usage so far."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens per position, or None for no log-probabilities."""
        raise NotImplementedError

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """Return the parameters of the request. Raises ConfigError for invalid or contradictory values."""
        params = defaults.clone()
        for name in _PARAMS:
            value = getattr(self, name, None)
            if value is not None:
                setattr(params, name, value)
        if self.logit_bias is not None:
            params.logit_bias = {_as_token(token): bias for token, bias in self.logit_bias.items()}
        params.logprobs = self.num_logprobs
        form = None if self.response_format is None else self.response_format.structured_outputs()
        if form is not None and self.structured_outputs is not None:
            raise ConfigError("response_format and structured_outputs both constrain the output; pass one of them")
        if form is not None:
            params.structured_outputs = form
        params.output_kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return params

    @property
    def is_constrained(self) -> bool:
        """Whether a schema or another constraint applies to the output."""
        return self.structured_outputs is not None or self.response_format not in (None, ResponseFormat(type="text"))

    def tokenization(self) -> dict[str, Any]:
        """Return the `tokenization_kwargs` of the request."""
        options = {
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "add_special_tokens": self.add_special_tokens,
            "max_output_tokens": self.requested_tokens or None,
        }
        return {name: value for name, value in options.items() if value is not None}

    @property
    def requested_tokens(self) -> int | None:
        """The number of tokens requested by the client, which must fit into the context."""
        return self.max_tokens if "max_tokens" in self.model_fields_set else None


_CONVERTED = {"logit_bias", "logprobs", "truncate_prompt_tokens"}
_PARAMS = {field.name for field in fields(SamplingParams)} & {*GenerationBody.model_fields} - _CONVERTED


class CompletionBody(GenerationBody):
    """Body of `/v1/completions`."""

    endpoint, openai = "/v1/completions", OpenAICompletion
    unsupported = {
        "best_of": ((None, 1), "request n choices with logprobs, and select one"),
        "suffix": ((None, ""), "put it into the prompt in the model's fill-in-the-middle format"),
    }
    prompt: str | Texts | TokenIds | TokenIdLists
    max_tokens: int | None = 16  # default of OpenAI
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None  # field of vLLM

    def check(self) -> None:
        super().check()
        if self.stream and self.num_prompt_logprobs is not None:
            name = "prompt_logprobs" if self.prompt_logprobs is not None else "echo with logprobs"
            raise ConfigError(f"{name}: log-probabilities of prompts are not streamed; omit stream")
        if len(self.prompts()) * (self.n or 1) > MAX_CHOICES:
            raise ConfigError(
                f"{len(self.prompts())} prompts with n={self.n or 1}; valid: at most {MAX_CHOICES} choices"
            )
        if self.rounds and len(self.prompts()) > 1:
            raise ConfigError(f"{len(self.prompts())} prompts with rounds=true; valid: one")

    def prompts(self) -> list[Any]:
        """Return the prompts as texts or lists of token ids."""
        several = isinstance(self.prompt, list) and not any(isinstance(item, int) for item in self.prompt)
        if self.prompt == []:
            raise ConfigError("prompt=[]: pass at least one prompt")
        return list(self.prompt) if several else [self.prompt]

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Like `num_logprobs`, for positions of the prompt."""
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def only_echoes(self) -> bool:
        """Whether the answer consists of the prompt only."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        if self.only_echoes:  # the engine generates at least one token, which the answer omits
            return self.model_copy(update={"max_tokens": 1}).sampling_params(defaults)
        params = super().sampling_params(defaults)
        params.prompt_logprobs = self.num_prompt_logprobs
        return params


class ChatBody(TemplateFields, GenerationBody):
    """Body of `/v1/chat/completions`."""

    endpoint, openai = "/v1/chat/completions", OpenAIChat
    unsupported = {
        "functions": ((None, []), "use tools"),
        "function_call": ((None, "none", "auto"), "use tool_choice"),
        "audio": ((None,), "the model reads and writes text"),
        "modalities": ((None, ["text"]), "the model reads and writes text"),
        "moderation": ((None,), "omit it"),
        "web_search_options": ((None,), "put search results into a message"),
    }
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ConfigError("top_logprobs requires logprobs=true")
        names = [tool.function.name for tool in self.tools or ()]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"tools: {min(repeated)!r} occurs more than once")
        if unknown := [name for name in self._chosen or () if name not in names]:
            raise ConfigError(f"tool_choice: function {unknown[0][:60]!r}; tools: {', '.join(names) or 'none'}")
        if self.must_call and not self.allowed:
            raise ConfigError("tool_choice='required' requires tools")
        if self.must_call and self.is_constrained:
            name = "structured_outputs" if self.structured_outputs is not None else "response_format"
            raise ConfigError(f"{name} and this tool_choice both constrain the output; pass one of them")

    @property
    def requested_tokens(self) -> int | None:
        return super().requested_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def called(self) -> str | None:
        """Name of the function that must be called, or None."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, ToolChoice) else None

    @property
    def _chosen(self) -> list[str] | None:
        """Names of the functions in `tool_choice`, or None."""
        if isinstance(self.tool_choice, AllowedToolsChoice):
            return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        return None if self.called is None else [self.called]

    @property
    def allowed(self) -> list[Tool]:
        """The tools that may be called."""
        chosen_names = self._chosen
        return [tool for tool in self.tools or () if chosen_names is None or tool.function.name in chosen_names]

    @property
    def functions(self) -> dict[str, dict[str, Any]]:
        """Parameter schemas of the functions that may be called, by name."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.allowed}

    @property
    def must_call(self) -> bool:
        """Whether the output must consist of calls."""
        choice = self.tool_choice
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedToolsChoice) else choice
        return self.called is not None or mode == "required"

    @property
    def tools_for_template(self) -> list[dict[str, Any]] | None:
        """The tools to pass to the chat template; none if calls are forbidden."""
        tools = self.allowed if isinstance(self.tool_choice, AllowedToolsChoice) else self.tools or ()
        return [tool.model_dump(exclude_unset=True) for tool in tools if self.tool_choice != "none"] or None

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        params = super().sampling_params(defaults)
        if self.max_completion_tokens is not None:
            params.max_tokens = self.max_completion_tokens
        if self.must_call:
            functions = [tool.function for tool in self.allowed]
            schema = calls_schema(functions, 1 if self.parallel_tool_calls is False else None, self.called is not None)
            form = {"json": schema, "whitespace_pattern": " ?"}  # some models would write endless space
            params.structured_outputs = form  # converted on assignment
        return params

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(TemplateFields, Strict):
    """Body of vLLM's `/tokenize`: a text, or the messages of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Strict):
    """Body of vLLM's `/detokenize`."""

    model: str | None = None
    tokens: TokenIds


class LoadAdapterBody(Strict):
    """Body of vLLM's `/v1/load_lora_adapter`."""

    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1)]
    load_inplace: bool = False


class UnloadAdapterBody(Strict):
    """Body of vLLM's `/v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = None  # ignored, as in vLLM


def _as_token(key: str) -> int:
    if not key.isascii() or not key.isdecimal():
        raise ConfigError(f"logit_bias: {key[:40]!r} is no token id")
    return int(key)
