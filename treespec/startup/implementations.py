"""Select implementations of attention, linear layers, whole passes and lookup for a device, a dtype and exactness."""

import ctypes
import logging
import os
from collections.abc import Sequence
from typing import Literal

import torch

from treespec.adapter.source import Source
from treespec.config import ModelConfig
from treespec.errors import KernelError
from treespec.models.attention import ATTENTIONS
from treespec.models.compiled import check_compiled
from treespec.startup.load_models import libraries_folder
from treespec_kernels.cpu.cpu_library import CompileError, find_compiler
from treespec_kernels.cpu.lookup_cpu import lookup_library

logger = logging.getLogger("treespec")

LINEARS = ("torch", "triton")


def resolve_compile(
    compile: bool | str,
    models: Sequence[ModelConfig | Source],
    attention: str,
    linear: str,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Return whether passes run in compiled libraries, and build missing libraries.

    Raises:
        KernelError, OSError: compile=True, but the models are not supported, the build fails, or the cache folder
            cannot be written. "auto" logs the reason and returns False.
    """
    if compile is False or (compile == "auto" and device.type != "cpu"):
        return False
    try:
        for name, asked in (("attention", attention), ("linear", linear)):
            if asked != "auto":
                raise KernelError(f"{name}={asked!r}, but compile=True has its own implementation; leave it at 'auto'")
        natives = []
        for model in models:
            if isinstance(model, Source):
                raise KernelError(f"compile=True is for native families; {model.name} runs through transformers' code")
            natives.append(model)
        check_compiled(natives, dtype, device, libraries_folder())
    except (KernelError, OSError) as error:
        if compile is True or "TREESPEC_CPU" in os.environ:
            raise
        logger.info("passes are not compiled: %s", error)
        return False
    return True


def resolve_lookup(compile: bool | str) -> ctypes.CDLL | None:
    """Return the C++ library for prompt lookup, or None if it cannot be built.

    The numpy search is equivalent but slower.
    """
    if compile is False:
        return None
    try:
        return lookup_library(find_compiler(), libraries_folder())
    except (CompileError, OSError) as error:
        logger.info("prompt lookup searches in numpy: %s", error)
        return None


def resolve_linear(
    linear: str, attention: str, device: torch.device, compile: bool
) -> Literal["torch", "compiled", "triton"]:
    """Return the implementation of linear layers."""
    if linear not in ("auto", *LINEARS):
        raise KernelError(f"linear={linear!r}; valid: 'auto', {', '.join(map(repr, LINEARS))}")
    if compile:
        return "compiled"
    if linear == "triton" and attention != "triton":
        raise KernelError(f"linear='triton' requires attention='triton', not {attention!r}")
    return "triton" if linear == "triton" or (linear == "auto" and device.type == "cuda") else "torch"


def resolve_attention(attention: str, device: torch.device) -> str:
    """Return the name of the tree attention implementation."""
    if attention not in ("auto", *ATTENTIONS):
        raise KernelError(f"attention={attention!r}; valid: 'auto', {', '.join(map(repr, ATTENTIONS))}")
    return attention if attention != "auto" else "cpu" if device.type == "cpu" else "triton"
