"""vLLM's options and methods that treespec does not support, and their handling.

Values equivalent to omitting the option are accepted. Hints, which may change speed or memory but no token, are ignored
with one log line per call. Every other value is an error that names the alternative.
"""

import logging
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, NamedTuple, TypedDict, get_origin, get_type_hints

from treespec.errors import ConfigError, UnsupportedError

logger = logging.getLogger("treespec")


class Absent(NamedTuple):
    """Handling of an option that treespec does not support.

    Attributes:
        nothing: values equivalent to omitting the option, also in lists. None always is.
        instead: alternative, for errors and log lines.
        hints: types of values that are accepted as hints.
    """

    nothing: tuple[Any, ...]
    instead: str
    hints: tuple[type, ...] = ()


_GRAMMAR = Absent((None,), "use SamplingParams(structured_outputs={'json': schema}), or another form")
_LORA = Absent((None,), "merge the adapter into the model (merge_and_unload of peft) and open the result as an LLM")
_TEXT_ONLY = Absent((None, {}), "prompts are text or token ids: omit it")


class ParamsOptions(TypedDict, total=False):
    """Options of vLLM's `SamplingParams`."""

    best_of: Annotated[
        int | None, Absent((None, 1), "ask for n outputs with logprobs=0, and choose by cumulative_logprob")
    ]
    extra_args: Annotated[
        dict[str, Any] | None, Absent((None, {}), "give a logits processor its arguments when creating it")
    ]
    flat_logprobs: Annotated[bool, Absent((False,), "logprobs come as a list of dicts: omit it")]
    guided_decoding: Annotated[Any, _GRAMMAR]
    logprob_token_ids: Annotated[list[int] | None, Absent((None,), "use logprobs=-1, which returns all tokens")]
    prompt_logprob_start: Annotated[int | None, Absent((None,), "use prompt_logprobs, and slice its result")]
    prompt_logprob_token_ids: Annotated[Any, Absent((None,), "use prompt_logprobs=-1, which returns all tokens")]
    repetition_detection: Annotated[Any, Absent((None,), "use repetition_penalty, or stop reading a stream")]
    skip_clone: Annotated[bool, Absent((False, True), "use True or False")]
    skip_reading_prefix_cache: Annotated[
        bool | None, Absent((False, True), "no prefix is cached between requests: omit it")
    ]
    spaces_between_special_tokens: Annotated[
        bool,
        Absent(
            (True,), "leave it out where special tokens are skipped, or decode token_ids without spaces between them"
        ),
    ]
    stream_interval: Annotated[
        int | None, Absent((None, 1), "each chunk of a stream holds the new tokens of one round: omit it")
    ]
    thinking_token_budget: Annotated[int | None, Absent((None, -1), "use max_tokens")]
    truncate_prompt_tokens: Annotated[
        int | None,
        Absent(
            (None,), "it is an option of the call, as in vLLM 0.17: tokenization_kwargs={'truncate_prompt_tokens': ...}"
        ),
    ]
    watermarking: Annotated[
        bool | None, Absent((None, False), "outputs have no watermark; use a logits processor that adds one")
    ]


class CallOptions(TypedDict, total=False):
    """Options of vLLM's `generate` and `chat`."""

    chat_template_content_format: Annotated[
        str, Absent(("auto", "string", "openai"), "contents may be texts or lists of parts: omit it")
    ]
    guided_options_request: Annotated[Any, _GRAMMAR]
    lora_request: Annotated[Any, _LORA]
    mm_processor_kwargs: Annotated[dict[str, Any] | None, _TEXT_ONLY]
    priority: Annotated[
        int | list[int] | None,
        Absent((None, 0), "requests enter in the order of the prompts: put the urgent ones first"),
    ]
    prompt_adapter_request: Annotated[Any, _LORA]
    prompt_token_ids: Annotated[
        Any, Absent((None,), "give the ids as prompts, as in vLLM today: generate({'prompt_token_ids': ids})")
    ]
    stream: Annotated[
        bool | None, Absent((None, False), "use llm.stream, which accepts a prompt or the messages of a conversation")
    ]


_ONE_DEVICE = Absent((1,), "a model runs on one device here, such as device='cuda:1'")
_REVISION = Absent((None,), "fetch it (treespec weights fetch) and give the folder")
_MEMORY = "max_num_seqs and max_model_len bound the memory"
_LEAVE_OUT = "it has no effect: omit it"
_POOLING = "LLM generates text; run embedding, classification and reward models with transformers itself"
_NUMBER, _FLAG = (int, float), (bool,)


