"""Messages and tools in the body of a chat, and the schema of calls."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field
from typing_extensions import TypeAliasType

from treespec.errors import ConfigError

MOST_MESSAGES = 1024  # templates that read no contents are rendered once for each
MOST_TOOLS = 1024


class Strict(BaseModel):
    """An object without other fields, whose values are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True)


class CalledFunction(BaseModel):
    """The function of a call in a message."""

    model_config = ConfigDict(extra="allow", strict=True)
    name: str
    arguments: str | dict[str, Any]


class CallInMessage(BaseModel):
    """A call in an assistant's message."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: Literal["function"] = "function"
    function: CalledFunction


Calls = TypeAliasType("Calls", Annotated[list[CallInMessage], FailFast()])


class Message(BaseModel):
    """A message; its content and further fields are for the chat template, which `treespec.text.chat` checks."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: Any = None
    tool_calls: Calls | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as templates expect it."""
        message = self.model_dump(exclude_unset=True)
        if message["role"] == "developer":  # OpenAI's newer name for the system's instructions
            message["role"] = "system"
        if self.role == "assistant" and self.content is None:  # besides calls; templates would print None
            message["content"] = ""
        return message


Messages = TypeAliasType("Messages", Annotated[list[Message], FailFast(), Field(max_length=MOST_MESSAGES)])


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


Tools = TypeAliasType("Tools", Annotated[list[Tool], FailFast(), Field(max_length=MOST_TOOLS)])


class TemplateFields(BaseModel):
    """Fields of a body with a conversation, for the chat template."""

    tools: Tools | None = None
    # vLLM's
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def tools_for_template(self) -> list[dict[str, Any]] | None:
        """The tools that the chat template shows."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools] if self.tools else None


class ChosenFunction(Strict):
    """The function that `tool_choice` names."""

    name: str


class ToolChoice(Strict):
    """OpenAI's `tool_choice` of one function."""

    type: Literal["function"]
    function: ChosenFunction


def calls_schema(functions: list[Function], most: int | None, only_arguments: bool) -> dict[str, Any]:
    """Return the schema of calls, or of one function's arguments. Raises ConfigError if definitions share a name."""
    if only_arguments:
        return functions[0].parameters or {"type": "object", "properties": {}}
    definitions: dict[str, dict[str, Any]] = {}
    calls = []
    for function in functions:
        arguments = dict(function.parameters or {"type": "object", "properties": {}})
        for keyword in ("$defs", "definitions"):  # references name them from the root
            for name, definition in (arguments.pop(keyword, None) or {}).items():
                if definitions.setdefault(keyword, {}).setdefault(name, definition) != definition:
                    raise ConfigError(f"tools: {function.name!r} and another function differ in {keyword}: {name!r}")
        properties = {"name": {"const": function.name}, "arguments": arguments}
        call = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        calls.append(call)
    most_items = {} if most is None else {"maxItems": most}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most_items, **definitions}
