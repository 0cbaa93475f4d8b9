"""A draft head or block draft beside a target on the Triton kernels."""

from pathlib import Path

import pytest
import torch

from tests.helpers.blocks_made import write_dflash
from tests.helpers.drafting import make_target
from tests.helpers.heads_made import TargetShape, write_eagle1, write_eagle3
from tests.helpers.models import edit_config, greedy, make_draft, new_folder, open_llm, random_prompts, tokens_of
from tests.helpers.state_heads_made import write_medusa
from tests.interpreted.engines import TRITON, captured_rounds
from treespec import RoundRecord, SpecConfig

SHAPE = TargetShape(num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, vocab_size=96)
EAGLE3 = {"draft_vocab": 64, "seed": 1, "boundaries": (0, 1, 3)}


def write_head(kind: str, target: Path) -> Path:
    head = new_folder("head")
    match kind:
        case "eagle":
            write_eagle1(head, SHAPE, bias=True, own_embedding=False, seed=1)
        case "eagle3":
            write_eagle3(head, SHAPE, layout="specforge", own_embedding=False, **EAGLE3)
        case "peagle":
            write_eagle3(head, SHAPE, layout="speculators", own_embedding=True, parallel=3, **EAGLE3)
        case "dflash":
            write_dflash(head, SHAPE, layout="z-lab", read=(0, 1, 3), block_size=3)
        case "medusa":
            write_medusa(head, SHAPE, layout="vllm", mapped=64)
        case "pard":
            make_draft(head, target, 1, 0.05)
            edit_config(head, pard_token=5)
    return head


@pytest.mark.parametrize("kind", ["peagle", "dflash", "pard", "medusa"])
def test_probabilities_are_those_of_the_eager_pass(kind: str) -> None:
    """What drafts a block, or has no attention, goes step by step."""
    target = make_target(SHAPE)
    head, (prompt,) = write_head(kind, target), random_prompts((20,), vocab=SHAPE.vocab_size)
    assert_eager_probabilities(target, head, prompt, depth=2)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_heads_in_captured_rounds(kind: str) -> None:
    target = make_target(SHAPE)
    head, (prompt,) = write_head(kind, target), random_prompts((9,), vocab=SHAPE.vocab_size)
    with captured_rounds():
        assert_eager_probabilities(target, head, prompt, depth=3)


def assert_eager_probabilities(target: Path, head: Path, prompt: list[int], depth: int) -> None:
    """Trees, token for token and probability for probability; and their tokens are those of plain decoding."""
    records: list[list[RoundRecord]] = []
    for options in (TRITON, {"attention": "cpu-packed", "prove": None}):
        llm = open_llm(target, [head], max_model_len=128, **options)
        captured = depth == 3 and options is TRITON
        assert llm.stats()["frozen"]["rounds"] == ("on the device" if captured else "step by step")
        records.append([])
        with llm.add_round_observer(records[-1].append):
            trees = llm.generate(prompt, greedy(3), SpecConfig(nodes=6, max_depth=depth, sources=("ssm",)))
        assert tokens_of(trees) == tokens_of(llm.generate(prompt, greedy(3), spec="off"))
    for ours, eager in zip(*records, strict=True):
        assert ours.tree.tokens.tolist() == eager.tree.tokens.tolist()
        torch.testing.assert_close(torch.tensor(ours.tree.probs), torch.tensor(eager.tree.probs), atol=1e-4, rtol=0)
