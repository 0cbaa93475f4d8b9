"""SSMs that draft compiled: the trees are those of the general path, of broken drafts too."""

import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.blocks_made import write_dflash
from tests.helpers.calls import calls_of
from tests.helpers.enumeration import paths_of
from tests.helpers.families import TYPICAL, fitting, make_model
from tests.helpers.heads_made import MASK, TargetShape
from tests.helpers.models import (
    VOCAB,
    assert_same_tree,
    edit_config,
    make_draft,
    new_folder,
    open_llm,
    quick,
    random_prompts,
    reduce_vocabulary,
    tiny,
    tokens_of,
)
from tests.helpers.mtp_made import make_predictor
from tests.helpers.quantized_checkpoints import needs_compiler
from treespec import RoundRecord, SamplingParams, SpecConfig
from treespec.drafters.ssm.compiled_growth import CompiledGrowth
from treespec.drafters.ssm.ssm_drafter import SsmDrafter
from treespec.drawing.recording import watch

pytestmark = needs_compiler


SPECS = {
    "dynamic": (SpecConfig(nodes=24), {}),
    "static": (SpecConfig(branching=(3, 2, 1)), {}),
    "one a round": (SpecConfig(nodes=12, max_ssms=1), {}),
    "automatic": (SpecConfig(), {}),
    "families": (SpecConfig(nodes=24), {}),
    "hybrids": (SpecConfig(nodes=24), {}),
    "a reduced one": (SpecConfig(nodes=24), {}),
    "a broken one": (SpecConfig(nodes=24), {}),
    "parallel drafts": (SpecConfig(nodes=24, max_depth=9, sources=("ssm",)), {}),
    "parallel drafts alone": (SpecConfig(nodes=24, max_depth=9, sources=("dflash", "pard")), {}),
    "an MTP layer": (SpecConfig(nodes=24), {}),
    "coupled": (SpecConfig(nodes=24), {"temperature": 0.9, "seed": 3}),
    "restricted": (SpecConfig(nodes=24), {"allowed_token_ids": [*range(20, 60)]}),
    "traversal": (SpecConfig(branching=(2, 2, 1), verification="traversal"), {"temperature": 0.9, "seed": 3}),
}


NATIVE = ("dynamic", "one a round", "automatic", "families", "a reduced one", "coupled")


def drafts_of(kind: str, target: Path, first: Path) -> list[Any]:
    """Three SSMs of two shapes or three families, also hybrid ones; of one half of the vocabulary, or NaN after every
    second token; or one beside drafts that predict several tokens in a pass, and fewer than a tree is deep."""
    root = new_folder("shape")
    if kind in ("families", "hybrids"):
        names = ("gpt2", "gemma3") if kind == "families" else ("qwen3_5", "granite_hybrid")
        others = [(name, TYPICAL[name], fitting(TYPICAL[name]) | {"vocab_size": VOCAB}) for name in names]
        return [first, *(make_model(root / name, case, 3, torch.bfloat16, **sizes) for name, case, sizes in others)]
    if kind.startswith("parallel drafts"):
        shape = TargetShape(num_hidden_layers=2, vocab_size=VOCAB)
        write_dflash(root / "dflash", shape, layout="speculators", draft_vocab=96, read=(1, 2))
        pard = edit_config(make_draft(root / "pard", target, 2, 0.05), pard_token=MASK)
        return [first, root / "dflash", pard]
    second, third = (make_draft(root / f"ssm-{i}", target, i, 0.05) for i in (7, 8))
    if kind in ("a reduced one", "restricted"):
        third = reduce_vocabulary(root / "reduced", third, np.append(np.arange(0, VOCAB, 2), -1))
    if kind == "a broken one":
        tensors = load_file(third / "model.safetensors")
        tensors["model.embed_tokens.weight"][::2] = math.nan
        save_file(tensors, third / "model.safetensors", metadata={"format": "pt"})
    return [first, second, third]


@pytest.mark.parametrize("name", quick(SPECS, {*SPECS} - {"parallel drafts", "parallel drafts alone", "an MTP layer"}))
def test_trees_are_those_of_the_general_path(name: str) -> None:
    """All levels in one call, and whole rounds in one, against `Forest` on the same compiled passes.

    One call leaves out the noise of unlikely tokens: trees of sampled choices are nearly the same. It masks
    probabilities, not logits, which are rounded to the model's dtype.
    """
    spec, options = SPECS[name]
    if name == "an MTP layer":
        target, drafts = make_predictor("qwen3_5", True, torch.bfloat16, predicts=True), ["mtp"]
    else:
        target, (first, *_) = tiny(torch.float32 if name == "restricted" else torch.bfloat16)
        drafts = drafts_of(name, target, first)
    prompts = random_prompts((9, 50, 63, 64))
    params = [SamplingParams(max_tokens=count, ignore_eos=True, **options) for count in (6, 14, 9, 20)]

    def run(native: bool = False) -> tuple[list[list[int]], list[RoundRecord]]:
        llm = open_llm(target, drafts, compile=True, draft_quantization="auto")
        if native:
            llm.engine.host.rounds.most_rounds = 1  # after which it has learned what the host's steps have
        else:
            llm.engine.host.rounds = None
        with watch(llm.engine) as rounds:
            return tokens_of(llm.generate(prompts, params, spec)), rounds

    with calls_of(CompiledGrowth, "grow") as whole_trees:
        ours, compiled = run()
    with calls_of(SsmDrafter, "resume") as whole_rounds:
        natives, native = run(native=True)
    assert bool(whole_trees) != (name == "traversal")
    assert bool(whole_rounds) == (name in NATIVE)
    with mock.patch.object(CompiledGrowth, "has_room", lambda *_: False):
        theirs, general = run()
    assert ours == natives == theirs
    assert len(compiled) > 8
    for one, other in zip([*compiled, *native], [*general, *general], strict=True):
        assert one.context == other.context
        tree, expected = one.tree, other.tree
        if name == "coupled":
            said, wanted = (dict(zip(paths_of(each), each.probs, strict=True)) for each in (tree, expected))
            common = said.keys() & wanted.keys()
            assert len(common) > 0.9 * len(expected)
            assert all(abs(said[path] - wanted[path]) < 0.1 for path in common)
            continue
        assert_same_tree(tree, expected, rtol=1e-4 if name == "restricted" else 1e-6)
    assert any(len(each.tree) > 4 for each in compiled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilities_are_the_softmax_of_fp32_logits(dtype: torch.dtype) -> None:
    llm = open_llm(tiny(dtype)[0], tiny(dtype)[1][:1], compile=True, draft_quantization=None)
    model = llm.engine.sources.ssms.models[0]
    hidden = torch.randn(7, model.config.shape.hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    probs = model.probs(hidden)
    head = load_file(tiny(dtype)[1][0] / "model.safetensors")["lm_head.weight"]
    logits = hidden.double() @ head.double().T
    np.testing.assert_allclose(probs.numpy(), torch.softmax(logits, -1).numpy(), rtol=2e-5, atol=1e-7)
    for row in range(7):
        assert model.probs(hidden[row : row + 1]).equal(probs[row : row + 1]), "a row's bits depend on its company"
    hidden[2, 5] = math.nan
    broken = model.probs(hidden)
    assert broken[2].isnan().all() and broken[:2].equal(probs[:2]) and broken[3:].equal(probs[3:])
