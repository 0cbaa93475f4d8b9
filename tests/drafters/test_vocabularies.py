"""Drafts with other vocabularies, beside SSMs too: plain decoding's tokens, and a translation without loss."""

import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.drafters.test_drafts import first_proposals, proposals
from tests.helpers.exactness import differences, run
from tests.helpers.families import TYPICAL, make_model
from tests.helpers.models import (
    VOCAB,
    assert_same_tree,
    embedded_draft,
    greedy,
    make_llama,
    new_folder,
    open_llm,
    quick,
    random_prompts,
    tiny,
)
from tests.helpers.sampled import tokens_of
from tests.helpers.sharing import assert_clean
from tests.helpers.speech import speaking_folder
from tests.helpers.tokenizers_made import TEXT, byte_level, permuted, resized, save_tokenizer, sentencepiece_like
from treespec import LLM, SamplingParams, SpecConfig
from treespec.drafters.cross_tokenizer.by_text import TextDrafter
from treespec.drafters.cross_tokenizer.cross_tokenizer_drafter import CrossTokenizerDrafter
from treespec.drafters.cross_tokenizer.retokenize import Context
from treespec.drafters.cross_tokenizer.translated import TranslatedDrafter
from treespec.drawing.recording import watch
from treespec.errors import DraftError
from treespec.outputs import RequestOutput
from treespec_weights import default_folder

pytestmark = pytest.mark.slow

TREE = SpecConfig(nodes=16, max_depth=5, sources=("ssm",))
SPECS = {
    "16": TREE,
    "321": SpecConfig(branching=(3, 2, 1), sources=("ssm",)),
    "551": SpecConfig(branching=(5, 5, 1), sources=("ssm",)),
    "auto": SpecConfig(sources=("ssm",)),
    "naive": SpecConfig(nodes=16, verification="naive", sources=("ssm",)),
}
SAMPLED, COLD = {"temperature": 0.8, "seed": 5}, {"temperature": 1e-4, "seed": 1}
PROMPTS = ["def parse(self, args):\n    ", "The namespace of an option is", "x", "été 東京 🙂 naïve "]


def spoken(source: Path, folder: Path) -> Path:
    """A copy of a model with the speaking target's tokenizer."""
    shutil.copytree(source, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(speaking_folder() / name, folder / name)
    return folder


@functools.cache
def folders() -> dict[str, Path]:
    """Drafts of the speaking target, by the way in which they speak."""
    root = new_folder("vocabularies")
    drafts = tiny()[1]
    made = {f"same-{i}": spoken(draft, root / f"same-{i}") for i, draft in enumerate(drafts, start=1)}
    for i in (1, 2, 3):
        made[f"perm-{i}"] = permuted(made[f"same-{i}"], root / f"perm-{i}", seed=i)
    made["larger"] = resized(made["same-1"], root / "larger", VOCAB + 64)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}
    made["bpe"] = make_llama(root / "bpe", 8, vocab_size=700, **shape)
    save_tokenizer(made["bpe"], byte_level(700, TEXT.splitlines()[400:], ["<s>", "<|end|>"]))
    unigram = sentencepiece_like(150)
    made["unigram"] = make_llama(root / "unigram", 9, vocab_size=unigram.get_vocab_size() + 3, **shape)
    save_tokenizer(made["unigram"], unigram)
    return made


def by_text(text: bool = True, little: float = 0.5) -> Any:
    """While it lasts, drafts with another tokenizer write text however much they share, or where they share little."""
    return mock.patch("treespec_weights.vocabularies.LEAST_SHARE", 1.1 if text else little)


@functools.cache
def llm_of(*names: str, text: tuple[str, ...] = (), **options: Any) -> LLM:
    """The speaking target with some drafts."""
    assert not (text and any(name.startswith(("perm", "bpe", "unigram")) for name in names))
    with by_text(bool(text)):
        return open_llm(speaking_folder(), [folders()[name] for name in (*names, *text)], **options)


