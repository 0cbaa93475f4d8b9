"""Answers of models with tool calls, and what is read of them."""

from typing import Any, NamedTuple


class ToolCall(NamedTuple):
    name: str
    arguments: str


class Parsed(NamedTuple):
    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


ROME, NOW = '{"city": "Rome}</tool_call>"}', "{}"
NOW_CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
CALLS = (ToolCall("weather", ROME), ToolCall("now", NOW))

ANSWERS: list[tuple[str, str, Parsed]] = [
    ("hermes", "The sun\n", Parsed(content="The sun\n")),
    ("hermes", "a <tool", Parsed(content="a <tool")),
    (
        "hermes",
        f'Well.\n<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>\n<tool_call>\n'
        '{"name": "now", "arguments": {}}\n</tool_call>',
        Parsed(content="Well.", calls=CALLS),
    ),
    ("hermes", '<tool_call>{"arguments": {}, "name": "now"}</tool_call> ok', Parsed("", "ok", (ToolCall("now", NOW),))),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}', Parsed(calls=(ToolCall("now", NOW),))),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "\\', Parsed(calls=(ToolCall("now", '{"a": "\\'),))),
    ("hermes", '<tool_call>{"name": "n', Parsed(content='<tool_call>{"name": "n')),
    ("hermes", "<tool_call>none</tool_call>", Parsed(content="<tool_call>none</tool_call>")),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', Parsed(content='<tool_call>{"name": 3}</tool_call>')),
    ("llama3_json", f'{{"name": "weather", "parameters": {ROME}}}', Parsed(calls=CALLS[:1])),
    (
        "llama3_json",
        f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {ROME}}}; {{"name": "now"}}',
        Parsed(calls=CALLS),
    ),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', Parsed(content='{"name": "Bob", "parameters": {}}')),
    ("llama3_json", '{"a": 1} {', Parsed(content='{"a": 1} {')),
    (
        "mistral",
        f'Well. [TOOL_CALLS] [{{"name": "weather", "arguments": {ROME}}}, {{"name": "now", "arguments": {{}}}}]',
        Parsed(content="Well.", calls=CALLS),
    ),
    ("mistral", "[1]", Parsed(content="[1]")),
    ("mistral", f"Well.[TOOL_CALLS]weather[ARGS]{ROME}[TOOL_CALLS]now[ARGS]{{}}", Parsed("", "Well.", CALLS)),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]a1[ARGS]{ROME}", Parsed(calls=CALLS[:1])),
    ("mistral", '[TOOL_CALLS]now{} and {"a": 1}', Parsed("", 'and {"a": 1}', CALLS[1:])),
    ("mistral", "[TOOL_CALLS]as such {", Parsed(content="[TOOL_CALLS]as such {")),
    (
        "qwen3_coder",
        "Well.\n<tool_call>\n<function=weather>\n<parameter=city>\nRome}</tool_call>\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        Parsed(content="Well.", calls=CALLS),
    ),
    (
        "qwen3_coder",
        '<tool_call><function=add><parameter=a>\n1\n</parameter><parameter=b>\n\nx\n"\n\n</parameter>'
        "<parameter=c>True</parameter><parameter=d>{</parameter></function></tool_call> ok",
        Parsed("", "ok", (ToolCall("add", r'{"a": 1, "b": "\nx\n\"\n", "c": true, "d": "{"}'),)),
    ),
    (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=city>\nRo",
        Parsed(calls=(ToolCall("weather", '{"city": "Ro'),)),
    ),
    ("qwen3_coder", "<tool_call><function=now>\n</func", Parsed(calls=(ToolCall("now", ""),))),
    ("qwen3_coder", "<tool_call><function=a b>", Parsed(content="<tool_call><function=a b>")),
    ("generic", f'Well. <tool_call>[{{"name": "weather", "arguments": {ROME}}}]', Parsed("", "Well.", CALLS[:1])),
    ("generic", f'[{{"name": "weather", "arguments": {ROME}}}, {{"name": "now"}}] So', Parsed("", "So", CALLS)),
    ("hermes", r'<tool_call>{"name": "f\ud83d"}', Parsed(calls=(ToolCall(r"f\ud83d", NOW),))),
    ("generic", '{"name": "Bob", "arguments": {}}', Parsed("", '{"name": "Bob", "arguments": {}}')),
]

FUNCTIONS: dict[str, Any] = {
    "weather": {"properties": {"city": {"type": "string"}}},
    "now": {},
    "add": {"properties": {"b": {"type": "string"}}},
    "f": {"properties": {"a": {}, "b": {"type": "string"}}},
}
