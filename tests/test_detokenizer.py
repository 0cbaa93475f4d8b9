"""The text of a growing output: pieces add up to the whole, characters stay whole, stop strings are found at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.speech import speaking_llm
from treespec.detokenizer import Detokenizer

ALPHABET = "ab é😀日\n"


def decode(tokens: list[int]) -> str:
    return speaking_llm().get_tokenizer().decode(tokens)


def encode(text: str) -> list[int]:
    return list(speaking_llm().get_tokenizer().encode(text))


def grow(prompt: list[int], tokens: list[int], stop: tuple[str, ...] = (), include: bool = False) -> tuple[str, int]:
    """What a stream hands out, and how many tokens it took; asserts that it is the text in the end."""
    detokenizer, pieces, taken = Detokenizer(decode, prompt, stop, include), [], 0
    for token in tokens:
        taken += 1
        ended = detokenizer.push(token)
        if ended:
            break
        pieces.append(detokenizer.release(False))
    detokenizer.flush()
    pieces.append(detokenizer.release(True))
    assert "".join(pieces) == detokenizer.text
    return detokenizer.text, taken


def whole(prompt: list[int], tokens: list[int]) -> str:
    """The text as `generate` makes it, where nobody watches it grow."""
    detokenizer = Detokenizer(decode, prompt, (), False)
    detokenizer.push_all(tokens)
    return detokenizer.text


@given(st.text(ALPHABET, max_size=30), st.text(ALPHABET + "xyzé", max_size=40))
def test_any_text(prompt: str, text: str) -> None:
    assert grow(encode(prompt), encode(text))[0] == text == whole(encode(prompt), encode(text))


@settings(max_examples=300)
@given(st.lists(st.integers(1, 511), max_size=20), st.lists(st.integers(1, 511), max_size=40))
def test_any_tokens(prompt: list[int], tokens: list[int]) -> None:
    assert grow(prompt, tokens)[0] == whole(prompt, tokens)


BYTES = sorted({token for text in ("é", "😀", "日", "a") for token in encode(text)})


@settings(max_examples=500)
@given(st.lists(st.sampled_from(BYTES), max_size=24))
def test_broken_characters(tokens: list[int]) -> None:
    """Bytes of characters in any order: cut off, alone, complete behind broken ones."""
    assert grow([], tokens)[0] == decode(tokens) == whole([], tokens)


@given(
    st.text(ALPHABET, max_size=30),
    st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_stop_strings(text: str, stops: list[str], include: bool) -> None:
    """Against a search in the text of every prefix: the first token that completes a stop string ends it."""
    tokens = encode(text)
    grown, taken = grow([], tokens, tuple(stops), include)
    for count in range(1, len(tokens) + 1):
        text_so_far = decode(tokens[:count])
        found = [(text_so_far.find(stop), -len(stop), stop) for stop in stops if stop in text_so_far]
        if found:
            at, _, stop = min(found)
            assert (grown, taken) == (text_so_far[:at] + (stop if include else ""), count)
            return
    assert (grown, taken) == (text, len(tokens))


def test_the_beginning_of_a_stop_string_waits() -> None:
    detokenizer = Detokenizer(decode, [], ("abcab", "bcx"), False)
    released = []
    for token in encode("abca"):
        assert not detokenizer.push(token)
        released.append(detokenizer.release(False))
    assert "".join(released) == ""
    detokenizer.push(encode("c")[0])
    assert detokenizer.release(False) == "abcac"


@pytest.mark.parametrize("text", ["😀", "é", "日本"])
def test_a_character_is_handed_out_whole(text: str) -> None:
    detokenizer, pieces = Detokenizer(decode, encode("x"), (), False), []
    for token in encode(text):
        detokenizer.push(token)
        pieces.append(detokenizer.release(False))
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
