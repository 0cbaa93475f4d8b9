"""Sends requests to a real `treespec serve`: tokens against plain decoding, and a soak.

    python perf/serve.py --json out.json

Compares the tokens of `--requests` requests of mixed parameters and priorities, which arrive at random times and share
a cache too small for them, with `LLM.generate(spec="off")` in this process at the same seeds. Then follow `--soak`
requests, many of them cancelled, cut off, invalid or read slowly; after every tenth one, when all have ended and the
server has audited half of the finished ones (at most 256), the server's resources are recorded.
"""

import asyncio
import contextlib
import gc
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import measuring
import openai
import torch
from openai import AsyncOpenAI
from serve_requests import TEMPLATE, Answers, Case, ask, cases, differ, plainly

from treespec import LLM, AsyncLLM
from treespec.cli import main as treespec
from treespec.serve import app as serve_app

ENGINE: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 8}
# A cache of 10 pages for 8 requests, which need 2 to 6 each: requests are preempted.
SCARCE: dict[str, Any] = ENGINE | {"kv_cache_memory_bytes": 5_000_000, "scheduling_policy": "priority"}
AT_ONCE = 48  # maximum concurrent clients
PATIENCE = 60.0  # maximum seconds for anything to end


# --- the server


@contextlib.contextmanager
def serving(*arguments: Any) -> Iterator[str]:
    """Run `treespec serve` on a free port in another process; yield its URL."""
    command = [sys.executable, __file__, "--child", *map(str, arguments), "--port", "0"]
    log: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **log, start_new_session=True) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            url = next(line.split("running on ")[1].split()[0] for line in lines if "running on http" in line)
            threading.Thread(target=lambda: [*map(sys.stderr.write, lines)]).start()  # forwards warnings
            yield url
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def child(arguments: list[str]) -> None:
    """Run the server in this process, with an additional path that reports the held resources."""
    create = serve_app.create_app

    def create_app(engine: AsyncLLM, *options: Any) -> Any:
        async def held() -> dict[str, int]:
            return held_by(engine)

        app = create(engine, *options)
        app.add_api_route("/held", held)
        return app

    serve_app.create_app = create_app
    sys.argv = ["treespec", "serve", *arguments]
    treespec()


def held_by(engine: AsyncLLM) -> dict[str, int]:
    """Return counts of the resources held by this process and an engine."""
    gc.collect()
    inner, kinds = engine.llm.engine, Counter(type(obj).__qualname__ for obj in gc.get_objects())
    with engine.llm.between_rounds():
        inner.check_integrity()
        return {
            "rss_kib": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024,
            "pages": inner.cache.num_pages - inner.cache.num_free,
            "requests": len(inner.scheduler.running) + len(inner.scheduler.waiting) + kinds["RequestStream"],
            "tasks": len(asyncio.all_tasks()),
            "audits": kinds["_Finished"],
            "threads": threading.active_count(),
            "files": len(os.listdir("/proc/self/fd")),
            "observers": int(bool(inner.observers)),
            "preemptions": inner.stats.num_preemptions,
        }


# --- tokens


