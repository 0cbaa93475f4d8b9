"""vLLM's options and methods that treespec does not have, and what is done with them.

An option that asks for nothing is accepted. A hint, which could change speed or memory but no token, is accepted too,
with one line in the log for all hints of a call. Everything else is refused with what to do instead.
"""

import logging
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypedDict

from treespec.errors import ConfigError, UnsupportedError

logger = logging.getLogger("treespec")

SUFFIX_TOKENS = 262144  # that an engine remembers where suffix decoding is asked for without a number


class Absent(NamedTuple):
    """An option.

    Attributes:
        nothing: the values that ask for nothing, as lists of them do. None always does.
        instead: what to do in place of asking.
        hints: types of the values that are accepted as hints.
    """

    nothing: tuple[Any, ...]
    instead: str
    hints: tuple[type, ...] = ()


class ParamsOptions(TypedDict, total=False):
    """Types of the options in `PARAMS`, for type checkers."""

    best_of: int | None
    extra_args: dict[str, Any] | None
    flat_logprobs: bool
    guided_decoding: Any
    logprob_token_ids: list[int] | None
    output_kind: Any
    prompt_logprob_start: int | None
    prompt_logprob_token_ids: Any
    repetition_detection: Any
    skip_clone: bool
    skip_reading_prefix_cache: bool | None
    spaces_between_special_tokens: bool
    stream_interval: int | None
    thinking_token_budget: int | None
    truncate_prompt_tokens: int | None
    watermarking: bool | None


class CallOptions(TypedDict, total=False):
    """Types of the options in `CALLS`, for type checkers."""

    chat_template_content_format: str
    guided_options_request: Any
    lora_request: Any
    mm_processor_kwargs: dict[str, Any] | None
    priority: int | list[int] | None
    prompt_adapter_request: Any
    prompt_token_ids: Any
    stream: bool | None


class EngineOptions(TypedDict, total=False):
    """Types of the options in `ENGINE` and of those that `translated` takes, for type checkers."""

    allowed_local_media_path: str | None
    async_scheduling: bool | None
    attention_backend: str | None
    block_size: int | None
    chat_template: Any
    code_revision: str | None
    compilation_config: Any
    config_format: str | None
    convert: str | None
    cpu_offload_gb: float | None
    data_parallel_size: int | None
    disable_cascade_attn: bool | None
    disable_chunked_mm_input: bool | None
    disable_custom_all_reduce: bool | None
    disable_log_stats: bool | None
    distributed_executor_backend: str | None
    download_dir: str | None
    enable_chunked_prefill: bool | None
    enable_lora: bool | None
    enable_prefix_caching: bool | None
    enable_prompt_embeds: bool | None
    enable_sleep_mode: bool | None
    enforce_eager: bool | None
    gpu_memory_utilization: float | None
    hf_overrides: Any
    hf_token: bool | str | None
    kv_cache_dtype: str | None
    kv_cache_memory_bytes: int | None
    limit_mm_per_prompt: dict[str, Any] | None
    load_format: str | None
    logits_processors: Any
    logprobs_mode: str | None
    max_logprobs: int | None
    max_lora_rank: int | None
    max_loras: int | None
    max_num_batched_tokens: int | None
    max_num_partial_prefills: int | None
    max_parallel_loading_workers: int | None
    max_seq_len_to_capture: int | None
    mm_processor_kwargs: dict[str, Any] | None
    num_gpu_blocks_override: int | None
    override_generation_config: dict[str, Any] | None
    pipeline_parallel_size: int | None
    pooler_config: Any
    profiler_config: Any
    revision: str | None
    runner: str | None
    scheduling_policy: str | None
    served_model_name: Any
    skip_tokenizer_init: bool | None
    speculative_config: dict[str, Any] | None
    structured_outputs_config: Any
    swap_space: float | None
    task: str | None
    tensor_parallel_size: int | None
    tokenizer_mode: str | None
    tokenizer_revision: str | None
    trust_remote_code: bool | None
    worker_extension_cls: Any


_GRAMMAR = Absent((None,), "use SamplingParams(structured_outputs={'json': schema}), or another form")
_LORA = Absent((None,), "merge the adapter into the model (merge_and_unload of peft) and open the result as an LLM")
_TEXT_ONLY = Absent((None, {}), "prompts are text or token ids: leave it out")

