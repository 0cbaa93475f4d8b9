"""vLLM's options and methods that treespec does not have.

No-op values are accepted; hints, which affect speed or memory but no token, are logged; all others are rejected.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, NamedTuple, TypedDict, get_type_hints

from treespec.errors import ConfigError
from treespec.utils.options import VLLM

logger = logging.getLogger("treespec")


class Absent(NamedTuple):
    """Handling of an option that treespec does not have."""

    instead: str  # alternative named in errors and log lines
    neutral: tuple[Any, ...] = (False, "", {})  # no-op values besides None, also in lists
    is_hint: bool = False  # ignore other values with a log line instead of rejecting them


def absent(instead: str, *neutral: Any) -> Any:
    """Return the field of an option that is rejected unless its value is neutral."""
    return _field(Absent(instead, neutral) if neutral else Absent(instead))


def hint(instead: str, *neutral: Any) -> Any:
    """Return the field of an option that is ignored."""
    return _field(Absent(instead, neutral, True))


def _field(handling: Absent | None) -> Any:
    return field(default=None, metadata={VLLM: handling}, compare=handling is None, repr=handling is None)


_TEXT_ONLY = "prompts are text or token ids: omit it"
_ONE_DEVICE = "a model runs on one device here, such as device='cuda:1'"
_REVISION = "fetch it (treespec weights fetch) and give the folder"
_MEMORY = "max_num_seqs and max_model_len bound the memory, or kv_cache_memory_bytes does"
_LEAVE_OUT = "it has no effect: omit it"
_POOLING = "LLM generates text; run embedding, classification and reward models with transformers itself"


@dataclass(frozen=True, kw_only=True)
class VllmEngineOptions:
    """Options of vLLM's `LLM` and `EngineArgs`. None means not given."""

    allowed_local_media_path: str | None = absent(_TEXT_ONLY)
    attention_backend: str | None = absent("attention names an implementation")
    block_size: int | None = hint("the cache's pages have one size", 16)
    chat_template: Any = absent("give it to chat: chat(messages, chat_template=...)")
    compilation_config: Any = hint("compile and cuda_graphs say how passes run", {})
    config_format: str | None = absent("open a folder in Hugging Face's format", "auto", "hf")
    cpu_offload_gb: float | None = absent("use quantization='int8' or 'int4' if the weights do not fit")
    data_parallel_size: int | None = absent(_ONE_DEVICE, 1)
    disable_chunked_mm_input: bool | None = hint(_TEXT_ONLY)
    disable_custom_all_reduce: bool | None = hint(_LEAVE_OUT, False, True)
    disable_log_stats: bool | None = hint(_LEAVE_OUT, False, True)
    distributed_executor_backend: str | None = absent(_ONE_DEVICE)
    download_dir: str | None = absent("set HF_HOME, or give the checkpoint's folder")
    enable_chunked_prefill: bool | None = hint("prompts are computed max_num_batched_tokens at a time", True)
    enable_prompt_embeds: bool | None = absent("prompts are text or token ids: encode them with the tokenizer")
    enable_sleep_mode: bool | None = absent("delete the LLM to free its memory, and build it again")
    enforce_eager: bool | None = _field(None)
    gpu_memory_utilization: float | None = hint(_MEMORY, 0.9, 0.92)
    hf_overrides: Any = absent("change config.json")
    hf_token: bool | str | None = absent("set HF_TOKEN, or log in with the Hub's own command")
    kv_cache_dtype: str | None = absent("the cache has the dtype that the exactness of passes needs: omit it", "auto")
    limit_mm_per_prompt: dict[str, Any] | None = hint(_TEXT_ONLY, {})
    load_format: str | None = absent(
        "weights are read from safetensors and GGUF files: convert them", "auto", "safetensors", "hf", "gguf"
    )
    logits_processors: Any = absent(
        "give instances to the requests: SamplingParams(logits_processors=[...]), with Hugging Face's interface"
    )
    logprobs_mode: str | None = absent("logprobs are those of the model's unprocessed logits", "raw_logprobs")
    max_logprobs: int | None = hint("the number of logprobs is not limited")
    max_seq_len_to_capture: int | None = hint("captured rounds support every length")
    mm_processor_kwargs: dict[str, Any] | None = absent(_TEXT_ONLY)
    override_generation_config: dict[str, Any] | None = absent(
        "give SamplingParams to the call, or generation_config=a folder with a generation_config.json"
    )
    pipeline_parallel_size: int | None = absent(_ONE_DEVICE, 1)
    pooler_config: Any = absent(_POOLING)
    profiler_config: Any = hint("run the calls within torch.profiler.profile()", {})
    revision: str | None = absent(_REVISION)
    runner: str | None = absent(_POOLING, "auto", "generate")
    served_model_name: Any = hint(_LEAVE_OUT)
    skip_tokenizer_init: bool | None = absent("give token ids, and detokenize=False")
    speculative_config: dict[str, Any] | None = _field(None)
    swap_space: float | None = hint(_MEMORY, 0, 4)
    task: str | None = absent(_POOLING, "auto", "generate")
    tensor_parallel_size: int | None = absent(_ONE_DEVICE, 1)
    tokenizer_mode: str | None = absent("give a tokenizer object as tokenizer", "auto", "hf", "slow")
    tokenizer_revision: str | None = absent(_REVISION)
    trust_remote_code: bool | None = hint("a checkpoint's own code is never run: omit it", False, True)


