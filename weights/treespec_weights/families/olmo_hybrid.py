"""OLMo Hybrid: layers of Gated DeltaNet and of OLMo 3's attention, with or without rotary embeddings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from treespec_weights.families.llama_like import OLMO2
from treespec_weights.families.qwen3_5 import DELTA_SIZES
from treespec_weights.rules import RecurrentRules, TensorRule, named, one_to_one

_LAYER = "model.layers.{i}."
_MIXER = _LAYER + "linear_attn."


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    """Add derived sizes of Gated DeltaNets, and whether layers have rotary embeddings."""
    result = dict(config)

    def set_missing(key: str, value: Any) -> None:
        if result.get(key) is None:
            result[key] = value

    for kind in ("key", "value"):
        set_missing(f"linear_num_{kind}_heads", config.get("num_attention_heads"))
    hidden, heads, layers = (result.get(k) for k in ("hidden_size", "linear_num_key_heads", "num_hidden_layers"))
    if type(hidden) is int and type(heads) is int and heads > 0:
        set_missing("linear_key_head_dim", int(0.75 * hidden / heads))
    if type(size := result.get("linear_key_head_dim")) is int:
        set_missing("linear_value_head_dim", 2 * size)
    rope = config.get("rope_parameters")
    if type(layers) is int and isinstance(rope, dict):
        result["no_rope_layers"] = [int(rope.get("rope_theta") is not None)] * layers
    return result


OLMO_HYBRID = replace(
    OLMO2,
    model_type="olmo_hybrid",
    tensors=tuple(rule for rule in OLMO2.tensors if rule.name != _LAYER + "post_attention_layernorm.weight")
    + one_to_one(
        {
            _LAYER + "post_attention_layernorm.weight": "layers.{i}.attn_post_norm",
            _LAYER + "attention_layer_norm.weight": "layers.{i}.attn_norm",
            _LAYER + "feedforward_layer_norm.weight": "layers.{i}.mlp_norm",
            **named(_MIXER + "{}_proj.weight", "layers.{i}.mix_{}", "qkv"),
            **named(_MIXER + "{}_conv1d.weight", "layers.{i}.conv_{}", "qkv"),
            _MIXER + "g_proj.weight": "layers.{i}.mix_gate",
            _MIXER + "b_proj.weight": "layers.{i}.beta",
            _MIXER + "a_proj.weight": "layers.{i}.decay",
            _MIXER + "o_norm.weight": "layers.{i}.mix_gain",
            _MIXER + "o_proj.weight": "layers.{i}.mix_out",
        }
    )
    + (
        TensorRule(_MIXER + "dt_bias", ("layers.{i}.dt_bias",), single=True),
        TensorRule(_MIXER + "A_log", ("layers.{i}.decay_log",), single=True),
    ),
    normalize=_normalize,
    constants={**OLMO2.constants, "recurrent_pre_norms": True},
    assumed={"hidden_act": "silu", "max_position_embeddings": 65_536},
    recurrent=RecurrentRules(
        kind="delta",
        layer_type="linear_attention",
        interval="full_attention_interval",
        config_keys={**DELTA_SIZES, "doubled": "linear_allow_neg_eigval"},
        defaults={"kernel": 4, "doubled": True, "interval": 4},
        eps=1e-5,
    ),
    unrotated="no_rope_layers",
    requires={"hidden_act": ("silu",)},
)
