"""What an engine's start does not wait for, and what it computes once for good."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from tests.helpers.scripts import run_script
from treespec.models.layer_kinds import Rope, RotaryEmbedding
from treespec.text.prompt_tokenizer import load_tokenizer
from treespec_weights import default_folder, default_names

embedded = pytest.mark.skipif("target" not in default_names(), reason="no embedded models in this checkout")


@embedded
def test_the_embedded_tokenizer_brings_no_models_along() -> None:
    """AutoTokenizer would import transformers' modelling code: 3 of the 6 seconds that `LLM()` took."""
    code = (
        "import json, sys; from treespec_weights import default_folder\n"
        "from treespec.text.prompt_tokenizer import load_tokenizer\n"
        "load_tokenizer(None, default_folder('target'))\n"
        "print(json.dumps([name for name in sys.modules if name.startswith('transformers.model')]))"
    )
    assert not {"transformers.modeling_utils", "transformers.models.llama"} & set(json.loads(run_script(code)))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_plain_configs_are_read_without_transformers(kind: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 32, "use_sliding_window": False}
    config = AutoConfig.for_model(kind, **sizes, **heads)
    config.save_pretrained(tmp_path)
    code = (
        "import sys; from pathlib import Path; from treespec.models.model_config import ModelConfig\n"
        f"read = ModelConfig.from_hf(Path({str(tmp_path)!r}))\n"
        "print([layer.window for layer in read.layers], 'transformers' in sys.modules)"
    )
    assert run_script(code).strip() == "[None, None] False"
    assert config.layer_types == ["full_attention"] * 2, "transformers reads no windows either"


@embedded
def test_the_embedded_tokenizer_is_the_one_that_transformers_picks() -> None:
    folder = default_folder("target")
    ours, theirs = load_tokenizer(None, folder), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = "def f(x):\n\treturn 'ünïcode', 3.14  # <|endoftext|>\n"
    assert type(ours) is type(theirs)
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


def test_a_rotation_is_the_same_whenever_it_is_asked_for() -> None:
    """The table grows; what it held keeps its bits."""
    rope = Rope(1.0 / 10000.0 ** (torch.arange(0, 20, 2).float() / 20), torch.full((10,), 1.5), 20)
    positions = np.array([0, 1, 63, 1023, 1024, 2047, 5000])
    whole, stepwise = (RotaryEmbedding(rope, torch.device("cpu")) for _ in range(2))
    rows = [stepwise.lookup(positions[i : i + 1]) for i in range(len(positions))]
    assert torch.equal(whole.lookup(positions), torch.cat(rows))
