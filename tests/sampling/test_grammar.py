"""Which tokens may follow a text: compared with a parser that reads every text from its beginning."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from tests.helpers.forms import FORMS, PROMPTS, asked, form_of, grammars, no_form_read, parsed, speaking_tokenizer
from tests.helpers.models import VOCAB
from tests.helpers.sampled import TREE
from tests.helpers.speech import speaking_llm
from treespec import SpecConfig, StructuredOutputsParams
from treespec.errors import RequestError
from treespec.sampling.grammar import Grammars


def excluded_from_scratch(name: str, text: Sequence[int]) -> np.ndarray:
    """bool [vocab], by a parser that reads the text from its beginning, a token at a time."""
    parser = parsed(name).deep_copy()
    for token in text:
        assert parser.consume_token(token)
    bits = np.frombuffer(parser.compute_bitmask(), dtype=np.uint8)
    return np.unpackbits(bits, bitorder="little")[:VOCAB] == 0


@pytest.mark.parametrize("name", FORMS)
def test_what_may_follow_depends_on_the_text_alone(name: str) -> None:
    """Asked in any order, below any path, with texts between that do not fit."""
    rng = random.Random(name)
    for _ in range(2):
        grammar, text = grammars().grammar(form_of(name), 2), [7, 9]
        while len(text) < 20:
            paths: list[list[int]] = [[]]
            for _ in range(6):
                path = list(rng.choice(paths))
                while len(path) < 5:
                    following = np.flatnonzero(~excluded_from_scratch(name, [*text[2:], *path])[1:]) + 1
                    if not len(following) or rng.random() < 0.2:
                        break
                    path.append(int(rng.choice(following)))
                paths.append(path)
            for path in rng.sample(paths, len(paths)):
                wanted = excluded_from_scratch(name, [*text[2:], *path])
                assert np.array_equal(grammar.excluded(text, path).numpy(), wanted)
                wrong = int(rng.choice(np.flatnonzero(wanted))) or 1
                fits = grammar.fitting(text, [*path, wrong, wrong])
                assert fits >= len(path)
                if fits == len(path):
                    with pytest.raises(RequestError, match=f"token {wrong} does not fit the text before it"):
                        grammar.excluded(text, [*path, wrong, wrong])
                with pytest.raises(RequestError, match="no text may follow an end token"):
                    grammar.excluded(text, [*path, 0])
                assert grammar.fitting(text, [*path, 0, 5]) in (len(path), len(path) + 1)
            forced = grammar.forced(text)
            for count, token in enumerate(forced):
                assert np.flatnonzero(~excluded_from_scratch(name, [*text[2:], *forced[:count]])).tolist() == [token]
            following = np.flatnonzero(~grammar.excluded(text).numpy()[1:]) + 1
            if not len(following):
                break
            text.append(int(rng.choice(following)))


def limited(**limits: int) -> type[Grammars]:
    """Grammars that are read within narrow limits of llguidance, and count how often."""

    class Limited(Grammars):
        count = 0

        def build(self, source: str, **_: int) -> LLMatcher:
            self.count += 1
            return super().build(source, **limits)

    return Limited


def test_a_limit_that_a_drafted_text_comes_to_costs_no_token() -> None:
    """Copies of a parser share their lexer, which has failed for all of them then."""
    llm, params = speaking_llm(), asked({"choice": ["orngé", "argumentm", "b\u2028", "oem"]})
    (plain,) = llm.generate([[5]], params, "off")
    for spec in ("off", TREE, SpecConfig()):
        with no_form_read(llm, limited(step_lexer_fuel=50)) as read:
            (output,) = llm.generate([[5]], params, spec)
        assert output.outputs == plain.outputs and output.outputs[0].finish_reason == "stop"
        assert (read.count > 1) == (spec != "off"), "the form is read anew"


@pytest.mark.parametrize("spec", ["off", TREE], ids=["off", "tree"])
def test_a_limit_that_one_request_comes_to_is_not_the_next_ones(spec: Any) -> None:
    llm, form = speaking_llm(), {"regex": "[ab]*a[ab]{14}c"}
    a, b = (speaking_tokenizer().token_to_id(letter) for letter in "ab")
    long, short = (asked(form, count, temperature=1.0, seed=1, allowed_token_ids=[a, b]) for count in (200, 3))
    with no_form_read(llm, limited(max_lexer_states=60)):
        for _ in range(2):
            failed, beside = llm.generate(PROMPTS[:2], [long, short], spec)
            assert "lexer error: too many states" in str(failed.error) and len(failed.outputs[0].token_ids) > 3
            assert beside.error is None and len(beside.outputs[0].token_ids) == 3


def test_padded_and_larger_vocabularies() -> None:
    """Logits of more or of fewer columns than the tokenizer has tokens."""
    own = speaking_tokenizer()
    form = StructuredOutputsParams(regex="[a-z]+")
    wanted = grammars().grammar(form, 0).excluded([]).numpy()
    assert not wanted.all()
    for size in (300, VOCAB - 1, VOCAB + 1, VOCAB + 70):
        found = Grammars(own, size, (0, 900), torch.device("cpu")).grammar(form, 0).excluded([]).numpy()
        shared = min(size, VOCAB)
        assert len(found) == size and (found[:shared] == wanted[:shared]).all() and found[shared:].all()
    with pytest.raises(RequestError, match=r"no token of the model can continue the text$"):
        Grammars(own, 1, (0, 900), torch.device("cpu")).grammar(form, 0).excluded([])
