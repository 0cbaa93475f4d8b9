"""QKV and RoPE: the cases of each implementation, the CPU's decoder as their witness, and what is refused."""

from typing import Any

import pytest
import torch

from tests.child import run_cases
from tests.kernel_cases import environments
from treespec_kernels.attention.qkv_rope import qkv_rope_ref, qkv_rope_triton


@environments("TREESPEC_QKV_ROPE", "TREESPEC_DECODER_OPS")
def test_cases(environment: dict[str, str]) -> None:
    run_cases(["qkv_rope_cases.py", "decoder_ops_cases.py"], environment)


def fitting() -> dict[str, Any]:
    """6 rows of 4 query heads and 2 KV heads of 8 dimensions."""
    return {
        "qkv": torch.zeros(6, 64),
        "rotation": torch.zeros(10, 2, 8),
        "positions": torch.zeros(6, dtype=torch.int32),
        "slots": torch.zeros(6, dtype=torch.int64),
        "kv_layer": torch.zeros(2, 3, 2, 16, 8),
        "q_out": torch.zeros(6, 4, 8),
    }


REFUSED: list[tuple[str, torch.Tensor, str]] = [
    ("q_out", torch.zeros(6, 5, 8), r"qkv has shape \[6, 64\]; expected \[rows 6, width 72\]"),
    ("kv_layer", torch.zeros(3, 2, 16, 8), r"kv_layer has shape \[3, 2, 16, 8\]; expected \[2, num_pages"),
    ("kv_layer", torch.zeros(2, 3, 2, 16, 10), r"kv_layer has shape \[2, 3, 2, 16, 10\]; .* head_dim 8\]"),
    ("qkv", torch.zeros(2, 5, 64), r"qkv has shape \[2, 5, 64\]; expected \[splits 2, rows 6, width 64\]"),
    ("qkv", torch.zeros(2, 6, 64).half(), r"qkv has dtype torch\.float16; convert it to torch\.float32"),
    ("bias", torch.zeros(63), r"bias has shape \[63\]; expected \[width 64\]"),
    ("bias", torch.zeros(4, 64), "a parameter has 4 groups, which do not divide 6 rows"),
    ("rotation", torch.zeros(10, 2, 4), r"rotation has shape \[10, 2, 4\]; expected \[max_positions 10, 2, head_dim 8"),
]

REFUSED_BY_TRITON: list[tuple[str, torch.Tensor, str]] = [
    ("qkv", torch.zeros(6, 128)[:, ::2], r"qkv has strides \[128, 2\] for shape \[6, 64\]; make it contiguous"),
    ("qkv", torch.zeros(2, 6, 128)[..., :64], r"qkv has strides \[768, 128, 1\] .*; expected contiguous rows"),
    ("q_out", torch.zeros(6, 5, 8)[:, :4], r"q_out has strides \[40, 8, 1\] .*; make it contiguous"),
    ("kv_layer", torch.zeros(2, 3, 2, 16, 16)[..., ::2], "kv_layer has stride 2 over its last dimension"),
]


@pytest.mark.parametrize("qkv_rope", [qkv_rope_ref, qkv_rope_triton])
@pytest.mark.parametrize(("name", "tensor", "message"), REFUSED)
def test_what_does_not_fit_is_refused(qkv_rope: Any, name: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qkv_rope(**(fitting() | {name: tensor}))


@pytest.mark.parametrize(("name", "tensor", "message"), REFUSED_BY_TRITON)
def test_triton_refuses_layouts(name: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qkv_rope_triton(**(fitting() | {name: tensor}))
