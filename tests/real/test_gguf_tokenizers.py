"""Published tokenizers, as llama.cpp's converter writes them into GGUF files: the ids stay the same."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.helpers.gguf_files import metadata_of
from tests.weights.test_gguf_tokenizer import LINES, differing, tokenizer_of, write

pytestmark = pytest.mark.real


@pytest.mark.parametrize("name, pre", [("llama3_1", "llama-bpe"), ("qwen3", "qwen2"), ("mistral", "tekken")])
def test_byte_level(name: str, pre: str, fetched: Callable[[str], Path], tmp_path: Path) -> None:
    folder = fetched(name)
    metadata = metadata_of(json.loads((folder / "tokenizer.json").read_text())) | {"tokenizer.ggml.pre": pre}
    metadata["tokenizer.ggml.bos_token_id"] = 128000 if name == "llama3_1" else None
    assert not differing(
        Tokenizer.from_file(str(folder / "tokenizer.json")), tokenizer_of(write(tmp_path / "m", metadata))
    )


def test_gemma(fetched: Callable[[str], Path], tmp_path: Path) -> None:
    folder = fetched("gemma3")
    metadata = metadata_of(json.loads((folder / "tokenizer.json").read_text()))
    del metadata["tokenizer.ggml.merges"]
    types = metadata["tokenizer.ggml.token_type"]
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata |= {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            t.replace("▁", " ") if kind == 4 else t for t, kind in zip(tokens, types, strict=True)
        ],
        "tokenizer.ggml.token_type": [
            6 if t.startswith("<0x") else kind for t, kind in zip(tokens, types, strict=True)
        ],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }
    original = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert not differing(
        original, tokenizer_of(write(tmp_path / "m.gguf", metadata)), [each for each in LINES if "▁" not in each]
    )
