"""Draft heads trained by `treespec train --head`: their arithmetic, and the folders that they are written to."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tests.helpers.blocks_made import reference_dflash
from tests.helpers.heads_made import draft_ids, reference_state_ssm
from tests.helpers.models import make_llama, new_folder
from tests.helpers.tokenizers_made import TEXT, byte_level, save_tokenizer
from treespec import LLM, SpecConfig, train_drafts
from treespec.errors import ModelError
from treespec.training import dflash, state_ssm
from treespec.training.draft_vocabulary import rows_of_tokens
from treespec.training.student import make_student, open_model

pytestmark = pytest.mark.slow
VOCAB, DEPTHS = 384, 3


def tiny_target(num_layers: int) -> Path:
    folder = make_llama(new_folder("target"), 0, vocab_size=VOCAB, num_hidden_layers=num_layers)
    return save_tokenizer(folder, byte_level(VOCAB, TEXT.splitlines()))


@torch.inference_mode()
def random_head(
    make: Callable[..., Any], layers: Sequence[int], num_layers: int, folder: Path
) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """A target, a random head of it that is written to a folder, tokens, and the target's states that the head reads.

    The head's weights make attention sharp, and gains are around 1. They are rounded to bfloat16, as they are written,
    and the folder is stored in float32 for the references.
    """
    target = AutoModelForCausalLM.from_pretrained(tiny_target(num_layers), dtype=torch.float32)
    ids = np.append(np.sort(np.random.default_rng(1).permutation(VOCAB)[:100]), -1)
    torch.manual_seed(2)
    head = make(target, ids, len(layers))
    for parameter in head.parameters():
        noise = torch.randn_like(parameter)
        values = (noise * 2 * parameter.shape[1] ** -0.5) if parameter.ndim == 2 else 1 + 0.2 * noise
        parameter.copy_(values.bfloat16())
    head.write(folder, ids, target.config)
    for file in (folder / "model.safetensors", *folder.glob("state_projection.safetensors")):
        with safe_open(file, "pt") as stored:
            metadata = stored.metadata()
        save_file({n: t.float() if t.is_floating_point() else t for n, t in load_file(file).items()}, file, metadata)
    tokens = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(3), dtype=torch.int64)
    states = target(tokens, output_hidden_states=True).hidden_states
    return target, head, tokens, torch.stack([states[min(layer, num_layers)] for layer in layers], 2)


def make_state_ssm(target: Any, ids: np.ndarray, num_states: int) -> state_ssm.StateSsm:
    student = make_student(target, 2, None, ids, [])
    return state_ssm.StateSsm(student, num_states * target.config.hidden_size, target.config.rms_norm_eps)


def make_power_of_two(*arguments: Any) -> state_ssm.StateSsm:
    """Its scale changes no rounding."""
    ssm = make_state_ssm(*arguments)
    ssm.scale = 0.25
    return ssm


@pytest.mark.parametrize("num_layers", [3, 8])
def test_logits_at_every_depth_are_those_of_the_reference(num_layers: int, tmp_path: Path) -> None:
    """Of a state SSM as it is trained, for the folder that it is written to."""
    layers = state_ssm.read_layers(num_layers)
    _, head, tokens, states = random_head(make_power_of_two, layers, num_layers, tmp_path)
    rows = rows_of_tokens(np.append(draft_ids(tmp_path).numpy(), -1), VOCAB)[tokens]
    with torch.inference_mode():
        for depth, hidden in enumerate(head(states[:, :-1].flatten(2), torch.from_numpy(rows), DEPTHS)):
            logits = head.get_output_embeddings()(hidden)[:, :, :-1]
            for row in range(2):
                for pair in range(depth, 11):
                    verified = pair - depth + 2  # tokens that the target has read, and one more
                    known, drafted = tokens[row, :verified].tolist(), tokens[row, verified : pair + 2].tolist()
                    expected = reference_state_ssm(tmp_path, known, states[row, : verified - 1], drafted)
                    torch.testing.assert_close(logits[row, pair], expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_training_continues_with_a_state_ssm(tmp_path: Path) -> None:
    layers = state_ssm.read_layers(3)
    target, head, tokens, states = random_head(make_power_of_two, layers, 3, tmp_path)
    student, values = open_model(tmp_path, torch.float32), len(layers) * target.config.hidden_size
    opened = state_ssm.StateSsm(student, values, target.config.rms_norm_eps, tmp_path)
    inputs = states[:, :-1].flatten(2), tokens % 100, DEPTHS
    for ours, theirs in zip(opened(*inputs), head(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_training_starts_with_the_predictions_of_the_student() -> None:
    target = AutoModelForCausalLM.from_pretrained(tiny_target(3), dtype=torch.float32)
    ids = np.append(np.arange(0, VOCAB, 3), -1)
    for table in {target.get_input_embeddings().weight, target.get_output_embeddings().weight}:
        table.data = torch.nn.functional.normalize(table.data)
    head = make_state_ssm(target, ids, 2)
    inputs = torch.randint(len(ids) - 1, (1, 9), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = head.student.get_decoder()(inputs[:, 1:]).last_hidden_state
        first = next(head(torch.randn(1, 8, 2 * target.config.hidden_size), inputs, 1))
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-4)


def test_block_predictions_are_those_of_the_reference(tmp_path: Path) -> None:
    """Of a DFlash draft as it is trained, several roots of a row at once, for the folder that it is written to."""
    target, draft, tokens, states = random_head(dflash.make_dflash, dflash.read_layers(8), 8, tmp_path)
    roots = torch.tensor([[1, 4, 11], [2, 3, 9]])
    with torch.inference_mode():
        hidden = draft(states.flatten(2), tokens, roots)
        for row in range(2):
            for i, root in enumerate(roots[row].tolist()):
                embed, read = target.get_input_embeddings().weight, states[row, :root]
                expected = reference_dflash(tmp_path, embed, embed, int(tokens[row, root]), read)
                torch.testing.assert_close(draft.lm_head(hidden[row, i])[1:], expected, rtol=1e-4, atol=1e-4)


OPTIONS: dict[str, Any] = {"tokens": 600, "vocabulary": 257, "max_tokens": 16, "head": "state-ssm"}


@pytest.mark.parametrize("num_layers, kind", [(2, "state-ssm"), (3, "dflash")])
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
    if kind == "state-ssm":
        train_drafts(target, [], tmp_path / "two", lessons=tmp_path / "one", **options)
        one, two = ((tmp_path / name / kind / "model.safetensors").read_bytes() for name in ("one", "two"))
        assert one == two
        train_drafts(target, [], tmp_path / "more", lessons=tmp_path / "one", start=tmp_path / "one" / kind, **options)


def test_a_target_without_such_layers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT[:2000])
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "eos_token_id": 0, "bos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, **sizes)).save_pretrained(folder := new_folder("gpt2"))
    save_tokenizer(folder, byte_level(VOCAB, TEXT.splitlines()))
    for kind, reason in (("dflash", "its config has no"), ("state-ssm", "is for models with rotary attention")):
        with pytest.raises(ModelError, match=reason):
            train_drafts(folder, [tmp_path / "text.txt"], tmp_path / kind, **OPTIONS | {"head": kind})
