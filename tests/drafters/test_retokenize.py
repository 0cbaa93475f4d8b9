"""Texts in the tokens of another tokenizer: bytes of tokens, and contexts that grow token by token."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.tokenizers_made import TEXT, byte_level, letters, save_tokenizer, sentencepiece_like
from treespec.drafters.cross_tokenizer.retokenize import MAX_WORD, Context, Translation
from treespec.errors import CheckpointError
from treespec_weights import default_folder
from treespec_weights.codec import Codec
from treespec_weights.vocabularies import connect, intersection

LINES = TEXT.splitlines()
SAMPLES = [
    "def f(x):\n    return x + 1\n",
    "The quick  brown fox\t\tjumps.\n\n\nOver",
    "été, Straße, niño, 東京は今日も晴れです。 привет 🙂🙃 done",
    "a",
    " lead",
    "no_spaces_at_all_" * 30,
    "日本語" * 40,
]


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Codec]:
    root = tmp_path_factory.mktemp("tokenizers")
    made: dict[str, Any] = {
        "small": byte_level(400, LINES[:300]),
        "other": byte_level(700, LINES[300:], ["<s>", "<|end|>"]),
        "prefix": byte_level(500, LINES[200:], prefix=True),
        "unigram": sentencepiece_like(200),
    }
    read = {name: Codec.read(save_tokenizer(root / name, tokenizer)) for name, tokenizer in made.items()}
    return read | {"embedded": Codec.read(default_folder("target"))}


def text_of(codec: Codec, ids: list[int]) -> bytes:
    return b"".join(codec.tokens[id] or b"" for id in ids)


def translation(codecs: dict[str, Codec], target: str, draft: str) -> Translation:
    own, other = codecs[target], codecs[draft]
    return Translation(own, other, len(own.tokens) + 3, len(other.tokens) + 5)


@pytest.mark.parametrize("name", ["small", "other", "prefix", "unigram", "embedded"])
def test_a_codec_writes_what_it_reads(codecs: dict[str, Codec], name: str) -> None:
    """Text comes back byte for byte, from the middle of a text as from its beginning, and so do broken characters."""
    codec = codecs[name]
    for sample in SAMPLES:
        assert text_of(codec, codec.encode(sample)) == sample.encode()
        data = sample.encode()
        for end in (1, 5, len(data) // 2, len(data) - 1):
            assert text_of(codec, codec.encode_bytes(data[:end])) == data[:end]
            assert text_of(codec, codec.encode_bytes(data[end:])) == data[end:]
    assert len(codec.byte_ids) == 256
    assert all(codec.tokens[id] == bytes([byte]) for byte, id in codec.byte_ids.items())


@pytest.mark.parametrize("target, draft", [("embedded", "unigram"), ("unigram", "other"), ("small", "embedded")])
def test_the_intersection_maps_equal_bytes(codecs: dict[str, Codec], target: str, draft: str) -> None:
    own, other = codecs[target], codecs[draft]
    found = intersection(own, other, len(own.tokens), len(other.tokens))
    mapped = np.flatnonzero(found >= 0)
    assert len(mapped) > 256
    names = [{id: name for name, id in codec.controls.items()} for codec in (own, other)]
    for id in mapped.tolist():
        assert (own.tokens[id], names[0].get(id)) == (other.tokens[found[id]], names[1].get(found[id]))
    kept = found[mapped]
    assert len(set(kept.tolist())) == len(kept)  # one to one
    texts = {own.tokens[id] for id in mapped.tolist()}
    assert not [data for data in other.tokens if data and data in own.tokens and data not in texts]


PAIRS = [
    ("embedded", "small"),
    ("embedded", "unigram"),
    ("unigram", "embedded"),
    ("small", "other"),
    ("other", "prefix"),
]


@pytest.mark.parametrize("target, draft", PAIRS)
@pytest.mark.parametrize("sample", range(len(SAMPLES)))
def test_a_context_says_the_same_text(codecs: dict[str, Codec], target: str, draft: str, sample: int) -> None:
    """However the tokens arrive, one by one or many at once, and wherever they cut characters."""
    own = translation(codecs, target, draft)
    tokens = codecs[target].encode(SAMPLES[sample])
    adds, had = codecs[draft].spaces_first, codecs[target].spaces_first  # before a text
    rng = random.Random(sample)
    for steps in (1, 3, 40, len(tokens)):
        context, at = Context(own), 0
        while at < len(tokens):
            end = min(at + rng.randint(1, steps), len(tokens))
            before = list(context.tokens)
            same = context.extend(tokens[at:end])
            assert context.tokens[:same] == before[:same]
            assert same == len(before) or context.tokens[same : same + 1] != before[same : same + 1]
            at = end
            said = text_of(codecs[target], tokens[:at])
            said = b" " + said if adds and not had else said.removeprefix(b" ") if had and not adds else said
            assert text_of(codecs[draft], context.tokens) == said or (not said and context.tokens == [0])
        assert context.num_encoded == len(tokens)
        assert tuple(context.tokens[: len(own.draft.start)]) == own.draft.start


@pytest.mark.slow
def test_known_words_are_taken_one_to_one(codecs: dict[str, Codec]) -> None:
    """Also where the draft's tokenizer would cut them in another way."""
    own = translation(codecs, "small", "embedded")
    spelled = [codecs["small"].byte_ids[byte] for byte in b" hello"]
    context = Context(own)
    context.extend(spelled)
    assert context.tokens == [codecs["embedded"].byte_ids[byte] for byte in b" hello"]
    assert len(codecs["embedded"].encode(" hello")) < len(context.tokens)


