"""Drafts of other vocabularies on the Triton kernels."""

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.models import greedy, make_draft, make_llama, new_folder, open_llm, random_prompts, tokens_of
from tests.helpers.tokenizers_made import letters, permuted, resized, save_tokenizer
from tests.interpreted.engines import SMALL, TRITON, captured_rounds
from treespec import SpecConfig
from treespec.drafters.cross_tokenizer.translated import TranslatedDrafter
from treespec.drawing.recording import watch
from treespec.graphs.capture import stack_sizes
from treespec_weights.draft_vocabulary import rank_tokens

OWN, PADDED = 64, 72
SPEC = SpecConfig(nodes=8, max_depth=2, sources=("ssm",))


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    root = new_folder("vocabularies")
    made = {"target": make_llama(root / "target", 0, **SMALL)}
    save_tokenizer(made["target"], letters([chr(33 + i) for i in range(OWN)]))
    made["wide"] = resized(made["target"], root / "wide", PADDED, loud=1.0)
    made["small"] = make_draft(root / "small", made["target"], 1, 0.05)
    made["large"] = resized(make_draft(root / "draft", made["target"], 2, 0.05), root / "large", PADDED + 8)
    spoken = make_draft(root / "spoken", made["target"], 1, 0.05)
    save_tokenizer(spoken, letters([chr(33 + i) for i in range(OWN)]))
    made["shuffled"] = permuted(spoken, root / "shuffled")
    return made


def test_padded_drafts_in_captured_rounds(folders: dict[str, Path]) -> None:
    """A draft with fewer tokens than the target and one with more have other heads, and so each is a stack."""
    llm = open_llm(folders["wide"], [folders["small"], folders["large"]], spec=SPEC, max_num_seqs=2, **TRITON)
    assert set(llm.stats()["draft_vocabularies"].values()) == {"padded"}
    assert stack_sizes([model.config for model in llm.engine.sources.ssms.models]) == [1, 1]
    prompts = [[OWN + 1, 3, PADDED - 1], random_prompts([9], vocab=PADDED)[0]]
    params = [greedy(3), greedy(7, temperature=0.9, seed=3)]  # the second is alone in a batch at last
    with captured_rounds(), watch(llm.engine) as rounds:
        trees = llm.generate(prompts, params, spec=SPEC)
    assert tokens_of(trees) == tokens_of(llm.generate(prompts, params, spec="off"))
    assert sum(sum(o.metrics.accepted_by_source.values()) for o in trees) > 2
    guessed = [
        (name, token)
        for each in rounds
        for node, token in enumerate(each.tree.tokens.tolist())
        for name in each.tree.sources_of(node)
    ]
    small, large = (max(token for name, token in guessed if name == draft) for draft in llm.draft_names[:2])
    assert small < OWN < large < PADDED
    llm.engine.check_integrity()


def test_cut_heads_in_captured_rounds(folders: dict[str, Path]) -> None:
    """Two drafts, in one stack, score 40 tokens each; they share the target's tokenizer."""
    drafts = [folders["small"], make_draft(new_folder("second"), folders["target"], 3, 0.05)]
    llm = open_llm(folders["target"], drafts, spec=SPEC, draft_vocabulary=40, **TRITON)
    assert set(llm.stats()["draft_vocabularies"].values()) == {"same vocabulary, 40 of 64 tokens"}
    assert llm.engine.captured is not None
    known = rank_tokens(folders["target"])[:40]
    prompts = random_prompts([9], vocab=OWN)
    for params in ([greedy(4)], [greedy(4, temperature=0.9, seed=3)]):
        with watch(llm.engine) as rounds:
            trees = llm.generate(prompts, params, spec=SPEC)
        assert tokens_of(trees) == tokens_of(llm.generate(prompts, params, spec="off"))
        assert all(np.isin(each.tree.tokens[1:], known).all() for each in rounds)
        assert any(len(each.tree) > 1 for each in rounds)


def test_a_translated_draft_goes_step_by_step(folders: dict[str, Path]) -> None:
    llm = open_llm(folders["target"], [folders["shuffled"]], spec=SPEC, max_num_seqs=2, **TRITON)
    assert llm.engine.captured is not None
    assert any(isinstance(source, TranslatedDrafter) for source in llm.engine.sources.others)
    prompts = random_prompts([3, 20], vocab=OWN)
    trees, plain = (llm.generate(prompts, greedy(6), spec=spec) for spec in (SPEC, "off"))
    assert tokens_of(trees) == tokens_of(plain)
    assert all(output.metrics.accepted_by_source["shuffled"] > 1 for output in trees)
