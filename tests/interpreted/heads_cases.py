"""A draft head or block draft beside a target on the Triton kernels, in the interpreter: run by tests/test_heads.py."""

from typing import Any

import pytest
import torch

from tests.blocks_made import write_dflash
from tests.heads_made import TargetShape, write_eagle1, write_eagle3
from tests.models import edit_config, greedy, make_draft, make_llama, new_folder, open_llm, random_prompts
from tests.state_heads_made import write_medusa
from treespec import RoundRecord, SpecConfig

torch.set_num_threads(1)
SHAPE = TargetShape(num_hidden_layers=3, vocab_size=96)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "peagle", "dflash", "pard", "medusa"])
def test_probabilities_are_those_of_the_eager_pass(kind: str) -> None:
    """Rounds are not captured with heads, and the head's own layers run eagerly."""
    sizes = {name: getattr(SHAPE, name) for name in vars(SHAPE)} | {"head_dim": SHAPE.head_dim}
    target, head = make_llama(new_folder("target"), 3, faint_after=0, **sizes), new_folder("head")
    if kind == "eagle":
        write_eagle1(head, SHAPE, bias=True, own_embedding=False, seed=1)
    elif kind == "dflash":
        write_dflash(head, SHAPE, layout="z-lab", read=(0, 1, 3), block_size=3)
    elif kind == "peagle":
        options: dict[str, Any] = {"boundaries": (0, 1, 3), "parallel": 3}
        write_eagle3(head, SHAPE, layout="speculators", draft_vocab=64, own_embedding=True, seed=1, **options)
    elif kind == "medusa":
        write_medusa(head, SHAPE, layout="vllm", mapped=64)
    elif kind == "pard":
        make_draft(head, target, 1, 0.05)
        edit_config(head, pard_token=5)
    else:
        write_eagle3(head, SHAPE, layout="specforge", draft_vocab=64, own_embedding=False, seed=1, boundaries=(0, 1, 3))
    (prompt,) = random_prompts((20,), vocab=SHAPE.vocab_size)
    spec, records = SpecConfig(nodes=6, max_depth=2, sources=("ssm",)), dict[str, list[RoundRecord]]()
    for attention in ("triton", "cpu-packed"):
        llm = open_llm(target, [head], prove=None, max_model_len=128, attention=attention)
        found = records.setdefault(attention, [])
        with llm.add_round_observer(found.append):
            [tree] = llm.generate(prompt, greedy(3), spec=spec)
        [plain] = llm.generate(prompt, greedy(3), spec="off")
        assert tree.outputs[0].token_ids == plain.outputs[0].token_ids
    for ours, eager in zip(*records.values(), strict=True):
        assert ours.tree.tokens.tolist() == eager.tree.tokens.tolist()
        torch.testing.assert_close(torch.tensor(ours.tree.probs), torch.tensor(eager.tree.probs), atol=1e-4, rtol=0)
