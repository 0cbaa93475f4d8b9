"""Requests that take too long, and the audit of finished ones."""

import logging
import time
from typing import Any

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.serving import NAME, PATIENCE, client_of, serving, wait_until
from tests.helpers.speech import scripted
from treespec import LLM, AsyncLLM

RUNNING = "num_requests_running"

pytestmark = pytest.mark.usefixtures("gives_all_pages_back")


@pytest.mark.slow
def test_a_request_that_takes_too_long_ends(engine: AsyncLLM, llm: LLM) -> None:
    before = llm.stats()["generated_tokens"]
    arguments: dict[str, Any] = {"model": NAME, "prompt": ["def add(", "x"], "max_tokens": 200}
    arguments["extra_body"] = {"ignore_eos": True, "speculation": "off"}
    with (
        serving(engine, request_timeout=0.3) as url,
        client_of(url) as client,
        llm.add_round_observer(lambda record: time.sleep(0.02)),
    ):
        failed = metrics(url)["failed_requests_total"]
        with pytest.raises(openai.InternalServerError, match=r"more than 0\.3 s \(--request-timeout\)") as caught:
            client.completions.create(**arguments)
        assert caught.value.status_code == 504
        stream = client.completions.create(**arguments, stream=True)
        with pytest.raises(openai.APIError, match=r"more than 0\.3 s"):
            assert [*stream]
        wait_until(lambda: llm.engine.scheduler.is_idle)
        assert metrics(url)["failed_requests_total"] - failed == 2
    assert 0 < llm.stats()["generated_tokens"] - before < 800
    with serving(engine, request_timeout=PATIENCE) as url, client_of(url) as client:
        assert client.completions.create(**arguments | {"max_tokens": 4}).choices


def metrics(url: str) -> dict[str, float]:
    families = text_string_to_metric_families(httpx2.get(f"{url}/metrics").text)
    return {sample.name.removeprefix("treespec:"): sample.value for family in families for sample in family.samples}


def audited(url: str) -> tuple[float, float]:
    """Compared tokens, and those that differed."""
    values = metrics(url)
    return values["audit_tokens_total"], values["audit_tokens_differing_total"]


@pytest.mark.slow
def test_the_audit_finds_nothing(engine: AsyncLLM) -> None:
    """Every second request is decoded again, with its seed, prompt and parameters."""
    work: list[dict[str, Any]] = [
        {"prompt": "def add(", "temperature": 0},
        {"prompt": "def add(", "temperature": 0.9, "n": 2},
        {"prompt": [5, 6, 7], "temperature": 0.8, "stop": ["e"], "logprobs": 2},
        {"prompt": "import os", "temperature": 0.7, "stream": True},
        {"prompt": "x", "temperature": 1, "extra_body": {"speculation": {"verification": "rejection"}}},
        {"messages": [{"role": "user", "content": "def add("}], "temperature": 0.9, "logprobs": True},
    ]
    counts = []
    with serving(engine, audit=0.5) as url, client_of(url) as client:
        for options in work + work:
            endpoint: Any = client.chat.completions if "messages" in options else client.completions
            answer = endpoint.create(model=NAME, max_tokens=12, **options)
            if "stream" in options:
                assert [*answer]
            elif "verification" not in str(options):
                counts.append(answer.usage.completion_tokens)
        wait_until(lambda: audited(url)[0] >= 4 * 8)
        compared, differing = audited(url)
    assert differing == 0 and compared <= sum(counts) + 24


def test_the_audit_finds_what_differs(engine: AsyncLLM, llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    prompt = llm.get_tokenizer().encode("def add(")
    with serving(engine, audit=1) as url, client_of(url) as client, caplog.at_level(logging.ERROR, "treespec"):
        arguments: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0, "seed": 77}
        # Beside a running request, nothing is decoded again before the script ends.
        extra = {"ignore_eos": True}
        blocker = client.completions.create(model=NAME, prompt="x", max_tokens=200, stream=True, extra_body=extra)
        with llm.add_round_observer(lambda record: time.sleep(0.01)):
            with scripted(llm, [[*prompt, *range(20, 28)]]):
                answer = client.completions.create(**arguments, extra_body={"return_token_ids": True})
            assert answer.choices[0].token_ids == [*range(20, 28)] and audited(url)[0] == 0
            blocker.close()
        running = set[tuple[str, float]]()
        watch = llm.add_round_observer(lambda record: running.add((record.request_id[:5], metrics(url)[RUNNING])))
        with watch:
            wait_until(lambda: audited(url)[0] >= 8)
        assert audited(url)[1] > 0 and ("audit", 0) in running and ("audit", 1) not in running
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"of 8 tokens of request {answer.id} (seed 77) differ from plain decoding" in line
