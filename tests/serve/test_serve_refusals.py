"""What `treespec serve` refuses: bodies that no client sends, strangers, options; and the command itself."""

import http.client
import json
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from tests.helpers.commands import ROOT, run
from tests.helpers.serving import NAME, PATIENCE, client_of, connect, serving
from treespec import LLM, AsyncLLM
from treespec.serve.http_server import bind
from treespec.serve.options import ServerOptions
from treespec.serve.protocol import ChatBody, CompletionBody, GenerationBody
from treespec.serve.responses import ResponsesBody

pytestmark = pytest.mark.usefixtures("gives_all_pages_back")

MESSAGES: list[Any] = [{"role": "user", "content": "def add("}]

DEEP = "[" * 50_000 + "]" * 50_000
BAD: list[tuple[Any, str, int]] = [
    ("{", "not JSON", 400),
    ("3", "body=3: ", 400),
    (DEEP, "", 400),
    (b'{"prompt": "\xff"}', "the body is not JSON: UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff", 400),
    ({"prompt": "x", "model": "absent"}, "model 'absent'", 404),
    ({}, "prompt: Field required", 400),
    ({"prompt": []}, "pass at least one prompt", 400),
    ({"prompt": ""}, "an empty prompt", 400),
    (
        {"prompt": "x" * 3000},
        "This model's maximum context length is 256 tokens, which leaves room for at most 255",
        400,
    ),
    ({"prompt": "x" * 3000}, "raise the server's --max-model-len (the model has 1024), or keep its end: trunc", 400),
    ({"prompt": [5, 6], "max_tokens": 255}, "a prompt of 2 tokens and max_tokens=255 exceed; ask for at most 254", 400),
    ({"messages": MESSAGES, "max_completion_tokens": 256}, "max_tokens=256 exceed", 400),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens=0; valid: an int of at least 1, or null: all", 400),
    ({"prompt": "\ud800"}, "lone surrogate", 400),
    ({"prompt": ["x"] * 1000, "n": 2, "temperature": 1}, "at most 1024 choices", 400),
    ({"prompt": "x", "temperature": float("nan")}, "temperature", 400),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "'a' is no token id", 400),
    ({"prompt": "x", "stop": ["a"] * 5000}, "stop: 5000 texts", 400),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options require stream", 400),
    ({"prompt": "x", "stream": True, "stream_options": {"usage": True}}, "stream_options.usage", 400),
    ({"prompt": "x", "temprature": 1}, "unknown 'temprature' (did you mean 'temperature'?)", 400),
    ({"prompt": "x", **{f"field{i}": i for i in range(3000)}}, "unknown 'field0'", 400),
    ({"prompt": "x", "x" * 50_000: 1}, "unknown 'xxx", 400),
    ({"prompt": "x", "echo": True, "logprobs": 1, "stream": True}, "echo with logprobs: log-probabilities", 400),
    ({"prompt": "x", "prompt_logprobs": 0, "stream": True}, "prompt_logprobs: log-probabilities", 400),
    ({"prompt": "x", "speculation": {"node": 4}}, "speculation: unknown 'node'", 400),
    ({"prompt": "x", "speculation": {"sources": ["suffix"]}}, "use the server's --suffix-tokens 262144", 400),
    ({"prompt": "x", "structured_outputs": {"regex": "("}}, "regex", 400),
    ({"prompt": "x", "structured_outputs": {"choice": ["a"]}, "min_tokens": 5}, "no token is left at position", 400),
    ({"prompt": "x", "repetition_penalty": 1e-320}, "penalties or logits_processors produced NaN or infinity", 400),
    ({"prompt": "x", "response_format": {"type": "json_schema"}}, "json_schema and type", 400),
    ({"prompt": "x", "stream": True, "temperature": -1}, "temperature=-1", 400),
    ({"prompt": "x" * 200_000}, "more than 100000 bytes", 413),
    ({"prompt": "x", "priority": 1}, "the server's --scheduling-policy priority", 400),
    ({"messages": [{"role": "user", "content": ["x"] * 2049}] * 2}, "4098 parts; valid: at most 4096", 400),
    ({"messages": MESSAGES * 1025}, "at most 1024", 400),
    ({"messages": []}, "no messages", 400),
    ({"messages": [{"role": "user", "content": {"type": "text", "text": "x"}}]}, "messages.0.content", 400),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "content part", 400),
    ({"prompt": "x", "rounds": True}, "rounds=true requires stream=true", 400),
    ({"prompt": ["x", "y"], "rounds": True, "stream": True}, "2 prompts with rounds=true", 400),
    ({"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "unknown 'chat_template'", 400),
    ({"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}}, "chat template", 400),
    ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs requires", 400),
    ({"input": []}, "no messages", 400),
    ({"input": "x", "previous_response_id": "resp_1"}, "repeat the conversation in input", 400),
    ({"input": "x", "n": 2}, "n is not supported", 400),
    ({"input": "x", "metadata": {"a": "\ud800"}}, "could not repeat the request", 400),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "'item_reference'; valid: message, reasoning", 400),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "content part {'type': 'input_image'}", 400),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools.0.type='web_search'", 400),
    ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.json_schema.name", 400),
]


@pytest.mark.parametrize(("body", "message", "status"), BAD)
def test_bad_bodies(url: str, body: Any, message: str, status: int) -> None:
    text = body if isinstance(body, str | bytes) else json.dumps(body)
    paths = {'"messages"': "/v1/chat/completions", '"input"': "/v1/responses"}
    path = next((path for name, path in paths.items() if name in str(text)), "/v1/completions")
    answer = httpx2.post(url + path, content=text, headers={"content-type": "application/json"}, timeout=PATIENCE)
    error = answer.json()["error"]
    assert answer.status_code == status and message in error["message"], answer.text
    assert error.keys() == {"message", "type", "param", "code"} and len(answer.content) < 5000


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody, ResponsesBody])
def test_wrong_values_of_every_field(url: str, kind: type[GenerationBody]) -> None:
    """Each is accepted, or refused with the names of the field and the value."""
    path, body = "/v1/completions", {"prompt": "x", "max_tokens": 1}
    if kind is ChatBody:
        path, body = "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, "tool_choice": "none"}
    if kind is ResponsesBody:
        path, body = "/v1/responses", {"input": "x", "max_output_tokens": 1}
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
    ignored: dict[str, Any] = {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"}
    ignored |= {"modalities": ["text"], "reasoning_effort": "low", "logprobs": False, "top_logprobs": 0}
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=2, **ignored)
    assert answer.usage is not None and answer.usage.completion_tokens <= 2


