"""Messages and tools in chat bodies, and the schema of tool calls."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field
from typing_extensions import TypeAliasType

from treespec.errors import ConfigError

MAX_MESSAGES = 1024  # maximum messages; templates that ignore contents are rendered once per message
MAX_PARTS = 4096  # maximum parts of all contents together
MAX_TOOLS = 1024


class Strict(BaseModel):
    """An object without extra fields; values are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True)


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    name: str
    arguments: str | dict[str, Any]


class CallInMessage(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    type: Literal["function"] = "function"
    function: CalledFunction


Calls = TypeAliasType("Calls", Annotated[list[CallInMessage], FailFast()])


class Message(BaseModel):
    """A message; its parts and extra fields are for the chat template and are checked by `treespec.text.chat`."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: str | list[Any] | None = None
    tool_calls: Calls | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form that templates expect."""
        message = self.model_dump(exclude_unset=True)
        if message["role"] == "developer":  # OpenAI's newer name for the system role
            message["role"] = "system"
        # A message of calls, or an empty result: templates may append the content to a text.
        if self.content is None and (self.role == "assistant" or "content" in message):
            message["content"] = ""
        return message


def _bounded(messages: list[Message]) -> list[Message]:
    num_parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    if num_parts > MAX_PARTS:
        raise ValueError(f"the contents have {num_parts} parts; valid: at most {MAX_PARTS}")
    return messages


Messages = TypeAliasType(
    "Messages", Annotated[list[Message], FailFast(), Field(max_length=MAX_MESSAGES), AfterValidator(_bounded)]
)


def generic_messages(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, role: str
) -> list[dict[str, Any]]:
    """Return messages for a template without tools: one of `role` first describes them; calls and results are text.

    Results are merged with the following user message, since many templates require alternating roles.
    """
    result, follows_result = list[dict[str, Any]](), False
    for message in messages:
        message, content = dict(message), message.get("content")
        is_result = message["role"] in ("tool", "function")
        if is_result:
            message = {"role": "user", "content": _joined("<tool_response>", content, "</tool_response>")}
        elif calls := message.pop("tool_calls", None):
            message["content"] = _joined(content, *map(_generic_call, calls))
        if follows_result and message["role"] == "user":
            result[-1]["content"] = _joined(result[-1]["content"], message["content"])
        else:
            result.append(message)
        follows_result = is_result
    if tools:
        functions = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        if not result or result[0]["role"] != role:
            result.insert(0, {"role": role})
        result[0]["content"] = _joined(result[0].get("content"), "You can call these functions:", *functions, _GENERIC)
    return result


_GENERIC = (
    "To call one, answer with its name and its arguments as JSON between tags, once for each call:\n"
    '<tool_call>{"name": "NAME", "arguments": {"KEY": "VALUE"}}</tool_call>\n'
    "The results will follow. If no function is needed, answer in words."
)


def _generic_call(call: dict[str, Any]) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"] or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {text}}}</tool_call>'


def _joined(*contents: Any) -> Any:
    """Join contents: a text, or parts if one of them has parts."""
    parts = [part for content in contents if content for part in (content if isinstance(content, list) else [content])]
    return "\n".join(parts) if all(isinstance(part, str) for part in parts) else parts


class Function(Strict):
    """A function of `tools`. `strict` is ignored with tool_choice "auto", and implied by the other choices."""

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """An entry of OpenAI's `tools`."""

    type: Literal["function"]
    function: Function


Tools = TypeAliasType("Tools", Annotated[list[Tool], FailFast(), Field(max_length=MAX_TOOLS)])


class TemplateFields(BaseModel):
    """Fields of a body with a conversation, for the chat template."""

    tools: Tools | None = None
    # fields of vLLM
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def tools_for_template(self) -> list[dict[str, Any]] | None:
        """The tools to pass to the chat template."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools] if self.tools else None


class ChosenFunction(Strict):
    name: str


class ToolChoice(Strict):
    """OpenAI's `tool_choice` of one function."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(Strict):
    """The tools that may be called, at least by name, and whether a call is required."""

    mode: Literal["auto", "required"]
    tools: Tools


class AllowedToolsChoice(Strict):
    """OpenAI's `tool_choice` of several functions."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


# As OpenAI defines it, a function without `parameters` takes none.
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def calls_schema(functions: list[Function], max_calls: int | None, only_arguments: bool) -> dict[str, Any]:
    """Return the schema of calls, or of one function's arguments. Raises ConfigError if definitions share a name."""
    if only_arguments:
        return functions[0].parameters or _NO_PARAMETERS
    definitions: dict[str, dict[str, Any]] = {}
    calls = []
    for function in functions:
        arguments = dict(function.parameters or _NO_PARAMETERS)
        for keyword in ("$defs", "definitions"):  # references are relative to the root
            for name, definition in (arguments.pop(keyword, None) or {}).items():
                if definitions.setdefault(keyword, {}).setdefault(name, definition) != definition:
                    raise ConfigError(f"tools: {function.name!r} and another function differ in {keyword}: {name!r}")
        properties = {"name": {"const": function.name}, "arguments": arguments}
        call = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        calls.append(call)
    max_items = {} if max_calls is None else {"maxItems": max_calls}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **max_items, **definitions}