@pytest.mark.slow
def test_no_more_than_a_word_is_written_again(codecs: dict[str, Codec]) -> None:
    own = translation(codecs, "embedded", "small")
    context = Context(own)
    tokens = codecs["embedded"].encode("東京" * 400)
    context.extend(tokens[:1000])
    most = 0
    for token in tokens[1000:]:
        before = len(context.tokens)
        most = max(most, before - context.extend([token]))
    assert most <= 4 * (MAX_WORD + 2)


@pytest.mark.slow
def test_control_tokens_are_no_text(codecs: dict[str, Codec]) -> None:
    """One that both have is taken over, one that the draft lacks is left out, an end token is an end token."""
    own, other = codecs["other"], codecs["small"]
    plain = Translation(own, other, len(own.tokens), len(other.tokens))
    ends = Translation(own, other, len(own.tokens), len(other.tokens), ends=([own.controls["<s>"]], [7]))
    text = own.encode(" one two")
    tokens = [own.controls["<s>"], *text, own.controls["<|end|>"], *text]
    for each, first in ((plain, []), (ends, [7])):
        for step in (1, len(tokens)):
            context = Context(each)
            for at in range(0, len(tokens), step):
                context.extend(tokens[at : at + step])
            written = each.encode(text)
            assert context.tokens == [*first, *written, other.controls["<|end|>"], *written]
    nothing = Context(plain, fallback=5)
    nothing.extend([own.controls["<s>"]])
    assert nothing.tokens == [5]


@pytest.mark.slow
def test_a_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "Nonsense", "vocab": {"a": 0}}}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*refused by the tokenizers library"):
        Codec.read(tmp_path)
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}})
    )
    with pytest.raises(CheckpointError, match="'a' has the id 4294967295; valid: up to"):  # a list of 34 GB
        Codec.read(tmp_path)
    raw = json.loads(sentencepiece_like(3).to_str())
    raw["post_processor"]["single"][0]["SpecialToken"]["id"] = "<none>"  # the library panics
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="refused by the tokenizers library"):
        Codec.read(tmp_path)


@pytest.mark.slow
def test_connections(tmp_path: Path) -> None:
    folders = {
        "a": save_tokenizer(tmp_path / "a", letters("abcdefgh")),
        "same": save_tokenizer(tmp_path / "same", letters("abcdefgh")),
        "more": save_tokenizer(tmp_path / "more", letters("abcdefghij")),
        "shuffled": save_tokenizer(tmp_path / "shuffled", letters("hgfedcba")),
        "strange": save_tokenizer(tmp_path / "strange", letters("zyxwvutsrqpo")),
        "none": tmp_path / "none",
    }
    folders["none"].mkdir()

    def kind(target: str, size: int, draft: str, other: int) -> str:
        return connect(folders[target], size, folders[draft], other).kind

    assert kind("a", 8, "same", 8) == "same"
    assert kind("a", 8, "same", 64) == "padded" == kind("a", 128, "same", 64)
    assert kind("a", 8, "more", 10) == "padded"  # no id means two things
    assert kind("a", 10, "more", 10) == "same"
    assert kind("a", 8, "shuffled", 8) == "translated"
    assert kind("a", 8, "strange", 12) == "text"
    assert kind("none", 8, "none", 8) == "same" == kind("a", 8, "none", 8)
    assert kind("a", 8, "none", 64) == "padded" == kind("none", 128, "a", 64)
    assert kind("none", 8, "none", 9) == "none"
    assert kind("a", 8, "none", 5000) == "none" == kind("a", 8, "none", 7)
    shown = str(connect(folders["a"], 8, folders["shuffled"], 8))
    assert shown == "translated (TLI, 100% of tokens)"
