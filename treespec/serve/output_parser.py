"""How models write reasoning and tool calls."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

REASONING_TAGS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
REASONING_TAGS |= {"deepseek_r1": REASONING_TAGS["think"], "qwen3": REASONING_TAGS["think"]}  # vLLM's names


@dataclass(frozen=True)
class CallFormat:
    """How a model writes tool calls: a tag, and JSON objects with `name` and `arguments` (or `parameters`)."""

    tag: str  # begins the calls
    between: str  # regex of what stands before, between and behind the objects
    closing: str = ""  # the tag behind an object, which `between` includes
    bare: str = ""  # first character of a text that is calls without the tag
    is_special: bool = False  # the tag is a special token, which `skip_special_tokens` would remove
    is_named: bool = False  # the tag may also precede `name[ARGS]{...}`, where the object holds the arguments
    is_xml: bool = False  # calls may be `<function=name>`, a `<parameter=key>value</parameter>` each, `</function>`


_BETWEEN_TOOL_CALLS = r"(?:\s|</?tool_call>)*"
CALL_FORMATS = {
    "hermes": CallFormat("<tool_call>", _BETWEEN_TOOL_CALLS, closing="</tool_call>"),
    "llama3_json": CallFormat("<|python_tag|>", r"(?:[\s;,]|<\|python_tag\|>)*", bare="{"),
    "mistral": CallFormat("[TOOL_CALLS]", r"(?:\[TOOL_CALLS\]|[\s,\[\]])*", is_special=True, is_named=True),
    "qwen3_coder": CallFormat("<tool_call>", _BETWEEN_TOOL_CALLS, closing="</tool_call>", is_xml=True),
}
_OTHER_FORMATS = ("<arg_key>", "<invoke ", "<tool_calls>")  # GLM's and MiniMax's use the tag of Hermes too
REQUIRED_CALLS = CallFormat("", r"[\s,\[\]]*", bare="[")  # what `calls_schema` describes


@dataclass(frozen=True)
class OutputParser:
    """How to read the answers to one request."""

    reasoning: tuple[str, str] | None = None  # tags around the reasoning; None = all text is content
    calls: CallFormat | None = None  # of tool calls; None = there are none
    named: str | None = None  # function whose arguments are the whole text
    # Schemas of the parameters of the functions, by name; a text without the tag is a call only if it names one of them
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    most_calls: int | None = None  # None = any number

    @property
    def needs_special_tokens(self) -> bool:
        """Whether tags are special tokens."""
        is_special = self.calls is not None and self.calls.is_special
        return is_special or self.reasoning == REASONING_TAGS["mistral"]

    def begins_with_reasoning(self, prompt: str | None) -> bool:
        """Return whether the chat template has opened the reasoning."""
        return self.reasoning is not None and (prompt or "").rstrip().endswith(self.reasoning[0])


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
    return None


def detect_reasoning(template: str) -> str | None:
    """Return the name of the tags that a chat template knows, or None."""
    return next((name for name, tags in REASONING_TAGS.items() if tags[1] in template), None)