_GRAMMAR = "use SamplingParams(structured_outputs={'json': schema}), or another form"


@dataclass(kw_only=True)
class VllmSamplingParams:
    """Options of vLLM's `SamplingParams`."""

    best_of: int | None = absent("ask for n outputs with logprobs=0, and choose by cumulative_logprob", 1)
    extra_args: dict[str, Any] | None = absent("give a logits processor its arguments when creating it")
    flat_logprobs: bool | None = absent("logprobs come as a list of dicts: omit it")
    guided_decoding: Any = absent(_GRAMMAR)
    logprob_token_ids: list[int] | None = absent("use logprobs=-1, which returns all tokens")
    skip_reading_prefix_cache: bool | None = absent("no prefix is cached between requests: omit it", False, True)
    spaces_between_special_tokens: bool | None = absent(
        "leave it out where special tokens are skipped, or decode token_ids without spaces between them", True
    )
    thinking_token_budget: int | None = absent("use max_tokens", -1)
    truncate_prompt_tokens: int | None = absent(
        "it is an option of the call, as in vLLM 0.17: tokenization_kwargs={'truncate_prompt_tokens': ...}"
    )


class CallOptions(TypedDict, total=False):
    """Options of vLLM's `generate` and `chat`."""

    chat_template_content_format: Annotated[str, Absent("contents may be texts or lists of parts: omit it", (), True)]
    mm_processor_kwargs: Annotated[dict[str, Any] | None, Absent(_TEXT_ONLY)]
    prompt_token_ids: Annotated[
        Any, Absent("give the ids as prompts, as in vLLM today: generate({'prompt_token_ids': ids})")
    ]
    stream: Annotated[bool | None, Absent("use llm.stream, which accepts a prompt or the messages of a conversation")]


CALLS: dict[str, Absent] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(CallOptions, include_extras=True).items()
}

_TRANSFORMERS = "LLM generates text; use transformers' AutoModel, or sentence-transformers"
_IN_PROCESS = "the model runs in this process; load a transformers model, modify it, and give it to LLM(model)"
MISSING_METHODS = {  # method of vLLM's `LLM` -> alternative
    "apply_model": _IN_PROCESS,
    "beam_search": (
        "sample n outputs with logprobs=0 and choose by cumulative_logprob, or use generate(num_beams=...) of "
        "transformers"
    ),
    "classify": f"{_TRANSFORMERS} (AutoModelForSequenceClassification)",
    "collective_rpc": _IN_PROCESS,
    "embed": _TRANSFORMERS,
    "encode": f"{_TRANSFORMERS}; token ids are get_tokenizer().encode(text)",
    "enqueue": "give all prompts to one generate call, or call generate or stream in several threads",
    "llm_engine": "LLMEngine adds requests and runs rounds; llm.config has the resolved options, llm.stats() totals",
    "reward": _TRANSFORMERS,
    "score": f"{_TRANSFORMERS} (a CrossEncoder)",
    "set_tokenizer": "give it when building the engine: LLM(model, tokenizer=...)",
    "sleep": "delete the LLM to free its memory, and build it again",
    "start_profile": "run the calls within torch.profiler.profile(), or measure with treespec bench --profile",
}


def absent_options(options: Any) -> dict[str, Absent]:
    """Return the handling of each field that is `absent` or a `hint`."""
    return {field.name: field.metadata[VLLM] for field in fields(options) if field.metadata.get(VLLM)}


def check_absent(kind: str, values: Mapping[str, Any], table: Mapping[str, Absent]) -> None:
    """Log the hints among the values given to `kind`. Raises ConfigError for unsupported values."""
    hints = []
    for name, handling in table.items():
        value = values.get(name)
        if _is_neutral(value, handling.neutral):
            continue
        if not handling.is_hint:
            raise ConfigError(f"{kind}: {name}={value!r} is not supported; {handling.instead}")
        hints.append(f"{name}={value!r} ({handling.instead})")
    if hints:
        logger.warning("%s: ignored, as no token depends on them: %s", kind, "; ".join(hints))


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    if isinstance(value, list):
        return all(_is_neutral(item, neutral) for item in value)
    return value is None or value in neutral