def test_other_paths(url: str) -> None:
    for path, method, status in (("absent", "GET", 404), ("v1/completions", "GET", 405), ("v1/models/x", "GET", 404)):
        answer = httpx2.request(method, f"{url}/{path}")
        assert answer.status_code == status and answer.json()["error"]["message"].startswith(("GET", "model"))
        assert answer.headers.get("allow") == ("POST" if status == 405 else None)
    plain = httpx2.post(f"{url}/v1/completions", content='{"prompt": "x"}', headers={"content-type": "text/plain"})
    assert plain.status_code == 400, "a web page could send this without asking"
    assert "Content-Type: application/json" in plain.json()["error"]["message"]


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
        for path in ("/health", "/ping", "/", "/page/page.js"):
            assert httpx2.get(guarded + path).status_code == 200
        for key in ("", "Bearer wrong", "secret", b"Bearer \xe9"):
            for path in ("/v1/models", "/metrics", "/tokenize"):
                answer = httpx2.get(guarded + path, headers={"authorization": key})
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        headers = {"authorization": "Bearer secret", "host": "example.com"}
        assert httpx2.get(f"{guarded}/v1/models", headers=headers).status_code == 200


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def assert_refused(connection: socket.socket, status: int) -> None:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    assert answer.status == status and json.loads(answer.read())["error"]["type"] == "invalid_request_error"
    assert answer.headers["connection"] == "close"


