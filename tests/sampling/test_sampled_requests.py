"""Sampled requests through the Python API: logprobs, several outputs, seeds, company, ends."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.helpers.exactness import recorded
from tests.helpers.models import VOCAB, open_llm, tiny
from tests.helpers.sampled import (
    COMPANY,
    DRAWN,
    LENGTH,
    NAIVE,
    PROMPTS,
    REJECTION,
    SAME,
    STATIC,
    TRAVERSAL,
    TREE,
    company_alone,
    every_rule,
    quick_rule,
    sampled,
    say_hush,
    tokens_of,
    two_ssms,
)
from tests.helpers.sharing import assert_clean
from tests.helpers.speech import checked, speaking_llm
from treespec import SpecConfig
from treespec.outputs import StreamChunk

# --- logprobs


@pytest.mark.parametrize(("count", "spec"), [(0, NAIVE), (5, TREE)], ids=["chosen", "best five"])
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
                assert each.logprob == pytest.approx(float(expected[other]), abs=2e-6) and each.decoded_token is None
                assert each.rank == int((raw > raw[other]).sum()) + 1
            total += found[token].logprob
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-9)
    for output, reference in zip(llm.generate(PROMPTS, params, spec), plain, strict=True):
        assert output.outputs == reference.outputs
    bare = llm.generate(PROMPTS, replace(params, logprobs=None), spec)
    assert tokens_of(bare) == tokens_of(plain) and all(output.outputs[0].logprobs is None for output in bare)


# --- several outputs


@quick_rule
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
    assert_clean(llm)


def concatenated(chunks: Sequence[StreamChunk], n: int) -> tuple[list[list[int]], list[str]]:
    tokens: list[list[int]] = [[] for _ in range(n)]
    texts = [""] * n
    for chunk in chunks:
        tokens[chunk.index] += chunk.token_ids
        texts[chunk.index] += chunk.text or ""
    return tokens, texts


def test_outputs_end_each_by_itself() -> None:
    """Some by a stop string, some by an end token, some by length."""
    llm = speaking_llm()
    stops = list(range(30))
    params = sampled(16, n=6, temperature=1.2, stop=["e", "\n"], stop_token_ids=stops, logprobs=1)
    (plain,) = llm.generate("def f(x):", params, "off")
    assert [len(c.logprobs or []) for c in plain.outputs] == [len(c.token_ids) for c in plain.outputs]
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
    outputs = llm.generate([PROMPTS[0]] * 2, sampled(24, seed=None, n=2, temperature=2.0), spec)
    seeds = [output.metrics.seed for output in outputs]
    assert len(set(seeds)) == 2 and all(isinstance(seed, int) and 0 <= seed < 2**53 for seed in seeds)
    assert len({tuple(tokens) for tokens in tokens_of(outputs)}) == 4
    for output in outputs:
        (again,) = llm.generate(PROMPTS[0], sampled(24, seed=output.metrics.seed, n=2, temperature=2.0), spec)
        assert tokens_of([again]) == tokens_of([output]) and again.metrics.seed == output.metrics.seed


@every_rule
def test_very_cold_is_greedy(spec: SpecConfig | str) -> None:
    llm = two_ssms()
    cold = llm.generate(PROMPTS, sampled(temperature=1e-4), spec)
    assert tokens_of(cold) == tokens_of(llm.generate(PROMPTS, sampled(temperature=0.0), "off"))


# --- company


@pytest.mark.parametrize(
    "spec", ["off", SpecConfig(), TREE, NAIVE, TRAVERSAL, pytest.param(REJECTION, marks=pytest.mark.slow)]
)
def test_company_changes_no_token(spec: SpecConfig | str) -> None:
    """Each request alone, and all of them at once in another order; one whose drafts are drawn has its own chance."""
    llm = two_ssms()
    cases = [(PROMPTS[i % 4], params) for i, params in enumerate(COMPANY)]
    if spec in DRAWN.values():
        alone = tokens_of([llm.generate(prompt, params, spec)[0] for prompt, params in cases])
    else:
        alone = company_alone()
    with checked(llm):
        outputs = llm.generate(*map(list, zip(*cases[::-1], strict=True)), spec)
    assert tokens_of(outputs[::-1]) == alone


def test_all_rules_at_once() -> None:
    """Greedy, sampled, penalised, rejection and traversal requests in the same rounds, as streams that take turns."""
    llm = two_ssms()
    rules = [TREE, "off", NAIVE, REJECTION, STATIC, TRAVERSAL]
    params = [COMPANY[1], COMPANY[0], COMPANY[4], COMPANY[0], COMPANY[2], COMPANY[7]]
    cases = [
        (PROMPTS[i % 4], replace(one, max_tokens=24), rule)
        for i, (one, rule) in enumerate(zip(params, rules, strict=True))
    ]
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
    assert_clean(llm)


# --- ends


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


@pytest.mark.parametrize("spec", ["off", TREE], ids=["off", "tree"])
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
def test_allowed_tokens(spec: SpecConfig) -> None:
    llm, allowed = two_ssms(), {3, 77, 200, 201}
    for temperature in (0.0, 1.0) if spec == TREE else (1.0,):
        params = sampled(temperature=temperature, allowed_token_ids=torch.tensor([*allowed]), logit_bias={5: 100.0})
        tokens = tokens_of(llm.generate(PROMPTS, params, spec))
        assert {token for output in tokens for token in output} <= allowed
        if spec == TREE:
            assert tokens == tokens_of(llm.generate(PROMPTS, params, "off"))


def test_bad_words_of_several_tokens_across_prompt_and_tree() -> None:
    """A pair of tokens that the plain output has is never written again, though each of the two may be."""
    llm = speaking_llm()
    tokenizer, word = llm.get_tokenizer(), "option string"
    prompt, ids = tokenizer.encode("the option"), tokenizer.encode(" " + word)
    assert len(ids) > 1
    params = sampled(32, n=4, logit_bias=dict.fromkeys(ids, 60.0), temperature=3.0)
    (free,) = llm.generate(prompt, params, TREE)
    (output,) = llm.generate(prompt, replace(params, bad_words=[word]), TREE)
    spelled = [tokenizer.encode(word), ids]

    def appears(tokens: list[int]) -> bool:
        whole = prompt + tokens
        return any(whole[i : i + len(each)] == each for each in spelled for i in range(len(whole)))

    assert any(map(appears, tokens_of([free]))) and not any(map(appears, tokens_of([output])))
    assert all(set(ids) <= set(tokens) for tokens in tokens_of([output]))


def test_bad_words_that_the_model_has_no_token_for() -> None:
    """A tokenizer may know more tokens than its model: what is spelled with them is not written anyway."""

    class Wide:
        def encode(self, text: str) -> list[int]:
            return [VOCAB + 3] if text.strip() == "new" else [len(text) % VOCAB, VOCAB + 1] if " " in text else [5]

        def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
            return "".join(f"[{token}]" for token in tokens)

    llm = open_llm(tiny()[0], tiny()[1][:1], tokenizer=Wide())
    plain = llm.generate(PROMPTS[0], sampled(), "off")
    for spec in ("off", TREE):
        outputs = llm.generate(PROMPTS[0], sampled(bad_words=["new"]), spec)
        assert tokens_of(outputs) == tokens_of(plain)
    (output,) = llm.generate(PROMPTS[0], sampled(bad_words=["new", "x"], logit_bias={5: 100.0}), TREE)
    assert 5 not in output.outputs[0].token_ids
