"""Families with layers of Mamba 2: Granite 4 (hybrid), Nemotron-H, Bamba, Falcon-H1 and Mamba 2 itself."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from treespec_weights.errors import Problem
from treespec_weights.experts import ExpertRules
from treespec_weights.factors import Factors
from treespec_weights.families.llama import LLAMA, LLAMA_SIZES, LLAMA_TENSORS, MLP
from treespec_weights.families.llama_like import GRANITE
from treespec_weights.rules import (
    FULL_ATTENTION,
    FamilyRules,
    RecurrentRules,
    TensorRule,
    named,
    one_to_one,
    with_biases,
)

_RECURRENT = "linear_attention"
_OLDER_TYPES = {"mamba": _RECURRENT, "attention": FULL_ATTENTION}  # transformers' translation
_PATTERN = {"M": _RECURRENT, "E": "moe", "*": FULL_ATTENTION, "-": "mlp"}
_CONV = tuple(f"layers.{{i}}.conv_{part}" for part in "vkq")
_IN = ("layers.{i}.mix_gate", "layers.{i}.mix_v", "layers.{i}.mix_k", "layers.{i}.mix_q", "layers.{i}.decay")
_NO_LIMIT = (None, [0.0, math.inf])  # unlimited time steps; transformers applies limits to prompts only


def _mixer(stem: str) -> tuple[TensorRule, ...]:
    vectors = {"dt_bias": "dt_bias", "A_log": "decay_log", "D": "skip"}
    return (
        TensorRule(f"{stem}.in_proj.weight", _IN),
        TensorRule(f"{stem}.in_proj.bias", tuple(f"{name}_bias" for name in _IN)),
        TensorRule(f"{stem}.conv1d.weight", _CONV),
        TensorRule(f"{stem}.conv1d.bias", tuple(f"{name}_bias" for name in _CONV)),
        *with_biases({f"{stem}.out_proj": "layers.{i}.mix_out"}),
        *one_to_one({f"{stem}.norm.weight": "layers.{i}.mix_gain"}),
        *(TensorRule(f"{stem}.{name}", (f"layers.{{i}}.{param}",), single=True) for name, param in vectors.items()),
    )


_MAMBA_KEYS = {
    "kernel": "mamba_d_conv",
    "key_heads": "mamba_n_groups",
    "heads": "mamba_n_heads",
    "key_dim": "mamba_d_state",
    "value_dim": "mamba_d_head",
    "conv_bias": "mamba_conv_bias",
    "bias": "mamba_proj_bias",
}
_MAMBA_DEFAULTS = {"kernel": 4, "key_heads": 1, "heads": 128, "key_dim": 256, "conv_bias": True, "bias": False}
_MAMBA = RecurrentRules(kind="mamba2", layer_type=_RECURRENT, config_keys=_MAMBA_KEYS, defaults=_MAMBA_DEFAULTS)


def _with_head_size(config: Mapping[str, Any]) -> dict[str, Any]:
    """Replace a head size of "auto"."""
    size, expand = config.get("mamba_d_head"), config.get("mamba_expand", 2)
    hidden, heads = (config.get(key) for key in ("hidden_size", "mamba_n_heads"))
    is_valid = all(type(value) is int and value > 0 for value in (expand, hidden, heads))
    return {**config, "mamba_d_head": expand * hidden // heads} if size in (None, "auto") and is_valid else dict(config)


def _normalize_granite(config: Mapping[str, Any]) -> dict[str, Any]:
    """Replace older names of layer types, and give a model without experts its MLP's size."""
    result, layers, types = _with_head_size(config), config.get("num_hidden_layers"), config.get("layer_types")
    if isinstance(types, list):
        result["layer_types"] = [_OLDER_TYPES.get(str(kind), kind) for kind in types]
    if type(layers) is int:
        result["no_rope_layers"] = [int(config.get("position_embedding_type") == "rope")] * layers
    if config.get("num_local_experts") == 0:
        result["intermediate_size"] = config.get("shared_intermediate_size")
    return result


_EXPERT = "layers.{i}.experts.{e}."
_SHARED = "model.layers.{i}.shared_mlp."
_EXPERTS = "model.layers.{i}.block_sparse_moe."

GRANITE_HYBRID = replace(
    GRANITE,
    model_type="granitemoehybrid",
    tensors=tuple(rule for rule in LLAMA_TENSORS if ".mlp." not in rule.name)
    + _mixer("model.layers.{i}.mamba")
    + (
        TensorRule(_SHARED + "input_linear.weight", ("layers.{i}.shared.gate", "layers.{i}.shared.up")),
        TensorRule(_SHARED + "input_linear.weight", ("layers.{i}.gate", "layers.{i}.up")),
        TensorRule(_EXPERTS + "input_linear.weight", (_EXPERT + "gate", _EXPERT + "up")),
        *one_to_one(
            {
                _SHARED + "output_linear.weight": "layers.{i}.shared.down",
                _EXPERTS + "output_linear.weight": _EXPERT + "down",
                _EXPERTS + "router.layer.weight": "layers.{i}.router",
            }
        ),
        TensorRule(_SHARED + "output_linear.weight", ("layers.{i}.down",)),
    ),
    alternatives=one_to_one(  # GGUF files
        named(_SHARED + "{}_proj", "layers.{i}.shared.{}", MLP)
        | named("model.layers.{i}.mlp.{}_proj", "layers.{i}.{}", MLP)
        | named(_EXPERTS + "{}_proj", _EXPERT + "{}", MLP)
    ),
    normalize=_normalize_granite,
    config_keys=LLAMA_SIZES | {"attention_bias": "attention_bias", "o_bias": "attention_bias"},
    recurrent=_MAMBA,
    unrotated="no_rope_layers",
    experts=ExpertRules(
        count=("num_local_experts",),
        size="intermediate_size",
        shared_size="shared_intermediate_size",
        scoring="softmax_of_chosen",
        normalized=False,
    ),
    requires={"hidden_act": ("silu",), "time_step_limit": _NO_LIMIT},
)

