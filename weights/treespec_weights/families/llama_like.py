"""Families whose layers are Llama's with other biases, factors, rotations or norms."""

from dataclasses import replace
from typing import Any

from treespec_weights.families.llama import LLAMA, LLAMA_SIZES, LLAMA_TENSORS, PHI3, QK_NORMS
from treespec_weights.rules import BESIDE_SLIDING, FULL_ATTENTION, TensorRule, one_to_one, with_biases

_SILU = {"hidden_act": "silu"}
_EPS_1E5 = {"hidden_act": "silu", "rms_norm_eps": 1e-5}
_ATTENTION_KEYS = LLAMA_SIZES | {"attention_bias": "attention_bias", "o_bias": "attention_bias"}
_ONE_BIAS_KEY = dict.fromkeys(("attention_bias", "o_bias", "mlp_bias"), "use_bias")


def _norms(stem: str, names: dict[str, str]) -> tuple[TensorRule, ...]:
    """Return the rules of a layer's norms without biases; `names` maps name suffixes to parameters."""
    pairs = {f"model.layers.{{i}}.{stem}{name}.weight": f"layers.{{i}}.{param}" for name, param in names.items()}
    return one_to_one(pairs)


# --- other biases and defaults

INTERNLM3 = replace(LLAMA, model_type="internlm3", defaults={"head_dim": 128}, assumed=_EPS_1E5)

IQUESTCODER = replace(INTERNLM3, model_type="iquestcoder")

SEED_OSS = replace(
    LLAMA,
    model_type="seed_oss",
    config_keys=_ATTENTION_KEYS | {"o_bias": "attention_out_bias", "mlp_bias": "mlp_bias"},
    defaults={"attention_bias": True, "head_dim": 128},
)

CWM = replace(
    LLAMA, model_type="cwm", config_keys=LLAMA_SIZES, defaults={"head_dim": 128}, assumed=_EPS_1E5, windows=True
)

MINISTRAL = replace(CWM, model_type="ministral", defaults={}, assumed=_SILU)

# --- other rotations

ERNIE4_5 = replace(
    LLAMA,
    model_type="ernie4_5",
    config_keys=LLAMA_SIZES | _ONE_BIAS_KEY,
    defaults={"tied": True, "head_dim": 128},
    assumed=_EPS_1E5 | {"rope_theta": 500000.0},
    interleaved=True,
)

