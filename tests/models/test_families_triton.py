"""What kernels a model's configuration asks for."""

from pathlib import Path

import pytest
import torch

from tests.helpers.families import TYPICAL, make_model
from tests.helpers.models import edit_config
from treespec.cli.kernels import settings_of
from treespec.errors import ConfigError
from treespec.graphs.capture import planned_bytes
from treespec.graphs.round_inputs import RoundLimits
from treespec.models.model_config import ModelConfig
from treespec_kernels.linear.quantized import WeightForm
from treespec_weights.quantize import compressed_tensors_config

pytestmark = pytest.mark.slow


def test_a_models_shape_says_what_its_kernels_are(tmp_path: Path) -> None:
    """What `treespec autotune` tunes and compiles for."""
    found = {}
    for name in ("llama", "qwen3", "gemma2", "gpt_neox", "gpt2"):
        folder = make_model(tmp_path / name, TYPICAL[name], 0)
        kernel = settings_of(str(folder), None, None)[0].shape
        found[name] = (kernel.norm, kernel.post_norms, kernel.qk_norm, kernel.rotary, kernel.gated, kernel.activation)
        assert kernel.capped == (name == "gemma2")
    assert found == {
        "llama": ("rms", False, False, True, True, "silu"),
        "qwen3": ("rms", False, True, True, True, "silu"),
        "gemma2": ("rms_plus_one", True, False, True, True, "gelu_tanh"),
        "gpt_neox": ("layer", False, False, True, False, "gelu"),
        "gpt2": ("layer", False, False, False, False, "gelu_tanh"),
    }


def test_a_model_without_mlps_has_no_products_of_them(tmp_path: Path) -> None:
    [setting] = settings_of(str(make_model(tmp_path, TYPICAL["mamba2"], 0)), [], None)
    assert [layer.name for layer in setting.shape.linear_layers] == ["qkv", "o"]


def test_the_memory_plan_counts_states_of_nodes(tmp_path: Path) -> None:
    """Those of a round of two requests, and of the run before its capture."""
    limits, planned = RoundLimits(12, (1, 64), 4, 256), []
    for size in (16, 32):
        folder = make_model(tmp_path / str(size), TYPICAL["qwen3_5"], 0, linear_value_head_dim=size)
        config = ModelConfig.from_hf(folder)
        planned.append(planned_bytes([config], limits, 2, 512, torch.bfloat16))
    shape = config.shape.recurrent
    assert shape is not None and planned[1] - planned[0] > 2 * 2 * limits.width * shape.heads * shape.key_dim * 16 * 4


def test_layers_of_unequal_sizes_have_kernels_of_their_own(tmp_path: Path) -> None:
    """Two layers of each of two kinds, of which those that read the K/V of others have wider MLPs."""
    settings = settings_of(str(make_model(tmp_path, TYPICAL["gemma4"], 0)), None, None)
    found = [(s.shape.head_dim, s.shape.num_kv_heads, s.shape.intermediate_size, s.layers) for s in settings]
    assert found == [(16, 2, 72, 1), (24, 2, 72, 1), (16, 2, 144, 1), (24, 2, 144, 1)]
    assert {s.shape.planes for s in settings} == {(2, 8)}


FORMS = [
    (compressed_tensors_config(8, None, ["lm_head"]), [WeightForm(8)]),
    (compressed_tensors_config(4, 32, ["lm_head", "re:.*layers.0.*"]), [WeightForm(4, 32), None]),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, [WeightForm(4, 32)]),
    ({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": False}, [WeightForm(8, None, True)]),
    ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, [WeightForm(4, 64, True)]),
    ({"quant_method": "fp8", "activation_scheme": "dynamic"}, [None]),
]


@pytest.mark.parametrize(("said", "forms"), FORMS)
def test_a_models_shape_says_how_its_layers_are_quantised(
    tmp_path: Path, said: dict[str, object], forms: list[WeightForm | None]
) -> None:
    folder = make_model(tmp_path / "llama", TYPICAL["llama"], 0)
    edit_config(folder, quantization_config=said)
    assert [setting.shape.quantized for setting in settings_of(str(folder), [], None)] == forms
    with pytest.raises(ConfigError, match="is quantised already"):
        settings_of(str(folder), [], None, "int8")
