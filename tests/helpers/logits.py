"""Logits of a model over a text, ours and transformers'."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from treespec import LLM, LoRARequest, SpecConfig
from treespec.request import Request
from treespec.sampling_params import SamplingParams
from treespec.tree import TokenTree


def our_logits(llm: LLM, tokens: list[int], lora: LoRARequest | None = None) -> Tensor:
    """[len(tokens), vocab] teacher-forced: half of the tokens as one prefill, the others a step each."""
    engine, half = llm.engine, len(tokens) // 2
    loaded = None if lora is None or llm.loras is None else llm.loras.get(lora)

    def request_of(count: int) -> Request:
        return Request(tokens[:count], SamplingParams(), SpecConfig.off(), max_tokens=len(tokens), lora=loaded)

    request, rows = request_of(half + 1), []
    request.pages = engine.cache.reserve(request.request_id, len(tokens) + 1)
    with torch.inference_mode():
        while request.context_len < half:
            engine.runner.prefill([request], [min(llm.config.max_num_batched_tokens, half - request.context_len)])
        for position, token in enumerate(tokens):  # the prompt too, once it is prefilled
            each = request_of(position + 1) if position < half else request
            each.pages, each.context_len = request.pages, position
            rows.append(engine.runner.logits([each], [TokenTree.root(token)]))
    engine.cache.release(request.request_id)
    return torch.cat(rows).clone()


def their_logits(folder: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].clone()


def error(logits: Tensor, exact: Tensor) -> float:
    """The RMS of the difference, relatively."""
    return float((logits.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt())
