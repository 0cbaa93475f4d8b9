"""Forms and lists that would keep the process busy for minutes are refused by their size, as their request's error."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher

from tests.helpers.forms import asked, no_form_read
from tests.helpers.models import greedy
from tests.helpers.sampled import TREE
from tests.helpers.scripts import run_script
from tests.helpers.sharing import assert_clean
from tests.helpers.speech import speaking_llm
from treespec import SamplingParams
from treespec.sampling.grammar import Grammars


def doubling(depth: int) -> str:
    """Terminals of which each names the one before it twice."""
    lines = [f"T{i + 1}: T{i} T{i}" for i in range(depth)]
    return "\n".join([f"start: T{depth}", 'T0: "a"?', *lines])


FORMS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "optional parts": (lambda: {"regex": "a?" * 8000}, "regex has 8000 optional or repeated parts"),
    "long choices": (
        lambda: {"choice": ["a" * i for i in range(1, 6000)]},
        "choice has 17997000 characters, but the limit is 1000000; shorten it",
    ),
    "a pattern": (
        lambda: {"json": {"type": "string", "pattern": "a?" * 8000}},
        "json, in its patterns, has 8000 optional",
    ),
    "a schema": (lambda: {"json": {"enum": [f"{i:020}" for i in range(60_000)]}}, "json has 1440010 characters"),
    "pattern properties": (
        lambda: {"json": {"patternProperties": {f"^{i}x": {} for i in range(1000)}}},
        "json has 1000 patternProperties, but the limit is 100",
    ),
    "a multiple": (
        lambda: {"json": {"type": "integer", "multipleOf": 99_999_989}},
        "multipleOf in json has 99999989 states, but the limit is 100000",
    ),
    "white space": (
        lambda: {"json_object": True, "whitespace_pattern": " ?" * 2000},
        "whitespace_pattern has 2000 optional",
    ),
    "terminals": (lambda: {"grammar": doubling(20)}, "terminal T10 of grammar, with the terminals it references, has"),
    "a rule": (lambda: {"grammar": "start: " + '"a"? ' * 12_000}, "rule start has 12000 optional"),
    "a word": (lambda: {"grammar": "a" * 99_999}, "grammar cannot be compiled"),
    "a grammar": (lambda: {"grammar": "start: " + '"a" ' * 60_000}, "grammar has 240007 characters"),
}


LISTS: dict[str, tuple[dict[str, Any], str]] = {
    "bad words": ({"bad_words": [f"w{i}" for i in range(100_000)]}, "bad_words: 100000 texts of 588890 characters"),
    "a bad word": ({"bad_words": ["x" * 10**6]}, "bad_words: 1 texts of 1000000 characters; valid: at most 5000 of"),
    "stop strings": ({"stop": [f"w{i}" for i in range(100_000)]}, "stop: 100000 texts"),
    "stop tokens": ({"stop_token_ids": [7] * 100_000}, "stop_token_ids: 100000 ids; the vocabulary has 512 tokens"),
}


@pytest.mark.parametrize("name", [*FORMS, *LISTS])
def test_what_is_hostile_ends_as_its_own_requests_error(name: str) -> None:
    llm = speaking_llm()
    if name in LISTS:
        options, message = LISTS[name]
        params = SamplingParams(**options)
    else:
        form, message = FORMS[name]
        params = asked(form())
    alone = llm.generate("def", greedy(4))[0].outputs
    bad, good = llm.generate(["x", "def"], [params, greedy(4)], TREE)
    assert message in str(bad.error) and len(str(bad.error)) < 400
    assert bad.outputs[0].finish_reason == "error" and good.outputs == alone
    assert_clean(llm)


def test_a_terminal_does_not_reference_the_words_of_literals_comments_and_directives() -> None:
    grammar = 'start: SAY-YES NO\nSAY-YES: "SAY" // SAY-YES\nNO: /NO/\nSPACE: / /\n%ignore SPACE'
    (output,) = speaking_llm().generate("x", asked({"grammar": grammar}, 16), TREE)
    assert output.error is None and "SAYNO".startswith((output.outputs[0].text or "").replace(" ", ""))


LARGE: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[str], bool]]] = {
    "many short choices": (lambda: {"choice": [f"item {i}" for i in range(60_000)]}, lambda t: t.startswith("item ")),
    "a list of words": (lambda: {"regex": "|".join(f"w{i}x" for i in range(3000))}, lambda text: text[0] == "w"),
    "properties": (
        lambda: {
            "json": {
                "type": "object",
                "properties": {f"p{i}": {"type": "integer"} for i in range(500)},
                "required": [f"p{i}" for i in range(500)],
            },
            "disable_any_whitespace": True,
        },
        lambda text: text.startswith('{"p0":'),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_large_forms_are_served(name: str) -> None:
    form, fits = LARGE[name]
    (output,) = speaking_llm().generate("x", asked(form(), 16), TREE)
    assert output.error is None and fits(output.outputs[0].text or "")


@pytest.mark.slow
def test_reading_that_takes_long_all_the_same_is_given_up() -> None:
    """The others of the batch finish."""
    llm, stop = speaking_llm(), threading.Event()

    class Slow(Grammars):
        seconds = 0.05

        def build(self, source: str, **limits: int) -> LLMatcher:
            stop.wait()
            return super().build(source, **limits)

    alone = llm.generate("def", greedy(4))[0].outputs
    with no_form_read(llm, Slow):
        try:
            bad, good = llm.generate(["x", "def"], [asked({"choice": ["a", "b"]}), greedy(4)])
        finally:
            stop.set()
    assert "choice takes more than 0.05 s to compile; simplify it" in str(bad.error)
    assert good.outputs == alone


@pytest.mark.slow
def test_a_reader_that_was_given_up_does_not_keep_the_process() -> None:
    script = """
import time
from treespec.sampling import grammar
from treespec.errors import RequestError
def spin():
    while True: pass
try:
    grammar.run_with_large_stack(spin, "regex", 0.01)
except RequestError as error:
    print(error)
"""
    assert "regex takes more than" in run_script(script, timeout=120)


def test_long_lists_that_are_legitimate() -> None:
    llm = speaking_llm()
    alone = llm.generate("def", greedy(4))[0].outputs
    everything = {"logit_bias": dict.fromkeys(range(512), 0.5), "allowed_token_ids": list(range(512)) * 100}
    words = {"bad_words": [f"zq{i}" for i in range(1000)], "stop": [f"zq{i}" for i in range(1000)]}
    (output,) = llm.generate("def", SamplingParams(max_tokens=4, **everything, **words), TREE)
    assert [each.token_ids for each in output.outputs] == [each.token_ids for each in alone]
