"""SamplingParams(prompt_logprobs=...): what the target said to each token of a prompt."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import treespec.engine.runner
from tests.helpers.architectures import open_adapter_llm, saved
from tests.helpers.calls import calls_of
from tests.helpers.families import MAX_LEN, TYPICAL, make_model
from tests.helpers.models import VOCAB, exact_in, greedy, new_folder, open_llm, quick, random_prompts, tiny, tiny_llm
from tests.helpers.quantized_checkpoints import needs_compiler
from tests.helpers.sharing import assert_clean
from tests.helpers.speech import checked, speaking_llm
from treespec import LLM, RequestOutput, SpecConfig
from treespec.errors import RequestError
from treespec.sampling.logprobs import Logprob

LENGTHS = (1, 2, 9, 62, 65, 130)
TREE = SpecConfig(nodes=16, max_depth=5)
STATIC = SpecConfig(branching=(2, 1))  # its SSMs read a prompt at once
Positions = list[list[tuple[int, Logprob]]]


def in_order(positions: Sequence[dict[int, Logprob] | None] | None) -> Positions:
    """Positions as lists: the order of their tokens counts, and every bit of their numbers."""
    return [list(each.items()) for each in positions or () if each is not None]


def of_prompt(output: RequestOutput) -> Positions:
    """An output's `prompt_logprobs`, an entry for each token but the first, the token's own before all others."""
    found = output.prompt_logprobs
    assert found is not None and found[0] is None and None not in found[1:]
    positions = in_order(found)
    assert [next(iter(each))[0] for each in positions] == output.prompt_token_ids[1:]
    return positions


def gemma2(dtype: torch.dtype, compile: bool) -> LLM:
    folder = make_model(new_folder("gemma2"), TYPICAL["gemma2"], 3, dtype, intermediate_size=96)
    return open_llm(folder, compile=compile, max_model_len=MAX_LEN)


ENGINES: dict[str, Callable[[], LLM]] = {
    "float32": lambda: tiny_llm(compile=False),
    "bfloat16": lambda: tiny_llm(torch.bfloat16, (0, 1), compile=False),
    "fixed rows": lambda: tiny_llm(ssms=(0,), linear="torch"),
    "gemma2": lambda: gemma2(torch.float32, False),
    "adapter, bfloat16": lambda: open_adapter_llm(saved("cohere2", torch.bfloat16)[1]),
}
COMPILED: dict[str, Callable[[], LLM]] = {
    "compiled": lambda: tiny_llm(),
    "compiled gemma2": lambda: gemma2(torch.bfloat16, True),
    "int8": lambda: tiny_llm(torch.bfloat16, (), quantization="int8", compile=False),
    "compiled int4": lambda: tiny_llm(torch.float32, (), quantization="int4"),
}


@pytest.mark.parametrize(
    "name",
    quick(ENGINES, ("float32",)) + [pytest.param(name, marks=[needs_compiler, pytest.mark.slow]) for name in COMPILED],
)
def test_they_are_what_decoding_says_of_the_same_tokens(name: str) -> None:
    """In every bit, over the borders of tiles and windows, from trees as from plain decoding."""
    llm = (ENGINES | COMPILED)[name]()
    prompts = random_prompts((1, 5, 58, 100), vocab=llm.engine.runner.target.vocab_size)
    for spec in ("off", TREE):
        decoded = llm.generate(prompts, greedy(16, logprobs=3), spec)
        texts = [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in decoded]
        scored = llm.generate(texts, greedy(1, prompt_logprobs=3), spec)
        for one, other in zip(decoded, scored, strict=True):
            assert of_prompt(other)[-16:] == in_order(one.outputs[0].logprobs)
    assert_clean(llm)


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=needs_compiler)], ids=["eager", "compiled"])
@exact_in
def test_chunks_company_and_drafts_change_nothing(dtype: torch.dtype, compile: bool) -> None:
    target, drafts = tiny(dtype)
    prompts, params = random_prompts(LENGTHS), greedy(3, prompt_logprobs=4)
    alone = [of_prompt(tiny_llm(dtype, (), compile=compile).generate(prompt, params)[0]) for prompt in prompts]
    assert [len(positions) for positions in alone] == [length - 1 for length in LENGTHS]
    for chunk, count in ((1, 3), (7, 6), (64, 6), (512, 6)):
        llm = open_llm(target, drafts[:1], compile=compile, max_num_batched_tokens=chunk, max_num_seqs=4)
        mixed = [greedy(9, logprobs=1), params, greedy(3, temperature=2.0, top_k=4)]
        company = [params if i < count else mixed[i % 3] for i in range(2 * count)]
        with checked(llm):
            outputs = llm.generate([*prompts[:count], *prompts[:count][::-1]], company, STATIC if chunk == 7 else TREE)
        assert [of_prompt(output) for output in outputs[:count]] == alone[:count]
        given = [output.prompt_logprobs is None for output in outputs]
        assert given == [one.prompt_logprobs is None for one in company]


def test_as_many_as_asked_for() -> None:
    llm, prompt = tiny_llm(), random_prompts((6,))[0]
    none, own, some, every = (llm.generate(prompt, greedy(2, prompt_logprobs=count))[0] for count in (None, 0, 2, -1))
    assert none.prompt_logprobs is None
    assert [len(found) for found in of_prompt(own)] == [1] * 5
    for one, few, many in zip(of_prompt(own), of_prompt(some), of_prompt(every), strict=True):
        assert one == few[:1] == many[:1] and len(few) in (2, 3)
        assert sorted(token for token, _ in many) == list(range(VOCAB)) and set(few) <= set(many)
    assert math.isclose(sum(math.exp(each.logprob) for _, each in of_prompt(every)[0]), 1.0, abs_tol=1e-4)
    (short,) = llm.generate([7], greedy(2, prompt_logprobs=1))
    assert short.prompt_logprobs == [None] and short.outputs[0].token_ids
    with pytest.raises(RequestError, match=f"prompt_logprobs={VOCAB + 1}; the vocabulary has {VOCAB} tokens"):
        llm.generate(prompt, greedy(2, prompt_logprobs=VOCAB + 1))


def test_who_does_not_ask_does_not_pay() -> None:
    """Prompt rows are scored for the requests that ask, in blocks, and once for all samples."""
    llm, prompts = tiny_llm(ssms=(), max_num_batched_tokens=100), random_prompts((150, 80))
    asks = greedy(4, prompt_logprobs=1, n=3, temperature=1.0, seed=1)
    with calls_of(treespec.engine.runner, "logprobs_of") as scored:
        three, _ = llm.generate(prompts, [asks, greedy(2)])
    # 50 rows of the first step, then 71 and 28: half of a step's 100 rows go to the shorter prompt while it has some.
    assert [len(rows) for _, rows, *_ in scored] == [50, 64, 7, 28]
    assert of_prompt(three) == of_prompt(llm.generate(prompts[0], greedy(1, prompt_logprobs=1))[0])


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("spec", [STATIC, TREE, "off"], ids=["static", "tree", "off"])
def test_infinity_in_a_prompt_ends_its_request_alone(spec: SpecConfig | str, n: int) -> None:
    """Where only the logits of a position are not finite, decoding goes well, and the request has no answer yet."""
    llm = tiny_llm(ssms=(0,), max_num_seqs=4, max_num_batched_tokens=50)
    prompts = random_prompts((70, 40, 90))
    params = [greedy(6, temperature=1.0, seed=1, n=n, prompt_logprobs=count) for count in (1, 2, None)]
    alone = llm.generate(prompts, params, spec)

    def spoil(calls: list[Any]) -> None:
        request, hidden, _ = calls[-1]
        if request.prompt_token_ids == prompts[0] and request.context_len <= 60 < request.context_len + len(hidden):
            hidden[60 - request.context_len] = math.inf

    with checked(llm), calls_of(llm.engine.runner, "score_prompt", spoil):
        bad, *good = llm.generate(prompts, params, spec)
    assert {each.finish_reason for each in bad.outputs} == {"error"} and bad.prompt_logprobs is None
    assert bad.metrics.target_passes == 0 and not any(each.token_ids for each in bad.outputs)
    assert "NaN or infinity at position 60" in str(bad.error)
    assert [one.outputs for one in good] == [one.outputs for one in alone[1:]]
    assert of_prompt(good[0]) == of_prompt(alone[1])
    assert_clean(llm)


def test_in_a_stream_and_with_texts() -> None:
    llm, text = speaking_llm(), "def add(a, b):"
    decode = llm.get_tokenizer().decode
    (output,) = llm.generate(text, greedy(3, prompt_logprobs=2, logprobs=2))
    positions = [*of_prompt(output), *in_order(output.outputs[0].logprobs)]
    assert all(each.decoded_token == decode([token]) for found in positions for token, each in found)
    last = [*llm.stream(text, greedy(3, prompt_logprobs=2, logprobs=2))][-1].output
    assert last is not None and of_prompt(last) == of_prompt(output)
    (silent,) = llm.generate(text, greedy(3, prompt_logprobs=2, logprobs=2, detokenize=False))
    positions = [*of_prompt(silent), *in_order(silent.outputs[0].logprobs)]
    assert {each.decoded_token for found in positions for _, each in found} == {None}
