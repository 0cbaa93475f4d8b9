"""Select implementations of attention, linear layers, whole passes and lookup for a device, a dtype and exactness."""

import ctypes
import logging
import os
from collections.abc import Sequence
from typing import Literal

import torch

from treespec.adapter.source import Source
from treespec.config import SpecConfig
from treespec.errors import KernelError
from treespec.models.attention import ATTENTIONS
from treespec.models.compiled import check_compiled
from treespec.models.model_config import ModelConfig
from treespec.startup.load_models import libraries_folder
from treespec_kernels.cpu.cpu_library import CompileError, find_compiler
from treespec_kernels.cpu.lookup_cpu import lookup_library
from treespec_kernels.linear.linear import LinearImpl, onednn_available

logger = logging.getLogger("treespec")

LINEARS = ("onednn", "torch", "triton")
FIXED_ROWS = 64  # rows of every pass if the linear layers are not row-invariant


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
    linear: str, attention: str, dtype: torch.dtype, device: torch.device, exact: bool, spec: SpecConfig, compile: bool
) -> tuple[LinearImpl | Literal["compiled", "triton"], int | None]:
    """Return the implementation of linear layers, and the rows to pad every pass to if exactness needs padding."""
    if linear not in ("auto", *LINEARS):
        raise KernelError(f"linear={linear!r}; valid: 'auto', {', '.join(map(repr, LINEARS))}")
    if compile:
        return "compiled", None
    available = device.type == "cpu" and onednn_available(dtype)
    if linear == "onednn" and not available:
        raise KernelError(f"linear='onednn' needs a CPU with fast {dtype}, the device is {device}; use linear='auto'")
    if linear == "triton" and attention != "triton":
        raise KernelError(f"linear='triton' requires attention='triton', not {attention!r}")
    if linear == "triton" or (linear == "auto" and device.type == "cuda"):
        return "triton", None
    if linear in ("auto", "onednn") and available:
        return "onednn", None
    if not exact:
        return "torch", None
    rows = max(FIXED_ROWS, spec.max_nodes)
    logger.warning("%s on %s has no row-invariant linear layers: every pass is padded to %d rows", dtype, device, rows)
    return "torch", rows


def resolve_attention(attention: str, device: torch.device) -> str:
    """Return the name of the tree attention implementation."""
    if attention not in ("auto", *ATTENTIONS):
        raise KernelError(f"attention={attention!r}; valid: 'auto', {', '.join(map(repr, ATTENTIONS))}")
    return attention if attention != "auto" else "cpu-packed" if device.type == "cpu" else "triton"
