"""StructuredOutputsParams: forms as values, and invalid ones."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.helpers.child import run_uninterpreted
from tests.helpers.forms import asked, no_form_read
from tests.helpers.models import edit_config, new_folder, open_llm, tiny, tiny_llm
from tests.helpers.speech import speaking_folder, speaking_llm
from treespec import SamplingParams, StructuredOutputsParams
from treespec.errors import ConfigError, RequestError
from treespec.sampling_params.structured_params import closed_schema

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": "a["}, "regex cannot be compiled: at 1(8): invalid regex"),
    "lark": ({"grammar": "start: nothing"}, "grammar cannot be compiled"),
    "no grammar": ({"grammar": "hello"}, "grammar cannot be compiled"),
    "type": ({"json": {"type": "strnig"}}, "json cannot be compiled: Invalid type: strnig"),
    "unsatisfiable": ({"json": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "Unsatisfiable schema"),
    "unsupported": ({"json": {"not": {"type": "string"}}}, 'Unimplemented keys: ["not"]'),
    "deep": ({"json": '{"items":' * 600 + "{}" + "}" * 600}, "json cannot be compiled: recursion limit exceeded"),
    "nothing": ({"regex": "[^\\s\\S]"}, "structured_outputs: no token of the model can continue the text"),
    "surrogate": ({"choice": ["a", "\ud800"]}, "lone surrogate"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_form_that_cannot_be_read(name: str) -> None:
    llm = speaking_llm()
    form, message = BAD[name]
    outputs = llm.generate(["x", "x"], [asked(form), SamplingParams(max_tokens=3)])
    assert "structured_outputs" in str(outputs[0].error) or name == "surrogate"
    assert message in str(outputs[0].error) and not re.search("\n|verbose", str(outputs[0].error))
    assert outputs[1].error is None and len(outputs[1].outputs[0].token_ids) == 3


def test_a_long_chain_of_references() -> None:
    """It would overflow the stack of a usual thread, and the process would end."""
    script = """
from tests.helpers.forms import grammars
from treespec import StructuredOutputsParams
links = {str(i): {"anyOf": [{"items": {"$ref": f"#/$defs/{i + 1}"}}, {"type": "null"}]} for i in range(3000)}
schema = {"$ref": "#/$defs/0", "$defs": {**links, "3000": {"type": "null"}}}
grammars().grammar(StructuredOutputsParams(json=schema), 0).excluded([])
"""
    assert run_uninterpreted(script).returncode == 0


WRONG: dict[str, tuple[Any, str]] = {
    "none": ({}, "structured_outputs has no constraint; give one of json, regex, choice, grammar, json_object"),
    "two": ({"json": {}, "regex": "a"}, "structured_outputs has json and regex; give one of"),
    "typo": ({"jsno": {}}, "jsno"),
    "text": ("json", "structured_outputs='json'; valid: StructuredOutputsParams, or a dict"),
    "schema": ({"json": "{"}, "json='{' is not JSON"),
    "a list": ({"json": [1]}, "json=[1]; valid: a JSON schema"),
    "deep": ({"json": "[" * 200_000}, "is not JSON (maximum recursion depth exceeded"),
    "NaN": ({"json": {"const": float("nan")}}, "json: the schema cannot be written as JSON"),
    "no choice": ({"choice": []}, "choice=[]; valid: a list of at least one string"),
    "regex": ({"regex": re.compile("a")}, "regex=re.compile('a'); valid: a string"),
    "flag": ({"json_object": 1}, "json_object=1; valid: True, False"),
    "stray": ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace=True is for json"),
    "both": ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "contradict each other"),
}


@pytest.mark.parametrize("name", WRONG)
def test_parameters_that_are_no_form(name: str) -> None:
    given, message = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        SamplingParams(structured_outputs=given)
    assert message in str(caught.value)


def test_an_end_token_is_needed() -> None:
    with pytest.raises(ConfigError, match="ignore_eos=True: structured outputs stop at an end token"):
        asked({"regex": "a"}, ignore_eos=True)
    folder = edit_config(Path(shutil.copytree(speaking_folder(), new_folder("endless") / "target")), eos_token_id=None)
    (folder / "generation_config.json").unlink()
    endless = open_llm(folder, tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")))  # which names none
    with pytest.raises(RequestError, match="end with an end token, but the model has none"):
        endless.generate("x", asked({"regex": "a"}))


def test_a_tokenizer_is_needed_whose_tokens_can_be_read() -> None:
    with pytest.raises(RequestError, match=r"a fast tokenizer \(with a tokenizer.json\); the model's is none"):
        tiny_llm().generate([1, 2], asked({"regex": "a"}))
    own: Any = SimpleNamespace(eos_token_id=0, encode=lambda text: [1 + len(text)], decode=lambda ids: "a" * len(ids))
    llm = open_llm(tiny()[0], tokenizer=own)
    with pytest.raises(RequestError, match="the model's is SimpleNamespace"):
        llm.generate("x", asked({"regex": "a"}))
    assert llm.generate("x", SamplingParams(max_tokens=1))[0].error is None


def test_without_llguidance_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = speaking_llm()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with no_form_read(llm):
        outputs = llm.generate(["x", "x"], [asked({"regex": "a"}), SamplingParams(max_tokens=2)])
    assert str(outputs[0].error).endswith("pip install llguidance") and outputs[1].error is None


def test_forms_are_values() -> None:
    """Equal ones are equal, may be keys, and are copied from what the caller may change later."""
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    one, other = StructuredOutputsParams(json=schema), StructuredOutputsParams(json=json.dumps(schema))
    assert one == other and hash(one) == hash(other) and one.form == "json"
    assert one.json is not None and one.json.index('"b"') < one.json.index('"a"')  # outputs have them in this order
    schema["type"] = "array"
    assert one == other
    params = SamplingParams(structured_outputs={"choice": ("a", "b")})
    assert params.structured_outputs == StructuredOutputsParams(choice=["a", "b"])
    assert params == SamplingParams(structured_outputs=params.structured_outputs) and hash(params)
    assert SamplingParams(structured_outputs=None) == SamplingParams()


def test_objects_without_further_properties() -> None:
    def schema(**closed: bool) -> dict[str, Any]:
        """One whose objects without a word on further properties have `closed`; values and open objects are kept."""
        values = {"properties": {"a": {"enum": [{"properties": {}}]}}}
        return {
            "properties": {"items": values | closed, "b": {"type": "object"}},
            "anyOf": [{"patternProperties": {"x": {}}, **closed}, {"properties": {}, "additionalProperties": {"a": 1}}],
            "$defs": {"c": {"items": {"properties": {}, **closed}}},
            "const": {"properties": {}},
            **closed,
        }

    given = schema()
    assert closed_schema(given) == schema(additionalProperties=False) and given == schema()
    assert closed_schema(True) is True