class VllmEngineOptions(TypedDict, total=False):
    """Options of vLLM's `LLM` and `EngineArgs`; `translate_options` handles those that are not `Absent`."""

    allowed_local_media_path: Annotated[str | None, Absent((None, ""), _TEXT_ONLY.instead, (str,))]
    async_scheduling: Annotated[bool | None, Absent((), _LEAVE_OUT, _FLAG)]
    attention_backend: Annotated[str | None, Absent((None,), "attention names an implementation", (str,))]
    block_size: Annotated[int | None, Absent((16,), "the cache's pages have one size", (int,))]
    chat_template: Annotated[Any, Absent((None,), "give it to chat: chat(messages, chat_template=...)")]
    code_revision: Annotated[str | None, Absent((None,), "a checkpoint's own code is never run: omit it")]
    compilation_config: Annotated[Any, Absent(({},), "compile and cuda_graphs say how passes run", (int, dict))]
    config_format: Annotated[str | None, Absent(("auto", "hf"), "open a folder in Hugging Face's format")]
    convert: Annotated[str | None, Absent(("auto", "none"), _POOLING)]
    cpu_offload_gb: Annotated[
        float | None, Absent((0, 0.0), "use quantization='int8' or 'int4' if the weights do not fit")
    ]
    data_parallel_size: Annotated[int | None, _ONE_DEVICE]
    disable_cascade_attn: Annotated[bool | None, Absent((), _LEAVE_OUT, _FLAG)]
    disable_chunked_mm_input: Annotated[bool | None, Absent((), _TEXT_ONLY.instead, _FLAG)]
    disable_custom_all_reduce: Annotated[bool | None, Absent((False, True), "use True or False")]
    disable_log_stats: Annotated[bool | None, Absent((False, True), "use True or False")]
    distributed_executor_backend: Annotated[str | None, Absent((None,), _ONE_DEVICE.instead, (str,))]
    download_dir: Annotated[str | None, Absent((None,), "set HF_HOME, or give the checkpoint's folder")]
    enable_chunked_prefill: Annotated[
        bool | None, Absent((True,), "prompts are computed prefill_chunk tokens at a time", _FLAG)
    ]
    enable_lora: Annotated[bool | None, Absent((False,), _LORA.instead)]
    enable_prefix_caching: Annotated[
        bool | None, Absent((False,), "only the n samples of one prompt share its cache", _FLAG)
    ]
    enable_prompt_embeds: Annotated[
        bool | None, Absent((False,), "prompts are text or token ids: encode them with the tokenizer")
    ]
    enable_sleep_mode: Annotated[bool | None, Absent((False,), "delete the LLM to free its memory, and build it again")]
    enforce_eager: bool | None
    gpu_memory_utilization: Annotated[float | None, Absent((0.9, 0.92), _MEMORY, _NUMBER)]
    hf_overrides: Annotated[Any, Absent(({},), "change config.json")]
    hf_token: Annotated[bool | str | None, Absent((None,), "set HF_TOKEN, or log in with the Hub's own command")]
    kv_cache_dtype: Annotated[
        str | None, Absent(("auto",), "the cache has the dtype that the exactness of passes needs: omit it")
    ]
    kv_cache_memory_bytes: Annotated[int | None, Absent((), _MEMORY, (int,))]
    limit_mm_per_prompt: Annotated[dict[str, Any] | None, Absent(({},), _TEXT_ONLY.instead, (dict,))]
    load_format: Annotated[
        str | None,
        Absent(("auto", "safetensors", "hf", "gguf"), "weights are read from safetensors and GGUF files: convert them"),
    ]
    logits_processors: Annotated[
        Any,
        Absent(
            ([],),
            "give instances to the requests: SamplingParams(logits_processors=[...]), with Hugging Face's interface",
        ),
    ]
    logprobs_mode: Annotated[
        str | None, Absent(("raw_logprobs",), "logprobs are those of the model's unprocessed logits")
    ]
    max_logprobs: Annotated[int | None, Absent((), "the number of logprobs is not limited", (int,))]
    max_lora_rank: Annotated[int | None, Absent((None,), _LORA.instead, (int,))]
    max_loras: Annotated[int | None, Absent((None,), _LORA.instead, (int,))]
    max_num_batched_tokens: Annotated[
        int | None, Absent((), "prefill_chunk is the number of prompt tokens of a step", (int,))
    ]
    max_num_partial_prefills: Annotated[
        int | None, Absent((), "prefill_chunk is the number of prompt tokens of a step", (int,))
    ]
    max_parallel_loading_workers: Annotated[int | None, Absent((), _LEAVE_OUT, (int,))]
    max_seq_len_to_capture: Annotated[int | None, Absent((), "captured rounds support every length", (int,))]
    mm_processor_kwargs: Annotated[dict[str, Any] | None, _TEXT_ONLY]
    num_gpu_blocks_override: Annotated[int | None, Absent((), _MEMORY, (int,))]
    override_generation_config: Annotated[
        dict[str, Any] | None,
        Absent(({},), "give SamplingParams to the call, or generation_config=a folder with a generation_config.json"),
    ]
    pipeline_parallel_size: Annotated[int | None, _ONE_DEVICE]
    pooler_config: Annotated[Any, Absent((None,), _POOLING)]
    profiler_config: Annotated[Any, Absent(({},), "run the calls within torch.profiler.profile()", (dict,))]
    revision: Annotated[str | None, _REVISION]
    runner: Annotated[str | None, Absent(("auto", "generate"), _POOLING)]
    scheduling_policy: Annotated[
        str | None, Absent(("fcfs",), "requests enter in the order of the prompts: put the urgent ones first")
    ]
    served_model_name: Annotated[Any, Absent((None,), _LEAVE_OUT, (str, list))]
    skip_tokenizer_init: Annotated[bool | None, Absent((False,), "give token ids, and detokenize=False")]
    speculative_config: dict[str, Any] | None
    structured_outputs_config: Annotated[Any, Absent(({},), "llguidance compiles all constraints: omit it")]
    swap_space: Annotated[float | None, Absent((0, 0.0, 4, 4.0), _MEMORY, _NUMBER)]
    task: Annotated[str | None, Absent(("auto", "generate"), _POOLING)]
    tensor_parallel_size: Annotated[int | None, _ONE_DEVICE]
    tokenizer_mode: Annotated[str | None, Absent(("auto", "hf", "slow"), "give a tokenizer object as tokenizer")]
    tokenizer_revision: Annotated[str | None, _REVISION]
    trust_remote_code: Annotated[bool | None, Absent((False, True), "use True or False")]
    worker_extension_cls: Annotated[
        Any, Absent(("",), "there are no worker processes: call methods of the LLM's model")
    ]


