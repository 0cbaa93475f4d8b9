"""LFM2, dense or with experts: gated convolutions, and attention with norms of queries and keys in some layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from treespec_weights.experts import ExpertRules
from treespec_weights.families.experts import STACKED_EXPERTS, expert_tensors
from treespec_weights.families.llama import LLAMA_SIZES
from treespec_weights.rules import FULL_ATTENTION, FamilyRules, RecurrentRules, TensorRule, named, one_to_one

_CONV = "conv"


def _normalize_tied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the key of a tied head in the first releases."""
    return {**config, "tie_word_embeddings": config["tie_embedding"]} if "tie_embedding" in config else dict(config)


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rename keys of LFM2's first releases, and compute the MLP's size as transformers does."""
    result, size = _normalize_tied(config), config.get("block_ff_dim", config.get("intermediate_size"))
    if config.get("layer_types") is None and isinstance(config.get("num_hidden_layers"), int):
        attention = config.get("full_attn_idxs")
        attention = range(config["num_hidden_layers"]) if attention is None else attention
        result["layer_types"] = [
            FULL_ATTENTION if i in attention else _CONV for i in range(config["num_hidden_layers"])
        ]
    if type(size) is int and config.get("block_auto_adjust_ff_dim", True):
        size = int(2 * size / 3)
        if (multiplier := config.get("block_ffn_dim_multiplier", 1.0)) is not None:
            multiple = config.get("block_multiple_of", 256)
            size = -(-int(multiplier * size) // multiple) * multiple
    result.pop("block_ff_dim", None)
    return result | {"intermediate_size": size, "block_auto_adjust_ff_dim": False}


LFM2 = FamilyRules(
    model_type="lfm2",
    tensors=one_to_one(
        {
            "model.embed_tokens.weight": "embed",
            "model.layers.{i}.operator_norm.weight": "layers.{i}.attn_norm",
            **named("model.layers.{i}.self_attn.{}_proj.weight", "layers.{i}.{}", "qkv"),
            **named("model.layers.{i}.self_attn.{}_layernorm.weight", "layers.{i}.{}_norm", "qk"),
            "model.layers.{i}.self_attn.out_proj.weight": "layers.{i}.o",
            "model.layers.{i}.conv.in_proj.weight": "layers.{i}.mix",
            "model.layers.{i}.conv.conv.weight": "layers.{i}.conv",
            "model.layers.{i}.conv.out_proj.weight": "layers.{i}.mix_out",
            "model.layers.{i}.ffn_norm.weight": "layers.{i}.mlp_norm",
            "model.layers.{i}.feed_forward.w1.weight": "layers.{i}.gate",
            "model.layers.{i}.feed_forward.w3.weight": "layers.{i}.up",
            "model.layers.{i}.feed_forward.w2.weight": "layers.{i}.down",
            "model.embedding_norm.weight": "final_norm",
            "lm_head.weight": "lm_head",
        }
    ),
    tied_copy="lm_head.weight",
    normalize=_normalize,
    config_keys=LLAMA_SIZES,
    defaults={"tied": True},
    constants={"qk_norm": True},
    assumed={"hidden_act": "silu", "norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 128_000},
    norm_eps="norm_eps",
    recurrent=RecurrentRules(
        kind="conv", layer_type=_CONV, config_keys={"kernel": "conv_L_cache"}, defaults={"kernel": 3}
    ),
    requires={"conv_bias": (None, False)},
)

LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    tensors=LFM2.tensors
    + expert_tensors("feed_forward", "gate", "w1", "w3", "w2")
    + (TensorRule("model.layers.{i}.feed_forward.expert_bias", ("layers.{i}.router_correction",), single=True),),
    alternatives=STACKED_EXPERTS,
    normalize=_normalize_tied,
    assumed={**LFM2.assumed, "num_dense_layers": 2, "norm_topk_prob": True},
    experts=ExpertRules(
        count=("num_experts",),
        dense="num_dense_layers",
        correction=True,
        scoring="sigmoid",
        scale="routed_scaling_factor",
    ),
    requires={**LFM2.requires, "use_expert_bias": (None, True)},
)
