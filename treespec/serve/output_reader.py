"""Incremental splitting of a chat answer's text into reasoning, content and tool calls."""

import json
import math
import re
from collections.abc import Callable, Generator, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from treespec.serve.output_parser import JSON_TYPES, CallFormat, OutputParser, json_type
from treespec.text.detokenizer import partial_match_length

# The usual beginning of a call, in the key order that allows streaming the arguments.
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:'
    r"\s*(?=\{)"
)
_NAMED_HEAD = re.compile(r"([\w.-]{1,64})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s?(?=\{)")
_SPACE = r"\s*"
_BRACE, _REST = re.compile(r"[{}]"), re.compile(r'\s*(?:\}|,\s*(?="))')
_XML_FUNCTION, _XML_END, _XML_PARAMETER, _VALUE_END = "<function=", "</function>", "<parameter=", "</parameter>"
_XML_HEAD, _XML_KEY = re.compile(r"<function=([\w.-]{1,64})>"), re.compile(r"<parameter=([^<>\n]{1,64})>")
# Tags that may end a value, including ones that more text may complete.
_XML_TAG = re.compile(
    rf"{_VALUE_END}|{_XML_END}|</tool_call>|{_XML_KEY.pattern}|(?:<tool_call>\s*)?{_XML_HEAD.pattern}"
)
_XML_BEGUN = re.compile(r"\n?(?:<tool_call>\s*)?(?:<[^<>\n]{0,80})?\Z")
_MARK = re.compile(r'\\.|\\\Z|["{}\[\]]', re.DOTALL)
_MAX_HEAD = 1000  # characters; calls with a longer head are parsed as a whole
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class CallPart(NamedTuple):
    """New parts of a call: its name, unless emitted before, and more of its arguments."""

    place: int
    name: str | None
    arguments: str


