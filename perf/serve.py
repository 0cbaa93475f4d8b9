"""Sends requests to a real `treespec serve`: tokens against plain decoding, a soak, and throughput.

    python perf/serve.py --json out.json
    python perf/serve.py --throughput --model smollm2 --json out.json

The first compares the tokens of `--requests` requests of mixed parameters, which arrive at random times, with
`LLM.generate(spec="off")` in this process at the same seeds; then `--soak` requests follow, many of which are cancelled,
cut off, invalid or read slowly, and at every tenth of them, when all have ended, it records what the server holds. The
second measures tokens per second of the server relative to `LLM.generate` on the same requests, and of the server with
speculation relative to without; nothing else may run on the machine.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import measuring
import openai
import torch
from openai import AsyncOpenAI

from treespec import LLM, AsyncLLM, SamplingParams
from treespec.bench.grow import grown
from treespec.bench.options import Options
from treespec.bench.prompts import held_out_prompts
from treespec.cli import main as treespec
from treespec.serve import app as serve_app
from treespec.serve.messages import Function, calls_schema
from treespec.text.prompt_files import read_prompts

TEMPLATE = (
    "{% for tool in tools or [] %}# {{ tool.function.name }}\n{% endfor %}{% for message in messages %}"
    "# {{ message.role }}: {{ message.content }}\n{% endfor %}{# <tool_call> #}"
)
ENGINE: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 8}
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
AT_ONCE = 48  # clients
PATIENCE = 60.0  # seconds for anything that must end


# --- the server


@contextlib.contextmanager
def serving(*arguments: Any) -> Iterator[str]:
    """Run `treespec serve` on a free port in another process; its URL."""
    command = [sys.executable, __file__, "--child", *map(str, arguments), "--port", "0"]
    log: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **log, start_new_session=True) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            url = next(line.split("running on ")[1].split()[0] for line in lines if "running on http" in line)
            threading.Thread(target=lambda: [*map(sys.stderr.write, lines)]).start()  # warnings, and how it ends
            yield url
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def child(arguments: list[str]) -> None:
    """Be the server, with one more path: what the process holds."""
    create = serve_app.create_app

    def create_app(engine: AsyncLLM, options: serve_app.ServerOptions) -> Any:
        async def held() -> dict[str, int]:
            return held_by(engine)

        app = create(engine, options)
        app.add_api_route("/held", held)
        return app

    serve_app.create_app = create_app
    sys.argv = ["treespec", "serve", *arguments]
    treespec()


def held_by(engine: AsyncLLM) -> dict[str, int]:
    """Return what this process and an engine hold now."""
    gc.collect()
    inner, kinds = engine.llm.engine, Counter(type(each).__qualname__ for each in gc.get_objects())
    with engine.llm.between_rounds():
        inner.check_integrity()
        return {
            "rss_kib": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024,
            "pages": inner.cache.num_pages - inner.cache.num_free,
            "requests": len(inner.scheduler.running) + len(inner.scheduler.waiting) + kinds["RequestStream"],
            "tasks": len(asyncio.all_tasks()),
            "threads": threading.active_count(),
            "files": len(os.listdir("/proc/self/fd")),
            "observers": int(bool(inner.observers)),
        }


# --- requests of mixed parameters


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


def cases(count: int, seed: int, tokenizer: Any) -> list[Case]:
    rng = random.Random(seed)
    texts = [str(prompt.content) for prompt in read_prompts(measuring.HELDOUT)]
    prefixes = [text[:500] + "\n" for text in texts[:4]]
    return [_case(rng, texts, prefixes, tokenizer) for _ in range(count)]


def _case(rng: random.Random, texts: Sequence[str], prefixes: Sequence[str], tokenizer: Any) -> Case:
    def sometimes(share: float, value: Any) -> Any:
        return value if rng.random() < share else None

    text = (sometimes(0.4, rng.choice(prefixes)) or "") + rng.choice(texts)[: rng.randint(8, 400)]
    is_sampled, body = rng.random() < 0.6, dict[str, Any]()
    params = {
        "max_tokens": rng.randint(1, 48),
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
    speculation = {"speculation": rng.choice(SPECULATION), "stream": rng.random() < 0.5}
    prompt: Any = text
    if rng.random() < 0.5:
        prompt = [{"role": "user", "content": text}]
        if "json" in (params["structured_outputs"] or ()) and rng.random() < 0.5:
            body = {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}}
        elif params["structured_outputs"] is None and rng.random() < 0.4:
            named = {"type": "function", "function": {"name": "add"}}
            choice: Any = rng.choice(["auto", "none", "required", named])
            body = {"tools": TOOLS, "tool_choice": choice}
            if choice in ("required", named):
                functions = [Function(**tool["function"]) for tool in TOOLS[: 2 if choice == "required" else 1]]
                schema = calls_schema(functions, None, choice == named)
                params["structured_outputs"] = {"json": schema, "whitespace_pattern": " ?"}
    elif rng.random() < 0.3:
        prompt = list(tokenizer.encode(text))
    if params["structured_outputs"] is not None:
        params["ignore_eos"] = None
    return Case(prompt, {name: value for name, value in params.items() if value is not None}, body | speculation)


Answers = dict[int, tuple[Any, ...]]  # by index: the token ids, the text, and the reason to end


def plainly(llm: LLM, case: Case) -> Answers:
    """Return what plain decoding answers to a request of its own."""
    params = SamplingParams(**case.params)
    if case.is_chat:
        tools = None if case.body.get("tool_choice") == "none" else case.body.get("tools")
        (output,) = llm.chat(case.prompt, params, "off", TEMPLATE, tools=tools)
    else:
        (output,) = llm.generate(case.prompt, params, "off")
    return {one.index: (one.token_ids, one.text, str(one.finish_reason)) for one in output.outputs}


async def ask(client: AsyncOpenAI, case: Case, most_chunks: int | None = None) -> Answers:
    """Send a request. `most_chunks` leaves a stream after so many."""
    prompt = {"messages" if case.is_chat else "prompt": case.prompt}
    create: Any = client.chat.completions.create if case.is_chat else client.completions.create
    answer = await create(model="m", **prompt, stream=case.body["stream"], extra_body=case.fields())
    read: dict[int, SimpleNamespace] = {}
    if not case.body["stream"]:
        for choice in answer.choices:
            _add(read, choice, choice.message if case.is_chat else choice)
    else:
        async with answer:
            async for chunk in answer:
                for choice in chunk.choices:
                    _add(read, choice, choice.delta if case.is_chat else choice)
                if most_chunks is not None and (most_chunks := most_chunks - 1) <= 0:
                    break
    return {index: (one.tokens, _text(case, one), one.reason) for index, one in read.items()}


def _add(read: dict[int, SimpleNamespace], choice: Any, part: Any) -> None:
    one = read.setdefault(choice.index, SimpleNamespace(tokens=[], text="", calls={}, reason=None))
    one.tokens += choice.token_ids
    one.reason = choice.finish_reason
    one.text += (part.content if hasattr(part, "content") else part.text) or ""
    for place, call in enumerate(getattr(part, "tool_calls", None) or ()):
        name, arguments = one.calls.get(getattr(call, "index", place), ("", ""))
        one.calls[getattr(call, "index", place)] = (
            name + (call.function.name or ""),
            arguments + (call.function.arguments or ""),
        )


def _text(case: Case, one: SimpleNamespace) -> Any:
    return [*one.calls.values()] if one.calls else one.text


def differ(case: Case, answers: Answers, expected: Answers) -> str | None:
    """Return how a complete answer differs from the expected one, or None."""
    if answers.keys() != expected.keys():
        return f"choices {sorted(answers)}"
    for index, (tokens, text, reason) in answers.items():
        wanted, wanted_text, wanted_reason = expected[index]
        if tokens != wanted:
            return f"tokens {tokens}, expected {wanted}"
        if isinstance(text, list):  # calls
            named = isinstance(case.body["tool_choice"], dict)
            written = wanted_text if named or wanted_reason == "length" else json.loads(wanted_text)
            if named:
                written = [{"name": "add", "arguments": wanted_text}]
            elif wanted_reason != "length":
                text = [(name, json.loads(arguments)) for name, arguments in text]
            if isinstance(written, list) and text != [(call["name"], call["arguments"]) for call in written]:
                return f"calls {text}, expected {wanted_text!r}"
            reason = wanted_reason if reason == "tool_calls" else reason
        elif text != wanted_text and not (case.body.get("tool_choice") == "required" and wanted_reason == "length"):
            return f"text {text!r}, expected {wanted_text!r}"
        if reason != wanted_reason:
            return f"reason {reason}, expected {wanted_reason}"
    return None


async def at_random_times(count: int, rate: float, rng: random.Random, one: Any) -> None:
    """Run `one(i)` for all i, `AT_ONCE` of them at most at once; the gaps between starts are exponential."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def limited(i: int) -> None:
        try:
            await one(i)
        finally:
            limit.release()

    async with asyncio.TaskGroup() as tasks:
        for i in range(count):
            await limit.acquire()
            tasks.create_task(limited(i))
            await asyncio.sleep(rng.expovariate(rate))


