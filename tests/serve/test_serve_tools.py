"""Tool calls and reasoning of `treespec serve`: equal with and without speculation, whole and streamed."""

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI

from tests.helpers.serving import NAME, PATIENCE, client_of, serving
from tests.helpers.speech import scripted
from treespec import LLM, AsyncLLM
from treespec.serve.output_parser import (
    CALL_FORMATS,
    REASONING_TAGS,
    REQUIRED_CALLS,
    CallFormat,
    OutputParser,
    detect_call_format,
)
from treespec.serve.output_reader import OutputReader

pytestmark = pytest.mark.usefixtures("gives_all_pages_back")

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {**CITY, "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "Rome?"}]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}{% for message in messages %}"
    "{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }} {{ call.function.arguments.city }}{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if think %}<think>{% endif %}{% endif %}{# </think> #}"
)


class ToolCall(NamedTuple):
    name: str
    arguments: str


class Parsed(NamedTuple):
    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


ROME, NOW = '{"city": "Rome}</tool_call>"}', "{}"
CALLS = (ToolCall("weather", ROME), ToolCall("now", NOW))


# --- the parser

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
NOW_CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
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
ANSWERS += [
    (form, text, Parsed("", content, ((ToolCall("f", arguments),) if arguments else ()) + CALLS[1:] * follows))
    for form, text, arguments, content, follows in WRONG
]
FUNCTIONS: dict[str, Any] = {
    "weather": {"properties": {"city": {"type": "string"}}},
    "now": {},
    "add": {"properties": {"b": {"type": "string"}}},
    "f": {"properties": {"a": {}, "b": {"type": "string"}}},
}


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


@pytest.mark.parametrize(("form", "text", "expected"), ANSWERS)
@pytest.mark.parametrize("reasons", [False, True])
def test_the_parser(form: str, text: str, expected: Parsed, reasons: bool) -> None:
    tags = REASONING_TAGS["qwen3"]
    parser = OutputParser(tags if reasons else None, CALL_FORMATS[form], functions=FUNCTIONS)
    assert grows(parser, text) == expected
    if reasons:
        thought = "\nIs </think it?\n</think>\n\n"
        assert grows(parser, f"<think>{thought}{text}") == expected._replace(reasoning="Is </think it?")
        assert grows(parser, thought + text, is_reasoning=True) == expected._replace(reasoning="Is </think it?")
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


# --- the server


@contextmanager
def talking(engine: AsyncLLM, parser: str = "hermes", **options: Any) -> Iterator[OpenAI]:
    options = {"chat_template": TEMPLATE, "tool_call_parser": parser} | options
    with serving(engine, **options) as url, client_of(url) as client:
        yield client


@pytest.fixture(scope="module")
def client(engine: AsyncLLM) -> Iterator[OpenAI]:
    with talking(engine) as client:
        yield client


def answers(client: OpenAI, **options: Any) -> Iterator[Any]:
    """The whole answer without speculation, and the streamed one with it."""
    extra = options.pop("extra_body", {})
    arguments: dict[str, Any] = {"model": NAME, "messages": MESSAGES, **options}
    yield client.chat.completions.create(**arguments, extra_body={"speculation": "off", **extra}).choices[0]
    with client.chat.completions.stream(**arguments, extra_body={"speculation": {"nodes": 8}, **extra}) as stream:
        yield stream.get_final_completion().choices[0]


def parsed(choice: Any) -> Parsed:
    calls = choice.message.tool_calls or ()
    assert len({call.id for call in calls}) == len(calls) and all(len(call.id) == 9 for call in calls)
    read = tuple(ToolCall(call.function.name, call.function.arguments) for call in calls)
    return Parsed(getattr(choice.message, "reasoning_content", None) or "", choice.message.content or "", read)