def accepted(outputs: Sequence[RequestOutput]) -> list[tuple[list[int], int]]:
    """Of each output the accepted tokens by source, and its target passes."""
    return [(list(o.metrics.accepted_by_source.values()), o.metrics.target_passes) for o in outputs]


def cross_tokenizer_drafters_of(llm: LLM) -> list[CrossTokenizerDrafter]:
    return [each for each in llm.engine.sources.others if isinstance(each, CrossTokenizerDrafter)]


# --- the tokens of plain decoding

KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "translated": (("perm-1",), ()),
    "by text": ((), ("perm-1",)),
    "other BPE": (("bpe",), ()),
    "unigram": (("unigram",), ()),
    "padded": (("larger",), ()),
    "beside SSMs": (("same-1", "perm-2", "larger", "bpe", "unigram"), ()),
    "text beside SSMs": (("same-1", "same-2"), ("perm-3", "bpe")),
}


@pytest.mark.parametrize(
    "kind, spec",
    [(kind, "16") for kind in KINDS]
    + [("translated", "321"), ("by text", "321"), ("text beside SSMs", "auto"), ("beside SSMs", "naive")]
    + [("unigram", "551")],
)
def test_the_tokens_are_those_of_plain_decoding(kind: str, spec: str) -> None:
    """Also where prompts end inside a character, and fixed trees have more children than the draft knows tokens."""
    names, text = KINDS[kind]
    llm = llm_of(*names, text=text)
    tokenizer = llm.get_tokenizer()
    whole = tokenizer.encode("東京🙂é")
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS] + random_prompts((1, 70))
    prompts += [whole[:end] for end in range(1, len(whole), 2)]
    for params in (greedy(16), greedy(16, **SAMPLED if spec != "551" else COLD)):
        plain, tree = (run(llm, prompts, params, each) for each in ("off", SPECS[spec]))
        assert not differences(plain, tree)
    assert_clean(llm)


# --- nothing is lost in translation


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("spec", quick(("16", "321", "naive"), ("16",)))
@pytest.mark.parametrize("batch", quick((1, 4), (4,)))
def test_a_shuffled_vocabulary_accepts_as_the_original(batch: int, spec: str, options: dict[str, Any]) -> None:
    """Ids, embedding and head permuted alike: the same trees and acceptance, of a prompt that is read in parts too."""
    prompts = random_prompts((700, 63, 7, 120))[:batch]
    results: list[Any] = []
    trees: list[Any] = []
    for name in ("same-1", "perm-1"):
        # Sums in the order of ids; all prompts in one step, as the number of steps would depend on their speed.
        llm = llm_of(name, max_model_len=900, max_num_batched_tokens=1024, compile=False)
        with watch(llm.engine) as rounds:
            results.append(accepted(llm.generate(prompts, greedy(40, **options), spec=SPECS[spec])))
        trees.append([(each.tree.tokens.tolist(), each.tree.parents.tolist(), each.path.tolist()) for each in rounds])
    assert results[0] == results[1] and trees[0] == trees[1]
    assert sum(sum(counts) for counts, _ in results[0]) > 20 * batch