PARAMS = {
    "best_of": Absent((None, 1), "ask for n outputs with logprobs=0, and choose by cumulative_logprob"),
    "extra_args": Absent((None, {}), "give a logits processor its arguments where it is made"),
    "flat_logprobs": Absent((False,), "logprobs come as a list of dicts: leave it out"),
    "guided_decoding": _GRAMMAR,
    "logprob_token_ids": Absent((None,), "use logprobs=-1, which has all tokens"),
    "output_kind": Absent(
        (None, "CUMULATIVE", "FINAL_ONLY"), "generate returns finished outputs; use stream for what each round adds"
    ),
    "prompt_logprob_start": Absent((None,), "use prompt_logprobs, and the end of what it gives"),
    "prompt_logprob_token_ids": Absent((None,), "use prompt_logprobs=-1, which has all tokens"),
    "repetition_detection": Absent((None,), "use repetition_penalty, or stop reading a stream"),
    "skip_clone": Absent((False, True), "use True or False"),
    "skip_reading_prefix_cache": Absent((False, True), "no prefix is cached between requests: leave it out"),
    "spaces_between_special_tokens": Absent(
        (True,), "leave it out where special tokens are skipped, or decode token_ids with what writes no spaces"
    ),
    "stream_interval": Absent((None, 1), "each chunk of a stream is what one round added: leave it out"),
    "thinking_token_budget": Absent((None, -1), "use max_tokens"),
    "truncate_prompt_tokens": Absent(
        (None,), "it is an option of the call, as in vLLM 0.17: tokenization_kwargs={'truncate_prompt_tokens': ...}"
    ),
    "watermarking": Absent((None, False), "outputs carry no watermark; give a logits processor that writes one"),
}
CALLS = {
    "chat_template_content_format": Absent(
        ("auto", "string", "openai"), "a content may be a text or a list of parts as it is"
    ),
    "guided_options_request": _GRAMMAR,
    "lora_request": _LORA,
    "mm_processor_kwargs": _TEXT_ONLY,
    "priority": Absent((None, 0), "requests enter in the order of the prompts: put the urgent ones first"),
    "prompt_adapter_request": _LORA,
    "prompt_token_ids": Absent(
        (None,), "give the ids as prompts, as in vLLM today: generate({'prompt_token_ids': ids})"
    ),
    "stream": Absent((None, False), "use llm.stream, which takes a prompt or the messages of a conversation"),
}

