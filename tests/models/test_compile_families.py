"""Every family through the compiled pass: the eager pass's results, and for trees the bits of plain decoding."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.exactness import assert_exact, run
from tests.helpers.families import CASES, TYPICAL, VOCAB, WINDOW, Case, make_model
from tests.helpers.models import OracleDrafter, greedy, make_draft, new_folder, open_llm, random_prompts
from tests.helpers.quantized_checkpoints import needs_compiler
from tests.models.test_families import LENGTH, a_tree, ours, theirs
from treespec import SpecConfig
from treespec_kernels.tuning.testing import assert_close

pytestmark = [needs_compiler, pytest.mark.slow]
ODD = ("mistral, a window of one position", "qwen3, biases, windows by layer", "gpt_neox, one after the other")
SPECS = (SpecConfig(nodes=20, max_depth=6), SpecConfig(nodes=40, max_depth=4, sources=("ssm",)), SpecConfig())


def fitting(case: Case) -> dict[str, Any]:
    """Sizes in multiples of 16, odd otherwise, in place of a case's own."""
    if case.model_type == "gpt2":
        return {"n_embd": 64, "n_inner": 80}
    if case.model_type == "opt":
        return {"hidden_size": 64, "ffn_dim": 80, "word_embed_proj_dim": 64}
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 80}
    derived = case.model_type in ("phi3", "gpt_neox")  # heads are as wide as the rotations that their cases name
    return sizes if derived else sizes | {"head_dim": 32 if case.config.get("head_dim") else 16}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_states_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", CASES[name], 3, **fitting(CASES[name]))
    (tokens,) = random_prompts((LENGTH + 1,), vocab=VOCAB)
    tree = a_tree(tokens[LENGTH], 24, 5)
    found, expected = ours(folder, tokens, tree, compiled=True), theirs(folder, tokens, tree)
    assert_close(found.logits, expected.logits, max_error=2e-3, rms_error=1e-4)
    assert_close(found.states, expected.states, max_error=2e-3, rms_error=1e-4)


@functools.cache
def model_of(name: str) -> tuple[Path, Path]:
    """A model in bfloat16, and a noisy copy of it."""
    root = new_folder("compiled family")
    folder = make_model(root / "target", CASES[name], 3, torch.bfloat16, **fitting(CASES[name]))
    return folder, make_draft(root / "ssm", folder, 1, 0.05)


@pytest.mark.parametrize("name", [*TYPICAL, *ODD])
def test_trees_give_the_bits_of_plain_decoding(name: str) -> None:
    """Contexts within windows and beyond them, trees deeper than the narrowest; the self-test proves it too."""
    folder, draft = model_of(name)
    prompts = random_prompts((3, WINDOW - 2, 62, 127), vocab=VOCAB)
    oracle = OracleDrafter([], 6, vocab=VOCAB)
    llm = open_llm(folder, [draft, oracle], max_num_seqs=3, compile=True, prove=True)
    plain = run(llm, prompts, greedy(16), "off")
    oracle.truths = [list(each) for each in plain.sequences]
    for spec in SPECS:
        assert assert_exact(llm, plain, spec).acceptance_length > 1.1


@pytest.mark.parametrize("name", ["gemma3", "gpt_neox"])
def test_quantised_weights(name: str) -> None:
    folder, draft = model_of(name)
    prompts = random_prompts((9, 62), vocab=VOCAB)
    llm = open_llm(folder, [draft], compile=True, prove=True, quantization="int8")
    assert_exact(llm, run(llm, prompts, greedy(12), "off"), SPECS[1])


@pytest.mark.parametrize("compiled", [False, True])
def test_drafts_of_other_families(compiled: bool) -> None:
    """Heads of several sizes, windows and learned positions in one engine: a library for each size of head."""
    drafts = [model_of(name)[0] for name in ("gpt2", "gemma3", "gpt_neox")]
    llm = open_llm(model_of("phi3")[0], drafts, compile=compiled, prove=compiled)
    assert {model.linear == "compiled" for model in llm.engine.sources.ssms.models} == {compiled}
    prompts = random_prompts((5, 70), vocab=VOCAB)
    spec = SpecConfig(branching=(3, 1, 1), sources=("ssm",))
    tree = assert_exact(llm, run(llm, prompts, greedy(12), "off"), spec)
    assert all(output.metrics.nodes_verified > 12 for output in tree.outputs)
