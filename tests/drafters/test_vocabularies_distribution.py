"""The distribution of sampled output with drafts of other vocabularies: exact by enumeration, end to end by G-tests."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.models import new_folder, open_llm
from tests.helpers.tokenizers_made import letters, save_tokenizer
from tests.sampling.test_sampled_distribution import ALPHA, PROMPT, VOCAB, sampled, timeless
from tests.sampling.test_sampled_distribution import folders as tiny_folders
from treespec import LLM, SamplingParams, SpecConfig
from treespec.drafters.foreign.foreign_drafter import ForeignDrafter
from treespec.drafters.foreign.translated import TranslatedDrafter
from treespec.drawing.recording import watch
from treespec.errors import DraftError
from treespec.request import Request
from treespec.tree import TokenTree

pytestmark = pytest.mark.slow

OWN, OTHER = "abcdefgh", "xhgfyedcz"  # "a" and "b" are unknown to the draft, "x", "y" and "z" to the target
SSM = {"sources": ("ssm",)}


# --- by enumeration


# --- end to end


@functools.cache
def folders() -> tuple[Path, Path, Path]:
    """The target of eight tokens with a tokenizer, a draft of nine tokens of which six are the target's, and one with
    the target's vocabulary."""
    root = new_folder("translated-distribution")
    target, (source, second) = tiny_folders()
    shutil.copytree(target, root / "target")
    save_tokenizer(root / "target", letters(OWN))
    shutil.copytree(second, root / "same")
    save_tokenizer(root / "same", letters(OWN))
    shutil.copytree(source, root / "other")
    save_tokenizer(root / "other", letters(OTHER))
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if "embed_tokens" in name or "lm_head" in name]:
        rows = tensors[name]
        moved = torch.randn(len(OTHER), rows.shape[1], generator=generator) * rows.std()
        for id, letter in enumerate(OTHER):
            if letter in OWN:
                moved[id] = rows[OWN.index(letter)]
        tensors[name] = moved
    save_file(tensors, root / "other" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"vocab_size": len(OTHER), "eos_token_id": None}
    (root / "other" / "config.json").write_text(json.dumps(config))
    (root / "other" / "generation_config.json").unlink(missing_ok=True)
    return root / "target", root / "other", root / "same"


def sampling_llm(*drafts: Path, text: bool = False, compile: bool | str = "auto") -> LLM:
    with mock.patch("treespec_weights.vocabularies.LEAST_SHARE", 1.1 if text else 0.0):
        llm = timeless(open_llm(folders()[0], drafts, max_num_seqs=32, max_model_len=64, compile=compile))
    for drafter in llm.engine.sources.others:
        assert isinstance(drafter, ForeignDrafter)
        drafter.pass_value.pays = lambda expected: expected > 0.01  # type: ignore[method-assign]
    return llm


CASES = {
    "rejection 3-2": (SpecConfig(branching=(3, 2), verification="rejection", **SSM), "other"),
    "traversal 2-1-1": (SpecConfig(branching=(2, 1, 1), verification="traversal", **SSM), "other"),
    "traversal 8 with lookup": (SpecConfig(nodes=8, verification="traversal"), "other"),
    "coupled 8": (SpecConfig(nodes=8, **SSM), "other"),
    "rejection beside an SSM": (SpecConfig(nodes=10, verification="rejection", **SSM), "both"),
    "traversal by text": (SpecConfig(nodes=4, verification="traversal", **SSM), "text"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_joint_distribution(name: str) -> None:
    spec, kind = CASES[name]
    drafts = folders()[1:] if kind == "both" else folders()[1:2]
    llm = sampling_llm(*drafts, text=kind == "text")
    assert [type(each).__name__ for each in llm.engine.sources.others] == [
        "TextDrafter" if kind == "text" else "TranslatedDrafter"
    ]
    p, acceptance = sampled(llm, spec)
    assert p > ALPHA, f"p = {p}"
    assert acceptance > (1.03 if kind == "text" else 1.2), "nothing was accepted, so nothing was shown"


def test_the_distributions_are_over_the_intersection() -> None:
    llm = sampling_llm(folders()[1], compile=False)  # compiled, the draft would be in int8
    params = SamplingParams(temperature=2.0, seed=1, max_tokens=2, ignore_eos=True)
    spec = SpecConfig(branching=(2, 1), verification="rejection", **SSM)
    with watch(llm.engine) as rounds:
        llm.generate([PROMPT], params, spec=spec)
    tree = rounds[0].tree
    assert tree.draw_rows is not None and (tree.draw_rows >= 0).all()
    unknown = [OWN.index(letter) for letter in "ab"]
    assert all(not probs[unknown].any() for probs in tree.draft_probs)
    own = open_llm(folders()[1], max_model_len=64)
    prompt = [OTHER.index(OWN[token]) for token in PROMPT if OWN[token] in OTHER]
    seen: list[np.ndarray] = []
    drafter = llm.engine.sources.others[0]
    assert isinstance(drafter, TranslatedDrafter)
    context = drafter.translation.encode(PROMPT)
    assert context == prompt
    original = own.engine.runner.logits
    with mock.patch.object(
        own.engine.runner, "logits", lambda *args: seen.append(original(*args).double().numpy()) or original(*args)
    ):
        own.generate([context], SamplingParams(max_tokens=1))
    logits = seen[0][0] / 2.0
    probs = np.zeros(VOCAB)
    for id, letter in enumerate(OTHER):
        if letter in OWN:
            probs[OWN.index(letter)] = np.exp(logits[id])
    assert np.allclose(tree.draft_probs[int(tree.draw_rows[0])], probs / probs.sum(), atol=1e-6)


def altered(change: Callable[[np.ndarray], np.ndarray]) -> Callable[..., list[TokenTree]]:
    """`propose`, with other distributions in the trees than those that were drawn from."""
    original = TranslatedDrafter.propose

    def propose(self: TranslatedDrafter, requests: Sequence[Request], depths: Sequence[int]) -> list[TokenTree]:
        trees = original(self, requests, depths)
        return [dataclasses.replace(tree, draft_probs=tuple(map(change, tree.draft_probs))) for tree in trees]

    return propose


def test_a_distribution_that_lost_its_mask_is_refused() -> None:
    """One that does not sum to 1, as when the mask comes after softmax, never reaches verification."""
    llm = sampling_llm(folders()[1])
    spec = SpecConfig(branching=(3, 2), verification="rejection", **SSM)
    with (
        mock.patch.object(TranslatedDrafter, "propose", altered(lambda probs: probs * 0.7)),
        pytest.raises(DraftError, match="draft_probs that are not probabilities"),
    ):
        sampled(llm, spec)


def test_only_one_source_draws_at_random() -> None:
    """Two translated drafts, or one beside SSMs: what is drawn at random is one source's, so that budgets hold."""
    _, other, same = folders()
    spec = SpecConfig(nodes=8, verification="rejection", **SSM)
    params = SamplingParams(temperature=2.0, seed=1, max_tokens=12, ignore_eos=True, n=4)
    for drafts, drawing in (((other, other), "other"), ((other, same), "same")):
        llm = sampling_llm(*drafts)
        with watch(llm.engine) as rounds:
            llm.generate([PROMPT], params, spec=spec)
        by_chance: set[str] = set()
        for tree in (each.tree for each in rounds):
            assert len(tree) <= 8
            if tree.draw_rows is not None:
                by_chance |= {tree.source_names[s] for s in tree.draw_sources[tree.draw_rows >= 0]}
        assert by_chance == {drawing}