def _table(options: type) -> dict[str, Absent]:
    """Return the `Absent` of each option that is annotated with one."""
    hints = get_type_hints(options, include_extras=True).items()
    return {name: hint.__metadata__[0] for name, hint in hints if get_origin(hint) is Annotated}


PARAMS, CALLS, ENGINE = _table(ParamsOptions), _table(CallOptions), _table(VllmEngineOptions)

_TRANSFORMERS = "LLM generates text; use transformers' AutoModel, or sentence-transformers"
_IN_PROCESS = "the model runs in this process; load a transformers model, modify it, and give it to LLM(model)"
_QUEUE = "give all prompts to one generate call, or call generate or stream in several threads"
METHODS = {
    "apply_model": _IN_PROCESS,
    "beam_search": (
        "sample n outputs with logprobs=0 and choose by cumulative_logprob, or use generate(num_beams=...) of "
        "transformers"
    ),
    "classify": f"{_TRANSFORMERS} (AutoModelForSequenceClassification)",
    "collective_rpc": _IN_PROCESS,
    "embed": _TRANSFORMERS,
    "encode": f"{_TRANSFORMERS}; token ids are get_tokenizer().encode(text)",
    "enqueue": _QUEUE,
    "enqueue_chat": _QUEUE,
    "llm_engine": "LLMEngine adds requests and runs rounds; llm.config has the resolved options, llm.stats() totals",
    "release_kv_cache_memory": "delete the LLM to free its memory, and build it again",
    "reward": _TRANSFORMERS,
    "score": f"{_TRANSFORMERS} (a CrossEncoder)",
    "set_tokenizer": "give it when building the engine: LLM(model, tokenizer=...)",
    "sleep": "delete the LLM to free its memory, and build it again",
    "start_profile": "run the calls within torch.profiler.profile(), or measure with treespec bench --profile",
    "stop_profile": "run the calls within torch.profiler.profile(), or measure with treespec bench --profile",
    "wait_for_completion": _QUEUE,
    "wake_up": "delete the LLM to free its memory, and build it again",
}


def without_absent(kind: str, given: Mapping[str, Any], absent: Mapping[str, Absent]) -> dict[str, Any]:
    """Return the options that are not in `absent`, and log ignored hints.

    Args:
        kind: name of the object or call, for the message.
        given: options by name.
        absent: `PARAMS`, `CALLS` or `ENGINE`.

    Raises:
        ConfigError: an unsupported value of an option of `absent`.
    """
    hints = []
    for name, option in absent.items():
        value = given.get(name)
        if value is None or _is_neutral(value, option.nothing):
            continue
        if not _is_one_of(value, option.hints):
            raise ConfigError(f"{kind}: {name}={value!r} is not supported; {option.instead}")
        hints.append(f"{name}={value!r} ({option.instead})")
    if hints:
        logger.warning("%s: ignored, as no token depends on them: %s", kind, "; ".join(hints))
    return {name: value for name, value in given.items() if name not in absent}


def missing_method(name: str) -> UnsupportedError:
    """Return the error for a method in `METHODS`."""
    return UnsupportedError(f"LLM.{name} is not supported; {METHODS[name]}")


def _is_one_of(value: Any, types: tuple[type, ...]) -> bool:
    """Return whether a value has one of the types. A bool is not a number."""
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))


def _is_neutral(value: Any, nothing: tuple[Any, ...]) -> bool:
    if isinstance(value, list | tuple):
        return all(each is None or _is_neutral(each, nothing) for each in value)
    value = value.name if isinstance(value, Enum) else value
    return any(type(value) is type(each) and value == each for each in nothing)
