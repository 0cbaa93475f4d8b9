"""Drafts with a reduced vocabulary: the file, the head, and trees with the tokens of plain decoding."""

import json
import mmap
import shutil
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.exactness import assert_exact, run
from tests.helpers.heads_made import TargetShape, write_eagle1, write_eagle3
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
    tiny,
)
from tests.helpers.mtp_made import make_predictor
from tests.helpers.speech import rank_half, speaking_folder
from tests.helpers.tokenizers_made import TEXT, byte_level, permuted, save_tokenizer, sentencepiece_like
from treespec import SpecConfig
from treespec.config.engine_options import EngineOptions
from treespec.drawing.recording import watch
from treespec.errors import CheckpointError, ConfigError, DraftError
from treespec.models.model_config import ModelConfig
from treespec.startup import vocabularies
from treespec.startup.options import resolve
from treespec_kernels.linear.quantized import QuantizedWeight, dequantized
from treespec_weights.blocks import Blocks
from treespec_weights.draft_vocabulary import FILE, rank_tokens, read_draft_vocabulary, write_draft_vocabulary
from treespec_weights.quantize import quantize

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


# --- heads that are cut while loading


@pytest.fixture(scope="module", params=["the target's ids", "translated", "the target's head"])
def cut(request: pytest.FixtureRequest) -> tuple[Path, Path | str, list[int]]:
    """A target, a draft of it with the same tokens, by the same or by other ids, and the tokens that it may keep."""
    if request.param == "the target's head":
        target = make_predictor("qwen3_5", compiled=True, predicts=True)
        return target, "mtp", rank_half(target)
    draft = new_folder("cut") / "same"
    shutil.copytree(tiny()[1][0], draft)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(speaking_folder() / name, draft)
    known = rank_tokens(speaking_folder())[:352].tolist()
    is_same = request.param == "the target's ids"
    return speaking_folder(), draft if is_same else permuted(draft, draft.parent / "shuffled", 1), known


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("compile", quick((False, True), (True,)))
def test_a_cut_head_proposes_its_tokens_only(
    cut: tuple[Path, Path | str, list[int]], compile: bool, options: dict[str, Any]
) -> None:
    """Distributions that children are drawn from are normalised over these tokens."""
    target, draft, known = cut
    llm = open_llm(target, [draft], compile=compile, draft_vocabulary=len(known))
    (connection,) = llm.stats()["draft_vocabularies"].values()
    assert connection.endswith(f", {len(known)} of 512 tokens")
    prompts, params = random_prompts((5, 40), vocab=VOCAB), greedy(32, **options)
    plain = run(llm, prompts, params, "off")
    with watch(llm.engine) as rounds:
        assert assert_exact(llm, plain, SpecConfig(nodes=12, sources=("ssm",)), params).acceptance_length > 1.2
        llm.generate(prompts, params, spec=SpecConfig(nodes=12, verification="rejection", sources=("ssm",)))
    for each in rounds:
        assert np.isin(each.tree.tokens[1:], known).all()
        for probs in each.tree.draft_probs:
            assert not np.delete(probs, known).any() and abs(probs.sum() - 1) < 1e-5
    assert not options or any(len(each.tree.draft_probs) for each in rounds)


@pytest.mark.parametrize("compile", [False, True])
def test_cut_heads_are_one(compile: bool) -> None:
    """Heads that use the target's share its copy, with the bits of a head's own."""
    target, eagle = make_predictor("qwen3_5", compiled=True, predicts=True), new_folder("eagle")
    known, hidden = rank_half(target), ModelConfig.from_hf(target).shape.hidden_size
    shape = TargetShape(hidden_size=hidden, vocab_size=VOCAB)
    write_eagle1(eagle, shape, bias=True, own_embedding=False, seed=1)
    llm, alone = (
        open_llm(target, drafts, compile=compile, draft_vocabulary=len(known)) for drafts in (["mtp", eagle], [eagle])
    )
    [mtp, head], [own] = (each.engine.sources.ssms.models for each in (llm, alone))
    assert head.vocabulary_head is mtp.vocabulary_head and own.vocabulary_head is own.decoder
    states = torch.randn(3, hidden, generator=torch.Generator().manual_seed(2))
    assert torch.equal(head.probs(states), own.probs(states)) and torch.equal(head.logits(states), own.logits(states))
    prompts, params = random_prompts((5, 40), vocab=VOCAB), greedy(24)
    with watch(llm.engine) as rounds:
        spec = SpecConfig(nodes=12, sources=("ssm",))
        assert assert_exact(llm, run(llm, prompts, params, "off"), spec, params).acceptance_length > 1.2
    assert all(np.isin(each.tree.tokens[1:], known).all() for each in rounds)


