"""`treespec serve` with the `openai` client: what it answers and streams, and clients that leave."""

import asyncio
import itertools
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.commands import ROOT
from tests.helpers.exactness import altered_logits
from tests.helpers.serving import NAME, PATIENCE, TEMPLATE, client_of, connect, running, wait_until
from treespec import LLM, AsyncLLM, RequestOutput, SamplingParams
from treespec.drawing.recording import picture

pytestmark = pytest.mark.usefixtures("gives_all_pages_back")

MESSAGES: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "def add("}]
SYSTEM = [{**MESSAGES[0], "role": "system"}, MESSAGES[1]]
ASKED: dict[str, Any] = {"model": NAME, "prompt": "def add(", "temperature": 0, "max_tokens": 24}


# --- tokens

WORK: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "frequency_penalty": 0.5, "presence_penalty": 0.3, "logit_bias": {"7": 3.5}},
    {"temperature": 0.9, "seed": 1, "n": 2, "logprobs": 3},
    {"temperature": 0.8, "seed": 2, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1},
    {"temperature": 0.7, "seed": 3, "stop": ["e", "zz"], "min_tokens": 3},
    {"temperature": 0.7, "seed": 4, "structured_outputs": {"regex": "[a-z]{3,9}"}},
]
SPECULATION = [None, "off", {"nodes": 8}, {"nodes": 12, "sources": ["lookup"]}]


def plain(llm: LLM, prompt: Any, options: dict[str, Any]) -> RequestOutput:
    """Plain decoding in this process."""
    bias = {int(token): value for token, value in options.get("logit_bias", {}).items()} or None
    return llm.generate(prompt, SamplingParams(max_tokens=12, **(options | {"logit_bias": bias})), spec="off")[0]


def test_tokens_are_those_of_plain_decoding_in_any_company(url: str, llm: LLM) -> None:
    work = [(prompt, options) for prompt in ("def add(", [5, 6, 7]) for options in WORK]
    expected = [plain(llm, prompt, options) for prompt, options in work]

    async def complete(client: AsyncOpenAI, place: int) -> dict[int, tuple[str, list[int]]]:
        prompt, options = work[place]
        extra = {**options, "return_token_ids": True, "speculation": SPECULATION[place % len(SPECULATION)]}
        arguments = {"model": NAME, "prompt": prompt, "max_tokens": 12, "extra_body": extra}
        if place % 2:
            choices = (await client.completions.create(**arguments)).choices
        else:
            stream = await client.completions.create(**arguments, stream=True)
            choices = [choice async for chunk in stream for choice in chunk.choices]
        found: dict[int, tuple[str, list[int]]] = {}
        for choice in choices:
            text, tokens = found.get(choice.index, ("", []))
            found[choice.index] = text + choice.text, [*tokens, *choice.token_ids]
        return found

    async def together() -> list[dict[int, tuple[str, list[int]]]]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
            return await asyncio.gather(*(complete(client, place) for place in range(len(work))))

    for (_, options), answer, output in zip(work, asyncio.run(together()), expected, strict=True):
        assert answer == {each.index: (each.text, each.token_ids) for each in output.outputs}, options


# --- completions


