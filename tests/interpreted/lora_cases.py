"""LoRA adapters of requests on the Triton kernels."""

import pytest

from tests.helpers.families import TYPICAL, make_model, small
from tests.helpers.loras import lora_request, make_lora
from tests.helpers.models import greedy, make_draft, make_llama, new_folder, open_llm, random_prompts, tokens_of
from tests.interpreted.engines import PROMPTS, SHORT, SMALL, TREES, TRITON, captured_rounds
from treespec import LLM, LoRARequest


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


@pytest.mark.parametrize("name", ["gpt_neox", "qwen2_moe"])
def test_other_families(name: str) -> None:
    """Products without a gate, a block whose MLP does not see its attention, and layers with experts."""
    root = new_folder("families")
    target = make_model(root / "target", TYPICAL[name], 3, **small(name))
    modules = r".*layers\.\d+\.(?!mlp\.(gate$|.*expert)).*"
    lora, (prompt,) = lora_request(make_lora(root / "lora", target, 7, modules)), random_prompts([9], vocab=61)
    llm = open_llm(target, enable_lora=True, max_num_seqs=1, **TRITON)
    cpu = open_llm(target, attention="cpu-packed", enable_lora=True, max_num_seqs=1)
    [(tokens, _)], [(others, _)] = said(llm, [prompt], [lora]), said(llm, [prompt], [None])
    assert tokens == said(cpu, [prompt], [lora])[0][0] and others == said(cpu, [prompt], [None])[0][0]
    assert tokens != others


def said(llm: LLM, prompts: list[list[int]], loras: list[LoRARequest | None]) -> list[tuple[list[int], object]]:
    """Tokens and log-probabilities, which show every bit of the logits."""
    outputs = llm.generate(prompts, greedy(4, logprobs=2), spec="off", lora_request=loras)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]
