"""Checkpoints of models with experts: forms of their tensors, their configs, and MXFP4."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.conversions import assert_same, loaded
from tests.helpers.exactness import assert_exact, run
from tests.helpers.families import TYPICAL, VOCAB, make_model
from tests.helpers.gguf_files import GGUF_CASES, write_gguf
from tests.helpers.models import OracleDrafter, edit_config, greedy, open_llm, random_prompts
from tests.helpers.quantized_checkpoints import needs_compiler
from treespec import SpecConfig
from treespec_weights import CheckpointError, OptionError, convert_checkpoint, family_of, load_weights
from treespec_weights.blocks import Blocks
from treespec_weights.documents import read_config
from treespec_weights.families import GPT_OSS
from treespec_weights.grow import grown_shape
from treespec_weights.quantize import Quantized, dequantize
from treespec_weights.rules import ModelShape

TREE = SpecConfig(branching=(3, 1, 1), sources=("ssm",))
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
WIDE |= {"shared_expert_intermediate_size": 32, "mlp_only_layers": []}
WIDE |= {"linear_num_value_heads": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
WIDE |= {"mamba_n_heads": 16, "mamba_d_head": 16, "mamba_expand": 4, "mamba_d_state": 16, "mamba_d_ssm": 256}
WIDE |= {"mamba_num_heads": 16, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16}
WIDE |= {"shared_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32}


def change_tensors(folder: Path, source: Path, change: Any, **config: Any) -> Path:
    """Copy a checkpoint with other tensors."""
    shutil.copytree(source, folder)
    save_file(change(load_file(source / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})
    return edit_config(folder, **config)


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gate and up projections of all experts in one tensor, as transformers' modules hold them."""
    found = {name.replace("block_sparse_moe", "mlp"): x for name, x in tensors.items() if ".experts." not in name}
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    by_layer: dict[str, dict[str, list[Tensor]]] = {}
    for name, tensor in sorted(tensors.items()):
        if ".experts." in name:
            stem, _, rest = name.replace("block_sparse_moe", "mlp").partition(".experts.")
            part = rest.split(".")[1]
            by_layer.setdefault(f"{stem}.experts.", {}).setdefault(names.get(part, part), []).append(tensor)
    for stem, parts in by_layer.items():
        gate, up, down = (torch.stack(parts[name]) for name in ("gate_proj", "up_proj", "down_proj"))
        found |= {f"{stem}gate_up_proj": torch.cat((gate, up), 1), f"{stem}down_proj": down}
    return found


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen3_5_moe"])
def test_experts_in_one_tensor(name: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "each", TYPICAL[name], 0)
    expected, found = loaded(folder), loaded(change_tensors(tmp_path / "stacked", folder, stacked))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("name, module", [("glm4_moe", "model.layers.3."), ("qwen3_next", "mtp.layers.0.")])
def test_layers_for_multi_token_prediction_are_not_read(name: str, module: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "plain", TYPICAL[name], 0)
    more = {module + part: torch.ones(2) for part in ("eh_proj.weight", "mlp.experts.0.up_proj.weight")}
    assert loaded(change_tensors(tmp_path / "mtp", folder, lambda own: own | more)).keys() == loaded(folder).keys()
    more = {"model.layers.2.mlp.experts.9.up_proj.weight": torch.ones(2)}
    with pytest.raises(CheckpointError, match=r"experts.9.up_proj.weight': unexpected"):
        loaded(change_tensors(tmp_path / "more", folder, lambda own: own | more))


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"num_experts_per_tok": 6}, "'num_experts_per_tok': 6 is not a whole number from 1 to 5"),
    ("mixtral", {"num_local_experts": None}, "'num_local_experts': missing from config.json"),
    ("qwen3_moe", {"mlp_only_layers": [3]}, r"'mlp_only_layers': \[3\] are not layers below 3"),
    ("qwen3_moe", {"norm_topk_prob": "yes"}, "'norm_topk_prob': 'yes' is not true or false"),
    ("gemma4", {"vocab_size_per_layer_input": 7}, "'vocab_size_per_layer_input': 7 is not a whole number from 509 to"),
    ("glm4_moe", {"n_group": 4}, "'n_group': 4 groups of 6 experts; valid: groups of equal size, at least 2"),
    ("glm4_moe", {"routed_scaling_factor": 0}, "'routed_scaling_factor': 0 is not a positive number"),
]


@pytest.mark.parametrize("name, config, message", WRONG)
def test_wrong_configs(name: str, config: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = edit_config(make_model(tmp_path / "model", TYPICAL[name], 0), **config)
    with pytest.raises(CheckpointError, match=message):
        open_llm(folder)


def test_decays_of_delta_nets_stay_in_float32(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "single", TYPICAL["qwen3_next"], 0)
    convert_checkpoint(folder, tmp_path / "half", dtype=torch.bfloat16)
    assert_same(folder, tmp_path / "half", torch.bfloat16)
    weights, stored = loaded(folder, torch.bfloat16), load_file(folder / "model.safetensors")
    for name, own in (("decay_log", "A_log"), ("dt_bias", "dt_bias")):
        assert torch.equal(weights[f"layers.0.{name}"], stored[f"model.layers.0.linear_attn.{own}"])


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "each", TYPICAL["qwen3_moe"], 0)
    convert_checkpoint(folder, tmp_path / "half", dtype=torch.bfloat16)
    assert_same(folder, tmp_path / "half", torch.bfloat16)
    file, all_in_one = write_gguf(tmp_path / "m.gguf", folder), change_tensors(tmp_path / "stacked", folder, stacked)
    for source, options in ((file, {}), (all_in_one, {"quantization": "int8"})):
        with pytest.raises(OptionError, match="all experts of a layer are in one tensor"):
            convert_checkpoint(source, tmp_path / "other", **options)
    with pytest.raises(OptionError, match="models with experts cannot be grown"):
        grown_shape(ModelShape.from_hf(read_config(folder), family_of(read_config(folder))), 10**9)


