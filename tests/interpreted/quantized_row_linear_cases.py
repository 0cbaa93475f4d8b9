"""Cases of row_linear_triton with quantised weights."""

from dataclasses import replace

import pytest
import torch

from tests.interpreted.common import DEVICE, assert_near, each_dtype
from treespec_kernels.linear.quantized import QuantizedWeight
from treespec_kernels.linear.row_linear import (
    RowLinearConfig,
    row_linear_partials_triton,
    row_linear_ref,
    row_linear_triton,
)
from treespec_kernels.tuning.testing import assert_close

SMALL = RowLinearConfig(16, 32, 32, split_k=1, num_warps=4, num_stages=2)
# bits, inputs, groups of inputs, whether there are zero points
each_form = pytest.mark.parametrize(
    "bits, inputs, groups, has_zero",
    [
        (8, 96, 1, False),
        (8, 123, 1, False),
        (8, 64, 2, True),
        (4, 128, 1, False),
        (4, 106, 1, True),
        (4, 256, 4, False),
        (4, 96, 3, True),
    ],
)


def random_weight(
    out: int, inputs: int, bits: int, groups: int, has_zero: bool, dtype: torch.dtype, stack: tuple[int, ...] = ()
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(out + inputs)
    kind, low, high = (torch.int8, -128, 128) if bits == 8 else (torch.uint8, 0, 256)
    values = torch.randint(low, high, (*stack, out, inputs * bits // 8), generator=generator, dtype=kind)
    scale = (torch.rand(*stack, out, groups, generator=generator) + 0.5) * inputs**-0.5 / (1 << (bits - 1))
    zero = torch.randint(-8, 9, (*stack, out, groups), generator=generator, dtype=torch.int8) if has_zero else None
    zero = zero if zero is None else zero.to(DEVICE)
    return QuantizedWeight(values.to(DEVICE), scale.to(DEVICE, dtype), zero)


def random_rows(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@each_dtype
@each_form
@pytest.mark.parametrize("rows, out, split_k, stack", [(1, 33, 1, ()), (17, 40, 3, (2,))])
def test_against_ref(
    dtype: torch.dtype,
    bits: int,
    inputs: int,
    groups: int,
    has_zero: bool,
    rows: int,
    out: int,
    split_k: int,
    stack: tuple[int, ...],
) -> None:
    weight = random_weight(out, inputs, bits, groups, has_zero, dtype, stack)
    x = random_rows(*stack, rows, inputs, dtype=dtype)
    options = {
        "bias": random_rows(*stack, out, dtype=dtype),
        "residual": random_rows(*stack, rows, out // 2 if out % 2 == 0 else out, dtype=dtype),
        "silu_gate": out % 2 == 0,
    }
    expected = row_linear_ref(x, weight, **options)
    assert_near(row_linear_triton(x, weight, **options, config=replace(SMALL, split_k=split_k)), expected)


@each_dtype
@pytest.mark.parametrize("bits", [8, 4])
def test_fractional_zero_points(dtype: torch.dtype, bits: int) -> None:
    weight = random_weight(33, 96, bits, 3, True, dtype)
    weight = weight._replace(zero=weight.zero - torch.rand(weight.zero.shape, device=DEVICE))
    x = random_rows(17, 96, dtype=dtype)
    whole = row_linear_triton(x, weight, config=SMALL)
    assert_near(whole, row_linear_ref(x, weight))
    assert torch.equal(row_linear_triton(x[3:5], weight, config=SMALL), whole[3:5])


@each_dtype
@each_form
def test_a_row_has_the_same_bits_in_any_company(
    dtype: torch.dtype, bits: int, inputs: int, groups: int, has_zero: bool
) -> None:
    weight = random_weight(65, inputs, bits, groups, has_zero, dtype)
    x = random_rows(40, inputs, dtype=dtype)
    config = replace(SMALL, split_k=2)
    whole = row_linear_triton(x, weight, config=config)
    for rows in (1, 2, 15, 16, 17, 33):
        assert torch.equal(row_linear_triton(x[:rows], weight, config=config), whole[:rows])
        assert torch.equal(row_linear_triton(x[-rows:], weight, config=config), whole[-rows:])


def test_partials_are_sums_over_whole_blocks() -> None:
    weight = random_weight(32, 128, 4, 2, True, torch.float32)
    x = random_rows(3, 128, dtype=torch.float32)
    partials = row_linear_partials_triton(x, weight, config=replace(SMALL, split_k=2))
    assert partials.shape == (2, 3, 32)
    half = QuantizedWeight(
        weight.values[:, :32].contiguous(), weight.scale[:, :1].contiguous(), weight.zero[:, :1].contiguous()
    )
    first = row_linear_ref(x[:, :64], half)
    assert_close(partials[0], first, max_error=1e-5, rms_error=1e-6)
