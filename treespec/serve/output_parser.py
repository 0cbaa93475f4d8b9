"""How models write reasoning and tool calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class ReasoningTags(NamedTuple):
    """The tags around the reasoning."""

    opening: str
    closing: str
    is_implied: bool = False  # an answer begins within the reasoning unless the prompt has closed it


REASONING_TAGS = {
    "think": ReasoningTags("<think>", "</think>"),
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    "deepseek_r1": ReasoningTags("<think>", "</think>", is_implied=True),  # vLLM's name and meaning
}
REASONING_TAGS["qwen3"] = REASONING_TAGS["think"]  # vLLM's name


@dataclass(frozen=True)
class CallFormat:
    """How a model writes tool calls: a tag, and JSON objects with `name` and `arguments` (or `parameters`)."""

    tag: str  # begins the calls
    closing: str = ""  # tag behind the calls
    separators: str = ""  # characters of which one may stand between two objects
    is_list: bool = False  # the objects may stand in brackets
    bare: str = ""  # first characters of a text that is calls without the tag
    is_special: bool = False  # the tag is a special token, which `skip_special_tokens` would remove
    is_named: bool = False  # the tag may also precede `name[ARGS]{...}`, where the object holds the arguments
    is_xml: bool = False  # calls may be `<function=name>`, a `<parameter=key>value</parameter>` each, `</function>`
    is_generic: bool = False  # the server describes the tools and the format, as the chat template does not

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that end what is open."""
        return tuple(filter(None, (self.tag, self.closing)))


CALL_FORMATS = {
    "hermes": CallFormat("<tool_call>", "</tool_call>"),
    "llama3_json": CallFormat("<|python_tag|>", separators=",;", bare="{"),
    "mistral": CallFormat("[TOOL_CALLS]", separators=",", is_list=True, is_special=True, is_named=True),
    "qwen3_coder": CallFormat("<tool_call>", "</tool_call>", is_xml=True),
    "generic": CallFormat("<tool_call>", "</tool_call>", ",", is_list=True, bare="{[", is_generic=True),
}
_OTHER_FORMATS = ("<arg_key>", "<invoke ", "<tool_calls>")  # GLM's and MiniMax's use the tag of Hermes too
REQUIRED_CALLS = CallFormat("", separators=",", is_list=True, bare="[")  # what `calls_schema` describes

JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_MOST_REFERENCES = 64


@dataclass(frozen=True)
class OutputParser:
    """How to read the answers to one request."""

    reasoning: ReasoningTags | None = None  # None = all text is content
    calls: CallFormat | None = None  # of tool calls; None = there are none
    named: str | None = None  # function whose arguments are the whole text
    # Schemas of the parameters of the functions, by name; a text without the tag is a call only if it names one of them
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    most_calls: int | None = None  # None = any number
    last_turn: Callable[[str], str] = str  # returns the end of a prompt that the answer continues

    @property
    def needs_special_tokens(self) -> bool:
        """Whether tags are special tokens."""
        is_special = self.calls is not None and self.calls.is_special
        return is_special or self.reasoning == REASONING_TAGS["mistral"]

    def begins_with_reasoning(self, prompt: str | None) -> bool:
        """Return whether the last turn of the prompt has opened the reasoning and not closed it."""
        if self.reasoning is None:
            return False
        (opening, closing, is_implied), prompt = self.reasoning, prompt or ""
        if opening not in prompt and closing not in prompt:
            return is_implied
        turn = self.last_turn(prompt)
        opened, closed = turn.rfind(opening), turn.rfind(closing)
        return opened > closed or (is_implied and closed < 0)

    def parameters(self, function: str) -> Mapping[str, Any]:
        """Return the schemas of the parameters that a function declares, by name."""
        schema = self.functions.get(function, {})
        declared = _resolved(schema, schema).get("properties")
        return declared if isinstance(declared, Mapping) else {}

    def value_types(self, function: str, parameter: str) -> frozenset[str]:
        """Return the JSON types that a parameter may have by its function's schema; all if that does not tell."""
        root, seen = self.functions.get(function, {}), dict[str, frozenset[str]]()

        def allowed(schema: Any) -> frozenset[str]:
            if not isinstance(schema, Mapping):
                return JSON_TYPES
            types, named = JSON_TYPES, schema.get("type")
            if isinstance(named, str | list):
                names = {named} if isinstance(named, str) else {name for name in named if isinstance(name, str)}
                types &= names | ({"integer"} if "number" in names else set())
            values = [schema["const"]] if "const" in schema else schema.get("enum")
            if isinstance(values, list):
                types &= {json_type(value) for value in values}
            for keyword in ("anyOf", "oneOf"):
                if isinstance(schema.get(keyword), list):
                    types &= frozenset().union(*map(allowed, schema[keyword]))
            for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
                types &= allowed(each)
            reference = schema.get("$ref")
            if isinstance(reference, str) and reference not in seen and len(seen) < _MOST_REFERENCES:
                seen[reference] = frozenset()  # in itself
                seen[reference] = allowed(_resolved({"$ref": reference}, root))
            return types & seen.get(reference, JSON_TYPES) if isinstance(reference, str) else types

        try:
            return allowed(self.parameters(function).get(parameter, root.get("additionalProperties"))) or JSON_TYPES
        except RecursionError:
            return JSON_TYPES


def json_type(value: Any) -> str:
    """Return JSON's name of the type of a value."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    kinds = {int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def _resolved(schema: Any, root: Any) -> Mapping[str, Any]:
    """Return a schema, or the one in `root` that it refers to; an empty one if that is not there."""
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return schema
    for key in reference.removeprefix("#").split("/")[1:]:
        root = root.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root if isinstance(root, Mapping) else {}


def detect_call_format(template: str) -> str | None:
    """Return the name of the format in which a chat template describes or repeats calls, or None."""
    if any(tag in template for tag in _OTHER_FORMATS):
        return None
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if "<function=" in template:  # without the tag, by others
        return None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return "llama3_json"
    return "generic" if template and "tools" not in template else None


def detect_reasoning(template: str) -> str | None:
    """Return the name of the tags that a chat template knows, or None."""
    return next((name for name, tags in REASONING_TAGS.items() if tags[1] in template), None)
