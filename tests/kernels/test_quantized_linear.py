"""Linear layers with quantised weights: the specification, and the library on a CPU."""

from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from tests.helpers.gguf_files import block_weight, reading
from tests.helpers.libraries import decoder_library
from tests.helpers.quantized_checkpoints import needs_compiler, random_weight
from treespec_kernels.comparison import assert_close
from treespec_kernels.cpu.compiled_linear import CompiledLinear
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


def compiled(weight: Any, dtype: torch.dtype, bias: Tensor | None = None, threads: int = 1) -> CompiledLinear:
    return CompiledLinear(decoder_library(dtype=dtype), weight, bias, dtype, threads)


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
    result = compiled(weight, dtype)(x)
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
    layer = compiled(weight, dtype, bias)
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
@pytest.mark.parametrize("sizes", [(70,), (128, 32, 32), (100, 200, 3), (10, 54), (16, 16)])
def test_dense_matrices_of_one_product(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """Matrices that share a panel are packed as their concatenation."""
    generator = torch.Generator().manual_seed(len(sizes))
    parts = [torch.randn(size, 32, generator=generator).to(dtype) for size in sizes]
    x = torch.randn(3, 32, generator=generator).to(dtype)
    joined = compiled(parts, dtype)(x)
    assert torch.equal(joined, compiled(torch.cat(parts), dtype)(x))
    assert_close(joined, row_linear_ref(x, torch.cat(parts)), max_error=BOUNDS[dtype][0], rms_error=BOUNDS[dtype][1])


@needs_compiler
def test_a_large_matrix_is_packed_in_parts() -> None:
    """Of 16 MiB each, after which the pages of its file are dropped."""
    released, whole = [], block_weight("Q8_0", 33_000, 512)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    parts = [BlockWeight("Q8_0", rows, lambda: released.append(None)) for rows in whole.rows.split(16_512)]
    alone = [compiled(part, torch.float32, threads=2)(x) for part in parts]
    released.clear()
    joined = compiled(parts, torch.float32, threads=2)(x)
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
    joined = compiled([*parts, dense], dtype, bias, threads=2)(x)
    whole = [dequantized(reading(part)) for part in parts]
    expected = row_linear_ref(x, torch.cat([*whole, dense.float()]), bias=bias)
    scale = float(expected.float().abs().max())
    assert_close(joined / scale, expected / scale, max_error=BOUNDS[dtype][0], rms_error=BOUNDS[dtype][1])
    alone = torch.cat([compiled(part, dtype)(x) for part in (*parts, dense)], 1)
    assert torch.equal(compiled([*parts, dense], dtype, threads=2)(x), alone)
    row = torch.empty(512)
    kinds = gguf.GGMLQuantizationType[kind]
    decoder_library(dtype=dtype).treespec_dequantize_row(kinds, parts[0].rows[3].data_ptr(), 512, row.data_ptr())
    assert torch.equal(row, torch.from_numpy(gguf.quants.dequantize(parts[0].rows[3].numpy(), kinds)))
