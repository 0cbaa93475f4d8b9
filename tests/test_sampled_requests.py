"""Sampled requests through the Python API: logprobs, several outputs, seeds, company, ends, and what is refused."""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.exactness import recorded
from tests.models import VOCAB, open_llm, random_prompts, tiny, tiny_llm
from tests.speech import altered_logits, checked, speaking_llm
from treespec import LLM, RequestOutput, SamplingParams, SpecConfig
from treespec.errors import RequestError
from treespec.request import Request, StreamChunk
from treespec.tree import TokenTree

TREE = SpecConfig(nodes=16, max_depth=5)
NAIVE = SpecConfig(nodes=16, max_depth=5, verification="naive")
STATIC = SpecConfig(branching=(3, 2, 1))
REJECTION = SpecConfig(branching=(2, 2, 1), verification="rejection")
TRAVERSAL = SpecConfig(branching=(2, 2, 1), verification="traversal")
SAME = {"tree": TREE, "naive": NAIVE}  # the tokens of plain decoding
DRAWN = {"rejection": REJECTION, "traversal": TRAVERSAL}
same_tokens = pytest.mark.parametrize("spec", SAME.values(), ids=SAME.keys())
every_rule = pytest.mark.parametrize("spec", [TREE, *DRAWN.values()], ids=["tree", *DRAWN])
PROMPTS = random_prompts((9, 40, 1, 63))


LENGTH = 10


def two_ssms() -> LLM:
    return tiny_llm(ssms=(0, 1))


def sampled(max_tokens: int = LENGTH, **options: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.8, "seed": 7} | options))


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def idle(llm: LLM) -> bool:
    llm.engine.check_integrity()
    return llm.engine.scheduler.is_idle and llm.engine.cache.num_free == llm.engine.cache.num_pages


def say_hush(ids: Tensor, scores: Tensor) -> Tensor:
    """A processor that depends on the past."""
    scores[:, (ids[0, -1] * 7 + ids.shape[1]) % VOCAB] += 4
    return scores


COMPANY = [
    sampled(), sampled(temperature=0.0), sampled(temperature=1.3, top_k=20, seed=2), sampled(seed=3, top_p=0.8),
    sampled(seed=7, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2), sampled(seed=5, min_p=0.1),
    sampled(temperature=0.0, repetition_penalty=1.5), sampled(logits_processors=[say_hush]),
    sampled(logit_bias={3: 4.0, 9: -50.0}), sampled(min_tokens=5, ignore_eos=False, temperature=2.0), sampled(n=3),
    sampled(seed=7, max_tokens=5, logprobs=2),
]  # fmt: skip
"""What a request may stand beside."""


# --- logprobs


@same_tokens
@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_the_models_own(count: int, spec: SpecConfig) -> None:
    """Of the raw logits, whatever is done to them for sampling; in every bit those of plain decoding."""
    llm = two_ssms()
    options = {"top_k": 60, "repetition_penalty": 1.3, "logit_bias": {5: 3.0}, "logits_processors": [say_hush]}
    params = sampled(logprobs=count, temperature=1.4, **options)
    with recorded(llm) as (logits, unequal):
        plain = llm.generate(PROMPTS, params, "off")
    assert not unequal
    for output in plain:
        (completion,) = output.outputs
        assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids) == LENGTH
        total = 0.0
        for i, (token, found) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            raw = logits[(*output.prompt_token_ids, *completion.token_ids[:i])]
            expected = torch.log_softmax(raw.float(), 0)
            assert next(iter(found)) == token
            assert len(found) in (count, count + 1)
            assert sorted(each.rank for each in found.values())[:count] == list(range(1, count + 1))
            for other, each in found.items():
                assert each.logprob == float(expected[other]) and each.decoded_token is None
                assert each.rank == int((raw > raw[other]).sum()) + 1
            total += found[token].logprob
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-9)
    for output, reference in zip(llm.generate(PROMPTS, params, spec), plain, strict=True):
        assert output.outputs == reference.outputs


