"""The reader of answers: reasoning, content and tool calls, however the text is cut into pieces."""

import functools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.tool_calls import ANSWERS, CALLS, FUNCTIONS, NOW_CALL, Parsed, ToolCall
from treespec.serve.output_parser import (
    CALL_FORMATS,
    REASONING_TAGS,
    REQUIRED_CALLS,
    CallFormat,
    OutputParser,
    detect_call_format,
)
from treespec.serve.output_reader import OutputReader

# A call that is slightly wrong, with its arguments, the content, and whether a call of `now` follows. A tag ends it.
WRONG: list[tuple[str, str, str | None, str, bool]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>\nSo\n' + NOW_CALL, "{}", "So", True),
    ("hermes", '<tool_call>{"name": "f", "arguments": {} So</tool_call>' + NOW_CALL, "{}", "So", True),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "id": "</tool_call>"}' + NOW_CALL, "{}", "", True),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b</tool_call> So "c}', '{"a": "b', 'So "c}', False),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b}</tool_call>\nSo ' + NOW_CALL, '{"a": "b}', "So", True),
    (
        "hermes",
        '<tool_call>{"arguments": {}</tool_call>' + NOW_CALL,
        None,
        '<tool_call>{"arguments": {}</tool_call>',
        True,
    ),
    ("hermes", '<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "f"}', r'{"a": "\ud83d"}', "", False),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {}; {"name": "now", "parameters": {}\nSo',
        "{}",
        "So",
        True,
    ),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}<|python_tag|>{"name": "now"} {', "{}", "{", True),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, {"name": "now", "arguments": {}}] So', "{}", "So", True),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": [1[TOOL_CALLS]now[ARGS]{} ] So', '{"a": [1', "] So", True),
    ("qwen3_coder", "As <function=g> or <function=f></function></tool_call>", "{}", "As <function=g> or", False),
    (
        "qwen3_coder",
        "<function=f><parameter=a>\n1\n<parameter=b>\n<parameter=d>\n</function></tool_call>\nSo " + NOW_CALL,
        '{"a": 1, "b": "<parameter=d>"}',
        "So",
        True,
    ),
    (
        "qwen3_coder",
        "<function=f><parameter=b><tool_call>\n<tool_call><function=now>\n</function>",
        '{"b": "<tool_call>"}',
        "",
        True,
    ),
]
SLIPS = [
    (form, text, Parsed("", content, ((ToolCall("f", arguments),) if arguments else ()) + CALLS[1:] * follows))
    for form, text, arguments, content, follows in WRONG
]


def read(parser: OutputParser, pieces: list[str], is_reasoning: bool = False) -> Parsed:
    """What the parts of an answer that comes in pieces add up to."""
    reader = OutputReader(parser, is_reasoning)
    reasoning, content, calls = "", "", list[ToolCall]()
    for place, piece in enumerate(pieces, start=1):
        part = reader.read(piece, ended=place == len(pieces))
        reasoning, content = reasoning + part.reasoning, content + part.content
        for index, name, arguments in part.calls:
            assert (name is None) == (index < len(calls)), "a call begins once"
            if name is not None:
                calls.append(ToolCall(name, ""))
            assert index == len(calls) - 1
            calls[index] = ToolCall(calls[index].name, calls[index].arguments + arguments)
    assert reader.num_calls >= len(calls)
    return Parsed(reasoning, content, tuple(calls))


def grows(parser: OutputParser, text: str, is_reasoning: bool = False) -> Parsed:
    """Read a text whole, and character by character."""
    whole = read(parser, [text], is_reasoning)
    assert read(parser, [*text, ""], is_reasoning) == whole
    return whole


