"""Logits of a model over a text, ours and transformers'."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from treespec import LLM, LoRARequest, SpecConfig
from treespec.request import Request
from treespec.sampling_params import SamplingParams
from treespec.tree import TokenTree
from treespec_kernels.attention.tree_batch import RequestRows


def our_logits(llm: LLM, tokens: list[int], lora: LoRARequest | None = None) -> Tensor:
    """[len(tokens), vocab] teacher-forced: half of the tokens as one prefill, the others a step each."""
    engine, half = llm.engine, len(tokens) // 2
    loaded = None if lora is None or llm.loras is None else llm.loras.get(lora)

    def request_of(count: int) -> Request:
        return Request(tokens[:count], SamplingParams(), SpecConfig.off(), max_tokens=len(tokens), lora=loaded)

    request, rows = request_of(half + 1), []
    request.pages = engine.cache.reserve(request.request_id, len(tokens) + 1)
    request.state = engine.cache.reserve_state(request.request_id)
    with torch.inference_mode():
        if request.state is not None:  # it cannot go back to score the prompt a step each
            parts = [tokens[:half], *([token] for token in tokens[half:])]
            for part in parts:
                own = {"adapter": request.adapter, "state": request.state_rows(len(part))}
                rows_of = RequestRows.chain(request.context_len, len(part), request.pages, **own)
                rows.append(engine.runner.target.logits(engine.runner.run_pass([rows_of], np.array(part))))
                request.context_len += len(part)
            engine.cache.release(request.request_id)
            return torch.cat(rows).clone()
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
