"""Random models of every family through transformers' own classes: odd shapes, every parameter random.

Adding a family to the tests is a line in `CASES`, and one in `TYPICAL`.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 509
MAX_LEN = 256
WINDOW = 21  # positions; contexts of the tests are longer


class Case(NamedTuple):
    """A model_type, and what its config says besides `_COMMON`."""

    model_type: str
    config: dict[str, Any]


_TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 0}
_COMMON = _TOKENS | {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4}
_COMMON |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": MAX_LEN}
_COMMON |= {"tie_word_embeddings": False, "pad_token_id": None}
_GPT2 = _TOKENS | {"n_embd": 48, "n_inner": None, "n_layer": 3, "n_head": 4, "n_positions": MAX_LEN}
_OPT = {"ffn_dim": 76, "word_embed_proj_dim": 48, "tie_word_embeddings": True}
_GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 30.0}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12}
_DELTA |= {"linear_value_head_dim": 20, "full_attention_interval": 2}
_MAMBA = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_head": 24}
_MAMBA |= {"mamba_d_conv": 3, "mamba_chunk_size": 32}
_FALCON = _MAMBA | {"mamba_d_ssm": 96, "mamba_norm_before_gate": False, "attention_in_multiplier": 0.8}
_FALCON |= {
    "attention_out_multiplier": 0.9,
    "key_multiplier": 1.3,
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.6,
}
_FALCON |= {"mlp_multipliers": [1.4, 0.7], "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6}
_FALCON |= {"ssm_multipliers": [0.7, 1.3, 0.9, 1.2, 0.8]}
_GRANITE4 = {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 40}
_GRANITE4 |= {"attention_multiplier": 0.3, "residual_multiplier": 0.4}
_NEMOTRON = {"mamba_num_heads": 6, "mamba_head_dim": 20, "n_groups": 3, "ssm_state_size": 12, "chunk_size": 32}
_NEMOTRON |= {"n_routed_experts": 5, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40}
_MULTIPLIERS = {"embedding_multiplier": 3.0, "logits_scaling": 0.6}
_PHI3 = {"head_dim": None, "hidden_size": 64}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
_BETAS = {"factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
_LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _layers(*kinds: str) -> list[str]:
    return [f"{kind}_attention" for kind in kinds]


def _partial(factor: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": factor}


def _longrope(pairs: int) -> dict[str, Any]:
    short, long = [1.0 + 0.1 * i for i in range(pairs)], [1.5 + 0.5 * i for i in range(pairs)]
    return {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long}


_GEMMA3 = {"query_pre_attn_scalar": 24, "rope_parameters": _GEMMA3_ROPES}
_GEMMA3 |= {"layer_types": _layers("sliding", "full", "sliding")}
_GEMMA4 = {"global_head_dim": 24, "sliding_window": WINDOW, "vocab_size_per_layer_input": VOCAB}
_GEMMA4 |= {"tie_word_embeddings": True, "final_logit_softcapping": 30.0}
_SHARED_KV = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
_SHARED_KV |= {"layer_types": _layers("sliding", "full", "sliding", "full")}
_KEYS_ARE_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
_GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 24}
_SPARSE = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_GLM4 = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
_GLM4 |= {"n_shared_experts": 2, "routed_scaling_factor": 1.8, "attention_bias": True, "use_qk_norm": True}
_GPT_OSS = {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW}
_GPT_OSS |= {"layer_types": _layers("sliding", "full", "sliding"), "rope_parameters": _YARN | {"truncate": False}}
_BY_LAYER = {"use_sliding_window": True, "sliding_window": 65, "layer_types": _layers("full", "sliding", "full")}
_LONG_PHI3 = _PHI3 | {"original_max_position_embeddings": 64}


def _case(model_type: str, **config: Any) -> Case:
    return Case(model_type, config)


TYPICAL = {
    "llama": _case("llama", attention_bias=True, mlp_bias=True),
    "mistral": _case("mistral", sliding_window=WINDOW, num_key_value_heads=1),
    "qwen2": _case("qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": _case("qwen3", head_dim=24, tie_word_embeddings=True),
    "qwen3_5": _case("qwen3_5_text", **_DELTA, rope_parameters=_partial(0.5)),
    "qwen3_5_moe": _case(
        "qwen3_5_moe_text", **_DELTA, **_SPARSE, shared_expert_intermediate_size=40, rope_parameters=_partial(0.5)
    ),
    "qwen3_next": _case("qwen3_next", **_DELTA, **_SPARSE, shared_expert_intermediate_size=40, mlp_only_layers=[1]),
    "lfm2": _case("lfm2", block_auto_adjust_ff_dim=False, conv_L_cache=3, full_attn_idxs=[1]),
    "lfm2_moe": _case(
        "lfm2_moe",
        **_SPARSE,
        num_dense_layers=1,
        layer_types=["conv", "full_attention", "conv"],
        tie_word_embeddings=True,
    ),
    "granite_hybrid": _case(
        "granitemoehybrid", **_MAMBA, **_GRANITE4, **_MULTIPLIERS, layer_types=_layers("linear", "full", "linear")
    ),
    "nemotron_h": _case(
        "nemotron_h",
        **_NEMOTRON,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        moe_latent_size=32,
        routed_scaling_factor=1.8,
    ),
    "falcon_h1": _case("falcon_h1", **_FALCON),
    "olmo_hybrid": _case(
        "olmo_hybrid", **_DELTA, head_dim=None, layer_types=_layers("linear", "full", "linear"), rms_norm_eps=0.05
    ),
    "mamba2": _case(
        "mamba2", num_heads=4, n_groups=2, head_dim=24, state_size=12, conv_kernel=3, chunk_size=32, use_bias=True
    ),
    "gemma2": _case("gemma2", **_CAPS, sliding_window=WINDOW, query_pre_attn_scalar=40, tie_word_embeddings=True),
    "gemma3": _case("gemma3_text", **_GEMMA3, sliding_window=WINDOW, tie_word_embeddings=True),
    "gemma4": _case("gemma4_text", **_GEMMA4, **_SHARED_KV, hidden_size_per_layer_input=12),
    "gemma4, experts": _case(
        "gemma4_text",
        **_GEMMA4,
        **_GEMMA4_EXPERTS,
        **_KEYS_ARE_VALUES,
        layer_types=_layers("sliding", "sliding", "full"),
    ),
    "phi3": _case("phi3", **_PHI3, sliding_window=WINDOW, num_key_value_heads=4, rope_parameters=_partial(0.75)),
    "gpt_neox": _case("gpt_neox", hidden_size=64, rope_parameters=_partial(0.25)),
    "mixtral": _case("mixtral", num_local_experts=5),
    "qwen2_moe": _case("qwen2_moe", **_SPARSE, shared_expert_intermediate_size=40, mlp_only_layers=[1]),
    "qwen3_moe": _case("qwen3_moe", **_SPARSE, head_dim=24, norm_topk_prob=True),
    "olmoe": _case("olmoe", num_experts=6, num_experts_per_tok=2, head_dim=None),
    "glm4_moe": _case("glm4_moe", **_GLM4),
    "gpt_oss": _case("gpt_oss", **_GPT_OSS),
    "opt": Case("opt", _OPT),
    "gpt2": Case("gpt2", _GPT2),
    "smollm3": _case("smollm3", no_rope_layers=[1, 0, 1], tie_word_embeddings=True),
    "granite": _case("granite", **_MULTIPLIERS, attention_multiplier=0.3, residual_multiplier=0.22),
    "glm4": _case("glm4", rope_parameters=_partial(0.5), tie_word_embeddings=True),
    "olmo2": _case("olmo2", attention_bias=True, head_dim=None),
    "hunyuan": _case("hunyuan_v1_dense", attention_bias=True, rope_parameters=_YARN),
    "arcee": _case("arcee", attention_bias=True, mlp_bias=True),
    "ministral3": _case("ministral3", sliding_window=None, rope_parameters=_YARN | {"llama_4_scaling_beta": 0.5}),
    "cohere2": _case(
        "cohere2", sliding_window=WINDOW, layer_types=_layers("sliding", "full", "sliding"), tie_word_embeddings=True
    ),
}
"""One of each family whose layers have what no other's have: windows shorter than the context, caps, partial rotary."""

