"""Options of vLLM that treespec has not: taken where they ask for nothing, refused with what to do instead."""

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from treespec.errors import ConfigError


class Absent(NamedTuple):
    """An option: the values that ask for nothing, as lists of them do, and what to do in place of asking."""

    nothing: tuple[Any, ...]
    instead: str


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
    "spaces_between_special_tokens": Absent(
        (True,), "leave it out where special tokens are skipped, or decode token_ids with what writes no spaces"
    ),
    "thinking_token_budget": Absent((None, -1), "use max_tokens"),
    "truncate_prompt_tokens": Absent(
        (None,), "it is an option of the call, as in vLLM 0.17: tokenization_kwargs={'truncate_prompt_tokens': ...}"
    ),
}
CALLS = {
    "chat_template_content_format": Absent(("auto",), "a content may be a text or a list of parts as it is"),
    "guided_options_request": _GRAMMAR,
    "lora_request": _LORA,
    "mm_processor_kwargs": _TEXT_ONLY,
    "priority": Absent((None, 0), "requests enter in the order of the prompts: put the urgent ones first"),
    "prompt_adapter_request": _LORA,
}
_ONE_DEVICE = Absent((1,), "a model runs on one device here, such as device='cuda:1'")
_REVISION = Absent((None,), "fetch it (treespec weights fetch) and give the folder")
_MEMORY = "max_num_seqs and max_model_len bound the memory; use them"
ENGINE = {
    "block_size": Absent((None, 16), "the cache's pages have one size: leave it out"),
    "code_revision": Absent((None,), "code that comes with a checkpoint is never run: leave it out"),
    "compilation_config": Absent((None, {}), "use compile and cuda_graphs"),
    "cpu_offload_gb": Absent((0, 0.0), "use quantization='int8' or 'int4' where the weights do not fit"),
    "data_parallel_size": _ONE_DEVICE,
    "disable_custom_all_reduce": Absent((False, True), "use True or False"),
    "disable_log_stats": Absent((False, True), "use True or False"),
    "distributed_executor_backend": _ONE_DEVICE._replace(nothing=(None,)),
    "download_dir": Absent((None,), "set HF_HOME, or give the folder that the checkpoint lies in"),
    "enable_chunked_prefill": Absent((None, True), "prompts are computed prefill_chunk tokens at a time: leave it out"),
    "enable_lora": Absent((None, False), _LORA.instead),
    "enable_prefix_caching": Absent((None, False), "only the n samples of one prompt share its cache: leave it out"),
    "enforce_eager": Absent((False,), "use cuda_graphs=False, and compile=False on a CPU"),
    "gpu_memory_utilization": Absent((None, 0.9, 0.92), _MEMORY),
    "hf_overrides": Absent((None, {}), "change config.json"),
    "hf_token": Absent((None,), "set HF_TOKEN, or log in with the Hub's own command"),
    "kv_cache_dtype": Absent(("auto",), "the cache has the dtype that the exactness of passes needs: leave it out"),
    "kv_cache_memory_bytes": Absent((None,), _MEMORY),
    "limit_mm_per_prompt": _TEXT_ONLY,
    "load_format": Absent(("auto", "safetensors", "hf"), "weights are read from safetensors: convert them"),
    "max_num_batched_tokens": Absent((None,), "use prefill_chunk, prompt tokens of a step"),
    "mm_processor_kwargs": _TEXT_ONLY,
    "num_gpu_blocks_override": Absent((None,), _MEMORY),
    "pipeline_parallel_size": _ONE_DEVICE,
    "revision": _REVISION,
    "runner": Absent(("auto", "generate"), "only generation is here"),
    "seed": Absent((None,), "use SamplingParams(seed=...); without one a request draws its own and reports it"),
    "skip_tokenizer_init": Absent((False,), "give token ids, and detokenize=False"),
    "speculative_config": Absent(
        (None,),
        "use drafts=[...] for draft models, suffix_tokens=262144 for suffix decoding; prompt lookup is on anyway, and "
        "SpecConfig says how much is verified",
    ),
    "swap_space": Absent((0, 0.0, 4, 4.0), _MEMORY),
    "task": Absent(("auto", "generate"), "only generation is here"),
    "tensor_parallel_size": _ONE_DEVICE,
    "tokenizer_mode": Absent(("auto",), "give the tokenizer itself as tokenizer"),
    "tokenizer_revision": _REVISION,
    # A permission that is not used: a checkpoint that needs it is refused when it is read.
    "trust_remote_code": Absent((False, True), "use True or False"),
}


def without_absent(kind: str, given: Mapping[str, Any], absent: Mapping[str, Absent]) -> dict[str, Any]:
    """The options but those of `absent`.

    Args:
        kind: what is being set, for the message.
        given: options by name.
        absent: `PARAMS`, `CALLS` or `ENGINE`.

    Raises:
        ConfigError: one of them asks for something.
    """
    for name, option in absent.items():
        if name in given and not _asks_nothing(given[name], option.nothing):
            raise ConfigError(f"{kind}: {name}={given[name]!r} is not supported; {option.instead}")
    return {name: value for name, value in given.items() if name not in absent}


def _asks_nothing(value: Any, nothing: tuple[Any, ...]) -> bool:
    if isinstance(value, list | tuple):
        return all(_asks_nothing(each, nothing) for each in value)
    value = value.name if isinstance(value, Enum) else value  # vLLM's RequestOutputKind, which cannot be imported here
    return any(type(value) is type(each) and value == each for each in nothing)
