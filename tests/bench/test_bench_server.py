"""`treespec bench --server`: the load test of a live server."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import run
from tests.helpers.serving import NAME, assert_all_pages_are_back, serving
from treespec import AsyncLLM


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines: list[dict[str, Any]] = [{"prompt": "def add("}, {"text": "import os\n"}, {"turns": ["What is a tree?"]}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--request-rate", "200", "--max-concurrency", "2", "--temperature", "0.7")])
def test_every_request_is_measured(engine: AsyncLLM, prompts: Path, options: tuple[str, ...], tmp_path: Path) -> None:
    out, sizes = tmp_path / "out.json", ("--samples", "7", "--max-tokens", "9")
    with serving(engine) as url:
        result = run("bench", "--server", url, "--prompts", prompts, *sizes, *options, "--json", "--out", out)
    document = json.loads(result.stdout)
    assert document == json.loads(out.read_text())
    assert (document["completed"], document["failed"], document["errors"]) == (7, 0, [])
    assert document["total_output_tokens"] == 7 * 9 and document["model_id"] == NAME
    assert document["total_input_tokens"] > 0
    assert document["output_throughput"] == pytest.approx(63 / document["duration"])
    assert document["request_rate"] == (200.0 if options else "inf")
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert 0 <= document[f"p50_{name}_ms"] <= document[f"p90_{name}_ms"] <= document[f"p99_{name}_ms"]
    assert document["mean_e2el_ms"] >= document["mean_ttft_ms"] > 0
    assert_all_pages_are_back(engine.llm)


@pytest.mark.slow
def test_failures_are_counted(engine: AsyncLLM, prompts: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(prompts.read_text() + json.dumps({"text": "a b " * 5000}) + "\n")
    with serving(engine) as url:
        result = run("bench", "--server", f"{url}/v1", "--prompts", long, "--samples", 4, "--max-tokens", 5)
        assert "3 of 4 completed" in result.stdout and "1 requests failed" in result.stdout
        assert "time to first token" in result.stdout
        unknown = run("bench", "--server", url, "--prompts", prompts, "--model", "other-model", code=2)
    assert "other-model" in unknown.stderr


@pytest.mark.parametrize(
    "options, message",
    [
        (("--server", "http://127.0.0.1:9"), "--server http://127.0.0.1:9: Connection error."),
        (("--server", "http://x", "--nodes", "8", "--draft", "d"), "drafts, nodes: determined by the server"),
        (("--server", "http://x", "--request-rate", "0"), "request_rate=0.0; valid: requests per second, above 0"),
        (("--max-concurrency", "3"), "request_rate and max_concurrency require server"),
    ],
)
def test_what_it_refuses(options: tuple[str, ...], message: str) -> None:
    assert message in run("bench", *options, code=2).stderr