SLOW = ("smollm3", "granite", "glm4", "olmo2", "hunyuan", "arcee", "ministral3", "cohere2", "mamba2", "olmo_hybrid")
"""Those of `TYPICAL` that only slow tests compute on every executor."""

HYBRIDS = ("qwen3_5", "lfm2", "qwen3_5_moe", "qwen3_next", "lfm2_moe", "granite_hybrid", "nemotron_h", "mamba2")
HYBRIDS += ("olmo_hybrid", "falcon_h1")
"""Those of `TYPICAL` with recurrent layers."""

CASES = TYPICAL | {
    "gemma": _case("gemma", tie_word_embeddings=True, hidden_act="gelu"),  # read as its tanh approximation
    "vaultgemma": _case("vaultgemma", **_CAPS, sliding_window=WINDOW, query_pre_attn_scalar=40),
    "gemma4_unified": _case(
        "gemma4_unified_text",
        **{
            key: value
            for key, value in (_GEMMA4 | _KEYS_ARE_VALUES | {"global_head_dim": 16}).items()
            if "per_layer_input" not in key
        },
        layer_types=_layers("full", "sliding", "full"),
    ),
    "internlm3": _case("internlm3", attention_bias=True, mlp_bias=True),
    "iquestcoder": _case("iquestcoder"),
    "seed_oss": _case("seed_oss", attention_out_bias=True),
    "ernie4_5": _case("ernie4_5", use_bias=True, tie_word_embeddings=True),
    "helium": _case("helium", attention_bias=True, num_key_value_heads=1, hidden_size=64),
    "cwm": _case("cwm", sliding_window=WINDOW, layer_types=_layers("full", "sliding", "full"), rope_parameters=_LLAMA3),
    "ministral": _case("ministral", sliding_window=WINDOW, layer_types=_layers("sliding", "full", "sliding")),
    "hyperclovax": _case("hyperclovax", **_MULTIPLIERS, attention_multiplier=0.3),
    "glm": _case("glm", rope_parameters=_partial(0.5)),
    "cohere": _case("cohere", attention_bias=True, logit_scale=0.7),
    "stablelm": _case("stablelm", use_qkv_bias=True, hidden_size=64, rope_parameters=_partial(0.25)),
    "jais2": _case("jais2"),
    "starcoder2": _case("starcoder2", sliding_window=WINDOW, num_key_value_heads=1),
    "olmo3": _case("olmo3", sliding_window=WINDOW, layer_types=_layers("sliding", "full", "sliding"), head_dim=None),
    "exaone4, no windows": _case("exaone4", sliding_window=None, layer_types=_layers("full", "full", "full")),
    "exaone4": _case("exaone4", sliding_window=WINDOW, layer_types=_layers("sliding", "full", "sliding")),
    "llama, dynamic": _case("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
    "llama, yarn with betas, large eps": _case("llama", rope_parameters=_YARN | _BETAS, rms_norm_eps=0.1),
    "llama, scaled as 3.1, heads of 12": _case("llama", rope_parameters=_LLAMA3, head_dim=12, num_key_value_heads=4),
    "mistral, no window, wide heads": _case("mistral", sliding_window=None, head_dim=40),
    "mistral, a window of one position": _case("mistral", sliding_window=1, tie_word_embeddings=True),
    "qwen3_5, one group of heads, rope of a quarter": _case(
        "qwen3_5_text", **_DELTA | {"linear_num_key_heads": 4}, linear_conv_kernel_dim=2, rms_norm_eps=0.05
    ),
    "lfm2, first keys, adjusted MLP": _case(
        "lfm2", block_multiple_of=16, conv_L_cache=5, full_attn_idxs=[0, 2], head_dim=None
    ),
    "granite_hybrid, dense, rotated": _case(
        "granitemoehybrid",
        **_MAMBA,
        **_GRANITE4 | {"num_local_experts": 0},
        mamba_conv_bias=False,
        position_embedding_type="rope",
        tie_word_embeddings=True,
        layer_types=_layers("full", "linear", "linear"),
    ),
    "nemotron_h, biases, no experts": _case(
        "nemotron_h",
        **_NEMOTRON,
        layers_block_type=["mlp", "linear_attention", "linear_attention", "full_attention", "mlp"],
        use_bias=True,
        mlp_bias=True,
        layer_norm_epsilon=0.05,
    ),
    "olmo_hybrid, no positions": _case(
        "olmo_hybrid",
        **_DELTA,
        head_dim=None,
        layer_types=_layers("linear", "full", "linear"),
        linear_allow_neg_eigval=False,
        rope_parameters={"rope_type": "default", "rope_theta": None},
    ),
    "bamba": _case("bamba", **_MAMBA, attn_layer_indices=[1], attention_bias=True, mlp_bias=True, mamba_proj_bias=True),
    "falcon_h1, norms, biases": _case(
        "falcon_h1",
        **_FALCON | {"key_multiplier": 1.0, "mlp_multipliers": None},
        mamba_rms_norm=True,
        attention_bias=True,
        mlp_bias=True,
        mamba_proj_bias=True,
        projectors_bias=True,
        mamba_conv_bias=False,
        rope_parameters=_YARN,
    ),
    "qwen2, no window, yarn": _case("qwen2", rope_parameters=_YARN, num_key_value_heads=1),
    "qwen3, biases, windows by layer": _case(
        "qwen3", **_BY_LAYER, attention_bias=True, num_key_value_heads=1, rms_norm_eps=0.05
    ),
    "gemma2, no caps, narrow heads": _case(
        "gemma2",
        **dict.fromkeys(_CAPS),
        head_dim=8,
        num_key_value_heads=1,
        sliding_window=70,
        attention_bias=True,
        hidden_activation="gelu",
    ),
    "gemma3, no window, one rope scaled": _case(
        "gemma3_text",
        query_pre_attn_scalar=16,
        final_logit_softcapping=40.0,
        head_dim=24,
        sliding_window=4096,
        rope_parameters=_GEMMA3_ROPES | {"full_attention": _YARN},
        num_key_value_heads=1,
    ),
    "phi3, longrope, partial": _case(
        "phi3",
        **_LONG_PHI3,
        num_key_value_heads=1,
        rope_parameters=_longrope(6) | {"partial_rotary_factor": 0.75},
        tie_word_embeddings=True,
    ),
    "phi3, longrope": _case("phi3", **_LONG_PHI3, rope_parameters=_longrope(8), max_position_embeddings=512),
    "mixtral, all experts, a window": _case(
        "mixtral", num_local_experts=3, num_experts_per_tok=3, sliding_window=WINDOW, tie_word_embeddings=True
    ),
    "qwen3_moe, every second layer": _case(
        "qwen3_moe", **_SPARSE | {"num_experts": 20, "num_experts_per_tok": 8}, decoder_sparse_step=2
    ),
    "glm4_moe, groups of experts": _case(
        "glm4_moe", **_GLM4 | {"n_group": 3, "topk_group": 2, "norm_topk_prob": False, "use_qk_norm": False}
    ),
    "gpt_neox, one after the other": _case(
        "gpt_neox",
        use_parallel_residual=False,
        attention_bias=False,
        hidden_act="gelu_new",
        hidden_size=64,
        intermediate_size=173,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e3, "partial_rotary_factor": 0.5},
        tie_word_embeddings=True,
    ),
    "opt, no biases, untied, gelu": Case(
        "opt", _OPT | {"enable_bias": False, "tie_word_embeddings": False, "activation_function": "gelu"}
    ),
    "gpt2, untied, its own width": Case(
        "gpt2", _GPT2 | {"n_inner": 85, "tie_word_embeddings": False, "activation_function": "relu"}
    ),
}