_ONE_DEVICE = Absent((1,), "a model runs on one device here, such as device='cuda:1'")
_REVISION = Absent((None,), "fetch it (treespec weights fetch) and give the folder")
_MEMORY = "max_num_seqs and max_model_len bound the memory"
_LEAVE_OUT = "there is nothing that it would change: leave it out"
_POOLING = "LLM generates text; run embedding, classification and reward models with transformers itself"
_NUMBER, _FLAG = (int, float), (bool,)
ENGINE = {
    "allowed_local_media_path": Absent((None, ""), _TEXT_ONLY.instead, (str,)),
    "async_scheduling": Absent((), _LEAVE_OUT, _FLAG),
    "attention_backend": Absent((None,), "attention names an implementation", (str,)),
    "block_size": Absent((16,), "the cache's pages have one size", (int,)),
    "chat_template": Absent((None,), "give it to chat: chat(messages, chat_template=...)"),
    "code_revision": Absent((None,), "code that comes with a checkpoint is never run: leave it out"),
    "compilation_config": Absent(({},), "compile and cuda_graphs say how passes run", (int, dict)),
    "config_format": Absent(("auto", "hf"), "open a folder in Hugging Face's format"),
    "convert": Absent(("auto", "none"), _POOLING),
    "cpu_offload_gb": Absent((0, 0.0), "use quantization='int8' or 'int4' where the weights do not fit"),
    "data_parallel_size": _ONE_DEVICE,
    "disable_cascade_attn": Absent((), _LEAVE_OUT, _FLAG),
    "disable_chunked_mm_input": Absent((), _TEXT_ONLY.instead, _FLAG),
    "disable_custom_all_reduce": Absent((False, True), "use True or False"),
    "disable_log_stats": Absent((False, True), "use True or False"),
    "distributed_executor_backend": Absent((None,), _ONE_DEVICE.instead, (str,)),
    "download_dir": Absent((None,), "set HF_HOME, or give the folder that the checkpoint lies in"),
    "enable_chunked_prefill": Absent((True,), "prompts are computed prefill_chunk tokens at a time", _FLAG),
    "enable_lora": Absent((False,), _LORA.instead),
    "enable_prefix_caching": Absent((False,), "only the n samples of one prompt share its cache", _FLAG),
    "enable_prompt_embeds": Absent((False,), "prompts are text or token ids: encode them with the tokenizer"),
    "enable_sleep_mode": Absent((False,), "delete the LLM to free its memory, and build it again"),
    "gpu_memory_utilization": Absent((0.9, 0.92), _MEMORY, _NUMBER),
    "hf_overrides": Absent(({},), "change config.json"),
    "hf_token": Absent((None,), "set HF_TOKEN, or log in with the Hub's own command"),
    "kv_cache_dtype": Absent(("auto",), "the cache has the dtype that the exactness of passes needs: leave it out"),
    "kv_cache_memory_bytes": Absent((), _MEMORY, (int,)),
    "limit_mm_per_prompt": Absent(({},), _TEXT_ONLY.instead, (dict,)),
    "load_format": Absent(("auto", "safetensors", "hf"), "weights are read from safetensors: convert them"),
    "logits_processors": Absent(
        ([],), "give instances to the requests: SamplingParams(logits_processors=[...]), called as Hugging Face's"
    ),
    "logprobs_mode": Absent(("raw_logprobs",), "logprobs are of the model's own logits"),
    "max_logprobs": Absent((), "any number of logprobs may be asked for", (int,)),
    "max_lora_rank": Absent((None,), _LORA.instead, (int,)),
    "max_loras": Absent((None,), _LORA.instead, (int,)),
    "max_num_batched_tokens": Absent((), "prefill_chunk is the number of prompt tokens of a step", (int,)),
    "max_num_partial_prefills": Absent((), "prefill_chunk is the number of prompt tokens of a step", (int,)),
    "max_parallel_loading_workers": Absent((), _LEAVE_OUT, (int,)),
    "max_seq_len_to_capture": Absent((), "captured rounds hold for every length", (int,)),
    "mm_processor_kwargs": _TEXT_ONLY,
    "num_gpu_blocks_override": Absent((), _MEMORY, (int,)),
    "override_generation_config": Absent(
        ({},), "give SamplingParams to the call, or generation_config=a folder with a generation_config.json"
    ),
    "pipeline_parallel_size": _ONE_DEVICE,
    "pooler_config": Absent((None,), _POOLING),
    "profiler_config": Absent(({},), "run the calls within torch.profiler.profile()", (dict,)),
    "revision": _REVISION,
    "runner": Absent(("auto", "generate"), _POOLING),
    "scheduling_policy": Absent(("fcfs",), "requests enter in the order of the prompts: put the urgent ones first"),
    "served_model_name": Absent((None,), _LEAVE_OUT, (str, list)),
    "skip_tokenizer_init": Absent((False,), "give token ids, and detokenize=False"),
    "structured_outputs_config": Absent(({},), "forms are read by llguidance: leave it out"),
    "swap_space": Absent((0, 0.0, 4, 4.0), _MEMORY, _NUMBER),
    "task": Absent(("auto", "generate"), _POOLING),
    "tensor_parallel_size": _ONE_DEVICE,
    "tokenizer_mode": Absent(("auto", "hf", "slow"), "give the tokenizer itself as tokenizer"),
    "tokenizer_revision": _REVISION,
    # A permission that is not used: a checkpoint that needs it is refused when it is read.
    "trust_remote_code": Absent((False, True), "use True or False"),
    "worker_extension_cls": Absent(("",), "there are no worker processes: call what you need on the LLM's own model"),
}