# --- MXFP4


def as_mxfp4(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Random blocks in the place of the experts' matrices."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            found[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        size = experts, outputs, inputs // 32
        found[f"{name}_blocks"] = torch.randint(256, (*size, 16), generator=generator, dtype=torch.uint8)
        found[f"{name}_scales"] = torch.randint(121, 124, size, generator=generator, dtype=torch.uint8)
    return found


def values_of(tensors: dict[str, Tensor], name: str) -> Tensor:
    """The matrices of all experts, [experts, outputs, inputs]: the low four bits of a byte come first."""
    blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    pairs = torch.stack((E2M1[(blocks & 15).long()], E2M1[(blocks >> 4).long()]), -1).flatten(-2)
    return torch.ldexp(pairs, scales[..., None].int() - 127).flatten(-2)


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mxfp4")
    folder = make_model(root / "dense", TYPICAL["gpt_oss"], 0, torch.bfloat16, **WIDE | {"head_dim": 16})
    return change_tensors(root / "mxfp4", folder, as_mxfp4, quantization_config={"quant_method": "mxfp4"})


def test_mxfp4_keeps_its_values(mxfp4: Path) -> None:
    tensors = load_file(mxfp4 / "model.safetensors")
    shape = ModelShape.from_hf(read_config(mxfp4), GPT_OSS)
    quantized = load_weights(mxfp4, shape, GPT_OSS)
    in_blocks = load_weights(mxfp4, shape, GPT_OSS, blocks=True)
    for stored, params in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        expected = values_of(tensors, f"model.layers.1.mlp.experts.{stored}")[3]
        for i, param in enumerate(params):
            name, own = f"layers.1.experts.3.{param}", expected[i :: len(params)]
            assert torch.equal(dequantize(Quantized(quantized[name], quantized[f"{name}_scale"])), own)
            assert isinstance(in_blocks[name], Blocks) and torch.equal(in_blocks[name].dequantize(torch.float32), own)


@needs_compiler
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_mxfp4_in_trees(mxfp4: Path, compiled: bool) -> None:
    llm = open_llm(mxfp4, [mxfp4], compile=compiled, prove=True)
    assert llm.stats()["frozen"]["quantization"] == ("gguf MXFP4" if compiled else "int8 groups of 32")
    plain = run(llm, random_prompts((5, 70), vocab=VOCAB), greedy(10), "off")
    assert assert_exact(llm, plain, TREE).acceptance_length > 2


BLOCKS = [("qwen3_moe", "Q4_1"), ("gpt_oss", "MXFP4"), ("mixtral", "Q8_0"), ("qwen3_5_moe", "Q4_1")]
BLOCKS += [("qwen3_next", "Q8_0"), ("lfm2_moe", "Q4_1"), ("granite_hybrid", "Q8_0"), ("nemotron_h", "Q4_1")]
BLOCKS += [("falcon_h1", "Q8_0")]  # without experts: attention and Mamba 2 in blocks


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name, kind", BLOCKS)
def test_experts_in_a_files_blocks(name: str, kind: str, tmp_path: Path) -> None:
    """Compiled passes multiply the blocks, and eager ones the integers in them: the same model up to rounding.

    Where all matrices are in blocks, routers are read as values.
    """
    case = (TYPICAL | GGUF_CASES)[name]
    folder = make_model(tmp_path / "folder", case, 0, torch.float32, **WIDE | {"head_dim": 16})
    all_matrices = kind != "MXFP4"
    path = write_gguf(
        tmp_path / "m.gguf", folder, lambda tensor: kind if all_matrices or "_exps.weight" in tensor else "F32"
    )
    oracle = OracleDrafter([], 3, vocab=VOCAB)
    llms = [open_llm(path, [oracle], compile=compiled, prove=True, dtype="float32") for compiled in (True, False)]
    assert llms[0].stats()["frozen"]["quantization"] == f"gguf {kind}"
    prompts = random_prompts((5, 70), vocab=VOCAB)
    runs = [run(llm, prompts, greedy(10), "off") for llm in llms]
    for llm, plain in zip(llms, runs, strict=True):
        oracle.truths = plain.sequences
        assert assert_exact(llm, plain, SpecConfig(nodes=8, max_depth=3)).acceptance_length > 2
    compared = [(logits, runs[1].logits[path]) for path, logits in runs[0].logits.items() if path in runs[1].logits]
    assert len(compared) >= 2 and all((a - b).abs().max() < 1e-3 * b.abs().max() for a, b in compared)
