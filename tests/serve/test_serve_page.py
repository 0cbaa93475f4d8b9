"""The page of `treespec serve` in a headless browser; skips by itself without playwright for Python and Chromium."""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import pytest

from tests.helpers.serving import serving
from treespec import AsyncLLM
from treespec.drawing import svg
from treespec.planning.draft_plan import PlainReason

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


def play(page: Any, rounds: list[dict[str, Any]], plain_seconds: float = 1.0) -> None:
    """Show these rounds as the server's answer, beside plain decoding that takes `plain_seconds` for one token."""

    def answer(route: Any) -> None:
        is_plain = route.request.post_data_json["speculation"] == "off"
        shown = [scripted_round([])] if is_plain else rounds
        shown = [each | {"seconds": plain_seconds} for each in shown] if is_plain else shown
        choice = {"delta": {"content": "x"}, "token_ids": [1]}
        route.fulfill(body=f"data: {json.dumps({'choices': [choice], 'rounds': shown})}\n\ndata: [DONE]\n\n")

    page.route("**/v1/chat/completions", answer)
    page.fill("#prompt", "x")
    page.select_option("#pace", "0")
    page.check("#compare")
    page.press("#prompt", "Enter")
    playwright.expect(page.locator("#plain-note")).to_contain_text("tokens equal")


def scripted_round(parents: list[int], sources: Sequence[str] = ("ssm-1",), reasons: Sequence[str] = ()) -> Any:
    """A round over these parents of the drafted nodes; only the target's token is added."""
    count = 1 + len(parents)
    names = {"sources": [[], *[list(sources)] * len(parents)], "texts": [f"token{i}" for i in range(count)]}
    tree = {"parents": [-1, *parents], "probs": [1.0] * count, "path": [0], "bonus": 1, "bonus_text": "x"}
    return names | tree | {"seconds": 1.0, "plain_reasons": list(reasons)}


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


@pytest.mark.parametrize(("plain_seconds", "gain"), [(0.38, "0.38"), (1.0, "1.00"), (2.5, "2.50")])
def test_only_what_is_faster_is_green(page: Any, plain_seconds: float, gain: str) -> None:
    page.wait_for_selector("#nodes option", state="attached")
    assert page.input_value("#nodes") == "16", "so that the first tree has branches"
    play(page, [scripted_round([0, 0])], plain_seconds)
    assert page.inner_text("#gain") == gain
    green = page.eval_on_selector("#earned .target .bar i", "bar => getComputedStyle(bar).backgroundColor")
    assert (page.eval_on_selector("#gain", "gain => getComputedStyle(gain).color") == green) == (float(gain) > 1)
    assert page.is_visible("#slower") == page.is_visible("#advice") == (float(gain) < 1)


@pytest.mark.parametrize("width", [390, 1200])
def test_a_wide_tree_scrolls_and_says_so(page: Any, width: int) -> None:
    expect = playwright.expect
    page.set_viewport_size({"width": width, "height": 900})
    play(page, [scripted_round([]), scripted_round([*range(20), *[0] * 20])])
    sides = {side: page.locator(f"[data-side={side}]") for side in ("left", "right", "up", "down")}
    expect(sides["right"]).to_be_visible()
    expect(sides["left"]).to_be_hidden()
    sides["right"].click()
    expect(sides["left"]).to_be_visible()
    page.eval_on_selector("#pane", "pane => pane.scrollTo(1e6, 0)")
    expect(sides["right"]).to_be_hidden()
    expect(sides["down"]).to_be_visible()
    page.click("#back")
    for side in sides.values():
        expect(side).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_edges_and_nodes_have_the_colours_of_their_sources(page: Any, scheme: str) -> None:
    """Those of `treespec tree`."""
    page.emulate_media(color_scheme=scheme)
    play(page, [scripted_round([0, 1, 1], ["lookup", "ssm-2"])])
    wanted = {1: svg.LIGHT[1], 2: svg.LIGHT[2]} if scheme == "light" else {1: svg.DARK[1], 2: svg.DARK[2]}
    for index, colour in wanted.items():
        rgb = f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"
        edges = page.eval_on_selector_all(f".edge.s{index}", "edges => edges.map(e => getComputedStyle(e).stroke)")
        assert edges == [rgb] * 3
        assert rgb in page.eval_on_selector_all("#tree stop", "stops => stops.map(s => getComputedStyle(s).stopColor)")
    strokes = page.eval_on_selector_all(".node.off rect", "boxes => boxes.map(b => b.getAttribute('stroke'))")
    assert strokes == ["url(#by-1-2)"] * 3 and page.locator("#by-1-2").count() == 1


def test_a_round_without_drafts_says_why(page: Any) -> None:
    rounds = [["drafting_paused", "nothing_proposed"], get_args(PlainReason)]
    play(page, [scripted_round([0]), *(scripted_round([], reasons=reasons) for reasons in rounds)])
    assert "undefined" not in page.inner_text("#why"), "a sentence for every reason"
    page.click("#back")
    assert page.inner_text("#caption") == "Round 2: nothing drafted"
    why = page.inner_text("#why")
    assert why.startswith("Drafting is paused") and why.endswith("No source that was asked proposed a token.")
    page.click("#back")
    assert page.is_hidden("#why")


def test_the_page_has_an_icon(page: Any) -> None:
    icon = page.get_attribute("link[rel=icon]", "href")
    load = (
        "src => new Promise(done => { const i = new Image(); i.onload = i.onerror = () => done(i.width); i.src = src })"
    )
    assert page.evaluate(load, icon) > 0
