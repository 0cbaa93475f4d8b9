"""Bad requests and bad drafters: the request is refused or ends alone, and the engine goes on."""

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.models import (
    VOCAB,
    OracleDrafter,
    greedy,
    open_llm,
    random_prompts,
    tiny,
    tiny_llm,
    tokens_of,
    tree_of,
)
from tests.helpers.speech import speaking_llm
from treespec import LLM, SamplingParams, SpecConfig
from treespec.errors import ConfigError, DraftError, RequestError
from treespec.request import Request
from treespec.tree import TokenTree

TREE = SpecConfig(nodes=16, max_depth=5)

PROMPTS: list[tuple[Any, str]] = [
    ("", "an empty prompt"),
    ([1, 2, 512], "prompt token 512; valid: ints from 0 to 511"),
    ([[1, True]], "True"),
    ({"prompt": "x", "multi_modal_data": {}}, "keys of a dict: 'prompt' and 'prompt_token_ids'"),
    ("a\ud800", r"text 'a\ud800' has the lone surrogate '\ud800' at 1"),
    ([1] * 256, "a prompt of 256 tokens, but max_model_len=256"),
    (b"bytes", "b'bytes'"),
]


@pytest.mark.parametrize("prompt, message", PROMPTS, ids=[str(case[0])[:40] for case in PROMPTS])
def test_prompts(prompt: Any, message: str) -> None:
    llm = speaking_llm()
    with pytest.raises((RequestError, ConfigError), match=re.escape(message)):
        llm.generate(prompt, greedy(2))
    alone = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int) else prompt
    with pytest.raises((RequestError, ConfigError), match=re.escape(message)):
        list(llm.stream(alone, greedy(2)))
    llm.engine.check_integrity()
    assert llm.engine.scheduler.is_idle


ARRAYS: dict[str, Any] = {
    "numpy integers": [np.int64(3), np.int32(4), np.uint8(5)],
    "list of arrays": [np.array([3, 4, 5], dtype=np.int32)],
    "rows": np.array([[3, 4, 5]]),
    "list of tensors": [torch.tensor([3, 4, 5])],
    "dict": {"prompt_token_ids": np.array([3, 4, 5])},
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_token_ids_of_numpy_and_torch(kind: str) -> None:
    (expected,) = tiny_llm().generate([3, 4, 5], greedy(3))
    (output,) = tiny_llm().generate(ARRAYS[kind], greedy(3))
    assert output.prompt_token_ids == [3, 4, 5] and {type(token) for token in output.prompt_token_ids} == {int}
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_bad_prompts_among_good_ones(caplog: pytest.LogCaptureFixture) -> None:
    """The good ones finish; the bad ones come back in their places with the reason, which is logged once."""
    llm = speaking_llm()
    good = random_prompts((5, 30))
    expected = tokens_of(llm.generate(good, greedy(6)))
    outputs = llm.generate(["", good[0], [9999], [1] * 400, good[1]], greedy(6), TREE)
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "length", "error", "error", "length"]
    assert tokens_of(outputs) == [[], expected[0], [], [], expected[1]]
    assert all(o.finished for o in outputs) and len({o.request_id for o in outputs}) == 5
    reasons = {0: "empty prompt", 2: "9999", 3: "400 tokens"}
    assert [reasons.get(i, "None") in str(output.error) for i, output in enumerate(outputs)] == [True] * 5
    assert [record.getMessage()[:8] for record in caplog.records] == [f"prompt {i}" for i in reasons]
    caplog.clear()
    for refused in (lambda: llm.generate([9999]), lambda: llm.generate([[9999], []])):
        with pytest.raises(RequestError, match="9999"):
            refused()
    assert caplog.records == [], "raised where the call serves nothing"


def test_a_prompt_that_is_too_long() -> None:
    """Raising max_model_len is only advised where the model has more positions."""
    (prompt,) = random_prompts((1030,))
    end = re.escape("or keep its end: tokenization_kwargs={'truncate_prompt_tokens': -1}")
    with pytest.raises(RequestError, match=rf"max_model_len=256 .* raise max_model_len \(the model has 1024\), {end}"):
        tiny_llm().generate(prompt)
    whole = open_llm(tiny()[0], max_model_len=None, max_num_seqs=1)
    with pytest.raises(RequestError, match=rf"the model's context of 1024 tokens .* 1023; shorten it, {end}") as caught:
        whole.generate(prompt)
    assert "raise" not in str(caught.value)
    (output,) = whole.generate(prompt, greedy(1), tokenization_kwargs={"truncate_prompt_tokens": -1})
    assert output.prompt_token_ids == prompt[-1023:]


