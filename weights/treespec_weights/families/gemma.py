"""Gemma 1 and 2, VaultGemma, and the text models of Gemma 3."""

from dataclasses import replace

from treespec_weights.families.llama import LLAMA, LLAMA_SIZES, LLAMA_TENSORS, QK_NORMS
from treespec_weights.rules import one_to_one

_NORMS = one_to_one(
    {
        "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.attn_post_norm",
        "model.layers.{i}.pre_feedforward_layernorm.weight": "layers.{i}.mlp_norm",
        "model.layers.{i}.post_feedforward_layernorm.weight": "layers.{i}.mlp_post_norm",
    }
)

GEMMA2 = replace(
    LLAMA,
    model_type="gemma2",
    tensors=tuple(rule for rule in LLAMA_TENSORS if rule.params != ("layers.{i}.mlp_norm",)) + _NORMS,
    config_keys=LLAMA_SIZES | {"attention_bias": "attention_bias", "o_bias": "attention_bias"},
    defaults={"tied": True, "head_dim": 256},
    constants={"post_norms": True},
    assumed={
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    norm="rms_plus_one",
    activation="hidden_activation",
    windows=True,
    query_scalar="query_pre_attn_scalar",
    score_cap="attn_logit_softcapping",
    logit_cap="final_logit_softcapping",
    scaled_embedding=True,
    requires={"use_bidirectional_attention": (None, False)},
)

# Without post norms: Gemma 1, and VaultGemma, whose second norm is named as in Gemma 2.
GEMMA = replace(
    GEMMA2,
    model_type="gemma",
    tensors=LLAMA_TENSORS,
    constants={},
    assumed={"activation": "gelu_pytorch_tanh"},
    activation="activation",  # a key that its configs lack; their hidden_act means the same
    windows=False,
    query_scalar=None,
    score_cap=None,
    logit_cap=None,
    requires={**GEMMA2.requires, "hidden_act": ("gelu", "gelu_pytorch_tanh")},
)

VAULTGEMMA = replace(
    GEMMA2,
    model_type="vaultgemma",
    tensors=tuple(rule for rule in GEMMA2.tensors if "post_norm" not in rule.params[0]),
    constants={},
    requires={},
)

GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    tensors=GEMMA2.tensors + QK_NORMS,
    constants={"post_norms": True, "qk_norm": True},
    assumed={"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256},
    score_cap=None,  # its configs have the key, but its attention ignores it
)
