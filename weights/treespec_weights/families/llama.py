"""Llama 1, 2, 3, 3.1 and later, and models with its layout."""

from treespec_weights.rules import FamilyRules, one_to_one, with_biases

LLAMA_TENSORS = with_biases(
    {
        "model.layers.{i}.self_attn.q_proj": "layers.{i}.q",
        "model.layers.{i}.self_attn.k_proj": "layers.{i}.k",
        "model.layers.{i}.self_attn.v_proj": "layers.{i}.v",
        "model.layers.{i}.self_attn.o_proj": "layers.{i}.o",
        "model.layers.{i}.mlp.gate_proj": "layers.{i}.gate",
        "model.layers.{i}.mlp.up_proj": "layers.{i}.up",
        "model.layers.{i}.mlp.down_proj": "layers.{i}.down",
    }
) + one_to_one(
    {
        "model.embed_tokens.weight": "embed",
        "model.layers.{i}.input_layernorm.weight": "layers.{i}.attn_norm",
        "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.mlp_norm",
        "model.norm.weight": "final_norm",
        "lm_head.weight": "lm_head",
    }
)

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
    defaults={"tied": False, "attention_bias": False, "o_bias": False, "mlp_bias": False},
    assumed={"hidden_act": "silu"},
)
