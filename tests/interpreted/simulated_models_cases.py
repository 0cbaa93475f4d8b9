"""Mixtures of experts, adapters of requests, and hybrid models, on a simulated GPU."""

import pytest
import torch

from tests.drafters.test_assistants import assistant_of, target_of
from tests.helpers.families import TYPICAL, WINDOW, make_model, small
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
from tests.interpreted.engines import (
    ON_GPU,
    SHORT,
    SMALL,
    TREES,
    launched_ahead,
    leave,
    rounds_wait_for_nothing,
    step_by_step,
    told,
)
from tests.simulated_gpu import Gpu
from treespec import SpecConfig


@pytest.mark.parametrize("names", [("gpt_oss", "qwen2_moe"), ("gemma4", "gemma4, experts")], ids=str)
def test_rounds_of_experts(gpu: Gpu, names: tuple[str, str]) -> None:
    """And of layers of unequal sizes, with the bits of rounds step by step. No program of a launch leans on one before
    it."""
    root, heads = new_folder("experts"), {"num_attention_heads": 2, "num_key_value_heads": 1}
    target, draft = (make_model(root / name, TYPICAL[name], 3, **small(name), **heads) for name in names)
    prompts, spec = random_prompts([WINDOW + 2], vocab=61), SpecConfig(nodes=4, max_depth=1, sources=("ssm",))
    llm = open_llm(target, [draft], spec=spec, max_num_seqs=1, **ON_GPU | {"dtype": "float32"})
    params = greedy(3, logprobs=2)
    with rounds_wait_for_nothing(gpu):
        plain = told(llm, prompts, params, "off")
        gpu.launches.backwards = True
        [trees] = llm.generate(prompts, params, spec=spec)
    with step_by_step(llm):
        assert told(llm, prompts, params, spec) == plain
    assert [(trees.outputs[0].token_ids, trees.outputs[0].logprobs)] == plain
    assert trees.metrics.nodes_verified > trees.metrics.target_passes
    assert not llm.engine.runner.target.kernels.spreads.any()
    llm.engine.check_integrity()
    leave(gpu)


def test_rounds_of_adapters(gpu: Gpu) -> None:
    """Also target passes of the host's rounds, and more adapters than slots."""
    root = new_folder("loras")
    target = make_llama(root / "target", 0, torch.float16, **SMALL)
    drafts = [make_draft(root / "ssm", target, 1, 0.04)]
    loras = [lora_request(make_lora(root / str(i), target, i, dtype=torch.float16)) for i in (1, 2, 3)]
    llm = open_llm(target, drafts, enable_lora=True, max_loras=2, spec=TREES, max_num_seqs=2, **ON_GPU)
    asked, prompts = [loras[0], None, loras[1], loras[2]], [SHORT[0]] * 4
    with rounds_wait_for_nothing(gpu):
        plain = tokens_of(llm.generate(prompts, greedy(3), spec="off", lora_request=asked))
        trees = llm.generate(prompts, greedy(3), spec=TREES, lora_request=asked)
    assert tokens_of(trees) == plain and len({tuple(tokens) for tokens in plain}) > 2
    replays = gpu.replays
    for _ in range(2):
        host = llm.generate(prompts, greedy(3), spec=SpecConfig(branching=(2, 1)), lora_request=asked)
        assert tokens_of(host) == plain
    assert gpu.replays > replays
    llm.engine.check_integrity()
    leave(gpu)


def test_assistants(gpu: Gpu) -> None:
    """They read the target's K/V on the GPU, and their rounds run step by step."""
    target, assistant = target_of(torch.float16), assistant_of("groups", torch.float16)
    [prompt], spec = random_prompts([5], vocab=61), SpecConfig(nodes=4, max_depth=2, sources=("ssm",))
    llm = open_llm(target, [assistant], spec=spec, max_num_seqs=1, **ON_GPU)
    assert llm.stats()["frozen"]["rounds"] == "step by step"
    [trees] = llm.generate([prompt], greedy(3))
    assert tokens_of([trees]) == tokens_of(llm.generate([prompt], greedy(3), spec="off"))
    assert trees.metrics.nodes_verified > trees.metrics.target_passes
    llm.engine.check_integrity()
    leave(gpu)


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_rounds_of_hybrids(name: str, gpu: Gpu) -> None:
    """Rounds with an SSM are launched ahead; also target passes of the host's rounds. No program leans on one before
    it."""
    root = new_folder("hybrid")
    target = make_model(root / "target", TYPICAL[name], 3, torch.float16, **small(name))
    draft = make_llama(root / "ssm", 9, torch.float16, **SMALL | {"vocab_size": 61})
    [prompt], options = random_prompts([5], vocab=61), {"spec": TREES, "max_num_seqs": 1, "enable_prefix_caching": True}
    [plain] = tokens_of(open_llm(target, spec="off", max_num_seqs=1, **ON_GPU).generate([prompt], greedy(6)))
    llm = open_llm(target, [draft, OracleDrafter([prompt + plain], 3, vocab=61)], **options, **ON_GPU)
    assert llm.stats()["frozen"]["rounds"] == "on the device"
    with rounds_wait_for_nothing(gpu), launched_ahead():
        assert tokens_of(llm.generate([prompt], greedy(6), spec="off")) == [plain]
        gpu.launches.backwards = True
        [trees] = llm.generate([prompt], greedy(6), spec=TREES)
    assert tokens_of([trees]) == [plain] and trees.metrics.acceptance_length > 1.5
    replays = gpu.replays
    for _ in range(2):
        [host] = llm.generate([prompt], greedy(6), spec=SpecConfig(branching=(2, 1)))
        assert tokens_of([host]) == [plain] and host.metrics.acceptance_length > 1
    assert gpu.replays > replays
    llm.engine.check_integrity()
    leave(gpu)
