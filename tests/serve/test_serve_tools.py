"""Tool calls and reasoning of `treespec serve`: equal with and without speculation, whole and streamed."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from tests.helpers.calls import failing
from tests.helpers.serving import NAME, PATIENCE, client_of, serving
from tests.helpers.speech import scripted
from tests.helpers.tool_calls import ANSWERS, CALLS, FUNCTIONS, NOW_CALL, ROME, Parsed, ToolCall
from treespec import LLM, AsyncLLM
from treespec.serve.output_parser import CALL_FORMATS, OutputParser
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
    "{{ message.role + ': ' + message.content }}{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }} {{ call.function.arguments.city }}{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if think %}<think>{% endif %}{% endif %}{# </think> #}"
)


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


@pytest.mark.parametrize(("form", "text", "expected"), [ANSWERS[i] for i in (2, 9, 13, 19, 26)])
def test_calls_of_the_model(engine: AsyncLLM, llm: LLM, form: str, text: str, expected: Parsed) -> None:
    with talking(engine, form) as client, says(llm, client, text):
        for choice in answers(client, tools=TOOLS, temperature=0):
            assert parsed(choice) == expected and choice.finish_reason == "tool_calls"
        if form == "hermes":
            for choice in answers(client, tools=TOOLS, temperature=0, parallel_tool_calls=False):
                assert parsed(choice) == Parsed(*expected[:2], expected.calls[:1])


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


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_function_without_parameters_gets_no_arguments(client: OpenAI, choice: Any) -> None:
    sampled = {"temperature": 1.0, "seed": 1, "max_tokens": 150, "parallel_tool_calls": False}
    for answer in answers(client, tools=TOOLS[1:], tool_choice=choice, **sampled):
        (call,) = answer.message.tool_calls
        assert call.function.name == "now" and json.loads(call.function.arguments) == {}


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
    messages += [{"role": "tool", "tool_call_id": "a", "content": content} for content in ("rain", None)]
    url = str(client.base_url).replace("/v1/", "")
    tokens = httpx2.post(f"{url}/tokenize", json={"messages": messages, "tools": TOOLS}).json()["tokens"]
    text = httpx2.post(f"{url}/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == "weather\nnow\nuser: Rome?\nassistant: <tool_call>weather Oslo\ntool: rain\ntool: \nassistant:"
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


def test_a_failure_in_a_stream_is_its_last_event(client: OpenAI) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, "stream": True}
    with failing(OutputReader, "read", IndexError("none")):
        answer = httpx2.post(f"{client.base_url}chat/completions", json=body).text
    events = answer.removeprefix("data: ").split("\ndata: ")
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
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools: 'weather' occurs more than once"),
    ({"tools": TOOLS, "tool_choice": "any"}, "='any'"),
    ({"tools": TOOLS, "tool_choice": function(name="f")}, "'f'; tools: weather, now"),
    ({"tool_choice": "required"}, "tool_choice='required' requires tools"),
    ({"tools": TOOLS, "tool_choice": allowed("auto", WEATHER, function(name="f"))}, "'f'; tools: weather, now"),
    ({"tools": TOOLS, "tool_choice": allowed("required")}, "tool_choice='required' requires tools"),
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