def small(name: str, layers: int = 2, vocab: int = 61) -> dict[str, Any]:
    """Changes that leave the first layers of a typical model: two where there are two kinds, one of each.

    Models whose last layers read the K/V of others keep all of theirs.
    """
    case = CASES[name]
    layers = case.config.get("num_hidden_layers", layers)
    if case.model_type == "gpt2":
        return {"n_layer": layers, "vocab_size": vocab}
    kinds = {key: case.config[key][:layers] for key in ("layer_types", "no_rope_layers") if key in case.config}
    return {"num_hidden_layers": layers, "vocab_size": vocab} | kinds


def fitting(case: Case) -> dict[str, Any]:
    """Sizes in place of a case's own that compiled passes take: multiples of 16, odd otherwise."""
    if case.model_type == "gpt2":
        return {"n_embd": 64, "n_inner": 80}
    if case.model_type == "opt":
        return {"hidden_size": 64, "ffn_dim": 80, "word_embed_proj_dim": 64}
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 80}
    if "linear_num_value_heads" in case.config:
        sizes |= {"linear_num_value_heads": 16, "linear_key_head_dim": 32, "linear_value_head_dim": 80}
    if "mamba_n_heads" in case.config:
        sizes |= {"mamba_n_heads": 16, "mamba_d_head": 80, "mamba_expand": 20, "mamba_d_state": 32}
        sizes |= {"mamba_n_heads": 24, "mamba_d_ssm": 24 * 80} if "mamba_d_ssm" in case.config else {}
    if "mamba_num_heads" in case.config:
        sizes |= {"mamba_num_heads": 16, "mamba_head_dim": 80, "n_groups": 2, "ssm_state_size": 32}
    if "state_size" in case.config:
        return sizes | {"num_heads": 16, "head_dim": 80, "expand": 20, "state_size": 32}
    experts = ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")
    for name in (*experts, "moe_shared_expert_intermediate_size"):
        sizes |= {name: 48} if name in case.config else {}
    if "global_head_dim" in case.config:
        sizes |= {"global_head_dim": 48}
    if case.config.get("hidden_size_per_layer_input"):
        sizes |= {"hidden_size_per_layer_input": 16}
    derived = case.model_type in ("phi3", "gpt_neox", "olmoe", "olmo_hybrid")  # heads as wide as the hidden size says
    return sizes if derived else sizes | {"head_dim": 32 if case.config.get("head_dim") else 16}


