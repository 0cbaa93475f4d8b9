"""Translate a GGUF file's metadata to the config.json and generation_config.json of the same model."""

import functools
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from treespec_weights.errors import CheckpointConfigError, Problem, UnsupportedModelError
from treespec_weights.experts import ExpertRules
from treespec_weights.families import FAMILIES
from treespec_weights.gguf.reader import GgufFile
from treespec_weights.gguf.tokenizer import turn_ends
from treespec_weights.rules import FULL_ATTENTION, TILED, FamilyRules

logger = logging.getLogger("treespec")

# llama.cpp's architectures. Mistral's dense models are "llama" too: their sliding windows are not stored, and
# llama.cpp computes full attention as well. Files of models for texts and images hold only the text part.
_SAME_NAMES = """llama qwen2 qwen3 lfm2 gemma gemma2 phi3 arcee cohere2 ernie4_5 exaone4 glm4 granite jais2 olmo2
    seed_oss smollm3 stablelm starcoder2 olmoe nemotron_h mamba2""".split()
_MODEL_TYPES = dict(zip(_SAME_NAMES, _SAME_NAMES, strict=True)) | {
    "qwen2vl": "qwen2",
    "qwen3vl": "qwen3",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3next": "qwen3_next",
    "lfm2moe": "lfm2_moe",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "chatglm": "glm",
    "command-r": "cohere",
    "hunyuan-dense": "hunyuan_v1_dense",
    "mistral3": "ministral3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "qwen3vlmoe": "qwen3_moe",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "granitehybrid": "granitemoehybrid",
    "falcon-h1": "falcon_h1",  # the converter multiplies the weights by the model's factors
    "nemotron_h_moe": "nemotron_h",
}
PERMUTED = ("arcee", "granite", "granitehybrid", "llama", "mistral3", "smollm3")
"""Architectures for which llama.cpp's converter permutes the rows of q and k for interleaved rotation."""
FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors with divisors of the rotary frequencies. They become part of the config, not of the weights."""

_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
# GGUF values that change layers, and the `FamilyRules` fields with the config keys that express them.
_CHANGES_LAYERS: Mapping[str, tuple[str, ...]] = {
    "expert_count": ("experts",),
    "attention.scale": ("score_scale",),
    "embedding_scale": ("embed_scale",),
    "residual_scale": ("residual_scale",),
    "logit_scale": ("logit_scale", "logit_divisor"),
}
_BIASES = {"o_bias": "attn_output", "mlp_bias": "ffn_up", "attention_bias": "attn_q"}
# Default distances between layers of full attention in models with windows.
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma4": 6, "olmo2": 4, "cohere2": 4, "exaone4": 4, "gpt-oss": 2}
_DELTA_NETS = ("qwen35", "qwen35moe", "qwen3next")
_MAY_BE_DENSE = ("granitehybrid", "nemotron_h")
_OF_IMAGES = ("qwen2vl", "qwen3vl", "qwen3vlmoe")
_PARTLY_ROTATED = ("phi3", "chatglm", "glm4", *_DELTA_NETS, "stablelm", "glm4moe")
_GATING = {1: "softmax", 2: "sigmoid", 3: "softmax_of_chosen"}  # llama.cpp's numbers for `Scoring`
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ROPE_FACTORS = ("rope.scaling.factor", "rope.scale_linear")  # the second is older
_ROPE_KEYS = (
    *("rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.attn_factor"),
    *("rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    "rope.scaling.finetuned",  # changes nothing, except in files of granitehybrid (`_recurrent`)
    "rope.scaling.yarn_log_multiplier",
)
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_NOT_ROTATED = 1e20
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}  # layers of the 27 B models


def rules_of(file: GgufFile) -> FamilyRules:
    """Return the family of a GGUF file. Raises UnsupportedModelError if no family has its architecture."""
    if file.architecture not in _MODEL_TYPES:
        message = f"{file.architecture!r} is not supported; supported GGUF architectures: {', '.join(_MODEL_TYPES)}"
        raise UnsupportedModelError.of(file.path, "config", "general.architecture", message)
    if file.architecture == "llama" and file.value("expert_count"):
        return FAMILIES["mixtral"]
    slides = file.architecture == "olmo2" and file.value("attention.sliding_window")
    return FAMILIES["olmo3" if slides else _MODEL_TYPES[file.architecture]]


def hf_config(file: GgufFile) -> dict[str, Any]:
    """Return the config.json of a GGUF file, without a quantization_config. Raises CheckpointConfigError."""
    rules, arch = rules_of(file), file.architecture
    scales: dict[str, Any] = {}
    variants = []
    for key, names in _CHANGES_LAYERS.items():
        if value := file.value(key):
            config_keys = [config_key for name in names if (config_key := getattr(rules, name)) is not None]
            scales |= {config_key: value for config_key in config_keys if isinstance(config_key, str)}
            if not config_keys:
                variants.append(_problem(file, key, f"{value!r} is not supported"))
    if variants:
        raise UnsupportedModelError(file.path, variants)
    problems: list[Problem] = []

    def natural(key: str, default: int | None = None) -> int:
        value = file.value(key)
        if isinstance(value, list) and rules.recurrent is not None:
            value = [entry for entry in value if entry]  # 0: layers without attention, or without an MLP
        if isinstance(value, list) and value and rules.layer_sizes is not None:
            value = value[0]  # `_unequal` reads the other layers
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]  # one entry per layer
        value = default if value is None else value
        if type(value) is not int or value < 1:
            problem = "missing" if value is None else f"{value!r} is not a whole number from 1, equal in all layers"
            problems.append(_problem(file, key, problem))
            return 1
        return value

    dense = {"feed_forward_length": file.value("expert_feed_forward_length")}  # not stored if no layer is dense
    attends = "num_heads" in rules.config_keys
    absent = () if attends else ("feed_forward_length", "attention.head_count")
    config: dict[str, Any] = {name: natural(key, dense.get(key)) for key, name in _SIZES.items() if key not in absent}
    if attends:
        heads = config["num_attention_heads"]
        config["num_key_value_heads"] = natural("attention.head_count_kv", heads)
        config["head_dim"] = natural("attention.key_length", config["hidden_size"] // heads or None)
        if (length := natural("attention.value_length", config["head_dim"])) != config["head_dim"]:
            message = f"{length}, which is not the head size of keys, {config['head_dim']}: not supported"
            problems.append(_problem(file, "attention.value_length", message))
    embed = file.tensors.get("token_embd.weight")
    if embed is None or len(embed.shape) != 2:
        problems.append(Problem("missing", "'token_embd.weight'", "no such matrix: the file is incomplete"))
    else:
        config["vocab_size"] = embed.shape[0]
    config["num_hidden_layers"] -= num_predictors(file)
    norm_eps = rules.norm_eps if isinstance(rules.norm_eps, str) else "rms_norm_eps"
    epsilon = "attention.layer_norm_epsilon" if rules.norm == "layer" else "attention.layer_norm_rms_epsilon"
    config[norm_eps] = _positive(file, epsilon, None, problems)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    for name, stem in _BIASES.items():
        if name in rules.config_keys:
            config[rules.config_keys[name]] = _has(file, f"{stem}.bias")
    config |= scales
    if "qk_norm" in rules.config_keys:
        config[rules.config_keys["qk_norm"]] = _has(file, "attn_q_norm.weight")
    if rules.experts is not None:
        config |= _experts(file, rules.experts, problems)
    config |= _attention(file, config, problems)
    config |= _recurrent(file, rules, natural)
    if rules.layer_sizes is not None:
        config |= _unequal(file, config, natural)
    if rules.rotary:
        config |= _positions(file, config, problems)
    if problems:
        raise CheckpointConfigError(file.path, problems)
    # Absent tokens as null: some config classes have other defaults.
    described = {"architectures": [f"{arch.capitalize()}ForCausalLM"], "model_type": rules.model_type}
    return described | config | _special_tokens(file) | {"dtype": _dtype(file)}


def generation_config(file: GgufFile) -> dict[str, Any]:
    """Return the generation_config.json of a GGUF file: special tokens and recommended sampling parameters, if any."""
    sampling = {name: file.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {key: value for key, value in (_special_tokens(file) | sampling).items() if value is not None}


def _problem(file: GgufFile, key: str, message: str) -> Problem:
    return Problem("config", repr(f"{file.architecture}.{key}"), message)


def _has(file: GgufFile, name: str) -> bool:
    return any(tensor.endswith(f".{name}") for tensor in file.tensors)


def _special_tokens(file: GgufFile) -> dict[str, Any]:
    """Return the ids of special tokens; the end tokens of texts, turns and messages all end generation."""
    ends = [file.metadata.get(f"tokenizer.ggml.{key}") for key in _END_TOKENS]
    eos_ids = file.metadata.get("tokenizer.ggml.eos_token_ids")
    ends += [*(eos_ids if isinstance(eos_ids, list) else []), *turn_ends(file)]
    ids = list(dict.fromkeys(token for token in ends if type(token) is int))
    return {
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ids[0] if len(ids) == 1 else ids or None,
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _positive(file: GgufFile, key: str, default: float | None, problems: list[Problem]) -> float:
    """Return a positive metadata value of the architecture; without one, add to `problems` and return 1."""
    value = file.value(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        problems.append(_problem(file, key, "missing" if value is None else f"{value!r} is not a positive number"))
        return 1.0
    return float(value)


def _experts(file: GgufFile, rules: ExpertRules, problems: list[Problem]) -> dict[str, Any]:
    """Return the config keys of experts. Missing values are left to `ExpertRules.read`."""
    keys = {
        "expert_count": rules.count[0],
        "expert_used_count": rules.top_k,
        "leading_dense_block_count": rules.dense,
        "expert_weights_norm": "norm_topk_prob",
        "expert_feed_forward_length": rules.size,
        "expert_shared_feed_forward_length": rules.shared_size,
        "expert_shared_count": rules.shared_count,
        "moe_latent_size": rules.latent_size,
        "expert_group_count": "n_group" if rules.grouped else None,
        "expert_group_used_count": "topk_group" if rules.grouped else None,
        "expert_weights_scale": rules.scale,
    }
    if rules.scale is None and file.value("expert_weights_scale") not in (None, 0, 1):
        message = f"{file.value('expert_weights_scale')!r} is not supported"
        problems.append(_problem(file, "expert_weights_scale", message))
    gating = file.value("expert_gating_func")
    if gating and _GATING.get(gating) != rules.scoring:
        problems.append(_problem(file, "expert_gating_func", f"{gating!r} is not supported for {file.architecture}"))
    # Not stored for these: llama.cpp divides the weights of the architecture by their sum.
    config: dict[str, Any] = {"norm_topk_prob": file.architecture in ("qwen3moe", "qwen3vlmoe", "qwen3next", "lfm2moe")}
    if file.architecture in _MAY_BE_DENSE:
        config[rules.count[0]] = 0
    if rules.switch is not None:
        config[rules.switch] = bool(file.value("expert_count"))
    read = {name: file.value(key) for key, name in keys.items() if name not in (None, "intermediate_size")}
    return config | {name: value for name, value in read.items() if name is not None and value is not None}


def _attention(file: GgufFile, config: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Return the config keys of sliding windows, soft caps and attention scales."""
    arch, window = file.architecture, file.value("attention.sliding_window")
    if rules_of(file).model_type in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"):
        return {"use_sliding_window": False}
    if arch in ("phi3", "mistral3", "starcoder2"):  # llama.cpp ignores starcoder2's window
        return {"sliding_window": window or None if arch == "phi3" else None}
    if arch not in _PATTERNS or (arch == "olmo2" and not window):
        return {}
    if arch == "exaone4" and not window:
        return {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    if window is None:
        problems.append(_problem(file, "attention.sliding_window", "missing"))
    # either a flag per layer, or the distance between layers with full attention
    pattern = file.value("attention.sliding_window_pattern") or _PATTERNS[arch]
    if type(pattern) is int and pattern > 0:
        pattern = [(i + 1) % pattern != 0 for i in range(config["num_hidden_layers"])]
    if not isinstance(pattern, list) or len(pattern) != config["num_hidden_layers"]:
        message = f"{pattern!r} is neither a distance of layers nor a flag for each"
        problems.append(_problem(file, "attention.sliding_window_pattern", message))
        pattern = []
    kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    result = {"sliding_window": window, "layer_types": kinds}
    if arch in _LARGEST_GEMMA:
        # Not stored: llama.cpp recognises the 27 B models by their number of layers.
        largest = config["num_hidden_layers"] == _LARGEST_GEMMA[arch]
        scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
        caps = {key: file.value(key) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
        result |= {"query_pre_attn_scalar": scalar} | {key: cap for key, cap in caps.items() if cap is not None}
    return result


def _unequal(file: GgufFile, config: Mapping[str, Any], natural: Callable[..., int]) -> dict[str, Any]:
    """Return the config keys of Gemma 4's unequal layers and of their per-layer inputs."""
    kinds, kv_heads = config["layer_types"], file.value("attention.head_count_kv")
    widths = file.value("feed_forward_length")
    full = kinds.index(FULL_ATTENTION) if FULL_ATTENTION in kinds else 0
    fields = {
        "global_head_dim": config["head_dim"],
        "head_dim": natural("attention.key_length_swa", config["head_dim"]),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": file.value("attention.shared_kv_layers") or 0,
        "use_double_wide_mlp": isinstance(widths, list) and len({*widths}) > 1,
        "hidden_size_per_layer_input": file.value("embedding_length_per_layer_input") or 0,
    }
    if (cap := file.value("final_logit_softcapping")) is not None:
        fields["final_logit_softcapping"] = cap
    if (table := file.tensors.get("per_layer_token_embd.weight")) is not None:
        fields["vocab_size_per_layer_input"] = table.shape[0]
    if isinstance(kv_heads, list) and len(kv_heads) == len(kinds):
        sliding = next((i for i, kind in enumerate(kinds) if kind != FULL_ATTENTION), full)
        fields |= {"num_key_value_heads": kv_heads[sliding], "num_global_key_value_heads": kv_heads[full]}
    return fields


def num_predictors(file: GgufFile) -> int:
    """Return the number of layers after the model's own that predict further tokens (MTP)."""
    count = file.value("nextn_predict_layers")
    return count if type(count) is int and file.architecture in (*_DELTA_NETS, "glm4moe", "nemotron_h_moe") else 0


def _recurrent(file: GgufFile, rules: FamilyRules, natural: Callable[..., int]) -> dict[str, Any]:
    """Return the config keys of recurrent layers."""
    if rules.recurrent is None:
        return {}
    recurrent, count = rules.recurrent, natural("block_count")

    def by_layer(key: str) -> list[Any]:
        return values if isinstance(values := file.value(key), list) else [values] * count

    types = [FULL_ATTENTION if kv_heads else recurrent.layer_type for kv_heads in by_layer("attention.head_count_kv")]
    if recurrent.kind == "conv":
        return {"layer_types": types, "conv_L_cache": natural("shortconv.l_cache"), "block_auto_adjust_ff_dim": False}
    heads, keys = natural("ssm.time_step_rank"), natural("ssm.group_count")
    sizes: dict[str, Any] = {
        "kernel": natural("ssm.conv_kernel"),
        "key_heads": keys,
        "heads": heads,
        "key_dim": natural("ssm.state_size"),
        "value_dim": natural("ssm.inner_size") // heads or 1,
        "conv_bias": _has(file, "ssm_conv1d.bias"),
        "bias": _has(file, "ssm_in.bias"),
        "normed": _has(file, "ssm_norm.weight"),
    }
    config = {key: sizes[name] for name, key in recurrent.config_keys.items()}
    if recurrent.layer_type == "hybrid":
        config |= {"projectors_bias": sizes["bias"], "mamba_norm_before_gate": False}
        config["mamba_d_ssm"] = natural("ssm.inner_size")
    elif recurrent.interval is not None:
        config[recurrent.interval] = natural("full_attention_interval", 4)
        config[TILED] = heads != keys and file.architecture != "qwen3next"
    elif recurrent.single and file.architecture != "mamba2":
        mlp = "moe" if file.architecture == "nemotron_h_moe" else "mlp"
        units = by_layer("feed_forward_length")
        types = [mlp if kv_heads else kind for kv_heads, kind in zip(units, types, strict=False)]
        config[recurrent.key] = types[: count - num_predictors(file)]
    elif not recurrent.single:
        rotates = file.value("rope.scaling.finetuned")  # llama.cpp's flag for rotation
        config |= {recurrent.key: types, "position_embedding_type": "rope" if rotates else None}
        config["mamba_expand"] = natural("ssm.inner_size") // natural("embedding_length")
        shared = natural("expert_shared_feed_forward_length", file.value("feed_forward_length"))
        config["shared_intermediate_size"] = shared
    return config


def _positions(file: GgufFile, config: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Return the config keys of the rotary embedding."""
    arch, head_dim = file.architecture, config["head_dim"]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _positive(file, "rope.freq_base", 10000.0, problems)}
    if arch == "gemma4":  # huge divisors of frequencies mark dimensions without rotation
        divisors, theta = _factors(file, FACTORS[0]) or [], _positive(file, "rope.freq_base_swa", 10000.0, problems)
        rotated = sum(2 for divisor in divisors if divisor < _NOT_ROTATED) or config["global_head_dim"]
        rope |= {"rope_type": "proportional", "partial_rotary_factor": rotated / config["global_head_dim"]}
        return _by_kind(rope, theta)
    keys: dict[str, Any] = {}
    rotated = file.value("rope.dimension_count") or head_dim
    if arch in _PARTLY_ROTATED and type(rotated) is int and 0 < rotated <= head_dim:
        keys["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        message = f"{rotated!r} of {head_dim} dimensions of a head are rotated, which is not supported for {arch}"
        problems.append(_problem(file, "rope.dimension_count", message))
    if arch.startswith("glm4") and any(file.value("rope.dimension_sections") or ()):
        message = "a model for texts and images, whose q and k have another order: not supported"
        problems.append(_problem(file, "rope.dimension_sections", message))
    magnitude = _positive(file, "rope.scaling.attn_factor", 1.0, problems)
    rope |= _rope_scaling(file, config["max_position_embeddings"], rotated, magnitude, problems)
    if arch == "phi3" and rope["rope_type"] == "longrope":
        keys["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    beta = file.value("attention.temperature_scale")
    if beta and arch == "mistral3":
        rope |= {"llama_4_scaling_beta": beta}
        if file.value("rope.scaling.original_context_length") is None:
            problems.append(_problem(file, "rope.scaling.original_context_length", "missing"))
    elif beta:
        problems.append(_problem(file, "attention.temperature_scale", f"{beta!r} is not supported"))
    by_kind = arch == "gemma3" or (arch == "olmo2" and file.value("attention.sliding_window"))
    if by_kind:
        if magnitude != 1 and arch == "gemma3":
            message = f"{magnitude!r} is not supported for {arch}"
            problems.append(_problem(file, "rope.scaling.attn_factor", message))
        theta = _positive(file, "rope.freq_base_swa", 10000.0 if arch == "gemma3" else rope["rope_theta"], problems)
        keys |= _by_kind(rope, theta)
    # Sections of positions in images are equal in texts.
    sectioned = ("rope.dimension_sections",) if arch in (*_DELTA_NETS, *_OF_IMAGES) else ()
    arch_keys = ("rope.freq_base_swa",) if by_kind else sectioned
    read_keys = {*_ROPE_KEYS, *_ROPE_FACTORS, *arch_keys}
    metadata = {key.removeprefix(f"{arch}."): value for key, value in file.metadata.items()}
    if unknown := [f"{key}={metadata[key]!r}" for key in metadata if key.startswith("rope.") and key not in read_keys]:
        _warn_ignored(file.path, ", ".join(unknown))
    return {"rope_parameters": rope} | keys


def _rope_scaling(
    file: GgufFile, longest: int, rotated: Any, magnitude: float, problems: list[Problem]
) -> dict[str, Any]:
    """Return the entries of `rope_parameters` that scale the rotary embedding, for up to `longest` positions."""
    arch, rope, half = file.architecture, dict[str, Any](), rotated // 2 if type(rotated) is int else 0
    key = next((key for key in _ROPE_FACTORS if file.value(key)), _ROPE_FACTORS[0])
    kind = file.value("rope.scaling.type") or ("linear" if file.value(key) else "none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        message = f"{kind!r} is not supported; supported: none, linear, yarn, longrope"
        problems.append(_problem(file, "rope.scaling.type", message))
    # As in llama.cpp, the factor also applies to longrope, and the magnitude to every type, on top of yarn's own.
    factor = 1.0 if kind == "none" else _positive(file, key, None if kind in ("linear", "yarn") else 1.0, problems)
    frequencies, short, long = factors = [_factors(file, name) for name in FACTORS]
    lengths = {len(values) for values in factors if values is not None} - {half}
    original = file.value("rope.scaling.original_context_length")
    if lengths or (short is None) != (long is None) or (kind == "longrope" and short is None):
        message = f"expected {' and '.join(FACTORS[1:])}, or {FACTORS[0]}, with half of {rotated!r} values"
        problems.append(Problem("missing", "'rope_factors'", message))
    elif kind == "yarn" and (frequencies or short):
        message = f"'yarn' together with {FACTORS[0] if frequencies else FACTORS[1]!r} is not supported"
        problems.append(_problem(file, "rope.scaling.type", message))
    elif kind == "yarn":
        rope |= {"rope_type": kind, "factor": factor}
        rope |= {} if original is None else {"original_max_position_embeddings": original}
        rope |= {"truncate": False} if arch == "gpt-oss" else {}
        betas = {name: file.value(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        rope |= {name: value for name, value in betas.items() if value is not None}
        divisor = file.value("rope.scaling.yarn_log_multiplier") or 0.0  # like DeepSeek's mscale_all_dim
        if magnitude != 1 or divisor:
            scale = 0.1 * math.log(max(factor, 1))
            rope["attention_factor"] = magnitude * (1 + scale) / (1 + divisor * scale)
    elif frequencies or short or magnitude != 1:
        # Llama 3's scaling is stored as the resulting factors. Written as longrope, which can express any factors.
        ones = [1.0] * half
        original = original if type(original) is int and original > 0 else longest
        rope |= {
            "rope_type": "longrope",
            "short_factor": [factor * value for value in frequencies or short or ones],
            "long_factor": [factor * value for value in frequencies or long or ones],
            "attention_factor": magnitude,
            "original_max_position_embeddings": original,
            "factor": longest / original,
        }
    elif kind == "linear":
        rope |= {"rope_type": kind, "factor": factor}
    return rope


def _by_kind(rope: dict[str, Any], sliding_theta: float) -> dict[str, Any]:
    """Return `rope_parameters` with `rope` for full attention and a default embedding for sliding windows."""
    sliding = {"rope_type": "default", "rope_theta": sliding_theta}
    return {"rope_parameters": {"full_attention": rope, "sliding_attention": sliding}}


@functools.cache
def _warn_ignored(path: Path, keys: str) -> None:
    """Warn once per file, because its config is read several times."""
    logger.warning("%s: ignoring %s, which treespec does not know for this architecture", path, keys)


def _factors(file: GgufFile, name: str) -> list[float] | None:
    """Return the values of a tensor of `FACTORS`, or None if it is absent."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.type != "F32":
        raise CheckpointConfigError.of(file.path, "dtype", name, f"has type {tensor.type}, expected F32")
    values = np.fromfile(file.path.parent / tensor.file, "<f4", tensor.nbytes // 4, offset=tensor.offset)
    return [float(str(value)) for value in values]


def _dtype(file: GgufFile) -> str:
    """Return the compute dtype: the matrices' common dtype, otherwise bfloat16."""
    types = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return "float32" if types == {"F32"} else "float16" if types == {"F16"} else "bfloat16"
