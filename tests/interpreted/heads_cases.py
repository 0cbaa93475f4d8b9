"""A draft head or block draft beside a target on the Triton kernels."""

from typing import Any
from unittest import mock

import pytest
import torch

from tests.blocks_made import write_dflash
from tests.drafting import make_target
from tests.heads_made import TargetShape, write_eagle1, write_eagle3
from tests.models import edit_config, greedy, make_draft, new_folder, open_llm, random_prompts, tokens_of
from tests.state_heads_made import write_medusa
from treespec import RoundRecord, SpecConfig
from treespec.graphs.batch_round import BatchRound

torch.set_num_threads(1)
SHAPE = TargetShape(num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, vocab_size=96)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "peagle", "dflash", "pard", "medusa"])
def test_probabilities_are_those_of_the_eager_pass(kind: str) -> None:
    """EAGLE heads draft in captured rounds; what drafts a block, or has no attention, goes step by step."""
    target, head = make_target(SHAPE), new_folder("head")
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
    captured = kind in ("eagle", "eagle3")
    (prompt,) = random_prompts((20,), vocab=SHAPE.vocab_size)
    depth = 3 if captured else 2
    spec, records = SpecConfig(nodes=6, max_depth=depth, sources=("ssm",)), dict[str, list[RoundRecord]]()
    for attention in ("triton", "cpu-packed"):
        linear = "triton" if attention == "triton" else "auto"
        llm = open_llm(target, [head], prove=None, max_model_len=128, attention=attention, linear=linear)
        on_device = captured and attention == "triton"
        assert llm.stats()["frozen"]["rounds"] == ("on the device" if on_device else "step by step")
        found = records.setdefault(attention, [])
        with (
            llm.add_round_observer(found.append),
            mock.patch.object(BatchRound, "draft", autospec=True, side_effect=BatchRound.draft) as run,
        ):
            [tree] = llm.generate(prompt, greedy(4), spec=spec)
        assert bool(run.call_count) == on_device
        [plain] = llm.generate(prompt, greedy(4), spec="off")
        assert tree.outputs[0].token_ids == plain.outputs[0].token_ids
    for ours, eager in zip(*records.values(), strict=True):
        assert ours.tree.tokens.tolist() == eager.tree.tokens.tolist()
        torch.testing.assert_close(torch.tensor(ours.tree.probs), torch.tensor(eager.tree.probs), atol=1e-4, rtol=0)


def test_heads_beside_an_ssm_in_captured_rounds() -> None:
    """Greedy and sampled tokens are those of plain decoding; after a prompt of one token, no head can draft."""
    target = make_target(SHAPE)
    draft = make_draft(new_folder("ssm"), target, 1, 0.04)
    write_eagle3(
        head := new_folder("head"),
        SHAPE,
        layout="specforge",
        draft_vocab=64,
        own_embedding=False,
        seed=1,
        boundaries=(0, 1, 3),
    )
    write_eagle1(other := new_folder("head"), SHAPE, bias=True, own_embedding=False, seed=2)
    spec = SpecConfig(nodes=8, max_depth=3, sources=("ssm",))
    llm = open_llm(
        target,
        [draft, head, other],
        spec=spec,
        attention="triton",
        linear="triton",
        max_num_seqs=3,
        max_model_len=128,
        prove=None,
    )
    prompts = random_prompts((1, 3, 63), vocab=SHAPE.vocab_size)
    records: list[RoundRecord] = []
    for params in (greedy(6), greedy(4, temperature=0.9, seed=3)):
        with (
            llm.add_round_observer(records.append),
            mock.patch.object(BatchRound, "draft", autospec=True, side_effect=BatchRound.draft) as run,
        ):
            trees = llm.generate(prompts, params)
        assert run.call_count
        assert tokens_of(trees) == tokens_of(llm.generate(prompts, params, spec="off"))
    assert any(output.metrics.acceptance_length > 1.2 for output in trees)
    names = {name for each in records for node in range(1, len(each.tree)) for name in each.tree.sources_of(node)}
    assert names == set(llm.draft_names) - {"lookup", "suffix"}
    llm.engine.check_integrity()
