"""The text of a growing output: pieces add up to the whole, characters stay whole, stop strings are found at once."""

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.helpers.models import open_llm, tiny
from tests.helpers.speech import speaking_folder
from treespec import SamplingParams
from treespec.text.detokenizer import Detokenizer
from treespec.text.prompt_tokenizer import load_tokenizer

ALPHABET = "ab é😀日\n"
TOKENIZER = load_tokenizer(None, speaking_folder())


def decode(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens)


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text))


def grow(detokenizer: Detokenizer, tokens: list[int]) -> tuple[str, int]:
    """What a stream hands out, in whole characters, and how many tokens it took; it is the text in the end."""
    pieces, taken = [], 0
    for token in tokens:
        taken += 1
        if detokenizer.push(token):
            break
        pieces.append(detokenizer.release(False))
    detokenizer.flush()
    pieces.append(detokenizer.release(True))
    assert "".join(pieces) == detokenizer.text
    assert "\ufffd" in detokenizer.text or not any("\ufffd" in piece for piece in pieces)
    return detokenizer.text, taken


def text_of(decode: Callable[[list[int]], str], prompt: list[int], tokens: list[int]) -> str:
    return grow(Detokenizer(decode, prompt, (), False), tokens)[0]


@given(st.text(ALPHABET, max_size=30), st.text(ALPHABET + "xyzé", max_size=40))
def test_any_text(prompt: str, text: str) -> None:
    assert text_of(decode, encode(prompt), encode(text)) == text


@functools.cache
def like_llama_2() -> Tokenizer:
    """SentencePiece's decoder: a space begins every word but the first of a text, unknown characters are bytes, and
    broken ones spoil the whole run of bytes that they stand in."""
    words = "▁Hello ▁world lo ▁ ▁a . ▁the ▁▁ ing é 日 ▁日".split()
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {name: token for token, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return tokenizer


def assert_text_of_all_tokens(decode: Callable[[list[int]], str], prompt: list[int], tokens: list[int]) -> None:
    """Where no token changes what those before it wrote, the text is what decoding all of them adds to the prompt's."""
    text = text_of(decode, prompt, tokens)
    steps = [decode(prompt + tokens[:count]) for count in range(len(tokens) + 1)]
    whole = [step.rstrip("\ufffd") for step in steps]
    if all(after.startswith(before) for before, after in itertools.pairwise(whole)):
        new = zip(itertools.pairwise(steps), tokens, strict=True)
        shows = any(before != after or decode([token]) for (before, after), token in new)
        assert text == (steps[-1][len(whole[0]) :] if shows else "")


# Special tokens, bytes of characters in any order, characters of bytes, words: each once, or often in a row.
PIECES = st.one_of(
    st.integers(0, 2).map(lambda token: [token]),
    st.sampled_from([[3 + byte] for byte in "aé日".encode()]),
    st.sampled_from([[3 + byte for byte in text.encode()] for text in "a é 日 😀 日本".split()]),
    st.integers(259, 270).map(lambda token: [token]),
)
RUNS = st.lists(st.tuples(PIECES, st.sampled_from([1, 1, 1, 2, 7, 13])), max_size=9).map(
    lambda runs: [token for piece, count in runs for token in piece * count]
)


@settings(max_examples=150, deadline=None)
@given(RUNS, RUNS, st.booleans())
def test_any_tokens_of_a_sentencepiece_decoder(prompt: list[int], tokens: list[int], skip: bool) -> None:
    decode = functools.partial(like_llama_2().decode, skip_special_tokens=skip)
    if decode(prompt).endswith("\ufffd"):  # how many of its bytes are broken depends on where their run begins
        prompt = [*prompt, 259]
    assert_text_of_all_tokens(decode, prompt, tokens)


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_special_tokens_in_a_row_keep_the_next_space(stop: tuple[str, ...]) -> None:
    tokenizer = like_llama_2()
    hello, world = (tokenizer.token_to_id(word) for word in ("▁Hello", "▁world"))
    for prompt, tokens in (([hello], [2] * 20 + [world]), ([hello, *[1] * 20], [world])):
        detokenizer = Detokenizer(tokenizer.decode, prompt, stop, False)
        for token in tokens:
            detokenizer.push(token)
        assert detokenizer.text == " world"


@pytest.mark.parametrize("tokens", [[], [0]], ids=["nothing", "a token that is not shown"])
def test_an_output_without_text_behind_half_a_character(tokens: list[int]) -> None:
    """The broken half is the prompt's."""
    decode = functools.partial(TOKENIZER.decode, skip_special_tokens=True)
    assert text_of(decode, encode("😀")[:1], tokens) == ""


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        (b"", "日".encode() + "😀".encode()[:2], "日\ufffd\ufffd"),
        ("日".encode(), "😀".encode()[:2], "\ufffd\ufffd"),
        ("日".encode() * 9, "日日".encode() + b"\xe6", "日日\ufffd"),
        (b"\xc3\xa9\xe6\x97", b"\xa5", "日"),
        ("日本".encode(), "é日".encode() * 9, "é日" * 9),
    ],
)
def test_half_a_character_behind_whole_ones(prompt: bytes, output: bytes, text: str) -> None:
    """Decoded at once, the whole run of bytes is broken; windows are cut between characters."""
    before, tokens = [3 + byte for byte in prompt], [3 + byte for byte in output]
    assert text_of(like_llama_2().decode, before, tokens) == text
    assert text_of(like_llama_2().decode, before, [*tokens, 259]) == text + " Hello"


