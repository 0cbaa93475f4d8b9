"""The cases of tests/interpreted/, in processes of their own: kernels by implementation, and engines on the kernels."""

import pytest

from tests.helpers.child import run_cases

ENGINES = [  # the longest first
    "graph_engine",
    "target_pass simulated_gpu_rules",
    "sampling_rounds",
    "quantized_engine tuning",
    "families",
    "heads vocabulary",
]
KERNELS = [
    "tree_attention pass_layout",
    "ops qkv_rope rms_norm logit_transforms tree_growth tree_walk kv_commit row_topk coupled_noise",
    "row_linear lm_head",
]
OF_THE_HOST = {"ref": "tree_walk kv_commit row_topk logit_transforms qkv_rope rms_norm", "cpu": "kv_commit"}


@pytest.mark.parametrize("names", ENGINES)
def test_engines(names: str) -> None:
    run_cases(names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        "hunyuan;ministral3",
        "gemma4;gemma4, experts",
        "gpt_oss;qwen2_moe;mixtral;qwen3_moe;olmoe;glm4_moe, groups of experts;qwen3_next;lfm2_moe;granite_hybrid;"
        "nemotron_h;mamba2",
    ],
)
def test_other_families(names: str) -> None:
    """Passes, and captured rounds of the first two: their tensors, scales or rotations are used in other places."""
    run_cases("families", TREESPEC_FAMILIES=names)


@pytest.mark.slow
def test_adapters_and_hybrids() -> None:
    run_cases("lora hybrid")


@pytest.mark.parametrize("implementation", ["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("names", KERNELS)
def test_kernels(names: str, implementation: str) -> None:
    run_cases(names, implementation)


@pytest.mark.parametrize("implementation", OF_THE_HOST)
def test_implementations_of_the_host(implementation: str) -> None:
    run_cases(OF_THE_HOST[implementation], implementation)
