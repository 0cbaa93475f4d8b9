"""Quantised checkpoints and weights for tests."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.models import edit_config
from treespec_kernels.cpu.cpu_library import CompileError, find_compiler
from treespec_kernels.linear.quantized import QuantizedWeight
from treespec_weights.quantize import compressed_tensors, compressed_tensors_config, quantize


def _missing_compiler() -> str:
    """Why nothing can be compiled here; empty where it can."""
    try:
        find_compiler()
    except CompileError as error:
        return str(error)
    return ""


# Without a compiler quantised weights are held as the dtype, and what these tests are about would not run.
needs_compiler = pytest.mark.skipif(bool(_missing_compiler()), reason=_missing_compiler())


def quantize_folder(folder: Path, bits: int, group: int | None, head: bool = False) -> Path:
    """Quantises the matrices of a single-file checkpoint's layers, and of its head, in compressed-tensors' layout."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if (".layers." in name or (head and name == "lm_head.weight")) and tensor.dim() == 2:
            tensors |= compressed_tensors(name, quantize(tensors.pop(name), bits, group))
    save_file(tensors, folder / "model.safetensors")
    ignored = [] if head else ["lm_head"]
    return edit_config(folder, quantization_config=compressed_tensors_config(bits, group, ignored))


def random_weight(
    out: int,
    inputs: int,
    bits: int,
    groups: int,
    zero_type: torch.dtype | None,
    dtype: torch.dtype = torch.float32,
    stack: tuple[int, ...] = (),
    device: str = "cpu",
) -> QuantizedWeight:
    """Any values, and scales of `dtype` that give results of about 1; zero points of float32 are fractions."""
    generator = torch.Generator().manual_seed(out * inputs)
    kind, low, high = (torch.int8, -128, 128) if bits == 8 else (torch.uint8, 0, 256)
    grouped = (*stack, out, groups)
    values = torch.randint(low, high, (*stack, out, inputs * bits // 8), generator=generator, dtype=kind)
    scale = (torch.rand(grouped, generator=generator) + 0.5) * inputs**-0.5 / (1 << (bits - 1))
    zero = torch.randint(-8, 9, grouped, generator=generator)
    if zero_type is torch.float32:
        zero = zero - torch.rand(grouped, generator=generator)
    return QuantizedWeight(
        values.to(device), scale.to(device, dtype), None if zero_type is None else zero.to(device, zero_type)
    )
