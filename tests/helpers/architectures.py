"""Tiny random models of many architectures, in transformers' own code: what the adapter's tests share."""

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers import models
from tests.helpers.models import at_fixed_costs, new_folder, randomize
from treespec import LLM
from treespec.startup.selftest import differing_rows

VOCAB = 97
TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 0}
SIZES = TOKENS | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SIZES |= {"pad_token_id": 2, "max_position_embeddings": 256}
GROUPED = SIZES | {"num_key_value_heads": 2}
GPT = TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
WINDOWS = {"sliding_window": 17, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"n_routed_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
EXPERTS |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
SPARSE = {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
SPARSE |= {"mlp_layer_types": ["dense", "sparse"]}
MTP = {"num_nextn_predict_layers": 1, "mtp_layer_types": ["sliding_attention"], "mtp_mlp_layer_types": ["sparse"]}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": GROUPED | {"head_dim": 12, "num_key_value_heads": 1},
    "mistral": GROUPED | {"sliding_window": 17},
    "gpt_neox": SIZES,
    "opt": SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 24},
    "gpt2": GPT,
    "gemma2": GROUPED | WINDOWS | {"head_dim": 12, "query_pre_attn_scalar": 10, "final_logit_softcapping": 5.0},
    "stablelm": GROUPED,
    "cohere2": GROUPED | WINDOWS | {"logit_scale": 0.3},
    "olmo2": GROUPED,
    "granite": GROUPED | {"logits_scaling": 0.5, "attention_multiplier": 0.3, "embedding_multiplier": 2.0},
    "gpt_bigcode": GPT,
    "diffllama": GROUPED,  # two attentions in each layer
    "deepseek_v3": SIZES | EXPERTS | LATENT,  # keys and values of different widths
    "gpt_oss": GROUPED | WINDOWS | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},  # sinks
    "mixtral": GROUPED | {"num_local_experts": 4},
    "glm4_moe": GROUPED | EXPERTS | {"head_dim": 8},
    "mellum": GROUPED | WINDOWS | SPARSE | MTP | {"head_dim": 8},
    "phi3": GROUPED,
    "phimoe": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "jetmoe": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8, "num_key_value_heads": 2},
    "bloom": SIZES | {"n_layer": 2, "n_head": 4},
    "mamba": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2},
    "recurrent_gemma": GROUPED | {"num_hidden_layers": 3},
}


def make_model(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0, **config: Any) -> Any:
    """A model whose every parameter is random, in eval mode."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(ARCHITECTURES[kind] | config)))
    randomize(model, gain=1.5, head_gain=1.5)
    return model.to(dtype).eval()


def random_ids(rows: int = 1, length: int = 9, seed: int = 0) -> Tensor:
    """Prompts for models of `VOCAB` tokens, without special tokens: int64 [rows, length]."""
    torch.manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, length))


@functools.cache
def saved(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Path]:
    """A model and its folder."""
    model = make_model(kind, dtype)
    folder = new_folder(kind)
    model.save_pretrained(folder)
    return model, folder


def quick_start() -> AbstractContextManager[None]:
    """Engines start with `CURVE` for their costs, and prove their bits behind one prompt only: a whole model runs."""
    return models.quick_start(partial(differing_rows, prefixes=(60,)))


def open_adapter_llm(model: Any, drafts: Sequence[Any] = (), **options: Any) -> LLM:
    """An engine on the CPU, of models that transformers' code runs."""
    defaults = {"device": "cpu", "max_model_len": 256, "backend": "transformers"}
    with quick_start():
        llm = LLM(model, drafts=list(drafts), **(defaults | options))
    at_fixed_costs(llm.engine.host.planner)
    return llm


@torch.no_grad()
def continuations(model: Any, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """What transformers' own greedy generate adds to each prompt, end tokens or not."""
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [model.generate(torch.tensor([each]), **options)[0, len(each) :].tolist() for each in prompts]


@torch.no_grad()
def logits_by(model: Any, tokens: Sequence[int], attention: str) -> Tensor:
    """float32 [tokens, vocab], by transformers' own forward with its attention of this name."""
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(before)


def logits_after(model: Any, prefix: Sequence[int]) -> Tensor:
    """float32 [vocab], by transformers' own eager forward over the whole prefix."""
    return logits_by(model, prefix, "eager")[-1]
