"""Families with experts: Mixtral, Qwen 2 and 3 MoE, OLMoE, GLM-4.5 and gpt-oss."""

from dataclasses import replace

from treespec_weights.experts import ExpertRules
from treespec_weights.families.llama import LLAMA, LLAMA_SIZES, LLAMA_TENSORS, MLP, QK_NORMS, QWEN2, QWEN3
from treespec_weights.rules import PredictorRules, TensorRule, named, one_to_one, with_biases

_EXPERT = "layers.{i}.experts.{e}."
_GATE, _UP, _DOWN = (_EXPERT + name for name in MLP)
_GATE_UP = (_GATE, _UP)


def expert_tensors(
    block: str, router: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[TensorRule, ...]:
    """Return the rules of a router and of experts with separate tensors."""
    stem = f"model.layers.{{i}}.{block}"
    return one_to_one(
        {
            f"{stem}.{router}.weight": "layers.{i}.router",
            f"{stem}.experts.{{e}}.{gate}.weight": _GATE,
            f"{stem}.experts.{{e}}.{up}.weight": _UP,
            f"{stem}.experts.{{e}}.{down}.weight": _DOWN,
        }
    )


STACKED_EXPERTS = (
    # tensors of all experts: in GGUF files, and in transformers' modules
    *one_to_one(named("model.layers.{i}.mlp.experts.{}_proj", _EXPERT + "{}", MLP)),
    TensorRule("model.layers.{i}.mlp.experts.gate_up_proj", _GATE_UP),
)

MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    tensors=LLAMA_TENSORS + expert_tensors("block_sparse_moe", "gate", "w1", "w3", "w2"),
    alternatives=(*STACKED_EXPERTS, TensorRule("model.layers.{i}.mlp.gate.weight", ("layers.{i}.router",))),
    config_keys=LLAMA_SIZES,
    assumed={"hidden_act": "silu", "rms_norm_eps": 1e-5},
    windows=True,
    requires={"layer_types": (None,)},
    experts=ExpertRules(count=("num_local_experts", "num_experts"), size="intermediate_size", normalized=True),
)

_COUNT = ("num_experts", "num_local_experts")
SHARED_EXPERT = ExpertRules(count=_COUNT, shared_size="shared_expert_intermediate_size", shared_gate=True)
QWEN_EXPERTS = expert_tensors("mlp", "gate") + one_to_one(
    named("model.layers.{i}.mlp.shared_expert.{}_proj.weight", "layers.{i}.shared.{}", MLP)
    | {"model.layers.{i}.mlp.shared_expert_gate.weight": "layers.{i}.shared.scale"}
)

QWEN2_MOE = replace(
    QWEN2,
    model_type="qwen2_moe",
    tensors=LLAMA_TENSORS + QWEN_EXPERTS,
    alternatives=STACKED_EXPERTS,
    config_keys=LLAMA_SIZES | {"attention_bias": "qkv_bias"},
    defaults={"attention_bias": True},
    constants={},
    experts=SHARED_EXPERT,
)

QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    tensors=LLAMA_TENSORS + QK_NORMS + expert_tensors("mlp", "gate"),
    alternatives=STACKED_EXPERTS,
    defaults={},
    requires={"layer_types": (None,)},
    experts=ExpertRules(count=_COUNT),
)

OLMOE = replace(
    LLAMA,
    model_type="olmoe",
    tensors=LLAMA_TENSORS + QK_NORMS + expert_tensors("mlp", "gate"),
    alternatives=STACKED_EXPERTS,
    config_keys=LLAMA_SIZES | {"attention_bias": "attention_bias", "o_bias": "attention_bias"},
    constants={"wide_qk_norm": True},
    assumed={"hidden_act": "silu", "rms_norm_eps": 1e-5},
    requires={"clip_qkv": (None,)},
    experts=ExpertRules(count=_COUNT, size="intermediate_size"),
)

_AFTER_GLM = "model.layers.{n}."

GLM4_MOE = replace(
    LLAMA,
    model_type="glm4_moe",
    tensors=LLAMA_TENSORS
    + QK_NORMS
    + expert_tensors("mlp", "gate")
    + (
        TensorRule("model.layers.{i}.mlp.gate.e_score_correction_bias", ("layers.{i}.router_correction",), single=True),
        *one_to_one(named("model.layers.{i}.mlp.shared_experts.{}_proj.weight", "layers.{i}.shared.{}", MLP)),
    ),
    alternatives=STACKED_EXPERTS,
    further_layers=True,
    predictor=PredictorRules(
        module=_AFTER_GLM,
        layer=_AFTER_GLM,
        tensors={
            _AFTER_GLM + "eh_proj.weight": "fc",
            _AFTER_GLM + "enorm.weight": "embed_norm",
            _AFTER_GLM + "hnorm.weight": "feature_norm",
            _AFTER_GLM + "shared_head.norm.weight": "final_norm",
        },
        copies=(_AFTER_GLM + "embed_tokens.weight", _AFTER_GLM + "shared_head.head.weight"),
    ),
    config_keys=LLAMA_SIZES | {"attention_bias": "attention_bias", "qk_norm": "use_qk_norm"},
    assumed={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    experts=ExpertRules(
        count=("n_routed_experts",),
        shared_count="n_shared_experts",
        correction=True,
        scoring="sigmoid",
        scale="routed_scaling_factor",
        grouped=True,
    ),
)

_GPT_OSS = "model.layers.{i}.mlp.experts."

GPT_OSS = replace(
    LLAMA,
    model_type="gpt_oss",
    tensors=LLAMA_TENSORS
    + with_biases({"model.layers.{i}.mlp.router": "layers.{i}.router"})
    + (
        TensorRule("model.layers.{i}.self_attn.sinks", ("layers.{i}.sinks",)),
        TensorRule(_GPT_OSS + "gate_up_proj", _GATE_UP, "interleaved_transposed"),
        TensorRule(_GPT_OSS + "gate_up_proj_bias", (_GATE + "_bias", _UP + "_bias"), "interleaved"),
        TensorRule(_GPT_OSS + "down_proj", (_DOWN,), "transposed"),
        TensorRule(_GPT_OSS + "down_proj_bias", (_DOWN + "_bias",)),
    ),
    # The published MXFP4, and GGUF files
    alternatives=(
        TensorRule(_GPT_OSS + "gate_up_proj_blocks", _GATE_UP, "interleaved"),
        TensorRule(_GPT_OSS + "down_proj_blocks", (_DOWN,)),
        *with_biases(named(_GPT_OSS + "{}", _EXPERT + "{}", MLP)),
    ),
    config_keys=LLAMA_SIZES | {"attention_bias": "attention_bias", "o_bias": "attention_bias"},
    defaults={"attention_bias": True, "o_bias": True, "head_dim": 64},
    constants={"sinks": True},
    assumed={"hidden_act": "silu", "rms_norm_eps": 1e-5},
    clamped=True,
    windows=True,
    requires={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0, 7), "hidden_act": ("silu",)},
    experts=ExpertRules(
        count=("num_local_experts", "num_experts"),
        size="intermediate_size",
        bias=True,
        scoring="softmax_of_chosen",
        normalized=False,
    ),
)