def test_texts_that_no_tokenizer_takes() -> None:
    """Half of a character, wherever a tokenizer would meet it: the request fails, and no other."""
    llm = speaking_llm()
    good = llm.generate("def", greedy(3))[0].outputs[0].token_ids
    bad = "a\ud800"
    cases = [("def", {"bad_words": [bad]}), ("def", {"stop": bad}), (bad, {}), ("def", {})]
    outputs = llm.generate([prompt for prompt, _ in cases], [SamplingParams(max_tokens=3, **o) for _, o in cases])
    assert ["lone surrogate" in str(output.error) for output in outputs] == [True, True, True, False]
    assert outputs[3].outputs[0].token_ids == good
    template = "{{ messages[0].content }}"
    asked = [[{"role": "user", "content": content}] for content in ("def", bad)]
    outputs = llm.chat(asked, greedy(3), chat_template=template)
    assert outputs[0].outputs[0].token_ids == good and "lone surrogate" in str(outputs[1].error)


CALLS: list[tuple[dict[str, Any], str]] = [
    ({"sampling_params": {"max_tokens": 3}}, "sampling_params={'max_tokens': 3}"),
    ({"sampling_params": [SamplingParams()] * 2}, "2 sampling_params for 1 prompts"),
    ({"samplng_params": None}, "unknown 'samplng_params' (did you mean 'sampling_params'?)"),
    ({"spec": 16}, "spec=16"),
    ({"spec": SpecConfig(nodes=65)}, "a tree of 65 nodes, but this engine keeps 64"),
    ({"spec": SpecConfig(branching=(8, 8))}, "a tree of 73 nodes"),
]