@pytest.mark.parametrize(("form", "text", "expected"), [*ANSWERS, *SLIPS])
@pytest.mark.parametrize("reasons", [False, True])
def test_the_parser(form: str, text: str, expected: Parsed, reasons: bool) -> None:
    tags = REASONING_TAGS["qwen3"]
    parser = OutputParser(tags if reasons else None, CALL_FORMATS[form], functions=FUNCTIONS)
    assert grows(parser, text) == expected
    if reasons:
        thought = "\nIs </think it?\n</think>\n\n"
        assert grows(parser, f"<think>{thought}{text}") == Parsed("Is </think it?", *expected[1:])
        assert grows(parser, thought + text, is_reasoning=True) == Parsed("Is </think it?", *expected[1:])
        assert grows(parser, "<think> a ") == Parsed("a") == grows(parser, " a ", is_reasoning=True)


PIECES = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<|python_tag|>"]
PIECES += ["<function=now>", "<function=f>", "<parameter=a>", "<parameter=b>", "</parameter>", "</function>"]
PIECES += ['{"name": "now", "arguments": {', '{"arguments": {}, "name": "now"', '"c": "', *'{}[]",\\ <>\n']
WORDS = [f"word{i}." for i in range(3)]


@settings(max_examples=80)
@given(
    st.lists(st.sampled_from(PIECES + WORDS)),
    st.integers(1, 9),
    st.sampled_from([*CALL_FORMATS.values(), REQUIRED_CALLS]),
)
def test_the_parser_reads_anything(pieces: list[str], size: int, form: CallFormat) -> None:
    """How the text is cut into pieces changes nothing, and no word is dropped."""
    parser, text = OutputParser(REASONING_TAGS["think"], form, functions=FUNCTIONS), "".join(pieces)
    whole = grows(parser, text)
    assert read(parser, [text[i : i + size] for i in range(0, len(text) + 1, size)]) == whole
    assert read(parser, [*pieces, ""]) == whole
    said = f"{whole.reasoning}{whole.content}{whole.calls}"
    assert all(said.count(word) == text.count(word) for word in WORDS)


VALUES: list[tuple[Any, str, Any]] = [
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "1", "1"),  # pydantic's Optional[str]
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "1", 1),
    ({"type": ["string", "null"]}, "true", "true"),
    ({"type": ["string", "object"]}, '{"a": [1.50]}', {"a": [1.5]}),
    ({"allOf": [{"type": ["string", "integer"]}, {"$ref": "#/$defs/text"}]}, "1", "1"),
    ({"$ref": "#/$defs/more"}, "1", "1"),
    ({"$ref": "#/$defs/none"}, "1", 1),
    ({"enum": ["1", "true"]}, "true", "true"),
    ({"const": "1"}, "1", "1"),
    ({"type": "integer"}, "x", "x"),
    (functools.reduce(lambda schema, _: {"anyOf": [schema]}, range(2000), {}), "1", 1),
    *(({"type": "number"}, text, text) for text in ("NaN", "-Infinity", "1e999", '{"a": 1e999}')),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_values_have_the_types_of_their_schema(schema: Any, text: str, value: Any) -> None:
    """Also where the schema refers to definitions, which may refer to themselves."""
    definitions = {"text": {"enum": ["1"]}, "more": {"anyOf": [{"$ref": "#/$defs/more"}, {"$ref": "#/$defs/text"}]}}
    function = {"$defs": {"args": {"properties": {"x": schema}}, **definitions}, "$ref": "#/$defs/args"}
    parser = OutputParser(None, CALL_FORMATS["qwen3_coder"], functions={"f": function})
    ((name, arguments),) = grows(parser, f"<function=f><parameter=x>\n{text}\n</parameter></function>").calls
    assert name == "f" and json.loads(arguments, parse_constant=pytest.fail) == {"x": value}


def test_formats_of_templates() -> None:
    for text, name in (
        ("<tool_call>", "hermes"),
        ("<tool_call><function=", "qwen3_coder"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ("<tool_call>{name}<arg_key>", None),
        ("<|python_tag|><function=", None),
        ("", None),
    ):
        assert detect_call_format(text) == name
