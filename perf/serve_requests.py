"""Requests of mixed parameters for perf/serve.py: sending them to a server, and comparing the answers."""

import json
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import measuring
from openai import AsyncOpenAI

from treespec import LLM, SamplingParams
from treespec.serve.messages import Function, calls_schema
from treespec.text.prompt_files import read_prompts

TEMPLATE = (
    "{% for tool in tools or [] %}# {{ tool.function.name }}\n{% endfor %}{% for message in messages %}"
    "# {{ message.role }}: {{ message.content }}\n{% endfor %}{# <tool_call> #}"
)
SPECULATION = [None, "off", {"nodes": 6}, {"nodes": 24}, {"nodes": 12, "sources": ["lookup"]}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"enum": [1, 2, 30]}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
FORMS: list[dict[str, Any]] = [{"json": SCHEMA}, {"regex": "[a-z]{2,9}[0-9]"}, {"choice": ["yes", "no", "none"]}]


class Case(NamedTuple):
    """A request: its prompt or messages, sampling parameters, and the fields of the body that differ from these."""

    prompt: Any
    params: dict[str, Any]
    body: dict[str, Any]

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt[0], dict)

    def fields(self, **more: Any) -> dict[str, Any]:
        fields = self.params | self.body | {"return_token_ids": True}
        if "logit_bias" in fields:
            fields["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"].items()}
        if self.body.keys() & {"response_format", "tool_choice"}:
            fields.pop("structured_outputs", None)
        return {name: value for name, value in fields.items() if value is not None} | more


def cases(count: int, seed: int, tokenizer: Any, max_tokens: int) -> list[Case]:
    """Return requests of up to `max_tokens` tokens."""
    rng = random.Random(seed)
    texts = [str(prompt.content) for prompt in read_prompts(measuring.HELDOUT)]
    prefixes = [text[:500] + "\n" for text in texts[:4]]
    return [_case(rng, texts, prefixes, tokenizer, max_tokens) for _ in range(count)]


def _case(rng: random.Random, texts: Sequence[str], prefixes: Sequence[str], tokenizer: Any, max_tokens: int) -> Case:
    def sometimes(share: float, value: Any) -> Any:
        return value if rng.random() < share else None

    text = (sometimes(0.4, rng.choice(prefixes)) or "") + rng.choice(texts)[: rng.randint(8, 400)]
    is_sampled, body = rng.random() < 0.6, dict[str, Any]()
    params = {
        "max_tokens": rng.randint(1, max_tokens),
        "temperature": rng.uniform(0.2, 1.3) if is_sampled else 0,
        "seed": rng.randrange(2**31) if is_sampled else None,
        "n": sometimes(0.3, rng.randint(2, 3)) if is_sampled else None,
        "top_p": sometimes(0.3, rng.uniform(0.6, 1)),
        "top_k": sometimes(0.3, rng.randint(1, 100)),
        "min_p": sometimes(0.2, rng.uniform(0, 0.2)),
        "frequency_penalty": sometimes(0.2, rng.uniform(-1, 1)),
        "presence_penalty": sometimes(0.2, rng.uniform(-1, 1)),
        "repetition_penalty": sometimes(0.2, rng.uniform(0.9, 1.3)),
        "logit_bias": sometimes(0.1, {rng.randrange(4096): rng.uniform(-5, 5) for _ in range(4)}),
        "stop": sometimes(0.3, rng.sample(["\n\n", "return", "e", "the", ")"], 2)),
        "include_stop_str_in_output": sometimes(0.2, True),
        "ignore_eos": sometimes(0.3, True),
        "bad_words": sometimes(0.1, ["self", "import"]),
        "structured_outputs": sometimes(0.15, rng.choice(FORMS)),
    }
    options = {"speculation": rng.choice(SPECULATION), "stream": rng.random() < 0.5, "priority": rng.randint(-1, 1)}
    prompt: Any = text
    if rng.random() < 0.5:
        prompt = [{"role": "user", "content": text}]
        if "json" in (params["structured_outputs"] or ()) and rng.random() < 0.5:
            body = {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}}
        elif params["structured_outputs"] is None and rng.random() < 0.4:
            named_tool = {"type": "function", "function": {"name": "add"}}
            choice: Any = rng.choice(["auto", "none", "required", named_tool])
            body = {"tools": TOOLS, "tool_choice": choice}
            if choice in ("required", named_tool):
                functions = [Function(**tool["function"]) for tool in TOOLS[: 2 if choice == "required" else 1]]
                schema = calls_schema(functions, None, choice == named_tool)
                params["structured_outputs"] = {"json": schema, "whitespace_pattern": " ?"}
    elif rng.random() < 0.3:
        prompt = list(tokenizer.encode(text))
    if params["structured_outputs"] is not None:
        params["ignore_eos"] = None
    return Case(prompt, {name: value for name, value in params.items() if value is not None}, body | options)


