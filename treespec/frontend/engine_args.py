"""The arguments of an engine as one object, and from a command line."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar, get_args, get_origin, get_type_hints

from treespec.frontend.vllm_options import EngineOptions

_Parser = TypeVar("_Parser", bound="argparse.ArgumentParser | argparse._ArgumentGroup")


@dataclass(kw_only=True)
class EngineArgs:
    """Arguments of `LLM` with its defaults, and those of vLLM's that it accepts or answers; None is not given.

    `LLM(**dataclasses.asdict(args))` and `LLM.from_engine_args(args)` make the engine. Values are checked there.
    """

    model: str | Any = None
    drafts: list[str] | None = None
    spec: Any = None
    tokenizer: str | Any = None
    device: str = "auto"
    dtype: str = "auto"
    exact: bool = True
    max_num_seqs: int = 8
    max_model_len: int | None = None
    attention: str = "auto"
    prefill_chunk: int = 512
    compile: bool | str = "auto"
    linear: str = "auto"
    cuda_graphs: bool = True
    generation_config: str = "auto"
    backend: str = "auto"
    quantization: str | None = None
    suffix_tokens: int = 0
    seed: int | None = None
    allowed_local_media_path: str | None = None
    async_scheduling: bool | None = None
    attention_backend: str | None = None
    block_size: int | None = None
    chat_template: Any = None
    code_revision: str | None = None
    compilation_config: Any = None
    config_format: str | None = None
    convert: str | None = None
    cpu_offload_gb: float | None = None
    data_parallel_size: int | None = None
    disable_cascade_attn: bool | None = None
    disable_chunked_mm_input: bool | None = None
    disable_custom_all_reduce: bool | None = None
    disable_log_stats: bool | None = None
    distributed_executor_backend: str | None = None
    download_dir: str | None = None
    enable_chunked_prefill: bool | None = None
    enable_lora: bool | None = None
    enable_prefix_caching: bool | None = None
    enable_prompt_embeds: bool | None = None
    enable_sleep_mode: bool | None = None
    enforce_eager: bool | None = None
    gpu_memory_utilization: float | None = None
    hf_overrides: Any = None
    hf_token: bool | str | None = None
    kv_cache_dtype: str | None = None
    kv_cache_memory_bytes: int | None = None
    limit_mm_per_prompt: dict[str, Any] | None = None
    load_format: str | None = None
    logits_processors: Any = None
    logprobs_mode: str | None = None
    max_logprobs: int | None = None
    max_lora_rank: int | None = None
    max_loras: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_partial_prefills: int | None = None
    max_parallel_loading_workers: int | None = None
    max_seq_len_to_capture: int | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    num_gpu_blocks_override: int | None = None
    override_generation_config: dict[str, Any] | None = None
    pipeline_parallel_size: int | None = None
    pooler_config: Any = None
    profiler_config: Any = None
    revision: str | None = None
    runner: str | None = None
    scheduling_policy: str | None = None
    served_model_name: Any = None
    skip_tokenizer_init: bool | None = None
    speculative_config: dict[str, Any] | None = None
    structured_outputs_config: Any = None
    swap_space: float | None = None
    task: str | None = None
    tensor_parallel_size: int | None = None
    tokenizer_mode: str | None = None
    tokenizer_revision: str | None = None
    trust_remote_code: bool | None = None
    worker_extension_cls: Any = None

    def given(self) -> dict[str, Any]:
        """The keywords of `LLM`, without vLLM's names that are None."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in own.items() if value is not None or name not in _VLLM_ONLY}

    @classmethod
    def add_cli_args(cls, parser: _Parser) -> _Parser:
        """Add `--max-model-len` and so on to a parser or to one of its groups, and return it.

        What the command line leaves out keeps its default; of vLLM's own names nothing is then in the namespace, so
        `LLM(**vars(args))` gets what was given.
        """
        hints = get_type_hints(cls)
        for each in fields(cls):
            kind = _option(hints[each.name])
            default = argparse.SUPPRESS if each.name in _VLLM_ONLY else each.default
            parser.add_argument(f"--{each.name.replace('_', '-')}", dest=each.name, default=default, **kind)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """From a parsed command line, which may hold options of the script's own."""
        return cls(**{each.name: getattr(args, each.name) for each in fields(cls) if hasattr(args, each.name)})


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An argument parser that also takes `--max_model_len` for `--max-model-len`."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._dashed(word) for word in given], namespace)

    def _dashed(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return word
        return name.replace("_", "-") + equals + value


_VLLM_ONLY = frozenset(EngineOptions.__annotations__)


def _option(hint: Any) -> dict[str, Any]:
    """How argparse reads an option of this type."""
    kinds = set(get_args(hint) or (hint,)) - {type(None)}
    if kinds == {bool}:
        return {"action": argparse.BooleanOptionalAction}
    if any(get_origin(kind) is list for kind in kinds):
        return {"nargs": "*"}
    for kind in (float, int):
        if kind in kinds:
            return {"type": kind}
    return {"type": str if str in kinds and bool not in kinds else _value}


def _value(text: str) -> Any:
    """JSON where it is some (a number, true, a dict), otherwise the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
