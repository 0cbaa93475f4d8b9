"""GPT-2, GPT-NeoX, Pythia and OPT."""

from treespec_weights.rules import FamilyRules, TensorRule, named, one_to_one, with_biases


def _conv1d(name: str, *params: str) -> tuple[TensorRule, TensorRule]:
    """Return the rules of a projection's weight [in, out] and bias."""
    stem = f"transformer.h.{{i}}.{name}"
    weights = tuple(f"layers.{{i}}.{param}" for param in params)
    return (
        TensorRule(f"{stem}.weight", weights, "transposed"),
        TensorRule(f"{stem}.bias", tuple(f"{weight}_bias" for weight in weights)),
    )


GPT2 = FamilyRules(
    model_type="gpt2",
    tensors=(
        *with_biases(
            {
                "transformer.h.{i}.ln_1": "layers.{i}.attn_norm",
                "transformer.h.{i}.ln_2": "layers.{i}.mlp_norm",
                "transformer.ln_f": "final_norm",
            }
        ),
        *one_to_one(
            {"transformer.wte.weight": "embed", "transformer.wpe.weight": "positions", "lm_head.weight": "lm_head"}
        ),
        *_conv1d("attn.c_attn", "q", "k", "v"),
        *_conv1d("attn.c_proj", "o"),
        *_conv1d("mlp.c_fc", "up"),
        *_conv1d("mlp.c_proj", "down"),
    ),
    tied_copy="lm_head.weight",
    ignored=("transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias"),
    prefix="transformer.",  # missing in the first releases, which hold only the base model
    config_keys={
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_heads": "n_head",
        "vocab_size": "vocab_size",
        "tied": "tie_word_embeddings",
        "learned_positions": "n_positions",
    },
    defaults={"tied": True},
    constants={"attention_bias": True, "o_bias": True, "mlp_bias": True, "norm_bias": True, "gated": False},
    assumed={"activation_function": "gelu_new"},
    widening=4,
    max_positions="n_positions",
    norm="layer",
    norm_eps="layer_norm_epsilon",
    activation="activation_function",
    rotary=False,
    requires={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
)

_QKV = "gpt_neox.layers.{i}.attention.query_key_value."

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
        *one_to_one({"gpt_neox.embed_in.weight": "embed", "embed_out.weight": "lm_head"}),
        TensorRule(_QKV + "weight", ("layers.{i}.q", "layers.{i}.k", "layers.{i}.v"), "per_head"),
        TensorRule(_QKV + "bias", ("layers.{i}.q_bias", "layers.{i}.k_bias", "layers.{i}.v_bias"), "per_head"),
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
    defaults={"attention_bias": True, "o_bias": True},
    constants={"mlp_bias": True, "norm_bias": True, "gated": False},
    assumed={"hidden_act": "gelu"},
    norm="layer",
    norm_eps="layer_norm_eps",
    parallel="use_parallel_residual",
)

OPT = FamilyRules(
    model_type="opt",
    tensors=with_biases(
        {
            "model.decoder.layers.{i}.self_attn_layer_norm": "layers.{i}.attn_norm",
            **named("model.decoder.layers.{i}.self_attn.{}_proj", "layers.{i}.{}", "qkv"),
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
    extra_positions=2,  # unused
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
