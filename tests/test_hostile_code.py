"""Code of the user's that misbehaves: processors, criteria, tokenizers, templates, progress bars. Each error ends the
request that asked for it, with a message; the others finish with the tokens that they have alone."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

import treespec.hf
from tests.architectures import VOCAB as HF_VOCAB
from tests.architectures import make_model
from tests.forms import speaking_tokenizer
from tests.models import greedy, open_llm, random_prompts, tiny_llm
from tests.sampled import TREE, idle
from tests.speech import speaking_folder
from treespec import LLM, SamplingParams
from treespec.errors import ConfigError, RequestError


class Unspeakable(Exception):
    """An exception that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class NoText(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]


class Verbose(Exception):
    def __str__(self) -> str:
        return "x" * 10**7


class Shy:
    """An object that cannot be shown."""

    def __repr__(self) -> str:
        raise Unspeakable


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


class Anonymous:
    """A processor whose every attribute fails."""

    def __getattr__(self, name: str) -> Any:
        raise Unspeakable

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        raise ValueError("as expected")


class Hostile(Tensor):
    """A tensor that refuses every operation but those that tell what it is."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ in ("__get__", "__getitem__"):
            return super().__torch_function__(function, types, args, kwargs or {})
        raise Unspeakable


class Impostor:
    """Says that it is a tensor."""

    __class__ = Tensor  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        raise Unspeakable


BAD: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "sparse": (lambda ids, scores: scores.to_sparse(), "returned a tensor of layout torch.sparse_coo"),
    "sparse rows": (lambda ids, scores: scores.to_sparse_csr(), "returned a tensor of layout torch.sparse_csr"),
    "nested": (lambda ids, scores: torch.nested.nested_tensor([scores[0]]), "returned a nested tensor"),
    "jagged": (
        lambda ids, scores: torch.nested.nested_tensor([scores[0]], layout=torch.jagged),
        "returned a nested tensor",
    ),
    "meta": (lambda ids, scores: scores.to("meta"), "returned a tensor on the device meta"),
    "complex": (lambda ids, scores: scores.to(torch.complex64), "returned torch.complex64 [1, "),
    "quantised": (lambda ids, scores: torch.quantize_per_tensor(scores, 0.1, 0, torch.qint8), "returned torch.qint8"),
    "a subclass": (lambda ids, scores: scores.as_subclass(Hostile), "failed: Unspeakable: (its message cannot be"),
    "no tensor": (lambda ids, scores: Impostor(), "failed: Unspeakable: (its message cannot be shown"),
    "NaN": (lambda ids, scores: torch.full_like(scores, torch.nan), "logits_processors made NaN or infinity"),
    "infinite": (lambda ids, scores: scores + torch.inf, "logits_processors made NaN or infinity"),
    "nothing left": (lambda ids, scores: torch.full_like(scores, -torch.inf), "no token is left at position"),
    "unspeakable": (raising(Unspeakable()), "failed: Unspeakable: (its message cannot be shown: __str__ raises Runtim"),
    "no text": (raising(NoText()), "failed: NoText: (its message cannot be shown: __str__ raises TypeError)"),
    "verbose": (raising(Verbose()), "failed: Verbose: xxxxxxxx"),
    "anonymous": (Anonymous(), "logits processor Anonymous failed: ValueError: as expected"),
    "memory": (raising(MemoryError()), "failed: MemoryError"),
}


@pytest.mark.parametrize("spec", ["off", TREE], ids=["off", "tree"])
@pytest.mark.parametrize("name", BAD)
def test_a_hostile_processor_ends_its_own_request(name: str, spec: Any) -> None:
    llm, prompts = tiny_llm(), random_prompts((5, 20, 9))
    processor, message = BAD[name]
    alone = [llm.generate([prompt], greedy(8), spec)[0].outputs for prompt in prompts]
    bad = SamplingParams(max_tokens=8, logits_processors=[processor])
    outputs = llm.generate([prompts[0], prompts[1], *prompts], [bad, bad, *[greedy(8)] * 3], spec)
    for output in outputs[:2]:
        assert message in str(output.error) and len(str(output.error)) < 600
        assert output.outputs[0].finish_reason == "error"
    assert [output.outputs for output in outputs[2:]] == alone
    assert idle(llm)


@pytest.mark.parametrize("spec", ["off", TREE], ids=["off", "tree"])
def test_scores_that_are_strange_but_right_are_taken(spec: Any) -> None:
    """They need a gradient, come in steps, are kept and changed later, or are a parameter."""
    llm, (prompt,) = tiny_llm(), random_prompts((9,))
    expected = llm.generate([prompt], greedy(8), spec)[0].outputs[0].token_ids
    kept: list[Tensor] = []

    def keeps(ids: Tensor, scores: Tensor) -> Tensor:
        for each in kept:
            each.fill_(torch.nan)
        kept.append(scores)
        return scores

    strange: list[Callable[[Tensor, Tensor], Tensor]] = [
        keeps,
        lambda ids, scores: scores.requires_grad_(),
        lambda ids, scores: nn.Parameter(scores),
        lambda ids, scores: torch.stack((scores, scores), 2)[..., 0],
    ]
    for processor in strange:
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=8, logits_processors=[processor]), spec)
        assert output.error is None and output.outputs[0].token_ids == expected


def test_processors_that_cannot_be_shown_are_refused() -> None:
    with pytest.raises(ConfigError, match="<Shy whose __repr__ raises Unspeakable> cannot be called"):
        SamplingParams(logits_processors=[Shy()])


# --- transformers' generate


@pytest.fixture(scope="module")
def hf_model() -> Any:
    return make_model("stablelm")


@pytest.mark.usefixtures("engines_start_quickly")
@pytest.mark.parametrize("kind", ["logits_processor", "stopping_criteria"])
@pytest.mark.parametrize("error", [Unspeakable(), KeyError("oh")], ids=["unspeakable", "key"])
def test_processors_and_criteria_of_transformers(kind: str, error: Exception, hf_model: Any) -> None:
    torch.manual_seed(0)
    options = {"max_new_tokens": 4, "pad_token_id": 2, "custom_generate": treespec.hf.generate}
    ids = torch.randint(3, HF_VOCAB, (1, 9))
    expected = hf_model.generate(input_ids=ids, **options)
    what = {"logits_processor": "logits processor", "stopping_criteria": "stopping criterion"}[kind]
    shown = "KeyError: 'oh'" if isinstance(error, KeyError) else "Unspeakable: .its message cannot be shown"
    with pytest.raises(RequestError, match=f"a {what} failed: {shown}"):
        hf_model.generate(input_ids=ids, **options, **{kind: [raising(error)]})
    assert torch.equal(hf_model.generate(input_ids=ids, **options), expected)


# --- tokenizers


class Treacherous:
    """The speaking tokenizer, which refuses one text and cannot decode one token."""

    def __init__(self) -> None:
        self._own: Tokenizer = speaking_tokenizer()
        self.unreadable: int | None = None
        self.decodes_to: Any = Unspeakable()

    def encode(self, text: str) -> list[int]:
        if text == "trap":
            raise Unspeakable
        return self._own.encode(text).ids

    chat_template = "in code"

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> str:
        if messages[0].get("bad"):
            raise Unspeakable
        return str(messages[0]["content"])

    def decode(self, tokens: list[int]) -> Any:
        if self.unreadable in tokens:
            if isinstance(self.decodes_to, Exception):
                raise self.decodes_to
            return self.decodes_to
        return self._own.decode(tokens)


@pytest.fixture(scope="module")
def treacherous() -> tuple[LLM, Treacherous]:
    tokenizer = Treacherous()
    return open_llm(speaking_folder(), tokenizer=tokenizer), tokenizer


@pytest.mark.parametrize("text", [Unspeakable(), None, 7], ids=["raises", "None", "number"])
def test_a_tokenizer_that_fails_ends_the_requests_that_need_it(text: Any, treacherous: tuple[LLM, Treacherous]) -> None:
    llm, tokenizer = treacherous
    tokenizer.unreadable = None
    prompts = ["def", "import os\n", "the parser"]
    alone = [llm.generate(prompt, greedy(6))[0].outputs[0] for prompt in prompts]
    only = next(
        t for t in alone[0].token_ids[2:] if t not in alone[1].token_ids + alone[2].token_ids + alone[0].token_ids[:2]
    )
    tokenizer.unreadable, tokenizer.decodes_to = only, text
    stopping = SamplingParams(max_tokens=6, stop="never written", ignore_eos=True)
    outputs = llm.generate(["trap", *prompts, *prompts], [greedy(6), *[greedy(6)] * 3, *[stopping] * 3])
    assert "the tokenizer rejects 'trap': Unspeakable: (its message cannot be shown" in str(outputs[0].error)
    shown = "Unspeakable: (its message" if isinstance(text, Exception) else f"to {type(text).__name__}; valid: a text"
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
    assert idle(llm)


def test_an_unusable_tokenizer_is_refused() -> None:
    class Useless:
        def encode(self, text: str) -> list[int]:
            raise TypeError

        decode = encode

        def __repr__(self) -> str:
            raise Unspeakable

    with pytest.raises(ConfigError, match="tokenizer=<Useless whose __repr__ raises Unspeakable>"):
        LLM(speaking_folder(), [], tokenizer=Useless(), device="cpu")


def test_a_chat_template_that_fails_ends_its_own_request(treacherous: tuple[LLM, Treacherous]) -> None:
    llm, tokenizer = treacherous
    tokenizer.unreadable = None
    alone = llm.generate("def", greedy(4))[0].outputs
    good, bad = ({"role": "user", "content": "def", "bad": bad} for bad in (False, True))
    first, second, third = llm.chat([[good], [bad], [good]], greedy(4))
    assert "the chat template rejects the messages: Unspeakable: (its message cannot be shown" in str(second.error)
    assert first.outputs == third.outputs == alone
    (refused, served) = llm.chat([[{"role": Shy()}], [good]], greedy(4))
    assert "message <dict whose __repr__ raises Unspeakable>" in str(refused.error) and served.outputs == alone


# --- progress


class Bar:
    def __init__(self, **_: Any) -> None:
        pass

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        raise Unspeakable

    def update(self, count: int) -> None:
        raise Unspeakable


def test_a_progress_bar_that_fails_costs_no_output(caplog: pytest.LogCaptureFixture) -> None:
    llm, prompts = tiny_llm(), random_prompts((5, 9))
    expected = [output.outputs for output in llm.generate(prompts, greedy(4))]
    with caplog.at_level(logging.WARNING, "treespec"):
        outputs = llm.generate(prompts, greedy(4), use_tqdm=Bar)
    assert [output.outputs for output in outputs] == expected
    said = [record for record in caplog.records if "the progress bar of use_tqdm failed" in record.getMessage()]
    assert len(said) == 1 and "Unspeakable" in said[0].getMessage()
    with pytest.raises(ConfigError, match=r"use_tqdm=.*fail.* failed: Unspeakable"):
        llm.generate(prompts, greedy(4), use_tqdm=raising(Unspeakable()))


# --- prompts


def test_prompts_without_values() -> None:
    llm = tiny_llm()
    (good,) = random_prompts((5,))
    expected = llm.generate([good], greedy(4))[0].outputs
    meta = torch.ones(3, dtype=torch.int64, device="meta")
    first, second = llm.generate([{"prompt_token_ids": meta}, good], greedy(4))
    assert "has no list of token ids" in str(first.error) and second.outputs == expected
    with pytest.raises(ConfigError, match="has no token ids"):
        llm.generate(meta, greedy(4))
