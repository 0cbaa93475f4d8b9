"""OPT. Its position embedding starts with two unused rows."""

from treespec_weights.rules import FamilyRules, one_to_one, with_biases

OPT = FamilyRules(
    model_type="opt",
    tensors=with_biases(
        {
            "model.decoder.layers.{i}.self_attn_layer_norm": "layers.{i}.attn_norm",
            "model.decoder.layers.{i}.self_attn.q_proj": "layers.{i}.q",
            "model.decoder.layers.{i}.self_attn.k_proj": "layers.{i}.k",
            "model.decoder.layers.{i}.self_attn.v_proj": "layers.{i}.v",
            "model.decoder.layers.{i}.self_attn.out_proj": "layers.{i}.o",
            "model.decoder.layers.{i}.final_layer_norm": "layers.{i}.mlp_norm",
            "model.decoder.layers.{i}.fc1": "layers.{i}.up",
            "model.decoder.layers.{i}.fc2": "layers.{i}.down",
            "model.decoder.final_layer_norm": "final_norm",
        }
    )
    + one_to_one(
        {
            "model.decoder.embed_tokens.weight": "embed",
            "model.decoder.embed_positions.weight": "positions",
            "lm_head.weight": "lm_head",
        }
    ),
    tied_copy="lm_head.weight",
    prefix="model.",
    config_keys={
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_dim",
        "num_heads": "num_attention_heads",
        "vocab_size": "vocab_size",
        "tied": "tie_word_embeddings",
        "attention_bias": "enable_bias",
        "o_bias": "enable_bias",
        "mlp_bias": "enable_bias",
        "learned_positions": "max_position_embeddings",
    },
    defaults={"tied": True, "attention_bias": True, "o_bias": True, "mlp_bias": True},
    constants={"norm_bias": True, "gated": False},
    assumed={"activation_function": "relu"},
    extra_positions=2,
    norm="layer",
    norm_eps=1e-5,
    activation="activation_function",
    rotary=False,
    requires={
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "layer_norm_elementwise_affine": (True,),
    },
    equal_sizes={"word_embed_proj_dim": "hidden_size"},
)
