"""Code of the user's that misbehaves: processors and tokenizers. Each error ends the request that asked for it, with a
message; the others finish with the tokens that they have alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import TopKLogitsWarper

from tests.helpers.forms import speaking_tokenizer
from tests.helpers.models import greedy, open_llm, random_prompts, tiny_llm
from tests.helpers.sampled import TREE
from tests.helpers.sharing import assert_clean
from tests.helpers.speech import speaking_folder
from treespec import LLM, SamplingParams
from treespec.errors import RequestError


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


BAD: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "none": (lambda ids, scores: None, "returned NoneType instead of a tensor"),
    "one row": (lambda ids, scores: scores[0], "returned torch.float32 [512]; expected floating point [1, 512]"),
    "sparse": (lambda ids, scores: scores.to_sparse(), "logits processor <lambda> failed: "),
    "complex": (lambda ids, scores: scores.to(torch.complex64), "returned torch.complex64 [1, "),
    "a class": (TopKLogitsWarper, "logits processor TopKLogitsWarper failed: "),
    "infinite": (lambda ids, scores: scores + torch.inf, "logits_processors produced NaN or infinity"),
    "nothing left": (lambda ids, scores: torch.full_like(scores, -torch.inf), "no token is left at position"),
    "verbose": (raising(ValueError("x" * 10**7)), "failed: ValueError: xxxxxxxx"),
    "memory": (raising(MemoryError()), "failed: MemoryError"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_hostile_processor_ends_its_own_request(name: str) -> None:
    llm, prompts = tiny_llm(), random_prompts((5, 20))
    processor, message = BAD[name]
    alone = [llm.generate([prompt], greedy(8), TREE)[0].outputs for prompt in prompts]
    bad = SamplingParams(max_tokens=8, logits_processors=[processor])
    outputs = llm.generate([prompts[0], prompts[1], *prompts], [bad, bad, *[greedy(8)] * 2], TREE)
    for output in outputs[:2]:
        assert message in str(output.error) and len(str(output.error)) < 600
        assert output.outputs[0].finish_reason == "error"
    assert [output.outputs for output in outputs[2:]] == alone
    assert_clean(llm)


# --- tokenizers


class Treacherous:
    """The speaking tokenizer, which refuses one text and cannot decode one token."""

    def __init__(self) -> None:
        self._own: Tokenizer = speaking_tokenizer()
        self.unreadable: int | None = None
        self.decodes_to: Any = ValueError("unreadable")

    def encode(self, text: str) -> list[int]:
        if text == "trap":
            raise ValueError("a trap")
        return self._own.encode(text).ids

    def decode(self, tokens: list[int]) -> Any:
        if self.unreadable not in tokens:
            return self._own.decode(tokens)
        if isinstance(self.decodes_to, Exception):
            raise self.decodes_to
        return self.decodes_to


@pytest.fixture(scope="module")
def treacherous() -> tuple[LLM, Treacherous]:
    tokenizer = Treacherous()
    return open_llm(speaking_folder(), tokenizer=tokenizer), tokenizer


@pytest.mark.parametrize("text", [ValueError("unreadable"), None, 7], ids=["raises", "None", "number"])
def test_a_tokenizer_that_fails_ends_the_requests_that_need_it(text: Any, treacherous: tuple[LLM, Treacherous]) -> None:
    llm, tokenizer = treacherous
    tokenizer.unreadable = None
    prompts = ["def", "import os\n", "the parser"]
    alone = [llm.generate(prompt, greedy(6))[0].outputs[0] for prompt in prompts]
    others = alone[1].token_ids + alone[2].token_ids + alone[0].token_ids[:2]
    only = next(token for token in alone[0].token_ids if token not in others)
    tokenizer.unreadable, tokenizer.decodes_to = only, text
    stopping = SamplingParams(max_tokens=6, stop="never written", ignore_eos=True)
    outputs = llm.generate(["trap", *prompts, *prompts], [greedy(6), *[greedy(6)] * 3, *[stopping] * 3])
    assert "the tokenizer rejects 'trap': ValueError: a trap" in str(outputs[0].error)
    shown = "ValueError: unreadable" if isinstance(text, Exception) else f"to {type(text).__name__}; valid: a string"
    for output in (outputs[1], outputs[4]):
        assert "the tokenizer" in str(output.error) and shown in str(output.error)
        assert output.outputs[0].finish_reason == "error"
    place = alone[0].token_ids.index(only)
    assert outputs[1].outputs[0].token_ids == alone[0].token_ids, "the tokens are there, without a text"
    assert outputs[4].outputs[0].token_ids == alone[0].token_ids[: place + 1], "it ended where the text was needed"
    for output, expected in zip([*outputs[2:4], *outputs[5:]], alone[1:] * 2, strict=True):
        assert output.error is None and output.outputs[0].token_ids == expected.token_ids
    with pytest.raises(RequestError, match="the tokenizer"):
        list(llm.stream(prompts[0], greedy(6)))
    assert_clean(llm)
