"""Row-invariant linear layer: the specification, configurations, what is refused, and the kernel's cases in the
interpreter or on a GPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.child import run_cases, run_uninterpreted
from tests.kernel_cases import environments
from treespec_kernels.launch.triton_launch import shared_bytes
from treespec_kernels.linear.row_linear import (
    RowLinearConfig,
    activated_ref,
    activated_triton,
    row_linear_partials_triton,
    row_linear_ref,
    row_linear_triton,
)
from treespec_kernels.tuning.testing import assert_close

CONFIG = RowLinearConfig(16, 32, 32, split_k=2, num_warps=4, num_stages=2)
# (out_features, in_features, silu_gate) of an 8B, a 1B and a 0.5B decoder and of a tiny draft.
SHAPES = [
    *((6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False)),
    *((3072, 2048, False), (2048, 2048, False), (16384, 2048, True), (2048, 8192, False)),
    *((1152, 896, False), (896, 896, False), (9728, 896, True), (896, 4864, False)),
    *((512, 256, False), (256, 256, False), (1376, 256, True), (256, 688, False), (1, 1, False)),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@environments()
def test_cases(environment: dict[str, str]) -> None:
    run_cases("row_linear_cases.py", environment)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [[], [3]])
def test_ref_is_a_linear_layer(dtype: torch.dtype, groups: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (7, 63), "weight": (46, 63), "bias": (46,), "residual": (7, 46), "residual_of_half": (7, 23)}
    t = {name: torch.randn(*groups, *shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    bounds = {"max_error": 1e-5 + torch.finfo(dtype).eps * 8, "rms_error": 1e-6 + torch.finfo(dtype).eps}
    x, weight, bias = t["x"], t["weight"], t["bias"]
    y = x.double() @ weight.double().mT
    assert_close(row_linear_ref(x, weight), y.to(dtype), **bounds)
    y += bias.double().unsqueeze(-2)
    expected = (y + t["residual"].double()).to(dtype)
    assert_close(row_linear_ref(x, weight, bias=bias, residual=t["residual"]), expected, **bounds)
    gated = F.silu(y[..., :23]) * y[..., 23:] + t["residual_of_half"].double()
    actual = row_linear_ref(x, weight, bias=bias, residual=t["residual_of_half"], silu_gate=True)
    assert_close(actual, gated.to(dtype), **bounds)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features", "silu_gate"), SHAPES)
def test_configurations(dtype: torch.dtype, out_features: int, in_features: int, silu_gate: bool) -> None:
    default = RowLinearConfig.default(dtype, out_features, in_features, silu_gate)
    for target in (None, "sm_86", "sm_87", "sm_90", "sm_120", "sm_199"):
        candidates = RowLinearConfig.candidates(dtype, out_features, in_features, silu_gate, target)
        assert candidates[0] == RowLinearConfig.default(dtype, out_features, in_features, silu_gate, target)
        assert len(set(candidates)) == len(candidates)
        for config in candidates:
            stage = (config.block_m + config.block_n) * config.block_k * dtype.itemsize
            assert config.num_stages * stage <= shared_bytes(target or "sm_90")
            assert not config.fixed_order_dot
        frozen = [replace(config, num_stages=1, larger=()) for config in (candidates[0], default)]
        assert frozen[0] == frozen[1], "the same bits, however much memory there is"
    if out_features * in_features > 1 << 22:
        # Fills an H200 (132 multiprocessors), each split with enough blocks to fill its pipeline.
        programs = -(-out_features // default.block_n) * default.split_k
        in_flight = programs * (default.num_stages - 2) * default.block_n * default.block_k * dtype.itemsize
        assert dtype == torch.float32 or in_flight > 4.5e6, "4.3 TB/s times 1.05 us"
        assert programs >= 96
        assert in_features // default.block_k // default.split_k >= 4
    if silu_gate:
        assert default.split_k == 1


def test_a_config_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="block_n is 24; it must be a power of two, 16 or more"):
        RowLinearConfig(16, 24, 32, 1, 4, 2)
    with pytest.raises(ValueError, match="block_m is 8; it must be a power of two, 16 or more"):
        RowLinearConfig(8, 16, 32, 1, 4, 2)
    with pytest.raises(ValueError, match="split_k is 0; it must be 1 or more"):
        RowLinearConfig(16, 16, 32, 0, 4, 2)
    for make in (RowLinearConfig.default, RowLinearConfig.candidates):
        with pytest.raises(
            ValueError, match=r"dtype torch\.float64 is not supported; use float16, bfloat16 or float32"
        ):
            make(torch.float64, 16, 16)
        with pytest.raises(ValueError, match=r"the weight is \[0, 16\]; both must be 1 or more"):
            make(torch.float32, 0, 16)


@pytest.mark.parametrize("groups", [[], [3]])
def test_an_activated_product_is_a_linear_layer(groups: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(*groups, 5, 24, generator=generator), torch.randn(*groups, 8, 24, generator=generator)
    bias = torch.randn(*groups, 8, generator=generator)
    for options in ({"silu_gate": True}, {"bias": bias, "silu_gate": True, "activation": "gelu"}, {"bias": bias}, {}):
        assert torch.equal(activated_ref(x @ weight.mT, **options), row_linear_ref(x, weight, **options))


@pytest.mark.parametrize("activated", [activated_ref, activated_triton])
def test_products_that_do_not_fit_are_refused(activated: Callable[..., torch.Tensor]) -> None:
    product = torch.zeros(5, 8)
    for options, message in (
        ({"activation": "tanh"}, "activation is 'tanh'; use one of silu, gelu, gelu_tanh, relu, or None"),
        ({"bias": torch.zeros(4)}, r"bias has shape \[4\]; expected \[out_features 8\]"),
        ({"product": product[:, :7], "silu_gate": True}, "as many gates as ups, and the weight has 7 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            activated(**{"product": product} | options)


X, WEIGHT = torch.zeros(5, 24), torch.zeros(8, 24)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": WEIGHT[0]}, r"weight has shape \[24\]; expected \[out_features, in_features 24\]"),
        ({"weight": WEIGHT[:0]}, r"weight has shape \[0, 24\]; expected .*, out_features 1 or more"),
        ({"x": X[0]}, r"x has shape \[24\]; expected \[rows, in_features\]"),
        ({"x": X[:, :-1]}, r"weight has shape \[8, 24\]; expected \[out_features 8, in_features 23\]"),
        ({"weight": WEIGHT.expand(2, 8, 24)}, r"x has shape \[5, 24\]; expected \[groups, rows, in_features\]"),
        (
            {"x": X.expand(3, 5, 24), "weight": WEIGHT.expand(2, 8, 24)},
            r"weight has shape \[2, 8, 24\]; expected \[groups 3, out_features",
        ),
        ({"bias": torch.zeros(5)}, r"bias has shape \[5\]; expected \[out_features 8\]"),
        ({"residual": torch.zeros(5, 4)}, r"residual has shape \[5, 4\]; expected \[rows 5, features 8\]"),
        ({"residual": torch.zeros(5, 8), "silu_gate": True}, r"residual has .*; expected \[rows 5, features 4\]"),
        ({"weight": WEIGHT[:7], "silu_gate": True}, "silu_gate needs as many gates as ups, and the weight has 7 rows"),
        ({"residual": torch.zeros(5, 8, device="meta")}, "residual is on meta and x on cpu; move it there"),
    ],
)
@pytest.mark.parametrize("row_linear", [row_linear_ref, row_linear_triton])
def test_what_does_not_fit_is_refused(
    row_linear: Callable[..., torch.Tensor], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        row_linear(**{"x": X, "weight": WEIGHT} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": torch.zeros(24, 5).T}, "x has stride 5 over its last dimension; make it contiguous"),
        ({"weight": torch.zeros(24, 8).T}, "weight has stride 8 over its last dimension; make it contiguous"),
        ({"out": torch.zeros(8, 5).T}, "out has stride 5 over its last dimension; make it contiguous"),
        ({"x": torch.zeros(5, 25)[:, :24]}, r"x has rows that do not start at multiples of 16 bytes \(address 0x.*"),
        ({"x": torch.zeros(5, 28)[:, 1:25]}, r"x has rows .* strides \[28, 1\] of 4 bytes\); make it contiguous"),
        ({"residual": torch.zeros(5, 9)[:, :8]}, "residual has rows that do not start at multiples of 16 bytes"),
        ({"out": torch.zeros(5, 9)[:, 1:]}, "out has rows that do not start at multiples of 16 bytes"),
        ({"out": torch.zeros(5, 9)}, r"out has shape \[5, 9\]; expected \[rows 5, features 8\]"),
        ({"out": torch.zeros(5, 8).half()}, r"out has dtype torch\.float16; convert it to torch\.float32"),
        ({"out": X.view(-1)[:40].view(5, 8)}, "out starts where x does, which other programs still read"),
        ({"workspace": torch.zeros(79)}, "workspace has 79 elements and 80 are needed; see workspace_size"),
        ({"workspace": torch.zeros(80).half()}, r"workspace is torch\.float16 on cpu .*expected contiguous"),
        ({"workspace": torch.zeros(160)[::2]}, r"workspace is .* with strides \[2\]; expected contiguous"),
        ({"workspace": torch.zeros(84)[1:]}, "workspace has rows that do not start at multiples of 16 bytes"),
    ],
)
def test_triton_refuses_memory_that_does_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row_linear_triton(**{"x": X, "weight": WEIGHT, "config": CONFIG} | options)


def test_partials_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"weight has shape \[8, 24\]; expected \[out_features 8, in_features 23\]"):
        row_linear_partials_triton(X[:, :-1], WEIGHT, config=CONFIG)
    with pytest.raises(ValueError, match="workspace has 1 elements and 80 are needed"):
        row_linear_partials_triton(X, WEIGHT, config=CONFIG, workspace=torch.zeros(1))


def test_no_argument_is_specialised() -> None:
    """One binary for all row counts: nothing that a launch passes may choose another one."""
    pytest.importorskip("triton")
    script = (
        "from treespec_kernels.linear.row_linear_kernels import add_splits, multiply_rows\n"
        "for kernel in (multiply_rows, add_splits):\n"
        "    print([p.name for p in kernel.params if not p.is_constexpr and not p.do_not_specialize])\n"
    )
    child = run_uninterpreted(script)
    assert child.stdout.split() == ["[]", "[]"], child.stderr
