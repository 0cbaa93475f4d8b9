"""Load test of an OpenAI-compatible server, with the measures and JSON fields of vLLM's `bench serve`."""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import openai

from treespec.bench.options import Options
from treespec.bench.prompts import choose, held_out_prompts
from treespec.errors import ConfigError
from treespec.text.prompt_files import Prompt, read_prompts

PERCENTILES = (50, 90, 99)
MEASURES = {
    "ttft": "time to first token",
    "tpot": "time per output token, without the first",
    "itl": "time between chunks of a stream",
    "e2el": "time to the last token",
}


@dataclass
class Answer:
    """Times of one request, in seconds from its start, and its tokens."""

    chunks: list[float] = field(default_factory=list)  # arrival of each chunk with text
    seconds: float = 0.0
    prompt_tokens: int = 0  # as counted by the server
    tokens: int = 0
    error: str | None = None  # reason of the failure; None if the request succeeded


def bench_server(options: Options) -> dict[str, Any]:
    """Send requests to a server and return the measurements. Raises ConfigError if none succeeds."""
    path = Path(options.prompts or held_out_prompts(True))
    prompts = choose(read_prompts(path, chat=True), options.samples, options.seed)
    return asyncio.run(_run(options, [prompts[i % len(prompts)] for i in range(options.samples)]))


async def _run(options: Options, prompts: Sequence[Prompt]) -> dict[str, Any]:
    base = str(options.server).rstrip("/").removesuffix("/v1") + "/v1"
    key = os.environ.get("OPENAI_API_KEY", "none")
    # Failures are counted, not retried.
    async with openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0, timeout=None) as client:
        try:
            model = str(options.model or (await client.models.list()).data[0].id)
            await _ask(client, options, model, prompts[0], 0)  # warm-up
        except openai.OpenAIError as error:
            raise ConfigError(f"--server {options.server}: {error}") from error
        limit = asyncio.Semaphore(options.max_concurrency or len(prompts))
        gaps = np.zeros(len(prompts))  # seconds between arrivals
        if options.request_rate is not None:
            gaps[1:] = np.random.default_rng(options.seed).exponential(1 / options.request_rate, len(prompts))[1:]
        arrivals = np.cumsum(gaps)
        began, date = time.perf_counter(), datetime.now().strftime("%Y%m%d-%H%M%S")

        async def one(i: int) -> Answer:
            await asyncio.sleep(began + arrivals[i] - time.perf_counter())
            async with limit:
                try:
                    return await _ask(client, options, model, prompts[i], i)
                except openai.OpenAIError as error:
                    return Answer(error=str(error))

        answers = await asyncio.gather(*map(one, range(len(prompts))))
        return _document(options, model, answers, time.perf_counter() - began, date)


async def _ask(client: openai.AsyncOpenAI, options: Options, model: str, prompt: Prompt, index: int) -> Answer:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed + index,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"ignore_eos": True},
    }
    answer, content, began = Answer(), prompt.content, time.perf_counter()
    is_chat = isinstance(content, list) and isinstance(content[0], dict)
    create: Any = client.chat.completions.create if is_chat else client.completions.create
    stream = await create(**{"messages" if is_chat else "prompt": content}, **body)
    async for chunk in stream:
        delta = chunk.choices and getattr(chunk.choices[0], "delta", chunk.choices[0])
        if delta and any(getattr(delta, name, None) for name in ("text", "content", "reasoning_content")):
            answer.chunks.append(time.perf_counter() - began)
        if chunk.usage is not None:
            answer.prompt_tokens, answer.tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
    answer.seconds = time.perf_counter() - began
    return answer


def _document(options: Options, model: str, answers: Sequence[Answer], seconds: float, date: str) -> dict[str, Any]:
    done = [answer for answer in answers if answer.error is None and answer.chunks]
    if not done:
        raise ConfigError(f"--server {options.server}: no request succeeded; the first failed with: {answers[0].error}")
    tokens, prompt_tokens = sum(answer.tokens for answer in done), sum(answer.prompt_tokens for answer in done)
    document: dict[str, Any] = {
        "date": date,
        "endpoint_type": "openai",
        "model_id": model,
        "num_prompts": len(answers),
        "request_rate": "inf" if options.request_rate is None else options.request_rate,
        "max_concurrency": options.max_concurrency,
        "temperature": options.temperature,
        "duration": seconds,
        "completed": len(done),
        "failed": len(answers) - len(done),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": tokens,
        "request_throughput": len(done) / seconds,
        "output_throughput": tokens / seconds,
        "total_token_throughput": (tokens + prompt_tokens) / seconds,
    }
    times = {
        "ttft": [answer.chunks[0] for answer in done],
        "tpot": [(a.chunks[-1] - a.chunks[0]) / (a.tokens - 1) for a in done if a.tokens > 1],
        "itl": [gap for answer in done for gap in np.diff(answer.chunks)],
        "e2el": [answer.seconds for answer in done],
    }
    for name, values in times.items():
        ms = 1e3 * np.array(values or [0.0])
        document |= {f"mean_{name}_ms": float(ms.mean()), f"median_{name}_ms": float(np.median(ms))}
        document |= {f"std_{name}_ms": float(ms.std())}
        document |= {f"p{p}_{name}_ms": float(np.percentile(ms, p)) for p in PERCENTILES}
    return document | {"errors": [answer.error for answer in answers if answer.error is not None]}


def table(document: dict[str, Any]) -> str:
    concurrency = document["max_concurrency"]
    limit = "" if concurrency is None else f", at most {concurrency} at once"
    lines = [
        f"model     {document['model_id']}",
        f"requests  {document['completed']} of {document['num_prompts']} completed in {document['duration']:.1f} s, "
        f"{document['request_rate']} per second{limit}",
        f"tokens    {document['total_input_tokens']} in, {document['total_output_tokens']} out, "
        f"{document['output_throughput']:.0f} out per second",
        "",
        f"{'ms':<44}{'mean':>9}{'p50':>9}{'p90':>9}{'p99':>9}",
    ]
    for name, text in MEASURES.items():
        figures = [document[f"mean_{name}_ms"], *(document[f"p{p}_{name}_ms"] for p in PERCENTILES)]
        lines.append(f"{f'{name}: {text}':<44}" + "".join(f"{figure:>9.1f}" for figure in figures))
    if document["errors"]:
        lines += ["", f"{document['failed']} requests failed; the first with: {document['errors'][0]}"]
    return "\n".join(lines)
