"""DFlash, DSpark, PARD and P-EAGLE drafts: distributions, growth, and what does not fit.

tests/drafters/test_heads.py compares trees of all kinds with plain decoding.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tests.helpers.blocks_made import MASK, reference_dflash, write_dflash
from tests.helpers.commands import run
from tests.helpers.drafting import EXECUTORS, assert_probabilities, drafted_rounds, make_target, target_states
from tests.helpers.exactness import assert_exact
from tests.helpers.exactness import run as run_recorded
from tests.helpers.heads_made import TargetShape, draft_ids, reference_peagle, write_eagle3
from tests.helpers.models import edit_config, greedy, make_draft, new_folder, open_llm, quick, random_prompts
from tests.helpers.quantized_checkpoints import needs_compiler
from tests.helpers.tokenizers_made import TEXT, byte_level, save_tokenizer
from treespec import RoundRecord, SamplingParams, SpecConfig
from treespec.drafters.ssm.forest import CompiledForest
from treespec.drafters.ssm.levels import DraftModelCache
from treespec.errors import ModelError
from treespec_weights import CheckpointError

SHAPE = TargetShape(num_hidden_layers=8)
# By name: what `write_dflash` is told, and the layers of the target that are read.
DFLASH: dict[str, dict[str, Any]] = {
    "z-lab": {"layout": "z-lab"},
    "transformers": {"layout": "transformers", "read": (2, 8)},
    "speculators": {"layout": "speculators", "draft_vocab": 96},
    "dspark": {"layout": "speculators", "draft_vocab": 96, "from_anchor": True, "markov": "vanilla"},
    "dspark, gated": {"layout": "speculators", "markov": "gated"},
    "speculators, anchor": {"layout": "speculators", "from_anchor": True, "read": (5, 3), "block_size": 4},
}
KINDS = (*DFLASH, "pard", "peagle")


def target_of(dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    return make_target(SHAPE, dtype, **config)


def make_block(kind: str, target: Path, seed: int = 1) -> Path:
    folder = new_folder("block")
    if kind == "pard":
        make_draft(folder, target, 2, 0.05)
        edit_config(folder, pard_token=MASK)
    elif kind == "peagle":
        options: dict[str, Any] = {"layout": "speculators", "draft_vocab": 96, "boundaries": (1, 4, 6), "parallel": 5}
        write_eagle3(folder, SHAPE, own_embedding=True, seed=seed, **options)
    else:
        write_dflash(folder, SHAPE, seed=seed, **DFLASH[kind])
    return folder


@EXECUTORS
@pytest.mark.parametrize("kind", quick(KINDS, ("z-lab", "dspark", "pard", "peagle")))
def test_probabilities_are_those_of_the_reference(kind: str, executor: dict[str, Any]) -> None:
    """At every drafted node, over several rounds."""
    target = target_of()
    draft = make_block(kind, target)
    records = drafted_rounds(target, draft, SHAPE.vocab_size, executor)
    model = AutoModelForCausalLM.from_pretrained(draft if kind == "pard" else target)
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    states = target_states(model, records)
    layers = DFLASH.get(kind, {}).get("read", (1, 4, 6))

    def expected(record: RoundRecord, path: list[int]) -> torch.Tensor:
        root, read = int(record.tree.tokens[0]), torch.stack([states[record.number][layer] for layer in layers], 1)
        if kind == "pard":
            return model(torch.tensor([[*record.context, root, *[MASK] * len(path)]])).logits[0, -1]
        if kind == "peagle":
            return reference_peagle(draft, embed, [*record.context, root], read)[len(path)]
        return reference_dflash(draft, embed, head, root, read, path)[len(path)]

    reduced = kind == "peagle" or "draft_vocab" in DFLASH.get(kind, {})
    ids = draft_ids(draft).tolist() if reduced else range(SHAPE.vocab_size)
    assert_probabilities(records, draft.name, ids, expected)


@pytest.mark.slow
def test_the_reference_is_the_module_of_transformers() -> None:
    draft = new_folder("block")
    write_dflash(draft, SHAPE, **DFLASH["transformers"])
    module = AutoModel.from_config(AutoConfig.from_pretrained(draft)).float().eval()
    module.load_state_dict(load_file(draft / "model.safetensors"))
    generator = torch.Generator().manual_seed(2)
    embed, head = (torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, generator=generator) for _ in range(2))
    states = torch.randn(9, 2, SHAPE.hidden_size, generator=generator)
    noise = embed[torch.tensor([5, *[MASK] * 5])]
    with torch.inference_mode():
        found = module(noise_embeds=noise[None], context_hidden_states=states.flatten(1)[None]).last_hidden_state[0]
        expected = reference_dflash(draft, embed, head, 5, states)
    torch.testing.assert_close((found @ head.T)[1:], expected, atol=1e-4, rtol=1e-4)


# --- the tokens of plain decoding


@pytest.mark.slow
@EXECUTORS
@pytest.mark.parametrize("kind", quick(KINDS, ("z-lab", "dspark", "pard", "peagle")))
def test_a_block_draft_alone(kind: str, executor: dict[str, Any]) -> None:
    """In a batch, deeper than its block, and with a width that its best tokens must cover."""
    target = target_of()
    llm = open_llm(target, [make_block(kind, target)], max_num_seqs=4, **executor)
    plain = run_recorded(llm, random_prompts((1, 30, 64, 70), vocab=SHAPE.vocab_size), greedy(16))
    for spec in (SpecConfig(nodes=12, max_depth=12), SpecConfig(branching=(12, 2, 1))):
        tree = assert_exact(llm, plain, spec)
        drafted = sum(output.metrics.nodes_verified - output.metrics.target_passes for output in tree.outputs)
        assert drafted > 0
    llm.engine.check_integrity()


@pytest.mark.slow
@needs_compiler
def test_one_compiled_call_grows_the_trees_of_levels() -> None:
    """Over several rounds of a batch, with an SSM below the last depth of the blocks, and without one."""
    target = target_of()
    ssm = make_draft(new_folder("ssm"), target, 1, 0.05)
    blocks = [make_block("speculators", target), make_block("pard", target)]
    trees: list[list[Any]] = []
    draft_levels = CompiledForest.draft
    for calls in (True, False):
        llm = open_llm(target, [ssm, *blocks], compile=True, max_num_seqs=3)
        trees.append([])
        with ExitStack() as context:
            if not calls:
                context.enter_context(mock.patch.object(DraftModelCache, "get", lambda *_: None))
            draft = context.enter_context(mock.patch.object(CompiledForest, "draft", autospec=True))
            draft.side_effect = draft_levels
            context.enter_context(llm.add_round_observer(lambda record: trees[-1].append(record.tree)))
            for sources in (("ssm",), tuple(block.name for block in blocks), (blocks[0].name,)):
                spec = SpecConfig(nodes=24, max_depth=9, sources=sources)
                llm.generate(random_prompts((1, 30, 64), vocab=SHAPE.vocab_size), greedy(12), spec=spec)
            assert draft.called == calls
    for one, levels in zip(*trees, strict=True):
        assert one.tokens.tolist() == levels.tokens.tolist() and one.parents.tolist() == levels.parents.tolist()
        np.testing.assert_allclose(one.probs, levels.probs, rtol=1e-6)
    assert max(int(tree.depths.max()) for tree in trees[0]) > 5


@pytest.mark.slow
@pytest.mark.parametrize("verification", quick(("rejection", "traversal"), ("rejection",)))
def test_draws_are_distributed_as_the_target(verification: Any) -> None:
    """The first two tokens of many samples, with the draft's blocks drawn from at random."""
    target = target_of(vocab_size=8)
    draft = new_folder("block")
    small = TargetShape(num_hidden_layers=8, vocab_size=8)
    write_dflash(draft, small, layout="z-lab", block_size=3)
    llm = open_llm(target, [draft], max_num_seqs=64)
    spec = SpecConfig(nodes=8, max_depth=2, sources=("ssm",), verification=verification)
    prompt, counts = [1, 5, 3, 2], np.zeros((8, 8))
    for seed in range(20):
        params = SamplingParams(max_tokens=2, temperature=1.0, seed=seed, ignore_eos=True, n=64)
        [output] = llm.generate(prompt, params, spec=spec)
        for sample in output.outputs:
            counts[tuple(sample.token_ids)] += 1
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.inference_mode():
        first = torch.softmax(model(torch.tensor([prompt])).logits[0, -1], -1)
        after = [torch.softmax(model(torch.tensor([[*prompt, t]])).logits[0, -1], -1) for t in range(8)]
    expected = (first[:, None] * torch.stack(after)).numpy() * counts.sum()
    used = expected > 5
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
    assert statistic < used.sum() + 5 * np.sqrt(2 * used.sum())  # chi-squared, five standard deviations


