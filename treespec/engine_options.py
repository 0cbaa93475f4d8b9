"""Options that an engine is built from."""

import os
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import torch
from torch import nn

from treespec.config import SpecConfig
from treespec.drafters.lookup.lookup_drafter import MAX_SUFFIX_TOKENS
from treespec.errors import ConfigError
from treespec.utils.scalars import as_int, to_python


@dataclass(kw_only=True)
class EngineOptions:
    """Options of an engine. Names, types and defaults are those of `LLM`, which documents them in full.

    Instances are frozen. The subclass `EngineArgs` is mutable, because vLLM's users change it in place.

    Attributes:
        model: the target: a folder, a hub id, a known name, a model in memory, or None for the embedded target.
        drafts: draft models and `Drafter` objects; None uses the SSMs that come with a target known by name.
        spec: default speculative decoding options; they also bound the tree size.
        device: "auto", "cpu", "cuda" or "cuda:N".
        dtype: "auto" (the checkpoint's), a name, or a torch dtype.
        exact: raise an error if trees are not bit-identical to plain decoding.
        max_num_seqs: maximum number of requests decoded concurrently.
        max_model_len: maximum positions of a request; None derives it from the model and the free memory.
        attention: implementation of tree attention.
        prefill_chunk: prompt rows per step; None chooses them by device.
        compile: run CPU passes in compiled C++; "auto" falls back to eager passes.
        linear: implementation of linear layers.
        cuda_graphs: capture rounds in CUDA graphs.
        backend: "native", "transformers" or "auto".
        quantization: quantisation of the target's layers at load time: "int8", "int4" or None.
        draft_quantization: quantisation of the drafts at load time: "int8", None, or "auto".
        activations: "model", the dtype of passes, or "int8" before products with quantised weights.
        enable_prefix_caching: share the KV cache of common prefixes between requests.
        suffix_tokens: number of output tokens stored for the source "suffix".
        tokenizer: of a target in memory, by which drafts are connected; None is that of the folder it was loaded from.
    """

    model: str | os.PathLike[str] | nn.Module | None = None
    drafts: Sequence[Any] | None = None
    spec: SpecConfig | str | dict[str, Any] | None = None
    device: str | torch.device = "auto"
    dtype: str | torch.dtype = "auto"
    exact: bool = True
    max_num_seqs: int = 8
    max_model_len: int | None = None
    attention: str = "auto"
    prefill_chunk: int | None = None
    compile: bool | str = "auto"
    linear: str = "auto"
    cuda_graphs: bool = True
    backend: str = "auto"
    quantization: str | None = None
    draft_quantization: str | None = "auto"
    activations: str = "model"
    enable_prefix_caching: bool = False
    suffix_tokens: int = 0
    tokenizer: Any = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "prefill_chunk", "suffix_tokens"):
            setattr(self, name, to_python(getattr(self, name)))
        vars(self)["_frozen"] = type(self) is EngineOptions

    def __setattr__(self, name: str, value: Any) -> None:
        if vars(self).get("_frozen"):
            raise FrozenInstanceError(f"cannot assign to field {name!r} of EngineOptions; use dataclasses.replace")
        super().__setattr__(name, value)

    def check(self) -> None:
        """Check types and ranges that need neither a file nor a device.

        Raises:
            ConfigError: a value of another type or out of range.
        """
        model, compile = self.model, self.compile
        if as_int(self.suffix_tokens, 0) is None or self.suffix_tokens > MAX_SUFFIX_TOKENS:
            raise ConfigError(f"suffix_tokens={self.suffix_tokens!r}; valid: an int from 0 to {MAX_SUFFIX_TOKENS}")
        if as_int(self.max_num_seqs, 1) is None:
            raise ConfigError(f"max_num_seqs={self.max_num_seqs!r}; valid: an int of at least 1")
        if self.prefill_chunk is not None and as_int(self.prefill_chunk, 1) is None:
            raise ConfigError(f"prefill_chunk={self.prefill_chunk!r}; valid: an int of at least 1, or None")
        # The valid range depends on the model, see `resolve_max_model_len`.
        if isinstance(self.max_model_len, bool) or not isinstance(self.max_model_len, int | None):
            raise ConfigError(f"max_model_len={self.max_model_len!r}; valid: an int of at least 2, or None")
        if compile != "auto" and not isinstance(compile, bool):
            raise ConfigError(f'compile={compile!r}; valid: True, False or "auto"')
        if self.draft_quantization not in (None, "auto", "int8"):
            raise ConfigError(f'draft_quantization={self.draft_quantization!r}; valid: "auto", "int8" or None')
        if self.activations not in ("model", "int8"):
            raise ConfigError(f'activations={self.activations!r}; valid: "model" or "int8"')
        for name in ("exact", "cuda_graphs", "enable_prefix_caching"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}; valid: True or False")
        if model is not None and not isinstance(model, str | os.PathLike | nn.Module):
            raise ConfigError(f"model={model!r}; valid: a folder, a hub id, a model, or None for the embedded target")
