"""RMSNorm: the cases of each implementation, and what is refused."""

from typing import Any

import pytest
import torch

from tests.child import run_cases
from tests.kernel_cases import environments
from treespec_kernels.linear.rms_norm import rms_norm_ref, rms_norm_triton


@environments("TREESPEC_RMS_NORM")
def test_cases(environment: dict[str, str]) -> None:
    run_cases("rms_norm_cases.py", environment)


ROWS, WEIGHT, PARTIALS = torch.zeros(6, 8), torch.ones(8), torch.zeros(2, 6, 8)

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"x": ROWS[:, :0]}, r"x has shape \[6, 0\]; expected \[rows 6, hidden 8\]"),
    ({"weight": WEIGHT[:7]}, r"x has shape \[6, 8\]; expected \[rows 6, hidden 7\]"),
    ({"weight": torch.ones(4, 8)}, "a parameter has 4 groups, which do not divide 6 rows"),
    ({"weight": torch.ones(0, 8)}, r"weight has shape \[0, 8\]; expected .*groups and hidden 1 or more"),
    ({"x": PARTIALS}, "residual is None; partials, a bias and a post_weight need a residual to be added to"),
    ({"bias": WEIGHT}, "residual is None; partials, a bias and a post_weight need a residual to be added to"),
    ({"x": PARTIALS.half(), "residual": ROWS}, r"x has dtype torch\.float16; convert it to torch\.float32"),
    ({"x": PARTIALS[:0], "residual": ROWS}, r"x has shape \[0, 6, 8\]; expected .*, splits 1 or more"),
    ({"residual": ROWS[:5]}, r"residual has shape \[5, 8\]; expected \[rows 6, hidden 8\]"),
    ({"residual": ROWS, "bias": torch.ones(5, 8)}, "a parameter has 5 groups, which do not divide 6 rows"),
]

REFUSED_BY_TRITON: list[tuple[dict[str, Any], str]] = [
    ({"out": torch.zeros(6, 7)}, r"out has shape \[6, 7\]; expected \[rows 6, hidden 8\]"),
    ({"x": torch.zeros(6, 16)[:, ::2]}, r"x has strides \[16, 2\] for shape \[6, 8\]; make it contiguous"),
    ({"residual": torch.zeros(6, 16)[:, :8]}, r"residual has strides \[16, 1\] .*; make it contiguous"),
    ({"x": torch.zeros(2, 6, 16)[..., :8], "residual": ROWS}, r"x has strides \[96, 16, 1\] .* contiguous rows"),
    ({"x": torch.zeros(50)[1:49].view(6, 8)}, "x starts 4 bytes after a multiple of 16"),
]


@pytest.mark.parametrize("rms_norm", [rms_norm_ref, rms_norm_triton])
@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_does_not_fit_is_refused(rms_norm: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm(**({"x": ROWS, "weight": WEIGHT, "eps": 1e-5} | arguments))


@pytest.mark.parametrize(("arguments", "message"), REFUSED_BY_TRITON)
def test_triton_refuses_layouts(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm_triton(**({"x": ROWS, "weight": WEIGHT, "eps": 1e-5} | arguments))
