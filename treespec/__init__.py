"""treespec: a large language model answers faster, and not one token of its answer changes."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "SpecConfig", "StructuredOutputsParams", "__version__"]

if TYPE_CHECKING:
    from treespec.config import SpecConfig
    from treespec.llm import LLM
    from treespec.params import SamplingParams
    from treespec.request import RequestOutput
    from treespec.structured import StructuredOutputsParams

_HOME = {
    "LLM": "treespec.llm",
    "RequestOutput": "treespec.request",
    "SamplingParams": "treespec.params",
    "SpecConfig": "treespec.config",
    "StructuredOutputsParams": "treespec.structured",
}


def __getattr__(name: str) -> Any:
    """Import on first use: torch takes seconds, and `import treespec` may be for the version alone."""
    from importlib import import_module

    if name == "hf":
        return import_module("treespec.hf")
    if name not in _HOME:
        raise AttributeError(f"module 'treespec' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
