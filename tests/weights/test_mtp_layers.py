"""MTP layers in the checkpoints of native families: what is read of folders and GGUF files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers import commands
from tests.helpers.conversions import assert_equal
from tests.helpers.gguf_files import write_gguf
from tests.helpers.models import make_llama, new_folder
from tests.helpers.mtp_made import FILE, LAYOUTS, make_predictor
from tests.weights.test_experts import stacked
from treespec.models.model_config import ModelConfig
from treespec.startup.options import resolve_drafts
from treespec_weights import convert_checkpoint, inspect_checkpoint, load_weights, verify_checkpoint
from treespec_weights.checkpoint import Checkpoint
from treespec_weights.gguf.reader import read_gguf
from treespec_weights.gguf.tensors import describe_storage
from treespec_weights.mtp import load_predictor, predictor_of


def layer_of(folder: Path) -> dict[str, Tensor]:
    config = ModelConfig.from_hf(folder)
    found = load_predictor(folder, *predictor_of(folder, config.shape, config.rules), torch.float32, "cpu")
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_gguf_files_hold_the_layer(name: str, tmp_path: Path) -> None:
    """Behind the others; llama.cpp's converter adds 1 to the norms of Qwen's."""
    folder = make_predictor(name, linear_num_key_heads=4) if name != "glm4_moe" else make_predictor(name)
    path = write_gguf(tmp_path / "model.gguf", folder, nextn_predict_layers=1, block_count=4)
    expected, found = layer_of(folder), layer_of(path)
    assert expected.keys() == found.keys() and {"fc", "embed_norm", "layers.0.k"} <= found.keys()
    for part, tensor in expected.items():
        torch.testing.assert_close(found[part], tensor, rtol=0, atol=2e-7 if part.endswith("norm") else 0)
    in_file = [len(tensor.shape) for own, tensor in read_gguf(path).tensors.items() if not own.startswith("blk.3.")]
    assert f"holding {sum(dims > 1 for dims in in_file)} F32 matrices" in describe_storage(path, torch.float32)
    stored = Checkpoint.open(path).tensors.items()
    own_dims = [len(info.shape) for own, info in stored if not own.startswith(("mtp.", "model.layers.3."))]
    assert [row["count"] for row in inspect_checkpoint(path)["matrices"]] == [sum(dims > 1 for dims in own_dims)]
    config = ModelConfig.from_hf(path)
    assert config.shape.num_layers == 3 and "layers.3.k" not in load_weights(path, config.shape, config.rules)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "glm4_moe"])
def test_experts_in_one_tensor(name: str) -> None:
    folder, other = make_predictor(name), new_folder("stacked")
    save_file(stacked(load_file(folder / FILE)), other / FILE, {"format": "pt"})
    (other / "config.json").write_text((folder / "config.json").read_text())
    assert_equal(layer_of(other), layer_of(folder))


def test_layers_beside_the_text_part_of_a_model_for_images() -> None:
    folder, whole = make_predictor("qwen3_5"), new_folder("whole")
    tensors = {
        own.replace("model.", "model.language_model.", own.startswith("model.")): tensor
        for own, tensor in load_file(folder / FILE).items()
    }
    save_file(tensors | {"model.visual.patch_embed.proj.weight": torch.ones(4)}, whole / FILE, {"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text, "dtype": "float32"}))
    assert_equal(layer_of(whole), layer_of(folder))


@pytest.mark.parametrize(("name", "form"), [("qwen3_5", "folder"), ("qwen3_5", "GGUF"), ("glm4_moe", "folder")])
def test_conversions_keep_the_layer(name: str, form: str, tmp_path: Path) -> None:
    source = folder = make_predictor(name, linear_num_key_heads=4) if name != "glm4_moe" else make_predictor(name)
    if form == "GGUF":
        source = write_gguf(tmp_path / "model.gguf", folder, nextn_predict_layers=1, block_count=4)
    assert convert_checkpoint(source, tmp_path / "new", dtype=torch.bfloat16)["left_out"] == []
    expected, found = layer_of(folder), layer_of(tmp_path / "new")
    assert expected.keys() == found.keys()
    for part, tensor in expected.items():
        error = 0.01 if form == "GGUF" and part.endswith("norm") else 0.0  # of 1 added and taken away
        rounded = tensor if part == "layers.0.router_correction" else tensor.bfloat16().float()
        torch.testing.assert_close(found[part], rounded, rtol=error, atol=error)
    assert verify_checkpoint(tmp_path / "new").ok


def test_quantised_conversions_keep_the_layer_as_it_is(tmp_path: Path) -> None:
    folder = make_predictor("qwen3_5")
    convert_checkpoint(folder, tmp_path / "new", quantization="int8")
    assert_equal(layer_of(tmp_path / "new"), layer_of(folder))
    assert inspect_checkpoint(tmp_path / "new")["problems"] == 0


def test_conversions_tell_what_they_leave_out(tmp_path: Path) -> None:
    """Of two MTP layers, none is read."""
    folder = make_predictor("qwen3_5")
    save_file(load_file(folder / FILE) | {"mtp.layers.1.x": torch.ones(1)}, folder / FILE, {"format": "pt"})
    shown = commands.run("weights", "convert", folder, tmp_path / "new").stdout
    assert "tensors not read, such as mtp.fc.weight" in shown
    assert not any(name.startswith("mtp.") for name in load_file(tmp_path / "new" / FILE))


def test_a_folder_of_the_methods_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is the method's, as in `drafts`; a path is the folder."""
    folder = make_predictor("qwen3_5")
    make_llama(tmp_path / "mtp", 0)
    monkeypatch.chdir(tmp_path)
    report = commands.run("weights", "inspect", folder, "--draft", "mtp", "--draft", "./mtp", "--json").document
    assert [draft["family"] for draft in report["drafts"]] == ["MTP layer", "llama"]
    assert [model for _, model in resolve_drafts(folder, ["mtp", "./mtp"])[0]] == ["mtp", Path("mtp")]


def test_inspect_describes_the_layer() -> None:
    folder = make_predictor("qwen3_5_moe")
    [row] = commands.run("weights", "inspect", folder, "--draft", "mtp", "--json").document["drafts"]
    parameters = sum(tensor.numel() for tensor in layer_of(folder).values())
    assert (row["usable"], row["parameters"]) == (True, parameters)
    assert row["connection"] == "MTP layer, reads the target's output states; proposes 512 of 512 tokens"
