"""A live server on the loopback interface, in a thread of the test process."""

import functools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpcore2
from openai import OpenAI

from treespec import LLM, AsyncLLM, SamplingParams
from treespec.serve.app import create_app
from treespec.serve.http_server import HttpServer, bind
from treespec.serve.options import ServerOptions

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
NAME = "speaking"
PATIENCE = 60  # seconds
# Each client would read the machine's certificates, which takes 60 ms.
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)


def wait_until(condition: Callable[[], object], patience: float = PATIENCE) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end
        time.sleep(2e-3 if patience == PATIENCE else 0.5)


def assert_all_pages_are_back(llm: LLM) -> None:
    wait_until(lambda: llm.engine.scheduler.is_idle)
    with llm.between_rounds():
        llm.engine.check_integrity()  # an idle engine holds no pages


@contextmanager
def running(engine: AsyncLLM, grace: float = 1, **options: Any) -> Iterator[tuple[HttpServer, str]]:
    """Run a server on a free port until the block ends; the server and its address."""
    options = {
        "served_model_name": [NAME, "other"],
        "chat_template": TEMPLATE,
        "port": 0,
        "uvicorn_log_level": "error",
    } | options
    app = create_app(engine, chosen := ServerOptions(**options), SamplingParams(max_tokens=None))
    server, sockets = HttpServer(app, chosen, grace), None if chosen.uds else bind(chosen.host, chosen.port)
    host, port = sockets[0].getsockname() if sockets else ("unix", 0)
    thread = threading.Thread(target=server.run, args=(sockets,))
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started
        yield server, f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def serving(engine: AsyncLLM, **options: Any) -> Iterator[str]:
    """Serve on a free port while the block runs; its address."""
    with running(engine, **options) as (_, url):
        yield url


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def client_of(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