@dataclass
class Part:
    """New parts of an answer; `pieces` has all of them in order, texts with "reasoning" or "content"."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallPart] = field(default_factory=list)
    pieces: list[CallPart | tuple[str, str]] = field(default_factory=list)


_Steps = Generator[None, None, None]  # each `yield` waits for more text or for the end
_Decision = Generator[None, None, bool]


class OutputReader:
    """Incremental parser of one answer, which may start within the reasoning. The result does not depend on the pieces.

    A tag of the format ends the open element, unless it is inside a string of an object, or inside a value, that
    continues after it. Text that is not a call is content.
    """

    def __init__(self, parser: OutputParser, is_reasoning: bool = False):
        self.num_calls = 0  # number of calls so far
        self.parser = parser
        self._text, self._ended, self._new = "", False, Part()  # text not yet classified
        self._steps = self._read(is_reasoning)

    def read(self, text: str, ended: bool) -> Part:
        """Add a piece (the last one if `ended`), and return the newly determined parts of the answer."""
        self._text, self._ended, self._new = self._text + text, ended, Part()
        next(self._steps, None)
        return self._new

    def _read(self, is_reasoning: bool) -> _Steps:
        parser, form = self.parser, self.parser.calls
        if parser.named is not None:
            self._begin_call(parser.named)
            yield from self._until((), self._go_on)
        if parser.reasoning is not None:
            yield from self._read_reasoning(parser.reasoning.opening, parser.reasoning.closing, is_reasoning)
        if form is None:
            yield from self._until((), self._add_content)
            return
        is_open = False  # whether a closing tag of calls is still missing
        if form.bare:
            while not self._text.strip() and not self._ended:
                yield
            if self._text.lstrip().startswith(tuple(form.bare)):
                is_open = yield from self._read_calls(form, is_bare=True)
        tags = (*form.tags, *([_XML_FUNCTION] if form.is_xml else ()))
        while (match := (yield from self._until(tags, self._add_content))) is not None:
            space, tag = match
            is_bare = tag == _XML_FUNCTION  # models omit the tag before it
            self._text = tag + self._text if is_bare else self._text
            if is_open and tag == form.closing:
                is_open = False
                yield from self._skip(_SPACE)
            elif tag != form.closing and (yield from self._read_calls(form, is_bare)):
                is_open = True
            else:
                self._take(len(tag) if is_bare else 0)
                self._add_content(space + tag)

    def _read_reasoning(self, opening: str, closing: str, is_reasoning: bool) -> _Steps:
        """Read the reasoning, without white space next to the tags."""
        while not self._ended and _may_become(self._text.lstrip(), opening):
            yield
        if (begin := self._text.lstrip()).startswith(opening):
            self._text = begin.removeprefix(opening)
        elif not is_reasoning:
            return
        yield from self._skip(_SPACE)
        yield from self._until((closing,), self._add_reasoning, keeps_space=False)
        yield from self._skip(_SPACE)

    def _until(
        self, tags: tuple[str, ...], add: Callable[[str], None], keeps_space: bool = True
    ) -> Generator[None, None, tuple[str, str] | None]:
        """Add the text before the first tag; return the white space between them and the tag, or None for no tag."""
        while (match := min(((self._text.find(tag), tag) for tag in tags if tag in self._text), default=None)) is None:
            if self._ended:
                add(self._take() if keeps_space else self._take().rstrip())
                return None
            add(self._take(len(self._text[: self._certain(*tags)].rstrip()) if tags else None))
            yield
        position, tag = match
        text = self._take(position)
        self._take(len(tag))
        add(text.rstrip())
        return text[len(text.rstrip()) :], tag

    def _read_calls(self, form: CallFormat, is_bare: bool = False) -> _Decision:
        """Read calls at the beginning of the text. Return False, and leave the text unchanged, if there are none."""
        num_calls, prefix = self.num_calls, ""
        while True:
            if self.num_calls == num_calls:
                skipped = prefix = yield from self._skip(r"\s*\[?\s*" if form.is_list else _SPACE)
            else:
                skipped = yield from self._skip(rf"\s*[{form.separators}]?\s*" if form.separators else _SPACE)
            if not self._text or not (yield from self._read_call(form, is_bare, is_first=self.num_calls == num_calls)):
                self._text = skipped + self._text
                break
        if self.num_calls > num_calls:
            yield from self._skip(r"\s*\]?\s*" if "[" in prefix else _SPACE)
        return self.num_calls > num_calls

    def _skip(self, pattern: str) -> Generator[None, None, str]:
        """Consume a match of the pattern at the beginning of the text."""
        while True:
            match = re.match(pattern, self._text)
            assert match is not None, "the pattern matches an empty text"
            if match.end() < len(self._text) or self._ended:
                return self._take(match.end())
            yield

    def _read_call(self, form: CallFormat, is_bare: bool, is_first: bool) -> _Decision:
        """Read a call, or return False and leave the text unchanged."""
        if self._text[0] == "{":
            return (yield from self._read_json(form, is_bare))
        if form.is_xml:
            return (yield from self._read_xml(is_bare))
        return form.is_named and is_first and not is_bare and (yield from self._read_named(form))

    def _read_json(self, form: CallFormat, is_bare: bool) -> _Decision:
        """Read an object with the name and the arguments."""
        while (brace := _BRACE.search(self._text, 1, _MAX_HEAD)) is None:
            if self._ended or len(self._text) >= _MAX_HEAD:
                break
            yield
        head = None if brace is None else _HEAD.match(self._text, 0, brace.end())
        pieces: list[str] = []
        if head is None and not (yield from self._read_object(form.tags, pieces.append)):
            self._text = "".join(pieces) + self._text
            return False
        call = _loads("".join(pieces)) if head is None else {"name": _loads(head[1])}
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or (is_bare and name not in self.parser.functions):
            self._text = "".join(pieces) + self._text
            return False
        self._begin_call(_encodable(name))
        if head is None:
            arguments = call.get("arguments", call.get("parameters")) or {}
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            self._go_on(_encodable(text))
            return True
        self._take(head.end())
        if (yield from self._read_object(form.tags, self._go_on)):
            yield from self._read_rest(form.tags)
        return True

    def _read_rest(self, tags: tuple[str, ...]) -> _Steps:
        """Skip the rest of a call's object after the arguments, unless the brace is missing."""
        while (match := _REST.match(self._text)) is None and not self._ended and re.fullmatch(r"\s*,?\s*", self._text):
            yield
        if match is None:
            return
        if match[0].endswith("}"):
            self._take(match.end())
            return
        pieces: list[str] = []
        is_whole = yield from self._read_object(tags, pieces.append, opened='{"": 0')
        if not is_whole or _loads('{"": 0' + "".join(pieces)) is None:
            self._text = "".join(pieces) + self._text

    def _read_named(self, form: CallFormat) -> _Decision:
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
        yield from self._read_object(form.tags, self._go_on)
        return True

    def _read_object(self, tags: tuple[str, ...], add: Callable[[str], None], opened: str = "") -> _Decision:
        """Add the text of an object that begins with `opened`, up to its end or a tag; return whether it is complete.

        A tag inside a string is part of it if the object, with the following text, is JSON.
        """
        nesting, consumed = _Nesting(len(opened[:1])), opened
        while True:
            tag = min((position for tag_text in tags if (position := self._text.find(tag_text)) >= 0), default=None)
            certain = self._certain(*tags) if tag is None else tag
            end = nesting.end(self._text[:certain])
            piece = self._take(certain if end is None else end)
            add(piece)
            consumed += piece
            if end is not None or tag is not None or self._ended:
                break
            yield
        if end is not None or tag is None or not nesting.is_string:
            return end is not None
        scanned = 0
        while (end := nesting.end(self._text[scanned:])) is None and not self._ended:
            scanned = len(self._text)
            yield
        if end is None or _loads(consumed + self._text[: scanned + end]) is None:
            return False
        add(self._take(scanned + end))
        return True

    def _read_xml(self, is_bare: bool) -> _Decision:
        """Read a function with its parameters."""
        while not self._ended and _is_open(self._text, _XML_FUNCTION):
            yield
        head = _XML_HEAD.match(self._text)
        if head is None or (is_bare and head[1] not in self.parser.functions):
            return False
        self._take(head.end())
        self._begin_call(head[1])
        given_keys: set[str] = set()
        while True:
            yield from self._skip(_SPACE)
            while not self._ended and _is_open(self._text, _XML_PARAMETER, _XML_END):
                yield
            if (key := _XML_KEY.match(self._text)) is None:
                break
            self._take(key.end())
            self._go_on(f"{', ' if given_keys else '{'}{json.dumps(key[1], ensure_ascii=False)}: ")
            given_keys.add(key[1])
            if not (yield from self._read_value(head[1], key[1], given_keys)):
                return True
        if self._ended and _is_open(self._text, _XML_PARAMETER, _XML_END):  # the text is truncated
            self._take()
            return True
        self._text = self._text.removeprefix(_XML_END)
        self._go_on("}" if given_keys else "{}")
        return True

    def _read_value(self, function: str, parameter: str, given_keys: set[str]) -> _Decision:
        """Read a parameter's value: strings incrementally, other types as a whole. Return whether it is complete.

        Without its own closing tag, it ends at the next parameter not yet in `given_keys`, or at the function's end.
        """
        while not self._text and not self._ended:
            yield
        self._text = self._text.removeprefix("\n")
        types, value = self.parser.value_types(function, parameter), ""
        is_string = types == {"string"}
        self._go_on('"' if is_string else "")
        closing: int | None = None  # a tag of the function's end; part of the value if the value's own tag follows
        scanned = 0
        while True:
            end = None
            for tag in _XML_TAG.finditer(self._text, scanned):
                scanned, (next_key, next_function) = tag.end(), tag.groups()
                if tag[0] == _VALUE_END or (next_key is not None and self._is_next(function, next_key, given_keys)):
                    end = tag.start()
                elif next_function in self.parser.functions:
                    end = tag.start() if closing is None else closing
                elif next_key is None and next_function is None and closing is None:
                    closing = tag.start()
                if end is not None:
                    break
            if end is not None or self._ended:
                break
            partial_tag = _XML_BEGUN.search(self._text, scanned)
            assert partial_tag is not None, "the pattern matches an empty text"
            scanned = partial_tag.start()
            certain = scanned if closing is None else closing - self._text[:closing].endswith("\n")
            piece = self._take(certain)
            self._go_on(_escaped(piece) if is_string else "")
            value, scanned, closing = value + piece, scanned - certain, None if closing is None else closing - certain
            yield
        end = closing if end is None else end
        piece = self._take(end)
        if end is not None:
            piece, self._text = piece.removesuffix("\n"), self._text.removeprefix(_VALUE_END)
        if is_string:
            self._go_on(_escaped(piece) + ("" if end is None else '"'))
        else:
            self._go_on(_json_value(value + piece, types))
        return end is not None

    def _is_next(self, function: str, parameter: str, given_keys: set[str]) -> bool:
        """Return whether this parameter may come next in a function."""
        return parameter not in given_keys and parameter in (self.parser.parameters(function) or {parameter})

    def _certain(self, *tags: str) -> int:
        """Return the length of the text's prefix that cannot be the start of any of the tags."""
        return len(self._text) - (0 if self._ended else partial_match_length(self._text, tags))

    def _take(self, count: int | None = None) -> str:
        """Consume the next characters, or all, of the unclassified text."""
        text = self._text[:count]
        self._text = self._text[len(text) :]
        return text

    def _add_reasoning(self, text: str) -> None:
        self._new.reasoning += text
        self._new.pieces.append(("reasoning", text))

    def _add_content(self, text: str) -> None:
        self._new.content += text
        self._new.pieces.append(("content", text))

    def _begin_call(self, name: str) -> None:
        self.num_calls += 1
        self._add_call(name, "")

    def _go_on(self, arguments: str) -> None:
        """Append to the arguments of the last call."""
        if arguments:
            self._add_call(None, arguments)

    def _add_call(self, name: str | None, arguments: str) -> None:
        if self.parser.max_calls is not None and self.num_calls > self.parser.max_calls:
            return
        call = CallPart(self.num_calls - 1, name, arguments)
        self._new.pieces.append(call)
        if name is None and self._new.calls and self._new.calls[-1].place == call.place:
            last = self._new.calls.pop()
            call = last._replace(arguments=last.arguments + arguments)
        self._new.calls.append(call)


