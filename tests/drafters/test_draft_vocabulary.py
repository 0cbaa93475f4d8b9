"""Drafts with a reduced vocabulary: the file, the head, and trees with the tokens of plain decoding."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.helpers.exactness import assert_exact, run
from tests.helpers.models import (
    VOCAB,
    greedy,
    make_draft,
    make_llama,
    new_folder,
    open_llm,
    quick,
    random_prompts,
    reduce_vocabulary,
)
from treespec import SpecConfig
from treespec.errors import CheckpointError
from treespec_weights.draft_vocabulary import FILE, read_draft_vocabulary, write_draft_vocabulary

KNOWN = 256


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def models(request: pytest.FixtureRequest) -> tuple[Path, list[Path]]:
    """A target, and two reduced drafts whose vocabularies differ."""
    target = make_llama(new_folder("target"), 1, tie_word_embeddings=request.param)
    drafts = []
    for i, noise in enumerate((0.02, 0.04)):
        full = make_draft(new_folder("full"), target, i + 1, noise)
        own = np.sort(np.random.default_rng(i).choice(VOCAB, KNOWN + 16 * i, replace=False))
        drafts.append(reduce_vocabulary(new_folder("draft"), full, np.concatenate([own, [-1]])))
    return target, drafts


@pytest.mark.parametrize("compile", quick((False, True), (True,)))
def test_trees_have_plain_tokens_and_no_unknown_proposals(models: tuple[Path, list[Path]], compile: bool) -> None:
    target, drafts = models
    llm = open_llm(target, drafts, compile=compile)
    prompts = random_prompts((5, 40), vocab=VOCAB)
    plain = run(llm, prompts, greedy(32), "off")
    proposed: set[int] = set()
    llm.add_round_observer(lambda record: proposed.update(record.tree.tokens[1:].tolist()))
    found = assert_exact(llm, plain, SpecConfig(nodes=16, sources=("ssm",)))
    assert found.acceptance_length > 1.2
    known = set[int]()
    for draft in drafts:
        rows = len(load_file(draft / "model.safetensors")["model.embed_tokens.weight"])
        known.update(read_draft_vocabulary(draft, rows, VOCAB))  # type: ignore[arg-type]
    assert proposed <= known
    assert set(llm.stats()["draft_vocabularies"].values()) == {"reduced"}


@pytest.mark.parametrize(
    ("ids", "size", "message"),
    [
        ([0, 3, 3], VOCAB, "3 ids for 3 rows; valid: one per row, ascending"),
        ([0, 3], VOCAB, "2 ids for 3 rows"),
        ([0, 3, VOCAB], VOCAB, "ascending"),
        ([0, 3, -1], 600, "maps to a vocabulary of 600 tokens, the target has 512"),
    ],
)
def test_a_wrong_map_is_refused(tmp_path: Path, ids: list[int], size: int, message: str) -> None:
    write_draft_vocabulary(tmp_path, np.array(ids), size)
    with pytest.raises(CheckpointError, match=message):
        read_draft_vocabulary(tmp_path, 3, VOCAB)


def test_a_damaged_map_is_refused(tmp_path: Path) -> None:
    assert read_draft_vocabulary(tmp_path, 3, VOCAB) is None
    (tmp_path / FILE).write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="not a draft vocabulary"):
        read_draft_vocabulary(tmp_path, 3, VOCAB)