def test_the_examples_of_the_documentation(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    text = text.replace("http://127.0.0.1:8000", url).replace('"smollm2"', repr(NAME))
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)\n```$", text, flags=re.DOTALL | re.MULTILINE):
        exec(block, names)
    assert capsys.readouterr().out and names["completion"].choices[0].speculative_decoding_stats["num_spec_steps"]


def test_a_completion(client: OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=NAME, prompt="def add(", temperature=0, logprobs=2)  # 16 tokens
    (expected,) = llm.generate("def add(", SamplingParams(max_tokens=16, logprobs=2))
    (choice,), completion = answer.choices, expected.outputs[0]
    assert answer.object == "text_completion" and answer.model == NAME and answer.id.startswith("cmpl-")
    assert (choice.text, choice.finish_reason, choice.index) == (completion.text, completion.finish_reason, 0)
    assert answer.usage is not None and completion.logprobs is not None and choice.logprobs is not None
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": len(expected.prompt_token_ids),
        "completion_tokens": len(completion.token_ids),
        "total_tokens": len(expected.prompt_token_ids) + len(completion.token_ids),
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    entries = list(zip(completion.token_ids, completion.logprobs, strict=True))
    assert choice.logprobs.token_logprobs == [entry[token].logprob for token, entry in entries]
    assert choice.logprobs.tokens == [entry[token].decoded_token for token, entry in entries]
    assert choice.logprobs.top_logprobs == [
        {str(logprob.decoded_token): logprob.logprob for logprob in sorted(entry.values())} for _, entry in entries
    ]
    lengths = [len(text) for text in choice.logprobs.tokens or ()]
    assert choice.logprobs.text_offset == [sum(lengths[:i]) for i in range(len(lengths))]


@pytest.mark.parametrize(("prompt", "max_tokens"), [("def add(", 0), ("def add(", 5), ([5, 6, 7], 1)])
def test_an_echo(client: OpenAI, llm: LLM, prompt: Any, max_tokens: int) -> None:
    """As lm-eval reads it: the prompt's log-probabilities, of which the first is null, before the answer's."""
    (expected,) = llm.generate(prompt, SamplingParams(max_tokens=max_tokens or 1, logprobs=1, prompt_logprobs=1), "off")
    (completion,), decode, before = expected.outputs, llm.get_tokenizer().decode, expected.prompt_logprobs or []
    tokens = expected.prompt_token_ids + completion.token_ids[:max_tokens]
    entries = [*before, *(completion.logprobs or ())][: len(tokens)]
    text = decode(expected.prompt_token_ids) + (str(completion.text) if max_tokens else "")
    arguments: Any = {"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "echo": True}
    answer = client.completions.create(**arguments, logprobs=1, extra_body={"prompt_logprobs": 1})
    choice: Any = answer.choices[0]
    assert choice.text == text and choice.finish_reason == "length" and choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.token_logprobs == [e and e[t].logprob for t, e in zip(tokens, entries, strict=True)]
    assert choice.logprobs.tokens == [decode([token]) for token in tokens]
    assert answer.usage is not None and answer.usage.completion_tokens == len(tokens) - len(before)
    told = [
        entry and {int(token): each["logprob"] for token, each in entry.items()} for entry in choice.prompt_logprobs
    ]
    assert told == [entry and {token: each.logprob for token, each in entry.items()} for entry in before]
    chunks = [*client.completions.create(**arguments | {"prompt": [prompt, prompt]}, stream=True)]
    for place in range(2):
        assert "".join(c.text for chunk in chunks for c in chunk.choices if c.index == place) == text


def test_several_prompts_are_streamed_together(client: OpenAI, llm: LLM) -> None:
    prompts, sampled = ["def add(", "import os", "x = 1"], {"n": 2, "temperature": 0.8, "seed": 3, "max_tokens": 12}
    arguments: Any = {"model": NAME, "prompt": prompts, "logprobs": 0, "stream_options": {"include_usage": True}}
    texts, offsets, reasons, usage = [""] * 6, [list[int]() for _ in range(6)], {}, None
    for chunk in client.completions.create(**arguments, **sampled, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            offsets[choice.index] += choice.logprobs.text_offset or []
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
        assert usage is None, "usage is the last event"
        usage = chunk.usage
    outputs = llm.generate(prompts, SamplingParams(**sampled), "off")  # type: ignore[arg-type]
    completions = [completion for output in outputs for completion in output.outputs]
    assert texts == [completion.text for completion in completions]
    assert all(starts == sorted(starts) for starts in offsets)
    assert [len(starts) for starts in offsets] == [len(completion.token_ids) for completion in completions]
    assert reasons == {place: completion.finish_reason for place, completion in enumerate(completions)}
    assert usage is not None and usage.completion_tokens == sum(map(len, offsets))
    assert usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in outputs)


@pytest.mark.parametrize("stream", [False, True])
def test_statistics_of_speculation(client: OpenAI, stream: bool) -> None:
    for speculation in ("off", {"nodes": 8}):
        extra = {"speculation": speculation, "speculative_decoding_stats": True, "ignore_eos": True}
        answer: Any = client.completions.create(**ASKED, stream=stream, extra_body=extra)
        stats = ([*answer][-1] if stream else answer).choices[0].speculative_decoding_stats
        histogram, passes = stats["acceptance_histogram"], stats["num_spec_steps"]
        accepted, drafted = stats["num_accepted_draft_tokens"], stats["num_draft_tokens"]
        assert sum(histogram) == passes and stats["mean_acceptance_length"] == 24 / passes
        assert sum(length * count for length, count in enumerate(histogram)) == accepted
        assert stats["draft_acceptance_rate"] * drafted == pytest.approx(accepted)
        assert (drafted == 0) == (passes == 24) == (speculation == "off")


def test_a_stream_tells_its_rounds_and_the_usage_so_far(client: OpenAI, llm: LLM) -> None:
    extra = {"rounds": True, "return_token_ids": True, "ignore_eos": True, "speculation": {"nodes": 8}}
    usage: Any = {"include_usage": True, "continuous_usage_stats": True}
    other = client.completions.create(model=NAME, prompt="x", max_tokens=24, stream=True)  # in the same rounds
    records: list[Any] = []
    with llm.add_round_observer(records.append):
        *chunks, last = client.completions.create(**ASKED, stream=True, stream_options=usage, extra_body=extra)
    assert [*other]
    records = [record for record in records if record.request_id == last.id]
    rounds = [each for chunk in chunks for each in chunk.rounds]
    assert [each["number"] for each in rounds] == [*range(1, len(records) + 1)]
    for told, record in zip(rounds, records, strict=True):
        drawn = picture(record, llm.get_tokenizer())
        expected = json.loads(json.dumps(record.as_dict())) | {"texts": drawn.tokens, "bonus_text": drawn.bonus}
        assert told == {name: value for name, value in expected.items() if name not in ("request_id", "context")}
    pieces = [chunk.choices[0].token_ids for chunk in chunks]
    assert [token for piece in pieces for token in piece] == [token for record in records for token in record.emitted]
    counts = [chunk.usage.completion_tokens for chunk in [*chunks, last]]
    assert counts == [*itertools.accumulate(map(len, pieces)), 24] and not last.choices
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {len(llm.get_tokenizer().encode("def add("))}
    wait_until(lambda: not llm.engine.observers)
    assert not any(hasattr(chunk, "rounds") for chunk in client.completions.create(**ASKED, stream=True))


# --- chat


def test_a_chat(client: OpenAI, llm: LLM) -> None:
    sampled = {"temperature": 0.6, "seed": 9}
    params = SamplingParams(max_tokens=20, logprobs=2, **sampled)  # type: ignore[arg-type]
    (expected,) = llm.chat(SYSTEM, params, "off", chat_template=TEMPLATE)
    arguments: Any = {"model": "other", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **sampled}
    answer = client.chat.completions.create(**arguments, max_completion_tokens=20)
    (choice,), completion = answer.choices, expected.outputs[0]
    assert answer.object == "chat.completion" and answer.model == "other" and choice.message.role == "assistant"
    assert (choice.message.content, choice.finish_reason) == (completion.text, completion.finish_reason)
    for position, token, entry in zip(
        choice.logprobs.content, completion.token_ids, completion.logprobs or (), strict=True
    ):
        assert (position.token, position.logprob) == (entry[token].decoded_token, entry[token].logprob)
        best = sorted((each for each in entry.values() if each.rank <= 2), key=lambda each: each.rank)
        assert [(e.token, e.logprob) for e in position.top_logprobs] == [(e.decoded_token, e.logprob) for e in best]
    chunks = [*client.chat.completions.create(**arguments, max_tokens=20, stream=True)]
    streamed = [chunk.choices[0] for chunk in chunks]
    positions = [position for each in streamed if each.logprobs for position in each.logprobs.content or ()]
    assert positions == choice.logprobs.content
    assert [each.delta.role for each in streamed] == ["assistant"] + [None] * (len(chunks) - 1)
    assert "".join(each.delta.content or "" for each in streamed) == completion.text
    assert [each.finish_reason for each in streamed] == [None] * (len(chunks) - 1) + [completion.finish_reason]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({chunk.id for chunk in chunks}) == 1


def test_a_conversation_goes_on(client: OpenAI, llm: LLM) -> None:
    messages: Any = [*SYSTEM, {"role": "assistant", "content": "def"}]
    going = {"add_generation_prompt": False, "continue_final_message": True}
    (expected,) = llm.chat(messages, SamplingParams(max_tokens=8), "off", TEMPLATE, **going)
    arguments: Any = {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 8}
    answer = client.chat.completions.create(**arguments, extra_body={"continue_final_message": True})
    assert answer.choices[0].message.content == expected.outputs[0].text


def test_structured_outputs(client: OpenAI, llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    named: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    compact = {"json": schema, "disable_any_whitespace": True}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"response_format": named}, {"json": schema}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"extra_body": {"structured_outputs": compact}}, compact),
    ]
    sampled: dict[str, Any] = {"temperature": 0.5, "seed": 1, "max_tokens": 16}
    for options, form in cases:
        arguments: dict[str, Any] = {"model": NAME, "messages": MESSAGES, **sampled, **options}
        text = llm.chat(SYSTEM, SamplingParams(structured_outputs=form, **sampled), "off", TEMPLATE)[0].outputs[0].text
        assert client.chat.completions.create(**arguments).choices[0].message.content == text
        chunks = client.chat.completions.create(**arguments, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert json.loads(text or "")["a"] in (1, 2)


# --- the other endpoints


def test_models_and_health(client: OpenAI, url: str) -> None:
    assert [model.id for model in client.models.list()] == [NAME, "other"]
    model = client.models.retrieve(NAME)
    assert model.owned_by == "treespec" and model.max_model_len == 256  # type: ignore[attr-defined]
    assert model.chat and model.sources == ["ssm-1", "ssm-2", "lookup"]  # type: ignore[attr-defined]
    assert httpx2.get(f"{url}/health").status_code == httpx2.get(f"{url}/ping").status_code == 200
    assert httpx2.get(f"{url}/version").json().keys() == {"version"}


def test_tokenize(url: str, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    document = httpx2.post(f"{url}/tokenize", json={"prompt": "def add(", "return_token_strs": True}).json()
    assert document["tokens"] == tokenizer.encode("def add(") and document["count"] == len(document["tokens"])
    assert "".join(document["token_strs"]) == "def add(" and document["max_model_len"] == 256
    assert httpx2.post(f"{url}/detokenize", json={"tokens": document["tokens"]}).json() == {"prompt": "def add("}
    chat = httpx2.post(f"{url}/tokenize", json={"messages": MESSAGES}).json()
    text = httpx2.post(f"{url}/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert text == "system: Be brief.\nuser: def add(\nassistant:" and chat["token_strs"] is None
    assert httpx2.post(f"{url}/tokenize", json={"prompt": "ab " * 30_000}).json()["count"] > 30_000, "any length"


def test_metrics(client: OpenAI, url: str) -> None:
    def read() -> dict[tuple[str, str | None], float]:
        families = text_string_to_metric_families(httpx2.get(f"{url}/metrics").text)
        samples = [each for family in families for each in family.samples if "position" not in each.labels]
        label = [each.labels.get("source", each.labels.get("finished_reason")) for each in samples]
        return {(e.name.removeprefix("treespec:"), of): e.value for e, of in zip(samples, label, strict=True)}

    before = read()
    extra = {"speculation": {"nodes": 8}, "ignore_eos": True, "speculative_decoding_stats": True}
    answer: Any = client.completions.create(**ASKED, extra_body=extra)
    after, stats = read(), answer.choices[0].speculative_decoding_stats

    def more(name: str, label: str | None = None) -> float:
        return after[name, label] - before.get((name, label), 0)

    assert more("spec_decode_num_draft_tokens_total", "tree") == stats["num_draft_tokens"]
    assert more("spec_decode_num_accepted_tokens_total", "tree") == stats["num_accepted_draft_tokens"]
    for source, count in stats["accepted_by_source"].items():
        assert more("spec_decode_num_accepted_tokens_total", source) == count
        assert more("spec_decode_num_draft_tokens_total", source) >= count
        assert more("spec_decode_num_drafts_total", source) <= more("spec_decode_num_drafts_total", "tree")
    assert more("target_passes_total") == stats["num_spec_steps"] and more("generation_tokens_total") == 24
    assert more("nodes_verified_total") == stats["num_draft_tokens"] + stats["num_spec_steps"]
    assert more("request_success_total", "length") == 1 and more("num_preemptions_total") == 0
    for name in ("time_to_first_token", "request_time_per_output_token", "request_queue_time", "e2e_request_latency"):
        assert more(f"{name}_seconds_count") == 1
    assert after["num_requests_running", None] == after["kv_cache_usage_perc", None] == 0
    for body in ('{"prompt": 3}', "{", '{"prompt": "x", "a": 1}', '{"prompt": "x", "top_p": 3}', '{"prompt": ""}'):
        httpx2.post(f"{url}/v1/completions", content=body, headers={"content-type": "application/json"})
    httpx2.post(f"{url}/v1/responses", json={"input": 3})
    httpx2.get(f"{url}/v1/completions")
    wait_until(lambda: read()["failed_requests_total", None] == after["failed_requests_total", None] + 6)


# --- clients that leave, and slow ones


def send(url: str, stream: bool) -> socket.socket:
    """Ask for 200 tokens, without a client that would read them."""
    arguments = {"prompt": "def add(", "max_tokens": 200, "ignore_eos": True, "speculation": "off", "stream": stream}
    body = json.dumps(arguments)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    connection = connect(url)
    connection.sendall(f"{head}{len(body)}\r\n\r\n{body}".encode())
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_pages_back(url: str, llm: LLM, stream: bool) -> None:
    before = llm.stats()["generated_tokens"]
    with llm.add_round_observer(lambda record: time.sleep(0.02)):
        with send(url, stream) as connection:
            wait_until(lambda: llm.engine.scheduler.running)
            assert not stream or connection.recv(65536)
        wait_until(lambda: llm.engine.scheduler.is_idle)
    assert llm.stats()["generated_tokens"] - before < 200


def test_a_client_that_does_not_read_delays_nobody(url: str, client: OpenAI, llm: LLM) -> None:
    with send(url, stream=True) as connection:
        answer = client.completions.create(model=NAME, prompt="x", max_tokens=4, temperature=0)
        assert answer.usage is not None
        wait_until(lambda: llm.engine.scheduler.is_idle)  # the request ends without a reader
        received = b""
        while b"[DONE]" not in received:
            received += connection.recv(65536)
    events = [json.loads(line[6:]) for line in received.decode().splitlines() if line.startswith("data: {")]
    text = "".join(event["choices"][0]["text"] for event in events)
    (expected,) = llm.generate("def add(", SamplingParams(max_tokens=200, ignore_eos=True), "off")
    assert text == expected.outputs[0].text


def test_a_request_that_fails_ends_with_an_error(client: OpenAI, llm: LLM) -> None:
    with altered_logits(llm, Mock(side_effect=RuntimeError("broken"))):
        with pytest.raises(openai.InternalServerError, match="a round failed: RuntimeError: broken"):
            client.completions.create(model=NAME, prompt="x")
        with pytest.raises(openai.APIError, match="a round failed: RuntimeError: broken"):
            list(client.completions.create(model=NAME, prompt="x", stream=True))
    assert client.completions.create(model=NAME, prompt="x", max_tokens=2).choices


# --- the end of a server


@contextmanager
def ending(engine: AsyncLLM, grace: float) -> Iterator[tuple[Any, str, Any, Any, threading.Event]]:
    """A server in a round that waits for the event, its address, a stream of two prompts, a future answer."""
    released = threading.Event()
    with (
        engine.llm.add_round_observer(lambda record: released.wait(PATIENCE)),
        running(engine, grace) as (server, url),
        client_of(url) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        try:
            stream = client.completions.create(**{**ASKED, "prompt": ["def add(", "x = 1"]}, stream=True)
            answer = pool.submit(client.completions.create, **ASKED)
            wait_until(lambda: len(server.server_state.tasks) == 2)
            yield server, url, stream, answer, released
        finally:
            released.set()


def test_what_runs_when_a_server_ends_is_answered(engine: AsyncLLM, llm: LLM) -> None:
    outputs = llm.generate(["def add(", "x = 1"], SamplingParams(max_tokens=24), "off")
    with ending(engine, PATIENCE) as (server, url, stream, answer, released):
        server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: httpx2.get(f"{url}/health").status_code == 503)
        refusal = httpx2.post(f"{url}/v1/completions", json=ASKED)
        assert refusal.status_code == 503 and refusal.json()["error"]["type"] == "server_error"
        released.set()
        texts = ["", ""]
        for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [output.outputs[0].text for output in outputs]
        assert answer.result().choices[0].text == texts[0]


@pytest.mark.parametrize(
    ("signals", "grace", "error", "message"),
    [
        (1, 0, openai.APIError, "the server is shutting down"),
        (2, PATIENCE, openai.APIConnectionError, "Connection error"),
    ],
)
def test_what_runs_too_long_when_a_server_ends(
    engine: AsyncLLM, signals: int, grace: float, error: type[Exception], message: str
) -> None:
    with ending(engine, grace) as (server, _, stream, answer, _):
        for _ in range(signals):
            server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(error, match=message):
            list(stream)
        with pytest.raises(error, match=message):
            answer.result()
