"""Hybrid models on the Triton kernels: their captured rounds against passes step by step, and the CPU's tokens."""

import functools
import math
from typing import Any

import pytest
import torch

from tests.helpers.calls import calls_of
from tests.helpers.families import CASES, make_model, small
from tests.helpers.models import (
    OracleDrafter,
    Poisoner,
    drafting_by,
    greedy,
    new_folder,
    open_llm,
    random_prompts,
    tokens_of,
    tree_of,
)
from tests.interpreted.engines import TRITON, captured_rounds, launched_ahead, step_by_step, told
from treespec import LLM, SpecConfig
from treespec.engine.host_executor import HostExecutor
from treespec.errors import ConfigError
from treespec.models import state_pass
from treespec.tree import TokenTree
from treespec_kernels.tree.growth_limits import MAX_EXPANDED

TREES = SpecConfig(nodes=8, max_depth=3)
VOCAB, POISON = 61, 60
PROMPTS = random_prompts([20, 3, 7], vocab=POISON)
PARAMS = [greedy(7), greedy(5), greedy(5, temperature=0.9, seed=3)]


@functools.cache
def opened(name: str, **options: Any) -> tuple[LLM, list[list[int]]]:
    """An engine for two requests with prompts in two chunks and an oracle, and the tokens of the CPU's decoder."""
    target = make_model(new_folder("hybrid"), CASES[name], 3, **small(name, vocab=VOCAB))
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 128, "spec": TREES} | options
    cpu = open_llm(target, attention="cpu-packed", **options)
    plain = tokens_of(cpu.generate(PROMPTS, PARAMS, spec="off"))
    oracle = OracleDrafter([p + t for p, t in zip(PROMPTS, plain, strict=True)], 3, vocab=POISON)
    return open_llm(target, [oracle], **options, **TRITON), plain


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "mamba2"])
def test_trees_give_the_bits_of_plain_decoding(name: str) -> None:
    """Log-probabilities show every bit of the logits. The third request joins when another one has left."""
    llm, plain = opened(name)
    shown = [params.clone() for params in PARAMS]
    for params in shown:
        params.logprobs = 2
    with step_by_step(llm):
        expected = told(llm, PROMPTS, shown, "off")
    with captured_rounds():
        trees = llm.generate(PROMPTS, shown, spec=TREES)
        assert told(llm, PROMPTS, shown, "off") == expected
    assert [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in trees] == expected
    assert plain == [tokens for tokens, _ in expected]
    assert all(output.metrics.acceptance_length > 1.5 for output in trees)
    llm.engine.check_integrity()


def test_states_take_what_trees_need() -> None:
    """Inputs of the largest tree, fewer than the drafts' slots; and one scratch memory for all rounds."""
    llm, _ = opened("qwen3_5")
    states = llm.engine.cache.states
    assert states is not None and states.tensors.inputs.shape[2] == states.tensors.history + MAX_EXPANDED
    with calls_of(state_pass, "state_update_triton") as updates:
        llm.generate(PROMPTS[:1], PARAMS[0], spec=TREES)
        llm.generate(PROMPTS, PARAMS, spec="off")
        with step_by_step(llm):
            llm.generate(PROMPTS[:1], PARAMS[0], spec=TREES)
    assert len({arguments[-1].data_ptr() for arguments in updates}) == 1
    with pytest.raises(ConfigError, match="keeps 64 slots"):
        llm.generate(PROMPTS[:1], PARAMS[0], spec=SpecConfig(nodes=MAX_EXPANDED + 1))


def test_rounds_launched_ahead() -> None:
    """Their states move on even if the next round is another one, after a stop that no launch could foresee."""
    llm, plain = opened("qwen3_5")
    stops = [PARAMS[0], PARAMS[1].clone()]
    stops[1].stop_token_ids = plain[1][2:3]
    expected = [plain[0], plain[1][: plain[1].index(plain[1][2]) + 1]]
    with captured_rounds(), launched_ahead():
        for spec in ("off", TREES):
            assert tokens_of(llm.generate(PROMPTS[:2], stops, spec=spec)) == expected
    llm.engine.check_integrity()


def test_a_round_that_is_dropped_leaves_the_states() -> None:
    """A drafted token whose logits are NaN; the request's root is computed again, step by step."""
    llm, plain = opened("qwen3_5")
    source, *_ = llm.engine.sources.others
    embed = llm.engine.runner.target.embed
    before = embed[POISON].clone()
    with (
        calls_of(HostExecutor, "forward") as by_steps,
        drafting_by(llm, Poisoner(POISON, source.drafter.truths, 3, vocab=POISON)),
        torch.inference_mode(),
    ):
        embed[POISON] = math.nan
        trees = llm.generate(PROMPTS, PARAMS, spec=TREES)
        embed[POISON] = before
    assert tokens_of(trees) == plain and all(output.metrics.acceptance_length > 1 for output in trees)
    assert by_steps
    llm.engine.check_integrity()


def test_a_deeper_path_than_a_captured_round_replays() -> None:
    """It is accepted step by step, after a round that was dropped; captured rounds go on after the next pass."""
    llm, _ = opened("qwen3_5")
    [prompt], params = PROMPTS[:1], greedy(16)
    with step_by_step(llm):
        [plain] = tokens_of(llm.generate([prompt], params, spec="off"))
    embed = llm.engine.runner.target.embed
    before = embed[POISON].clone()
    trees = [tree_of(prompt[-1], {(POISON,): 0.9})]

    class OncePoisoned(OracleDrafter):
        def tree(self, tokens: list[int], max_depth: int) -> TokenTree:
            return trees.pop() if trees else super().tree(tokens, max_depth)

    with drafting_by(llm, OncePoisoned([prompt + plain], 7, 0, vocab=POISON)), torch.inference_mode():
        embed[POISON] = math.nan
        [output] = llm.generate([prompt], params, spec=SpecConfig(nodes=8, max_depth=7))
        embed[POISON] = before
    assert tokens_of([output]) == [plain]
    llm.engine.check_integrity()


def test_preempted_requests_and_cached_prefixes() -> None:
    """One of two requests is computed again, and then once more behind its first page."""
    first, _ = opened("qwen3_5")
    cache, prompts, params = first.engine.cache, random_prompts([98, 98], vocab=POISON), greedy(12)
    size = 7 * cache.nbytes // (cache.num_pages + 1)
    options = {"kv_cache_memory_bytes": size, "enable_prefix_caching": True, "max_num_batched_tokens": 256}
    llm, _ = opened("qwen3_5", **options)
    with step_by_step(first):
        plain = tokens_of(first.generate(prompts, params, spec="off"))
    oracle = OracleDrafter([p + t for p, t in zip(prompts, plain, strict=True)], 3, vocab=POISON)
    with captured_rounds(), drafting_by(llm, oracle):
        trees = llm.generate(prompts, params, spec=TREES)
        [again] = llm.generate(prompts[1:], params, spec=TREES)
    assert tokens_of(trees) == plain and llm.stats()["num_preemptions"] == 1
    assert tokens_of([again]) == plain[1:] and again.metrics.cached_tokens == 64
    llm.engine.check_integrity()
