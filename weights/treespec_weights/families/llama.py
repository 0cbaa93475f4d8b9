"""Llama 1, 2, 3, 3.1 and later, and families with its layers: Mistral, Qwen 2, 2.5 and 3, Phi-3, 3.5 and Phi-4-mini."""

from dataclasses import replace

from treespec_weights.rules import FamilyRules, TensorRule, named, one_to_one, with_biases

MLP = ("gate", "up", "down")
LLAMA_TENSORS = with_biases(
    named("model.layers.{i}.self_attn.{}_proj", "layers.{i}.{}", "qkvo")
    | named("model.layers.{i}.mlp.{}_proj", "layers.{i}.{}", MLP)
) + one_to_one(
    {
        "model.embed_tokens.weight": "embed",
        "model.layers.{i}.input_layernorm.weight": "layers.{i}.attn_norm",
        "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.mlp_norm",
        "model.norm.weight": "final_norm",
        "lm_head.weight": "lm_head",
    }
)

QK_NORMS = one_to_one(named("model.layers.{i}.self_attn.{}_norm.weight", "layers.{i}.{}_norm", "qk"))

LLAMA_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "tied": "tie_word_embeddings",
}

LLAMA = FamilyRules(
    model_type="llama",
    tensors=LLAMA_TENSORS,
    tied_copy="lm_head.weight",
    ignored=("model.layers.{i}.self_attn.rotary_emb.inv_freq",),
    config_keys=LLAMA_SIZES | {"attention_bias": "attention_bias", "o_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    assumed={"hidden_act": "silu"},
)

# Mistral's first releases: Llama with a sliding window.
MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    config_keys=LLAMA_SIZES,
    windows=True,
    requires={"layer_types": (None,)},  # one window for all layers; Ministral's layers differ
)

QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    config_keys=LLAMA_SIZES,
    constants={"attention_bias": True},
    assumed={"hidden_act": "silu", "use_sliding_window": False},
    windows=True,
)

QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    tensors=LLAMA_TENSORS + QK_NORMS,
    config_keys=LLAMA_SIZES | {"attention_bias": "attention_bias", "o_bias": "attention_bias"},
    defaults={"head_dim": 128},
    constants={"qk_norm": True},
    assumed={"hidden_act": "silu", "use_sliding_window": False},
    windows=True,
)

# Llama with fused projections; some models rotate only a part of each head.
_SPLIT = {f"layers.{{i}}.{name}" for name in ("q", "k", "v", "gate", "up")}

PHI3 = replace(
    LLAMA,
    model_type="phi3",
    tensors=(
        *(rule for rule in LLAMA_TENSORS if rule.params[0] not in _SPLIT),
        TensorRule("model.layers.{i}.self_attn.qkv_proj.weight", ("layers.{i}.q", "layers.{i}.k", "layers.{i}.v")),
        TensorRule("model.layers.{i}.mlp.gate_up_proj.weight", ("layers.{i}.gate", "layers.{i}.up")),
    ),
    config_keys=LLAMA_SIZES,
    assumed={"hidden_act": "silu", "rms_norm_eps": 1e-5},
    windows=True,
    requires={"layer_types": (None,)},
)