# --- folders that do not fit, and what the command says of them


def block(shape: TargetShape = SHAPE, layout: Any = "z-lab", **changes: Any) -> Path:
    write_dflash(folder := new_folder("block"), shape, layout=layout, **changes)
    return folder


def damaged() -> Path:
    """A draft that lacks one norm, and whose other one has another size."""
    tensors = load_file((folder := block()) / "model.safetensors")
    del tensors["layers.1.self_attn.q_norm.weight"]
    save_file(tensors | {"norm.weight": torch.ones(32)}, folder / "model.safetensors")
    return folder


def reading(mask: int = 3, layers: tuple[int, ...] = (0, 3, 5)) -> Path:
    return block(dflash_config={"mask_token_id": mask, "target_layer_ids": layers})


def small_pard(**changes: Any) -> Path:
    return edit_config(make_block("pard", target_of(vocab_size=128)), **changes)


# Makes a draft, and what is said.
WRONG: list[tuple[Callable[[], Path], str]] = [
    (lambda: block(block_size=1), "'block_size': 1; expected an int, at least 2"),
    (lambda: block(dflash_config={"target_layer_ids": [1]}), "'mask_token_id': None; expected an int"),
    (lambda: block(dflash_config={"mask_token_id": 3}), "'target_layer_ids': None; expected a list"),
    (lambda: reading(mask=900), "900, and the vocabulary has 256"),
    (lambda: reading(layers=(0, 3)), "2 layers of the target have 64 each"),
    (lambda: reading(layers=(0, 3, 8)), "the target has 8 layers"),
    (lambda: block(layer_types=["full_attention", "sliding_attention"]), "sliding windows are not supported"),
    (lambda: block(quantization_config={"quant_method": "awq"}), "quantised draft heads are not supported"),
    (lambda: block(architectures=["DFlash2DraftModel"]), "DFlash 2 draft, which is not supported"),
    (lambda: block(architectures=["XPressDraftModel"]), "Xpress draft, which is not supported"),
    (damaged, r"(?s)(?=.*q_norm.*expected a tensor of shape).*'norm.weight': \[32\], expected \[64\]"),
    (lambda: block(TargetShape(hidden_size=32)), "96 values per token, 3 layers of the target have 64 each"),
    (lambda: block(TargetShape(vocab_size=128), "speculators", draft_vocab=64), "of 128 tokens, the target has 256"),
    (lambda: block(layout="speculators", markov="rnn"), "'rnn' of rank 16; supported: vanilla and gated"),
    (small_pard, "128, and the target has 256 tokens"),
    (lambda: small_pard(pard_token=128), "128; expected a token of the vocabulary of 128"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "message"), WRONG)
