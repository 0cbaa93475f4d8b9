"""Qwen 3.5 and 3.6 (text) and Qwen3-Next: Gated DeltaNets, and attention with an output gate in every fourth layer."""

from dataclasses import replace

from treespec_weights.families.experts import QWEN_EXPERTS, SHARED_EXPERT, STACKED_EXPERTS
from treespec_weights.families.llama import LLAMA, LLAMA_SIZES, LLAMA_TENSORS, QK_NORMS
from treespec_weights.rules import PredictorRules, RecurrentRules, TensorRule, one_to_one

_QUERIES = "model.layers.{i}.self_attn.q_proj.weight"
_MIXER = "model.layers.{i}.linear_attn."
_MIX = tuple(f"layers.{{i}}.mix_{name}" for name in ("q", "k", "v", "gate"))
_RATES = ("layers.{i}.beta", "layers.{i}.decay")
_DELTA = (
    *one_to_one({_MIXER + "norm.weight": "layers.{i}.mix_gain", _MIXER + "out_proj.weight": "layers.{i}.mix_out"}),
    TensorRule(_MIXER + "conv1d.weight", tuple(f"layers.{{i}}.conv_{part}" for part in "qkv")),
    TensorRule(_MIXER + "dt_bias", ("layers.{i}.dt_bias",), single=True),
    TensorRule(_MIXER + "A_log", ("layers.{i}.decay_log",), single=True),
)
_PROJECTIONS = (
    TensorRule(_MIXER + "in_proj_qkv.weight", _MIX[:3]),
    TensorRule(_MIXER + "in_proj_z.weight", _MIX[3:]),
    TensorRule(_MIXER + "in_proj_b.weight", _RATES[:1]),
    TensorRule(_MIXER + "in_proj_a.weight", _RATES[1:]),
)
_PROJECTIONS_BY_HEAD = (
    TensorRule(_MIXER + "in_proj_qkvz.weight", _MIX, "per_head", "key_heads"),
    TensorRule(_MIXER + "in_proj_ba.weight", _RATES, "per_head", "key_heads"),
)
_PREDICTOR = PredictorRules(
    module="mtp.",
    layer="mtp.layers.0.",
    tensors={
        "mtp.fc.weight": "fc",
        "mtp.pre_fc_norm_embedding.weight": "embed_norm",
        "mtp.pre_fc_norm_hidden.weight": "feature_norm",
        "mtp.norm.weight": "final_norm",
    },
)

DELTA_SIZES = {
    "kernel": "linear_conv_kernel_dim",
    "key_heads": "linear_num_key_heads",
    "heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
}
QWEN3_5 = replace(
    LLAMA,
    model_type="qwen3_5_text",
    tensors=(
        *(rule for rule in LLAMA_TENSORS if rule.params != ("layers.{i}.q",)),
        *QK_NORMS,
        TensorRule(_QUERIES, ("layers.{i}.q", "layers.{i}.attn_gate"), "per_head", "num_heads"),
        *_DELTA,
        *_PROJECTIONS,
    ),
    ignored=(_PREDICTOR.module,),
    predictor=_PREDICTOR,
    config_keys=LLAMA_SIZES,
    defaults={"head_dim": 256},
    constants={"qk_norm": True, "output_gate": True},
    assumed={"hidden_act": "silu", "partial_rotary_factor": 0.25},
    norm="rms_plus_one",
    recurrent=RecurrentRules(
        kind="delta",
        layer_type="linear_attention",
        interval="full_attention_interval",
        config_keys=DELTA_SIZES,
        defaults={"kernel": 4, "key_heads": 16, "heads": 32, "key_dim": 128, "value_dim": 128, "interval": 4},
    ),
    requires={"attention_bias": (None, False), "hidden_act": ("silu",)},
)

QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    tensors=QWEN3_5.tensors + QWEN_EXPERTS,
    alternatives=STACKED_EXPERTS,
    config_keys=LLAMA_SIZES | {"intermediate_size": "moe_intermediate_size"},  # no layer is dense
    experts=replace(SHARED_EXPERT, normalized=True),
)

QWEN3_NEXT = replace(
    QWEN3_5,
    model_type="qwen3_next",
    tensors=tuple(rule for rule in QWEN3_5.tensors if rule not in _PROJECTIONS) + _PROJECTIONS_BY_HEAD + QWEN_EXPERTS,
    alternatives=STACKED_EXPERTS + _PROJECTIONS[:2],  # tensors of GGUF files
    assumed={**QWEN3_5.assumed, "norm_topk_prob": True},
    experts=SHARED_EXPERT,
)