def says(llm: LLM, client: OpenAI, text: str, **body: Any) -> Any:
    """Let the target answer `MESSAGES` with a text, and an oracle draft it."""
    body = {"messages": MESSAGES, "tools": TOOLS, **body}
    answer = httpx2.post(str(client.base_url).replace("/v1/", "/tokenize"), json=body)
    tokenizer = llm.get_tokenizer()
    return scripted(llm, [[*answer.json()["tokens"], *tokenizer.encode(text), tokenizer.eos_token_id]])


@pytest.mark.parametrize(("form", "text", "expected"), [ANSWERS[i] for i in (2, 9, 13, 19, -16, -14)])
def test_calls_of_the_model(engine: AsyncLLM, llm: LLM, form: str, text: str, expected: Parsed) -> None:
    with talking(engine, form) as client, says(llm, client, text):
        for choice in answers(client, tools=TOOLS, temperature=0):
            assert parsed(choice) == expected and choice.finish_reason == "tool_calls"
        if form == "hermes":
            for choice in answers(client, tools=TOOLS, temperature=0, parallel_tool_calls=False):
                assert parsed(choice) == expected._replace(calls=expected.calls[:1])


def test_no_calls(client: OpenAI, llm: LLM) -> None:
    call = '<tool_call>{"name": "now"}'
    for text, tools, choice in (("The sun\n", TOOLS, "auto"), (call, None, "none")):
        with says(llm, client, text, tools=tools):
            for answer in answers(client, tools=TOOLS, tool_choice=choice, temperature=0):
                assert parsed(answer) == Parsed(content=text) and answer.finish_reason == "stop"


def test_a_call_is_streamed_as_it_is_written(engine: AsyncLLM, llm: LLM) -> None:
    """Its arguments part by part; the server joins those that wait for the client."""
    text = f'<tool_call>{{"name": "weather", "arguments": {ROME}}}</tool_call>'
    reader = OutputReader(OutputParser(None, CALL_FORMATS["hermes"], functions=FUNCTIONS), False)
    assert sum(len(reader.read(character, ended=False).calls) for character in text) > 10
    asked: Any = {"model": NAME, "messages": MESSAGES, "tools": TOOLS}
    with talking(engine, "auto") as client, says(llm, client, text):
        stream = client.chat.completions.create(**asked, temperature=0, stream=True, extra_body={"speculation": "off"})
        deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant" and not any(delta.content for delta in deltas)
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (calls[0].type, calls[0].function.name) == ("function", "weather")
    assert all(call.id is None and call.index == 0 and call.function.name is None for call in calls[1:])
    assert "".join(call.function.arguments for call in calls) == ROME


WEATHER: Any = {"type": "function", "function": {"name": "weather"}}


def allowed(mode: str, *tools: Any) -> Any:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("choice", ["required", WEATHER, allowed("required", WEATHER)])
def test_calls_that_must_be(client: OpenAI, choice: Any) -> None:
    sampled = {"temperature": 1.0, "seed": 1, "max_tokens": 150, "parallel_tool_calls": False}
    read = [*answers(client, tools=TOOLS[: 1 + ("allowed_tools" in choice)], tool_choice=choice, **sampled)]
    assert len({parsed(each) for each in read}) == 1
    (call,) = read[0].message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    assert read[0].message.content is None
    assert {each.finish_reason for each in read} == {"stop" if choice == WEATHER else "tool_calls"}


def test_the_model_sees_the_allowed_tools(client: OpenAI) -> None:
    asked: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 1}
    only = client.chat.completions.create(**asked, tools=TOOLS[:1])
    answer = client.chat.completions.create(**asked, tools=TOOLS, tool_choice=allowed("auto", WEATHER))
    assert answer.usage and only.usage and answer.usage.prompt_tokens == only.usage.prompt_tokens


