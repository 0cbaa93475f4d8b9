"""GGUF files of tiny models, written as llama.cpp's converter writes them: what the tests of GGUF files share."""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.helpers.families import CASES, TYPICAL, WINDOW, Case, make_model
from tests.helpers.models import make_llama, new_folder
from treespec_kernels.linear.quantized import BLOCK_TYPES, BlockWeight, QuantizedWeight
from treespec_weights import FamilyRules, ModelShape, family_of, read_config
from treespec_weights.blocks import FORMS, read_blocks
from treespec_weights.gguf.config import PERMUTED
from treespec_weights.rules import RecurrentShape

ARCHITECTURES = {  # where they differ from model_type
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "lfm2_moe": "lfm2moe",
    "cohere": "command-r",
    "glm": "chatglm",
    "hunyuan_v1_dense": "hunyuan-dense",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
}

Types = Callable[[str], str]
"""The type of a matrix, by GGUF name."""


def write_gguf(
    path: Path,
    folder: Path,
    types: str | Types = "F32",
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    drop: Sequence[str] = (),
    tokenizer: Mapping[str, Any] | None = None,  # as from `metadata_of`
    split: int = 0,  # tensors of a file, where they are split
    fuses: bool = False,  # gate and up projections of experts, as the converter does if asked to
    arch: str | None = None,  # by default the model type's
    **metadata: Any,
) -> Path:
    """Writes a checkpoint of a Hugging Face folder as a GGUF file; vectors and convolutions are always F32.

    Matrices of types that gguf cannot quantise to have random blocks. `change` adds metadata and tensors, `drop` names
    some to leave out, `metadata` replaces values of the architecture, with "__" for the dots of its keys.
    """
    config = read_config(folder)
    rules = family_of(config, folder)
    shape = ModelShape.from_hf(config, rules, folder)
    arch = arch or ARCHITECTURES.get(rules.model_type, rules.model_type)
    arch += "_moe" if arch == "nemotron_h" and shape.experts is not None else ""
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    values = _metadata(config, rules, shape) | {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in values.items():
        if key not in drop and value is not None:
            add_value(writer, f"{arch}.{key}", value)
    for key, value in (tokenizer or {}).items():
        add_value(writer, key, value)
    for key in ("bos", "eos", "padding"):
        own, token = f"tokenizer.ggml.{key}_token_id", config.get(f"{key.removesuffix('ding')}_token_id")
        if own not in (tokenizer or {}) and token is not None:
            writer.add_uint32(own, token)
    tensors = _tensors(folder, arch, shape) | _rope_factors(config, shape)
    for name in [name for name in tensors if fuses and name.endswith("ffn_gate_exps.weight")]:
        parts = tensors.pop(name), tensors.pop(name.replace("gate", "up"))
        tensors[name.replace("gate", "gate_up")] = torch.cat(parts, 1)
    for name, tensor in tensors.items():
        if name not in drop:
            single = ("conv1d.weight", "shortconv.conv.weight", "ssm_a", "ssm_d", "ssm_norm.weight")
            is_vector = tensor.dim() < 2 or name.endswith(single)
            kind = "F32" if is_vector else types if isinstance(types, str) else types(name)
            add_tensor(writer, name, tensor, kind)
    if change is not None:
        change(writer)
    return finish(writer)


def metadata_of(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer's metadata that llama.cpp's converter writes for a tokenizer.json of byte-level BPE."""
    vocab, types = dict(tokenizer["model"]["vocab"]), {}
    for added in tokenizer["added_tokens"]:
        vocab[added["content"]] = added["id"]
        types[added["id"]] = 3 if added["special"] else 4
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = tokenizer["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [types.get(id, 1) for id in range(len(tokens))],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
    }


def finish(writer: gguf.GGUFWriter) -> Path:
    """Writes a file, and returns its path."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(writer.path)


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: str) -> None:
    type = GGMLQuantizationType[kind]
    values = tensor.float().contiguous().numpy()
    try:
        data = values if kind == "F32" else gguf.quants.quantize(values, type)
    except NotImplementedError:
        flat = values.reshape(-1, values.shape[-1])
        data = random_blocks(type, *flat.shape, scale=float(np.abs(values).max()))
        data = data.reshape(*values.shape[:-1], -1)
    writer.add_tensor(name, data, raw_dtype=type)


def random_blocks(type: GGMLQuantizationType, out: int, inputs: int, scale: float = 1.0) -> np.ndarray:
    """uint8 [out, bytes]: blocks of random integers, of about this largest value."""
    values, size = gguf.GGML_QUANT_SIZES[type]
    rng = np.random.default_rng(out * inputs)
    blocks = rng.integers(0, 256, (out, inputs // values, size), dtype=np.uint8)
    place, largest, centre = {
        "Q8_0": ((0,), 127, 0),
        "Q4_0": ((0,), 8, 0),
        "Q4_1": ((0, 2), 15, 7.5),
        "Q5_0": ((0,), 16, 0),
        "Q5_1": ((0, 2), 31, 15.5),
        "Q2_K": ((80, 82), 15 * 3, 1.5),
        "Q3_K": ((108,), 32 * 4, 0),
        "Q4_K": ((0, 2), 63 * 15, 7.5),
        "Q5_K": ((0, 2), 63 * 31, 15.5),
        "Q6_K": ((208,), 127 * 32, 0),
        "IQ4_NL": ((0,), 127, 0),
        "IQ4_XS": ((0,), 32 * 127, 0),
        "MXFP4": ((), 1, 0),
    }[type.name]
    if type.name == "MXFP4":  # a power of two
        blocks[..., 0] = 124 + rng.integers(0, 2, blocks.shape[:2]) + int(np.log2(scale))
    factors = rng.uniform(0.5, 1, (out, inputs // values)) * scale / largest
    for i, (at, factor) in enumerate(zip(place, (factors, factors * centre), strict=False)):
        sign = -1 if type.name in ("Q4_1", "Q5_1") and i else 1
        blocks[..., at : at + 2] = (sign * factor).astype("<f2").view(np.uint8).reshape(*factor.shape, 2)
    return blocks.reshape(out, -1)


def block_weight(kind: str, out: int, inputs: int) -> BlockWeight:
    """Random blocks, of which the first have no scale and the second only a minimum."""
    rows = random_blocks(GGMLQuantizationType[kind], out, inputs)
    size = BLOCK_TYPES[kind].num_bytes
    if FORMS[kind].has_zero:
        rows[0, :2] = rows[1, size : size + 2] = 0
    return BlockWeight(kind, torch.from_numpy(rows))


def reading(weight: QuantizedWeight | BlockWeight) -> QuantizedWeight:
    """A weight as executors without blocks read it."""
    return QuantizedWeight(*read_blocks(weight.kind, weight.rows)) if isinstance(weight, BlockWeight) else weight


def _metadata(config: Mapping[str, Any], rules: FamilyRules, shape: ModelShape) -> dict[str, Any]:
    """Values of the architecture, by key without its name."""
    rope = config.get("rope_parameters") or {}
    own = rope.get("full_attention", rope)
    rotated = own.get("partial_rotary_factor", 1.0)
    kind = None if own.get("rope_type") in ("llama3", "default") else own.get("rope_type")
    original = own.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    found = {
        "block_count": shape.num_layers,
        "context_length": config.get("max_position_embeddings", 2**20),
        "embedding_length": shape.hidden_size,
        "feed_forward_length": shape.intermediate_size,
        "attention.head_count": shape.num_heads,
        "attention.head_count_kv": shape.num_kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        f"attention.layer_norm_{'' if rules.norm == 'layer' else 'rms_'}epsilon": float(config[str(rules.norm_eps)]),
        "attention.scale": config.get("attention_multiplier"),
        "rope.scaling.yarn_log_multiplier": own.get("mscale_all_dim"),
        "attention.temperature_scale": own.get("llama_4_scaling_beta"),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "logit_scale": config.get("logits_scaling", config.get("logit_scale")),
        "vocab_size": shape.vocab_size,
        "rope.freq_base": float(own["rope_theta"]) if own else None,
        "rope.dimension_count": int(shape.head_dim * rotated),
        "rope.scaling.type": kind,
        "rope.scaling.factor": float(own["factor"]) if kind in ("linear", "yarn") else None,
        "rope.scaling.original_context_length": original if kind in ("yarn", "longrope") else None,
    }
    if (experts := shape.experts) is not None:
        found |= {"expert_count": experts.count, "expert_used_count": experts.top_k}
        found["expert_feed_forward_length"] = None if rules.model_type in ("mixtral", "olmoe") else experts.size
    if rules.model_type in ("qwen2_moe", "qwen3_5_moe_text", "qwen3_next"):
        found["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if rules.model_type == "lfm2_moe":
        found |= {"expert_gating_func": 2, "leading_dense_block_count": config["num_dense_layers"]}
    if rules.model_type == "qwen3_5_moe_text":
        found["feed_forward_length"] = None
    if rules.model_type == "glm4_moe":
        found |= {"expert_shared_count": config["n_shared_experts"], "expert_gating_func": 2}
        found["leading_dense_block_count"] = config["first_k_dense_replace"]
        found |= {"expert_weights_scale": config["routed_scaling_factor"], "expert_weights_norm": True}
        found |= {"nextn_predict_layers": 1, "block_count": shape.num_layers + 1}
    if rules.windows and config.get("use_sliding_window", True):
        found["attention.sliding_window"] = config.get("sliding_window")
    if shape.sizes:
        full = next(i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention")
        local, wide = shape.layer(0), shape.layer(full)
        found |= {"attention.key_length": wide.head_dim, "attention.value_length": wide.head_dim}
        found |= {"attention.key_length_swa": local.head_dim, "attention.value_length_swa": local.head_dim}
        found |= {"attention.head_count_kv": [sizes.num_kv_heads for sizes in shape.sizes]}
        found |= {"feed_forward_length": [sizes.intermediate_size for sizes in shape.sizes]}
        found |= {"attention.shared_kv_layers": config["num_kv_shared_layers"]}
        found |= {"embedding_length_per_layer_input": shape.per_layer_size, "rope.scaling.type": None}
        found |= {"attention.sliding_window_pattern": [kind != "full_attention" for kind in config["layer_types"]]}
        found |= {"rope.dimension_count": wide.head_dim, "rope.dimension_count_swa": local.head_dim}
        found |= {"rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"])}
    if rules.model_type == "phi3" and kind == "longrope":
        ratio = config["max_position_embeddings"] / original
        found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(ratio) / math.log(original))
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        found[key] = config.get(key)
    if (recurrent := shape.recurrent) is not None and recurrent.kind == "delta":
        found["rope.dimension_sections"] = [2, 1, 1, 0]
        found |= {"ssm.conv_kernel": recurrent.kernel, "ssm.state_size": recurrent.key_dim}
        found |= {"ssm.group_count": recurrent.key_heads, "ssm.time_step_rank": recurrent.heads}
        found["ssm.inner_size"] = recurrent.heads * recurrent.value_dim
        found["full_attention_interval"] = config["layer_types"].index("full_attention") + 1
    elif recurrent is not None and recurrent.kind == "mamba2":
        found |= _metadata_of_mamba(config, rules, shape)
    elif recurrent is not None:
        kv_heads = [0 if shape.is_recurrent(i) else shape.num_kv_heads for i in range(shape.num_layers)]
        found |= {"shortconv.l_cache": recurrent.kernel, "attention.head_count_kv": kv_heads}
    return found


def _metadata_of_mamba(config: Mapping[str, Any], rules: FamilyRules, shape: ModelShape) -> dict[str, Any]:
    recurrent, layers, experts = shape.recurrent, range(shape.num_layers), shape.experts
    assert recurrent is not None
    found: dict[str, Any] = {"ssm.conv_kernel": recurrent.kernel, "ssm.state_size": recurrent.key_dim}
    found |= {"ssm.group_count": recurrent.key_heads, "ssm.time_step_rank": recurrent.heads}
    found["ssm.inner_size"] = recurrent.heads * recurrent.value_dim
    if rules.model_type == "mamba2":
        return found | {"feed_forward_length": 0, "attention.head_count": 0, "attention.head_count_kv": None}
    if rules.model_type == "falcon_h1":
        return found | {"embedding_scale": None}
    attends = [not shape.is_recurrent(i) and i not in shape.mlp_only for i in layers]
    found["attention.head_count_kv"] = [shape.num_kv_heads * own for own in attends]
    if experts is not None:
        found["expert_shared_feed_forward_length"] = experts.shared_size
    if rules.model_type == "granitemoehybrid":
        return found | {"rope.scaling.finetuned": config["position_embedding_type"] == "rope"}
    units = shape.intermediate_size if experts is None else experts.size
    found["feed_forward_length"] = [units * (i in shape.mlp_only) for i in layers]
    if experts is not None:
        found |= {"expert_weights_scale": config["routed_scaling_factor"], "expert_group_count": 1}
        found |= {"expert_weights_norm": True, "moe_latent_size": experts.latent_size or None}
    return found


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add = next((add for kind, add in kinds.items() if isinstance(value, kind)), writer.add_array)
    add(key, value)


_OF_MTP = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}


def _tensors(folder: Path, arch: str, shape: ModelShape) -> dict[str, Tensor]:
    """The tensors by GGUF name, with what the converter changes of them."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names, found = gguf.get_tensor_name_map(kind, shape.num_layers + 1), {}
    factors = _factors_of_falcon(read_config(folder)) if arch == "falcon-h1" else {}
    tensors = _with_split_projections(_with_stacked_experts(load_file(folder / "model.safetensors")), shape.recurrent)
    for own, stored in tensors.items():
        if own.startswith("mtp.") and (part := own.split(".")[1]) in _OF_MTP:
            found[f"blk.{shape.num_layers}.nextn.{_OF_MTP[part]}.weight"] = stored + ("norm" in part)
            continue
        own = own.replace("mtp.layers.0.", f"model.layers.{shape.num_layers}.")
        own = own.replace("correction_bias", "correction.bias").replace("expert_bias", "expert_bias.bias")
        own += ".weight" * own.endswith("sinks")
        name, tensor = (
            names.get_name(own.replace("dt_bias", "dt_proj.bias"), (".weight", ".bias", ".scale")),
            stored.float(),
        )
        if shape.recurrent is not None and shape.recurrent.kind == "mamba2":
            tensor = _mamba_in_gguf(shape.recurrent, name, tensor)
        elif shape.recurrent is not None:
            tensor = _as_in_gguf(shape.recurrent, own, tensor, tiles=arch != "qwen3next")
        if factors:
            tensor = tensor * factors.get(name.removeprefix("blk.").partition(".")[2] if "blk" in name else name, 1.0)
        if arch in PERMUTED and ("attn_q." in name or "attn_k." in name):
            heads = shape.num_heads if "attn_q." in name else shape.num_kv_heads
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        tensor = tensor.squeeze() if "ffn_gate_inp_shexp" in name else tensor
        adds_one = arch.startswith(("gemma", "qwen35", "qwen3next")) and "norm." in name and "ssm" not in name
        adds_one &= arch != "gemma4"
        found[name] = tensor + 1 if adds_one else tensor
    return found


def _factors_of_falcon(config: Mapping[str, Any]) -> dict[str, Any]:
    """The factors of matrices by GGUF name, without the layer."""
    read, (gate, out) = config["attention_in_multiplier"], config["mlp_multipliers"]
    inner, states = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = torch.tensor([inner, inner, states, states, config["mamba_n_heads"]])
    parts = torch.tensor(config["ssm_multipliers"]).repeat_interleave(sizes)[:, None]
    return {
        "attn_q.weight": read,
        "attn_k.weight": read * config["key_multiplier"],
        "attn_v.weight": read,
        "attn_output.weight": config["attention_out_multiplier"],
        "ssm_in.weight": config["ssm_in_multiplier"] * parts,
        "ssm_out.weight": config["ssm_out_multiplier"],
        "ffn_gate.weight": gate,
        "ffn_down.weight": out,
        "token_embd.weight": config["embedding_multiplier"],
        "output.weight": config["lm_head_multiplier"],
    }


def _with_split_projections(tensors: Mapping[str, Tensor], shape: RecurrentShape | None) -> dict[str, Tensor]:
    """The tensors of a folder, with Qwen3-Next's projections to q, k and v of all heads in one."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("in_proj_qkvz.weight"):
            found[name] = tensor
            continue
        assert shape is not None
        values = shape.heads // shape.key_heads * shape.value_dim
        by_head = tensor.unflatten(0, (shape.key_heads, -1)).split([shape.key_dim] * 2 + [values] * 2, 1)
        *qkv, z = (part.flatten(0, 1) for part in by_head)
        found |= {name.replace("qkvz", "qkv"): torch.cat(qkv), name.replace("qkvz", "z"): z}
    return found


def _as_in_gguf(shape: RecurrentShape, name: str, tensor: Tensor, tiles: bool) -> Tensor:
    """A tensor as the converter changes it in recurrent layers: the first value heads of all key heads come first."""
    part = name.rpartition("linear_attn.")[2]
    tensor = -tensor.exp() if part == "A_log" else tensor.squeeze(1) if tensor.dim() == 3 else tensor
    if not tiles:
        return tensor
    size = {"in_proj_a.weight": 1, "in_proj_b.weight": 1, "A_log": 1, "dt_bias": 1}.get(part, shape.value_dim)

    def tiled(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (shape.key_heads, -1, size)).transpose(0, 1).flatten(0, 2)

    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        keys = 2 * shape.key_heads * shape.key_dim
        return torch.cat((tensor[:keys], tiled(tensor[keys:])))
    if part == "out_proj.weight":
        return tiled(tensor.T).T
    return (
        tiled(tensor)
        if part in (*("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight"), "A_log", "dt_bias")
        else tensor
    )


def _mamba_in_gguf(shape: RecurrentShape, name: str, tensor: Tensor) -> Tensor:
    """A tensor as the converter changes it in layers of Mamba 2, by GGUF name."""
    if name.endswith("ssm_a"):
        return -tensor.exp()[:, None]
    if name.endswith("ssm_d"):
        return tensor[:, None]
    if name.endswith("ssm_norm.weight"):
        return tensor.view(shape.key_heads, -1)
    return tensor.squeeze(1) if name.endswith("ssm_conv1d.weight") else tensor


def _with_stacked_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a folder, with those of all experts in one, and gate and up projections apart."""
    found: dict[str, Tensor] = {}
    stacked: dict[str, list[tuple[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*experts)\.(\d+)\.(.*)", name):
            own = f"{match[1]}.{match[3]}"
            own = own.removeprefix("model." if "feed_forward" in own else "")  # as the converter names LFM2's
            own = own.replace("backbone", "model").replace("mixer", "mlp")  # and Nemotron-H's
            stacked.setdefault(own, []).append((int(match[2]), tensor))
        elif name.endswith("_linear.weight"):  # Granite's
            dense = not any("block_sparse_moe" in other for other in tensors)
            block = "mlp" if dense else "mlp.shared_expert" if "shared" in name else "mlp.experts"
            stem = re.sub(r"\.(shared_mlp|block_sparse_moe)\..*", f".{block}", name)
            parts = ("gate", "up") if "input_linear" in name else ("down",)
            found |= {
                f"{stem}.{part}_proj.weight": rows
                for part, rows in zip(parts, tensor.chunk(len(parts), -2), strict=True)
            }
        elif name.endswith(".per_expert_scale"):
            found[name.replace("router.per_expert_scale", "experts.down_proj.scale")] = tensor
        elif name.endswith("router.scale"):
            found[name.replace("router.scale", "router.proj.scale")] = tensor
        elif "layer_scalar" in name or ("layers." in name and ".mlp." not in name and ".experts." in name):
            found[f"{name}.weight"] = tensor  # Gemma 4's
        elif ".experts.gate_up_proj" in name:  # gpt-oss's
            rows = tensor if name.endswith("bias") else tensor.transpose(1, 2)
            for i, part in enumerate(("gate_proj", "up_proj")):
                own = name.replace("gate_up_proj", part)
                found[own.replace("_bias", ".bias") if own.endswith("bias") else f"{own}.weight"] = rows[:, i::2]
        elif ".experts.down_proj" in name:
            is_bias = name.endswith("bias")
            own = name.replace("_bias", ".bias") if is_bias else f"{name}.weight"
            found[own] = tensor if is_bias else tensor.transpose(1, 2)
        else:
            found[name] = tensor
    return found | {name: torch.stack([tensor for _, tensor in sorted(parts)]) for name, parts in stacked.items()}


def _rope_factors(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Tensor]:
    """Tensors of rotary frequencies' factors: of longrope, and of Llama 3's scaling as the converter computes them."""
    rope = config.get("rope_parameters") or {}
    if (own := rope.get("full_attention", {})).get("rope_type") == "proportional":
        half = max(sizes.head_dim for sizes in shape.sizes) // 2
        rotated = int(half * own["partial_rotary_factor"])
        return {"rope_freqs.weight": torch.tensor([1.0] * rotated + [1e30] * (half - rotated))}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{name}.weight": torch.tensor(rope[f"{name}_factor"]) for name in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    lengths = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, shape.head_dim, 2).double() / shape.head_dim)
    smooth = ((rope["original_max_position_embeddings"] / lengths - low) / (high - low)).clamp(0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / rope["factor"] + smooth)).float()}


def transformers_reading(path: Path) -> nn.Module:
    """transformers' model of a GGUF file, in float32."""
    from transformers import AutoModelForCausalLM, GgufConfig

    # accelerate is asked for, but not needed to read the architectures here.
    with mock.patch("transformers.modeling_utils.is_accelerate_available", lambda: True):
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            attn_implementation="eager",  # before 5.24, SDPA is the default and leaves out the caps of scores
            quantization_config=GgufConfig(dequantize=True),
        )
    return model.eval()


SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 16, "num_hidden_layers": 2}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.125 * i for i in range(6)],
    "long_factor": [1.5 + 0.5 * i for i in range(6)],
    "partial_rotary_factor": 0.75,
}
_WINDOWS = {"sliding_window": WINDOW, "tie_word_embeddings": True, "num_hidden_layers": 3, "query_pre_attn_scalar": 16}
_MSCALES = {"mscale": 1.0, "mscale_all_dim": 1.0}
_SLIDING = {"sliding_window": WINDOW, "num_hidden_layers": 5}
_CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 30.0}
_GEMMA3 = {"num_hidden_layers": 7, "rope_parameters": TYPICAL["gemma3"].config["rope_parameters"]}
_NEMOTRON = {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "intermediate_size": 24}
_PHI3 = {"head_dim": None, "hidden_size": 64, "sliding_window": None, "num_key_value_heads": 1}
GGUF_CASES = {
    "llama, biases": TYPICAL["llama"],
    "llama, wide heads": Case("llama", {"head_dim": 40, "tie_word_embeddings": True}),
    "llama 3.1": Case("llama", {"rope_parameters": _LLAMA3 | {"original_max_position_embeddings": 64}}),
    "qwen2, yarn": Case("qwen2", {"rope_parameters": _YARN}),
    "qwen3": TYPICAL["qwen3"],
    "qwen3_5": CASES["qwen3_5, one group of heads, rope of a quarter"],
    "lfm2": TYPICAL["lfm2"],
    "lfm2_moe": TYPICAL["lfm2_moe"],
    "granite_hybrid": TYPICAL["granite_hybrid"],
    "falcon_h1": Case(
        "falcon_h1", {key: value for key, value in TYPICAL["falcon_h1"].config.items() if "multiplier" not in key}
    ),
    "nemotron_h": Case("nemotron_h", TYPICAL["nemotron_h"].config | _NEMOTRON),
    "gemma2": Case("gemma2", _WINDOWS | _CAPS),
    "gemma3": Case("gemma3_text", _WINDOWS | _GEMMA3),
    "gemma4": TYPICAL["gemma4"],
    "gemma4, experts": TYPICAL["gemma4, experts"],
    "mixtral": TYPICAL["mixtral"],
    "qwen2_moe": Case("qwen2_moe", TYPICAL["qwen2_moe"].config | {"mlp_only_layers": []}),
    "qwen3_moe": TYPICAL["qwen3_moe"],
    "olmoe": TYPICAL["olmoe"],
    "glm4_moe": TYPICAL["glm4_moe"],
    "gpt_oss": TYPICAL["gpt_oss"],
    "phi3, partial": TYPICAL["phi3"],
    "phi3, longrope": Case("phi3", _PHI3 | {"original_max_position_embeddings": 64, "rope_parameters": _LONGROPE}),
}
RELATIVES = {
    "gemma": CASES["gemma"],
    "arcee": CASES["arcee"],
    "cohere": Case("cohere", {"logit_scale": 0.75, "tie_word_embeddings": True}),
    "cohere2": Case("cohere2", _SLIDING | {"tie_word_embeddings": True}),
    "ernie4_5": CASES["ernie4_5"],
    "exaone4": Case("exaone4", _SLIDING),
    "glm": CASES["glm"],
    "glm4": CASES["glm4"],
    "granite": CASES["granite"],
    "granite_hybrid, dense": CASES["granite_hybrid, dense, rotated"],
    "nemotron_h, dense": CASES["nemotron_h, biases, no experts"],
    "mamba2": CASES["mamba2"],
    "hunyuan": Case("hunyuan_v1_dense", {}),
    "jais2": CASES["jais2"],
    "ministral3": Case("ministral3", {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.5} | _MSCALES}),
    "olmo2": Case("olmo2", {"head_dim": None}),
    "olmo3": Case("olmo3", _SLIDING | {"head_dim": None}),
    "seed_oss": CASES["seed_oss"],
    "smollm3": Case("smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "stablelm": CASES["stablelm"],
    "starcoder2": Case("starcoder2", {"use_bias": True, "sliding_window": None}),
}
"""Families of which llama.cpp writes the tensors that it also writes for others."""
GGUF_CASES |= RELATIVES


