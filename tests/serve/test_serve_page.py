"""The page of `treespec serve` in a headless browser; skips by itself without playwright for Python and Chromium."""

import os
import re
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.serving import serving
from treespec import AsyncLLM

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright for Python")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, on PATH or in $CHROMIUM")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, engine: AsyncLLM) -> Iterator[Any]:
    """The page at a phone's width; errors in its scripts and requests to other hosts fail the test."""
    context = browser.new_context(viewport={"width": 390, "height": 800}, reduced_motion="reduce")
    page, problems = context.new_page(), list[str]()
    page.set_default_timeout(20_000)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: problems.append(request.url) if "//127.0.0.1:" not in request.url else None)
    with serving(engine) as url:
        page.goto(url)
        yield page
    context.close()
    assert not [text for text in problems if not text.startswith(("Failed to load resource", "data:"))]


def fill(page: Any, prompt: str, tokens: int, temperature: float = 0) -> None:
    page.fill("#max-tokens", str(tokens))
    page.fill("#temperature", str(temperature))
    page.select_option("#nodes", "8")
    page.select_option("#pace", "0")
    page.fill("#prompt", prompt)


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_a_prompt_beside_plain_decoding(page: Any, temperature: float) -> None:
    expect = playwright.expect
    expect(page.locator("#model")).to_have_text("speaking")
    fill(page, "def add(", 30, temperature)
    page.check("#compare")
    page.press("#prompt", "Enter")
    expect(page.locator("#plain-note")).to_have_text(re.compile(r"^(\d+) of \1 tokens equal ✓, \d+ per second$"))
    expect(page.locator("#go")).to_have_text("Generate")
    assert page.inner_text("#text") == page.inner_text("#plain") != ""
    assert float(page.inner_text("#length")) > 1 and float(page.inner_text("#gain")) > 0
    assert float(page.inner_text("#rate")) > 0
    counts = [int(count) for count in page.locator("#earned b").all_inner_texts()]
    assert page.locator("#earned .name").all_inner_texts() == ["ssm-1", "ssm-2", "lookup", "the target"]
    assert max(counts[:3]) + counts[3] >= 30 / 2
    width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1], "the page scrolls sideways"


def test_the_rounds_by_keyboard(page: Any) -> None:
    expect = playwright.expect
    fill(page, "def add(", 30)
    page.press("#prompt", "Enter")
    expect(page.locator("#play")).to_have_text("Play")
    last = int(page.input_value("#at"))
    assert last > 2 and page.get_attribute("#at", "max") == str(last)
    page.focus("#pane")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#caption")).to_contain_text(f"Round {last - 1}: ")
    page.focus("#at")
    page.keyboard.press("Home")
    expect(page.locator("#caption")).to_contain_text("Round 1: ")
    nodes = page.locator("#tree .node")
    assert nodes.count() > 2 and page.locator("#tree .root").count() == 1
    bare = page.locator("#tree g:is(.on, .off):not(:has(.mark))")
    assert page.locator("#tree .off.node").count() and not bare.count(), "every drafted node shows its sources"
    page.focus("#play")
    page.keyboard.press("Enter")
    expect(page.locator("#caption")).to_contain_text(f"Round {last}: ")
    page.locator("#text span").first.click()
    expect(page.locator("#caption")).to_contain_text("Round 1: ")


def test_errors_and_keys(page: Any, engine: AsyncLLM) -> None:
    expect = playwright.expect
    fill(page, "x" * 5000, 4)
    page.press("#prompt", "Enter")
    expect(page.locator("#error")).to_contain_text("leaves room for at most 255")
    expect(page.locator("#go")).to_have_text("Generate")
    with serving(engine, api_key="secret") as url:
        page.goto(url)
        expect(page.locator("#error")).to_contain_text("API key")
        page.fill("#key", "secret")
        page.keyboard.press("Tab")
        expect(page.locator("#model")).to_have_text("speaking")


def test_a_run_can_be_stopped(page: Any, engine: AsyncLLM) -> None:
    fill(page, "def add(", 200)
    with engine.llm.add_round_observer(lambda record: time.sleep(0.05)):
        page.click("#go")
        playwright.expect(page.locator("#go")).to_have_text("Stop")
        playwright.expect(page.locator("#tree .node").first).to_be_attached()
        page.click("#go")
        playwright.expect(page.locator("#go")).to_have_text("Generate")
    assert page.locator("#error").is_hidden()