class _Nesting:
    """Incremental search for the end of a JSON object or list, starting inside `depth` open brackets."""

    def __init__(self, depth: int = 0):
        self._depth, self.is_string, self._is_escaped = depth, False, False

    def end(self, piece: str) -> int | None:
        """Return the end position in the next piece, or None if the value continues."""
        if not piece:
            return None
        start, self._is_escaped = int(self._is_escaped), False
        for match in _MARK.finditer(piece, start):
            if match[0][0] == "\\":
                self._is_escaped = len(match[0]) == 1
            elif match[0] == '"':
                self.is_string = not self.is_string
            elif not self.is_string:
                self._depth += 1 if match[0] in "{[" else -1
                if not self._depth:
                    return match.end()
        return None


def _loads(text: str, strict: bool = False) -> Any:
    """Parse JSON; return None for null, invalid JSON and numbers that are not finite."""
    try:
        return json.loads(text, strict=strict, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number


def _json_value(text: str, types: Set[str]) -> str:
    """Return a parameter's value as JSON: in the first of its types that the text can be parsed as, or a string."""
    literal = _PYTHON.get(text.strip(), text.strip())
    parsed = _loads(literal, strict=True)
    is_json = parsed is not None or literal == "null"
    if is_json and ("string" not in types or json_type(parsed) in types - {"string"} or types >= JSON_TYPES):
        return literal
    return json.dumps(text.strip() if types >= JSON_TYPES else text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Return a part of a string in JSON's escaping."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _encodable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, with JSON escapes."""
    return text.encode(errors="backslashreplace").decode()


def _may_become(text: str, tag: str) -> bool:
    return len(text) < len(tag) and tag.startswith(text)


def _is_open(text: str, *tags: str) -> bool:
    """Return whether the text may become one of the tags (which extend to > after a =) with more text."""
    return any(
        _may_become(text, tag) or (tag[-1] == "=" and text.startswith(tag) and ">" not in text and len(text) < 80)
        for tag in tags
    )
