"""Models whose tokenizer is a sentencepiece model alone: read where the packages for it are installed, and refused with
the command that installs them where they are not."""

import io
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers.models import make_llama, open_llm
from tests.helpers.speech import speaking_folder
from treespec import LLM, SamplingParams
from treespec.errors import CheckpointError, ConfigError

VOCAB = 400
PACKAGES = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a sentencepiece tokenizer of Llama's kind."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs the extra `sentencepiece`")
    pytest.importorskip("google.protobuf", reason="needs the extra `sentencepiece`")
    made = make_llama(tmp_path_factory.mktemp("sentencepiece") / "model", 0, vocab_size=VOCAB, eos_token_id=2)
    written, lines = io.BytesIO(), Path(__file__).read_text().splitlines()
    options = {"vocab_size": VOCAB, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=written, **options)
    (made / "tokenizer.model").write_bytes(written.getvalue())
    (made / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    return made


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Hide installed packages."""
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)


def test_it_is_read_as_sentencepiece_reads_it(folder: Path) -> None:
    import sentencepiece

    llm = open_llm(folder)
    (output,) = llm.generate("def add(a, b):", SamplingParams(max_tokens=6, ignore_eos=True))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    assert output.prompt_token_ids == processor.encode("def add(a, b):", add_bos=output.prompt_token_ids[0] == 1)
    assert output.outputs[0].text and llm.get_tokenizer().decode(processor.encode("return a")) == "return a"
    assert "".join(chunk.text or "" for chunk in llm.stream("def", SamplingParams(max_tokens=6)))


@pytest.mark.parametrize("missing", [("google.protobuf",), ("sentencepiece", "google.protobuf")])
def test_one_sentence_says_what_to_install(
    folder: Path, missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, *missing)
    with pytest.raises(ConfigError) as caught:
        LLM(folder, device="cpu")
    command = "pip install " + " ".join(PACKAGES[module] for module in missing)
    assert str(folder) in str(caught.value) and "sentencepiece model" in str(caught.value)
    assert str(caught.value).endswith(command) and "tiktoken" not in str(caught.value)
    with pytest.raises(ConfigError, match=command):
        LLM(tokenizer=folder)
    assert capfd.readouterr().err == ""


def test_without_the_packages(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft says so too, a tokenizer.json needs nothing, and tiktoken's files are no sentencepiece models."""
    without(monkeypatch, *PACKAGES)
    with pytest.raises(CheckpointError, match=r"sentencepiece model .*: pip install sentencepiece protobuf$"):
        open_llm(speaking_folder(), [folder])
    beside = shutil.copytree(speaking_folder(), tmp_path / "beside")
    (beside / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    assert open_llm(beside).get_tokenizer() is not None
    made = make_llama(tmp_path / "model", 0)
    (made / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(ConfigError, match=r"cannot be read") as caught:
        LLM(made, device="cpu")
    assert "sentencepiece model" not in str(caught.value)
