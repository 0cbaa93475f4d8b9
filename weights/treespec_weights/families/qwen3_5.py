"""Text models of Qwen 3.5 and 3.6: Gated DeltaNets, and attention with an output gate in every fourth layer."""

from dataclasses import replace

from treespec_weights.families.llama import LLAMA, LLAMA_SIZES, LLAMA_TENSORS, QK_NORMS
from treespec_weights.rules import RecurrentRules, TensorRule, one_to_one

_QUERIES = "model.layers.{i}.self_attn.q_proj.weight"
_MIXER = one_to_one(
    {
        "model.layers.{i}.linear_attn.in_proj_qkv.weight": "layers.{i}.mix",
        "model.layers.{i}.linear_attn.in_proj_z.weight": "layers.{i}.mix_gate",
        "model.layers.{i}.linear_attn.in_proj_b.weight": "layers.{i}.beta",
        "model.layers.{i}.linear_attn.in_proj_a.weight": "layers.{i}.decay",
        "model.layers.{i}.linear_attn.conv1d.weight": "layers.{i}.conv",
        "model.layers.{i}.linear_attn.dt_bias": "layers.{i}.dt_bias",
        "model.layers.{i}.linear_attn.A_log": "layers.{i}.decay_log",
        "model.layers.{i}.linear_attn.norm.weight": "layers.{i}.mix_gain",
        "model.layers.{i}.linear_attn.out_proj.weight": "layers.{i}.mix_out",
    }
)

QWEN3_5 = replace(
    LLAMA,
    model_type="qwen3_5_text",
    tensors=(
        *(rule for rule in LLAMA_TENSORS if rule.params != ("layers.{i}.q",)),
        *QK_NORMS,
        TensorRule(_QUERIES, ("layers.{i}.q", "layers.{i}.attn_gate"), "per_head", "num_heads"),
        *_MIXER,
    ),
    config_keys=LLAMA_SIZES,
    defaults={"tied": False, "head_dim": 256},
    constants={"qk_norm": True, "output_gate": True},
    assumed={"hidden_act": "silu", "partial_rotary_factor": 0.25},
    norm="rms_plus_one",
    recurrent=RecurrentRules(
        kind="delta",
        layer_type="linear_attention",
        interval="full_attention_interval",
        config_keys={
            "kernel": "linear_conv_kernel_dim",
            "key_heads": "linear_num_key_heads",
            "heads": "linear_num_value_heads",
            "key_dim": "linear_key_head_dim",
            "value_dim": "linear_value_head_dim",
        },
        defaults={"kernel": 4, "key_heads": 16, "heads": 32, "key_dim": 128, "value_dim": 128, "interval": 4},
    ),
    requires={"attention_bias": (None, False), "hidden_act": ("silu",)},
)
