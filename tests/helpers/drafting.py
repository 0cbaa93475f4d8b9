"""Engines with published heads: their targets, the executors that tests run them on, and what they must draft."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.heads_made import TargetShape
from tests.helpers.models import greedy, make_llama, new_folder, open_llm, random_prompts
from tests.helpers.quantized_checkpoints import needs_compiler
from treespec import RoundRecord, SpecConfig
from treespec.drawing.recording import watch

EXECUTORS: dict[str, dict[str, Any]] = {
    "eager": {"compile": False},
    "compiled": {"compile": True},
    "transformers": {"backend": "transformers", "prove": True},
}
every_executor = pytest.mark.parametrize(
    "executor",
    [
        pytest.param(options, marks=needs_compiler if name == "compiled" else pytest.mark.slow, id=name)
        for name, options in EXECUTORS.items()
    ],
)


def make_target(shape: TargetShape, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """A random Llama of this shape; `config` overrides it."""
    sizes = {name: getattr(shape, name) for name in vars(shape)} | {"head_dim": shape.head_dim}
    return make_llama(new_folder("target"), 3, dtype, faint_after=0, **(sizes | config))


def drafted_rounds(
    target: Path, draft: Path, vocab: int, executor: dict[str, Any], tokens: int = 24, **tree: int
) -> list[RoundRecord]:
    """Rounds behind a prompt that was read in chunks; lookup makes them accept tokens."""
    llm = open_llm(target, [draft], max_num_batched_tokens=24, draft_quantization=None, **executor)
    spec = SpecConfig(**({"nodes": 16, "max_depth": 4} | tree), sources=("ssm", "lookup"))
    with watch(llm.engine) as records:
        llm.generate(random_prompts((61,), vocab=vocab), greedy(tokens), spec=spec)
    return records


@torch.inference_mode()
def target_states(model: Any, records: Iterable[RoundRecord]) -> dict[int, list[torch.Tensor]]:
    """By the numbers of rounds: the hidden states of transformers' model over their contexts, [length, hidden] each."""
    passes = ((r.number, model(torch.tensor([r.context]), output_hidden_states=True)) for r in records)
    return {number: [layer[0] for layer in of_round.hidden_states] for number, of_round in passes}


@torch.inference_mode()
def assert_probabilities(
    records: Sequence[RoundRecord],
    draft: str,
    ids: Iterable[int],
    logits_of: Callable[[RoundRecord, list[int]], torch.Tensor],
) -> None:
    """At every node that a draft alone proposed, the probability is that of a reference.

    `logits_of` gives its logits over the draft's vocabulary, `ids`, behind a round's root and some drafted tokens.
    """
    rows, checked = {token: row for row, token in enumerate(ids)}, 0
    for record in records:
        tree, expected = record.tree, dict[int, torch.Tensor]()  # by the parent
        for node, parent in enumerate(tree.parents.tolist()):
            if tree.sources_of(node) != (draft,):
                continue
            tokens = tree.tokens[tree.path_to(node)[1:]].tolist()
            if parent not in expected:
                expected[parent] = torch.softmax(logits_of(record, tokens[:-1]), -1)
            probability = float(expected[parent][rows[tokens[-1]]])
            assert tree.probs[node] == pytest.approx(probability, abs=1e-5), (record.number, tokens)
            checked += 1
    assert checked > 40 and len({record.accepted for record in records}) > 1
