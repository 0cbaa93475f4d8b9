"""Cases of rms_norm: the reference against float64, the kernel against the reference."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from tests.interpreted.common import DEVICE, IMPLEMENTATION, assert_near, by_row, check, each_dtype, normal, split_sums
from treespec_kernels.linear.rms_norm import Norm, rms_norm_ref, rms_norm_triton

pytestmark = pytest.mark.usefixtures("poisoned_allocations")
EPS = 1e-5

rms_norm = rms_norm_ref if IMPLEMENTATION == "ref" else rms_norm_triton


class Case(NamedTuple):
    rows: int
    hidden: int
    splits: int | None = None  # None: rows in the dtype
    residual: bool = False
    groups: int = 0  # of the norm's parameters; 0: one for all rows, without a dimension
    bias_groups: int | None = None  # None: no bias
    kind: Any = "rms"
    post: bool = False
    plain: bool = False  # the result is the stream, not normalised
    scaled: bool = False
    fp32: bool = False  # the weights of the norms


CASES = [
    Case(1, 1),
    Case(7, 123),
    Case(2, 256),
    Case(3, 63, residual=True),
    Case(4, 63, groups=2),
    Case(2, 123, 1, True),
    Case(3, 1000, 4, True, bias_groups=0),
    Case(6, 63, 2, True, 3, 3),
    Case(6, 63, 2, True, 0, 3),
    Case(6, 64, 2, True, 3, 0),
    Case(4, 64, 2, True, 2, 0, "rms_plus_one", True),
    Case(2, 123, 2, True, 0, 0, "layer"),
    Case(3, 122, 3, True, 1, None, "layer", True),
    Case(4, 64, 2, True, 2, 0, post=True, plain=True),
    Case(3, 63, residual=True, plain=True),
    Case(4, 64, 2, True, 2, 0, post=True, scaled=True),
    Case(3, 63, 2, True, scaled=True, fp32=True),
    Case(3, 64, fp32=True),
]


def arguments_of(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """A stream with a mean of 3, which shows whether it is subtracted; a norm with all that its kind has."""
    draw = normal(case.rows * case.hidden)
    held = torch.float32 if case.fp32 or case.kind == "rms_plus_one" else dtype

    def parameter(groups: int, dtype: torch.dtype) -> torch.Tensor:
        return (1 + draw(*(groups, case.hidden) if groups else (case.hidden,)) / 4).to(dtype)

    weight, post = parameter(case.groups, held), parameter(case.groups, held) if case.post else None
    shift = parameter(case.groups, dtype) if case.kind == "layer" else None
    scale = draw(*[case.groups] * (case.groups > 0), 1) if case.scaled else None
    norm = Norm(None if case.plain else weight, EPS, case.kind, shift, post, scale)
    size = (case.rows, case.hidden)
    arguments: dict[str, Any] = {"x": split_sums(draw, case.splits, *size, dtype=dtype), "norm": norm}
    if case.residual:
        arguments["residual"] = (3 + 2 * draw(*size)).to(dtype)
    if case.bias_groups is not None:
        arguments["bias"] = parameter(case.bias_groups, dtype)
    return arguments


def assert_defined(arguments: dict[str, Any]) -> None:
    """The reference, in float64 and by torch's norms."""
    x, norm, residual, bias = (arguments.get(name) for name in ("x", "norm", "residual", "bias"))
    dtype, rows = (x if residual is None else residual).dtype, x.shape[-2]

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        norm_of = F.layer_norm if norm.kind == "layer" else F.rms_norm
        return norm_of(x, x.shape[1:], eps=EPS) * by_row(weight, rows)

    stream = x.double().view(-1, *x.shape[-2:]).sum(0)
    stream = stream if bias is None else stream + by_row(bias, rows)
    stream = stream if norm.post_weight is None else normed(stream, norm.post_weight)
    if residual is not None:
        stream = (residual.double() + stream) * (1 if norm.scale is None else by_row(norm.scale, rows))
        stream = stream.to(dtype).double()
    expected = stream if norm.weight is None else normed(stream, norm.weight)
    expected = expected if norm.shift is None else expected + by_row(norm.shift, rows)
    assert_near(rms_norm_ref(**arguments), expected.to(dtype))
    if residual is not None:
        assert_near(residual, stream.to(dtype))


@each_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows(case: Case, dtype: torch.dtype) -> None:
    arguments = arguments_of(case, dtype)
    if IMPLEMENTATION == "ref":
        assert_defined(arguments)
        return
    equal_bits = () if case.post else ("residual",)  # a sum in a stated order
    grouped, writes = ("norm", "bias") if case.groups > 1 or case.bias_groups else (), ("residual",) * case.residual
    check("rms_norm", arguments, num_rows=case.rows, equal_bits=equal_bits, grouped=grouped, writes=writes)


@each_dtype
def test_the_norm_is_of_the_rounded_stream(dtype: torch.dtype) -> None:
    """An element is rounded to the others in the stream, and would be 0.84 units in the last place of the result."""
    residual = torch.full((1, 64), 4096.0, device=DEVICE).to(dtype)
    x = torch.zeros(1, 1, 64, device=DEVICE)
    x[..., 5] = 0.45 * 4096 * torch.finfo(dtype).eps
    weight = torch.full((64,), 1.875, device=DEVICE).to(dtype)
    out = rms_norm(x, Norm(weight, EPS), residual=residual)
    assert (residual == 4096).all()
    assert (out == out[0, 0]).all()
