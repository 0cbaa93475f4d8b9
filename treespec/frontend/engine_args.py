"""Arguments of `LLM` as one object or from a command line, and the translation of vLLM's arguments."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar, get_args, get_origin, get_type_hints

from treespec.engine_options import EngineOptions
from treespec.errors import ConfigError
from treespec.frontend.vllm_options import VllmEngineOptions

logger = logging.getLogger("treespec")

SUFFIX_TOKENS = 262144  # stored output tokens if vLLM's suffix decoding is requested

_Parser = TypeVar("_Parser", bound="argparse.ArgumentParser | argparse._ArgumentGroup")


@dataclass(kw_only=True)
class EngineArgs(EngineOptions):
    """Arguments of `LLM` with its defaults, and vLLM's other names, for which None means not given.

    `LLM(**dataclasses.asdict(args))` and `LLM.from_engine_args(args)` build the engine and check the values.
    """

    generation_config: str | os.PathLike[str] = "auto"
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
        """Return the keywords for `LLM`, without vLLM's names that are None."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in own.items() if value is not None or name not in _VLLM_ONLY}

    @classmethod
    def add_cli_args(cls, parser: _Parser) -> _Parser:
        """Add `--max-model-len` and so on to a parser or to one of its groups, and return it.

        The namespace holds vLLM's own names only if the command line sets them, so that `LLM(**vars(args))` works.
        """
        hints = get_type_hints(cls)
        for each in fields(cls):
            kind = _option(hints[each.name])
            default = argparse.SUPPRESS if each.name in _VLLM_ONLY else each.default
            parser.add_argument(f"--{each.name.replace('_', '-')}", dest=each.name, default=default, **kind)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Create an instance from a parsed command line, which may also hold options of other parsers."""
        return cls(**{each.name: getattr(args, each.name) for each in fields(cls) if hasattr(args, each.name)})


AsyncEngineArgs = EngineArgs  # vLLM's name for `AsyncLLM`


def translate_options(options: EngineOptions, enforce_eager: Any, speculative_config: Any) -> EngineOptions:
    """Return the options changed as two arguments of vLLM request.

    Args:
        options: options of the engine.
        enforce_eager: True disables CUDA graphs. Compiled passes on a CPU are not graphs and stay enabled.
        speculative_config: vLLM's dict. A draft model becomes `drafts`, suffix decoding `suffix_tokens`; n-gram
            lookup is on by default.

    Raises:
        ConfigError: a value of another type, or a method that treespec does not have.
    """
    if not isinstance(enforce_eager, bool | None):
        raise ConfigError(f"enforce_eager={enforce_eager!r}; valid: True or False")
    if enforce_eager:
        options = replace(options, cuda_graphs=False)
    if speculative_config is None:
        return options
    if not isinstance(speculative_config, Mapping):
        raise ConfigError(f"speculative_config={speculative_config!r}; valid: a dict, such as {{'model': 'a-draft'}}")
    given = {name: value for name, value in speculative_config.items() if value is not None}
    model = given.pop("model", None)
    method = given.pop("method", "ngram" if model in ("ngram", "[ngram]") else "draft_model")
    if method == "suffix":
        options = replace(options, suffix_tokens=options.suffix_tokens or SUFFIX_TOKENS)
    elif method == "draft_model" and model is not None:
        if options.drafts is not None:
            raise ConfigError(f"speculative_config names the draft {model!r} beside drafts=[...]; give one of them")
        options = replace(options, drafts=[model])
    elif method != "ngram":
        raise ConfigError(
            f"speculative_config={speculative_config!r} is not supported; use drafts=[...] for draft models, "
            f"suffix_tokens={SUFFIX_TOKENS} for suffix decoding; prompt lookup is always on"
        )
    if given:
        ignored = ", ".join(f"{name}={value!r}" for name, value in given.items())
        logger.warning("speculative_config: ignored %s; SpecConfig controls the size of drafts", ignored)
    return options


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An argument parser that accepts `--max_model_len` for `--max-model-len`."""

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


_VLLM_ONLY = frozenset(VllmEngineOptions.__annotations__)


def _option(hint: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` for an option of this type."""
    kinds = set(get_args(hint) or (hint,)) - {type(None)}
    if kinds == {bool}:
        return {"action": argparse.BooleanOptionalAction}
    if any(get_origin(kind) is Sequence for kind in kinds):
        return {"nargs": "*"}
    for kind in (float, int):
        if kind in kinds:
            return {"type": kind}
    has_json = bool in kinds or any(get_origin(kind) is dict for kind in kinds)
    return {"type": str if str in kinds and not has_json else _value}


def _value(text: str) -> Any:
    """Parse JSON (a number, true, a dict). Returns the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text
