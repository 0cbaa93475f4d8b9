"""Gemma 1 and 2, VaultGemma, and the text models of Gemma 3 and 4."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from treespec_weights.errors import Problem
from treespec_weights.experts import ExpertRules
from treespec_weights.families.llama import LLAMA, LLAMA_SIZES, LLAMA_TENSORS, MLP, QK_NORMS
from treespec_weights.rules import FULL_ATTENTION, MAX_DIMENSION, LayerSizes, TensorRule, named, one_to_one

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

# Families without post norms: Gemma 1, and VaultGemma, whose second norm has its name in Gemma 2.
GEMMA = replace(
    GEMMA2,
    model_type="gemma",
    tensors=LLAMA_TENSORS,
    constants={},
    assumed={"activation": "gelu_pytorch_tanh"},
    activation="activation",  # this key is missing in its configs; their hidden_act means the same
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

_SLIDING = "sliding_attention"
_GATE, _UP, _DOWN = (f"layers.{{i}}.experts.{{e}}.{name}" for name in MLP)
_SHARED = named("layers.{i}.{}", "layers.{i}.shared.{}", MLP)


def _gemma4_sizes(config: Mapping[str, Any], values: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Read the sizes of Gemma 4's layers, given in the publisher's keys or those of transformers 5."""

    def natural(key: str, least: int, most: int, default: int) -> int:
        value = default if (value := config.get(key)) is None else value
        if type(value) is not int or not least <= value <= most:
            problems.append(Problem("config", repr(key), f"{value!r} is not a whole number from {least} to {most}"))
            return default
        return value

    count, doubles_mlp = values["num_layers"], config.get("use_double_wide_mlp") is True
    types = config.get("layer_types")
    if types is None:
        types = [_SLIDING if (i + 1) % 6 else FULL_ATTENTION for i in range(count)]
    if not isinstance(types, list) or len(types) != count or not {*map(str, types)} <= {_SLIDING, FULL_ATTENTION}:
        message = f"{types!r}; expected {_SLIDING!r} or {FULL_ATTENTION!r} for each of {count} layers"
        problems.append(Problem("config", "'layer_types'", message))
        return {}
    types = [*types[:-1], FULL_ATTENTION]
    num_own = count - natural("num_kv_shared_layers", 0, count - 1, 0)  # later layers read the K/V of earlier ones
    k_is_v, overrides = config.get("attention_k_eq_v") is True, config.get("per_layer_config")
    if overrides is None:
        of_full = {"head_dim": natural("global_head_dim", 1, MAX_DIMENSION, 512)}
        if k_is_v:
            default = values["num_kv_heads"]
            of_full["num_key_value_heads"] = natural("num_global_key_value_heads", 1, MAX_DIMENSION, default)
        overrides = {str(i): of_full for i, kind in enumerate(types) if kind == FULL_ATTENTION}
    sizes, last_of_kind = list[LayerSizes](), dict[str, int]()
    try:
        by_layer = {int(i): dict(changes) for i, changes in overrides.items()}
        for i, kind in enumerate(types):
            changes = by_layer.get(i, {})
            heads, dim = changes.pop("num_key_value_heads", values["num_kv_heads"]), changes.pop("head_dim", None)
            dim = values["head_dim"] if dim is None else dim
            if changes or type(heads) is not int or type(dim) is not int or heads < 1 or dim < 2:
                raise ValueError
            if i < num_own:
                last_of_kind[kind] = i
            inter = values["intermediate_size"] * (2 if doubles_mlp and i >= num_own else 1)
            has_v = not (k_is_v and kind == FULL_ATTENTION)
            sizes.append(LayerSizes(heads, dim, inter, i if i < num_own else last_of_kind[kind], has_v))
    except (AttributeError, TypeError, ValueError):
        message = f"{overrides!r}; expected head_dim and num_key_value_heads by layer"
        problems.append(Problem("config", "'per_layer_config'", message))
        return {}
    except KeyError as kind:
        message = f"no layer before layer {num_own} is of type {kind}, whose K/V later layers read"
        problems.append(Problem("config", "'num_kv_shared_layers'", message))
        return {}
    if uneven := [heads for heads, *_ in sizes if values["num_heads"] % heads]:
        message = f"{values['num_heads']} is not a multiple of a layer's {uneven[0]} KV heads"
        problems.append(Problem("config", "'num_attention_heads'", message))
        return {}
    size, vocab = natural("hidden_size_per_layer_input", 0, MAX_DIMENSION, 0), values["vocab_size"]
    dim = math.gcd(*(layer_sizes.head_dim for layer_sizes in sizes))
    num_kv_heads = math.gcd(*(layer_sizes.num_kv_heads * layer_sizes.head_dim // dim for layer_sizes in sizes))
    return {
        "sizes": tuple(sizes),
        "head_dim": dim,
        "num_kv_heads": num_kv_heads,
        "per_layer_size": size,
        "per_layer_vocab": natural("vocab_size_per_layer_input", vocab, MAX_DIMENSION, vocab) if size else 0,
    }


GEMMA4 = replace(
    GEMMA3,
    model_type="gemma4_text",
    tensors=(
        *GEMMA3.tensors,
        *(TensorRule(rule.name, (_SHARED[rule.params[0]],)) for rule in GEMMA3.tensors if rule.params[0] in _SHARED),
        *one_to_one(
            {
                "model.layers.{i}.layer_scalar": "layers.{i}.scalar",
                "model.embed_tokens_per_layer.weight": "input_embed",
                "model.per_layer_model_projection.weight": "input_project",
                "model.per_layer_projection_norm.weight": "input_norm",
                "model.layers.{i}.per_layer_input_gate.weight": "layers.{i}.input_gate",
                "model.layers.{i}.per_layer_projection.weight": "layers.{i}.input_out",
                "model.layers.{i}.post_per_layer_input_norm.weight": "layers.{i}.input_norm",
                "model.layers.{i}.router.proj.weight": "layers.{i}.router",
                "model.layers.{i}.router.scale": "layers.{i}.router_norm",
                "model.layers.{i}.router.per_expert_scale": "layers.{i}.expert_scales",
                "model.layers.{i}.pre_feedforward_layernorm_2.weight": "layers.{i}.experts_norm",
                "model.layers.{i}.post_feedforward_layernorm_1.weight": "layers.{i}.shared_post_norm",
                "model.layers.{i}.post_feedforward_layernorm_2.weight": "layers.{i}.experts_post_norm",
                "model.layers.{i}.experts.down_proj": _DOWN,
            }
        ),
        TensorRule("model.layers.{i}.experts.gate_up_proj", (_GATE, _UP)),
    ),
    alternatives=one_to_one(  # tensors of GGUF files
        named("model.layers.{i}.experts.{}_proj", "layers.{i}.experts.{e}.{}", ("gate", "up"))
    ),
    config_keys=LLAMA_SIZES,
    defaults={"tied": True, "head_dim": 256},
    constants={"post_norms": True, "qk_norm": True, "value_norm": True, "layer_scalar": True},
    assumed={
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 1,  # queries are normalised instead
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
    },
    norm="rms",
    experts=ExpertRules(
        count=("num_experts",),
        switch="enable_moe_block",
        top_k="top_k_experts",
        shared_size="intermediate_size",
        normalized=True,
        beside=True,
    ),
    layer_sizes=_gemma4_sizes,
    requires={"use_bidirectional_attention": (None, "vision"), "attention_bias": (None, False)},
)

# Gemma 4's layers, without per-layer inputs and experts.
GEMMA4_UNIFIED = replace(
    GEMMA4,
    model_type="gemma4_unified_text",
    assumed={"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 1},
)