def test_headers_and_trailers_are_bounded(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(HEAD + b"X-Long: " + b"a" * 70_000)
        connection.sendall(b"a" * 1_000_000)  # it is read, so that the answer arrives
        assert_refused(connection, 431)
    with connect(url) as connection, suppress(ConnectionError):
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Long: " + b"a" * 200_000)
        assert connection.recv(1) == b""
    assert httpx2.get(f"{url}/health", headers={"X-Long": "a" * 60_000}).status_code == 200


def test_requests_that_arrive_slowly(engine: AsyncLLM) -> None:
    with serving(engine, read_timeout=0.1) as url:
        for begun in (HEAD + b"X-Slow: ", HEAD + b"Content-Length: 100000\r\n\r\n"):
            with connect(url) as connection:
                connection.sendall(begun)
                while not select.select([connection], [], [], 0.01)[0]:
                    connection.sendall(b" ")
                assert_refused(connection, 408)
        with connect(url) as connection:
            assert connection.recv(1) == b"", "nothing was sent"


def test_pages_of_other_origins(engine: AsyncLLM) -> None:
    """Browsers ask first, without the key, and read answers and refusals only with these headers."""
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    with serving(engine, api_key="secret", allowed_origins=['["http://a", "http://b"]']) as url:
        for origin, allowed in (("http://a", "http://a"), ("http://c", None)):
            answers = [httpx2.options(f"{url}/v1/models", headers={**asked, "origin": origin})]
            for key in ("Bearer secret", "Bearer wrong"):
                answers.append(httpx2.get(f"{url}/v1/models", headers={"authorization": key, "origin": origin}))
            assert [answer.status_code for answer in answers] == [200 if allowed else 400, 200, 401]
            assert {answer.headers.get("access-control-allow-origin") for answer in answers} == {allowed}


def test_other_addresses(engine: AsyncLLM, tmp_path: Path) -> None:
    """A Unix socket, and a prefix that a proxy removes or not."""
    path = str(tmp_path / "socket")
    with (
        serving(engine, uds=path, root_path="/llm/", api_key="secret") as url,
        httpx2.Client(transport=httpx2.HTTPTransport(uds=path)) as client,
    ):
        for name, status in (("health", 200), ("page/page.js", 200), ("v1/models", 401)):
            assert client.get(f"{url}/{name}").status_code == client.get(f"{url}/llm/{name}").status_code == status


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--speculative-config", "{"], "is not JSON"),
        (["--speculative-config", '{"method": "eagle3"}'], "'eagle3'} is not supported; use drafts="),
        (["--speculative-config", '{"num_speculative_tokens": 0}'], "num_speculative_tokens=0"),
        (["--speculative-config", '{"num_speculative_tokens": 3}', "--nodes", "8"], "pass one of them"),
        (["--no-spec", "--nodes", "8"], "--no-spec is plain decoding"),
        (["--chat-template", "/absent"], "/absent"),
        (["--tool-call-parser", "xml"], "'xml'; valid: 'auto', 'hermes', 'llama3_json', 'mistral', 'qwen3_coder'"),
        (["--reasoning-parser", "xml"], "'xml'; valid: 'auto', 'think'"),
        (["--audit", "2"], "audit=2.0"),
        (["--request-timeout", "0"], "request_timeout=0.0; valid"),
        (["--port", "70000"], "port=70000"),
        (["--ssl-keyfile", "/absent.key"], "requires ssl_certfile"),
        (["--ssl-certfile", "/absent.pem"], "--ssl-certfile /absent.pem"),
        (["--root-path", "llm"], "root_path='llm'"),
        (["--uds", "/absent/socket"], "its folder does not exist"),
        (["--allowed-origins", "[*"], "allowed_origins=['[*']; valid"),
        (["--config", "/absent.yaml"], "/absent.yaml"),
        (["--lora-modules", "a=b", "c"], "lora_modules='c'; valid: NAME=FOLDER, or"),
        (["--replicas", "2", "--allow-runtime-lora-updating"], "would reach only one of replicas=2"),
        (["--uvicorn-log-level", "loud"], "'loud'; valid: 'critical'"),
        (["/absent/model", "--port", "0"], "/absent/model"),
    ],
)
def test_refused_options(options: list[str], message: str) -> None:
    assert message in run("serve", *options, code=2).stderr


def test_ports_and_templates_are_refused_before_the_model_is_read(tmp_path: Path, llm: LLM) -> None:
    """It has no weights."""
    given, model = tmp_path / "given.jinja", tmp_path / "model"
    shutil.copytree(llm.model_path, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (held,) = bind("127.0.0.1", 0)
    with held:
        assert "already in use" in run("serve", model, "--port", held.getsockname()[1], code=2).stderr
    given.write_text("{{ messages }}\n{% if %}")
    (model / "chat_template.jinja").write_text("{% endfor %}")
    for arguments, message in (([model, "--chat-template", given], "line 2"), ([model], f"of {model}, line 1")):
        assert f"{message}: " in run("serve", *arguments, "--port", "0", code=2).stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "is not YAML"),
        ("prot: 1", "unknown 'prot' (did you mean 'port'?)"),
        ("port: x", "'--port'"),
        ("api-key: 3\nserved-model-name: 4\nssl-certfile: /absent.pem", "/absent.pem"),
        ("port: 70000", "port=70000"),
        ("no_spec: true\nspeculative-config: {method: ngram}", "--no-spec is plain decoding"),
    ],
)
def test_refused_files_of_options(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text(text)
    assert message in run("serve", "--config", tmp_path / "serve.yaml", code=2).stderr


def test_help_shows_whole_names_of_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("serve", "--help").stdout
    assert all(f"--{option.name.replace('_', '-')}" in shown for option in fields(ServerOptions)), shown


def test_replicas_need_ray() -> None:
    options, message = (["--port", "0"], "other than 0") if find_spec("ray") else ([], "[serve,ray]")
    assert message in run("serve", "--replicas", "2", *options, code=2).stderr


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, -signal.SIGTERM)])
def test_the_command_serves_until_it_is_interrupted(number: int, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "treespec", "serve", "embedded", "--port", "0", "--served-model-name", "m"]
    options = {"method": "ngram", "num_speculative_tokens": 7}
    (tmp_path / "serve.yaml").write_text(json.dumps({"speculative-config": options, "max_model_len": 256, "port": 1}))
    command += ["--config", str(tmp_path / "serve.yaml")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as program:
        assert program.stderr is not None
        try:
            lines = iter(program.stderr.readline, "")
            url = next(line.split("running on ")[1].split()[0] for line in lines if "running on http" in line)
            arguments: dict[str, Any] = {"model": "m", "prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
            create = client_of(url).completions.create
            tree, plain = (create(**arguments, extra_body=extra) for extra in ({}, {"speculation": "off"}))
            assert tree.choices[0].text == plain.choices[0].text
            assert httpx2.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == 256
            stream = create(**arguments, stream=True)
            program.send_signal(number)
            assert "".join(chunk.choices[0].text for chunk in stream) == plain.choices[0].text
            assert program.wait(PATIENCE) == code and "Traceback" not in "".join(lines)
        finally:
            program.kill()
