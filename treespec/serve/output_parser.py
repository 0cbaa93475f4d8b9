"""Formats of reasoning and tool calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class ReasoningTags(NamedTuple):
    """The tags around the reasoning."""

    opening: str
    closing: str
    is_implied: bool = False  # an answer starts within the reasoning, unless the prompt has closed it


REASONING_TAGS = {
    "think": ReasoningTags("<think>", "</think>"),
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    "deepseek_r1": ReasoningTags("<think>", "</think>", is_implied=True),  # vLLM's name and meaning
}
REASONING_TAGS["qwen3"] = REASONING_TAGS["think"]  # vLLM's name


@dataclass(frozen=True)
class CallFormat:
    """Format of tool calls: a tag, then JSON objects with `name` and `arguments` (or `parameters`)."""

    tag: str  # tag before the calls
    closing: str = ""  # tag after the calls
    separators: str = ""  # characters, one of which may separate two objects
    is_list: bool = False  # whether the objects may be enclosed in brackets
    bare: str = ""  # first characters of text that is a call without the tag
    is_special: bool = False  # whether the tag is a special token, which `skip_special_tokens` would remove
    is_named: bool = False  # whether the tag may also precede `name[ARGS]{...}`, with the arguments in the object
    is_xml: bool = False  # whether calls may be `<function=name><parameter=key>value</parameter>...</function>`
    is_generic: bool = False  # whether the server describes tools and format, because the chat template does not

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that end an open element."""
        return tuple(filter(None, (self.tag, self.closing)))


CALL_FORMATS = {
    "hermes": CallFormat("<tool_call>", "</tool_call>"),
    "llama3_json": CallFormat("<|python_tag|>", separators=",;", bare="{"),
    "mistral": CallFormat("[TOOL_CALLS]", separators=",", is_list=True, is_special=True, is_named=True),
    "qwen3_coder": CallFormat("<tool_call>", "</tool_call>", is_xml=True),
    "generic": CallFormat("<tool_call>", "</tool_call>", ",", is_list=True, bare="{[", is_generic=True),
}
_OTHER_FORMATS = ("<arg_key>", "<invoke ", "<tool_calls>")  # GLM's and MiniMax's formats also use the tag of Hermes
REQUIRED_CALLS = CallFormat("", separators=",", is_list=True, bare="[")  # format described by `calls_schema`

JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_MAX_REFERENCES = 64


@dataclass(frozen=True)
class OutputParser:
    """Parsing rules for the answers to one request."""

    reasoning: ReasoningTags | None = None  # None: all text is content
    calls: CallFormat | None = None  # format of tool calls; None: no calls
    named: str | None = None  # function whose arguments are the entire text
    # Parameter schemas of the functions, by name; text without the tag is a call only if it names one of them
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    max_calls: int | None = None  # None: unlimited
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
        """Return the schemas of a function's parameters, by name."""
        schema = self.functions.get(function, {})
        declared = _resolved(schema, schema).get("properties")
        return declared if isinstance(declared, Mapping) else {}

    def value_types(self, function: str, parameter: str) -> frozenset[str]:
        """Return the JSON types that a function's schema allows for a parameter; all types if unspecified."""
        root, resolved = self.functions.get(function, {}), dict[str, frozenset[str]]()

        def allowed(schema: Any) -> frozenset[str]:
            if not isinstance(schema, Mapping):
                return JSON_TYPES
            types, stated_type = JSON_TYPES, schema.get("type")
            if isinstance(stated_type, str | list):
                names = (
                    {stated_type}
                    if isinstance(stated_type, str)
                    else {name for name in stated_type if isinstance(name, str)}
                )
                types &= names | ({"integer"} if "number" in names else set())
            values = [schema["const"]] if "const" in schema else schema.get("enum")
            if isinstance(values, list):
                types &= {json_type(value) for value in values}
            for keyword in ("anyOf", "oneOf"):
                if isinstance(schema.get(keyword), list):
                    types &= frozenset().union(*map(allowed, schema[keyword]))
            for subschema in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
                types &= allowed(subschema)
            reference = schema.get("$ref")
            if isinstance(reference, str) and reference not in resolved and len(resolved) < _MAX_REFERENCES:
                resolved[reference] = frozenset()  # ends recursive references
                resolved[reference] = allowed(_resolved({"$ref": reference}, root))
            return types & resolved.get(reference, JSON_TYPES) if isinstance(reference, str) else types

        try:
            return allowed(self.parameters(function).get(parameter, root.get("additionalProperties"))) or JSON_TYPES
        except RecursionError:
            return JSON_TYPES


def json_type(value: Any) -> str:
    """Return the JSON name of a value's type."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    return {int: "integer", float: "number", str: "string", list: "array"}.get(type(value), "object")


def _resolved(schema: Any, root: Any) -> Mapping[str, Any]:
    """Return a schema, or the schema in `root` that it refers to; an empty schema if it is missing."""
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
    if "<function=" in template:  # other formats use it without the tag
        return None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return "llama3_json"
    return "generic" if template and "tools" not in template else None


def detect_reasoning(template: str) -> str | None:
    """Return the name of the tags that a chat template knows, or None."""
    return next((name for name, tags in REASONING_TAGS.items() if tags[1] in template), None)
