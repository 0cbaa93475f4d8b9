"""Sampled output is that of plain decoding with the same seed, bit for bit, whatever is drafted and how."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.exactness import Run, assert_exact, run
from tests.helpers.models import (
    OracleDrafter,
    exact_in,
    open_llm,
    quick,
    random_prompts,
    replace_drafters,
    tiny,
    tiny_llm,
)
from treespec import LLM, SamplingParams, SpecConfig

SUBSETS = quick([(0,), (0, 1, 2)], [(0, 1, 2)])
LENGTHS = (1, 9, 31, 50, 58, 62, 63, 64, 65, 90, 126, 5)  # 12 requests for 8 slots; outputs cross positions 64 and 128
TOKENS = 10
SHAPES: dict[str, dict[str, Any]] = {
    "16": {"nodes": 16},
    "40": {"nodes": 40, "max_depth": 4},
    "auto": {},
    "static 3-2-1": {"branching": (3, 2, 1)},
    "star": {"branching": (12,)},
    "naive": {"nodes": 5, "verification": "naive"},
}


class Words:
    """A tokenizer whose token 12 is "t12"."""

    def encode(self, text: str) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(f"t{token}" for token in ids)


WORDS = Words()


def no_echo(ids: Tensor, scores: Tensor) -> Tensor:
    """A processor that looks at the whole past: no token that stands an odd number of places back."""
    return scores.index_fill(1, ids[0].flip(0)[:16:2], -torch.inf)


SETTINGS: dict[str, dict[str, Any]] = {
    "0.7": {"temperature": 0.7},
    "1.0": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "top_k, min_p": {"temperature": 1.3, "top_k": 20, "min_p": 0.02},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.9},
    "bias, bad words, processors": {
        "temperature": 1.0,
        "logit_bias": {0: 8.0, 3: 4.0, 77: 7.0},
        "min_tokens": 4,
        "ignore_eos": False,
        "stop_token_ids": [77],
        "bad_words": ["t3", "t5 t9", "t77 t3"],
        "logits_processors": [no_echo],
    },
}


def mixed(settings: Sequence[dict[str, Any]] = tuple(SETTINGS.values())) -> list[SamplingParams]:
    """One for each of `LENGTHS`: settings in turn, seeds of their own."""
    base = {"max_tokens": TOKENS, "ignore_eos": True}
    return [SamplingParams(**(base | {"seed": 100 + i} | settings[i % len(settings)])) for i in range(len(LENGTHS))]


@functools.cache
def plain_run(dtype: torch.dtype) -> Run:
    """Of an engine without drafts."""
    return run(tiny_llm(dtype, (), tokenizer=WORDS), random_prompts(LENGTHS), mixed())


@exact_in
@pytest.mark.parametrize("ssms", SUBSETS)
def test_trees_give_the_tokens_of_plain_decoding(dtype: torch.dtype, ssms: tuple[int, ...]) -> None:
    plain, llm = plain_run(dtype), tiny_llm(dtype, ssms, tokenizer=WORDS)
    for name in SHAPES if len(ssms) == 3 else ("16", "static 3-2-1", "naive"):
        tree = assert_exact(llm, plain, SpecConfig(**SHAPES[name]), mixed())
        assert tree.acceptance_length > 1.2, f"{name}: {tree.acceptance_length}"


def test_the_settings_do_something() -> None:
    """Every one of them gives other tokens than the temperature alone would, and the last one ends requests."""
    plain, bare = plain_run(torch.float32), [{"temperature": own["temperature"]} for own in SETTINGS.values()]
    without = run(tiny_llm(torch.float32, (), tokenizer=WORDS), plain.prompts, mixed(bare)).tokens
    for i, (name, own) in enumerate(SETTINGS.items()):
        assert (plain.tokens[i :: len(bare)] == without[i :: len(bare)]) == (len(own) == 1), name
    assert {output.outputs[0].finish_reason for output in plain.outputs} == {"stop", "length"}
    assert len({tuple(tokens) for tokens in plain.tokens}) == len(LENGTHS)


@functools.cache
def oracle_llm(dtype: torch.dtype) -> LLM:
    return open_llm(tiny(dtype)[0], [OracleDrafter([], 1)], tokenizer=WORDS)


@exact_in
@pytest.mark.parametrize("verification", quick(("coupled", "naive"), ("coupled",)))
def test_an_oracle_loses_nothing(dtype: torch.dtype, verification: str) -> None:
    """Who foretells the sampled tokens is believed to the last one, wrong siblings and all."""
    plain, llm = plain_run(dtype), oracle_llm(dtype)
    for depth, wrong, bushy in ((1, 3, True), (5, 0, False), (8, 2, True)):
        oracle = OracleDrafter(plain.sequences, depth, wrong=wrong, bushy=bushy)
        replace_drafters(llm, oracle)
        spec = SpecConfig(nodes=64, max_depth=8, verification=verification)
        tree = assert_exact(llm, plain, spec, mixed())
        for output in tree.outputs:
            assert output.metrics.target_passes == -(-len(output.outputs[0].token_ids) // (depth + 1))


@pytest.mark.slow
def test_drafts_know_the_targets_noise() -> None:
    """Passes emit 3.3 tokens on average; with drafts that do not know it they would emit 2.0."""
    prompts = random_prompts((9, 40, 63, 64))
    each = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.2, seed=seed) for seed in range(4)]
    trees = run(tiny_llm(tokenizer=WORDS), prompts, each, SpecConfig(nodes=12, max_depth=4))
    assert trees.acceptance_length > 2.7