_TRANSFORMERS = "LLM generates text; use transformers' AutoModel, or sentence-transformers"
_IN_PROCESS = "the model runs in this process; open a transformers model, change it, and give it to LLM(model)"
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
    "llm_engine": "LLMEngine adds requests and steps; llm.config has what was resolved, llm.stats() the totals",
    "release_kv_cache_memory": "delete the LLM to free its memory, and build it again",
    "reward": _TRANSFORMERS,
    "score": f"{_TRANSFORMERS} (a CrossEncoder)",
    "set_tokenizer": "give it when the engine is built: LLM(model, tokenizer=...)",
    "sleep": "delete the LLM to free its memory, and build it again",
    "start_profile": "run the calls within torch.profiler.profile(), or measure with treespec bench --profile",
    "stop_profile": "run the calls within torch.profiler.profile(), or measure with treespec bench --profile",
    "wait_for_completion": _QUEUE,
    "wake_up": "delete the LLM to free its memory, and build it again",
}


def without_absent(kind: str, given: Mapping[str, Any], absent: Mapping[str, Absent]) -> dict[str, Any]:
    """The options but those of `absent`. The hints among them are named in one line of the log.

    Args:
        kind: what is being set, for the message.
        given: options by name.
        absent: `PARAMS`, `CALLS` or `ENGINE`.

    Raises:
        ConfigError: one of them asks for something.
    """
    hints = []
    for name, option in absent.items():
        value = given.get(name)
        if value is None or _asks_nothing(value, option.nothing):
            continue
        if not _is_one_of(value, option.hints):
            raise ConfigError(f"{kind}: {name}={value!r} is not supported; {option.instead}")
        hints.append(f"{name}={value!r} ({option.instead})")
    if hints:
        logger.warning("%s: ignored, as no token depends on them: %s", kind, "; ".join(hints))
    return {name: value for name, value in given.items() if name not in absent}


class Translated(NamedTuple):
    """Options of `LLM` that some of vLLM's stand for."""

    drafts: Sequence[Any] | None
    cuda_graphs: bool
    suffix_tokens: int


def translated(enforce_eager: Any, speculative_config: Any, own: Translated) -> Translated:
    """What `enforce_eager` and `speculative_config` ask for.

    Args:
        enforce_eager: no CUDA graphs. Compiled passes on a CPU are no graphs and stay.
        speculative_config: vLLM's dict. A draft model becomes one of `drafts`; prompt lookup is on anyway.
        own: what the caller gave to `LLM`.

    Raises:
        ConfigError: a value of another kind, or a method that treespec does not have.
    """
    if not isinstance(enforce_eager, bool | None):
        raise ConfigError(f"enforce_eager={enforce_eager!r}; valid: True or False")
    own = own._replace(cuda_graphs=own.cuda_graphs and not enforce_eager)
    if speculative_config is None:
        return own
    if not isinstance(speculative_config, Mapping):
        raise ConfigError(f"speculative_config={speculative_config!r}; valid: a dict, such as {{'model': 'a-draft'}}")
    asked = {name: value for name, value in speculative_config.items() if value is not None}
    model = asked.pop("model", None)
    method = asked.pop("method", "ngram" if model in ("ngram", "[ngram]") else "draft_model")
    if method == "suffix":
        own = own._replace(suffix_tokens=own.suffix_tokens or SUFFIX_TOKENS)
    elif method == "draft_model" and model is not None:
        if own.drafts is not None:
            raise ConfigError(f"speculative_config names the draft {model!r} beside drafts=[...]; give one of them")
        own = own._replace(drafts=[model])
    elif method != "ngram":
        raise ConfigError(
            f"speculative_config={speculative_config!r} is not supported; use drafts=[...] for draft models, "
            "suffix_tokens=262144 for suffix decoding; prompt lookup is on anyway"
        )
    if asked:
        said = ", ".join(f"{name}={value!r}" for name, value in asked.items())
        logger.warning("speculative_config: ignored %s; SpecConfig says how much is drafted", said)
    return own


def missing_method(name: str) -> UnsupportedError:
    """The error for a method that is in `METHODS`."""
    return UnsupportedError(f"LLM.{name} is not supported; {METHODS[name]}")


def _is_one_of(value: Any, types: tuple[type, ...]) -> bool:
    """Whether a value has one of the types; a bool is no number."""
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))


def _asks_nothing(value: Any, nothing: tuple[Any, ...]) -> bool:
    if isinstance(value, list | tuple):
        return all(each is None or _asks_nothing(each, nothing) for each in value)
    value = value.name if isinstance(value, Enum) else value
    return any(type(value) is type(each) and value == each for each in nothing)
