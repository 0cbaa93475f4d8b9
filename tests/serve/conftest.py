"""A server on the loopback interface, and the `openai` client of it."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.helpers.serving import client_of, serving
from treespec import AsyncLLM


@pytest.fixture(scope="module")
def url(engine: AsyncLLM) -> Iterator[str]:
    with serving(engine, max_body_bytes=100_000) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with client_of(url) as client:
        yield client