async def at_random_times(count: int, rate: float, rng: random.Random, send: Any) -> None:
    """Run `one(i)` for all i, at most `AT_ONCE` at once, with exponential gaps between starts."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def limited(i: int) -> None:
        try:
            await send(i)
        finally:
            limit.release()

    async with asyncio.TaskGroup() as tasks:
        for i in range(count):
            await limit.acquire()
            tasks.create_task(limited(i))
            await asyncio.sleep(rng.expovariate(rate))


async def compare(url: str, work: Sequence[Case], expected: Sequence[Answers], seed: int) -> dict[str, Any]:
    """Send all requests at random times and compare their answers."""
    differing = list[str]()
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=None) as client:

        async def one(i: int) -> None:
            if difference := differ(work[i], await ask(client, work[i]), expected[i]):
                differing.append(f"request {i}: {difference}")
                print(differing[-1], work[i].fields())

        await at_random_times(len(work), 60, random.Random(seed), one)
        preemptions = (await client.get(f"{url}/held", cast_to=dict[str, int]))["preemptions"]
    tokens = sum(len(choice[0]) for answers in expected for choice in answers.values())
    return {
        "requests": len(work),
        "streamed": sum(case.body["stream"] for case in work),
        "tokens_compared": tokens,
        "requests_that_differ": len(differing),
        "preemptions": preemptions,
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
    """Sends random requests from random clients, and records failures.

    Args:
        url: the server's URL.
        work, expected: requests and their answers.
        seed: seed of all random choices.
    """

    def __init__(self, url: str, work: Sequence[Case], expected: Sequence[Answers], seed: int):
        self._url, self._work, self._expected, self._rng = url, work, expected, random.Random(seed)
        self._sent, self._failures, self._slowest_refusal = Counter[str](), list[str](), 0.0
        self._held_after = list[dict[str, int]]()

    async def run(self, count: int) -> dict[str, Any]:
        """Send further requests; return all failures so far, and the resources the server held after each call."""
        http = openai.DefaultAsyncHttpxClient(timeout=PATIENCE)
        async with AsyncOpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0, http_client=http) as client:
            self._client = client
            await at_random_times(count, 150, self._rng, lambda i: self._one())
        self._held_after.append(await self._held())
        metrics = (await asyncio.to_thread(urllib.request.urlopen, f"{self._url}/metrics")).read().decode()
        audited = re.findall(r"^treespec:audit_(tokens_(?:differing_)?total){.*} (.+)$", metrics, re.MULTILINE)
        print(f"{self._sent.total()} requests, {len(self._failures)} failures: {self._held_after[-1]}", flush=True)
        return {
            "requests": dict(self._sent),
            "failures": len(self._failures),
            "first_failures": self._failures[:10],
            "slowest_refusal_seconds": self._slowest_refusal,
            "audited": {name: int(float(count)) for name, count in audited},
            "held_after_each_tenth": self._held_after,
        }

    async def _held(self) -> dict[str, int]:
        """Return the server's resources as soon as it is idle, or after a minute."""
        async with AsyncOpenAI(base_url=self._url, api_key="none", timeout=PATIENCE) as client:
            for _ in range(60):
                resources = await client.get("/held", cast_to=dict[str, int])
                if not resources["requests"] and not resources["audits"]:
                    break
                await asyncio.sleep(1)
        return resources

    async def _one(self) -> None:
        (kind,) = self._rng.choices([*KINDS], [*KINDS.values()])
        self._sent[kind] += 1
        i = self._rng.randrange(len(self._work))
        try:
            async with asyncio.timeout(PATIENCE):
                problem = await getattr(self, f"_{kind.replace(' ', '_')}")(self._work[i], self._expected[i])
        except (openai.OpenAIError, OSError, TimeoutError) as error:
            problem = f"{type(error).__name__}: {error} {error.__cause__!r}"
        if problem:
            self._failures.append(f"{kind}: {problem}"[:400])
            print(self._failures[-1], flush=True)

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
        if self._rng.random() < 0.5:  # a reset instead of an orderly close
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
            self._slowest_refusal = max(self._slowest_refusal, time.perf_counter() - began)
            if 400 <= error.status_code < 500 and isinstance(error.body, dict) and error.body["message"]:
                return None
            return f"{text[:100]}: {error.status_code} {error}"
        except openai.APIConnectionError:  # the server closes the connection during a large body
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


def main() -> None:
    sizes = {"requests": 2000, "soak": 20_000, "seed": 0, "threads": 1}
    args = measuring.parser(__doc__, grows=False, **sizes).parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    torch.set_num_threads(args.threads)
    document = measuring.setup(args, "requests", "seed", "threads", soak_requests=args.soak)
    llm = LLM("embedded", **ENGINE)
    tokenizer = llm.get_tokenizer()
    work = cases(args.requests, args.seed, tokenizer, 48)
    soak_cases = cases(100, args.seed + 1, tokenizer, 12) + cases(20, args.seed + 2, tokenizer, 100)
    expected, expected_again = ([plainly(llm, case) for case in group] for group in (work, soak_cases))
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(TEMPLATE)
        template.flush()
        flags = [item for name, value in SCARCE.items() for item in (f"--{name.replace('_', '-')}", value)]
        flags += ["--chat-template", template.name, "--served-model-name", "m", "--audit", "0.5"]
        with serving("embedded", *flags) as url:
            if args.requests:
                document["tokens"] = asyncio.run(compare(url, work, expected, args.seed))
                print(document["tokens"], flush=True)
                measuring.write_json(args.json, document)
            soak = Soak(url, soak_cases, expected_again, args.seed)
            for _ in range(10 if args.soak else 0):
                document["soak"] = asyncio.run(soak.run(args.soak // 10))
                measuring.write_json(args.json, document)


if __name__ == "__main__":
    child(sys.argv[2:]) if sys.argv[1:2] == ["--child"] else main()
