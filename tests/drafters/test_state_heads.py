"""Medusa and MLPSpeculator heads: their distributions, and what does not fit; test_heads.py runs all kinds."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.helpers import commands
from tests.helpers.drafting import EXECUTORS, assert_probabilities, drafted_rounds, make_target, target_states
from tests.helpers.heads_made import TargetShape
from tests.helpers.models import edit_config, new_folder, open_llm, quick
from tests.helpers.state_heads_made import reference_medusa, reference_speculator, write_medusa, write_speculator
from treespec import RoundRecord
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
    first, second = commands.run("weights", "inspect", target_of(), *options, "--json").document["drafts"]
    reads = "reads the target's output states and predicts 3 tokens; proposes"
    assert first["connection"] == f"Medusa head, {reads} 96 of 256 tokens"
    assert second["connection"] == f"MLPSpeculator head, {reads} 256 of 256 tokens"
    assert first["usable"] and first["parameters"] == 3 * (64 * 64 + 96 * 64)