async def compare(url: str, work: Sequence[Case], expected: Sequence[Answers], seed: int) -> dict[str, Any]:
    """Send all requests at random times and compare their answers."""
    differing, seconds = list[str](), list[float]()
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=None) as client:

        async def one(i: int) -> None:
            began = time.perf_counter()
            difference = differ(work[i], await ask(client, work[i]), expected[i])
            seconds.append(time.perf_counter() - began)
            if difference:
                differing.append(f"request {i}: {difference}")
                print(differing[-1], work[i].fields())

        await at_random_times(len(work), 60, random.Random(seed), one)
    tokens = sum(len(answer[0]) for answers in expected for answer in answers.values())
    return {"requests": len(work), "tokens_compared": tokens, "requests_that_differ": len(differing)} | {
        "streamed": sum(case.body["stream"] for case in work),
        "seconds_of_a_request": measuring.spread(seconds),
    }


# --- the soak

DEEP = "[" * 100_000
BAD: list[Any] = [
    "{",
    DEEP,
    f'{{"prompt": {DEEP}',
    '{"prompt": "\\ud800"}',
    {},
    {"prompt": 3},
    {"prompt": []},
    {"prompt": [9999]},
    {"prompt": "word " * 4000},
    {"prompt": "x" * (5 << 20)},
    {"prompt": "x", "temperature": "hot"},
    {"prompt": "x", "max_tokens": -1},
    {"prompt": "x", "n": 10**9},
    {"prompt": "x", "absent": 1},
    {"prompt": "x", "stop": ["a"] * 100_000},
    {"prompt": "x", "speculation": {"nodes": 10**6}},
    {"prompt": "x", "structured_outputs": {"regex": "("}},
    {"prompt": "x", "structured_outputs": {"json": {"$ref": "#/$defs/absent"}}},
    {"prompt": "x", "structured_outputs": {"grammar": "root ::= root"}},
    {"prompt": "x", "logit_bias": {str(i): 1 for i in range(100_000)}},
    {"messages": [{"role": "user", "content": "x"}] * 5000},
    {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
    {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"},
]
KINDS = {"whole": 35, "cancelled": 20, "disconnected": 14, "cut off": 5, "bad": 16, "slow": 5, "other": 5}


class Soak:
    """Sends random requests of random clients, and records what goes wrong.

    Args:
        url: of the server.
        work, expected: requests and their answers.
        seed: of all choices.
    """

    def __init__(self, url: str, work: Sequence[Case], expected: Sequence[Answers], seed: int):
        self._url, self._work, self._expected, self._rng = url, work, expected, random.Random(seed)
        self.sent, self.failures, self.slowest_refusal = Counter[str](), list[str](), 0.0

    async def run(self, count: int) -> dict[str, Any]:
        """Send `count` requests in ten parts, and return what the server held after each."""
        held = list[dict[str, int]]()
        for _ in range(10):
            limits = openai.DefaultAsyncHttpxClient(timeout=PATIENCE)
            async with AsyncOpenAI(
                base_url=f"{self._url}/v1", api_key="none", max_retries=0, http_client=limits
            ) as client:
                self._client = client
                await at_random_times(count // 10, 150, self._rng, lambda i: self._one())
            held.append(await self._held())
            print(f"{self.sent.total()} requests, {len(self.failures)} failures: {held[-1]}", flush=True)
        return {
            "requests": dict(self.sent),
            "failures": len(self.failures),
            "first_failures": self.failures[:10],
            "slowest_refusal_seconds": self.slowest_refusal,
            "held_after_each_tenth": held,
        }

    async def _held(self) -> dict[str, int]:
        """Return what the server holds as soon as it is idle; after a minute, whatever it is."""
        async with AsyncOpenAI(base_url=self._url, api_key="none", timeout=PATIENCE) as client:
            for _ in range(60):
                held = await client.get("/held", cast_to=dict[str, int])
                if not held["requests"]:
                    break
                await asyncio.sleep(1)
        return held

    async def _one(self) -> None:
        (kind,) = self._rng.choices([*KINDS], [*KINDS.values()])
        self.sent[kind] += 1
        i = self._rng.randrange(len(self._work))
        try:
            async with asyncio.timeout(PATIENCE):
                problem = await getattr(self, f"_{kind.replace(' ', '_')}")(self._work[i], self._expected[i])
        except (openai.OpenAIError, OSError, TimeoutError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            self.failures.append(f"{kind}: {problem}"[:400])
            print(self.failures[-1], flush=True)

    async def _whole(self, case: Case, expected: Answers) -> str | None:
        return differ(case, await ask(self._client, case), expected)

    async def _cancelled(self, case: Case, expected: Answers) -> str | None:
        case = case._replace(body=case.body | {"stream": True})
        answers = await ask(self._client, case, self._rng.randint(1, 4))
        for index, (tokens, *_) in answers.items():
            if tokens != expected[index][0][: len(tokens)]:
                return f"tokens {tokens}, expected {expected[index][0]}"
        return None

    async def _disconnected(self, case: Case, expected: Answers) -> None:
        _, writer = await self._open()
        writer.write(self._request(case))
        await asyncio.sleep(self._rng.choice([0, 0.001, 0.02, 0.2]))
        if self._rng.random() < 0.5:  # a reset instead of an orderly end
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    async def _cut_off(self, case: Case, expected: Answers) -> None:
        _, writer = await self._open()
        request = self._request(case)
        writer.write(request[: self._rng.randrange(1, len(request))])
        await asyncio.sleep(self._rng.choice([0, 0.02, 0.2]))
        writer.close()

    async def _slow(self, case: Case, expected: Answers) -> str | None:
        reader, writer = await self._open(limit=256, buffer=1024)
        writer.write(self._request(case._replace(body=case.body | {"stream": True}), b"Connection: close\r\n"))
        received = b""
        while data := await reader.read(200):
            received += data
            await asyncio.sleep(0.01)
        writer.close()
        return None if b"[DONE]" in received else f"ended with {received[-200:]!r}"

    async def _bad(self, case: Case, expected: Answers) -> str | None:
        body = self._rng.choice(BAD)
        text = body if isinstance(body, str) else json.dumps(body)
        path = "/chat/completions" if "messages" in body else "/completions"
        began = time.perf_counter()
        try:
            await self._client.post(path, cast_to=object, content=text.encode())
        except openai.APIStatusError as error:
            self.slowest_refusal = max(self.slowest_refusal, time.perf_counter() - began)
            if 400 <= error.status_code < 500 and isinstance(error.body, dict) and error.body["message"]:
                return None
            return f"{text[:100]}: {error.status_code} {error}"
        except openai.APIConnectionError:  # the server closes while a large body is on its way
            return None if len(text) > 1 << 20 else f"{text[:100]}: no answer"
        return f"{text[:100]} was answered"

    async def _other(self, case: Case, expected: Answers) -> str | None:
        path = self._rng.choice(["/v1/models", "/metrics", "/health", "/version", "/", "/page/page.js"])
        reader, writer = await self._open()
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        status = (await reader.read()).split(b"\r\n")[0]
        writer.close()
        return None if b" 200 " in status else f"{path}: {status!r}"

    async def _open(self, limit: int = 1 << 16, buffer: int | None = None) -> Any:
        host, port = self._url.removeprefix("http://").split(":")
        connection = socket.socket()
        if buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        return await asyncio.open_connection(sock=connection, limit=limit)

    def _request(self, case: Case, headers: bytes = b"") -> bytes:
        prompt = {"messages" if case.is_chat else "prompt": case.prompt}
        body = json.dumps(case.fields(**prompt)).encode()
        path = "/v1/chat/completions" if case.is_chat else "/v1/completions"
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return head.encode() + headers + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


# --- throughput


def throughput(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return tokens per second of the server and of `LLM.generate` for each number of clients, and their ratios."""
    rows = []
    options = Options(device="cpu", model=args.model)
    with grown(options, args.grow, None, None) if args.grow else contextlib.nullcontext((options, None)) as (target, _):
        drafts = [] if target.drafts is None else [item for draft in target.drafts for item in ("--draft", draft)]
        prompts = [prompt.content for prompt in read_prompts(held_out_prompts(args.model == "smollm2"))]
        for clients in (1, 4, 8, 16):
            engine = ENGINE | {"max_model_len": 1024, "max_num_seqs": clients}
            llm = LLM(target.model, target.drafts, **engine)
            work = [prompts[i % len(prompts)] for i in range(max(args.prompts, 2 * clients))]
            with serving(target.model or "embedded", *drafts, *_flags(engine), "--served-model-name", "m") as url:
                rows.append({"clients": clients, "requests": len(work)} | _measure(llm, url, work, clients, args))
            print(rows[-1], flush=True)
    return rows


def _measure(llm: LLM, url: str, work: Sequence[Any], clients: int, args: argparse.Namespace) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"generate": [], "server": [], "server_off": []}
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    for repeat in range(args.repeats + 1):  # the first warms up
        for name, values in rates.items():
            began = time.perf_counter()
            if name == "generate":
                chats = isinstance(work[0], list)
                outputs = llm.chat(work, params) if chats else llm.generate(work, params)
                tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            else:
                tokens = asyncio.run(_load(url, work, clients, args.max_tokens, name == "server_off"))
            if repeat:
                values.append(tokens / (time.perf_counter() - began))
    return {name: measuring.spread(values) for name, values in rates.items()} | {
        "server_by_generate": measuring.speed_ups(rates["server"], rates["generate"]),
        "on_by_off": measuring.speed_ups(rates["server_off"], rates["server"]),
    }


async def _load(url: str, work: Sequence[Any], clients: int, max_tokens: int, is_off: bool) -> int:
    """Let clients stream all requests, each one after another; the number of tokens."""
    queue, tokens = [*work], 0
    fields = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True} | ({"speculation": "off"} if is_off else {})
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=None) as client:

        async def one() -> None:
            nonlocal tokens
            while queue:
                prompt = queue.pop(0)
                chats = isinstance(prompt, list)
                create: Any = client.chat.completions.create if chats else client.completions.create
                arguments = {"messages" if chats else "prompt": prompt, "stream_options": {"include_usage": True}}
                async for chunk in await create(model="m", stream=True, extra_body=fields, **arguments):
                    if chunk.usage is not None:
                        tokens += chunk.usage.completion_tokens

        await asyncio.gather(*(one() for _ in range(clients)))
    return tokens


def _flags(engine: dict[str, Any]) -> list[Any]:
    return [item for name, value in engine.items() for item in (f"--{name.replace('_', '-')}", value)]


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2:])
    sizes = {"requests": 2000, "soak": 20_000, "seed": 0, "threads": 1}
    parser = measuring.parser(__doc__, **sizes, prompts=32, max_tokens=64, repeats=5)
    parser.add_argument("--throughput", action="store_true", help="measure throughput instead")
    parser.add_argument("--model", help="target for --throughput; default: the embedded one")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    torch.set_num_threads(args.threads)
    if args.throughput:
        document = measuring.setup(args, "threads", "prompts", "max_tokens", "repeats", "model")
        return measuring.write_json(args.json, document | {"rows": throughput(args)})
    document = measuring.setup(args, *sizes)
    llm = LLM("embedded", **ENGINE)
    work = cases(max(args.requests, 100), args.seed, llm.get_tokenizer())
    expected = [plainly(llm, case) for case in work]
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(TEMPLATE)
        template.flush()
        flags = ["embedded", *_flags(ENGINE), "--chat-template", template.name, "--served-model-name", "m"]
        with serving(*flags) as url:
            if args.requests:
                document["tokens"] = asyncio.run(compare(url, work, expected, args.seed))
                print(document["tokens"], flush=True)
            if args.soak:
                document["soak"] = asyncio.run(Soak(url, work, expected, args.seed).run(args.soak))
    return measuring.write_json(args.json, document)


if __name__ == "__main__":
    main()