def test_logprobs_do_not_move_the_tokens() -> None:
    llm = two_ssms()
    for params in (sampled(), sampled(temperature=0.0)):
        bare = llm.generate(PROMPTS, params, TREE)
        assert all(o.outputs[0].logprobs is None and o.outputs[0].cumulative_logprob is None for o in bare)
        for count in (0, VOCAB):
            options = {"temperature": params.temperature, "logprobs": count}
            outputs = llm.generate(PROMPTS, sampled(**options), TREE)
            assert tokens_of(outputs) == tokens_of(bare)
            assert all(len(each) >= count for o in outputs for each in o.outputs[0].logprobs or [])


@pytest.mark.parametrize("spec", DRAWN.values(), ids=DRAWN.keys())
def test_logprobs_where_drafts_are_drawn(spec: SpecConfig) -> None:
    llm = two_ssms()
    with recorded(llm) as (logits, _):
        (output,) = llm.generate(PROMPTS[0], sampled(logprobs=2, n=2), spec)
    for completion in output.outputs:
        for i, (token, found) in enumerate(zip(completion.token_ids, completion.logprobs or [], strict=True)):
            raw = logits[(*PROMPTS[0], *completion.token_ids[:i])]
            assert found[token].logprob == float(torch.log_softmax(raw.float(), 0)[token])


def test_logprobs_end_with_the_output() -> None:
    """A stop inside an accepted path cuts both."""
    llm = two_ssms()
    (whole,) = llm.generate(PROMPTS[0], sampled(logprobs=1))
    for at in (0, 3, 7):
        stop = whole.outputs[0].token_ids[at]
        first = whole.outputs[0].token_ids.index(stop)
        for spec in ("off", TREE):
            (output,) = llm.generate(PROMPTS[0], sampled(logprobs=1, stop_token_ids=[stop]), spec)
            assert output.outputs[0].token_ids == whole.outputs[0].token_ids[: first + 1]
            assert output.outputs[0].logprobs == (whole.outputs[0].logprobs or [])[: first + 1]


def test_logprobs_name_their_tokens() -> None:
    llm = speaking_llm()
    (output,) = llm.generate("def f(x):", sampled(4, logprobs=3))
    decode = llm.get_tokenizer().decode
    for found in output.outputs[0].logprobs or []:
        assert all(each.decoded_token == decode([token]) for token, each in found.items())


# --- several outputs


@same_tokens
def test_sample_i_is_sample_i(spec: SpecConfig) -> None:
    """Of however many, and whatever else runs."""
    llm, prompt = two_ssms(), PROMPTS[1]
    with checked(llm):
        (nine,) = llm.generate(prompt, sampled(n=9), spec)  # more than run at once
        (four,) = llm.generate(prompt, sampled(n=4), "off")
        (one,) = llm.generate(prompt, sampled(), spec)
        mates = llm.generate([*PROMPTS, prompt], [sampled(9, n=2), *COMPANY[:3], sampled(n=4)], spec)
    assert [completion.index for completion in nine.outputs] == list(range(9))
    expected = tokens_of([nine])
    assert len({tuple(tokens) for tokens in expected}) == 9
    assert tokens_of([four]) == expected[:4]
    assert tokens_of([one]) == expected[:1]
    assert tokens_of(mates[-1:]) == expected[:4]
    assert tokens_of(mates[1:2]) == tokens_of(llm.generate(PROMPTS[1], COMPANY[0], "off"))
    for output in (nine, four):
        assert output.metrics.prefill_passes == one.metrics.prefill_passes == 1
        assert output.metrics.generated_tokens == LENGTH * len(output.outputs) and output.metrics.seed == 7
    assert idle(llm)


def test_prompt_tokens_are_counted_once() -> None:
    llm = open_llm(*tiny_arguments(), prefill_chunk=16)
    counts = []
    for n in (1, 5):
        before = llm.stats()["prefill_tokens"]
        (output,) = llm.generate(PROMPTS[3], sampled(n=n), TREE)
        counts.append((llm.stats()["prefill_tokens"] - before, output.metrics.prefill_passes))
    assert counts == [(62, 4), (62, 4)]


def tiny_arguments() -> tuple[Any, Any]:
    return tiny()[0], tiny()[1][:1]


def concatenated(chunks: Sequence[StreamChunk], n: int) -> tuple[list[list[int]], list[str]]:
    tokens: list[list[int]] = [[] for _ in range(n)]
    texts = [""] * n
    for chunk in chunks:
        tokens[chunk.index] += chunk.token_ids
        texts[chunk.index] += chunk.text or ""
    return tokens, texts