def make_model(folder: Path, case: Case, seed: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A checkpoint with every parameter random, biases, norms and positions too; `changes` go before the config's."""
    torch.manual_seed(seed)
    settings = ({} if case.model_type == "gpt2" else _COMMON) | case.config | changes
    if settings.get("head_dim", 0) is None:
        settings.pop("head_dim")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(case.model_type, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                added = case.model_type.startswith(("gemma", "qwen3_5", "qwen3_next")) and "linear_attn" not in name
                added &= not case.model_type.startswith("gemma4")
                centre = 0.0 if name.endswith("bias") or added else 1.0
                parameter.normal_(centre, 0.2)
            elif any(part in name for part in ("embed", "wte", "wpe")):
                parameter.normal_(0.0, 5.0 * parameter.shape[1] ** -0.5 if "embed_out" in name else 1.0)
            else:
                inputs = parameter.shape[0 if ".h." in name else -1 if case.model_type != "gpt_oss" else 1]
                gain = 5.0 if "lm_head" in name else 2.0 if "q_proj" in name or "k_proj" in name else 1.4
                parameter.normal_(0.0, gain * inputs**-0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.1)
            if name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.2)
    save_model(model.to(dtype), folder)
    return folder


def save_model(model: Any, folder: Path) -> None:
    """Save a model with the tensors of published checkpoints."""
    hybrid = model.config.model_type == "olmo_hybrid"  # transformers 5.24 divides its convolution into equal parts
    model.save_pretrained(folder, **{"save_original_format": False} if hybrid else {})
    if not hybrid:
        return
    config, tensors = model.config, load_file(folder / "model.safetensors")
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    names = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
    for name in [name for name in tensors if ".linear_attn.conv1d" in name]:
        convolution = tensors.pop(name)
        for part, rows in zip("qkv", convolution.split([keys, keys, len(convolution) - 2 * keys]), strict=True):
            tensors[name.replace("conv1d", f"{part}_conv1d")] = rows.contiguous()
        for old, new in names.items():
            stem = name.partition("linear_attn")[0]
            tensors[f"{stem}{new}.weight"] = tensors.pop(f"{stem}{old}.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
