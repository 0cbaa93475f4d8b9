"""Split the text of a chat's answer into reasoning, content and tool calls, also while it grows."""

import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

REASONING_TAGS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
REASONING_TAGS |= {"deepseek_r1": REASONING_TAGS["think"], "qwen3": REASONING_TAGS["think"]}  # vLLM's names

# The usual head of a call, in the order that lets the arguments be streamed.
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:'
    r"\s*(?=\{)"
)
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}\[\]]', re.DOTALL)


@dataclass(frozen=True)
class CallFormat:
    """How a model writes tool calls: a tag, and JSON objects with `name` and `arguments` (or `parameters`).

    Attributes:
        tag: begins the calls.
        between: regex of what stands before, between and behind the objects.
        closing: the tag behind an object, which `between` includes.
        bare: first character of a text that is calls without the tag.
        is_special: whether the tag is a special token, which `skip_special_tokens` would remove.
    """

    tag: str
    between: str
    closing: str = ""
    bare: str = ""
    is_special: bool = False


CALL_FORMATS = {
    "hermes": CallFormat("<tool_call>", r"(?:\s|</?tool_call>)*", closing="</tool_call>"),
    "llama3_json": CallFormat("<|python_tag|>", r"(?:[\s;,]|<\|python_tag\|>)*", bare="{"),
    "mistral": CallFormat("[TOOL_CALLS]", r"(?:\[TOOL_CALLS\]|[\s,\[\]])*", is_special=True),
}
REQUIRED_CALLS = CallFormat("", r"[\s,\[\]]*", bare="[")  # what `calls_schema` describes


class ToolCall(NamedTuple):
    """A call: `arguments` are JSON as the model wrote it, and may break off."""

    name: str
    arguments: str


class Parsed(NamedTuple):
    """An answer, or what is certain of one that grows: each text then only gets longer, and calls are only added."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class OutputParser:
    """Parses the answers to one request.

    Attributes:
        reasoning: tags around the reasoning; None = all text is content.
        calls: format of tool calls; None = there are none.
        named: function whose arguments are the whole text.
        functions: names of the functions. A text without the tag is a call only if it names one of them.
        most_calls: None = any number.
    """

    reasoning: tuple[str, str] | None = None
    calls: CallFormat | None = None
    named: str | None = None
    functions: frozenset[str] = frozenset()
    most_calls: int | None = None

    @property
    def needs_special_tokens(self) -> bool:
        """Whether tags are special tokens."""
        is_special = self.calls is not None and self.calls.is_special
        return is_special or self.reasoning == REASONING_TAGS["mistral"]

    def begins_with_reasoning(self, prompt: str | None) -> bool:
        """Return whether the chat template has opened the reasoning."""
        return self.reasoning is not None and (prompt or "").rstrip().endswith(self.reasoning[0])

    def parse(self, text: str, is_reasoning: bool, ended: bool) -> Parsed:
        """Parse the text so far.

        Args:
            text: of the answer.
            is_reasoning: whether it begins within the reasoning.
            ended: whether no text will follow.
        """
        if self.named is not None:
            return Parsed(calls=(ToolCall(self.named, text),))
        reasoning = ""
        if self.reasoning is not None:
            reasoning, text = _split_reasoning(text, *self.reasoning, is_reasoning, ended)
        if self.calls is None:
            return Parsed(reasoning, text)
        content, calls = self._split_calls(self.calls, text, ended)
        return Parsed(reasoning, content, tuple(calls[: self.most_calls]))

    def _split_calls(self, form: CallFormat, text: str, ended: bool) -> tuple[str, list[ToolCall]]:
        content, calls = "", list[ToolCall]()
        if form.bare and text.lstrip()[:1] == form.bare:
            calls, rest = self._read_calls(form, text, ended, is_bare=True)
            if calls or not rest:
                text = rest
        while form.tag and form.tag in text:
            before, _, behind = text.partition(form.tag)
            read, text = self._read_calls(form, behind, ended)
            content += before if text and not read else before.rstrip()
            if text and not read:
                content += form.tag  # of something else
            calls += read
        if not ended:
            text = _without_beginning(text, form.tag).rstrip()
        return content + text, calls

    def _read_calls(
        self, form: CallFormat, text: str, ended: bool, is_bare: bool = False
    ) -> tuple[list[ToolCall], str]:
        """Return the calls with which a text begins, and what follows them, as far as that is certain."""
        calls = list[ToolCall]()
        while True:
            match = re.match(form.between, text)
            assert match is not None, "it may be empty"
            text = text[match.end() :]
            if not text.startswith("{"):
                is_open = not ended and any(tag.startswith(text) for tag in (form.tag, form.closing))
                return calls, "" if is_open else text
            call, end = _read_call(text, ended)
            if call is not None and is_bare and call.name not in self.functions:
                call, end = None, 0
            if call is not None:
                calls.append(call)
            if not end:
                return calls, text if end == 0 else ""
            text = text[end:]


def _read_call(text: str, ended: bool) -> tuple[ToolCall | None, int | None]:
    """Return the call with which a text begins, and its end: None if it goes on, 0 if this is no call."""
    end = _object_end(text, 0)
    if head := _HEAD.match(text):
        name, start = _loads(head[1]), head.end()
        if not isinstance(name, str):
            return None, 0
        return ToolCall(name, text[start : _object_end(text, start)]), end
    if end is None:
        return None, 0 if ended else None
    call = _loads(text[:end])
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
        return None, 0
    arguments = call.get("arguments", call.get("parameters")) or {}
    return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)), end


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _object_end(text: str, start: int) -> int | None:
    """Return the end of the JSON object or list at `start`, or None if it is incomplete."""
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text, start):
        depth += (match[0] in "{[") - (match[0] in "}]")
        if not depth:
            return match.end()
    return None


def _split_reasoning(text: str, opening: str, closing: str, is_reasoning: bool, ended: bool) -> tuple[str, str]:
    """Return reasoning and the rest, without the white space beside the tags."""
    begin = text.lstrip()
    if begin.startswith(opening):
        text = begin.removeprefix(opening)
    elif not ended and opening.startswith(begin):
        return "", ""
    elif not is_reasoning:
        return "", text
    reasoning, end, rest = text.partition(closing)
    if not end and not ended:
        reasoning = _without_beginning(reasoning, closing)
    return reasoning.strip(), rest.lstrip()


def _without_beginning(text: str, tag: str) -> str:
    """Return `text` without an end that may begin the tag."""
    for count in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-count:]):
            return text[:-count]
    return text


def detect_call_format(template: str) -> str | None:
    """Return the name of the format in which a chat template describes or repeats calls, or None."""
    if "<tool_call>" in template and "<function=" not in template:  # the latter is XML
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return "llama3_json"
    return None


def detect_reasoning(template: str) -> str | None:
    """Return the name of the tags that a chat template knows, or None."""
    return next((name for name, tags in REASONING_TAGS.items() if tags[1] in template), None)