@pytest.mark.parametrize("spec", [TREE, "off", TRAVERSAL], ids=["tree", "off", "traversal"])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_streams_of_several_outputs(n: int, spec: SpecConfig | str) -> None:
    llm, params = speaking_llm(), sampled(8, n=n, logprobs=1)
    with checked(llm):
        chunks = list(llm.stream("def f(x):", params, spec))
        (whole,) = llm.generate("def f(x):", params, spec)
    assert [chunk.output is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    final = chunks[-1].output
    assert final is not None and {chunk.request_id for chunk in chunks} == {final.request_id}
    assert [c.index for c in final.outputs] == list(range(n))
    assert final.outputs == whole.outputs
    tokens, texts = concatenated(chunks, n)
    assert tokens == tokens_of([final]) and texts == [completion.text for completion in final.outputs]
    for index in range(n):
        reasons = [chunk.finish_reason for chunk in chunks if chunk.index == index]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert idle(llm)


@pytest.mark.parametrize("n", [1, 3, 10])
def test_abort_ends_all_samples(n: int) -> None:
    llm, chunks = speaking_llm(), []
    for chunk in llm.stream("def f(x):", sampled(100, n=n), TREE):
        chunks.append(chunk)
        if len(chunks) == 2 * min(n, 3):
            llm.abort(chunk.request_id)
            llm.abort("req-of-nobody")
            assert idle(llm)
    assert [chunk.output is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    final = chunks[-1].output
    assert final is not None
    assert [c.finish_reason for c in final.outputs] == ["abort"] * n
    assert all(len(tokens) < 100 for tokens in tokens_of([final]))
    assert concatenated(chunks, n)[0] == tokens_of([final])
    assert concatenated(chunks, n)[1] == [completion.text for completion in final.outputs]


def test_leaving_a_stream_of_several_outputs() -> None:
    llm = speaking_llm()
    for chunk in llm.stream("def f(x):", sampled(100, n=10), TREE):
        if len(chunk.token_ids):
            break
    del chunk
    assert idle(llm)


def test_outputs_end_each_by_itself() -> None:
    """Some by a stop string, some by an end token, some by length."""
    llm = speaking_llm()
    stops = list(range(30))
    params = sampled(16, n=6, temperature=1.2, stop=["e", "\n"], stop_token_ids=stops)
    (plain,) = llm.generate("def f(x):", params, "off")
    reasons = {(c.finish_reason, type(c.stop_reason)) for c in plain.outputs}
    assert {("stop", str), ("stop", int)} <= reasons
    for spec in SAME.values():
        chunks = list(llm.stream("def f(x):", params, spec))
        assert chunks[-1].output is not None and chunks[-1].output.outputs == plain.outputs
        assert concatenated(chunks, 6)[1] == [completion.text for completion in plain.outputs]


# --- seeds


@every_rule
def test_a_reported_seed_reproduces(spec: SpecConfig | str) -> None:
    llm = two_ssms()
    outputs = llm.generate([PROMPTS[0]] * 2, sampled(seed=None, n=2), spec)
    seeds = [output.metrics.seed for output in outputs]
    assert len(set(seeds)) == 2 and all(isinstance(seed, int) and 0 <= seed < 2**53 for seed in seeds)
    assert len({tuple(tokens) for tokens in tokens_of(outputs)}) == 4
    for output in outputs:
        (again,) = llm.generate(PROMPTS[0], sampled(seed=output.metrics.seed, n=2), spec)
        assert tokens_of([again]) == tokens_of([output]) and again.metrics.seed == output.metrics.seed


def test_seeds_of_every_size() -> None:
    llm = two_ssms()
    outputs = [llm.generate(PROMPTS[0], sampled(seed=seed), TREE)[0] for seed in (0, 1, 2**32, 2**63, 2**64 - 1)]
    assert len({tuple(tokens) for tokens in tokens_of(outputs)}) == 5
    assert [output.metrics.seed for output in outputs] == [0, 1, 2**32, 2**63, 2**64 - 1]


def test_greedy_has_no_seed() -> None:
    (output,) = two_ssms().generate(PROMPTS[0], sampled(temperature=0.0, seed=None))
    assert output.metrics.seed is None
    (refused, _) = two_ssms().generate([[], PROMPTS[0]], sampled(seed=3))
    assert refused.metrics.seed == 3


@every_rule
def test_very_cold_is_greedy(spec: SpecConfig | str) -> None:
    llm = two_ssms()
    cold = llm.generate(PROMPTS, sampled(temperature=1e-4), spec)
    assert tokens_of(cold) == tokens_of(llm.generate(PROMPTS, sampled(temperature=0.0), "off"))


# --- company


@functools.cache
def company_alone() -> list[list[int]]:
    return tokens_of([two_ssms().generate(PROMPTS[i % 4], params, "off")[0] for i, params in enumerate(COMPANY)])


@pytest.mark.parametrize("spec", ["off", SpecConfig(), *SAME.values()], ids=["off", "auto", *SAME])
def test_company_changes_no_token(spec: SpecConfig | str) -> None:
    """Each request alone, and all of them at once, in any order."""
    llm = two_ssms()
    cases = [(PROMPTS[i % 4], params) for i, params in enumerate(COMPANY)]
    for order in (cases, cases[::-1]) if spec == TREE else (cases[::-1],):
        with checked(llm):
            outputs = llm.generate(*map(list, zip(*order, strict=True)), spec)
        assert tokens_of(outputs if order is cases else outputs[::-1]) == company_alone()


@pytest.mark.parametrize("spec", DRAWN.values(), ids=DRAWN.keys())
def test_company_where_drafts_are_drawn(spec: SpecConfig) -> None:
    """Trees of a fixed shape: every request has a randomness of its own."""
    llm = two_ssms()
    cases = [(PROMPTS[i % 4], params) for i, params in enumerate(COMPANY)]
    alone = tokens_of([llm.generate(prompt, params, spec)[0] for prompt, params in cases])
    with checked(llm):
        backwards = llm.generate(*map(list, zip(*cases[::-1], strict=True)), spec)
    assert tokens_of(backwards[::-1]) == alone


def test_all_rules_at_once() -> None:
    """Greedy, sampled, penalised, rejection and traversal requests in the same rounds, as streams that take turns."""
    llm = two_ssms()
    rules = [TREE, "off", NAIVE, REJECTION, STATIC, TRAVERSAL]
    params = [COMPANY[1], COMPANY[0], COMPANY[4], COMPANY[0], COMPANY[2], COMPANY[7]]
    cases = [(PROMPTS[i % 4], one, rule) for i, (one, rule) in enumerate(zip(params, rules, strict=True))]
    alone = tokens_of([llm.generate(*case)[0] for case in cases])
    streams = [llm.stream(*case) for case in cases]
    tokens: list[list[int]] = [[] for _ in cases]
    open_streams, together = dict(enumerate(streams)), 0
    with checked(llm):
        while open_streams:
            for i, stream in list(open_streams.items()):
                chunk = next(stream, None)
                if chunk is None:
                    del open_streams[i]
                else:
                    tokens[i] += chunk.token_ids
                together = max(together, len(llm.engine.scheduler.running))
    assert tokens == alone and together > 3  # a stream enters at its first chunk
    assert idle(llm)


# --- ends


@same_tokens
def test_stop_strings(spec: SpecConfig) -> None:
    llm = speaking_llm()
    (whole,) = llm.generate("def f(x):", sampled(24, temperature=1.0), "off")
    text = whole.outputs[0].text or ""
    for at, length in ((0, 1), (4, 3), (20, 5)):
        stop = text[at : at + length]
        for include in (False, True):
            params = sampled(24, temperature=1.0, stop=[stop, "absent"], include_stop_str_in_output=include)
            (output,) = llm.generate("def f(x):", params, spec)
            (plain,) = llm.generate("def f(x):", params, "off")
            expected = text[: text.index(stop)] + (stop if include else "")
            assert output.outputs == plain.outputs
            assert (output.outputs[0].text, output.outputs[0].stop_reason) == (expected, stop)
            assert whole.outputs[0].token_ids[: len(output.outputs[0].token_ids)] == output.outputs[0].token_ids


@every_rule
def test_no_end_token_before_min_tokens(spec: SpecConfig | str) -> None:
    """Half of the vocabulary ends the request; it ends with the first of them after six others."""
    llm, ends = two_ssms(), list(range(0, VOCAB, 2))
    for temperature in (0.0, 0.8):
        params = sampled(30, temperature=temperature, min_tokens=6, stop_token_ids=ends, ignore_eos=False)
        for output in llm.generate(PROMPTS, params, spec):
            (completion,) = output.outputs
            kinds = [token % 2 for token in completion.token_ids]
            assert completion.finish_reason == "stop" and kinds.index(0) == len(kinds) - 1 >= 6
        if spec in SAME.values():
            assert tokens_of(llm.generate(PROMPTS, params, spec)) == tokens_of(llm.generate(PROMPTS, params, "off"))


@pytest.mark.parametrize("spec", ["off", TREE, NAIVE], ids=["off", "tree", "naive"])
def test_no_stop_string_before_min_tokens(spec: SpecConfig | str) -> None:
    llm = speaking_llm()
    decode = llm.get_tokenizer().decode
    (whole,) = llm.generate("def f(x):", sampled(60, temperature=1.0), "off")
    tokens = whole.outputs[0].token_ids
    bringing = [i for i, token in enumerate(tokens, start=1) if "e" in decode([token], skip_special_tokens=True)]
    for least in (0, bringing[0] - 1, bringing[0], bringing[1], bringing[2] + 1):
        expected = next(count for count in bringing if count > least)
        (output,) = llm.generate("def f(x):", sampled(60, temperature=1.0, stop="e", min_tokens=least), spec)
        assert output.outputs[0].token_ids == tokens[:expected], least
        assert output.outputs[0].stop_reason == "e"


# --- forced and forbidden


@every_rule
def test_logit_bias_forces_and_forbids(spec: SpecConfig | str) -> None:
    llm = two_ssms()
    for temperature in (0.0, 1.0) if spec == TREE else (1.0,):
        forced = llm.generate(PROMPTS, sampled(temperature=temperature, logit_bias={77: 200.0}), spec)
        assert tokens_of(forced) == [[77] * LENGTH] * 4
        forbidden = llm.generate(
            PROMPTS, sampled(temperature=temperature, logit_bias=dict.fromkeys(range(0, VOCAB, 2), -200.0)), spec
        )
        assert all(token % 2 for tokens in tokens_of(forbidden) for token in tokens)


@pytest.mark.parametrize("spec", [TREE, REJECTION], ids=["tree", "rejection"])
def test_logit_bias_on_all_tokens_masks_none(spec: SpecConfig) -> None:
    llm = two_ssms()
    for bias in (-100.0, -1e30, 1e30):
        outputs = llm.generate(PROMPTS, sampled(4, logit_bias=dict.fromkeys(range(VOCAB), bias), temperature=1.0), spec)
        assert [len(tokens) for tokens in tokens_of(outputs)] == [4] * 4
    shifted = llm.generate(PROMPTS, sampled(logit_bias=dict.fromkeys(range(VOCAB), -4.0), temperature=0.0), spec)
    assert tokens_of(shifted) == tokens_of(llm.generate(PROMPTS, sampled(temperature=0.0), "off"))


@every_rule
def test_bad_words(spec: SpecConfig | str) -> None:
    """What a request writes by itself is forbidden to it, word after word."""
    llm = speaking_llm()
    tokenizer = llm.get_tokenizer()
    words: list[str] = []
    for _ in range(3):
        params = sampled(20, bad_words=words, temperature=0.9)
        (output,) = llm.generate("def f(x):", params, spec)
        tokens = output.outputs[0].token_ids
        text = tokenizer.decode(tokens)
        for word in words:
            for spelled in (word.lstrip(), " " + word.lstrip()):
                ids = tokenizer.encode(spelled, add_special_tokens=False)
                assert not any(tokens[i : i + len(ids)] == ids for i in range(len(tokens))), (spelled, text)
        if spec in SAME.values():
            assert tokens_of(llm.generate("def f(x):", params, "off")) == [tokens]
        written = [tokenizer.decode([token]) for token in tokens]
        words += [word for word in written if tokenizer.encode(word) and word.strip() and "\ufffd" not in word][:6]
    assert len(words) == 18


def test_bad_words_of_several_tokens_across_prompt_and_tree() -> None:
    """A pair of tokens that the plain output has is never written again, though each of the two may be."""
    llm = speaking_llm()
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.encode("the option")
    word = "option string"
    ids = tokenizer.encode(" " + word)
    assert len(ids) > 1
    bias = dict.fromkeys(ids, 60.0)
    for spec in ("off", TREE):
        (free,) = llm.generate(prompt, sampled(20, n=4, logit_bias=bias, temperature=3.0), spec)
        (output,) = llm.generate(prompt, sampled(20, n=4, logit_bias=bias, temperature=3.0, bad_words=[word]), spec)
        spelled = [tokenizer.encode(word), ids]

        def appears(tokens: list[int], spelled: list[list[int]] = spelled) -> bool:
            whole = prompt + tokens
            return any(
                whole[i - len(each) : i] == each for each in spelled for i in range(len(prompt) + 1, len(whole) + 1)
            )

        assert any(map(appears, tokens_of([free]))) and not any(map(appears, tokens_of([output])))
        assert all(set(ids) <= set(tokens) for tokens in tokens_of([output]))


def test_bad_words_that_the_model_has_no_token_for() -> None:
    """A tokenizer may know more tokens than its model: what is spelled with them is not written anyway."""

    class Wide:
        def encode(self, text: str) -> list[int]:
            return [VOCAB + 3] if text.strip() == "new" else [len(text) % VOCAB, VOCAB + 1] if " " in text else [5]

        def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
            return "".join(f"[{token}]" for token in tokens)

    llm = open_llm(*tiny_arguments(), tokenizer=Wide())
    plain = llm.generate(PROMPTS[0], sampled(), "off")
    for spec in ("off", TREE):
        outputs = llm.generate(PROMPTS[0], sampled(bad_words=["new"]), spec)
        assert tokens_of(outputs) == tokens_of(plain)
    (output,) = llm.generate(PROMPTS[0], sampled(bad_words=["new", "x"], logit_bias={5: 100.0}), TREE)
    assert 5 not in output.outputs[0].token_ids


# --- requests that cannot be served or fail on the way: alone, and the others finish


def spoil(value: float) -> Callable[[Tensor, Tensor], Tensor]:
    def spoiled(ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 3] = value
        return scores

    return spoiled


def raising(ids: Tensor, scores: Tensor) -> Tensor:
    raise ZeroDivisionError("division by me")


def nothing_left(ids: Tensor, scores: Tensor) -> Tensor:
    return torch.full_like(scores, -math.inf)


def only(token: int) -> Callable[[Tensor, Tensor], Tensor]:
    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -math.inf).index_fill(1, torch.tensor([token]), 0.0)

    return processor


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "raises": ({"logits_processors": [raising]}, "logits processor raising failed: ZeroDivisionError: division by me"),
    "wrong shape": ({"logits_processors": [lambda i, s: s[0]]}, "expected floating point [1, 512]"),
    "narrow": ({"logits_processors": [lambda i, s: s[:, 1:]]}, "returned torch.float32 [1, 511]"),
    "ints": ({"logits_processors": [lambda i, s: s.int()]}, "returned torch.int32 [1, 512]"),
    "None": ({"logits_processors": [lambda i, s: None]}, "returned NoneType"),
    "one NaN": ({"logits_processors": [spoil(math.nan)]}, "made NaN or infinity at position 9"),
    "one NaN, top_k": ({"logits_processors": [spoil(math.nan)], "top_k": 5}, "made NaN or infinity at position 9"),
    "one NaN, top_p": ({"logits_processors": [spoil(math.nan)], "top_p": 0.9}, "made NaN or infinity at position 9"),
    "one NaN, min_p": ({"logits_processors": [spoil(math.nan)], "min_p": 0.1}, "made NaN or infinity at position 9"),
    "infinity": ({"logits_processors": [spoil(math.inf)]}, "made NaN or infinity at position 9"),
    "all NaN": ({"logits_processors": [lambda i, s: s * math.nan]}, "made NaN or infinity at position 9"),
    "nothing left": ({"logits_processors": [nothing_left]}, "no token is left at position 9"),
    "nothing left, top_k": ({"logits_processors": [nothing_left], "top_k": 5}, "no token is left at position 9"),
    "nothing left, top_p": ({"logits_processors": [nothing_left], "top_p": 0.5}, "no token is left at position 9"),
    "only an end": (
        {"logits_processors": [], "min_tokens": 3, "stop_token_ids": range(VOCAB)},
        "no token is left at position 9",
    ),
    "bias out of range": ({"logit_bias": {512: 1.0}}, "logit_bias: token 512; valid: 0 to 511"),
    "logprobs": ({"logprobs": 513}, "logprobs=513; the vocabulary has 512 tokens"),
    "bad words": ({"bad_words": ["x"]}, "bad_words=('x',) needs a tokenizer; use logit_bias"),
    "stop": ({"stop": ["x"]}, "stop=('x',) needs a tokenizer; use stop_token_ids"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_ends_alone(name: str) -> None:
    llm = two_ssms()
    options, message = BAD[name]
    options = {key: list(value) if isinstance(value, range) else value for key, value in options.items()}
    bad, mates = sampled(**options), COMPANY[:3]
    alone = [company_alone()[i] for i in range(3)]
    for spec in ("off", TREE, REJECTION):
        if spec is not REJECTION:
            with checked(llm):
                outputs = llm.generate([PROMPTS[0], PROMPTS[0], *PROMPTS[1:3]], [mates[0], bad, *mates[1:]], spec)
            assert tokens_of([outputs[0], *outputs[2:]]) == alone
            failed = outputs[1]
            assert failed.outputs[0].finish_reason == "error" and message in str(failed.error)
            assert failed.outputs[0].token_ids == [] and failed.finished
            assert [output.error for output in outputs if output is not failed] == [None] * 3
        with pytest.raises(RequestError, match=re.escape(message)):
            llm.generate(PROMPTS[0], bad, spec)
        with pytest.raises(RequestError, match=re.escape(message)):
            list(llm.stream(PROMPTS[0], bad, spec))
        assert idle(llm)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@same_tokens
def test_a_processor_that_fails_midway(spec: SpecConfig, temperature: float) -> None:
    """The tokens before are those of plain decoding, wherever in an accepted path it fails."""
    llm = two_ssms()
    (whole,) = llm.generate(PROMPTS[0], sampled(temperature=temperature), "off")
    for count in (0, 1, 2, 5):

        def late(ids: Tensor, scores: Tensor, count: int = count) -> Tensor:
            if ids.shape[1] >= 9 + count:
                raise RuntimeError("late")
            return scores

        bad = sampled(temperature=temperature, logits_processors=[late], logprobs=0)
        failed, other = llm.generate([PROMPTS[0], PROMPTS[0]], [bad, COMPANY[0]], spec)
        assert failed.outputs[0].token_ids == whole.outputs[0].token_ids[:count]
        assert len(failed.outputs[0].logprobs or []) == count
        assert "logits processor late failed: RuntimeError: late" in str(failed.error)
        assert other.outputs[0].token_ids == company_alone()[0]
    assert idle(llm)


def test_a_processor_that_would_fail_past_a_stop_string() -> None:
    """Beyond the end nothing is asked of it that counts."""
    llm = speaking_llm()
    (whole,) = llm.generate("def f(x):", sampled(30), "off")
    prompt_tokens = len(whole.prompt_token_ids)
    (stopped,) = llm.generate("def f(x):", sampled(30, stop="e"), "off")
    most = prompt_tokens + len(stopped.outputs[0].token_ids)

    def late(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] >= most:
            raise RuntimeError("late")
        return scores

    for spec in ("off", *SAME.values()):
        (output,) = llm.generate("def f(x):", sampled(30, stop="e", logits_processors=[late]), spec)
        assert output.error is None and output.outputs == stopped.outputs


def test_one_of_several_outputs_fails() -> None:
    """The others are as without it."""
    llm = two_ssms()
    (whole,) = llm.generate(PROMPTS[0], sampled(n=4), "off")
    unlucky = whole.outputs[2].token_ids[:5]
    assert not any(c.token_ids[:5] == unlucky for c in whole.outputs if c.index != 2)

    def picky(ids: Tensor, scores: Tensor) -> Tensor:
        if ids[0, 9:14].tolist() == unlucky:
            raise ValueError("not this one")
        return scores

    for spec in ("off", TREE):
        (output,) = llm.generate(PROMPTS[0], sampled(n=4, logits_processors=[picky]), spec)
        assert [c.finish_reason for c in output.outputs] == ["length", "length", "error", "length"]
        assert [c.token_ids for c in output.outputs if c.index != 2] == [
            c.token_ids for c in whole.outputs if c.index != 2
        ]
        assert output.outputs[2].token_ids == unlucky and "not this one" in str(output.error)
        with pytest.raises(RequestError, match="not this one"):
            list(llm.stream(PROMPTS[0], sampled(n=4, logits_processors=[picky]), spec))
        assert idle(llm)


def test_bad_words_may_leave_nothing() -> None:
    llm = speaking_llm()
    token = llm.get_tokenizer().encode("(")[0]
    params = sampled(bad_words=["("])
    assert llm.generate("def f", params, TREE)[0].error is None
    for spec in ("off", TREE, REJECTION, TRAVERSAL):
        # A processor comes after bad_words, so it gives back what they took, and adds nothing to what it left out.
        def keep_only(ids: Tensor, scores: Tensor) -> Tensor:
            return scores + only(token)(ids, scores)

        bad = sampled(bad_words=["("], logits_processors=[keep_only])
        good, failed = llm.generate(["def f", "def f"], [params, bad], spec)
        assert good.error is None and "no token is left at position" in str(failed.error)
        (forced,) = llm.generate("def f", sampled(logits_processors=[keep_only]), spec)
        assert forced.outputs[0].token_ids == [token] * LENGTH


POISON = 511


@functools.cache
def poisoned_llm() -> LLM:
    """One embedding of its target is NaN."""
    llm = open_llm(tiny()[0], tiny()[1][:1], max_num_seqs=4)
    with torch.inference_mode():
        llm.engine.runner.target.embed[POISON] = math.nan
    return llm


FORBID = {POISON: -200.0}


@pytest.mark.parametrize("where", ["prompt", "root"])
@every_rule
def test_a_model_with_nan(where: str, spec: SpecConfig | str) -> None:
    llm = poisoned_llm()
    good = random_prompts((9, 40, 1), vocab=POISON)
    params = [sampled(logit_bias=FORBID), sampled(top_k=4, logit_bias=FORBID), sampled(top_p=0.9, logit_bias=FORBID)]
    alone = [tokens_of(llm.generate(p, one, spec))[0] for p, one in zip(good, params, strict=True)]
    bad = [*good[0], POISON, *([5] * 30 if where == "prompt" else [])]
    for options in ({"top_k": 5}, {"n": 2}, {"logits_processors": [say_hush], "logprobs": 1}):
        with checked(llm):
            outputs = llm.generate([good[0], bad, *good[1:]], [params[0], sampled(**options), *params[1:]], spec)
        failed = outputs.pop(1)
        assert {c.finish_reason for c in failed.outputs} == {"error"} and not any(tokens_of([failed]))
        assert f"the target computed NaN or infinity at position {len(bad) - 1}" in str(failed.error)
        if isinstance(spec, str) or not spec.is_adaptive:
            assert tokens_of(outputs) == alone
        assert idle(llm)
    for pool in llm.engine.cache.pools:
        assert pool[:, :, 1:].isfinite().all()


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"temperature": 0.0,
                                     "repetition_penalty": 1.1}], ids=str)  # fmt: skip
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_logit_that_is_not_finite(value: float, options: dict[str, Any]) -> None:
    """A row of the head: no hidden state is touched, and no truncation may drop it silently."""
    llm, prompts = two_ssms(), PROMPTS[:3]
    params = sampled(**options)
    alone = tokens_of(llm.generate(prompts, params, "off"))

    def change(request: Request, tree: TokenTree, logits: Tensor) -> None:
        if request.prompt_token_ids == prompts[1]:
            late = torch.from_numpy(request.num_generated + tree.depths >= 6)
            logits[late, 300] = value

    rules = ["off", *SAME.values()] + ([REJECTION, TRAVERSAL] if params.temperature else [])
    for spec in rules:
        with altered_logits(llm, change), checked(llm):
            outputs = llm.generate(prompts, params, spec)
        assert f"the target computed NaN or infinity at position {len(prompts[1]) + 5}" in str(outputs[1].error)
        assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
        if spec not in (REJECTION, TRAVERSAL):
            assert tokens_of(outputs) == [alone[0], alone[1][:6], alone[2]]
        assert idle(llm)
