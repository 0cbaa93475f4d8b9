"""Published tokenizers in front of a small random model, whose output is any of their tokens in any order."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.helpers.gguf_files import metadata_of
from tests.helpers.models import make_llama, open_llm
from tests.real.fetch import NPM
from tests.weights.test_gguf_tokenizer import differing, tokenizer_of, write
from treespec import LLM, SamplingParams, SpecConfig, StructuredOutputsParams

pytestmark = pytest.mark.real
TEXTS = (
    "The quick brown fox, 1234567 of them.",
    "def f(x):\n\treturn  x**2  # tabs and spaces\n\n",
    "Größe, naïve, 你好世界, привет, שלום, 한국어",
    "👩‍👩‍👧 and 🇩🇪 are several code points each",
)
MESSAGES = [{"role": "user", "content": "What is 6 times 7?"}]
TREES = SpecConfig(nodes=8)


@pytest.fixture(scope="module", params=NPM)
def llm(
    request: pytest.FixtureRequest, fetched: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> LLM:
    """An engine over a random model with the tokenizer's vocabulary."""
    folder = fetched(request.param)
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "tie_word_embeddings": True}
    sizes |= {"vocab_size": len(PreTrainedTokenizerFast.from_pretrained(folder))}
    ends = {"eos_token_id": None, "bos_token_id": None}
    return open_llm(make_llama(tmp_path_factory.mktemp("target"), 0, **sizes, **ends), tokenizer=str(folder))


def test_texts_go_round(llm: LLM) -> None:
    """As the tokenizer's own: ids of a prompt, and the text of what the model writes, whole and in chunks."""
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(max_tokens=40, temperature=1.5, seed=3, ignore_eos=True)
    for text in TEXTS:
        [output] = llm.generate([text], params, spec=TREES)
        assert output.prompt_token_ids == tokenizer(text).input_ids
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
        [completion] = output.outputs
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        chunks = list(llm.stream(text, params, spec=TREES))
        assert "".join(chunk.text or "" for chunk in chunks) == completion.text
        assert [token for chunk in chunks for token in chunk.token_ids] == completion.token_ids


def test_chat_templates(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    [output] = llm.chat(MESSAGES, SamplingParams(max_tokens=4))
    wanted: Any = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert output.prompt_token_ids == wanted
    assert "What is 6 times 7?" in tokenizer.decode(wanted)


def test_structured_outputs(llm: LLM) -> None:
    """A form that tokens of several bytes can spell in many ways."""
    pytest.importorskip("llguidance")
    pattern = r"(Größe|你好|👍){2,3}: [0-9]{4}"
    params = SamplingParams(
        max_tokens=60, temperature=1.5, seed=1, structured_outputs=StructuredOutputsParams(regex=pattern)
    )
    tree, plain = (llm.generate(["x"], params, spec=spec)[0].outputs[0] for spec in (TREES, "off"))
    assert tree.token_ids == plain.token_ids
    assert re.fullmatch(pattern, tree.text)


# --- as llama.cpp's converter writes them into GGUF files: the ids stay the same


@pytest.mark.parametrize("name, pre", [("llama3_1", "llama-bpe"), ("qwen3", "qwen2")])
def test_byte_level_in_gguf(name: str, pre: str, fetched: Callable[[str], Path], tmp_path: Path) -> None:
    folder = fetched(name)
    metadata = metadata_of(json.loads((folder / "tokenizer.json").read_text())) | {"tokenizer.ggml.pre": pre}
    metadata["tokenizer.ggml.bos_token_id"] = 128000 if name == "llama3_1" else None
    original = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert not differing(original, tokenizer_of(write(tmp_path / "m", metadata)))