@functools.cache
def family_folder(name: str) -> Path:
    """A model of `GGUF_CASES`."""
    return make_model(new_folder("gguf") / "folder", GGUF_CASES[name], 0)


@functools.cache
def gemma4_file() -> Path:
    """Gemma 4 in blocks, the table of the layers' inputs too."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "global_head_dim": 32, "hidden_size_per_layer_input": 32}
    folder = make_model(new_folder("gguf") / "folder", TYPICAL["gemma4"], 0, **sizes)
    return write_gguf(new_folder("gguf") / "gemma4.gguf", folder, "Q8_0")


@functools.cache
def llama() -> Path:
    """A Llama whose matrices have whole blocks of every type."""
    return make_llama(new_folder("gguf") / "llama", 0, **SIZES)


@functools.cache
def llama_file(types: str) -> Path:
    """`llama` as a file of one type; "tied", or "Q4_K_M" as llama.cpp mixes it: some matrices with more bits."""
    path = new_folder("gguf") / f"{types}.gguf"
    if types == "tied":
        tied = make_llama(new_folder("gguf") / "tied", 0, tie_word_embeddings=True, **SIZES)
        return write_gguf(path, tied, lambda name: "Q8_0" if name == "token_embd.weight" else "Q4_1")
    more = {"token_embd.weight": "Q8_0"}
    more |= dict.fromkeys(("output.weight", "blk.0.attn_v.weight", "blk.1.ffn_down.weight"), "Q6_K")
    return write_gguf(path, llama(), types if types != "Q4_K_M" else lambda name: more.get(name, "Q4_K"))