def test_tokens_rank_by_counts_then_by_script_and_merges(tmp_path: Path) -> None:
    lines = [*TEXT.splitlines(), *["\u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440"] * 400]
    source = save_tokenizer(tmp_path / "bpe", byte_level(700, lines))
    raw = json.loads((source / "tokenizer.json").read_text())
    tokens = {id: token for token, id in raw["model"]["vocab"].items()}
    ranked = rank_tokens(source)
    assert sorted(ranked) == sorted(tokens) and ranked[0] == 0  # the special token
    assert all(len(tokens[id]) == 1 for id in ranked[1:257])
    made = ["".join(merge) for merge in raw["model"]["merges"]]
    cyrillic = [token for token in made if "\u00d0" in token or "\u00d1" in token]
    half = {tokens[id] for id in ranked[257 : 257 + len(made) // 2]}
    assert abs(len(half & set(cyrillic)) - len(cyrillic) / 2) <= 2 < len(cyrillic)
    latin = [token for token in made if token.isascii()]
    assert half >= set(latin[: len(latin) // 3]) and not half & set(latin[-len(latin) // 3 :])
    rare = raw["model"]["vocab"][latin[-1]]
    assert rank_tokens(source, texts=[f"{latin[-1]} {latin[-1]}"])[257:].tolist().index(rare) < 3
    unigram = save_tokenizer(tmp_path / "unigram", sentencepiece_like(150))
    pieces = json.loads((unigram / "tokenizer.json").read_text())["model"]["vocab"]
    words = [pieces[id][1] for id in rank_tokens(unigram) if len(pieces[id][0]) > 1 and pieces[id][1] < 0]
    assert words[257:] == sorted(words[257:], reverse=True)


def test_ranks_are_stored_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tokenizer(tmp_path / "bpe", byte_level(400, TEXT.splitlines()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    limit, kept, files = vocabularies.HeadLimit(300, always=True), [], []
    for ends in ((), (), (399,), (399,)):
        kept.append(limit.kept(source, 400, ends))
        [stored] = (tmp_path / "cache").rglob("*.npy")
        files.append(stored.stat().st_ino)
    assert files[0] == files[1] != files[2] == files[3], "a rank that is stored replaces none"
    assert np.array_equal(kept[0], kept[1]) and np.array_equal(kept[2], kept[3])
    assert np.array_equal(kept[0], np.sort(rank_tokens(source)[:300])) and 399 in kept[2]
    shutil.copy(save_tokenizer(tmp_path / "other", byte_level(400, TEXT.splitlines()[::2])) / "tokenizer.json", source)
    assert np.array_equal(limit.kept(source, 400, ()), np.sort(rank_tokens(source)[:300]))
    whole = stored.read_bytes()
    for damaged in (b"", whole[:200]):
        stored.write_bytes(damaged)
        assert limit.kept(source, 400, ()) is not None and stored.read_bytes() == whole


def test_rows_of_a_quantised_head_are_gathered() -> None:
    head, kept = torch.randn(16, 32), np.array([1, 4, 11])
    whole = QuantizedWeight(*quantize(head, 4, 16))
    names = ("lm_head", "lm_head_scale", "lm_head_zero")
    weights = {name: part for name, part in zip(names, whole, strict=True) if part is not None} | {"embed": head}
    tokens = vocabularies.fit_weights(weights, 14, None, kept)
    cut = QuantizedWeight(*(weights.get(name) for name in names))  # type: ignore[arg-type]
    assert tokens is not None and tokens.tolist() == [1, 4, 11] and torch.equal(weights["embed"], head[:14])
    assert torch.equal(dequantized(cut), dequantized(whole)[kept])
    dropped = []

    class Mapping(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            dropped.append(advice)

    mapping = Mapping(-1, 16 * 8704)
    rows = torch.frombuffer(mapping, dtype=torch.uint8).view(16, 8704)
    rows.copy_(torch.randint(256, rows.shape))
    blocks = Blocks("Q8_0", rows, mapping)
    tied = {"embed": blocks}
    assert vocabularies.fit_weights(tied, 16, None, kept) is not None
    assert dropped, "pages from which rows were copied stay in memory"
    assert torch.equal(tied["lm_head"].rows, blocks.rows[kept]) and torch.equal(tied["embed"].rows, blocks.rows)


def cutting_small_heads() -> AbstractContextManager[object]:
    """While it lasts, "auto" cuts heads of as many tokens as those of the tests have."""
    return mock.patch.object(vocabularies, "MIN_VOCABULARY", VOCAB)


def test_heads_that_can_be_cut() -> None:
    """Also that the memory of those rows is planned for, and that "auto" works without ranks."""
    target, shape = make_predictor("qwen3_5"), TargetShape(hidden_size=48, vocab_size=VOCAB)
    rank_half(target)
    for name, own in (("own", None), ("less", 96)):
        options = {"layout": "specforge", "own_embedding": False, "boundaries": (0, 1, 2)}
        write_eagle3(target / name, shape, draft_vocab=own, seed=1, **options)
    sizes = []
    for limit in (None, 256):
        drafts = ["mtp", target / "own", target / "less"]
        options = EngineOptions(model=target, drafts=drafts, device="cpu", draft_vocabulary=limit)
        sizes.append([head.num_parameters for _, head in resolve(options).heads])
    mtp, own, less = (cut - whole for whole, cut in zip(*sizes, strict=True))
    assert (mtp, own, less) == (256 * 48, -256 * 48, 0)
    with cutting_small_heads():
        found = open_llm(target, drafts).stats()["draft_vocabularies"]
        assert [value.endswith(", 256 of 512 tokens") for value in found.values()] == [True, True, False]
        (target / "tokenizer.json").write_text("{}")
        found = open_llm(target, drafts, tokenizer=speaking_folder()).stats()["draft_vocabularies"]
        assert not any("512" in value for value in found.values())


def test_experts_that_a_row_does_not_choose_do_not_count() -> None:
    """A head is large by what a pass reads."""
    config = ModelConfig.from_hf(make_predictor("qwen3_5_moe"))
    assert config.shape.experts is not None
    shape = replace(config.shape, vocab_size=65_536, experts=replace(config.shape.experts, count=65_536))
    assert vocabularies.HeadLimit().applies_to(replace(config, shape=shape))


def test_the_option(tmp_path: Path) -> None:
    target, drafts = tiny()
    for value in (0, True, 1.5, str(tmp_path / "absent.txt")):
        with pytest.raises(ConfigError, match=r"draft_vocabulary=.* valid: \"auto\", None, the number of tokens"):
            open_llm(target, drafts, draft_vocabulary=value)
    with pytest.raises(DraftError, match=r"ranks the tokens of draft ssm-1 by its tokenizer, and .* has none"):
        open_llm(target, drafts, draft_vocabulary="100")
    whole = open_llm(target, drafts, draft_vocabulary=VOCAB).stats()["draft_vocabularies"]
    assert not any(str(VOCAB) in value for value in whole.values()), "no ranks are needed to keep all tokens"
    (tmp_path / "own.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "zebra"}]}))
    rows = {"auto": "", "none": "", str(tmp_path / "own.jsonl"): ", 256 of 512 tokens"}
    for value, cut in rows.items():
        llm = open_llm(speaking_folder(), drafts[:1], draft_vocabulary=value)
        assert llm.stats()["draft_vocabularies"] == {"ssm-1": f"same vocabulary{cut}"}
    with cutting_small_heads():
        llm = open_llm(speaking_folder(), drafts[:1])
    assert llm.stats()["draft_vocabularies"] == {"ssm-1": "same vocabulary, 256 of 512 tokens"}
    assert 256 in llm.engine.sources.ssms.models[0].cost_key  # its passes cost less than those of a whole head