@pytest.mark.parametrize("name", ["bpe", "unigram", "perm-3"])
def test_a_tree_does_not_depend_on_the_rounds_before(name: str) -> None:
    """Each equals the first one of a new request with the same tokens, also where a word was written anew."""
    llm = llm_of(name)
    drafter = cross_tokenizer_drafters_of(llm)[0]
    spec = SpecConfig(nodes=16, max_depth=4, sources=("ssm",))
    prompts = random_prompts((5, 40, 23, 31))
    with watch(llm.engine) as rounds:
        llm.generate(prompts, greedy(32), spec=spec)
    later = proposals([each for each in rounds if each.number > 1])
    running = {key: tree for key, tree in later.items() if tree.depths.max() == 4}
    first = first_proposals(llm, running, spec)
    compared = rewritten = 0
    for tokens, tree in running.items():
        key = list(tokens)
        grown, whole = Context(drafter.translation), Context(drafter.translation)
        start = next(len(prompt) for prompt in prompts if key[: len(prompt)] == prompt)
        grown.extend(key[:start])
        anew = [len(grown.tokens) > grown.extend([token]) for token in key[start:]]
        whole.extend(key)
        if grown.tokens == whole.tokens:  # long words are cut elsewhere when they come at once
            assert_same_tree(tree, first[tokens])
            compared += 1
            rewritten += any(anew)
    assert compared > 8
    assert name != "bpe" or rewritten, (compared, rewritten)


def test_embedded_models_speak_through_other_tokenizers(tmp_path: Path) -> None:
    """Real acceptance: an SSM of the target's vocabulary, one that is translated and one whose text is read."""
    drafts = ["ssm-1", permuted(embedded_draft("ssm-2"), tmp_path / "shuffled", 2)]
    prompts = ["import os\n\n\ndef read(path):\n", 'The table below shows the "usual" values of']
    spec = SpecConfig(nodes=24, sources=("ssm",))
    llm = open_llm(default_folder("target"), drafts, max_model_len=512)
    with by_text():
        third = permuted(embedded_draft("ssm-1"), tmp_path / "written", 3)
        text = open_llm(default_folder("target"), [third], max_model_len=512)
    for options in ({}, SAMPLED):
        plain = llm.generate(prompts, greedy(48, **options), spec="off")
        for each, least in ((llm, 20), (text, 10)):
            outputs = each.generate(prompts, greedy(48, **options), spec=spec)
            assert tokens_of(outputs) == tokens_of(plain)
            for name in each.stats()["drafts"]:
                assert sum(o.metrics.accepted_by_source.get(name, 0) for o in outputs) > least, name


# --- padded vocabularies


def test_a_larger_vocabulary_is_the_same_one() -> None:
    """Its further ids fall away before softmax: trees and acceptance are those of the draft without them."""
    prompts = random_prompts((30, 64))
    for options in ({}, SAMPLED):
        both = [accepted(llm_of(n).generate(prompts, greedy(30, **options), spec=TREE)) for n in ("same-1", "larger")]
        assert both[0] == both[1] and sum(both[0][0][0]) > 15
    assert llm_of("larger").stats()["draft_vocabularies"] == {"larger": "padded"}
    assert llm_of("larger").engine.sources.ssms is not None and not cross_tokenizer_drafters_of(llm_of("larger"))


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_a_smaller_vocabulary_never_guesses_what_it_lacks(
    tmp_path: Path, options: dict[str, Any], verification: str
) -> None:
    """The target has tokens, and says them, that the draft has no row for; it drafts on behind them."""
    target = resized(speaking_folder(), tmp_path / "target", VOCAB + 60, loud=1.0)
    llm = open_llm(target, [tiny()[1][0], tiny()[1][1]])
    assert set(llm.stats()["draft_vocabularies"].values()) == {"padded"}
    prompts = [[VOCAB + 5, 3, VOCAB + 59, 4], *random_prompts((20,), vocab=VOCAB + 60)]
    spec = SpecConfig(branching=(8, 2, 1), verification=verification, sources=("ssm",))
    with watch(llm.engine) as rounds:
        outputs = llm.generate(prompts, greedy(40, **options), spec=spec)
    if verification == "coupled":
        plain = llm.generate(prompts, greedy(40, **options), spec="off")
        assert tokens_of(outputs) == tokens_of(plain)
    said = [token for o in outputs for token in o.outputs[0].token_ids]
    assert max(said) >= VOCAB, "the target never said what the draft lacks"
    for each in rounds:
        assert (each.tree.tokens[1:] < VOCAB).all()
        for probs in each.tree.draft_probs:
            assert probs.shape == (VOCAB + 60,) and not probs[VOCAB:].any()
    assert any(each.tree.tokens[0] >= VOCAB and len(each.tree) > 1 for each in rounds)
    assert sum(sum(counts) for counts, _ in accepted(outputs)) > 5


