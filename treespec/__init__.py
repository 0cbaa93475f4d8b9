"""treespec: lossless speculative decoding with token trees merged from several draft models."""

from typing import TYPE_CHECKING, Any

from treespec.version import __version__

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Drafter",
    "EngineArgs",
    "FlexibleArgumentParser",
    "LLMEngine",
    "LoRARequest",
    "RequestOutput",
    "RoundRecord",
    "SamplingParams",
    "SpecConfig",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokenTree",
    "TokensPrompt",
    "__version__",
    "train_drafts",
]

if TYPE_CHECKING:
    from treespec.async_llm import AsyncLLM
    from treespec.config.configs import SpecConfig
    from treespec.drafters.base import Drafter
    from treespec.engine.round_record import RoundRecord
    from treespec.frontend.engine_args import EngineArgs, FlexibleArgumentParser
    from treespec.inputs import TextPrompt, TokensPrompt
    from treespec.llm import LLM
    from treespec.llm_engine import LLMEngine
    from treespec.lora import LoRARequest
    from treespec.outputs import CompletionOutput, RequestOutput
    from treespec.sampling_params import SamplingParams
    from treespec.sampling_params.structured_params import StructuredOutputsParams
    from treespec.training.run import train_drafts
    from treespec.tree import TokenTree

_MODULES = {
    "AsyncEngineArgs": "treespec.frontend.engine_args",
    "AsyncLLM": "treespec.async_llm",
    "AsyncLLMEngine": "treespec.async_llm",
    "CompletionOutput": "treespec.outputs",
    "Drafter": "treespec.drafters.base",
    "EngineArgs": "treespec.frontend.engine_args",
    "FlexibleArgumentParser": "treespec.frontend.engine_args",
    "LLM": "treespec.llm",
    "LLMEngine": "treespec.llm_engine",
    "LoRARequest": "treespec.lora",
    "RequestOutput": "treespec.outputs",
    "RoundRecord": "treespec.engine.round_record",
    "SamplingParams": "treespec.sampling_params",
    "SpecConfig": "treespec.config.configs",
    "StructuredOutputsParams": "treespec.sampling_params.structured_params",
    "TextPrompt": "treespec.inputs",
    "TokenTree": "treespec.tree",
    "TokensPrompt": "treespec.inputs",
    "train_drafts": "treespec.training.run",
}

_POOLING = "LLM generates text; use transformers for embedding, classification and reward models"
_VLLM_ONLY = {
    "BeamSearchParams": "sample n outputs with logprobs=0 and rank them by cumulative_logprob",
    "ModelRegistry": "add a family as README says, or use backend='transformers'",
    "PoolingParams": _POOLING,
}


def __getattr__(name: str) -> Any:
    """Import lazily: torch takes seconds to import."""
    from importlib import import_module

    if name == "hf":
        return import_module("treespec.hf")
    if name in _VLLM_ONLY:  # `from treespec import ...` drops the message of an AttributeError
        raise ImportError(f"treespec has no {name}; {_VLLM_ONLY[name]}", name="treespec")
    if name not in _MODULES:
        raise AttributeError(f"module 'treespec' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
