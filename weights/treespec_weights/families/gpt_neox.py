"""GPT-NeoX and Pythia."""

from treespec_weights.rules import FamilyRules, TensorRule, one_to_one, with_biases

GPT_NEOX = FamilyRules(
    model_type="gpt_neox",
    tensors=(
        *with_biases(
            {
                "gpt_neox.layers.{i}.input_layernorm": "layers.{i}.attn_norm",
                "gpt_neox.layers.{i}.attention.dense": "layers.{i}.o",
                "gpt_neox.layers.{i}.post_attention_layernorm": "layers.{i}.mlp_norm",
                "gpt_neox.layers.{i}.mlp.dense_h_to_4h": "layers.{i}.up",
                "gpt_neox.layers.{i}.mlp.dense_4h_to_h": "layers.{i}.down",
                "gpt_neox.final_layer_norm": "final_norm",
            }
        ),
        *one_to_one(
            {
                "gpt_neox.embed_in.weight": "embed",
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