HELIUM = replace(
    LLAMA,
    model_type="helium",
    config_keys=LLAMA_SIZES | {"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    defaults={"head_dim": 128},
    assumed=_SILU | {"rms_norm_eps": 1e-8, "rope_theta": 100000.0},
    interleaved=True,
)

GLM = replace(
    LLAMA,
    model_type="glm",
    tensors=(
        *(rule for rule in LLAMA_TENSORS if "mlp" not in rule.name),
        *(rule for rule in PHI3.tensors if "mlp" in rule.name),
    ),
    config_keys=LLAMA_SIZES | {"attention_bias": "attention_bias"},
    defaults={"attention_bias": True, "head_dim": 128},
    assumed=_SILU | {"rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5},
    interleaved=True,
)

GLM4 = replace(
    GLM,
    model_type="glm4",
    tensors=GLM.tensors + _norms("post_", {"self_attn_layernorm": "attn_post_norm", "mlp_layernorm": "mlp_post_norm"}),
    constants={"post_norms": True},
)

SMOLLM3 = replace(LLAMA, model_type="smollm3", defaults={"tied": True}, windows=True, unrotated="no_rope_layers")

MINISTRAL3 = replace(CWM, model_type="ministral3", scaled_queries=True, requires={"layer_types": (None,)})

# --- factors

GRANITE = replace(
    LLAMA,
    model_type="granite",
    assumed=_SILU | {"attention_multiplier": 1.0},
    score_scale="attention_multiplier",
    embed_scale="embedding_multiplier",
    residual_scale="residual_multiplier",
    logit_divisor="logits_scaling",
)

HYPERCLOVAX = replace(
    LLAMA,
    model_type="hyperclovax",
    tensors=LLAMA_TENSORS + _norms("post_", {"norm1": "attn_post_norm", "norm2": "mlp_post_norm"}),
    config_keys={**LLAMA.config_keys, "post_norms": "use_post_norm"},
    defaults={"post_norms": True},
    score_scale="attention_multiplier",
    embed_scale="embedding_multiplier",
    logit_scale="logits_scaling",
    requires={"residual_multiplier": (1.0,)},
)

# --- other norms

_OUTPUT_NORMS = {"attention_layernorm": "attn_post_norm", "feedforward_layernorm": "mlp_post_norm"}

# Norms only after attention and MLP; those of q and k span all heads.
OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    tensors=(
        *(rule for rule in LLAMA_TENSORS if "layernorm" not in rule.name),
        *_norms("post_", _OUTPUT_NORMS),
        *QK_NORMS,
    ),
    config_keys=_ATTENTION_KEYS,
    constants={"pre_norms": False, "post_norms": True, "wide_qk_norm": True},
    assumed=_EPS_1E5,
)

OLMO3 = replace(OLMO2, model_type="olmo3", windows=True)

EXAONE4 = replace(
    OLMO3,
    model_type="exaone4",
    config_keys=LLAMA_SIZES,
    constants={"pre_norms": False, "post_norms": True, "qk_norm": True},
    unrotated=BESIDE_SLIDING,
)

HUNYUAN = replace(
    LLAMA,
    model_type="hunyuan_v1_dense",
    tensors=LLAMA_TENSORS + _norms("self_attn.", {"query_layernorm": "q_norm", "key_layernorm": "k_norm"}),
    config_keys=_ATTENTION_KEYS,
    constants={"qk_norm": True},
    assumed=_EPS_1E5,
    norm_after_rope=True,
)

_LAYER_NORM: dict[str, Any] = {"norm": "layer", "norm_eps": "layer_norm_eps"}

# One LayerNorm without a bias for both attention and MLP.
COHERE = replace(
    LLAMA,
    **_LAYER_NORM,
    model_type="cohere",
    tensors=tuple(rule for rule in LLAMA_TENSORS if "post_attention_layernorm" not in rule.name),
    config_keys=_ATTENTION_KEYS,
    defaults={"tied": True},
    constants={"shared_norm": True},
    assumed=_SILU | {"logit_scale": 0.0625, "rope_theta": 500000.0},
    parallel="use_parallel_residual",  # this key is missing in its configs
    logit_scale="logit_scale",
    interleaved=True,
    requires={"use_qk_norm": (False, None)},
)

COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    assumed=_SILU | {"logit_scale": 0.0625},
    windows=True,
    unrotated=FULL_ATTENTION,
    requires={},
)

STABLELM = replace(
    LLAMA,
    **_LAYER_NORM,
    model_type="stablelm",
    tensors=tuple(rule for rule in LLAMA_TENSORS if "norm" not in rule.name)
    + with_biases(
        {
            "model.layers.{i}.input_layernorm": "layers.{i}.attn_norm",
            "model.layers.{i}.post_attention_layernorm": "layers.{i}.mlp_norm",
            "model.norm": "final_norm",
        }
    ),
    config_keys=LLAMA_SIZES | {"attention_bias": "use_qkv_bias"},
    constants={"norm_bias": True},
    assumed=_SILU | {"partial_rotary_factor": 0.25},
    requires={"qk_layernorm": (False,), "use_parallel_residual": (False,)},
)

# --- MLPs without a gate

ARCEE = replace(
    LLAMA, model_type="arcee", constants={"gated": False}, assumed={"hidden_act": "relu2", "rms_norm_eps": 1e-5}
)

JAIS2 = replace(
    LLAMA,
    **_LAYER_NORM,
    model_type="jais2",
    tensors=STABLELM.tensors,
    defaults={"attention_bias": True, "o_bias": True, "mlp_bias": True},
    constants={"norm_bias": True, "gated": False},
    assumed={"hidden_act": "relu2"},
)

STARCODER2 = replace(
    STABLELM,
    model_type="starcoder2",
    tensors=tuple(rule for rule in STABLELM.tensors if "mlp." not in rule.name)
    + with_biases({"model.layers.{i}.mlp.c_fc": "layers.{i}.up", "model.layers.{i}.mlp.c_proj": "layers.{i}.down"}),
    config_keys=LLAMA_SIZES | _ONE_BIAS_KEY,
    defaults={"tied": True, "attention_bias": True, "o_bias": True, "mlp_bias": True},
    constants={"norm_bias": True, "gated": False},
    assumed={"hidden_act": "gelu_pytorch_tanh"},
    norm_eps="norm_epsilon",
    windows=True,
    requires={},
)
