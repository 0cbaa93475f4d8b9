"""Row-invariant linear layer: the specification, and configurations."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.child import run_uninterpreted
from treespec_kernels.comparison import assert_close
from treespec_kernels.launch.triton_launch import shared_bytes
from treespec_kernels.linear.row_linear import RowLinearConfig, activated_ref, row_linear_ref

CONFIG = RowLinearConfig(16, 32, 32, split_k=2, num_warps=4, num_stages=2)
# (out_features, in_features, silu_gate) of an 8B, a 1B and a 0.5B decoder and of a tiny draft.
SHAPES = [
    *((6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False)),
    *((3072, 2048, False), (2048, 2048, False), (16384, 2048, True), (2048, 8192, False)),
    *((1152, 896, False), (896, 896, False), (9728, 896, True), (896, 4864, False)),
    *((512, 256, False), (256, 256, False), (1376, 256, True), (256, 688, False), (1, 1, False)),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


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
        frozen = [replace(config, num_stages=1, larger=()) for config in (candidates[0], default)]
        assert frozen[0] == frozen[1], "the same bits, however much memory there is"
    if out_features * in_features > 1 << 22:
        # Fills an H200 (132 multiprocessors), each split with enough blocks to fill its pipeline.
        assert -(-out_features // default.block_n) * default.split_k >= 96
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


@pytest.mark.parametrize("groups", [[], [3]])
def test_an_activated_product_is_a_linear_layer(groups: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(*groups, 5, 24, generator=generator), torch.randn(*groups, 8, 24, generator=generator)
    bias = torch.randn(*groups, 8, generator=generator)
    for options in ({"silu_gate": True}, {"bias": bias, "silu_gate": True, "activation": "gelu"}, {"bias": bias}, {}):
        assert torch.equal(activated_ref(x @ weight.mT, **options), row_linear_ref(x, weight, **options))


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
