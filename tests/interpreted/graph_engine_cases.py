"""The engine whose rounds run on the device from end to end."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.models import greedy, make_draft, make_llama, new_folder, open_llm, reduce_vocabulary, tokens_of
from tests.interpreted.engines import LONG, PROMPTS, SHORT, TREES, TRITON, captured_rounds, trees_as_plain
from treespec import LLM, SpecConfig
from treespec.graphs.capture import MAX_DEPTH
from treespec.graphs.graph_executor import GraphExecutor
from treespec.graphs.round_inputs import RoundInput
from treespec.graphs.verify_stage import RoundResult, VerifyStage
from treespec.startup.selftest import differing_rounds


@pytest.fixture(scope="module")
def folders() -> tuple[Path, list[Path]]:
    root = new_folder("graphs")
    target = make_llama(root / "target", 0, **LONG)
    return target, [make_draft(root / f"ssm-{i}", target, i, noise) for i, noise in ((1, 0.04), (2, 0.1))]


@pytest.fixture(scope="module")
def llm(folders: tuple[Path, list[Path]]) -> LLM:
    spec = SpecConfig(max_depth=2, sources=("ssm", "lookup", "suffix"))
    return open_llm(*folders, spec=spec, max_num_seqs=2, max_model_len=128, suffix_tokens=256, **TRITON)


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, list[Path]]) -> list[list[int]]:
    """What the CPU's decoder writes behind `PROMPTS` and the second of `SHORT`, whose first are the same."""
    cpu = open_llm(folders[0], attention="cpu-packed", max_num_seqs=2)
    return tokens_of(cpu.generate([*PROMPTS, SHORT[1]], greedy(5)))


def test_trees_give_the_tokens_of_plain_decoding(llm: LLM, expected: list[list[int]]) -> None:
    trees = trees_as_plain(llm, PROMPTS, greedy(5), TREES)
    assert tokens_of(trees) == expected[:2]
    assert all(output.metrics.acceptance_length > 1.2 for output in trees)
    sampled = trees_as_plain(llm, SHORT, greedy(5, temperature=0.9, seed=3), TREES)
    assert tokens_of(sampled) != expected[::2]


def test_drafts_with_a_reduced_vocabulary(folders: tuple[Path, list[Path]], expected: list[list[int]]) -> None:
    target, drafts = folders
    own = [np.array([*range(first, 64, 2), *range(1 - first, 32, 2)]) for first in (0, 1)]
    own = [np.concatenate([np.sort(ids), [-1]]) for ids in own]
    reduced = [reduce_vocabulary(new_folder("reduced"), draft, ids, 64) for draft, ids in zip(drafts, own, strict=True)]
    spec = SpecConfig(nodes=8, max_depth=2, sources=("ssm",))
    llm = open_llm(target, reduced, spec=spec, max_num_seqs=2, **TRITON)
    with captured_rounds():
        trees = llm.generate(SHORT, greedy(5), spec=spec)
    assert tokens_of(trees) == expected[::2]
    assert sum(output.metrics.target_passes for output in trees) < 10


def test_what_was_written_before_is_guessed(llm: LLM) -> None:
    """Behind the same prompts again: seeds without SSMs, and beside them."""
    llm.reset_suffix_cache()
    plain = llm.generate(SHORT, greedy(3), spec="off")
    assert llm.stats()["suffix_tokens"] == sum(map(len, SHORT)) + 2 * 3
    for sources in (("suffix",), ("ssm", "suffix")):
        with captured_rounds():
            [trees] = llm.generate(SHORT[1:], greedy(3), spec=SpecConfig(nodes=8, max_depth=2, sources=sources))
        assert trees.outputs[0].token_ids == tokens_of(plain)[1]
        assert trees.metrics.target_passes == 1 and trees.metrics.accepted_by_source["suffix"] == 2
        assert sources != ("suffix",) or trees.metrics.accepted_only_by_source == {"suffix": 2}
    llm.engine.check_integrity()