@pytest.mark.parametrize("options, message", CALLS, ids=[str(case[0])[:60] for case in CALLS])
def test_calls(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        tiny_llm().generate([1, 2, 3], **options)
    with pytest.raises(ConfigError, match=re.escape(message)):
        list(tiny_llm().stream([1, 2, 3], **options))


def test_text_without_a_tokenizer() -> None:
    with pytest.raises(RequestError, match=r"a text prompt 'hello', but the model has no tokenizer; give token ids"):
        tiny_llm().generate("hello")
    with pytest.raises(RequestError, match=r"stop=\('x',\) needs a tokenizer; use stop_token_ids"):
        tiny_llm().generate([1, 2], SamplingParams(stop="x"))


# --- drafters that do not keep the rules: "whatever it proposes, the output is the target's"


class BadDrafter(OracleDrafter):
    """Proposes whatever `make(request)` returns."""

    make: Callable[[Request], Any]

    def propose(self, requests: Sequence[Request], max_depths: Sequence[int]) -> list[TokenTree]:
        return [self.make(request) for request in requests]


def made(tokens: list[int], parents: Sequence[int], probs: list[float] | float = 0.5) -> TokenTree:
    return TokenTree.from_parents(tokens, parents, probs, "bad")


TRUTH = 10


@functools.cache
def true_tokens(prompt: tuple[int, ...]) -> list[int]:
    (whole,) = tiny_llm(ssms=(0,)).generate(prompt, greedy(TRUTH + 8), "off")
    return whole.outputs[0].token_ids


def true_next(request: Request) -> list[int]:
    """What the target goes on with."""
    return true_tokens(tuple(request.prompt_token_ids))[request.num_generated :]


def deep_and_wide(root: int, depth: int, width: int) -> TokenTree:
    paths = {tuple(range(10, 10 + d)): 0.9 for d in range(1, depth + 1)}
    return tree_of(root, paths | {(100 + i,): 0.8 for i in range(width)}, "bad")


BAD_TREES: dict[str, Any] = {
    "wrong root": lambda r: made([(r.tokens[-1] + 1) % VOCAB, 5], [-1, 0]),
    "equal siblings": lambda r: made([r.tokens[-1], true_next(r)[0], true_next(r)[0]], [-1, 0, 0]),
    "token out of range": lambda r: made([r.tokens[-1], VOCAB], [-1, 0]),
    "negative token": lambda r: made([r.tokens[-1], -1], [-1, 0]),
    "huge": lambda r: deep_and_wide(r.tokens[-1], 300, 200),
    "too deep": lambda r: deep_and_wide(r.tokens[-1], 60, 0),
    "probabilities of NaN": lambda r: made([r.tokens[-1], *true_next(r)[:2]], [-1, 0, 1], [1.0, math.nan, 0.5]),
    "probabilities above one": lambda r: made([r.tokens[-1], *true_next(r)[:2]], [-1, 0, 1], [1.0, 7.0, 9.0]),
}


@functools.cache
def bad_llm(num_ssms: int) -> tuple[LLM, BadDrafter]:
    """An engine with SSMs and a bad drafter, whose `make` each test sets."""
    drafter = BadDrafter([], 1, name="bad")
    return open_llm(tiny()[0], [*tiny()[1][:num_ssms], drafter], max_num_seqs=2), drafter


@pytest.mark.parametrize("name", BAD_TREES)
@pytest.mark.parametrize("spec", [SpecConfig(), TREE, SpecConfig(branching=(2, 2))], ids=["auto", "nodes", "static"])
def test_a_bad_drafter_changes_no_token(name: str, spec: SpecConfig) -> None:
    """Its tree is used as far as it is sound, or refused with an error that names the drafter; never other tokens."""
    prompts = random_prompts((70, 20))
    expected = [true_tokens(tuple(prompt))[:TRUTH] for prompt in prompts]
    for num_ssms in (0, 1):
        llm, drafter = bad_llm(num_ssms)
        drafter.make = BAD_TREES[name]
        try:
            outputs = llm.generate(prompts, greedy(TRUTH), spec)
        except DraftError as error:
            assert "bad" in str(error)
        else:
            assert tokens_of(outputs) == expected
        llm.engine.check_integrity()
        assert llm.engine.scheduler.is_idle


def drawn_chain(request: Request, tokens: list[int], probs: np.ndarray, excluded: Any = None) -> TokenTree:
    """Tokens one below the other, each said to be drawn from the same distribution."""
    tree = made([request.tokens[-1], *tokens], list(range(-1, len(tokens))))
    rows = np.zeros(len(tokens), dtype=np.int64)
    return replace(tree, draw_rows=rows, draw_excluded=excluded, draft_probs=(probs,))


UNIFORM, HALF = np.full(VOCAB, 1 / VOCAB), np.repeat([2 / VOCAB, 0.0], VOCAB // 2)
BAD_DRAWS: dict[str, tuple[Any, str]] = {
    "impossible": (lambda r: drawn_chain(r, [VOCAB - 1], HALF), "token 511 as drawn from row 0"),
    "excluded itself": (lambda r: drawn_chain(r, [3], UNIFORM, ((3,),)), "token 3 as drawn from row 0"),
    "excluded beyond": (lambda r: drawn_chain(r, [3], UNIFORM, ((VOCAB,),)), r"excluded tokens \(512,\)"),
    "no distribution": (lambda r: drawn_chain(r, [3], UNIFORM * 2), "not probabilities of 512 tokens"),
    "short distribution": (lambda r: drawn_chain(r, [3], UNIFORM[:9]), "not probabilities of 512 tokens"),
    "too many": (lambda r: drawn_chain(r, [3] * 16, UNIFORM), "drew 17 nodes at random"),
    "too deep": (lambda r: drawn_chain(r, [3] * 300, UNIFORM), "at most 256 are possible"),
}


@pytest.mark.parametrize("name", BAD_DRAWS)
def test_bad_random_draws_are_refused(name: str) -> None:
    """Rules that need the drafts' distributions reject the tree; the others accept it."""
    llm, drafter = bad_llm(0)
    drafter.make, message = BAD_DRAWS[name]
    (prompt,) = random_prompts((20,))
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)
    with pytest.raises(DraftError, match=f"bad.*{message}"):
        llm.generate(prompt, params, SpecConfig(nodes=16, verification="rejection"))
    llm.engine.check_integrity()
    expected = llm.generate(prompt, params, "off")[0].outputs[0].token_ids
    assert llm.generate(prompt, params, SpecConfig(nodes=16))[0].outputs[0].token_ids == expected
