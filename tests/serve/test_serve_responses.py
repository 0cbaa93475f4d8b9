"""`/v1/responses` with the `openai` client: valid objects and events, and the tokens of chats."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx2
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.helpers.exactness import altered_logits
from tests.helpers.models import VOCAB
from tests.helpers.serving import NAME, client_of, serving
from tests.helpers.speech import scripted
from treespec import LLM, AsyncLLM

pytestmark = pytest.mark.usefixtures("gives_all_pages_back")


class City(BaseModel, extra="forbid"):
    city: Literal["Rome", "Oslo"]


FUNCTIONS: list[Any] = [
    {"name": "weather", "parameters": City.model_json_schema(), "strict": True},
    {"name": "now", "parameters": None, "description": "The time."},
]
TOOLS: list[Any] = [{"type": "function", **function} for function in FUNCTIONS]
CHAT_TOOLS: list[Any] = [{"type": "function", "function": function} for function in FUNCTIONS]
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rome?"}]
ASKED: dict[str, Any] = {"model": NAME, "instructions": "Be brief.", "input": "Rome?"}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}{% for message in messages %}"
    "{{ message.role }}: {% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function }}{% endfor %}\n"
    "{% endfor %}assistant:"
)
ROME, EVENT = '{"city": "Rome"}', TypeAdapter[Any](ResponseStreamEvent)


@pytest.fixture(scope="module")
def client(engine: AsyncLLM) -> Iterator[OpenAI]:
    with serving(engine, chat_template=TEMPLATE) as url, client_of(url) as client:
        yield client


def answers(client: OpenAI, seed: int = 1, **options: Any) -> tuple[Response, Response]:
    """The whole answer without speculation, and the streamed one with it; all events are valid."""
    asked, extra = {**ASKED, **options}, {"seed": seed, "speculation": "off"}
    whole = client.responses.create(**asked, extra_body=extra)
    events = list(client.responses.create(**asked, extra_body={**extra, "speculation": {"nodes": 8}}, stream=True))
    for number, event in enumerate(events):
        EVENT.validate_json(event.model_dump_json(warnings=False), strict=True)
        assert event.sequence_number == number
    last: Any = events[-1]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert last.response.output == [event.item for event in events if event.type == "response.output_item.done"]
    texts = dict.fromkeys((item.id for item in last.response.output), "")
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.item_id] += event.delta  # type: ignore[union-attr]
    assert [*texts.values()] == [text for _, text in read(last.response)] == [text for _, text in read(whole)]
    Response.model_validate_json(whole.model_dump_json(warnings=False), strict=True)
    assert read(whole) == read(last.response) and whole.status == last.response.status
    return whole, last.response


def read(response: Response) -> list[tuple[str, str]]:
    """The items as their kind, or the name of the function, and their text."""
    items: list[Any] = response.output
    return [
        (item.name, item.arguments)
        if item.type == "function_call"
        else (item.type, "".join(part.text for part in item.content or item.summary))
        for item in items
    ]


def test_texts_are_those_of_chats(client: OpenAI) -> None:
    sampled: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9}
    chat = client.chat.completions.create(
        model=NAME, messages=MESSAGES, seed=3, max_tokens=16, logprobs=True, top_logprobs=2, **sampled
    )
    (choice,) = chat.choices
    assert choice.logprobs is not None and chat.usage is not None
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "metadata": {"a": "b"}, "store": True}
    for answer in answers(client, seed=3, max_output_tokens=16, **sampled, **options):
        (message,) = answer.output
        assert message.type == "message" and message.content[0].type == "output_text"
        assert answer.output_text == choice.message.content and choice.logprobs.content is not None
        expected = [each.model_dump() for each in choice.logprobs.content]
        assert [each.model_dump() for each in message.content[0].logprobs or ()] == expected
        assert (answer.status, message.status) == ("incomplete", "incomplete")
        assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
        assert answer.usage is not None and answer.usage.input_tokens == chat.usage.prompt_tokens
        assert answer.usage.output_tokens == chat.usage.completion_tokens
        assert (answer.metadata, answer.instructions, answer.top_p) == ({"a": "b"}, "Be brief.", 0.9)


SAID = f'<think>Rome is warm.</think>Well.\n<tool_call>{{"name": "weather", "arguments": {ROME}}}</tool_call>'
SAID += '<tool_call>{"name": "now", "arguments": {}}</tool_call>'

ITEMS = [("reasoning", "Rome is warm."), ("message", "Well."), ("weather", ROME), ("now", "{}")]


@pytest.mark.parametrize(
    ("text", "options", "items"),
    [
        (SAID, {}, ITEMS),
        (f"{SAID} So.", {"parallel_tool_calls": False}, [*ITEMS[:3], ("message", "So.")]),
        ("<think>a</think>", {"reasoning": {"summary": "auto"}}, [("reasoning", "a"), ("message", "")]),
    ],
)
def test_items(engine: AsyncLLM, llm: LLM, text: str, options: Any, items: Any) -> None:
    with serving(engine, chat_template=TEMPLATE, tool_call_parser="hermes") as url, client_of(url) as client:
        tokens = httpx2.post(f"{url}/tokenize", json={"messages": MESSAGES, "tools": CHAT_TOOLS}).json()["tokens"]
        tokenizer = llm.get_tokenizer()
        with scripted(llm, [[*tokens, *tokenizer.encode(text), tokenizer.eos_token_id]]):
            for answer in answers(client, temperature=0, tools=TOOLS, **options):
                assert answer.status == "completed"
                assert read(answer) == items


def test_a_conversation(client: OpenAI) -> None:
    """The items of a turn are the message that chats have; several texts stay apart."""
    parts = [{"type": "input_text", "text": text} for text in ("Rome?", "Now?")]
    function = {"name": "weather", "arguments": ROME}
    calls: list[Any] = [{"type": "function_call", "call_id": f"call{i}", "id": f"fc{i}", **function} for i in (1, 2)]
    given: list[Any] = [
        {"role": "user", "content": parts},
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "Warm?"}]},
        {"type": "message", "id": "msg", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        *calls,
        {"type": "function_call_output", "call_id": "call1", "output": "sun"},
        {"type": "function_call_output", "call_id": "call2", "output": [{**parts[0], "text": "rain"}]},
        *[{"role": role, "content": role} for role in ("assistant", "assistant", "developer")],
    ]
    called = [{"id": call["call_id"], "type": "function", "function": function} for call in calls]
    messages: list[Any] = [
        {"role": "user", "content": [{**part, "type": "text"} for part in parts]},
        {"role": "assistant", "reasoning_content": "Warm?", "content": "I look.", "tool_calls": called},
        {"role": "tool", "tool_call_id": "call1", "content": "sun"},
        {"role": "tool", "tool_call_id": "call2", "content": "rain"},
        *given[-3:],
    ]
    chat = client.chat.completions.create(model=NAME, messages=messages, max_tokens=8, temperature=0)
    answer = client.responses.create(model=NAME, input=given, max_output_tokens=8, temperature=0)
    assert answer.output_text == chat.choices[0].message.content and answer.usage is not None
    assert chat.usage is not None and answer.usage.input_tokens == chat.usage.prompt_tokens


def test_formats_and_choices(client: OpenAI, llm: LLM) -> None:
    decode = llm.get_tokenizer().decode
    compact = [token for token in range(VOCAB) if decode([token]).strip() == decode([token])]
    extra = {"seed": 2, "speculative_decoding_stats": True, "allowed_token_ids": compact}
    parsed = client.responses.parse(**ASKED, text_format=City, max_output_tokens=80, extra_body=extra)
    assert parsed.output_parsed is not None and parsed.output_parsed.city in ("Rome", "Oslo")
    assert parsed.speculative_decoding_stats["num_spec_steps"] > 0  # type: ignore[attr-defined]
    with client.responses.stream(**ASKED, text_format=City, max_output_tokens=80, extra_body=extra) as stream:
        assert stream.get_final_response().output_text == parsed.output_text
    json_object: Any = {"text": {"format": {"type": "json_object"}}}  # of a text; a call is none
    chosen = {"type": "function", "name": "weather"}
    choices: list[Any] = ["required", chosen, {"type": "allowed_tools", "mode": "required", "tools": [chosen]}]
    for choice in choices:
        for answer in answers(client, tools=TOOLS[:1], tool_choice=choice, parallel_tool_calls=False, **json_object):
            ((name, arguments),) = read(answer)
            assert name == "weather" and json.loads(arguments)["city"] in ("Rome", "Oslo")
            document = answer.to_dict()
            assert (document["tools"], document["tool_choice"]) == (TOOLS[:1], choice)


def test_a_request_that_fails(client: OpenAI, llm: LLM) -> None:
    with altered_logits(llm, lambda *_: 1 / 0):
        *_, last = client.responses.create(**ASKED, stream=True)
    assert last.type == "response.failed" and last.response.error is not None
    assert last.response.status == "failed" and "ZeroDivisionError" in last.response.error.message
