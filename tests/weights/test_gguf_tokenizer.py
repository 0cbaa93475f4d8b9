"""Tokenizers of GGUF files, against the tokenizers that their metadata is made of."""

import argparse
import ast
import functools
import json
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.helpers.gguf_files import add_value, finish, metadata_of, write_gguf
from tests.helpers.models import greedy, make_llama, open_llm, quick
from tests.helpers.tokenizers_made import save_tokenizer
from treespec.errors import ConfigError, RequestError
from treespec.text.prompt_tokenizer import load_tokenizer
from treespec_weights import CheckpointError, convert_checkpoint, read_vocabulary
from treespec_weights.codec import Codec
from treespec_weights.documents import read_document, write_documents
from treespec_weights.vocabularies import connect

LINES = [line for module in (argparse, ast, tarfile) for line in Path(module.__file__).read_text().split("\n")] + [
    "  hi   there",
    "\t\ttab\r\nline\n\n\nend ",
    "        12345 1,234,567.89 a1b22 ٣٤٥ Ⅻ½",
    "don't DON'T we'LL I'm",
    "naïve cafe\u0301 Ünïcode ﬁ camelCaseWord HTTPServer",
    "日本語のテキスト 漢字 😀👩‍👩‍👧",
    "<|start|>user\nhi<|end|> <think>\u00a0\u2003",
    "x" * 300 + " " * 70 + "y",
]
TEMPLATE = "{% for m in messages %}<|start|>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"

# As published in the models' tokenizer.json.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
    r"|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}"
    r"\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {"llama-bpe": LLAMA3, "qwen2": QWEN2, "qwen35": QWEN35, "tekken": TEKKEN, "gpt-4o": GPT4O, "dbrx": LLAMA3}
SPLITS |= {"deepseek-r1-qwen": QWEN2, "glm4": LLAMA3, "seed-coder": QWEN2.replace(r"}]+[\r\n]*", r"}\r\n]+")}
ADDS_BOS = ("llama-bpe", "tekken")
IGNORE_MERGES = (*ADDS_BOS, "glm4")


