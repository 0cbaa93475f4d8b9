"""Linear layers with quantised weights: the specification, and the library on a CPU."""

import ctypes
from typing import Any

import gguf
import pytest
import torch

from tests.helpers.gguf_files import block_weight, reading
from tests.helpers.libraries import LIBRARIES
from tests.helpers.quantized_checkpoints import needs_compiler, random_weight
from treespec_kernels.comparison import assert_close
from treespec_kernels.cpu.compiled_linear import CompiledLinear
from treespec_kernels.cpu.cpu_library import find_compiler
from treespec_kernels.cpu.decoder_library import build
from treespec_kernels.linear.quantized import BLOCK_TYPES, BlockWeight, dequantized, integers, stacked
from treespec_kernels.linear.row_linear import row_linear_ref
from treespec_weights.quantize import Quantized, dequantize

DTYPES = [torch.float32, torch.bfloat16]
BOUNDS = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (8e-2, 8e-3)}
FORMS = [  # outputs, inputs, bits, groups, type of zero points
    (64, 64, 8, 1, None),
    (97, 96, 8, 1, None),
    (33, 96, 8, 3, torch.int8),
    (33, 96, 8, 6, None),
    (64, 96, 4, 6, torch.int8),
    (64, 256, 4, 2, None),
    (130, 704, 4, 11, None),
    (97, 96, 4, 3, torch.int8),
    (16, 48, 4, 1, torch.int8),
]


def library(dtype: torch.dtype) -> ctypes.CDLL:
    return build(find_compiler(), 16, dtype, LIBRARIES)


def test_the_two_specifications_are_one() -> None:
    for form in FORMS:
        weight = random_weight(*form)
        assert torch.equal(dequantized(weight), dequantize(Quantized(*weight)))
        assert weight.shape == form[:2] and weight.bits == form[2] and weight.group == form[1] // form[3]
        assert integers(weight).shape == form[:2]


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_fractional_zero_points(dtype: torch.dtype, bits: int) -> None:
    weight, whole, plain = (random_weight(97, 96, bits, 3, zero, dtype) for zero in (torch.float32, torch.int8, None))
    weight.check()
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    result = CompiledLinear(library(dtype), weight, None, dtype, 1)(x)
    assert_close(result, row_linear_ref(x, weight), max_error=BOUNDS[dtype][0], rms_error=BOUNDS[dtype][1])
    both = stacked([weight, whole, plain])  # zero points of each kind, or none
    assert both.zero.dtype == torch.float32
    assert torch.equal(dequantized(both), torch.cat([dequantized(part) for part in (weight, whole, plain)]))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_library_against_ref(dtype: torch.dtype, form: Any) -> None:
    weight, generator = random_weight(*form, dtype), torch.Generator().manual_seed(1)
    bias = torch.randn(form[0], generator=generator).to(dtype)
    layer = CompiledLinear(library(dtype), weight, bias, dtype, 1)
    for rows in (1, 5, 7, 20):
        x = torch.randn(rows, form[1], generator=generator).to(dtype)
        expected = row_linear_ref(x, weight, bias=bias)
        assert_close(layer(x), expected, max_error=BOUNDS[dtype][0], rms_error=BOUNDS[dtype][1])
        gated = expected.float() / (1 + torch.exp(-expected.float()))
        assert_close(
            layer.activated(x, "silu").float(), gated, max_error=BOUNDS[dtype][0], rms_error=2 * BOUNDS[dtype][1]
        )


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, form: Any) -> None:
    weight = random_weight(*form, dtype)
    layer = CompiledLinear(library(dtype), weight, None, dtype, 1)
    x = torch.randn(70, form[1], generator=torch.Generator().manual_seed(2)).to(dtype)
    whole = layer(x)
    for rows in (*range(1, 20), 31, 32, 33, 48, 63, 64, 65, 69):
        assert torch.equal(layer(x[:rows]), whole[:rows]) and torch.equal(layer(x[rows:]), whole[rows:])
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    assert torch.equal(layer(x[order]), whole[order])
    two = CompiledLinear(library(dtype), weight, None, dtype, 2)
    assert torch.equal(two(x), whole)
    beside = torch.full_like(x, float("nan"))
    beside[33] = x[33]
    assert torch.equal(layer(beside)[33], whole[33])


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(70,), (128, 32, 32), (100, 200, 3), (10, 54), (16, 16)])
def test_dense_matrices_of_one_product(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """Matrices that share a panel are packed as their concatenation."""
    generator = torch.Generator().manual_seed(len(sizes))
    parts = [torch.randn(size, 32, generator=generator).to(dtype) for size in sizes]
    x = torch.randn(3, 32, generator=generator).to(dtype)
    joined = CompiledLinear(library(dtype), parts, None, dtype, 1)(x)
    assert torch.equal(joined, CompiledLinear(library(dtype), torch.cat(parts), None, dtype, 1)(x))
    assert_close(joined, row_linear_ref(x, torch.cat(parts)), max_error=BOUNDS[dtype][0], rms_error=BOUNDS[dtype][1])


@needs_compiler
def test_a_large_matrix_is_packed_in_parts() -> None:
    """Of 16 MiB each, after which the pages of its file are dropped."""
    released, whole = [], block_weight("Q8_0", 33_000, 512)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    parts = [BlockWeight("Q8_0", rows, lambda: released.append(None)) for rows in whole.rows.split(16_512)]
    alone = [CompiledLinear(library(torch.float32), part, None, torch.float32, 2)(x) for part in parts]
    released.clear()
    joined = CompiledLinear(library(torch.float32), parts, None, torch.float32, 2)(x)
    assert torch.equal(joined, torch.cat(alone, 1)) and len(released) == 4


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_of_gguf_files(dtype: torch.dtype, kind: str) -> None:
    """Blocks are multiplied as their reading, in panels that are not whole, alone and joined with other matrices."""
    parts = [block_weight(kind, 97, 512), block_weight(kind, 30, 512), random_weight(33, 512, 8, 4, None)]
    dense = torch.randn(16, 512, generator=torch.Generator().manual_seed(2)).to(dtype)
    x = torch.randn(7, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.arange(176.0).to(dtype) / 100
    joined = CompiledLinear(library(dtype), [*parts, dense], bias, dtype, 2)(x)
    whole = [dequantized(reading(part)) for part in parts]
    expected = row_linear_ref(x, torch.cat([*whole, dense.float()]), bias=bias)
    scale = float(expected.float().abs().max())
    assert_close(joined / scale, expected / scale, max_error=BOUNDS[dtype][0], rms_error=BOUNDS[dtype][1])
    alone = torch.cat([CompiledLinear(library(dtype), part, None, dtype, 1)(x) for part in (*parts, dense)], 1)
    assert torch.equal(CompiledLinear(library(dtype), [*parts, dense], None, dtype, 2)(x), alone)
    row = torch.empty(512)
    kinds = gguf.GGMLQuantizationType[kind]
    library(dtype).treespec_dequantize_row(kinds, parts[0].rows[3].data_ptr(), 512, row.data_ptr())
    assert torch.equal(row, torch.from_numpy(gguf.quants.dequantize(parts[0].rows[3].numpy(), kinds)))
