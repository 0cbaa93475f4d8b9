"""Hybrid models on the Triton kernels, whose rounds run step by step."""

from typing import Any

import pytest

from tests.helpers.families import TYPICAL, make_model, small
from tests.helpers.models import OracleDrafter, greedy, new_folder, open_llm, random_prompts, tokens_of
from tests.interpreted.engines import TRITON
from treespec import SpecConfig


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_trees_give_the_tokens_of_plain_decoding(name: str) -> None:
    """Behind a prompt in two chunks; tokens are those of the CPU's decoder."""
    target, prompts = (
        make_model(new_folder("hybrid"), TYPICAL[name], 3, **small(name)),
        random_prompts([20, 3], vocab=61),
    )
    options: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
    plain = tokens_of(open_llm(target, attention="cpu-packed", **options).generate(prompts, greedy(6), spec="off"))
    oracle = OracleDrafter([p + t for p, t in zip(prompts, plain, strict=True)], 3, vocab=61)
    llm = open_llm(target, [oracle], **options, **TRITON)
    trees = llm.generate(prompts, greedy(6), spec=SpecConfig(nodes=8, max_depth=3))
    assert tokens_of(trees) == plain == tokens_of(llm.generate(prompts, greedy(6), spec="off"))
    assert all(output.metrics.acceptance_length > 1.5 for output in trees)
    assert llm.engine.captured is None
    llm.engine.check_integrity()
