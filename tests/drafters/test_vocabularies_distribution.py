"""The distribution of sampled output with drafts of other vocabularies, by G-tests."""

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.test_vocabularies import by_text
from tests.helpers.models import change_rows, edit_config, new_folder, open_llm
from tests.helpers.tokenizers_made import letters, save_tokenizer
from tests.sampling.test_sampled_distribution import ALPHA, PROMPT, sampled, timeless
from tests.sampling.test_sampled_distribution import folders as tiny_folders
from treespec import LLM, SamplingParams, SpecConfig
from treespec.drafters.cross_tokenizer.cross_tokenizer_drafter import CrossTokenizerDrafter
from treespec.drawing.recording import watch

pytestmark = pytest.mark.slow

OWN, OTHER = "abcdefgh", "xhgfyedcz"  # "a" and "b" are unknown to the draft, "x", "y" and "z" to the target
SSM = {"sources": ("ssm",)}


@functools.cache
def folders() -> tuple[Path, Path, Path]:
    """The target of eight tokens, a draft of nine of which six are the target's, and one with its vocabulary."""
    root = new_folder("translated-distribution")
    target, (source, second) = tiny_folders()
    shutil.copytree(target, root / "target")
    save_tokenizer(root / "target", letters(OWN))
    shutil.copytree(second, root / "same")
    save_tokenizer(root / "same", letters(OWN))
    generator = torch.Generator().manual_seed(3)

    def moved(rows: torch.Tensor) -> torch.Tensor:
        new = torch.randn(len(OTHER), rows.shape[1], generator=generator) * rows.std()
        for id, letter in enumerate(OTHER):
            if letter in OWN:
                new[id] = rows[OWN.index(letter)]
        return new

    edit_config(change_rows(source, root / "other", moved), eos_token_id=None)
    save_tokenizer(root / "other", letters(OTHER))
    (root / "other" / "generation_config.json").unlink(missing_ok=True)
    return root / "target", root / "other", root / "same"


def sampling_llm(*drafts: Path, text: bool = False, **options: Any) -> LLM:
    options |= {"max_num_seqs": 32, "max_model_len": 64, "draft_quantization": "auto"}
    with by_text(text, little=0.0):
        llm = timeless(open_llm(folders()[0], drafts, **options))
    for drafter in translating(llm):
        drafter.pass_value.pays = lambda expected: expected > 0.01  # type: ignore[method-assign]
    return llm


def translating(llm: LLM) -> list[CrossTokenizerDrafter]:
    return [source for source in llm.engine.sources.others if isinstance(source, CrossTokenizerDrafter)]


CASES = {
    "rejection 3-2": (SpecConfig(branching=(3, 2), verification="rejection", **SSM), "other"),
    "traversal 8 with lookup": (SpecConfig(nodes=8, verification="traversal"), "other"),
    "rejection beside an SSM": (SpecConfig(nodes=10, verification="rejection", **SSM), "both"),
    "rejection with cut heads": (SpecConfig(nodes=10, verification="rejection", **SSM), "both"),
    "traversal by text": (SpecConfig(nodes=4, verification="traversal", **SSM), "text"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_joint_distribution(name: str) -> None:
    spec, kind = CASES[name]
    drafts = folders()[1:] if kind == "both" else folders()[1:2]
    llm = sampling_llm(*drafts, text=kind == "text", draft_vocabulary=5 if "cut" in name else None)
    assert [type(each).__name__ for each in translating(llm)] == [
        "TextDrafter" if kind == "text" else "TranslatedDrafter"
    ]
    p, acceptance = sampled(llm, spec)
    assert p > ALPHA, f"p = {p}"
    assert acceptance > (1.03 if kind == "text" else 1.2), "nothing was accepted, so nothing was shown"


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