BAMBA = replace(
    LLAMA,
    model_type="bamba",
    tensors=tuple(
        replace(
            rule,
            name=rule.name.replace(".mlp.", ".feed_forward.")
            .replace("post_attention_layernorm", "pre_ff_layernorm")
            .replace("model.norm", "model.final_layernorm"),
        )
        for rule in LLAMA_TENSORS
    )
    + _mixer("model.layers.{i}.mamba"),
    normalize=_with_head_size,
    assumed={"hidden_act": "silu", "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    recurrent=replace(_MAMBA, attention="attn_layer_indices"),
    requires={"hidden_act": ("silu",), "time_step_limit": _NO_LIMIT},
)

_FALCON_FACTORS = {  # key -> number of values
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier", "key_multiplier"), 1),
    **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), 1),
    "mlp_multipliers": 2,  # gate, output
    "ssm_multipliers": 5,  # gate, x, B, C, time step
}


def _falcon_factors(config: Mapping[str, Any], problems: list[Problem]) -> Factors:
    """Return Falcon-H1's factors on inputs and outputs of attention, mixer and MLP, and on their projections.

    The factors of the two gates are moved into the norms before them, and compensated in the other projections of these
    norms, so that no matrix is rounded again.
    """
    values = list[float]()
    for key, count in _FALCON_FACTORS.items():
        value = config.get(key)
        factors = [1.0] * count if value is None else value if count > 1 else [value]
        is_complete = isinstance(factors, list) and len(factors) == count
        if not is_complete or not all(type(factor) in (int, float) and 0 < factor < math.inf for factor in factors):
            expected = "a positive number" if count == 1 else f"{count} positive numbers"
            problems.append(Problem("config", repr(key), f"{value!r}; expected {expected}"))
            factors = [1.0] * count
        values += factors
    attn_in, attn_out, key_factor, ssm_in, ssm_out, mlp_gate, mlp_out, gate, x, b, c, step = values
    norm, stream = ssm_in * gate, mlp_out / mlp_gate
    parameters = {"attn_norm": norm, "mlp_norm": mlp_gate, "mix_gain": ssm_out / stream}
    parameters |= {"conv_v": x / gate, "conv_k": b / gate, "conv_q": c / gate}
    parameters |= {f"{name}_bias": norm / attn_in for name in "qkv"}
    parameters |= {f"{name.rpartition('.')[2]}_bias": gate for name in _IN}
    parameters |= {f"{name}_bias": mlp_gate for name in ("gate", "up", "down")}
    parameters |= {"o_bias": attn_out / stream, "mix_out_bias": ssm_out / stream}
    return Factors(
        parameters,
        scores=(attn_in / norm) ** 2 * key_factor,
        values=attn_in / norm * attn_out / stream,
        steps=step / gate,
        stream=stream,
    )


