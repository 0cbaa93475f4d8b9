"""Draft heads trained by `treespec train --head`: their arithmetic, and the folders that they are written to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tests.helpers.blocks_made import reference_dflash
from tests.helpers.heads_made import reference_eagle3
from tests.helpers.models import make_llama, new_folder
from tests.helpers.tokenizers_made import TEXT, byte_level, save_tokenizer
from treespec import LLM, SpecConfig, train_drafts
from treespec.errors import ModelError
from treespec.training.dflash import make_dflash
from treespec.training.eagle3 import head_layers, make_head
from treespec.training.head_kinds import write_head

pytestmark = pytest.mark.slow
VOCAB, DEPTHS = 384, 3


def tiny_target(num_layers: int) -> Path:
    folder = make_llama(new_folder("target"), 0, vocab_size=VOCAB, num_hidden_layers=num_layers)
    return save_tokenizer(folder, byte_level(VOCAB, TEXT.splitlines()))


@torch.inference_mode()
def random_head(make: Callable[..., Any], num_layers: int, folder: Path) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """A target, a random head of it that is written to a folder, tokens, and the target's states that the head reads.

    The head's weights make attention sharp, and gains are around 1. They are rounded to bfloat16, as they are written,
    and the folder is stored in float32 for the references.
    """
    target = AutoModelForCausalLM.from_pretrained(tiny_target(num_layers), dtype=torch.float32)
    layers, ids = head_layers(num_layers), np.append(np.sort(np.random.default_rng(1).permutation(VOCAB)[:100]), -1)
    torch.manual_seed(2)
    head = make(target, ids, len(layers))
    for parameter in head.parameters():
        noise = torch.randn_like(parameter)
        parameter.copy_((noise * 2 * parameter.shape[1] ** -0.5) if parameter.ndim == 2 else 1 + 0.2 * noise)
    write_head(head, folder, ids, target.config)
    tensors = load_file(folder / "model.safetensors")
    stored = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    head.load_state_dict({name: tensor for name, tensor in stored.items() if name not in ("d2t", "t2d")})
    tokens = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(3), dtype=torch.int64)
    states = target(tokens, output_hidden_states=True).hidden_states
    return target, head, tokens, torch.stack([states[layer] for layer in layers], 2)


@pytest.mark.parametrize("num_layers", [3, 8])
def test_logits_at_every_depth_are_those_of_the_reference(num_layers: int, tmp_path: Path) -> None:
    """Of a head as it is trained, and of the paper's arithmetic for the folder that it is written to."""
    target, head, tokens, states = random_head(make_head, num_layers, tmp_path)
    with torch.inference_mode():
        outputs = list(head(states[:, :-1].flatten(2), tokens, DEPTHS))
        for depth, hidden in enumerate(outputs):
            logits = head.get_output_embeddings()(hidden)
            for row in range(2):
                for pair in range(depth, 11):
                    verified = pair - depth + 2  # tokens that the target has read, and one more
                    expected = reference_eagle3(
                        tmp_path,
                        target.get_input_embeddings().weight,
                        tokens[row, :verified].tolist(),
                        states[row, : verified - 1],
                        tokens[row, verified : pair + 2].tolist(),
                    )
                    torch.testing.assert_close(logits[row, pair], expected[-1], rtol=1e-4, atol=1e-4)


def test_block_predictions_are_those_of_the_reference(tmp_path: Path) -> None:
    """Of a DFlash draft as it is trained, several roots of a row at once, for the folder that it is written to."""
    target, draft, tokens, states = random_head(make_dflash, 8, tmp_path)
    roots = torch.tensor([[1, 4, 11], [2, 3, 9]])
    with torch.inference_mode():
        hidden = draft(states.flatten(2), tokens, roots)
        for row in range(2):
            for i, root in enumerate(roots[row].tolist()):
                embed, read = target.get_input_embeddings().weight, states[row, :root]
                expected = reference_dflash(tmp_path, embed, embed, int(tokens[row, root]), read)
                torch.testing.assert_close(draft.lm_head(hidden[row, i])[1:], expected, rtol=1e-4, atol=1e-4)


OPTIONS: dict[str, Any] = {"tokens": 600, "vocabulary": 257, "max_tokens": 16, "head": "eagle3"}


@pytest.mark.parametrize("num_layers, kind", [(2, "eagle3"), (3, "dflash")])
def test_a_trained_head_drafts(num_layers: int, kind: str, tmp_path: Path) -> None:
    target, data = tiny_target(num_layers), tmp_path / "text.txt"
    data.write_text(TEXT[:9000])
    options = OPTIONS | {"head": kind}
    report = train_drafts(target, [data], tmp_path / "one", **options)
    assert report.differing == 0 and [row.drafts for row in report.measured] == [0, 1]
    assert set(report.agreement) == {kind}
    llm = LLM(target, drafts=[tmp_path / "one" / kind], compile=False, max_model_len=256)
    plain, tree = (llm.generate("import os", spec=spec)[0] for spec in ("off", SpecConfig(nodes=8, sources=("ssm",))))
    assert plain.outputs[0].token_ids == tree.outputs[0].token_ids
    assert tree.metrics.nodes_verified > tree.metrics.target_passes
    if kind == "eagle3":
        train_drafts(target, [], tmp_path / "two", lessons=tmp_path / "one", **options)
        one, two = ((tmp_path / name / kind / "model.safetensors").read_bytes() for name in ("one", "two"))
        assert one == two


def test_a_target_without_such_layers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT[:2000])
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "eos_token_id": 0, "bos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, **sizes)).save_pretrained(folder := new_folder("gpt2"))
    save_tokenizer(folder, byte_level(VOCAB, TEXT.splitlines()))
    with pytest.raises(ModelError, match="cannot train a draft head for gpt2: its config has no"):
        train_drafts(folder, [tmp_path / "text.txt"], tmp_path / "out", **OPTIONS)
