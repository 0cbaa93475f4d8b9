"""Engines with published heads: their targets, the executors that tests run them on, and what their samples must be."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.heads_made import TargetShape
from tests.models import make_llama, new_folder
from tests.quantized_checkpoints import needs_compiler
from treespec import LLM, SamplingParams, SpecConfig

EXECUTORS = pytest.mark.parametrize(
    "executor",
    [
        {"compile": False},
        pytest.param({"compile": True}, marks=needs_compiler),
        pytest.param({"backend": "transformers", "prove": True}, marks=pytest.mark.slow),
    ],
    ids=["eager", "compiled", "transformers"],
)


def make_target(shape: TargetShape, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """A random Llama of this shape; `config` overrides it."""
    sizes = {name: getattr(shape, name) for name in vars(shape)} | {"head_dim": shape.head_dim}
    return make_llama(new_folder("target"), 3, dtype, faint_after=0, **(sizes | config))


def assert_samples_of_plain_decoding(llm: LLM, prompts: Sequence[list[int]], spec: SpecConfig) -> None:
    """Two samples of each prompt, which share its pages, with a seed of its own."""
    seeds = range(1, len(prompts) + 1)
    params = [SamplingParams(max_tokens=16, temperature=0.8, seed=seed, n=2, ignore_eos=True) for seed in seeds]
    plain, tree = (llm.generate(list(prompts), params, spec=each) for each in ("off", spec))
    assert [[each.token_ids for each in output.outputs] for output in tree] == [
        [each.token_ids for each in output.outputs] for output in plain
    ]
    llm.engine.check_integrity()
