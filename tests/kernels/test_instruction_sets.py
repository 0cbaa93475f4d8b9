"""Products on a CPU: one order of summation for any number of rows, with every instruction set that the machine has."""

import ctypes
import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.helpers.gguf_files import block_weight, reading
from tests.helpers.libraries import PAIRS, decoder_library, instruction_sets
from tests.helpers.quantized_checkpoints import needs_compiler, random_weight
from treespec_kernels.cpu.compiled_linear import CompiledLinear
from treespec_kernels.cpu.cpu_library import find_compiler
from treespec_kernels.linear.quantized import BLOCK_TYPES, BlockWeight, QuantizedWeight, dequantized, integers

pytestmark = needs_compiler
NATIVE = "native"  # the library that engines use, which other tests need anyway
QUICK = [name for name in ("avx2", NATIVE) if name in (*instruction_sets(), NATIVE)]  # emulation takes long
PAIRED = {PAIRS, NATIVE} if PAIRS in instruction_sets() and "amx" not in instruction_sets() else {PAIRS}
sets = pytest.mark.parametrize(
    "names", [pytest.param(QUICK, id="quick"), pytest.param(instruction_sets(), id="all", marks=pytest.mark.slow)]
)
ROWS = (1, 2, 5, 16, 17, 33, 70)
FORMS = [  # outputs, inputs, bits, groups, type of zero points
    (130, 704, 4, 22, torch.int8),
    (64, 192, 4, 2, None),
    (97, 96, 8, 1, None),
    (70, 640, 8, 20, torch.int8),
    (70, 320, 8, 20, None),
    (97, 192, 4, 12, torch.int8),
    (70, 576, 8, 1, None),
    (64, 512, 4, 4, torch.int8),
    (64, 576, 4, 9, torch.int8),
]


@functools.cache
def library(instructions: str) -> ctypes.CDLL:
    return decoder_library(None if instructions == NATIVE else instructions)


def inputs(rows: int, size: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, size, generator=generator)
    if kind == "extreme":  # products and sums become denormal, infinite and NaN
        x *= 2.0 ** torch.randint(-80, 60, x.shape, generator=generator)
        x[::3] *= 2.0**-60
        x[-1, 1] = torch.inf
        x[rows // 2, -2] = torch.nan
    return x.bfloat16()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, where NaN equals NaN and 0 differs from -0."""
    number = ~a.isnan()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a[number].view(torch.int16), b[number].view(torch.int16))


def weights() -> dict[str, Tensor | QuantizedWeight | BlockWeight]:
    generator = torch.Generator().manual_seed(3)
    made: dict[str, Tensor | QuantizedWeight | BlockWeight] = {
        f"dense {out}x{size}": torch.randn(out, size, generator=generator).bfloat16()
        for out, size in ((130, 704), (64, 48), (200, 32), (7, 96), (40, 704))
    }
    made |= {f"{form}": random_weight(*form) for form in FORMS}
    made |= {kind: block_weight(kind, 70, 512) for kind in BLOCK_TYPES}
    return made


@pytest.mark.parametrize("kind", ["normal", "extreme"])
@pytest.mark.parametrize("integer", [False, True])
@sets
def test_bits_depend_on_no_number_of_rows_and_no_instruction_set(
    names: Sequence[str], kind: str, integer: bool
) -> None:
    compared = 0
    for weight in weights().values():
        if integer and isinstance(weight, Tensor):
            continue
        x = inputs(max(ROWS), weight.shape[-1], kind)
        first: Tensor | None = None
        for name in names:
            linear = CompiledLinear(library(name), weight, None, torch.bfloat16, 2, integer)
            alone = torch.cat([linear(row) for row in x.split(1)])
            for rows in ROWS:
                assert same_bits(linear(x[:rows]), alone[:rows]), (name, rows)
                assert same_bits(linear(x[-rows:]), alone[-rows:]), (name, rows)
                compared += 1
            if integer or name not in PAIRED:
                first = alone if first is None else first
                assert same_bits(alone, first), name
    assert compared >= len(ROWS) * (len(FORMS) + len(BLOCK_TYPES)) * 2


@sets
def test_dense_products_have_the_order_of_amx(names: Sequence[str]) -> None:
    """Intel SDM, TDPBF16PS: per 32 inputs, one chain of FMAs over the even inputs and one over the odd ones."""
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(rows, 96, generator=generator).bfloat16() for rows in (7, 40))
    total = torch.zeros(7, 40)
    for block in range(0, 96, 32):
        chains = [torch.zeros(7, 40), torch.zeros(7, 40)]
        for i in range(block, block + 32):  # exact in float64, so that rounding to float32 is that of an FMA
            chains[i % 2] = (chains[i % 2] + x[:, i, None].double() * weight[None, :, i].double()).float()
        total += chains[0] + chains[1]
    for name in names:
        if name not in PAIRED:
            linear = CompiledLinear(library(name), weight, None, torch.bfloat16, 1)
            assert torch.equal(linear(x), total.bfloat16()), name


@sets
def test_int8_activations_are_rounded_per_row_and_group(names: Sequence[str]) -> None:
    for weight in weights().values():
        if isinstance(weight, Tensor):
            continue
        x = inputs(5, weight.shape[1], "normal")
        stored, weight = weight, reading(weight)
        x[2, : weight.group] = 0.0
        parts = x.float().unflatten(1, (-1, weight.group))
        largest = parts.abs().amax(-1, keepdim=True)
        q = torch.where(largest > 0, parts * (127.0 / largest), 0.0).round()
        total = torch.zeros(5, weight.out_features, dtype=torch.float64)
        grouped = integers(weight).double().unflatten(1, (-1, weight.group))
        for g in range(q.shape[1]):
            sums = q[:, g].double() @ grouped[:, g].T
            if weight.zero is not None:
                sums -= weight.zero[:, g].double() * q[:, g].double().sum(-1, keepdim=True)
            total += sums * weight.scale[:, g].double() * (largest[:, g] / 127.0).double()
        exact = x.double() @ dequantized(weight).double().T
        for name in names:
            y = CompiledLinear(library(name), stored, None, torch.bfloat16, 1, integer=True)(x).double()
            error = (y - total).abs().max()
            assert error <= 2.0**-7 * total.abs().max(), name  # rounding to bfloat16
            assert 0 < (total - exact).norm() / exact.norm() < 0.02


def test_instruction_set_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREESPEC_CPU", "amx-emulated")
    assert find_compiler()[1:] == ("-DTILES=2",)
