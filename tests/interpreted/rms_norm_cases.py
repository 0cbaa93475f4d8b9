"""Cases of rms_norm."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from tests.interpreted.common import DEVICE, IMPLEMENTATION, NAN, assert_near, each_dtype
from treespec_kernels.linear.rms_norm import Norm, rms_norm_ref, rms_norm_triton

pytestmark = pytest.mark.usefixtures("poisoned_allocations")
HIDDEN = [1, 63, 123, 256, 1000]
EPS = 1e-5
# (max, rms) error relative to the RMS of the output: one rounding of it, or of the stream and of it.
BOUNDS = {torch.float32: (1e-5, 1e-6), torch.float16: (5e-3, 5e-4), torch.bfloat16: (4e-2, 4e-3)}

not_of_ref = partial(pytest.mark.skipif, IMPLEMENTATION == "ref")


def amid_nan(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy with NaN before and behind it, on the device; it starts at a multiple of 16 bytes."""
    flat = torch.full((tensor.numel() + 128,), NAN, dtype=tensor.dtype, device=DEVICE)
    middle = flat[64 : 64 + tensor.numel()].view(tensor.shape)
    return middle.copy_(tensor)


@dataclass(frozen=True)
class Inputs:
    x: torch.Tensor
    weight: torch.Tensor
    residual: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def rows(self, chosen: torch.Tensor) -> "Inputs":
        """These rows alone; of parameters by group, a group for each of them."""
        num_rows = self.x.shape[-2]

        def parameter(tensor: torch.Tensor | None) -> torch.Tensor | None:
            if tensor is None or tensor.dim() == 1:
                return tensor
            return amid_nan(tensor[chosen // (num_rows // len(tensor))])

        weight = parameter(self.weight)
        assert weight is not None
        residual = None if self.residual is None else amid_nan(self.residual[chosen])
        return Inputs(amid_nan(self.x[..., chosen, :]), weight, residual, parameter(self.bias))


def random_inputs(
    rows: int, hidden: int, dtype: torch.dtype, *, splits: int = 0, groups: int = 0, bias: bool = False
) -> Inputs:
    """With splits: partial sums and a residual. With groups: parameters by group."""
    generator = torch.Generator().manual_seed(rows * hidden + splits)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    by_group = (groups, hidden) if groups else (hidden,)
    return Inputs(
        amid_nan(normal(splits, rows, hidden) if splits else normal(rows, hidden).to(dtype)),
        amid_nan((1 + normal(*by_group) / 4).to(dtype)),
        amid_nan((2 * normal(rows, hidden)).to(dtype)) if splits else None,
        amid_nan(normal(*by_group).to(dtype)) if bias else None,
    )


def norm(inputs: Inputs, out: torch.Tensor | None = None) -> torch.Tensor:
    options = {"residual": inputs.residual, "bias": inputs.bias}
    if IMPLEMENTATION == "ref":
        return rms_norm_ref(inputs.x, Norm(inputs.weight, EPS), **options)
    return rms_norm_triton(inputs.x, Norm(inputs.weight, EPS), **options, out=out)


def parameter_of(parameter: torch.Tensor, row: int, rows: int) -> torch.Tensor:
    return parameter if parameter.dim() == 1 else parameter[row // (rows // len(parameter))]


def stream_of(inputs: Inputs) -> torch.Tensor:
    """The rows that are normed, row by row in the order the specification states; in the dtype."""
    rows = inputs.x.shape[-2]
    stream = torch.empty(rows, inputs.x.shape[-1], dtype=inputs.weight.dtype, device=DEVICE)
    for row in range(rows):
        partials = list(inputs.x[:, row]) if inputs.x.dim() == 3 else [inputs.x[row].float()]
        total = sum(partials[1:], start=partials[0])
        if inputs.bias is not None:
            total = total + parameter_of(inputs.bias, row, rows).float()
        if inputs.residual is not None:
            total = total + inputs.residual[row].float()
        stream[row] = total
    return stream


def assert_norms(inputs: Inputs) -> None:
    """Against a model in float64. The stream is a sum of given order: it is compared by equality."""
    stream = stream_of(inputs)
    out = norm(inputs)
    if inputs.residual is not None:
        assert torch.equal(inputs.residual, stream)
    rows = len(stream)
    expected = torch.empty_like(stream)
    for row in range(rows):
        x = stream[row].double()
        expected[row] = x / (x.square().mean() + EPS).sqrt() * parameter_of(inputs.weight, row, rows).double()
    assert_near(out, expected, BOUNDS)


@each_dtype
@pytest.mark.parametrize("hidden", HIDDEN)
def test_rows_in_the_dtype(hidden: int, dtype: torch.dtype) -> None:
    for rows in (1, 2, 7):
        assert_norms(random_inputs(rows, hidden, dtype))
    plain, stream = random_inputs(3, hidden, dtype), random_inputs(3, hidden, dtype, splits=1)
    assert_norms(replace(plain, residual=stream.residual))


@each_dtype
@pytest.mark.parametrize("hidden", HIDDEN)
def test_partial_sums_join_the_residual_in_place(hidden: int, dtype: torch.dtype) -> None:
    for splits in (1, 2, 3, 4):
        assert_norms(random_inputs(2, hidden, dtype, splits=splits, bias=splits % 2 == 0))


@each_dtype
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_parameters_by_group(groups: int, dtype: torch.dtype) -> None:
    for rows in (groups, 4 * groups):
        assert_norms(random_inputs(rows, 123, dtype, groups=groups))
        grouped = random_inputs(rows, 123, dtype, splits=2, groups=groups, bias=True)
        assert_norms(grouped.rows(torch.arange(rows)))
        assert_norms(replace(grouped.rows(torch.arange(rows)), weight=grouped.weight[0].clone()))
        assert_norms(replace(grouped, bias=random_inputs(1, 123, dtype, splits=1, bias=True).bias))


@each_dtype
def test_63_rows(dtype: torch.dtype) -> None:
    assert_norms(random_inputs(63, 63, dtype))
    assert_norms(random_inputs(63, 256, dtype, splits=3, groups=3, bias=True))


@not_of_ref(reason="torch's mean follows the shape")
@each_dtype
@pytest.mark.parametrize("hidden", [63, 122, 256, 1000])
def test_a_row_has_the_same_bits_in_every_pass(hidden: int, dtype: torch.dtype) -> None:
    rows = 63 if hidden == 256 else 9
    for options in ({}, {"groups": 3}, {"splits": 2}, {"splits": 4, "groups": 3, "bias": True}):
        inputs = random_inputs(rows, hidden, dtype, **options)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(hidden))
        everything, several = torch.arange(rows), order[:5]
        all_rows = inputs.rows(everything)
        expected = norm(all_rows)
        for chosen in (order, several, several[:2], order[:1], order[-1:]):
            alone = inputs.rows(chosen)
            assert torch.equal(norm(alone), expected[chosen])
            if alone.residual is not None:
                assert torch.equal(alone.residual, all_rows.residual[chosen])


def test_partials_are_added_from_the_left() -> None:
    partials = torch.tensor([1e8, 1.0, -1e8, 2.0]).view(4, 1, 1).repeat(1, 2, 8)
    inputs = Inputs(amid_nan(partials), amid_nan(torch.ones(8)), torch.zeros(2, 8, device=DEVICE))
    norm(inputs)
    assert (inputs.residual == 2.0).all()


@each_dtype
def test_the_norm_is_of_the_rounded_stream(dtype: torch.dtype) -> None:
    """One element takes up less than half a unit in the last place of the stream, which would be 0.84 units in that of
    the result: it must stay equal to the others."""
    residual, weight = torch.full((1, 64), 4096.0).to(dtype), torch.full((64,), 1.875).to(dtype)
    x = torch.zeros(1, 1, 64)
    x[..., 5] = 0.45 * 4096 * torch.finfo(dtype).eps
    inputs = Inputs(amid_nan(x), amid_nan(weight), amid_nan(residual))
    out = norm(inputs)
    assert (inputs.residual == 4096).all()
    assert (out == out[0, 0]).all()


def test_splits_may_lie_in_a_larger_buffer() -> None:
    inputs = random_inputs(3, 63, torch.float32, splits=3)
    buffer = torch.full((3, 8, 63), NAN, device=DEVICE)
    buffer[:, :3] = inputs.x
    assert_norms(replace(inputs, x=buffer[:, :3]))


@not_of_ref(reason="the specification returns new memory")
@each_dtype
def test_nothing_else_is_written(dtype: torch.dtype) -> None:
    inputs = random_inputs(3, 123, dtype, splits=2, bias=True)
    assert inputs.bias is not None
    kept = [inputs.x.clone(), inputs.weight.clone(), inputs.bias.clone()]
    buffer = torch.full((128 + 3 * 123,), NAN, dtype=dtype, device=DEVICE)
    out = buffer[64 : 64 + 3 * 123].view(3, 123)
    again = inputs.rows(torch.arange(3))
    assert norm(inputs, out) is out
    assert torch.equal(out, norm(again))
    assert buffer[:64].isnan().all() and buffer[64 + 3 * 123 :].isnan().all()
    assert all(torch.equal(*pair) for pair in zip(kept, (inputs.x, inputs.weight, inputs.bias), strict=True))


@not_of_ref(reason="the specification returns new memory")
@each_dtype
def test_rows_may_be_normed_in_place(dtype: torch.dtype) -> None:
    inputs = random_inputs(3, 123, dtype)
    expected = norm(inputs)
    assert norm(inputs, inputs.x) is inputs.x
    assert torch.equal(inputs.x, expected)


def test_a_bad_number_stays_in_its_row() -> None:
    inputs = random_inputs(4, 123, torch.float32)
    clean = norm(inputs)
    inputs.x[1, 5], inputs.x[2, 122] = NAN, float("inf")
    out = norm(inputs)
    assert torch.equal(out[[0, 3]], clean[[0, 3]])
    assert out[1].isnan().all() and out[2, 122].isnan()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_captured_norm_replays_on_new_rows() -> None:
    inputs, out = random_inputs(5, 256, torch.float16, splits=2, bias=True), torch.empty(5, 256).half().to(DEVICE)
    fresh = random_inputs(5, 256, torch.float16, splits=2, bias=True)
    assert inputs.residual is not None
    norm(inputs, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm(inputs, out)
    inputs.x.copy_(fresh.x.flip(1))
    inputs.residual.zero_()
    graph.replay()
    expected = replace(inputs, residual=torch.zeros_like(inputs.residual))
    assert torch.equal(out, norm(expected))
    assert torch.equal(inputs.residual, expected.residual)
