"""The number of tokens that a text has at least, and the threads that tokenize."""

import asyncio
import functools
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models
from tokenizers.normalizers import NFC, Prepend, Replace, Sequence, Strip
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.helpers.serving import PATIENCE
from tests.helpers.speech import END, making_requests, speaking_folder
from treespec import LLM, AsyncLLM, RequestOutput, SamplingParams
from treespec.errors import RequestError
from treespec.text.prompt_tokenizer import UserTokenizer


def speaking(**parts: Any) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(speaking_folder() / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<|a|>", lstrip=True, rstrip=True)])
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def pieces(byte_fallback: bool) -> Tokenizer:
    """As Llama 2's: merges over a whole text, and bytes for characters without a token."""
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "aa", "aab"]
    vocabulary = {word: id for id, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "a"), ("aa", "b")], byte_fallback=byte_fallback))
    tokenizer.normalizer = Sequence([Prepend("\u2581"), Replace(" ", "\u2581")])
    return tokenizer


TOKENIZERS: dict[str, tuple[Callable[[], Tokenizer], bool]] = {  # and whether there is a bound
    "byte level": (speaking, True),
    "composing": (lambda: speaking(normalizer=Sequence([NFC(), Replace("aaaa", "b"), Strip()])), True),
    "byte fallback": (lambda: pieces(True), True),
    "without unknown characters": (lambda: pieces(False), False),
    "without a letter": (lambda: speaking(normalizer=Replace("a", "")), False),
    "without spaces": (lambda: speaking(pre_tokenizer=WhitespaceSplit()), False),
}
PARTS = ["aaaa", "aab", " " * 9, "\n", "\u03b1\u0313\u0300\u0345", "<|a|>", END, "\U0001f600"]
made = functools.cache(lambda name: UserTokenizer(TOKENIZERS[name][0]()))


@given(parts=st.lists(st.sampled_from(PARTS)), text=st.text())
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_has_no_fewer_tokens(name: str, parts: list[str], text: str) -> None:
    tokenizer, whole = made(name), "".join(parts) + text
    assert tokenizer.token_lower_bound(whole) <= len(tokenizer.encode(whole, special=False))
    assert (tokenizer.token_lower_bound("ab" * 10_000) > 50) == TOKENIZERS[name][1]


def test_a_text_that_cannot_fit_is_not_tokenized(llm: LLM) -> None:
    """The message would have its exact length."""
    with pytest.raises(RequestError, match=r"at most 255 of a prompt of at least \d+ tokens"):
        llm.generate("ab " * 100_000)


def test_requests_do_not_wait_for_long_prompts(engine: AsyncLLM, llm: LLM, gives_all_pages_back: None) -> None:
    """Seeds are those of the order of arrival all the same."""
    begun, go_on, drawn = threading.Event(), threading.Event(), count(1)

    class Slow(UserTokenizer):
        def encode(self, text: str, special: bool = True) -> list[int]:
            if len(text) > 1000:
                begun.set()
                assert go_on.wait(PATIENCE)
            return super().encode(text[-1000:], special)

    async def last(prompt: str) -> RequestOutput:
        params = SamplingParams(max_tokens=2, temperature=1.0, output_kind="FINAL_ONLY")
        return [o async for o in engine.generate(prompt, params, tokenization_kwargs={"truncate_prompt_tokens": 9})][-1]

    async def together() -> list[int | None]:
        long = [asyncio.create_task(last("ab " * 100_000)) for _ in range(6)]
        assert await asyncio.to_thread(begun.wait, PATIENCE)
        short = await asyncio.wait_for(asyncio.gather(*map(last, ["x", "y"])), PATIENCE)
        assert not any(task.done() for task in long)
        go_on.set()
        return [output.metrics.seed for output in [*await asyncio.gather(*long), *short]]

    slow = Slow(llm.get_tokenizer())
    try:
        with making_requests(llm, tokenizer=slow, draw_seed=lambda: next(drawn)):
            assert asyncio.run(together()) == [*range(1, 9)]
    finally:
        go_on.set()
