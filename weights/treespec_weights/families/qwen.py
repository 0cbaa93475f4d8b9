"""Qwen 2, 2.5 and 3."""

from dataclasses import replace

from treespec_weights.families.llama import LLAMA, LLAMA_SIZES, LLAMA_TENSORS
from treespec_weights.rules import one_to_one

QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    config_keys=LLAMA_SIZES,
    defaults={"tied": False},
    constants={"attention_bias": True},
    assumed={"hidden_act": "silu", "use_sliding_window": False},
    windows=True,
)

QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    tensors=LLAMA_TENSORS
    + one_to_one(
        {
            "model.layers.{i}.self_attn.q_norm.weight": "layers.{i}.q_norm",
            "model.layers.{i}.self_attn.k_norm.weight": "layers.{i}.k_norm",
        }
    ),
    config_keys=LLAMA_SIZES | {"attention_bias": "attention_bias", "o_bias": "attention_bias"},
    defaults={"tied": False, "attention_bias": False, "o_bias": False, "head_dim": 128},
    constants={"qk_norm": True},
    assumed={"hidden_act": "silu", "use_sliding_window": False},
    windows=True,
)
