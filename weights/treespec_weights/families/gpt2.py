"""GPT-2. Its projections are stored transposed, and its first releases hold only the base model."""

from treespec_weights.rules import FamilyRules, TensorRule, one_to_one, with_biases


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
            {
                "transformer.wte.weight": "embed",
                "transformer.wpe.weight": "positions",
                "lm_head.weight": "lm_head",
            }
        ),
        *_conv1d("attn.c_attn", "q", "k", "v"),
        *_conv1d("attn.c_proj", "o"),
        *_conv1d("mlp.c_fc", "up"),
        *_conv1d("mlp.c_proj", "down"),
    ),
    tied_copy="lm_head.weight",
    ignored=("transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias"),
    prefix="transformer.",
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
