"""Recurrent layers in the engine: no batch, chunk, preemption or sample changes a token or a bit."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.calls import calls_of
from tests.helpers.families import CASES, HYBRIDS, fitting, make_model
from tests.helpers.models import (
    VOCAB,
    OracleDrafter,
    assert_same_tree,
    greedy,
    make_draft,
    new_folder,
    open_llm,
    quick,
    random_prompts,
    replace_drafters,
    tokens_of,
)
from tests.helpers.mtp_made import make_predictor
from tests.helpers.quantized_checkpoints import needs_compiler
from tests.helpers.sharing import assert_as_alone, assert_clean, random_requests, run_at_random_times
from treespec import LLM, RequestOutput, SamplingParams, SpecConfig
from treespec.drafters.ssm.ssm_drafter import SsmDrafter
from treespec.drawing.recording import watch
from treespec.errors import ModelError

LENGTH = 256
CROWDED = [("qwen3_5", True), ("lfm2", False), ("qwen3_next", True), ("granite_hybrid", True)]
CROWDED += [("nemotron_h", True), ("mamba2", True), ("falcon_h1", True), ("qwen3_5, mtp", True)]
COMPILED = [pytest.param(False, id="eager"), pytest.param(True, marks=needs_compiler)]


@functools.cache
def hybrid(name: str, compiled: bool = False) -> Path:
    if name.endswith(", mtp"):
        return make_predictor(name.partition(",")[0], compiled, predicts=True)
    sizes = fitting(CASES[name]) if compiled else {}
    return make_model(new_folder("hybrid") / "model", CASES[name], 3, torch.float32, vocab_size=VOCAB, **sizes)


@functools.cache
def draft_of(name: str, compiled: bool = False, noise: float = 0.1) -> Path | str:
    if name.endswith(", mtp"):  # a draft head, which reads the states that are kept beside those of the layers
        return "mtp"
    return make_draft(new_folder("draft") / "draft", hybrid(name, compiled), 1, noise)


def crowded(name: str, compiled: bool, num_pages: int, drafts: Sequence[Path | str] = (), **options: Any) -> LLM:
    """An engine with so many pages."""
    llm = open_llm(hybrid(name, compiled), drafts, max_model_len=LENGTH, compile=compiled, max_num_seqs=1)
    size = max(num_pages * llm.engine.cache.nbytes // (llm.engine.cache.num_pages + 1), num_pages)
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "scheduling_policy": "priority"}
    defaults |= {"max_model_len": LENGTH, "compile": compiled, "kv_cache_memory_bytes": size}
    return open_llm(hybrid(name, compiled), drafts, **(defaults | options))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("name, caching", CROWDED)
def test_random_interleavings_give_what_requests_alone_give(name: str, caching: bool, compiled: bool) -> None:
    """Several samples of a prompt, chunks of prompts, preemptions and aborts, with trees from an oracle and a draft."""
    llm = crowded(name, compiled, 7, [draft_of(name, compiled)], enable_prefix_caching=caching)
    asked = random_requests(0, 4, (100,), 30, (60, 80), priorities=3)
    plain = open_llm(hybrid(name, compiled), max_model_len=LENGTH, compile=compiled)
    outputs = [(prompt, plain.generate([prompt], params, "off")) for prompt, params, *_ in asked]
    replace_drafters(llm, OracleDrafter([p + t for p, out in outputs for t in tokens_of(out)], 3))

    def run() -> list[dict[int, RequestOutput]]:
        return [run_at_random_times(llm, asked, 0, aborts=0.003)]

    assert_as_alone(plain, llm, asked, run)
    stats = llm.stats()
    assert stats["num_preemptions"] > 0 and stats["acceptance_length"] > 1.5
    assert stats["accepted_by_source"]["mtp" if "mtp" in name else "draft"] > 10


def test_samples_continue_from_the_state_after_the_prompt() -> None:
    """They do not compute it again, even those that are admitted when the first one has gone on."""
    llm = open_llm(hybrid(HYBRIDS[0]), max_num_seqs=2)
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=9, ignore_eos=True)
    (prompt,) = random_prompts((70,))
    (alone,) = llm.generate([prompt], params, "off")
    params.n = 4
    (together,) = llm.generate([prompt], params)
    assert together.metrics.prefill_passes == 1 and together.outputs[0].token_ids == alone.outputs[0].token_ids
    assert len({tuple(one.token_ids) for one in together.outputs}) == 4
    assert_clean(llm)


def test_drafts_read_the_prompt_of_samples_once() -> None:
    """Or again for each of them, if the copy of the state after it has made room for others."""
    llm = open_llm(hybrid("lfm2"), [draft_of("lfm2")], max_num_seqs=4)
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=6, ignore_eos=True, n=3)
    (prompt,), spec = random_prompts((20,)), SpecConfig(branching=(3, 1, 1), sources=("ssm",))
    (pool,) = llm.engine.sources.ssms.state_pools.values()
    (plain,) = llm.generate([prompt], params, "off")
    accepted = []
    for num_reads in (1, 3):
        with (
            calls_of(SsmDrafter, "read") as reads,
            mock.patch.object(pool, "find", pool.find if num_reads == 1 else lambda key: None),
        ):
            (output,) = llm.generate([prompt], params, spec)
        assert tokens_of([output]) == tokens_of([plain])
        assert sum(len(requests) for _, _, requests, *_ in reads) == num_reads
        accepted.append(output.metrics.accepted_by_source)
    assert accepted[0] == accepted[1] and accepted[0]["draft"] > 2
    assert_clean(llm)
    pool.reserve("a leak")
    with pytest.raises(AssertionError, match=r"hold.*a leak"):
        llm.engine.check_integrity()


def test_cached_prefixes_begin_with_a_kept_state() -> None:
    """States are kept at the end of a prompt's last page; the least recently used one makes room."""
    llm = open_llm(hybrid(HYBRIDS[0]), enable_prefix_caching=True, max_num_seqs=2)
    states, prompts = llm.engine.cache.states, random_prompts((150, 70, 70, 70, 70), seed=4)
    assert states is not None and llm.stats()["memory"]["recurrent_states"] == states.nbytes > 0

    def cached(prompt: list[int]) -> int:
        (output,), (plain,) = (llm.generate([prompt], greedy(4), spec) for spec in (None, "off"))
        assert tokens_of([output]) == tokens_of([plain])
        return output.metrics.cached_tokens

    assert cached(prompts[0]) == 0
    assert cached(prompts[0] + prompts[1]) == 128, "the end of the page before the prompt's end"
    assert [cached(prompt) for prompt in prompts[1:]] == [0] * 4
    assert cached(prompts[0]) == 0 and cached(prompts[4]) == 64
    assert_clean(llm)


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("name", quick(HYBRIDS, {"lfm2"}))
def test_drafts_continue_from_the_accepted_path(name: str, compiled: bool) -> None:
    """Every tree of a batch is that of a request that begins there, though trees are accepted in parts."""
    llm = open_llm(hybrid(name, compiled), [draft_of(name, compiled)], compile=compiled, max_num_seqs=2)
    prompts, spec = random_prompts((3, 33)), SpecConfig(branching=(3, 2, 1, 1), sources=("ssm",))
    with watch(llm.engine) as rounds:
        together = llm.generate(prompts, greedy(16), spec)
    assert tokens_of(together) == tokens_of(llm.generate(prompts, greedy(16), "off"))
    lengths = {len(one.path) for one in rounds}
    assert len(lengths) > 2 and any(one.path[-1] >= len(one.path) for one in rounds)
    for one in rounds[::5]:
        with watch(llm.engine) as again:
            llm.generate([[*one.context, one.tree.tokens[0]]], greedy(6), spec)
        if one.tree.depths.max() == 4:  # not cut by the end of the output
            assert_same_tree(one.tree, again[0].tree)


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("name", quick(HYBRIDS, {"granite_hybrid"}))
def test_drafts_equal_to_their_target_are_accepted(name: str, compiled: bool) -> None:
    """To the full depth, in every round; random draws too, which verification by rejection accepts if it can."""
    llm = open_llm(hybrid(name, compiled), [draft_of(name, compiled, 0.0)], compile=compiled, max_num_seqs=3)
    sampled = SamplingParams(temperature=1.0, seed=1, max_tokens=31, ignore_eos=True)
    for params, rule in ((greedy(31), "coupled"), (sampled, "rejection")):
        spec = SpecConfig(branching=(2, 1, 1, 1), sources=("ssm",), verification=rule)
        with watch(llm.engine) as rounds:
            llm.generate(random_prompts((20, 3, 33)), params, spec)
        assert len(rounds) == 3 * 7 and all(len(one.path) == 1 + one.tree.depths.max() for one in rounds)
    states, (pool,) = llm.engine.cache.states, llm.engine.sources.ssms.state_pools.values()
    assert llm.stats()["memory"]["recurrent_states"] == states.nbytes + pool.nbytes
    assert_clean(llm)


def test_hybrids_are_no_drafts_on_gpus() -> None:
    folder = hybrid(HYBRIDS[0])
    with pytest.raises(ModelError, match=r"2 of 3 layers are recurrent.*no draft"):
        open_llm(folder, [folder], attention="triton")