def _normalize_falcon(config: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the mixer's head size, and drop a key that has no effect without the mixer's norm."""
    result, size = {"projectors_bias": False, "mamba_proj_bias": False, **config}, config.get("mamba_d_ssm", 1024)
    heads = config.get("mamba_n_heads", _MAMBA_DEFAULTS["heads"])
    if config.get("mamba_d_head") in (None, "auto") and type(size) is int and type(heads) is int and heads > 0:
        result["mamba_d_head"] = size // heads
    if config.get("mamba_rms_norm"):
        result.setdefault("mamba_norm_before_gate", True)
    else:
        result.pop("mamba_norm_before_gate", None)
    return _with_head_size(result)


FALCON_H1 = replace(
    BAMBA,
    model_type="falcon_h1",
    normalize=_normalize_falcon,
    assumed={"hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192},
    embed_scale="embedding_multiplier",
    logit_scale="lm_head_multiplier",
    factors=_falcon_factors,
    recurrent=replace(
        _MAMBA,
        layer_type="hybrid",
        key="layers_block_type",
        config_keys=_MAMBA_KEYS | {"normed": "mamba_rms_norm"},
        defaults=_MAMBA_DEFAULTS | {"normed": False},
    ),
    requires={**BAMBA.requires, "mamba_norm_before_gate": (False,)},
    equal_sizes={"projectors_bias": "mamba_proj_bias"},
)


def _normalize_nemotron(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rename keys and layer types of the first releases, and count the layers."""
    result, types = dict(config), config.get("layers_block_type")
    older = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"}
    older["attention_head_dim"] = "head_dim"
    result |= {name: config[key] for key, name in older.items() if key in config and name not in config}
    if types is None and isinstance(pattern := config.get("hybrid_override_pattern"), str):
        types = [_PATTERN.get(letter, letter) for letter in pattern]
    if isinstance(types, list):
        result["layers_block_type"] = [_OLDER_TYPES.get(str(kind), kind) for kind in types]
        result["num_hidden_layers"] = len(types)
        if "moe" not in types:
            result["n_routed_experts"] = 0
    return result


_BLOCK = "backbone.layers.{i}."
_BLOCKS = RecurrentRules(
    kind="mamba2",
    layer_type=_RECURRENT,
    key="layers_block_type",
    single=True,
    config_keys={
        "kernel": "conv_kernel",
        "key_heads": "n_groups",
        "heads": "mamba_num_heads",
        "key_dim": "ssm_state_size",
        "value_dim": "mamba_head_dim",
        "conv_bias": "use_conv_bias",
        "bias": "use_bias",
    },
    defaults=_MAMBA_DEFAULTS | {"key_heads": 8, "key_dim": 128, "value_dim": 64},
)

NEMOTRON_H = FamilyRules(
    model_type="nemotron_h",
    tensors=(
        *one_to_one(
            {
                "backbone.embeddings.weight": "embed",
                _BLOCK + "norm.weight": "layers.{i}.attn_norm",
                **{f"{_BLOCK}mixer.{name}_proj.weight": f"layers.{{i}}.{name}" for name in ("q", "k", "v", "o")},
                _BLOCK + "mixer.gate.weight": "layers.{i}.router",
                _BLOCK + "mixer.fc1_latent_proj.weight": "layers.{i}.latent_in",
                _BLOCK + "mixer.fc2_latent_proj.weight": "layers.{i}.latent_out",
                "backbone.norm_f.weight": "final_norm",
                "lm_head.weight": "lm_head",
            }
        ),
        *with_biases(named(_BLOCK + "mixer.{}_proj", "layers.{i}.{}", MLP[1:])),
        *one_to_one(
            named(_BLOCK + "mixer.experts.{e}.{}_proj.weight", _EXPERT + "{}", MLP[1:])
            | named(_BLOCK + "mixer.shared_experts.{}_proj.weight", "layers.{i}.shared.{}", MLP[1:])
        ),
        TensorRule(_BLOCK + "norm.weight", ("layers.{i}.mlp_norm",)),
        TensorRule(_BLOCK + "mixer.gate.e_score_correction_bias", ("layers.{i}.router_correction",), single=True),
        *_mixer(_BLOCK + "mixer"),
    ),
    alternatives=one_to_one(named(_BLOCK + "mixer.experts.{}_proj", _EXPERT + "{}", MLP[1:])),
    tied_copy="lm_head.weight",
    ignored=("mtp.",),
    normalize=_normalize_nemotron,
    config_keys=LLAMA_SIZES | {"mlp_bias": "mlp_bias"},
    defaults={"head_dim": 128},
    constants={"gated": False},
    assumed={"mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5, "norm_topk_prob": True},
    norm_eps="layer_norm_epsilon",
    activation="mlp_hidden_act",
    rotary=False,
    recurrent=_BLOCKS,
    experts=ExpertRules(
        count=("n_routed_experts",),
        types="layers_block_type",
        shared_size="moe_shared_expert_intermediate_size",
        correction=True,
        scoring="sigmoid",
        scale="routed_scaling_factor",
        grouped=True,
        gated=False,
        latent_size="moe_latent_size",
    ),
    requires={"mamba_hidden_act": ("silu",), "time_step_limit": _NO_LIMIT, "attention_bias": (None, False)},
)

# No layer has attention, so the cache's pages are empty, and head sizes are placeholders.
MAMBA2 = FamilyRules(
    model_type="mamba2",
    tensors=(
        *one_to_one(
            {
                "backbone.embeddings.weight": "embed",
                _BLOCK + "norm.weight": "layers.{i}.attn_norm",
                "backbone.norm_f.weight": "final_norm",
                "lm_head.weight": "lm_head",
            }
        ),
        *_mixer(_BLOCK + "mixer"),
    ),
    tied_copy="lm_head.weight",
    config_keys={
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "vocab_size": "vocab_size",
        "tied": "tie_word_embeddings",
    },
    constants={"intermediate_size": 0, "num_heads": 1, "num_kv_heads": 1, "head_dim": 16},
    assumed={"hidden_act": "silu", "layer_norm_epsilon": 1e-5, "max_position_embeddings": 2**20},
    norm_eps="layer_norm_epsilon",
    rotary=False,
    recurrent=replace(
        _BLOCKS,
        key="layer_types",
        config_keys={**_BLOCKS.config_keys, "heads": "num_heads", "key_dim": "state_size", "value_dim": "head_dim"},
    ),
    requires={"hidden_act": ("silu",), "time_step_limit": _NO_LIMIT},
)