@functools.cache
def byte_level(pre: str) -> Tokenizer:
    """A tokenizer that splits as a published one, trained on a few files; control tokens first."""
    split = SPLITS.get(pre)
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    first = [pre_tokenizers.Digits(individual_digits=True)] if pre in ("smollm", "command-r") else []
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in IGNORE_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*first, *([pre_tokenizers.Split(Regex(split), "isolated")] if split else []), spelled]
    )
    if pre in ("qwen2", "qwen35", "command-r"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    controls = [AddedToken(name, special=True, normalized=False) for name in ("<|start|>", "<|end|>")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained = {"vocab_size": 2000, "special_tokens": controls, "initial_alphabet": alphabet}
    tokenizer.train_from_iterator(LINES, trainers.BpeTrainer(**trained, show_progress=False))
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if pre in ADDS_BOS:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|start|> $A", pair="<|start|> $A <|start|>:1 $B:1", special_tokens=[("<|start|>", 0)]
        )
    return tokenizer


def write(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file of metadata only."""
    writer = gguf.GGUFWriter(path, metadata.get("general.architecture", "llama"))
    for key, value in metadata.items():
        if key != "general.architecture" and value is not None:
            add_value(writer, key, value)
    return finish(writer)


def chat_model(folder: Path, more: dict[str, Any]) -> tuple[Path, Path]:
    """A random Llama of one layer with a tokenizer of SmolLM's kind: its folder, and a GGUF file with more metadata."""
    tokenizer = byte_level("smollm")
    model = make_llama(folder / "folder", 0, vocab_size=tokenizer.get_vocab_size(), num_hidden_layers=1)
    metadata = metadata_of(json.loads(tokenizer.to_str())) | {"tokenizer.ggml.pre": "smollm"} | more
    path = write_gguf(folder / "m.gguf", model, tokenizer=metadata)
    return save_tokenizer(model, tokenizer), path


def tokenizer_of(path: Path) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(read_document(path, "tokenizer.json")))


def differing(one: Tokenizer, other: Tokenizer, lines: Sequence[str] = LINES) -> list[str]:
    pairs = zip(one.encode_batch(lines), other.encode_batch(lines), lines, strict=True)
    return [line for ours, theirs, line in pairs if ours.ids != theirs.ids]


def test_files_with_one_tokenizer_are_connected_without_building_it(tmp_path: Path) -> None:
    metadata = metadata_of(json.loads(byte_level("qwen2").to_str()))
    stored = metadata["tokenizer.ggml.tokens"]
    target, draft = (write(tmp_path / f"{name}.gguf", metadata | {"tokenizer.ggml.pre": "new"}) for name in "td")
    assert str(connect(target, len(stored), draft, len(stored))) == "same vocabulary"
    other = write(tmp_path / "o.gguf", metadata | {"tokenizer.ggml.pre": "new", "tokenizer.ggml.tokens": stored[:-1]})
    with pytest.raises(CheckpointError, match="'new' is not supported"):
        connect(target, len(stored), other, len(stored))


PRE = ("gpt-2", "default", "smollm", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "dbrx")
PRE += ("command-r", "deepseek-r1-qwen", "glm4", "seed-coder")


@pytest.mark.parametrize("pre", quick(PRE, ("gpt-2", "llama-bpe", "qwen2")))
def test_byte_level(pre: str, tmp_path: Path) -> None:
    original = byte_level(pre)
    metadata = metadata_of(json.loads(original.to_str())) | {"tokenizer.ggml.pre": pre}
    padded = [*metadata["tokenizer.ggml.tokens"], "[PAD2001]", "[PAD2002]"]
    metadata |= {"tokenizer.ggml.tokens": padded, "tokenizer.ggml.bos_token_id": 0}
    metadata["tokenizer.ggml.token_type"] += [5, 5]
    path = write(tmp_path / "m.gguf", metadata)
    made = tokenizer_of(path)
    assert not differing(original, made)
    folder = save_tokenizer(tmp_path / "folder", original)
    assert read_vocabulary(path) == read_vocabulary(folder)
    one, other = Codec.read(path), Codec.read(folder)
    assert (one.tokens, one.controls, one.start) == (other.tokens, other.controls, other.start)
    for line in LINES[-20:]:
        assert made.decode(made.encode(line).ids) == original.decode(original.encode(line).ids)
    read, built = folder / "read", load_tokenizer(None, path)
    read.mkdir()
    write_documents(path, read)
    written = load_tokenizer(None, read)
    assert built.backend_tokenizer.to_str() == written.backend_tokenizer.to_str()
    assert str(built).replace(str(path), str(read)) == str(written)
    if pre == "smollm":  # GPT-2's rule, which transformers takes for unknown names, keeps a space with the digit
        assert made.encode("    5").tokens == ["ĠĠĠĠ", "5"] and made.encode("12345").tokens == list("12345")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "prefix"), [("llama", True), ("llama", False), ("gemma3", True), ("gemma3", False), ("gemma4", False)]
)
def test_sentencepiece(arch: str, prefix: bool, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    protobuf = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    runs = [] if prefix else ["▁" * length for length in range(2, 32)]  # as Gemma
    spaces = {"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True, "add_dummy_prefix": prefix}
    symbols = {"user_defined_symbols": ["<tool>", *runs], "control_symbols": ["<|end|>"], "split_digits": True}
    lines = {"sentence_iterator": iter([line for line in LINES if line.strip()]), "model_prefix": f"{tmp_path}/spm"}
    lines |= {"character_coverage": 0.99, "normalization_rule_name": "identity"}
    kind = {"model_type": "bpe", "vocab_size": 1500, "byte_fallback": True, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(**kind, **lines, **spaces, **symbols)
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    model = protobuf.ModelProto()
    model.ParseFromString((tmp_path / "spm.model").read_bytes())
    pieces = [(each.piece.replace("▁", " ") if each.type == 4 else each.piece) for each in model.pieces]
    scores, types = ([getattr(each, name) for each in model.pieces] for name in ("score", "type"))
    values = {"model": "llama", "tokens": pieces, "scores": scores, "token_type": types}
    values |= {"bos_token_id": 1, "unknown_token_id": 0, "add_space_prefix": prefix}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    if arch == "gemma4":  # whose merges are stored
        other = tokenizer_of(write(tmp_path / "other.gguf", metadata | {"general.architecture": "gemma3"}))
        merges = [" ".join(pair) for pair in json.loads(other.to_str())["model"]["merges"]]
        metadata |= {"tokenizer.ggml.model": arch, "tokenizer.ggml.merges": merges}
    made = tokenizer_of(write(tmp_path / "m.gguf", metadata | {"general.architecture": arch}))
    for line in LINES:
        if "<|" not in line:  # control tokens are found in a text, as llama.cpp and transformers do
            ids = original.encode(line)
            assert made.encode(line).ids == [1, *ids], line
            assert made.encode(line, add_special_tokens=False).ids == ids
            assert made.decode(ids) == original.decode(ids)
    assert made.token_to_id("<|end|>") in made.encode("a<|end|>").ids


@pytest.mark.slow
def test_generating_and_chatting(tmp_path: Path) -> None:
    tokenizer = byte_level("smollm")
    folder, path = chat_model(tmp_path, {"tokenizer.chat_template": TEMPLATE, "tokenizer.ggml.eos_token_id": 1})
    llm, original = open_llm(path), open_llm(folder)
    (output,), (expected,) = (each.generate("def f(x):", greedy(6)) for each in (llm, original))
    assert output.outputs[0].text == expected.outputs[0].text != ""
    (answer,) = llm.chat([{"role": "user", "content": "hi"}], greedy(3))
    assert answer.prompt_token_ids == tokenizer.encode("<|start|>user: hi<|end|>").ids
    assert llm.get_tokenizer().eos_token == "<|end|>"
    assert open_llm(folder, tokenizer=path).get_tokenizer().encode("ab 1") == tokenizer.encode("ab 1").ids
    drafted = open_llm(path, [folder]).stats()["draft_vocabularies"]
    assert drafted == {"folder": "same vocabulary"}
    convert_checkpoint(path, tmp_path / "new")
    converted = load_tokenizer(None, tmp_path / "new")
    assert converted.get_vocab() == llm.get_tokenizer().get_vocab() and converted.chat_template == TEMPLATE
    assert converted.encode("def f(x):") == tokenizer.encode("def f(x):").ids


@pytest.mark.slow
@pytest.mark.parametrize("default", [TEMPLATE, None])
def test_named_chat_templates(default: str | None, tmp_path: Path) -> None:
    metadata = {"tokenizer.chat_template": default} if default else {}
    metadata |= {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "{{ tools[0].name }}"}
    llm = open_llm(chat_model(tmp_path, metadata)[1])
    messages = [{"role": "user", "content": "hi"}]
    assert llm.chat(messages, greedy(1), tools=[{"name": "look"}])[0].prompt == "look"
    if default:
        assert llm.chat(messages, greedy(1))[0].prompt == "<|start|>user: hi<|end|>"
    else:
        with pytest.raises(RequestError, match=r"multiple chat templates with no default.*\['tool_use'\]"):
            llm.chat(messages, greedy(1))


@pytest.mark.slow
def test_a_tokenizer_beside_the_file_comes_first(tmp_path: Path) -> None:
    beside, inside = byte_level("llama-bpe"), byte_level("smollm")
    metadata = metadata_of(json.loads(inside.to_str())) | {"tokenizer.ggml.pre": "unknown-rule"}
    metadata |= {"tokenizer.chat_template": TEMPLATE}
    path = write(tmp_path / "m.gguf", metadata)
    save_tokenizer(tmp_path, beside)
    assert not differing(beside, tokenizer_of(path))
    assert load_tokenizer(None, path).chat_template == TEMPLATE
    config = {"tokenizer_class": "TokenizersBackend", "chat_template": "{{ 1 }}", "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = load_tokenizer(None, path)
    assert (found.chat_template, found.eos_token) == ("{{ 1 }}", "<|end|>")
    assert found.encode("x") == beside.encode("x").ids
    (tmp_path / "chat_template.jinja").write_text("{{ 2 }}")
    assert load_tokenizer(None, path).chat_template == "{{ 2 }}"
    bare = write(tmp_path / "bare.gguf", {"general.architecture": "llama"})
    assert load_tokenizer(None, bare) is not None
    (tmp_path / "alone").mkdir()
    assert load_tokenizer(None, Path(shutil.move(bare, tmp_path / "alone"))) is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pre": "mpt"}, r"pre': 'mpt' is not supported; supported: gpt-2, .*tokenizer.json beside the"),
        ({"pre": None}, r"'tokenizer.ggml.pre': missing; supported: gpt-2, .*or give LLM\(tokenizer=...\)"),
        ({"model": "bert"}, r"'tokenizer.ggml.model': 'bert' is not supported; supported: 'gpt2' .*, 'llama'"),
        ({"merges": None}, r"'tokenizer.ggml.merges': missing: the file is incomplete; put the original"),
        ({"merges": ["a b c"]}, "refused by the tokenizers library"),
        ({"model": "llama"}, r"'tokenizer.ggml.scores': missing, or not one for each of 2,\d+ tokens"),
        ({"tokens": [1, 2]}, r"'tokenizer.ggml.tokens': not a list of strings"),
    ],
)
def test_unusable_tokenizers(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    metadata = metadata_of(json.loads(byte_level("gpt-2").to_str())) | {"tokenizer.ggml.pre": "gpt-2"}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    path = write(tmp_path / "m.gguf", metadata)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(None, path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="is not a folder with tokenizer files"):
        load_tokenizer(tmp_path / "empty", "")
