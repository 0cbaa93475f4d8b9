"""`treespec serve --replicas`: one of two engines dies under load."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.helpers.commands import ROOT
from tests.helpers.serving import client_of, wait_until
from treespec import LLM, SamplingParams

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

PATIENCE = 300.0  # seconds, for engines that start
MARK = f"TREESPEC_TEST={uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "treespec", "serve", "embedded", "--replicas", "2", "--port", str(port)]
    name, value = MARK.split("=")
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {name: value}, start_new_session=True) as program:
        try:
            wait_until(lambda: len(pids_of_replicas()) == 2 and is_served(f"http://127.0.0.1:{port}"), PATIENCE)
            yield f"http://127.0.0.1:{port}"
            program.terminate()
            program.wait(PATIENCE)
        finally:
            program.kill()


def is_served(url: str) -> bool:
    try:
        return bool(client_of(url).models.list().data)
    except openai.OpenAIError:
        return False


def pids_of_replicas() -> list[int]:
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, environment = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:
            continue
        if name.startswith(b"ray::ServeReplica") and MARK.encode() in environment:
            pids.append(int(folder.name))
    return pids


def test_a_replica_that_dies(url: str) -> None:
    """Answers are right or errors, and the other replica and the new one serve on."""
    arguments: dict[str, Any] = {"model": "embedded", "prompt": "def add(a, b):", "max_tokens": 200, "temperature": 0}
    llm = LLM("embedded", device="cpu")
    expected = llm.generate(arguments["prompt"], SamplingParams(max_tokens=200), "off")[0].outputs[0]
    wrong, errors, right, stops = list[Any](), list[str](), list[float](), threading.Event()

    def load(streams: bool) -> None:
        with client_of(url) as client:
            while not stops.is_set():
                try:
                    answer: Any = client.completions.create(**arguments, stream=streams)
                    choices = [choice for chunk in (answer if streams else [answer]) for choice in chunk.choices]
                except (openai.APIError, httpx2.HTTPError) as error:  # the latter in the middle of a stream
                    errors.append(f"{type(error).__name__}: {error}")
                    continue
                text, reasons = "".join(choice.text for choice in choices), [each.finish_reason for each in choices]
                if (text, reasons[-1:]) == (expected.text, [expected.finish_reason]):
                    right.append(time.monotonic())
                else:
                    wrong.append((streams, text, reasons[-1:]))

    threads = [threading.Thread(target=load, args=(place % 2 == 0,)) for place in range(6)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(right) >= 12 or wrong, PATIENCE)
        first, _ = pids = pids_of_replicas()
        os.kill(first, signal.SIGKILL)
        killed, before = time.monotonic(), len(right)
        wait_until(lambda: len(right) >= before + 12 or wrong, PATIENCE)
        wait_until(lambda: len(new := pids_of_replicas()) == 2 and new != pids, PATIENCE)
        restarted = len(right)
        wait_until(lambda: len(right) >= restarted + 12 or wrong, PATIENCE)
    finally:
        stops.set()
        for thread in threads:
            thread.join()
    print(f"{len(right)} right, {len(errors)} errors in {time.monotonic() - killed:.0f} s:", *errors)
    assert not wrong and all(errors)