def test_drafts_that_do_not_fit(make: Callable[[], Path], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_llm(target_of(), [make()])


@pytest.mark.slow
def test_a_parallel_draft_with_another_tokenizer() -> None:
    target, other = target_of(vocab_size=384), target_of(vocab_size=384)
    save_tokenizer(target, byte_level(384, TEXT.splitlines()))
    save_tokenizer(draft := make_block("pard", other), byte_level(384, ["zyx wvu tsr"] * 40))
    with pytest.raises(ModelError, match="PARD draft with other token ids than the target"):
        open_llm(target, [draft])


@pytest.mark.slow
def test_inspect_describes_block_drafts() -> None:
    target = target_of()
    drafts = [make_block(kind, target) for kind in ("speculators", "pard", "peagle")]

    def reports(*drafts: Path) -> Any:
        options = [option for draft in drafts for option in ("--draft", draft)]
        return run("weights", "inspect", target, *options, "--json").document["drafts"]

    first, second, third = reports(*drafts)
    reads = "reads the inputs of the target's layers 1, 4, 6 and predicts 5 tokens in a pass"
    assert first["connection"] == f"DFlash draft, {reads}; proposes 96 of 256 tokens"
    assert second["connection"] == "PARD draft, predicts 8 tokens in a pass; proposes 256 of 256 tokens"
    assert third["connection"] == f"parallel EAGLE head, {reads}; proposes 96 of 256 tokens"
    assert first["usable"] and second["usable"] and third["usable"] and first["parameters"] > 0
    [unusable] = reports(block(TargetShape(hidden_size=32)))
    assert not unusable["usable"] and "use a draft of this target" in unusable["reason"]
