"""A draft head or block draft beside a target on the Triton kernels."""

import contextlib
from pathlib import Path

import pytest
import torch

from tests.drafters.test_assistants import assistant_of, target_of
from tests.helpers.blocks_made import write_dflash
from tests.helpers.drafting import make_target
from tests.helpers.heads_made import TargetShape, write_eagle1, write_eagle3, write_state_ssm
from tests.helpers.models import edit_config, greedy, make_draft, new_folder, open_llm, random_prompts, tokens_of
from tests.helpers.mtp_made import LAYOUTS, make_predictor
from tests.helpers.speech import rank_half
from tests.helpers.state_heads_made import write_medusa
from tests.interpreted.engines import TRITON, captured_rounds
from treespec import RoundRecord, SpecConfig

SHAPE = TargetShape(num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, vocab_size=96)
EAGLE3 = {"draft_vocab": 64, "seed": 1, "boundaries": (0, 1, 3)}


def write_head(kind: str, target: Path) -> Path | str:
    head = new_folder("head")
    if kind in LAYOUTS:
        return "mtp"
    match kind:
        case "eagle":
            write_eagle1(head, SHAPE, bias=True, own_embedding=False, seed=1)
        case "eagle3":
            write_eagle3(head, SHAPE, layout="specforge", own_embedding=False, **EAGLE3)
        case "state-ssm":
            write_state_ssm(head, SHAPE, draft_vocab=64, layers=(0, 4), tied=False, seed=1)
        case "peagle":
            write_eagle3(head, SHAPE, layout="speculators", own_embedding=True, parallel=3, **EAGLE3)
        case "dflash":
            write_dflash(head, SHAPE, layout="z-lab", read=(0, 1, 3), block_size=3)
        case "assistant":
            return assistant_of("groups")
        case "medusa":
            write_medusa(head, SHAPE, layout="vllm", mapped=64)
        case "pard":
            make_draft(head, target, 1, 0.05)
            edit_config(head, pard_token=5)
    return head


CAPTURED = ("eagle", "eagle3", "state-ssm", "glm4_moe", "qwen3_5")
KINDS = [*CAPTURED, "peagle", "dflash", "pard", "medusa", "assistant"]
KINDS += ["eagle, cut", "qwen3_5, cut"]


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_are_those_of_the_eager_pass(kind: str) -> None:
    """As are tokens, which plain decoding has too; and of the half of the target's head that some score with.

    What drafts a block, or has no attention, goes step by step.
    """
    kind, _, cut = kind.partition(", ")
    captured, records = kind in CAPTURED, list[list[RoundRecord]]()
    if kind in LAYOUTS:
        target = make_predictor(kind, vocab_size=SHAPE.vocab_size)
    else:
        target = target_of() if kind == "assistant" else make_target(SHAPE)
    head, (prompt,) = write_head(kind, target), random_prompts((9,), vocab=SHAPE.vocab_size)
    spec = SpecConfig(nodes=6, max_depth=3 if captured else 2, sources=("ssm",))
    kept = rank_half(target) if cut else [*range(SHAPE.vocab_size)]
    for options in (TRITON, {"attention": "cpu-packed", "prove": None}):
        llm = open_llm(target, [head], max_model_len=128, draft_vocabulary=len(kept) if cut else None, **options)
        of_rounds = "on the device" if captured and options is TRITON else "step by step"
        assert llm.stats()["frozen"]["rounds"] == of_rounds
        records.append([])
        runs = captured_rounds() if of_rounds == "on the device" else contextlib.nullcontext()
        with runs, llm.add_round_observer(records[-1].append):
            trees = llm.generate(prompt, greedy(3), spec)
    assert tokens_of(trees) == tokens_of(llm.generate(prompt, greedy(3), spec="off"))
    for ours, eager in zip(*records, strict=True):
        assert not cut or set(ours.tree.tokens[1:].tolist()) <= {*kept}
        assert ours.tree.tokens.tolist() == eager.tree.tokens.tolist()
        assert ours.emitted == eager.emitted
        torch.testing.assert_close(torch.tensor(ours.tree.probs), torch.tensor(eager.tree.probs), atol=1e-4, rtol=0)
