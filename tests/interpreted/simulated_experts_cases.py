"""Mixtures of experts on a simulated GPU."""

from tests.helpers.families import TYPICAL, WINDOW, make_model, small
from tests.helpers.models import greedy, new_folder, open_llm, random_prompts, tokens_of
from tests.interpreted.engines import ON_GPU, leave, rounds_wait_for_nothing
from tests.simulated_gpu import Gpu
from treespec import SpecConfig


def test_rounds_of_experts(gpu: Gpu) -> None:
    """No program of a launch leans on one before it."""
    root, heads = new_folder("experts"), {"num_attention_heads": 2, "num_key_value_heads": 1}
    target, draft = (
        make_model(root / name, TYPICAL[name], 3, **small(name), **heads) for name in ("gpt_oss", "qwen2_moe")
    )
    prompts, spec = random_prompts([WINDOW + 2], vocab=61), SpecConfig(nodes=4, max_depth=1, sources=("ssm",))
    llm = open_llm(target, [draft], spec=spec, max_num_seqs=1, **ON_GPU | {"dtype": "float32"})
    with rounds_wait_for_nothing(gpu):
        plain = tokens_of(llm.generate(prompts, greedy(3), spec="off"))
        gpu.launches.backwards = True
        [trees] = llm.generate(prompts, greedy(3), spec=spec)
    assert tokens_of([trees]) == plain and trees.metrics.nodes_verified > trees.metrics.target_passes
    assert not llm.engine.runner.target.kernels.spreads.any()
    llm.engine.check_integrity()
    leave(gpu)