# --- what may go wrong


def test_a_draft_that_computes_nan_is_silent(tmp_path: Path) -> None:
    broken = permuted(folders()["same-3"], tmp_path / "broken", 9)
    tensors = load_file(broken / "model.safetensors")
    tensors["lm_head.weight"][:] = torch.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    for text in (False, True):
        with by_text(text):
            llm = open_llm(speaking_folder(), [folders()["same-1"], broken])
        assert isinstance(cross_tokenizer_drafters_of(llm)[0], TextDrafter if text else TranslatedDrafter)
        for spec in (TREE, SpecConfig(nodes=16, verification="rejection")):
            params = greedy(20, temperature=0.7, seed=2)
            outputs = llm.generate(random_prompts((9, 30)), params, spec=spec)
            if spec is TREE:
                plain = llm.generate(random_prompts((9, 30)), params, spec="off")
                assert tokens_of(outputs) == tokens_of(plain)
            assert all("broken" not in o.metrics.accepted_by_source for o in outputs)
        cache = cross_tokenizer_drafters_of(llm)[0].cache
        assert all(torch.isfinite(pool).all() for pool in cache.pools)


def test_a_text_that_outgrows_the_draft(tmp_path: Path) -> None:
    """Where its own positions, or its pages, end, a draft is silent; the request goes on."""
    short = permuted(folders()["same-1"], tmp_path / "short", 4)
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 40}
    (short / "config.json").write_text(json.dumps(config))
    for text in (False, True):
        with by_text(text):
            llm = open_llm(speaking_folder(), [short])
        with watch(llm.engine) as rounds:
            outputs = llm.generate(random_prompts((10, 90)), greedy(60), spec=TREE)
        plain = llm.generate(random_prompts((10, 90)), greedy(60), spec="off")
        assert tokens_of(outputs) == tokens_of(plain)
        drafted = [len(each.context) for each in rounds if len(each.tree) > 1]
        assert drafted and max(drafted) <= 60 and min(len(each.tree) for each in rounds) == 1


def test_hybrids_draft_only_with_the_tokenizer_of_their_target(tmp_path: Path) -> None:
    folder = make_model(tmp_path, TYPICAL["lfm2"], 3, vocab_size=700)
    save_tokenizer(folder, byte_level(700, TEXT.splitlines()[400:], ["<s>", "<|end|>"]))
    with pytest.raises(DraftError, match=r"recurrent layers and another tokenizer"):
        open_llm(speaking_folder(), [folder])


def test_samples_aborts_and_streams_leave_nothing_behind() -> None:
    llm = llm_of("same-1", "perm-2", "bpe", max_num_seqs=2)
    params = SamplingParams(n=5, max_tokens=12, temperature=0.9, seed=1, ignore_eos=True)
    many = llm.generate(random_prompts((20,)), params, spec=TREE)[0]
    plain = llm.generate(random_prompts((20,)), params, spec="off")[0]
    assert [o.token_ids for o in many.outputs] == [o.token_ids for o in plain.outputs]
    for i, _ in enumerate(llm.stream(random_prompts((20,))[0], greedy(40), spec=TREE)):
        if i == 2:
            break
    assert_clean(llm)


def test_nothing_is_drafted_where_it_does_not_pay() -> None:
    llm = llm_of("unigram")
    with watch(llm.engine) as rounds:
        (output,) = llm.generate(random_prompts((20,)), greedy(150), spec=SpecConfig(sources=("ssm",)))
    assert output.metrics.target_passes > 100
    assert sum(len(each.tree) > 1 for each in rounds) < 50
