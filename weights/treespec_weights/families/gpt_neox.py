"""GPT-NeoX and Pythia."""

from treespec_weights.rules import FamilyRules, TensorRule, one_to_one

GPT_NEOX = FamilyRules(
    model_type="gpt_neox",
    tensors=(
        *one_to_one(
            {
                "gpt_neox.embed_in.weight": "embed",
                "gpt_neox.layers.{i}.input_layernorm.weight": "layers.{i}.attn_norm",
                "gpt_neox.layers.{i}.input_layernorm.bias": "layers.{i}.attn_norm_bias",
                "gpt_neox.layers.{i}.attention.dense.weight": "layers.{i}.o",
                "gpt_neox.layers.{i}.attention.dense.bias": "layers.{i}.o_bias",
                "gpt_neox.layers.{i}.post_attention_layernorm.weight": "layers.{i}.mlp_norm",
                "gpt_neox.layers.{i}.post_attention_layernorm.bias": "layers.{i}.mlp_norm_bias",
                "gpt_neox.layers.{i}.mlp.dense_h_to_4h.weight": "layers.{i}.up",
                "gpt_neox.layers.{i}.mlp.dense_h_to_4h.bias": "layers.{i}.up_bias",
                "gpt_neox.layers.{i}.mlp.dense_4h_to_h.weight": "layers.{i}.down",
                "gpt_neox.layers.{i}.mlp.dense_4h_to_h.bias": "layers.{i}.down_bias",
                "gpt_neox.final_layer_norm.weight": "final_norm",
                "gpt_neox.final_layer_norm.bias": "final_norm_bias",
                "embed_out.weight": "lm_head",
            }
        ),
        TensorRule(
            "gpt_neox.layers.{i}.attention.query_key_value.weight",
            ("layers.{i}.q", "layers.{i}.k", "layers.{i}.v"),
            "per_head",
        ),
        TensorRule(
            "gpt_neox.layers.{i}.attention.query_key_value.bias",
            ("layers.{i}.q_bias", "layers.{i}.k_bias", "layers.{i}.v_bias"),
            "per_head",
        ),
    ),
    tied_copy="embed_out.weight",
    ignored=(
        "gpt_neox.layers.{i}.attention.rotary_emb.inv_freq",
        "gpt_neox.layers.{i}.attention.bias",
        "gpt_neox.layers.{i}.attention.masked_bias",
    ),
    config_keys={
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_heads": "num_attention_heads",
        "vocab_size": "vocab_size",
        "tied": "tie_word_embeddings",
        "attention_bias": "attention_bias",
        "o_bias": "attention_bias",
    },
    defaults={"tied": False, "attention_bias": True, "o_bias": True},
    constants={"mlp_bias": True, "norm_bias": True, "gated": False},
    assumed={"hidden_act": "gelu"},
    norm="layer",
    norm_eps="layer_norm_eps",
    parallel="use_parallel_residual",
)
