"""Phi-3, 3.5 and Phi-4-mini: Llama with fused projections; some rotate only a part of each head."""

from dataclasses import replace

from treespec_weights.families.llama import LLAMA, LLAMA_SIZES, LLAMA_TENSORS
from treespec_weights.rules import TensorRule

_SPLIT = {f"layers.{{i}}.{name}" for name in ("q", "k", "v", "gate", "up")}

PHI3 = replace(
    LLAMA,
    model_type="phi3",
    tensors=(
        *(rule for rule in LLAMA_TENSORS if rule.params[0] not in _SPLIT),
        TensorRule("model.layers.{i}.self_attn.qkv_proj.weight", ("layers.{i}.q", "layers.{i}.k", "layers.{i}.v")),
        TensorRule("model.layers.{i}.mlp.gate_up_proj.weight", ("layers.{i}.gate", "layers.{i}.up")),
    ),
    config_keys=LLAMA_SIZES,
    defaults={"tied": False},
    assumed={"hidden_act": "silu", "rms_norm_eps": 1e-5},
    windows=True,
    requires={"layer_types": (None,)},
)