def test_schemas_share_definitions(client: OpenAI) -> None:
    def tool(name: str, values: list[int]) -> dict[str, Any]:
        arguments = {"$defs": {"A": {"enum": values}}, "properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"]}
        parameters = {"type": "object", "additionalProperties": False, **arguments}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    arguments: Any = {"model": NAME, "messages": MESSAGES, "tool_choice": "required", "seed": 1}
    answer: Any = client.chat.completions.create(
        **arguments, tools=[tool("f", [7]), tool("g", [7])], parallel_tool_calls=False
    )
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"a": 7}
    with pytest.raises(openai.BadRequestError, match=r"'g' and another function differ in \$defs: 'A'"):
        client.chat.completions.create(**arguments, tools=[tool("f", [7]), tool("g", [8])])


def test_a_conversation_with_calls(client: OpenAI) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages: Any = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "a", "content": "rain"}]
    url = str(client.base_url).replace("/v1/", "")
    tokens = httpx2.post(f"{url}/tokenize", json={"messages": messages, "tools": TOOLS}).json()["tokens"]
    text = httpx2.post(f"{url}/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == "weather\nnow\nuser: Rome?\nassistant: <tool_call>weather Oslo\ntool: rain\nassistant:"
    answer = client.chat.completions.create(model=NAME, messages=messages, tools=TOOLS, max_tokens=2)
    assert answer.usage is not None and answer.usage.prompt_tokens == len(tokens)


@pytest.mark.parametrize("is_opened", [False, True])
def test_reasoning(client: OpenAI, engine: AsyncLLM, llm: LLM, is_opened: bool) -> None:
    text = f"{'' if is_opened else '<think>'}\nRome is warm.\n</think>\n\nSun."
    variables = {"chat_template_kwargs": {"think": is_opened}}
    with says(llm, client, text, **variables):
        for choice in answers(client, tools=TOOLS, temperature=0, extra_body=variables):
            assert parsed(choice) == Parsed("Rome is warm.", "Sun.") and choice.finish_reason == "stop"
    with talking(engine, reasoning_parser="none") as raw, says(llm, raw, text, tools=None, **variables):
        for choice in answers(raw, temperature=0, extra_body=variables):
            assert parsed(choice) == Parsed(content=text)


def test_reasoning_goes_on_from_the_last_turn(client: OpenAI, engine: AsyncLLM, llm: LLM) -> None:
    """An open tag in it, wherever it stands there, begins the reasoning, and one in an earlier message does not."""
    text, goes_on = " is warm.</think>Sun.", {"add_generation_prompt": False, "continue_final_message": True}
    inside, outside = Parsed("is warm.", "Sun."), Parsed(content=text)
    with talking(engine, reasoning_parser="deepseek_r1") as implied:
        for talk, begun, expected in (
            (client, "<think>Rome", inside),
            (client, "<think></think>Rome", outside),
            (client, None, outside),
            (implied, "<think></think>Rome", outside),
            (implied, None, inside),
        ):
            messages: Any = [{"role": "user", "content": "What is <think>?"}]
            body = goes_on if begun else {}
            messages += [{"role": "assistant", "content": begun}] if begun else []
            with says(llm, talk, text, messages=messages, tools=None, **body):
                for choice in answers(talk, messages=messages, temperature=0, extra_body=body):
                    assert parsed(choice) == expected
        with says(llm, implied, "Rome", tools=None):
            assert {parsed(choice) for choice in answers(implied, temperature=0)} == {Parsed("Rome")}


def test_a_failure_in_a_stream_is_its_last_event(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OutputReader, "read", lambda *_: [][0])
    body = {"messages": MESSAGES, "max_tokens": 4, "stream": True}
    events = httpx2.post(f"{client.base_url}chat/completions", json=body).text.removeprefix("data: ").split("\ndata: ")
    assert json.loads(events[0])["error"]["type"] == "server_error" and events[1].strip() == "[DONE]", events


def test_schemas_hold_beside_tools(client: OpenAI) -> None:
    form = {"json": CITY | {"additionalProperties": False}, "disable_any_whitespace": True}
    read = [*answers(client, tools=TOOLS, seed=2, max_tokens=60, extra_body={"structured_outputs": form})]
    assert len({parsed(each) for each in read}) == 1 and json.loads(read[0].message.content)["city"]


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools.0.function: Field required"),
    ({"tools": [function(name="a b")]}, "tools.0.function.name='a b'"),
    ({"tools": [function(name="f", parameters=3)]}, "tools.0.function.parameters=3"),
    ({"tools": [function(name="f", parameters={"type": "x"})], "tool_choice": "required"}, ""),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools: 'weather' is there more than once"),
    ({"tools": TOOLS, "tool_choice": "any"}, "='any'"),
    ({"tools": TOOLS, "tool_choice": function(name="f")}, "'f'; tools: weather, now"),
    ({"tool_choice": "required"}, "tool_choice='required' needs tools"),
    ({"tools": TOOLS, "tool_choice": allowed("auto", WEATHER, function(name="f"))}, "'f'; tools: weather, now"),
    ({"tools": TOOLS, "tool_choice": allowed("required")}, "tool_choice='required' needs tools"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls=1"),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "both constrain"),
    ({"functions": [{"name": "f"}]}, "functions is not supported; use tools"),
    ({"messages": [{"role": "assistant", "tool_calls": [function(name="f", arguments="{")]}]}, "'{' is not JSON"),
]


@pytest.mark.parametrize(("body", "message"), BAD)
def test_bad_bodies(client: OpenAI, body: dict[str, Any], message: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, **body}
    answer = httpx2.post(f"{client.base_url}chat/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


def test_a_template_without_a_known_format(engine: AsyncLLM) -> None:
    arguments: Any = {"model": NAME, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 2}
    template = "{{ messages[0].content }}"
    for options in ({"chat_template": template + "{{ tools }}"}, {"chat_template": template, "parser": "none"}):
        with talking(engine, **{"parser": "auto"} | options) as client:
            with pytest.raises(openai.BadRequestError, match=r"--tool-call-parser \(hermes, .*, generic\)"):
                client.chat.completions.create(**arguments)
            assert client.chat.completions.create(**arguments, tool_choice="none").choices
    with talking(engine, "auto", chat_template=None) as client, pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**arguments)  # the model is none for chats


PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN


@pytest.mark.parametrize(("template", "role"), [(PLAIN, "system"), (REFUSING, "user")])
def test_a_template_without_tools(
    engine: AsyncLLM, llm: LLM, caplog: pytest.LogCaptureFixture, template: str, role: str
) -> None:
    """The first message describes them, calls and their results are text, and the answer's are read."""
    tools: Any = [function(name="now")]
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages: Any = [{"role": "user", "content": "?"}]
    messages += [{"role": "assistant", "content": "So:", "tool_calls": [call, call]}]
    messages += [{"role": "tool", "tool_call_id": "a", "content": text} for text in ("1", "2")]
    messages += [{"role": "user", "content": "And?"}]
    with talking(engine, "auto", chat_template=template) as client:
        url = str(client.base_url).replace("/v1/", "")
        tokens = httpx2.post(f"{url}/tokenize", json={"messages": messages, "tools": tools}).json()["tokens"]
        text = httpx2.post(f"{url}/detokenize", json={"tokens": tokens}).json()["prompt"]
        assert text.startswith(f"{role}: ") and '{"name": "now"}\nTo call one' in text
        calls = "\n".join(['<tool_call>{"name": "now", "arguments": {}}</tool_call>'] * 2)
        results = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
        assert text.endswith(f"\nassistant: So:\n{calls}\nuser: {results}\nAnd?\n")
        for said, content in ((f"Well.{NOW_CALL}", "Well."), ('[{"name": "now", "arguments": {}}]', "")):
            with says(llm, client, said, tools=tools):
                for choice in answers(client, tools=tools, temperature=0):
                    assert parsed(choice) == Parsed("", content, CALLS[1:]) and choice.finish_reason == "tool_calls"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"tools: a message of role '{role}' describes them, and calls are read as JSON")
