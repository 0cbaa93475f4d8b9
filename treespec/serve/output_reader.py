"""Split the text of a chat's answer into reasoning, content and tool calls, also while it grows."""

import json
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from treespec.serve.output_parser import CallFormat, OutputParser

# The usual head of a call, in the order that lets the arguments be streamed.
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:'
    r"\s*(?=\{)"
)
_NAMED_HEAD = re.compile(r"([\w.-]{1,64})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s?(?=\{)")
_XML_FUNCTION, _XML_END, _XML_PARAMETER, _VALUE_END = "<function=", "</function>", "<parameter=", "</parameter>"
_XML_HEAD, _XML_KEY = re.compile(r"<function=([\w.-]{1,64})>"), re.compile(r"<parameter=([^<>\n]{1,64})>")
_MARK = re.compile(r'\\.|\\\Z|["{}\[\]]', re.DOTALL)
_LONGEST_HEAD = 1000  # characters; a call with a longer one is read as a whole
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_NULL = ("null", "None")


class CallPart(NamedTuple):
    """What is new of a call: its name, unless that was there before, and more of its arguments."""

    place: int
    name: str | None
    arguments: str


@dataclass
class Part:
    """What is new of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallPart] = field(default_factory=list)


_Steps = Generator[None, None, None]  # each `yield` waits for more text, or for the end
_Decision = Generator[None, None, bool]


class OutputReader:
    """Reads one answer, which may begin within the reasoning, piece by piece. How it is cut changes nothing."""

    def __init__(self, parser: OutputParser, is_reasoning: bool = False):
        self.num_calls = 0  # so far
        self.parser = parser
        self._text, self._ended, self._new = "", False, Part()  # text that is not yet decided on
        self._steps = self._read(is_reasoning)

    def read(self, text: str, ended: bool) -> Part:
        """Return what is certain of the answer with a further piece, the last one if `ended`, and was not before."""
        self._text, self._ended, self._new = self._text + text, ended, Part()
        next(self._steps, None)
        return self._new

    def _read(self, is_reasoning: bool) -> _Steps:
        parser, form = self.parser, self.parser.calls
        if parser.named is not None:
            self._begin_call(parser.named)
            yield from self._until("", self._go_on)
        if parser.reasoning is not None:
            yield from self._read_reasoning(*parser.reasoning, is_reasoning)
        if form is None:
            yield from self._until("", self._add_content)
            return
        if form.bare:
            while not self._text.strip() and not self._ended:
                yield
            if self._text.lstrip()[:1] == form.bare:
                yield from self._read_calls(form, is_bare=True)
        while (space := (yield from self._until(form.tag, self._add_content))) is not None:
            if not (yield from self._read_calls(form)):
                self._add_content(space + form.tag)  # of something else

    def _read_reasoning(self, opening: str, closing: str, is_reasoning: bool) -> _Steps:
        """Read the reasoning, without the white space beside the tags."""
        while not self._ended and _may_become(self._text.lstrip(), opening):
            yield
        if (begin := self._text.lstrip()).startswith(opening):
            self._text = begin.removeprefix(opening)
        elif not is_reasoning:
            return
        yield from self._skip_space()
        yield from self._until(closing, self._add_reasoning, keeps_space=False)
        yield from self._skip_space()

    def _until(
        self, tag: str, add: Callable[[str], None], keeps_space: bool = True
    ) -> Generator[None, None, str | None]:
        """Add the text before a tag, and return the white space between; None if the text ends without the tag."""
        while not tag or tag not in self._text:
            if self._ended:
                add(self._take() if keeps_space else self._take().rstrip())
                return None
            add(self._take(len(_without_beginning(self._text, tag).rstrip()) if tag else None))
            yield
        before, _, self._text = self._text.partition(tag)
        add(before.rstrip())
        return before[len(before.rstrip()) :]

    def _read_calls(self, form: CallFormat, is_bare: bool = False) -> _Decision:
        """Read the calls with which the text begins. Return False if there are none; the text is then as before."""
        has_read, skipped, is_tagged = False, "", not is_bare
        while True:
            certain = len(self._text)
            if not self._ended:
                certain = min(len(_without_beginning(self._text, tag)) for tag in (form.tag, form.closing))
            match = re.compile(form.between).match(self._text, 0, certain)
            assert match is not None, "it may be empty"
            skipped += self._take(match.end())
            if match.end() == certain:
                if self._ended:
                    return True
                yield
                continue
            is_tagged = is_tagged or (bool(form.tag) and form.tag in skipped)
            if not (yield from self._read_call(form, is_bare, is_tagged)):
                if not has_read:
                    self._text = skipped + self._text
                return has_read
            has_read, skipped, is_tagged = True, "", False

    def _read_call(self, form: CallFormat, is_bare: bool, is_tagged: bool) -> _Decision:
        """Read a call, or return False and leave the text as it is."""
        if self._text[0] == "{":
            return (yield from self._read_json(is_bare))
        if form.is_xml:
            return (yield from self._read_xml())
        return form.is_named and is_tagged and (yield from self._read_named())

    def _read_json(self, is_bare: bool) -> _Decision:
        """Read an object with the name and the arguments."""
        nesting, seen = _Nesting(), 0
        while True:
            head, end = _HEAD.match(self._text, 0, _LONGEST_HEAD), nesting.end(self._text[seen:])
            if head is not None or end is not None:
                break
            if self._ended:
                return False
            seen = len(self._text)
            yield
        call = {"name": _loads(head[1])} if head is not None else _loads(self._text[: seen + (end or 0)])
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or (is_bare and name not in self.parser.functions):
            return False
        self._begin_call(name)
        if head is not None:
            self._take(head.end())
            yield from self._go_on_with_object(_Nesting(), self._go_on)
            yield from self._go_on_with_object(_Nesting(1), lambda _: None)
            return True
        self._take(seen + (end or 0))
        arguments = call.get("arguments", call.get("parameters")) or {}
        self._go_on(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
        return True

    def _read_named(self) -> _Decision:
        """Read a name and an object with the arguments."""
        while "{" not in self._text and not self._ended:
            if len(self._text) > 150 or not re.fullmatch(r"[\w.\-\[\]\s]*", self._text):
                return False
            yield
        head = _NAMED_HEAD.match(self._text)
        if head is None:
            return False
        self._begin_call(head[1])
        self._take(head.end())
        yield from self._go_on_with_object(_Nesting(), self._go_on)
        return True

    def _go_on_with_object(self, nesting: "_Nesting", add: Callable[[str], None]) -> _Steps:
        """Add the text to the end of an object."""
        while (end := nesting.end(self._text)) is None and not self._ended:
            add(self._take())
            yield
        add(self._take(end))

    def _read_xml(self) -> _Decision:
        """Read a function with its parameters."""
        while not self._ended and _is_open(self._text, _XML_FUNCTION):
            yield
        head = _XML_HEAD.match(self._text)
        if head is None:
            return False
        self._take(head.end())
        self._begin_call(head[1])
        properties, separator = self.parser.functions.get(head[1], {}).get("properties") or {}, "{"
        while True:
            yield from self._skip_space()
            while not self._ended and _is_open(self._text, _XML_PARAMETER, _XML_END):
                yield
            if (key := _XML_KEY.match(self._text)) is None:
                break
            self._take(key.end())
            self._go_on(f"{separator}{json.dumps(key[1], ensure_ascii=False)}: ")
            separator = ", "
            yield from self._read_value(properties.get(key[1]) or {})
        if self._ended and _is_open(self._text, _XML_PARAMETER, _XML_END):  # it breaks off
            self._take()
            return True
        self._text = self._text.removeprefix(_XML_END)
        self._go_on("{}" if separator == "{" else "}")
        return True

    def _read_value(self, schema: Mapping[str, Any]) -> _Steps:
        """Read the value of a parameter: a string as it comes, another type as a whole."""
        while not self._text and not self._ended:
            yield
        self._text = self._text.removeprefix("\n")
        is_string, value = schema.get("type") == "string", ""
        self._go_on('"' if is_string else "")
        while _VALUE_END not in self._text and not self._ended:
            certain = min(len(_without_beginning(self._text, tag)) for tag in (_VALUE_END, f"\n{_VALUE_END}"))
            piece = self._take(certain)
            self._go_on(_escaped(piece) if is_string else "")
            value += piece
            yield
        piece, end, self._text = self._text.partition(_VALUE_END)
        piece = piece.removesuffix("\n") if end else piece
        if is_string:
            self._go_on(_escaped(piece) + ('"' if end else ""))
        elif end:
            value = (value + piece).strip()
            read = _loads(_PYTHON.get(value, value))
            self._go_on(json.dumps(value if read is None and value not in _NULL else read, ensure_ascii=False))

    def _skip_space(self) -> _Steps:
        while not self._text.strip() and not self._ended:
            yield
        self._text = self._text.lstrip()

    def _take(self, count: int | None = None) -> str:
        """Take the next characters, or all, out of the text that is not decided on."""
        taken = self._text[:count]
        self._text = self._text[len(taken) :]
        return taken

    def _add_reasoning(self, text: str) -> None:
        self._new.reasoning += text

    def _add_content(self, text: str) -> None:
        self._new.content += text

    def _begin_call(self, name: str) -> None:
        self.num_calls += 1
        self._add_call(name, "")

    def _go_on(self, arguments: str) -> None:
        """Add to the arguments of the last call."""
        if not arguments:
            return
        if self._new.calls and self._new.calls[-1].place == self.num_calls - 1:
            last = self._new.calls.pop()
            self._add_call(last.name, last.arguments + arguments)
        else:
            self._add_call(None, arguments)

    def _add_call(self, name: str | None, arguments: str) -> None:
        if self.parser.most_calls is None or self.num_calls <= self.parser.most_calls:
            self._new.calls.append(CallPart(self.num_calls - 1, name, arguments))


class _Nesting:
    """Finds the end of a JSON object or list whose text comes in pieces, behind `depth` open brackets."""

    def __init__(self, depth: int = 0):
        self._depth, self._is_string, self._is_escaped = depth, False, False

    def end(self, piece: str) -> int | None:
        """Return where it ends in the next piece, or None if it goes on."""
        if not piece:
            return None
        start, self._is_escaped = int(self._is_escaped), False
        for match in _MARK.finditer(piece, start):
            if match[0][0] == "\\":
                self._is_escaped = len(match[0]) == 1
            elif match[0] == '"':
                self._is_string = not self._is_string
            elif not self._is_string:
                self._depth += 1 if match[0] in "{[" else -1
                if not self._depth:
                    return match.end()
        return None


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _escaped(text: str) -> str:
    """Return a part of a string as it stands in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _may_become(text: str, tag: str) -> bool:
    return len(text) < len(tag) and tag.startswith(text)


def _is_open(text: str, *tags: str) -> bool:
    """Return whether what follows decides if the text begins with one of the tags, which go on to > after a =."""
    return any(
        _may_become(text, tag) or (tag[-1] == "=" and text.startswith(tag) and ">" not in text and len(text) < 80)
        for tag in tags
    )


def _without_beginning(text: str, tag: str) -> str:
    """Return `text` without an end that may begin the tag."""
    for count in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-count:]):
            return text[:-count]
    return text
