"""The text part of checkpoints for text and images."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.helpers.logits import our_logits
from tests.helpers.models import open_llm, random_prompts, randomize
from treespec_kernels.comparison import assert_close
from treespec_weights import convert_checkpoint, inspect_checkpoint, verify_checkpoint

VOCAB = 97
(TOKENS,) = random_prompts((70,), vocab=VOCAB)
TEXT = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "sliding_window": 17}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS |= {"shared_expert_intermediate_size": 16, "full_attention_interval": 2, "linear_num_key_heads": 2}
EXPERTS |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LAYERS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 16}
INPUTS = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 5},
    "gemma4": {"text_config": TEXT | LAYERS | INPUTS, "vision_config": None, "audio_config": None},
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
        "image_token_index": 5,
    },
    "qwen3_5_moe": {
        "text_config": TEXT | EXPERTS,
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 32,
        },
    },
}


def make(folder: Path, kind: str) -> torch.Tensor:
    """Save a random model, and return its logits of the tokens, [70, vocab]."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **MODELS[kind])).eval()
    with torch.inference_mode():
        randomize(model, gain=1.5, head_gain=1.5)
        model.save_pretrained(folder)
        logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


def rename_as_before(folder: Path) -> None:
    """Give the tensors the names of earlier releases."""
    renamed = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        prefix = next((prefix for prefix in renamed if name.startswith(prefix)), "")
        tensors[renamed.get(prefix, "") + name.removeprefix(prefix)] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "before"), [("gemma3", False), ("gemma4", False), ("mistral3", True), ("qwen3_5_moe", False)]
)
def test_text_part(kind: str, before: bool, tmp_path: Path) -> None:
    """It runs natively, is verified and inspected, and converts to a checkpoint of its own."""
    expected = make(tmp_path / "whole", kind)
    if before:
        rename_as_before(tmp_path / "whole")
    llm = open_llm(tmp_path / "whole", exact=False)
    assert llm.stats()["frozen"]["backend"] == "native"
    assert_close(our_logits(llm, TOKENS), expected, max_error=1e-3, rms_error=1e-4)
    verify_checkpoint(tmp_path / "whole")
    convert_checkpoint(tmp_path / "whole", tmp_path / "text")
    reports = [inspect_checkpoint(tmp_path / name) for name in ("whole", "text")]
    assert reports[0]["shape"] == reports[1]["shape"]
    assert "text_config" not in json.loads((tmp_path / "text" / "config.json").read_text())
    assert torch.equal(our_logits(open_llm(tmp_path / "text", exact=False), TOKENS), our_logits(llm, TOKENS))