def test_the_proof_at_start(llm: LLM) -> None:
    """A walk with another token is found. The engine learns nothing, and asks no drafters from outside."""
    results = VerifyStage.results

    def spoilt(stage: VerifyStage, requests: Sequence[RoundInput], nodes: int, *kind: bool) -> list[RoundResult]:
        found = results(stage, requests, nodes, *kind)
        wrong = nodes > 1 and requests[0].temperature > 0
        return [each._replace(tokens=[*each.tokens[:-1], (each.tokens[-1] + wrong) % 64]) for each in found]

    engine = llm.engine
    assert isinstance(engine.captured, GraphExecutor) and engine.sources.others
    rounds = engine.captured.rounds
    learned = engine.host.planner, rounds.planners, engine.sources.others, engine.stats
    before, failing = pickle.dumps(learned), mock.Mock(propose=mock.Mock(side_effect=KeyError("no such prompt")))
    engine.sources.others.insert(0, failing)
    with torch.inference_mode(), mock.patch.object(VerifyStage, "results", spoilt):
        found = differing_rounds(engine.host, engine.scheduler, rounds, max_tokens=2, lengths=(18, 3))
    engine.sources.others.remove(failing)
    assert found == [f"trees of 16 nodes at temperature 0.8 for {count} of 2 requests" for count in (1, 2)]
    engine.check_integrity()
    assert engine.scheduler.is_idle and pickle.dumps(learned) == before


def test_prompt_logprobs_are_what_decoding_says_of_the_same_tokens(llm: LLM) -> None:
    """In every bit; captured rounds serve who asks for them, as they come from prefill."""
    decoded = llm.generate(SHORT, greedy(4, logprobs=2), spec="off")
    texts = [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in decoded]
    with captured_rounds():
        scored = llm.generate(texts, greedy(1, prompt_logprobs=2), spec="off")
    for one, other in zip(decoded, scored, strict=True):
        assert other.prompt_logprobs is not None and len(other.prompt_logprobs) == len(other.prompt_token_ids)
        assert other.prompt_logprobs[-4:] == one.outputs[0].logprobs


@pytest.mark.parametrize("options", [TRITON, {"attention": "triton"}], ids=["vendor products", "decoder of the CPU"])
def test_passes_that_need_not_be_exact(
    folders: tuple[Path, list[Path]], expected: list[list[int]], options: dict[str, Any]
) -> None:
    """Close enough to give a model without ties the same tokens; without the self-test, which takes a minute here."""
    llm = open_llm(folders[0], folders[1][:1], spec=TREES, max_num_seqs=2, **(options | {"exact": False}))
    trees = llm.generate(SHORT, greedy(5), spec=TREES)
    assert tokens_of(trees) == expected[::2]
    assert all(output.metrics.acceptance_length > 1.2 for output in trees)
    llm.engine.check_integrity()


def test_the_deepest_round(folders: tuple[Path, list[Path]]) -> None:
    """A draft that is always right, and sure of it: one round brings a token of each of its levels, and one more."""
    root = new_folder("sure")
    target = make_draft(root / "target", folders[0], 0, 0.0)
    tensors = load_file(target / "model.safetensors")
    save_file(tensors | {"lm_head.weight": 60 * tensors["lm_head.weight"]}, target / "model.safetensors")
    drafts = [make_draft(root / "ssm", target, 1, 0.0)]
    spec = SpecConfig(nodes=16, sources=("ssm",))
    llm = open_llm(target, drafts, spec=spec, max_num_seqs=1, **TRITON)
    [deep] = llm.generate(PROMPTS[:1], greedy(MAX_DEPTH + 1))
    cpu = open_llm(target, attention="cpu-packed", max_num_seqs=1).generate(PROMPTS[:1], greedy(MAX_DEPTH + 1))
    assert tokens_of([deep]) == tokens_of(cpu)
    assert deep.metrics.target_passes == 1
    llm.engine.check_integrity()
