"""Quantised models on the Triton kernels, in the interpreter: run by tests/test_quantized_exactness.py."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.models import greedy, make_draft, make_llama, new_folder, open_llm, random_prompts
from tests.quantized import quantize_folder
from treespec import SpecConfig
from treespec.rounds.batch import BatchRound
from treespec_kernels.quantized import QuantizedWeight

torch.set_num_threads(1)
PROMPTS = random_prompts([3, 62], vocab=64)
SMALL = {"num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}


@pytest.fixture(scope="module")
def folders() -> tuple[Path, list[Path]]:
    """A target, and two drafts of its shape that are stored quantised, so that they are stacked."""
    root = new_folder("quantised-graphs")
    target = make_llama(root / "target", 0, **SMALL)
    drafts = [make_draft(root / f"ssm-{i}", target, i, noise) for i, noise in ((1, 0.04), (2, 0.1))]
    return target, [quantize_folder(draft, 8, None) for draft in drafts]


def test_trees_give_the_tokens_of_plain_decoding(folders: tuple[Path, list[Path]]) -> None:
    quantization = "int4"
    with mock.patch("treespec.build._prove"):  # the self-test takes minutes in the interpreter
        llm = open_llm(
            *folders, spec=SpecConfig(max_depth=2, sources=("ssm",)), attention="triton", linear="triton",
            max_num_seqs=2, quantization=quantization,
        )  # fmt: skip
    assert isinstance(llm.engine.runner.target.weights.layers[0].qkv, QuantizedWeight)
    assert [model.quantization for model in llm.engine.ssms.models] == ["int8", "int8"]
    with mock.patch.object(BatchRound, "run", autospec=True, side_effect=BatchRound.run) as run:
        trees = llm.generate(PROMPTS, greedy(6), spec=SpecConfig(nodes=8, max_depth=2))
    assert run.call_count, "no round was captured"
    plain = llm.generate(PROMPTS, greedy(6), spec="off")
    cpu = open_llm(folders[0], quantization=quantization, max_num_seqs=2).generate(PROMPTS, greedy(6))
    tokens = [[output.outputs[0].token_ids for output in outputs] for outputs in (trees, plain, cpu)]
    assert tokens[0] == tokens[1] == tokens[2]
    assert all(output.metrics.acceptance_length > 1.3 for output in trees)
    llm.engine.check_integrity()
