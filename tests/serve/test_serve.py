"""`treespec serve` on the loopback interface, with the `openai` client, and with bodies that no client sends."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.commands import ROOT, run
from tests.helpers.serving import NAME, PATIENCE, TEMPLATE, serving, wait_until
from treespec import LLM, AsyncLLM, RequestOutput, SamplingParams
from treespec.drawing.recording import picture
from treespec.serve.protocol import ChatBody, CompletionBody, GenerationBody

pytestmark = pytest.mark.usefixtures("gives_all_pages_back")

MESSAGES: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "def add("}]
SYSTEM = [{**MESSAGES[0], "role": "system"}, MESSAGES[1]]


@pytest.fixture(scope="module")
def url(engine: AsyncLLM) -> Iterator[str]:
    with serving(engine, max_body_bytes=100_000) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


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
OPENAI = set("temperature frequency_penalty presence_penalty logit_bias seed n logprobs top_p stop".split())


def keywords(options: dict[str, Any], **further: Any) -> dict[str, Any]:
    """Keywords of the client, which takes the fields of others as `extra_body`."""
    openai_fields = {name: value for name, value in options.items() if name in OPENAI}
    return openai_fields | {
        "extra_body": {name: value for name, value in options.items() if name not in OPENAI} | further
    }


def plain(llm: LLM, prompt: Any, options: dict[str, Any]) -> RequestOutput:
    """Plain decoding in this process."""
    arguments = dict(options)
    if bias := arguments.pop("logit_bias", None):
        arguments["logit_bias"] = {int(token): value for token, value in bias.items()}
    return llm.generate(prompt, SamplingParams(max_tokens=12, **arguments), spec="off")[0]


def test_tokens_are_those_of_plain_decoding_in_any_company(url: str, llm: LLM) -> None:
    work = [
        (prompt, options, place % 2 == 0) for place, prompt in enumerate(["def add(", [5, 6, 7]]) for options in WORK
    ]
    expected = [plain(llm, prompt, options) for prompt, options, _ in work]

    async def complete(client: AsyncOpenAI, place: int) -> dict[int, tuple[str, list[int]]]:
        prompt, options, streams = work[place]
        arguments = keywords(options, return_token_ids=True, speculation=SPECULATION[place % len(SPECULATION)])
        answer = await client.completions.create(model=NAME, prompt=prompt, max_tokens=12, stream=streams, **arguments)
        choices = (
            [c for chunk in [chunk async for chunk in answer] for c in chunk.choices] if streams else answer.choices
        )
        choices_by_index: dict[int, tuple[str, list[int]]] = {}
        for choice in choices:
            text, tokens = choices_by_index.get(choice.index, ("", []))
            choices_by_index[choice.index] = text + choice.text, [*tokens, *choice.token_ids]
        return choices_by_index

    async def together() -> list[dict[int, tuple[str, list[int]]]]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
            return await asyncio.gather(*(complete(client, place) for place in range(len(work))))

    for place, answer in enumerate(asyncio.run(together())):
        outputs = expected[place].outputs
        assert answer == {each.index: (each.text, each.token_ids) for each in outputs}, work[place]


# --- completions


def test_the_examples_of_the_documentation(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    text = text.replace("http://127.0.0.1:8000", url).replace('"smollm2"', repr(NAME))
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)\n```$", text, flags=re.DOTALL | re.MULTILINE):
        exec(block, names)
    assert capsys.readouterr().out and names["completion"].choices[0].speculative_decoding_stats["num_spec_steps"]


def test_a_completion(client: OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=NAME, prompt="def add(", temperature=0, logprobs=2)
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
        {str(logprob.decoded_token): logprob.logprob for logprob in entry.values()} for _, entry in entries
    ]
    lengths = [len(text) for text in choice.logprobs.tokens or ()]
    assert choice.logprobs.text_offset == [sum(lengths[:i]) for i in range(len(lengths))]


def test_several_prompts_are_streamed_together(client: OpenAI, llm: LLM) -> None:
    prompts = ["def add(", "import os", "x = 1"]
    stream = client.completions.create(
        model=NAME,
        prompt=prompts,
        n=2,
        temperature=0.8,
        seed=3,
        max_tokens=12,
        logprobs=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, offsets, reasons, usage = [""] * 6, [[] for _ in range(6)], {}, None  # type: ignore[var-annotated]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            assert choice.logprobs is not None
            offsets[choice.index] += choice.logprobs.text_offset or []
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
        assert usage is None, "usage is the last event"
        usage = chunk.usage
    outputs = llm.generate(prompts, SamplingParams(max_tokens=12, n=2, temperature=0.8, seed=3), "off")
    completions = [completion for output in outputs for completion in output.outputs]
    assert texts == [completion.text for completion in completions]
    assert all(
        starts == sorted(starts) and len(starts) == len(c.token_ids)
        for starts, c in zip(offsets, completions, strict=True)
    )
    assert reasons == {place: completion.finish_reason for place, completion in enumerate(completions)}
    assert usage is not None and usage.completion_tokens == sum(len(completion.token_ids) for completion in completions)
    assert usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in outputs)


def test_every_chunk_tells_the_usage_so_far(client: OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    arguments: dict[str, Any] = {"model": NAME, "prompt": "def add(", "max_tokens": 24, "temperature": 0}
    extra = {"ignore_eos": True, "speculation": "off", "return_token_ids": True}
    stream = client.completions.create(**arguments, stream=True, stream_options=options, extra_body=extra)
    count, prompt = 0, client.completions.create(**arguments).usage.prompt_tokens  # type: ignore[union-attr]
    for chunk in stream:
        count += sum(len(choice.token_ids) for choice in chunk.choices)  # type: ignore[attr-defined]
        assert chunk.usage is not None
        assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (prompt, count)
    assert count == 24 and not chunk.choices


@pytest.mark.parametrize("stream", [False, True])
def test_statistics_of_speculation(client: OpenAI, stream: bool) -> None:
    arguments: dict[str, Any] = {
        "model": NAME,
        "prompt": "def add(",
        "temperature": 0,
        "max_tokens": 24,
        "stream": stream,
    }
    for speculation in ("off", {"nodes": 8}):
        extra = {"speculation": speculation, "speculative_decoding_stats": True, "ignore_eos": True}
        answer = client.completions.create(**arguments, extra_body=extra)
        stats = (
            [*answer][-1].choices[0].speculative_decoding_stats
            if stream
            else answer.choices[0].speculative_decoding_stats
        )
        histogram, passes = stats["acceptance_histogram"], stats["num_spec_steps"]
        assert sum(histogram) == passes and stats["mean_acceptance_length"] == 24 / passes
        assert sum(length * count for length, count in enumerate(histogram)) == stats["num_accepted_draft_tokens"]
        assert stats["draft_acceptance_rate"] * stats["num_draft_tokens"] == pytest.approx(
            stats["num_accepted_draft_tokens"]
        )
        assert (stats["num_draft_tokens"] == 0) == (passes == 24) == (speculation == "off")


def test_a_stream_tells_its_rounds(client: OpenAI, llm: LLM) -> None:
    arguments: dict[str, Any] = {"model": NAME, "prompt": "def add(", "max_tokens": 24, "temperature": 0}
    extra = {"rounds": True, "return_token_ids": True, "ignore_eos": True, "speculation": {"nodes": 8}}
    other = client.completions.create(model=NAME, prompt="x", max_tokens=24, stream=True)  # in the same rounds
    records: list[Any] = []
    with llm.add_round_observer(records.append):
        chunks = [*client.completions.create(**arguments, stream=True, extra_body=extra)]
    assert [*other]
    records = [record for record in records if record.request_id == chunks[0].id]
    rounds = [each for chunk in chunks for each in chunk.rounds]
    assert [each["number"] for each in rounds] == [*range(1, len(records) + 1)]
    for told, record in zip(rounds, records, strict=True):
        drawn = picture(record, llm.get_tokenizer())
        expected = json.loads(json.dumps(record.as_dict())) | {"texts": drawn.tokens, "bonus_text": drawn.bonus}
        assert told == {name: value for name, value in expected.items() if name not in ("request_id", "context")}
    emitted = [token for record in records for token in record.emitted]
    assert emitted == [token for chunk in chunks for token in chunk.choices[0].token_ids]
    wait_until(lambda: not llm.engine.observers)
    assert not any(hasattr(chunk, "rounds") for chunk in client.completions.create(**arguments, stream=True))


# --- chat


def test_a_chat(client: OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.6, seed=9, logprobs=2)
    (expected,) = llm.chat(SYSTEM, params, "off", chat_template=TEMPLATE)
    arguments: dict[str, Any] = {"model": "other", "messages": MESSAGES, "temperature": 0.6, "seed": 9}
    answer = client.chat.completions.create(**arguments, max_completion_tokens=20, logprobs=True, top_logprobs=2)
    (choice,), completion = answer.choices, expected.outputs[0]
    assert answer.object == "chat.completion" and answer.model == "other" and choice.message.role == "assistant"
    assert (choice.message.content, choice.finish_reason) == (completion.text, completion.finish_reason)
    assert choice.logprobs is not None and choice.logprobs.content is not None and completion.logprobs is not None
    for position, token, entry in zip(choice.logprobs.content, completion.token_ids, completion.logprobs, strict=True):
        assert (position.token, position.logprob) == (entry[token].decoded_token, entry[token].logprob)
        best = sorted((logprob for logprob in entry.values() if logprob.rank <= 2), key=lambda logprob: logprob.rank)
        assert [(top.token, top.logprob) for top in position.top_logprobs] == [
            (e.decoded_token, e.logprob) for e in best
        ]
    chunks = [*client.chat.completions.create(**arguments, max_tokens=20, stream=True, logprobs=True, top_logprobs=2)]
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    positions = [position for part in parts if part is not None for position in part.content or ()]
    assert positions == choice.logprobs.content
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == completion.text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [
        completion.finish_reason
    ]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({chunk.id for chunk in chunks}) == 1


def test_a_conversation_goes_on(client: OpenAI, llm: LLM) -> None:
    messages = [*SYSTEM, {"role": "assistant", "content": "def"}]
    (expected,) = llm.chat(
        messages,
        SamplingParams(max_tokens=8),
        "off",
        TEMPLATE,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    answer = client.chat.completions.create(
        model=NAME,
        messages=messages,
        temperature=0,
        max_tokens=8,
        extra_body={"continue_final_message": True},  # type: ignore[arg-type]
    )
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
    for options, form in cases:
        arguments: dict[str, Any] = {"messages": MESSAGES, "temperature": 0.5, "seed": 1, "max_tokens": 16}
        arguments["model"] = NAME
        params = SamplingParams(max_tokens=16, temperature=0.5, seed=1, structured_outputs=form)
        text = llm.chat(SYSTEM, params, "off", TEMPLATE)[0].outputs[0].text
        assert client.chat.completions.create(**arguments, **options).choices[0].message.content == text
        chunks = client.chat.completions.create(**arguments, stream=True, **options)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert json.loads(text or "")["a"] in (1, 2)


# --- the other endpoints


def test_models_and_health(client: OpenAI, url: str) -> None:
    assert [model.id for model in client.models.list()] == [NAME, "other"]
    model = client.models.retrieve(NAME)
    assert model.owned_by == "treespec" and model.max_model_len == 256  # type: ignore[attr-defined]
    assert model.chat and model.sources == ["ssm-1", "ssm-2", "lookup"]  # type: ignore[attr-defined]
    assert httpx2.get(f"{url}/health").status_code == 200
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


def test_metrics(client: OpenAI, url: str, llm: LLM) -> None:
    def read() -> dict[tuple[str, str | None], float]:
        families = text_string_to_metric_families(httpx2.get(f"{url}/metrics").text)
        return {
            (
                sample.name.removeprefix("treespec:"),
                sample.labels.get("source", sample.labels.get("finished_reason")),
            ): sample.value
            for family in families
            for sample in family.samples
            if "position" not in sample.labels
        }

    before = read()
    extra = {"speculation": {"nodes": 8}, "ignore_eos": True, "speculative_decoding_stats": True}
    answer = client.completions.create(model=NAME, prompt="def add(", temperature=0, max_tokens=24, extra_body=extra)
    after = read()
    stats = answer.choices[0].speculative_decoding_stats  # type: ignore[attr-defined]

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
    assert more("request_success_total", "length") == 1
    for name in ("time_to_first_token", "request_time_per_output_token", "request_queue_time", "e2e_request_latency"):
        assert more(f"{name}_seconds_count") == 1
    assert after["num_requests_running", None] == after["kv_cache_usage_perc", None] == 0
    assert more("num_preemptions_total") == 0


# --- bad input

DEEP = "[" * 50_000 + "]" * 50_000
BAD: list[tuple[Any, str, int]] = [
    ("{", "not JSON", 400),
    ("3", "body=3: ", 400),
    (DEEP, "", 400),
    ({"prompt": "x", "model": "absent"}, "model 'absent'", 404),
    ({}, "prompt: Field required", 400),
    ({"prompt": []}, "give at least one", 400),
    ({"prompt": ""}, "an empty prompt", 400),
    ({"prompt": [600]}, "prompt token 600", 400),
    ({"prompt": ["x", 3]}, "prompt", 400),
    ({"prompt": "x" * 3000}, "leaves room for at most 255", 400),
    ({"prompt": "\ud800"}, "lone surrogate", 400),
    ({"prompt": ["x"] * 1000, "n": 2, "temperature": 1}, "at most 1024 choices", 400),
    ({"prompt": "x", "temperature": -1}, "temperature=-1", 400),
    ({"prompt": "x", "temperature": float("nan")}, "temperature", 400),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens=0", 400),
    ({"prompt": "x", "n": 1000}, "n=1000: ", 400),
    ({"prompt": "x", "n": 2, "temperature": 0}, "all outputs would be equal", 400),
    ({"prompt": "x", "logprobs": 21}, "logprobs=21: ", 400),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "'a' is no token id", 400),
    ({"prompt": "x", "stop": ["a"] * 5000}, "stop: 5000 texts", 400),
    ({"prompt": "x", "stop": [1] * 10_000}, "stop", 400),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options go with stream", 400),
    ({"prompt": "x", "stream": True, "stream_options": {"usage": True}}, "stream_options.usage", 400),
    ({"prompt": "x", "temprature": 1}, "unknown 'temprature' (did you mean 'temperature'?)", 400),
    ({"prompt": "x", **{f"field{i}": i for i in range(3000)}}, "unknown 'field0'", 400),
    ({"prompt": "x", "x" * 50_000: 1}, "unknown 'xxx", 400),
    ({"prompt": "x", "echo": True}, "echo is not supported", 400),
    ({"prompt": "x", "speculation": {"nodes": 4096}}, "nodes=4096", 400),
    ({"prompt": "x", "speculation": {"node": 4}}, "SpecConfig: unknown 'node'", 400),
    ({"prompt": "x", "speculation": {"sources": ["absent"]}}, "this engine has", 400),
    ({"prompt": "x", "structured_outputs": {"regex": "("}}, "regex", 400),
    ({"prompt": "x", "structured_outputs": {"json": {}, "regex": "a"}}, "give one of", 400),
    ({"prompt": "x", "structured_outputs": {"grammar": "root ::= root"}}, "no token of the model's continues", 400),
    ({"prompt": "x", "response_format": {"type": "json_schema"}}, "json_schema goes with", 400),
    ({"prompt": "x", "stream": True, "temperature": -1}, "temperature=-1", 400),
    ({"prompt": "x" * 200_000}, "more than 100000 bytes", 413),
    ({"prompt": "x", "priority": 1}, "scheduling_policy", 400),
    ({"messages": []}, "no messages", 400),
    ({"messages": [{"role": 3}]}, "messages.0.role=3: ", 400),
    ({"messages": [{"role": "user", "content": "x"}] * 2000}, "messages", 400),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "content part",
        400,
    ),
    ({"prompt": "x", "rounds": True}, "rounds=true goes with stream=true", 400),
    ({"prompt": ["x", "y"], "rounds": True, "stream": True}, "2 prompts with rounds=true", 400),
    ({"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "unknown 'chat_template'", 400),
    ({"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}}, "chat template", 400),
    ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs goes with", 400),
]


@pytest.mark.parametrize(("body", "message", "status"), BAD)
def test_bad_bodies(url: str, body: Any, message: str, status: int) -> None:
    text = body if isinstance(body, str) else json.dumps(body)
    path = "/v1/chat/completions" if '"messages"' in text else "/v1/completions"
    answer = httpx2.post(url + path, content=text, headers={"content-type": "application/json"}, timeout=PATIENCE)
    error = answer.json()["error"]
    assert answer.status_code == status and message in error["message"], answer.text
    assert error.keys() == {"message", "type", "param", "code"} and len(answer.content) < 5000


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_wrong_values_of_every_field(url: str, kind: type[GenerationBody]) -> None:
    """Each is accepted, or refused with the names of the field and the value."""
    path, body = "/v1/completions", {"prompt": "x", "max_tokens": 1}
    if kind is ChatBody:
        path, body = "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, "tool_choice": "none"}
    with httpx2.Client(timeout=PATIENCE) as client:
        for name in kind.model_fields:
            refused = []
            for value in ("wrong", -1.5, {"wrong": 1}, [["wrong"]]):
                answer = client.post(url + path, json={**body, name: value})
                if answer.status_code == 200:
                    continue
                message = answer.json()["error"]["message"]
                assert answer.status_code in (400, 404), (name, value, answer.text)
                assert name in message or "unknown 'wrong'" in message, (name, value, message)
                quoted = (str(value)[:5], "=true", "wrong", "Field required")
                assert any(text in message for text in quoted), (name, value, message)
                refused.append(value)
            assert len(refused) >= 2, name


def test_fields_of_openai_that_change_no_token(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        max_tokens=2,
        user="u",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        modalities=["text"],
        reasoning_effort="low",
    )
    assert answer.usage is not None and answer.usage.completion_tokens <= 2


def test_other_paths(url: str) -> None:
    for path, method, status in (
        ("/absent", "GET", 404),
        ("/v1/completions", "GET", 405),
        ("/v1/models/x", "GET", 404),
    ):
        answer = httpx2.request(method, url + path)
        assert answer.status_code == status and answer.json()["error"]["message"].startswith(("GET", "model"))
    plain = httpx2.post(f"{url}/v1/completions", content='{"prompt": "x"}', headers={"content-type": "text/plain"})
    assert plain.status_code == 400, "a web page could send this without asking"


def test_keys_hosts_and_sizes(engine: AsyncLLM, url: str) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 10_000

    assert httpx2.get(f"{url}/v1/models", headers={"host": "example.com"}).status_code == 403
    for host in ("localhost", "localhost:80", "[::1]:80"):
        assert httpx2.get(f"{url}/v1/models", headers={"host": host}).status_code == 200
    headers = {"content-type": "application/json"}
    assert httpx2.post(f"{url}/v1/completions", content=chunks(), headers=headers).status_code == 413
    with serving(engine, api_key="secret") as guarded:
        for path in ("/health", "/", "/page/page.js"):
            assert httpx2.get(guarded + path).status_code == 200
        for key in ("", "Bearer wrong", "secret", b"Bearer \xe9"):
            for path in ("/v1/models", "/metrics", "/tokenize"):
                answer = httpx2.get(guarded + path, headers={"authorization": key})
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        headers = {"authorization": "Bearer secret", "host": "example.com"}
        assert httpx2.get(f"{guarded}/v1/models", headers=headers).status_code == 200


# --- clients that leave, and slow ones


@pytest.fixture
def slow_rounds(llm: LLM) -> Iterator[None]:
    """Each round of a request takes 20 ms more."""
    with llm.add_round_observer(lambda record: time.sleep(0.02)):
        yield


def send(url: str, stream: bool) -> socket.socket:
    """Ask for 200 tokens, without a client that would read them."""
    host, port = url.removeprefix("http://").split(":")
    arguments = {"prompt": "def add(", "max_tokens": 200, "ignore_eos": True, "speculation": "off", "stream": stream}
    body = json.dumps(arguments)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
    connection.sendall(f"{head}{len(body)}\r\n\r\n{body}".encode())
    return connection


@pytest.mark.usefixtures("slow_rounds")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_gives_its_pages_back(url: str, llm: LLM, stream: bool) -> None:
    before = llm.stats()["generated_tokens"]
    with send(url, stream):
        wait_until(lambda: llm.engine.scheduler.running)
    wait_until(lambda: llm.engine.scheduler.is_idle)
    assert llm.stats()["generated_tokens"] - before < 200


@pytest.mark.usefixtures("slow_rounds")
def test_a_stream_that_is_left(client: OpenAI, llm: LLM) -> None:
    before = llm.stats()["generated_tokens"]
    extra = {"ignore_eos": True, "speculation": "off"}
    with client.completions.create(model=NAME, prompt="x", max_tokens=200, stream=True, extra_body=extra) as stream:
        next(iter(stream))
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


def test_a_request_that_fails_ends_with_an_error(client: OpenAI, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def prefill(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(llm.engine, "prefill", prefill)
    with pytest.raises(openai.InternalServerError, match="a round broke off: RuntimeError: broken"):
        client.completions.create(model=NAME, prompt="x")
    with pytest.raises(openai.APIError, match="a round broke off: RuntimeError: broken"):
        list(client.completions.create(model=NAME, prompt="x", stream=True))
    monkeypatch.undo()
    assert client.completions.create(model=NAME, prompt="x", max_tokens=2).choices


# --- the command


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--speculative-config", "{"], "is not JSON"),
        (["--speculative-config", '{"method": "eagle3"}'], "'eagle3'} is not supported; use drafts="),
        (["--speculative-config", '{"num_speculative_tokens": 0}'], "num_speculative_tokens=0"),
        (["--speculative-config", '{"num_speculative_tokens": 3}', "--nodes", "8"], "give one of them"),
        (["--no-spec", "--nodes", "8"], "--no-spec is plain decoding"),
        (["--chat-template", "/absent"], "/absent"),
        (["--tool-call-parser", "xml"], "'xml'; valid: 'auto', 'hermes', 'llama3_json', 'mistral', 'qwen3_coder'"),
        (["--reasoning-parser", "xml"], "'xml'; valid: 'auto', 'think'"),
        (["--audit", "2"], "audit=2.0"),
        (["--request-timeout", "0"], "request_timeout=0.0; valid"),
        (["--port", "70000"], "port=70000"),
        (["/absent/model"], "/absent/model"),
    ],
)
def test_refused_options(options: list[str], message: str) -> None:
    assert message in run("serve", *options, code=2).stderr


def test_replicas_need_ray() -> None:
    options, message = (["--port", "0"], "other than 0") if find_spec("ray") else ([], "[serve,ray]")
    assert message in run("serve", "--replicas", "2", *options, code=2).stderr


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "treespec", "serve", "embedded", "--port", "0", "--served-model-name", "m"]
    command += ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 7}', "--max-model-len", "256"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as program:
        assert program.stderr is not None
        try:
            lines = iter(program.stderr.readline, "")
            url = next(line.split("running on ")[1].split()[0] for line in lines if "running on http" in line)
            arguments: dict[str, Any] = {"model": "m", "prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
            texts = [
                OpenAI(base_url=f"{url}/v1", api_key="k")
                .completions.create(**arguments, extra_body=extra)
                .choices[0]
                .text
                for extra in ({}, {"speculation": "off"})
            ]
            assert texts[0] == texts[1]
            program.send_signal(signal.SIGINT)
            assert program.wait(PATIENCE) == 0
        finally:
            program.kill()
