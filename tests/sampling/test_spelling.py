"""How the texts of a form are spelled: in tokens of the target, none of them special."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from tests.helpers.forms import asked, grammars, speaking_tokenizer
from tests.helpers.models import VOCAB, new_folder, open_llm
from tests.helpers.sampled import TREE
from tests.helpers.sharing import assert_clean
from tests.helpers.speech import END, speaking_folder
from tests.helpers.tokenizers_made import resized
from treespec import SpecConfig, StructuredOutputsParams
from treespec.errors import RequestError
from treespec.sampling.grammar import Grammar, Grammars


def following(grammar: Grammar, text: list[int]) -> list[int]:
    return np.flatnonzero(~grammar.excluded(text).numpy()).tolist()


def written(grammar: Grammar, choose: Callable[[list[int]], int] = min) -> list[int]:
    """A text of the grammar's without its end token, which is 0."""
    text: list[int] = []
    while (tokens := following(grammar, text)) != [0]:
        text.append(choose([token for token in tokens if token]))
        assert len(text) < 200
    return text


TEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "end token": ({"choice": [f"a {END}b"]}, f"a {END}b"),
    "special token": ({"choice": ["a <|im|>b"]}, "a <|im|>b"),
    "tag": ({"choice": ["a <think>b"]}, "a <think>b"),
    "added text": ({"choice": ["a    b[tool]"]}, "a    b[tool]"),
    "regex": ({"regex": "<think>[a-c]</think>"}, "<think>a</think>"),
    "JSON": ({"json": {"const": {END: "<|im|>"}}, "disable_any_whitespace": True}, json.dumps({END: "<|im|>"})),
}


@pytest.mark.parametrize("name", TEXTS)
def test_no_text_is_spelled_with_special_tokens(name: str) -> None:
    """An end token would end the output there, and others are not shown."""
    own = Tokenizer.from_str(speaking_tokenizer().to_str())
    own.add_special_tokens([AddedToken("<|im|>", special=True)])
    own.add_tokens([AddedToken(text, special=False) for text in ("<think>", "[tool]", "    ")])
    form, text = TEXTS[name]
    readers = Grammars(own, own.get_vocab_size(), (0,), torch.device("cpu"))
    grammar = readers.grammar(StructuredOutputsParams(**form), 0)
    special = {own.token_to_id(token) for token in (END, "<|im|>", "<think>")}
    assert grammar.forced([]) and special.isdisjoint(grammar.forced([]))
    tokens = written(grammar)
    assert special.isdisjoint(tokens)
    assert own.decode(tokens, skip_special_tokens=True).replace('": "', '":"') == text.replace('": "', '":"')
    if name == "added text":
        assert {own.token_to_id("    "), own.token_to_id("[tool]")} <= set(tokens)


def test_a_grammar_may_name_special_tokens() -> None:
    grammar = grammars().grammar(StructuredOutputsParams(grammar=f'start: "a" {END}'), 0)
    assert following(grammar, speaking_tokenizer().encode("a").ids) == [0]


def test_texts_are_spelled_with_tokens_that_the_target_has() -> None:
    """Where its tokenizer has more of them."""
    llm, form = open_llm(resized(speaking_folder(), new_folder("fewer") / "target", 400)), "the arguments of the parser"
    assert max(speaking_tokenizer().encode(form).ids) >= 400
    for spec in ("off", TREE, SpecConfig()):
        (output,) = llm.generate([[5, 6]], asked({"choice": [form]}), spec)
        assert output.outputs[0].text == form and output.outputs[0].finish_reason == "stop"
    assert output.metrics.accepted_by_source["grammar"]
    assert_clean(llm)


def test_an_end_token_with_a_text_ends_outputs_alone() -> None:
    """It is no part of one: the output would end there. What takes its text cannot be written."""
    own = speaking_tokenizer()
    [line, a, b] = (own.encode(text).ids[0] for text in "\nab")
    readers = Grammars(own, VOCAB, (0, line), torch.device("cpu"))

    def after_a(regex: str) -> list[int]:
        return following(readers.grammar(StructuredOutputsParams(regex=regex), 0), [a])

    assert after_a("a\n?b") == [b] and after_a("a[\nb]*") == [0, b, line] and after_a("a") == [0, line]
    with pytest.raises(RequestError, match=r"no token of the model can continue the text"):
        after_a("a\nb")
    assert readers.grammar(StructuredOutputsParams(regex="ab\nc"), 0).forced([]) == own.encode("ab").ids
