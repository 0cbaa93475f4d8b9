"""Medusa and MLPSpeculator heads: their distributions, and the tokens of plain decoding with them in the tree."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.drafting import (
    EXECUTORS,
    assert_probabilities,
    assert_samples_of_plain_decoding,
    drafted_rounds,
    make_target,
    target_states,
)
from tests.exactness import assert_exact, run
from tests.heads_made import TargetShape
from tests.models import edit_config, exact_in, greedy, make_draft, new_folder, open_llm, quick, random_prompts
from tests.state_heads_made import (
    reference_medusa,
    reference_speculator,
    write_medusa,
    write_speculator,
)
from treespec import LLM, RoundRecord, SamplingParams, SpecConfig
from treespec.cli import app
from treespec_weights import CheckpointError

SHAPE = TargetShape(num_hidden_layers=3)
HEADS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "medusa, authors": (write_medusa, {"layout": "authors"}),
    "medusa, tgi": (write_medusa, {"layout": "tgi", "layers": 2}),
    "medusa, vllm": (write_medusa, {"layout": "vllm", "mapped": 96, "bias": False}),
    "medusa, one vocabulary head": (write_medusa, {"layout": "vllm", "shared": True}),
    "speculator": (write_speculator, {"tied": False, "scaled": False, "inner": 64}),
    "speculator, tied and scaled": (write_speculator, {"tied": True, "scaled": True}),
}


def target_of(dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    return make_target(SHAPE, dtype, **config)


def make_head(name: str, seed: int = 1) -> Path:
    write, options = HEADS[name]
    write(folder := new_folder("head"), SHAPE, seed=seed, **options)
    return folder


@pytest.mark.slow
@EXECUTORS
@pytest.mark.parametrize("name", quick(HEADS, ("medusa, vllm", "speculator")))
def test_probabilities_are_those_of_the_reference(name: str, executor: dict[str, Any]) -> None:
    """At every drafted node, over several rounds."""
    target, head = target_of(), make_head(name)
    records = drafted_rounds(target, head, SHAPE.vocab_size, executor, tokens=40, nodes=40, max_depth=5)
    states = target_states(AutoModelForCausalLM.from_pretrained(target), records)

    def expected(record: RoundRecord, drafted: list[int]) -> torch.Tensor:
        state = states[record.number][-1][-1]  # after the final norm
        if name.startswith("medusa"):
            return reference_medusa(head, state, len(drafted) + 1)
        return reference_speculator(head, state, [int(record.tree.tokens[0]), *drafted])

    assert_probabilities(records, head.name, range(SHAPE.vocab_size), expected)


@EXECUTORS
@exact_in
def test_trees_give_the_bits_of_plain_decoding(dtype: torch.dtype, executor: dict[str, Any]) -> None:
    """Deeper than the heads predict; with prompts of one token too, before which there is no hidden state to read."""
    target = target_of(dtype)
    drafts = [make_draft(new_folder("ssm"), target, 1, 0.05), make_head("medusa, vllm"), make_head("speculator")]
    llm = open_llm(target, drafts, max_num_seqs=3, prefill_chunk=40, **({"prove": True} | executor))
    plain = run(llm, random_prompts((1, 2, 61, 90), vocab=SHAPE.vocab_size), greedy(20))
    for spec in (SpecConfig(nodes=24, max_depth=6), SpecConfig(branching=(3, 2, 1, 1, 1), max_ssms=2), SpecConfig()):
        assert assert_exact(llm, plain, spec).acceptance_length > 1.2
    alone = SpecConfig(nodes=16, max_depth=8, sources=(drafts[1].name, drafts[2].name))
    tree = assert_exact(llm, plain, alone)
    assert sum(output.metrics.nodes_verified - output.metrics.target_passes for output in tree.outputs) > 0


def sampling_engine() -> LLM:
    target = target_of()
    drafts = [make_draft(new_folder("ssm"), target, 1, 0.05), make_head("medusa, vllm"), make_head("speculator")]
    return open_llm(target, drafts, max_num_seqs=4)


@pytest.mark.slow
def test_sampled_tokens_are_those_of_plain_decoding() -> None:
    prompts = random_prompts((30, 64), vocab=SHAPE.vocab_size)
    assert_samples_of_plain_decoding(sampling_engine(), prompts, SpecConfig(nodes=16, max_depth=5))


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["rejection", "traversal"])
def test_draws_of_heads_are_verified(verification: Any) -> None:
    llm, prompts = sampling_engine(), random_prompts((30, 64), vocab=SHAPE.vocab_size)
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=2, n=2, ignore_eos=True)
    tree = llm.generate(prompts, params, spec=SpecConfig(nodes=16, max_depth=5, verification=verification))
    assert all(len(each.token_ids) == 16 for output in tree for each in output.outputs)
    llm.engine.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("medusa, authors", {"medusa_num_heads": 0}, "'medusa_num_heads': 0; expected an int, at least 1"),
        ("medusa, authors", {"medusa_num_heads": 4}, "'lm_heads.3.weight': expected a tensor of shape [256, 64]"),
        ("medusa, vllm", {"num_hidden_layers": None}, "'num_hidden_layers': None; expected an int"),
        ("speculator", {"n_predict": 4}, "'emb.3.weight': expected a tensor of shape [256, 64]"),
        ("speculator", {"inner_dim": 32}, "'emb.0.weight': [256, 64], expected [256, 32]"),
    ],
)
def test_a_config_that_does_not_fit(name: str, changes: dict[str, Any], message: str) -> None:
    edit_config(head := make_head(name), **changes)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        open_llm(target_of(), [head])


@pytest.mark.slow
def test_heads_of_another_target() -> None:
    write_medusa(head := new_folder("head"), TargetShape(hidden_size=32), layout="tgi")
    with pytest.raises(CheckpointError, match=re.escape("[32, 32], expected [64, 64]")):
        open_llm(target_of(), [head])
    tensors = load_file((mapped := make_head("medusa, vllm")) / "model.safetensors")
    save_file(tensors | {"token_map": tensors["token_map"] + 200}, mapped / "model.safetensors")
    with pytest.raises(CheckpointError, match="96 tokens; expected distinct ones of the target's 256, ascending"):
        open_llm(target_of(), [mapped])


@pytest.mark.slow
def test_inspect_describes_them() -> None:
    options = [option for name in ("medusa, vllm", "speculator") for option in ("--draft", str(make_head(name)))]
    result = CliRunner().invoke(app, ["weights", "inspect", str(target_of()), *options, "--json"])
    first, second = json.loads(result.stdout)["drafts"]
    reads = "reads the target's output states and predicts 3 tokens; proposes"
    assert first["connection"] == f"Medusa head, {reads} 96 of 256 tokens"
    assert second["connection"] == f"MLPSpeculator head, {reads} 256 of 256 tokens"
    assert first["usable"] and first["parameters"] == 3 * (64 * 64 + 96 * 64)
