"""vLLM's options and methods of `LLM` that treespec does not support."""

from typing import Annotated, Any, TypedDict

from treespec.errors import UnsupportedError
from treespec.sampling_params.vllm_options import GRAMMAR, Absent, absent_options

_LORA = Absent((None,), "merge the adapter into the model (merge_and_unload of peft) and open the result as an LLM")
_TEXT_ONLY = Absent((None, {}), "prompts are text or token ids: omit it")


class CallOptions(TypedDict, total=False):
    """Options of vLLM's `generate` and `chat`."""

    chat_template_content_format: Annotated[
        str, Absent(("auto", "string", "openai"), "contents may be texts or lists of parts: omit it")
    ]
    guided_options_request: Annotated[Any, GRAMMAR]
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


CALLS, ENGINE = absent_options(CallOptions), absent_options(VllmEngineOptions)

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


def missing_method(name: str) -> UnsupportedError:
    """Return the error for a method in `METHODS`."""
    return UnsupportedError(f"LLM.{name} is not supported; {METHODS[name]}")
