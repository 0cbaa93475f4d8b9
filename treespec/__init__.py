"""treespec: a large language model answers faster, and not one token of its answer changes."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "Drafter",
    "EngineArgs",
    "FlexibleArgumentParser",
    "LLMEngine",
    "RequestOutput",
    "RoundRecord",
    "SamplingParams",
    "SpecConfig",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokenTree",
    "TokensPrompt",
    "__version__",
]

if TYPE_CHECKING:
    from treespec.config import SpecConfig
    from treespec.drafters.base import Drafter
    from treespec.frontend.engine_args import EngineArgs, FlexibleArgumentParser
    from treespec.frontend.llm_engine import LLMEngine
    from treespec.inputs import TextPrompt, TokensPrompt
    from treespec.llm import LLM
    from treespec.outputs import CompletionOutput, RequestOutput
    from treespec.round_record import RoundRecord
    from treespec.sampling.structured_params import StructuredOutputsParams
    from treespec.sampling_params import SamplingParams
    from treespec.tree import TokenTree

_HOME = {
    "CompletionOutput": "treespec.outputs",
    "Drafter": "treespec.drafters.base",
    "EngineArgs": "treespec.frontend.engine_args",
    "FlexibleArgumentParser": "treespec.frontend.engine_args",
    "LLM": "treespec.llm",
    "LLMEngine": "treespec.frontend.llm_engine",
    "RequestOutput": "treespec.outputs",
    "RoundRecord": "treespec.round_record",
    "SamplingParams": "treespec.sampling_params",
    "SpecConfig": "treespec.config",
    "StructuredOutputsParams": "treespec.sampling.structured_params",
    "TextPrompt": "treespec.inputs",
    "TokenTree": "treespec.tree",
    "TokensPrompt": "treespec.inputs",
}

_ASYNC = "LLM.stream yields what each round adds, and any number of threads may call it"
_POOLING = "LLM generates text; use transformers for embedding, classification and reward models"
_VLLM_ONLY = {
    "AsyncEngineArgs": _ASYNC,
    "AsyncLLM": _ASYNC,
    "AsyncLLMEngine": _ASYNC,
    "BeamSearchParams": "sample n outputs with logprobs=0 and choose by cumulative_logprob",
    "LoRARequest": "merge the adapter into the model (merge_and_unload of peft)",
    "ModelRegistry": "add a family as README says, or use backend='transformers'",
    "PoolingParams": _POOLING,
}


def __getattr__(name: str) -> Any:
    """Import on first use: torch takes seconds, and `import treespec` may be for the version alone."""
    from importlib import import_module

    if name == "hf":
        return import_module("treespec.hf")
    if name in _VLLM_ONLY:  # an AttributeError would lose its message in `from treespec import ...`
        raise ImportError(f"treespec has no {name}; {_VLLM_ONLY[name]}", name="treespec")
    if name not in _HOME:
        raise AttributeError(f"module 'treespec' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