def test_spaces_before_punctuation_are_not_cleaned_up() -> None:
    pieces = ["<unk>", "<s>", "▁Hello", "▁", "▁▁▁▁", ".", ",", "!", "▁a", "▁n", "'", "t"]
    backend = Tokenizer(models.Unigram([(piece, 0.0) for piece in pieces], unk_id=0))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    said = [pieces.index(piece) for piece in "▁Hello ▁ , ▁ ! ▁a ▁n ' t ▁▁▁▁ .".split()]
    llm = open_llm(tiny()[0], tokenizer=tokenizer)

    def say(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf).index_fill(-1, torch.tensor(said[ids.shape[1] - 1]), 0.0)

    params = SamplingParams(max_tokens=len(said), logits_processors=[say])
    (output,) = llm.generate([[2]], params)
    assert output.outputs[0].token_ids == said
    assert output.outputs[0].text == " Hello , ! a n't    ."
    assert "".join(chunk.text or "" for chunk in llm.stream([2], params)) == output.outputs[0].text


BYTES = sorted({token for text in ("é", "😀", "日", "a") for token in encode(text)})


@settings(max_examples=150)
@given(st.lists(st.sampled_from(BYTES), max_size=24))
def test_broken_characters(tokens: list[int]) -> None:
    """Bytes of characters in any order: cut off, alone, complete behind broken ones."""
    assert text_of(decode, [], tokens) == decode(tokens)


@given(
    st.text(ALPHABET, max_size=30),
    st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_stop_strings(text: str, stops: list[str], include: bool) -> None:
    """Against a search in the text of every prefix: the first token that completes a stop string ends it."""
    tokens = encode(text)
    grown, taken = grow(Detokenizer(decode, [], tuple(stops), include), tokens)
    for count in range(1, len(tokens) + 1):
        text_so_far = decode(tokens[:count])
        found = [(text_so_far.find(stop), -len(stop), stop) for stop in stops if stop in text_so_far]
        if found:
            at, _, stop = min(found)
            assert (grown, taken) == (text_so_far[:at] + (stop if include else ""), count)
            return
    assert (grown, taken) == (text, len(tokens))


def test_the_beginning_of_a_stop_string_waits() -> None:
    detokenizer, released = Detokenizer(decode, [], ("abcab", "bcx"), False), []
    for token in encode("abcac"):
        assert not detokenizer.push(token)
        released.append(detokenizer.release(False))
    assert released == ["", "", "", "", "abcac"]