Answers = dict[int, tuple[Any, ...]]  # (token ids, text, finish reason) by index


def plainly(llm: LLM, case: Case) -> Answers:
    params = SamplingParams(**case.params)
    if case.is_chat:
        tools = None if case.body.get("tool_choice") == "none" else case.body.get("tools")
        (output,) = llm.chat(case.prompt, params, "off", TEMPLATE, tools=tools)
    else:
        (output,) = llm.generate(case.prompt, params, "off")
    return {choice.index: (choice.token_ids, choice.text, str(choice.finish_reason)) for choice in output.outputs}


async def ask(client: AsyncOpenAI, case: Case, most_chunks: int | None = None) -> Answers:
    """Send a request. `most_chunks` is the number of chunks after which to leave a stream."""
    prompt = {"messages" if case.is_chat else "prompt": case.prompt}
    create: Any = client.chat.completions.create if case.is_chat else client.completions.create
    answer = await create(model="m", **prompt, stream=case.body["stream"], extra_body=case.fields())
    choices: dict[int, SimpleNamespace] = {}
    if not case.body["stream"]:
        for choice in answer.choices:
            _add(choices, choice, choice.message if case.is_chat else choice)
    else:
        async with answer:
            async for chunk in answer:
                for choice in chunk.choices:
                    _add(choices, choice, choice.delta if case.is_chat else choice)
                if most_chunks is not None and (most_chunks := most_chunks - 1) <= 0:
                    break
    return {index: (result.tokens, _text(case, result), result.reason) for index, result in choices.items()}


def _add(choices: dict[int, SimpleNamespace], choice: Any, delta: Any) -> None:
    result = choices.setdefault(choice.index, SimpleNamespace(tokens=[], text="", calls={}, reason=None))
    result.tokens += choice.token_ids
    result.reason = choice.finish_reason
    result.text += (delta.content if hasattr(delta, "content") else delta.text) or ""
    for index, call in enumerate(getattr(delta, "tool_calls", None) or ()):
        name, arguments = result.calls.get(getattr(call, "index", index), ("", ""))
        result.calls[getattr(call, "index", index)] = (
            name + (call.function.name or ""),
            arguments + (call.function.arguments or ""),
        )


def _text(case: Case, result: SimpleNamespace) -> Any:
    return [*result.calls.values()] if result.calls else result.text


def differ(case: Case, answers: Answers, expected: Answers) -> str | None:
    """Return how a complete answer differs from the expected one, or None."""
    if answers.keys() != expected.keys():
        return f"choices {sorted(answers)}"
    for index, (tokens, text, reason) in answers.items():
        wanted_tokens, wanted_text, wanted_reason = expected[index]
        if tokens != wanted_tokens:
            return f"tokens {tokens}, expected {wanted_tokens}"
        if isinstance(text, list):  # tool calls
            is_named = isinstance(case.body["tool_choice"], dict)
            calls = wanted_text if is_named or wanted_reason == "length" else json.loads(wanted_text)
            if is_named:
                calls = [{"name": "add", "arguments": wanted_text}]
            elif wanted_reason != "length":
                text = [(name, json.loads(arguments)) for name, arguments in text]
            if isinstance(calls, list) and text != [(call["name"], call["arguments"]) for call in calls]:
                return f"calls {text}, expected {wanted_text!r}"
            reason = wanted_reason if reason == "tool_calls" else reason
        elif text != wanted_text and not (case.body.get("tool_choice") == "required" and wanted_reason == "length"):
            return f"text {text!r}, expected {wanted_text!r}"
        if reason != wanted_reason:
            return f"reason {reason}, expected {wanted_reason}"
    return None
