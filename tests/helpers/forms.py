"""Forms of structured outputs, what tells whether an output has them, and engines that are asked for them."""

import functools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer

from tests.helpers.models import VOCAB
from tests.helpers.quantized_checkpoints import needs_compiler
from tests.helpers.sampled import NAIVE, TREE
from tests.helpers.speech import making_requests, speaking_folder, speaking_llm
from treespec import LLM, RequestOutput, SamplingParams, SpecConfig, StructuredOutputsParams
from treespec.sampling.grammar import Grammars

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
        "kind": {"enum": ["small", "smaller", "great"]},
        "place": {"type": "object", "properties": {"code": {"type": "string", "pattern": "^[0-9]{3}$"}}},
    },
    "required": ["name", "sizes", "kind"],
}
CLOSED: dict[str, Any] = {"json": SCHEMA, "disable_any_whitespace": True, "disable_additional_properties": True}
CHOICES = ["argument", "arguments", 'a "quoted"\\one', "ein Übermaß", "😀"]


def is_closed_json(text: str) -> bool:
    value = json.loads(text)
    assert list(value)[:3] == ["name", "sizes", "kind"] and set(value) <= set(SCHEMA["properties"])
    assert isinstance(value["name"], str) and len(value["name"]) <= 6
    assert len(value["sizes"]) <= 2 and all(type(size) is int and 0 <= size <= 99 for size in value["sizes"])
    assert value["kind"] in SCHEMA["properties"]["kind"]["enum"]
    assert set(value.get("place", {})) <= {"code"} and re.fullmatch(
        "([0-9]{3})?", value.get("place", {}).get("code", "")
    )
    return text == json.dumps(value, ensure_ascii=False, separators=(",", ":")) or "\\u" in text or "\\/" in text


FORMS: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "schema": (CLOSED, is_closed_json),
    "spaces": (
        {
            "json": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 9},
            "whitespace_pattern": " ?",
        },
        lambda text: re.fullmatch(r"\[[a-z, ]+\]", text) and 2 <= len(json.loads(text)) <= 9,
    ),
    "any object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "regex": (
        {"regex": r"(parser|args)(\.add_argument\([a-z]{2,5}\)){1,3}"},
        lambda text: re.fullmatch(r"(parser|args)(\.add_argument\([a-z]{2,5}\)){1,3}", text),
    ),
    "choice": ({"choice": CHOICES}, CHOICES.__contains__),
    "lark": (
        {"grammar": '?start: sum\nsum: term ("+" term)?\nterm: /[0-9]{1,3}/ | "(" sum ")"'},
        lambda text: re.fullmatch(r"[0-9+()]+", text) and text.count("(") == text.count(")"),
    ),
    "gbnf": (
        {"grammar": 'root ::= "yes" | "no" ", " ("never" | "not now")'},
        ("yes", "no, never", "no, not now").__contains__,
    ),
}
ENGINES: dict[str, Callable[[], LLM]] = {
    "default": lambda: speaking_llm(),
    "eager": lambda: speaking_llm(compile=False),
    "int8": lambda: speaking_llm(quantization="int8"),
}
every_engine = pytest.mark.parametrize(
    "opened",
    [ENGINES["default"], ENGINES["eager"], pytest.param(ENGINES["int8"], marks=needs_compiler)],
    ids=list(ENGINES),
)
PROMPTS = ["import argparse\n", "the parser of the arguments is", "("]
SPECS: dict[str, Any] = {
    "tree": TREE,
    "auto": SpecConfig(),
    "naive": NAIVE,
    "static": SpecConfig(branching=(3, 2, 1)),
    "grammar": SpecConfig(sources=("grammar",)),
}


def asked(form: Any, max_tokens: int = 60, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, structured_outputs=form, **options)


def check_form(name: str, output: RequestOutput) -> None:
    """Of outputs that ended with an end token."""
    for completion in output.outputs:
        assert completion.text is not None
        if completion.finish_reason == "stop":
            assert completion.token_ids[-1] == 0
            assert FORMS[name][1](completion.text), completion.text
        else:
            assert completion.finish_reason == "length"


@functools.cache
def speaking_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(speaking_folder() / "tokenizer.json"))


@functools.cache
def grammars() -> Grammars:
    return Grammars(speaking_tokenizer(), VOCAB, (0,), torch.device("cpu"))


def form_of(name: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(**FORMS[name][0])


@functools.cache
def parsed(name: str) -> LLMatcher:
    """A parser as llguidance has it, to be copied."""
    return grammars().parse(form_of(name))


@contextmanager
def no_form_read(llm: LLM, kind: type[Grammars] = Grammars) -> Iterator[Grammars]:
    """While it lasts, the engine reads every form anew, as this class does."""
    own = llm.request_factory
    assert own.tokenizer is not None
    fresh = kind(own.tokenizer.base, own.vocab_size, own.eos_token_ids, own.device)
    with making_requests(llm, grammars=fresh):
        yield fresh
