"""Bad requests: they are refused or end alone, and the engine goes on."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.models import greedy, open_llm, random_prompts, tiny, tiny_llm, tokens_of
from tests.helpers.speech import speaking_llm
from treespec import SamplingParams, SpecConfig
from treespec.errors import ConfigError, RequestError

TREE = SpecConfig(nodes=16, max_depth=5)

PROMPTS: list[tuple[Any, str]] = [
    ("", "an empty prompt"),
    ([1, 2, 512], "prompt token 512; valid: ints from 0 to 511"),
    ([[1, True]], "True"),
    ({"prompt": "x", "multi_modal_data": {}}, "keys of a dict: 'prompt' and 'prompt_token_ids'"),
    ("a\ud800", r"text 'a\ud800' has the lone surrogate '\ud800' at 1"),
    ([1] * 256, "at most 255 of a prompt of 256 tokens"),
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
    with pytest.raises(RequestError, match=rf"is 256 tokens, .* raise max_model_len \(the model has 1024\), {end}"):
        tiny_llm().generate(prompt)
    whole = open_llm(tiny()[0], max_model_len=None, max_num_seqs=1)
    with pytest.raises(RequestError, match=rf"length is 1024 tokens, .* 1023 of .* shorten it, {end}") as caught:
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
    with pytest.raises(RequestError, match=r"a text prompt 'hello', but the model has no tokenizer; pass token ids"):
        tiny_llm().generate("hello")
    with pytest.raises(RequestError, match=r"stop=\('x',\) needs a tokenizer; use stop_token_ids"):
        tiny_llm().generate([1, 2], SamplingParams(stop="x"))
