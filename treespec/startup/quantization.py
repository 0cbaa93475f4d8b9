"""Quantisation of models: the option, memory, matrices of drafts, and the library of quantised layers."""

import logging
import math
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path

import torch
from torch import Tensor

from treespec.adapter.source import Source
from treespec.adapter.trace import AdapterConfig
from treespec.config import QUANTIZATIONS
from treespec.errors import ConfigError
from treespec.models.model_config import ModelConfig
from treespec_kernels.cpu.cpu_library import CompileError, find_compiler
from treespec_kernels.cpu.decoder_library import DTYPES, build
from treespec_weights.load import covered, expected_tensors, quantizable, quantized_group
from treespec_weights.quant_schemes import METHODS, Form
from treespec_weights.quantize import BITS, quantize

logger = logging.getLogger("treespec")

_FACTORS = ("_scale", "_zero")  # endings of the names of a quantised weight's other tensors
_ANY_HEAD = 16  # head size of the library build; linear layers do not use it


def resolve_quantization(quantization: str | None, target: ModelConfig | Source, dtype: torch.dtype) -> str | None:
    """Resolve the quantisation to apply at load time. None keeps the checkpoint's weights.

    Validates before anything is loaded. Logs a warning if fp8 weights of the checkpoint are converted to `dtype`.

    Raises:
        ConfigError: an unknown name, a checkpoint that is already quantised, or sizes that no group size divides.
    """
    stored = None if isinstance(target, Source) or target.quantization is None else target.quantization
    if quantization == "gguf" and target.folder.is_file():
        quantization = None
    elif isinstance(quantization, str) and (method := quantization.removesuffix("_marlin")) in METHODS:
        if stored is None or stored.method != method:
            where = "this one is not quantised" if stored is None else f"this one is {stored.name}"
            raise ConfigError(
                f"quantization={quantization!r}: leave it out; a checkpoint's own quantisation is read from its config "
                f"({where}), and 'int8' or 'int4' quantises while loading"
            )
        quantization = None
    if isinstance(target, Source):
        if quantization is not None:
            raise ConfigError(f"quantization={quantization!r} is for native families; transformers runs {target.name}")
        return None
    if quantization is None:
        if target.quantization is not None and target.quantization.floating:
            logger.warning("%s: %s weights are held as %s", target.folder, target.quantization.name, dtype)
        return None
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization={quantization!r}; valid: None, {', '.join(map(repr, QUANTIZATIONS))}")
    if target.quantization is not None:
        raise ConfigError(
            f"quantization={quantization!r}, but {target.folder} is quantised already ({target.quantization.name}); "
            "leave it at None"
        )
    try:
        quantized_group(target.shape, quantization)
    except ValueError as error:
        raise ConfigError(f"quantization={quantization!r}: {target.folder}: {error}") from error
    return quantization


def quantize_matrices(weights: dict[str, Tensor]) -> None:
    """Quantise a draft's matrices, the head's too, to int8 with a scale per row, in place; quantised ones stay.

    The draft's distributions change slightly. Outputs do not: they are those of the target.
    """
    weights.setdefault("lm_head", weights["embed"])
    names = [name for name in weights if name == "lm_head" or name.startswith("layers.")]
    for name in names:
        if (weight := weights[name]).dim() == 2 and weight.is_floating_point() and not name.endswith(_FACTORS):
            weights[name], weights[f"{name}_scale"], _ = quantize(weight, 8)


def quantized_library(dtype: torch.dtype, device: torch.device, folder: Callable[[], Path]) -> CDLL | None:
    """Return the library of quantised layers on a CPU, stored in `folder()`.

    Returns None, with a warning, if it cannot be built or stored.
    """
    if device.type == "cpu" and dtype in DTYPES:
        try:
            return build(find_compiler(), _ANY_HEAD, dtype, folder())
        except (CompileError, OSError) as error:
            reason = str(error)
    else:
        reason = f"there is no kernel for {dtype} on {device}"
    logger.warning("quantised weights are held as %s, which saves no memory and no time: %s", dtype, reason)
    return None


def weight_bytes(config: ModelConfig | AdapterConfig, dtype: torch.dtype, quantization: str | None) -> int:
    """Estimate a model's weight memory in bytes, with float32 scales and zero points."""
    total = config.shape.num_parameters() * dtype.itemsize
    if isinstance(config, AdapterConfig):
        return total
    total += (config.head_rows or 0) * config.shape.hidden_size * dtype.itemsize
    scheme = config.quantization
    forms: list[tuple[tuple[int, ...], Form]] = []  # shape and form of every quantised matrix
    if quantization is not None:
        form = Form(BITS[quantization], quantized_group(config.shape, quantization), False)
        forms = [(size, form) for size in quantizable(config.shape).values()]
    elif scheme is not None and not scheme.floating:
        placements = expected_tensors(config.shape, config.rules)
        forms = [(p.shape, scheme.form(p.name)) for p in placements if covered(scheme, p, config.rules)]
    for size, (bits, group, has_zero) in forms:
        count = math.prod(size)
        factors = (2 if has_zero else 1) * (count // (group or size[1]))
        total += count * bits // 8 + 4 * factors - count * dtype.itemsize
    return total
