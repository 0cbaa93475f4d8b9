"""LoRA adapters of requests on the Triton kernels."""

from typing import Any

import pytest
import torch

from tests.helpers.families import TYPICAL, make_model, small
from tests.helpers.loras import lora_request, make_lora
from tests.helpers.models import (
    OracleDrafter,
    greedy,
    make_draft,
    make_llama,
    new_folder,
    open_llm,
    random_prompts,
    tokens_of,
)
from tests.interpreted.engines import PROMPTS, SHORT, SMALL, TREES, TRITON, captured_rounds, told
from treespec import LLM, LoRARequest, SpecConfig


def test_adapters_of_a_batch_change_no_bits_of_one_another() -> None:
    """Nor of requests without one, which have those of an engine without adapters; more of them than slots."""
    root = new_folder("loras")
    target = make_llama(root / "target", 0, **SMALL)
    drafts = [make_draft(root / "ssm", target, 1, 0.04)]
    whole = lora_request(make_lora(root / "whole", target, 1))
    few = lora_request(make_lora(root / "few", target, 2, r".*(v|o|down)_proj", r=40))
    third = lora_request(make_lora(root / "third", target, 3))
    prompts, loras = [PROMPTS[1], *SHORT, SHORT[0]], [whole, None, few, third]
    options = {"spec": TREES, "max_num_seqs": 3, **TRITON}
    llm = open_llm(target, drafts, enable_lora=True, max_loras=2, **options)
    alone = [said(llm, [prompt], [lora])[0] for prompt, lora in zip(prompts, loras, strict=True)]
    assert alone[1] == said(open_llm(target, **options), prompts[1:2], [None])[0]
    assert alone[1] != alone[3]
    assert said(llm, prompts, loras) == alone
    with captured_rounds():
        trees = llm.generate(prompts, greedy(4), spec=TREES, lora_request=loras)
    assert tokens_of(trees) == [tokens for tokens, _ in alone]
    assert sum(output.metrics.acceptance_length for output in trees) > 4
    cpu = open_llm(target, attention="cpu-packed", enable_lora=True, max_num_seqs=4)
    assert tokens_of(cpu.generate(prompts, greedy(4), lora_request=loras)) == [tokens for tokens, _ in alone]
    llm.engine.check_integrity()


@pytest.mark.parametrize("name", ["gpt_neox", "gemma4", "gemma4, experts", "qwen3_5_moe", "lfm2", "granite_hybrid"])
def test_other_families(name: str) -> None:
    """Products without a gate, parallel attention and MLP, shared experts, unequal layers, and recurrent ones."""
    root = new_folder("families")
    target = make_model(root / "target", TYPICAL[name], 3, **small(name))
    lora, (prompt,) = lora_request(make_lora(root / "lora", target, 7)), random_prompts([9], vocab=61)
    llm = open_llm(target, enable_lora=True, max_num_seqs=1, **TRITON)
    cpu = open_llm(target, attention="cpu-packed", enable_lora=True, max_num_seqs=1)
    found, expected = ([values(said(each, [prompt], [one])) for one in (lora, None)] for each in (llm, cpu))
    for (tokens, logprobs), (of_cpu, near) in zip(found, expected, strict=True):
        assert tokens == of_cpu and (logprobs - near).abs().max() < 1e-3
    assert (found[0][1] - found[1][1]).abs().max() > 0.01


@pytest.mark.parametrize("name", ["qwen3_5_moe", "lfm2"])
def test_adapters_of_hybrids(name: str) -> None:
    """Several in captured rounds, whose trees have the tokens and log-probabilities of each request alone."""
    root, prompts = new_folder("hybrids"), random_prompts([20, 3, 7], vocab=60)
    target = make_model(root / "target", TYPICAL[name], 3, **small(name))
    first, second = (lora_request(make_lora(root / str(seed), target, seed)) for seed in (1, 2))
    loras, options = [first, None, second], {"enable_lora": True, "max_loras": 2, "max_num_seqs": 3}
    cpu = open_llm(target, attention="cpu-packed", **options)
    plain = tokens_of(cpu.generate(prompts, greedy(4), spec="off", lora_request=loras))
    oracle = OracleDrafter([p + t for p, t in zip(prompts, plain, strict=True)], 3, vocab=60)
    llm = open_llm(target, [oracle], spec=SpecConfig(nodes=8, max_depth=3), **options, **TRITON)
    alone = [said(llm, [prompt], [lora])[0] for prompt, lora in zip(prompts, loras, strict=True)]
    with captured_rounds():
        trees = llm.generate(prompts, greedy(4, logprobs=2), lora_request=loras)
        assert said(llm, prompts, loras) == alone
    assert [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in trees] == alone
    assert plain == [tokens for tokens, _ in alone]
    assert all(output.metrics.acceptance_length > 1.1 for output in trees)
    llm.engine.check_integrity()


def values(found: list[tuple[list[int], Any]]) -> tuple[list[int], torch.Tensor]:
    """Tokens, and the log-probabilities of the likeliest, [num_tokens, 2]."""
    [(tokens, logprobs)] = found
    return tokens, torch.tensor([sorted(entry.logprob for entry in each.values())[-2:] for each in logprobs])


def said(llm: LLM, prompts: list[list[int]], loras: list[LoRARequest | None]) -> list[tuple[list[int], Any]]:
    return told(llm, prompts, greedy(4, logprobs=2), "off", lora_request=loras)
